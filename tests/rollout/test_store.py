"""The store: every transition, what a restart makes of the states, refusals."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from m2po_megatron.data.prompts import Cursor
from m2po_megatron.rollout.errors import StoreError
from m2po_megatron.rollout.schema import GroupRecord
from m2po_megatron.rollout.store import RolloutStore
from tests.rollout.samples import assert_same, make_prompt, make_trajectory


def open_store(
    path: Path, incarnation: int = 0, start_version: int = 0, consumed: int = 0, create: bool = True
) -> RolloutStore:
    store = RolloutStore(path, create=create)
    store.begin_incarnation(incarnation, start_version, consumed)
    return store


def admit(store: RolloutStore, position: int, version: int = 0) -> GroupRecord:
    record = GroupRecord(position, 0, "running", make_prompt(position), Cursor(0, position))
    return store.admit(record, Cursor(0, position + 1), version)


def ready(store: RolloutStore, position: int, version: int | list[int] = 0, incarnation: int = 0) -> GroupRecord:
    record = admit(store, position)
    trajectories = [make_trajectory(record.group_id, s, versions=version) for s in range(2)]
    return store.finish(record, trajectories, incarnation)


def test_a_group_from_admission_to_trained(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    record = admit(store, 0)
    assert store.counts()["running"] == 1
    originals = [make_trajectory("g0", s, versions=[3, 3, 5, 5]) for s in range(2)]
    record = store.finish(record, originals, 0)
    assert (record.state, record.oldest_version) == ("ready", 3)
    (group,) = store.lease([record])
    assert group.prompt == make_prompt(0)
    for left, right in zip(group.trajectories, originals, strict=True):
        assert_same(left, right)
    assert store.counts()["leased"] == 1
    store.lease([record.in_state("leased")])  # asking again changes nothing
    store.trained(0, 1)
    assert store.counts() == {"pending": 0, "running": 0, "ready": 0, "leased": 0, "trained": 1, "dropped": 0}


def test_a_transition_from_the_wrong_state_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    record = admit(store, 0)
    with pytest.raises(StoreError, match="group g0 is not ready, so it cannot become leased"):
        store.lease([record])
    assert store.counts()["running"] == 1
    first = ready(store, 1)
    with pytest.raises(StoreError, match="g0 is not ready"):
        store.lease([first, record])
    assert store.counts()["ready"] == 1  # one transaction: the first was not leased either


def test_dropping_keeps_the_record_and_queues_the_prompt_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    records = [ready(store, 0), ready(store, 1)]
    again = store.drop(records[:1], "stale")
    assert [(r.position, r.attempt, r.state, r.prompt) for r in again] == [(0, 1, "pending", make_prompt(0))]
    assert again[0].group_id == "g0r1"
    assert store.dropped_by_reason() == {"stale": 1}
    assert store.counts()["pending"] == 1
    running = store.run(again[0], 4)
    store.finish(running, [make_trajectory("g0r1", 0, versions=4)], 0)
    assert [r.oldest_version for r in store.records(("ready",))] == [4, 0]
    assert store.next_position() == 2


def test_restart_puts_every_state_where_the_checkpoint_says(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    for position in range(6):
        ready(store, position, version=0)
    admit(store, 6)
    records = store.records(("ready",))
    store.lease(records[:4])
    store.trained(0, 4)  # trained up to 4, but the checkpoint has only 2
    store.lease(records[4:5])
    store.close()

    store = open_store(tmp_path / "s", 1, start_version=1, consumed=2, create=False)
    assert [r.position for r in store.records(("trained",))] == [0, 1]
    assert [r.position for r in store.records(("ready",))] == [2, 3, 4, 5]
    assert [r.position for r in store.records(("pending",))] == [6]
    assert store.counts()["running"] == store.counts()["leased"] == 0
    assert store.cursor() == Cursor(0, 7)
    assert store.next_position() == 7


def test_tokens_of_an_abandoned_timeline_are_aged(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    ready(store, 0, version=[8, 9, 12, 13])
    store.close()
    store = open_store(tmp_path / "s", 1, start_version=10, consumed=0, create=False)
    (record,) = store.records(("ready",))
    assert record.oldest_version == 7  # version 13 lies 3 beyond the fork at 10: older than version 8
    (group,) = store.lease([record])
    assert group.trajectories[0].versions.tolist() == [-1, -1, -1, 8, 9, 8, 7]
    assert group.oldest_version == record.oldest_version


def test_the_incarnation_rises_even_if_the_trainer_repeats_itself(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        store = RolloutStore(tmp_path / "s", create=False)
        assert store.begin_incarnation(1, 5, 0) == expected
        store.close()


def test_a_fresh_run_refuses_the_groups_of_another(tmp_path: Path) -> None:
    open_store(tmp_path / "s").close()
    store = open_store(tmp_path / "s")  # nothing in it yet: a start that failed may be repeated
    admit(store, 0)
    store.close()
    with pytest.raises(StoreError, match="already holds rollouts.*Resume that run.*--run-dir"):
        RolloutStore(tmp_path / "s", create=True)


def test_a_second_controller_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2po_megatron.rollout.store.BUSY_TIMEOUT_S", 0.05)
    store = open_store(tmp_path / "s")
    with pytest.raises(StoreError, match="another controller"):
        RolloutStore(tmp_path / "s", create=False)
    store.close()
    RolloutStore(tmp_path / "s", create=False).close()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "s")
    database.execute("CREATE TABLE groups(x)")
    database.execute("PRAGMA user_version = 99")
    database.commit()
    database.close()
    with pytest.raises(StoreError, match="schema version 99, this program knows 1"):
        RolloutStore(tmp_path / "s", create=False)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("not a database" * 100)
    with pytest.raises(StoreError, match="cannot use the rollout store"):
        RolloutStore(tmp_path / "s", create=False)
