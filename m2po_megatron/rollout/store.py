"""The durable record of a run's groups: SQLite in the run directory, opened by the controller alone while a run is on.

Tables and states: rollout/schema.py.

Every method that changes something is one transaction. Calls may come from different threads; a lock lets in one at a
time.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from m2po_megatron.data.prompts import Cursor
from m2po_megatron.data.trajectory import PROMPT_VERSION, Group, Prompt, Trajectory
from m2po_megatron.rollout.codec import pack_arrays, unpack_arrays
from m2po_megatron.rollout.errors import StoreError
from m2po_megatron.rollout.schema import GROUP_COLUMNS, SCHEMA, SCHEMA_VERSION, STATES, GroupRecord
from m2po_megatron.rollout.staleness import effective_version

BUSY_TIMEOUT_S = 10.0
"""How long an opener waits for a controller that is just ending."""


class RolloutStore:
    """The groups of a run and their states."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open the store at `path`; with `create`, one that holds groups is refused. StoreError says what to do."""
        self._path = path
        self._lock = threading.RLock()
        self._starts: dict[int, int] = {}
        existed = path.exists()
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            # Exclusive: a second controller on the same run directory must fail at once, not corrupt the positions.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._prepare(existed, create)
        except sqlite3.Error as error:
            self._db.close()
            raise StoreError(
                f"cannot use the rollout store {path}: {error} (does another controller hold it?)"
            ) from error
        except StoreError:
            self._db.close()
            raise

    def _prepare(self, existed: bool, create: bool) -> None:
        with self._transaction():
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found == 0 and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in filter(str.strip, SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif found != SCHEMA_VERSION:
                raise StoreError(
                    f"{self._path} has schema version {found}, this program knows {SCHEMA_VERSION}: "
                    "use the version of the program that wrote it, or a fresh --run-dir"
                )
        if existed and create:
            if self._db.execute("SELECT 1 FROM groups LIMIT 1").fetchone():
                raise StoreError(
                    f"{self._path} already holds rollouts of an earlier run. Resume that run (--load its checkpoint), or "
                    "give a fresh --run-dir, or remove the file to discard them"
                )
            self._db.execute("DELETE FROM incarnations")  # of a start that failed before its first group
        elif existed:
            self._starts = dict(self._db.execute("SELECT incarnation, start_version FROM incarnations"))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def begin_incarnation(self, at_least: int, start_version: int, consumed_positions: int) -> int:
        """Take the store over for a start of the run that has trained the groups below `consumed_positions`.

        Returns this start's incarnation: `at_least`, or one more than the last one known here, since a start that crashed
        before its first checkpoint has used up a number, too.

        Those are trained; running ones are pending again; those leased or trained later are ready again (the weights
        that had consumed them are gone). Ready groups keep their tokens, aged on the new timeline.
        """
        with self._transaction() as db:
            known = db.execute("SELECT max(incarnation) FROM incarnations").fetchone()[0]
            incarnation = at_least if known is None else max(at_least, int(known) + 1)
            db.execute("INSERT INTO incarnations VALUES (?, ?)", (incarnation, start_version))
            db.execute("UPDATE groups SET state = 'pending' WHERE state = 'running'")
            db.execute(
                "UPDATE groups SET state = 'ready' WHERE state IN ('leased', 'trained') AND position >= ?",
                (consumed_positions,),
            )
            db.execute(
                "UPDATE groups SET state = 'trained' WHERE state IN ('ready', 'leased') AND position < ?",
                (consumed_positions,),
            )
            db.execute(
                "UPDATE groups SET state = 'dropped', reason = 'consumed' WHERE state = 'pending' AND position < ?",
                (consumed_positions,),
            )
            self._starts = dict(db.execute("SELECT incarnation, start_version FROM incarnations"))
        return incarnation

    @property
    def starts(self) -> dict[int, int]:
        """Every incarnation so far and the version it started from."""
        return dict(self._starts)

    def next_position(self) -> int:
        """One more than the highest position admitted so far."""
        with self._lock:
            return int(self._db.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()[0])

    def cursor(self) -> Cursor | None:
        """Where the prompt order continues; None in a new store."""
        with self._lock:
            row = self._db.execute("SELECT value FROM meta WHERE key = 'prompt_cursor'").fetchone()
        if row is None:
            return None
        epoch, index = row[0].split(":")
        return Cursor(int(epoch), int(index))

    def admit(self, record: GroupRecord, cursor_after: Cursor, admitted_version: int) -> GroupRecord:
        """A new group, at once running; the prompt cursor moves with it."""
        with self._transaction() as db:
            self._insert(db, record, "running", admitted_version)
            db.execute(
                "INSERT OR REPLACE INTO meta VALUES ('prompt_cursor', ?)",
                (f"{cursor_after.epoch}:{cursor_after.index}",),
            )
        return replace(record, state="running")

    def run(self, record: GroupRecord, admitted_version: int) -> GroupRecord:
        """pending -> running."""
        with self._transaction() as db:
            self._move(db, [record], "pending", "running")
            db.execute(
                "UPDATE groups SET admitted_version = ? WHERE position = ? AND attempt = ?",
                (admitted_version, record.position, record.attempt),
            )
        return replace(record, state="running")

    def finish(self, record: GroupRecord, trajectories: list[Trajectory], incarnation: int) -> GroupRecord:
        """running -> ready, with the scored trajectories, their versions being on the timeline of `incarnation`."""
        oldest = min(t.oldest_version for t in trajectories)
        newest = max(int(t.versions.max()) for t in trajectories)
        rows = [
            (record.position, record.attempt, i, t.id, t.finish_reason, t.reward, t.response_length, pack_arrays(t))
            for i, t in enumerate(trajectories)
        ]
        with self._transaction() as db:
            self._move(db, [record], "running", "ready")
            db.execute(
                "UPDATE groups SET oldest_version = ?, newest_version = ?, incarnation = ? WHERE position = ? AND attempt = ?",
                (oldest, newest, incarnation, record.position, record.attempt),
            )
            db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return replace(record, state="ready", oldest_version=oldest)

    def lease(self, records: list[GroupRecord]) -> list[Group]:
        """ready (or leased already) -> leased; the groups with their trajectories, in the order given."""
        with self._transaction() as db:
            self._move(db, [r for r in records if r.state != "leased"], "ready", "leased")
            return [self._read_group(db, record) for record in records]

    def trained(self, first_position: int, end_position: int) -> None:
        """leased -> trained for the positions in [first, end)."""
        with self._transaction() as db:
            db.execute(
                "UPDATE groups SET state = 'trained' WHERE state = 'leased' AND position >= ? AND position < ?",
                (first_position, end_position),
            )

    def drop(self, records: list[GroupRecord], reason: str) -> list[GroupRecord]:
        """-> dropped, counted by `reason`; returns the next attempts at the same positions and prompts, pending."""
        again = [replace(r, attempt=r.attempt + 1, state="pending", oldest_version=None) for r in records]
        with self._transaction() as db:
            for record in records:
                self._move(db, [record], record.state, "dropped")
                db.execute(
                    "UPDATE groups SET reason = ? WHERE position = ? AND attempt = ?",
                    (reason, record.position, record.attempt),
                )
                db.execute(
                    "DELETE FROM trajectories WHERE position = ? AND attempt = ?", (record.position, record.attempt)
                )
            for record in again:
                self._insert(db, record, "pending", None)
        return again

    def records(self, states: tuple[str, ...]) -> list[GroupRecord]:
        """The groups in these states, by position."""
        marks = ", ".join("?" * len(states))
        with self._lock:
            rows = self._db.execute(
                f"SELECT {GROUP_COLUMNS} FROM groups WHERE state IN ({marks}) ORDER BY position", states
            ).fetchall()
        return [self._record(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Groups by state, every state named."""
        with self._lock:
            found = dict(self._db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        return {state: int(found.get(state, 0)) for state in STATES}

    def dropped_by_reason(self) -> dict[str, int]:
        with self._lock:
            return dict(
                self._db.execute(
                    "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"
                ).fetchall()
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _insert(self, db: sqlite3.Connection, record: GroupRecord, state: str, admitted_version: int | None) -> None:
        db.execute(
            "INSERT INTO groups(position, attempt, state, prompt_id, prompt, answer, epoch, prompt_index, admitted_version) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(record.position, record.attempt, state, record.prompt.id, record.prompt.text, record.prompt.answer),
                *(record.place.epoch, record.place.index, admitted_version),
            ),
        )

    def _move(self, db: sqlite3.Connection, records: list[GroupRecord], before: str, after: str) -> None:
        """Change states, refusing a group that is not in the state it must be in."""
        for record in records:
            changed = db.execute(
                "UPDATE groups SET state = ? WHERE position = ? AND attempt = ? AND state = ?",
                (after, record.position, record.attempt, before),
            ).rowcount
            if changed != 1:
                raise StoreError(f"group {record.group_id} is not {before}, so it cannot become {after}")

    def _record(self, row: tuple) -> GroupRecord:  # type: ignore[type-arg]
        position, attempt, state, prompt_id, text, answer, epoch, index, oldest, newest, incarnation = row
        if oldest is not None:
            # On an abandoned timeline the newest token may be the one that is furthest away.
            oldest = min(effective_version(version, incarnation, self._starts) for version in (oldest, newest))
        prompt = Prompt(id=prompt_id, text=text, answer=answer)
        return GroupRecord(position, attempt, state, prompt, Cursor(epoch, index), oldest)

    def _read_group(self, db: sqlite3.Connection, record: GroupRecord) -> Group:
        key = (record.position, record.attempt)
        incarnation = db.execute("SELECT incarnation FROM groups WHERE position = ? AND attempt = ?", key).fetchone()[0]
        trajectories = []
        for trajectory_id, finish_reason, reward, blob in db.execute(
            "SELECT id, finish_reason, reward, arrays FROM trajectories WHERE position = ? AND attempt = ? ORDER BY sample",
            key,
        ):
            arrays = unpack_arrays(blob)
            arrays["versions"] = self._aged(arrays["versions"], incarnation)
            trajectories.append(
                Trajectory(
                    id=trajectory_id, group_id=record.group_id, finish_reason=finish_reason, reward=reward, **arrays
                )
            )
        return Group(id=record.group_id, prompt=record.prompt, trajectories=trajectories)

    def _aged(self, versions: np.ndarray, incarnation: int) -> np.ndarray:
        """`versions` of `incarnation` on the current timeline (rollout/staleness.py, effective_version)."""
        if all(later <= incarnation for later in self._starts):
            return versions
        aged = versions.copy()
        for version in np.unique(versions):
            if version != PROMPT_VERSION:
                aged[versions == version] = effective_version(int(version), incarnation, self._starts)
        return aged
