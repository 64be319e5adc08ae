"""Which published weights the engines load, and when: the newest wins, but never while somebody needs a fixed version."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.engines import EnginePool
from m2po_megatron.rollout.errors import RolloutError

logger = logging.getLogger(__name__)


def next_to_load(pending: Iterable[int], held: Iterable[int], loaded: int) -> int | None:
    """The version to load now, or None.

    pending  published versions not loaded yet
    held     versions somebody evaluates (or waits for, to evaluate)
    loaded   what the engines have

    Without a hold, the newest. A hold on a version up to `loaded` is being served: nothing is loaded. A hold on a later
    one lets the engines advance up to it and not past it, unless it was overtaken before the hold was known.
    """
    candidates = sorted(version for version in pending if version > loaded)
    if not candidates:
        return None
    holds = list(held)
    if not holds:
        return candidates[-1]
    first = min(holds)
    if first <= loaded:
        return None
    return max((version for version in candidates if version <= first), default=candidates[0])


class Publisher:
    """Loads published versions into the pool, one after the other."""

    def __init__(self, pool: EnginePool, start_version: int, changes: Changes) -> None:
        self._pool = pool
        self._changes = changes
        self._pending: dict[int, str] = {}
        self._held: Counter[int] = Counter()
        self._loading = False
        self._loaded = start_version
        self._lost = -1  # the newest version whose directory was gone when its turn came

    @property
    def pending(self) -> list[int]:
        return sorted(self._pending)

    @property
    def newest(self) -> int:
        """The newest version that is loaded or will be."""
        return max([self._loaded, *self._pending])

    def publish(self, path: str, version: int) -> None:
        """Have `path` loaded as `version`, soon. Versions that were overtaken and that nobody holds are forgotten."""
        if version < self._loaded:
            raise RolloutError(f"version {version} was published after version {self._loaded}: versions only rise")
        if version == self._loaded:
            return
        if not Path(path).is_dir():
            raise RolloutError(f"published weights {path} (version {version}) are not a directory")
        self._pending[version] = path
        self._changes.notify()

    @asynccontextmanager
    async def hold(self, version: int | None = None) -> AsyncIterator[int]:
        """Within the block every living engine serves one version, which is given: `version`, or a newer one if that was
        loaded already; None = whatever is served now. Waits for `version` to be loaded; RolloutError if it never will be."""
        wanted = self._loaded if version is None else version
        self._held[wanted] += 1
        self._changes.notify()
        try:
            await self._changes.wait_until(
                lambda: not self._loading and (self._loaded >= wanted or self._is_lost(wanted))
            )
            if self._loaded < wanted:
                raise RolloutError(f"version {wanted} will not be loaded: its published weights are gone")
            yield self._loaded
        finally:
            self._held[wanted] -= 1
            self._held += Counter()
            self._changes.notify()

    def _is_lost(self, version: int) -> bool:
        """Whether `version` was published, is gone, and nothing at least as new is on its way."""
        return self.newest < version <= self._lost

    def _next(self) -> int | None:
        return next_to_load(self._pending, self._held, self._loaded)

    async def run(self) -> None:
        """Load what is due, for ever."""
        while True:
            await self._changes.wait_until(lambda: self._next() is not None)
            version = self._next()
            assert version is not None
            path = self._pending[version]
            if not Path(path).is_dir():
                # Asking the engines to load it would only fence them.
                logger.warning("published weights %s are gone before version %d was loaded; skipping it", path, version)
                del self._pending[version]
                self._lost = max(self._lost, version)
                self._changes.notify()
                continue
            self._loading = True
            try:
                await self._pool.load(path, version)
            finally:
                self._loading = False
            self._loaded = version
            self._pending = {later: place for later, place in self._pending.items() if later > version}
            logger.info("engines have version %d", version)
            self._changes.notify()
