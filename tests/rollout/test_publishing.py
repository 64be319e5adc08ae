"""The publisher: which version is loaded when, and what a hold on a version means."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.publishing import Publisher, next_to_load
from tests.rollout.fake_engine import make_pool, run_bounded


@pytest.mark.parametrize(
    ("pending", "held", "loaded", "expected"),
    [
        ([], [], 3, None),
        ([4, 5, 6], [], 3, 6),
        ([3], [], 3, None),
        ([4, 5], [3], 3, None),  # being served
        ([4, 5], [2], 3, None),  # overtaken before it began: served at 3
        ([4, 5, 6], [5], 3, 5),
        ([4, 6], [5], 3, 4),
        ([6, 7], [5], 3, 6),  # 5 is not to be had any more: the next one
        ([4, 5, 6], [6, 5], 3, 5),
        ([4, 5, 6], [6, 3], 3, None),
    ],
)
def test_next_to_load(pending: list[int], held: list[int], loaded: int, expected: int | None) -> None:
    assert next_to_load(pending, held, loaded) == expected


def test_the_newest_publication_wins_and_a_hold_keeps_its_version(tmp_path: Path) -> None:
    async def test() -> None:
        pool, clients, changes = make_pool(1)
        publisher = Publisher(pool, 0, changes)
        loop = asyncio.ensure_future(publisher.run())
        publisher.publish(str(tmp_path), 1)
        publisher.publish(str(tmp_path), 2)
        await changes.wait_until(lambda: pool.loaded_version() == 2)
        assert clients[0].calls.count("update_weights_from_disk") == 1
        async with publisher.hold() as version:
            assert version == 2
            publisher.publish(str(tmp_path), 3)
            for _ in range(50):
                await asyncio.sleep(0)
            assert pool.loaded_version() == 2
        await changes.wait_until(lambda: pool.loaded_version() == 3)
        loop.cancel()

    run_bounded(test)


def test_a_hold_on_a_coming_version_gets_exactly_that(tmp_path: Path) -> None:
    async def test() -> None:
        pool, _, changes = make_pool(1)
        publisher = Publisher(pool, 0, changes)
        seen: list[int] = []

        async def evaluate() -> None:
            async with publisher.hold(2) as version:
                seen.append(version)
                await asyncio.sleep(0)
                assert pool.loaded_version() == version

        waiting = asyncio.ensure_future(evaluate())
        loop = asyncio.ensure_future(publisher.run())
        for version in (1, 2, 3):
            publisher.publish(str(tmp_path), version)
            await asyncio.sleep(0)
        await waiting
        await changes.wait_until(lambda: pool.loaded_version() == 3)
        assert seen == [2]
        loop.cancel()

    run_bounded(test)


def test_a_hold_on_weights_that_vanished_is_an_error_and_the_next_are_loaded(tmp_path: Path) -> None:
    async def test() -> None:
        pool, clients, changes = make_pool(1)
        publisher = Publisher(pool, 0, changes)
        vanishing = tmp_path / "v1"
        vanishing.mkdir()
        publisher.publish(str(vanishing), 1)
        vanishing.rmdir()
        loop = asyncio.ensure_future(publisher.run())
        with pytest.raises(RolloutError, match="version 1 will not be loaded: its published weights are gone"):
            async with publisher.hold(1):
                pass
        assert clients[0].calls == [] and pool.engines[0].alive
        publisher.publish(str(tmp_path), 2)
        async with publisher.hold(1) as version:
            assert version == 2
        loop.cancel()

    run_bounded(test)


def test_bad_publications(tmp_path: Path) -> None:
    async def test() -> None:
        pool, _, changes = make_pool(1)
        publisher = Publisher(pool, 4, changes)
        publisher.publish(str(tmp_path), 4)  # what is loaded already: nothing to do
        assert publisher.pending == []
        with pytest.raises(RolloutError, match="version 3 was published after version 4"):
            publisher.publish(str(tmp_path), 3)
        with pytest.raises(RolloutError, match=r"absent \(version 5\) are not a directory"):
            publisher.publish(str(tmp_path / "absent"), 5)

    run_bounded(test)
