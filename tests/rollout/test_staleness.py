"""The admission rule: exact values, and a simulation that looks for deadlocks and broken bounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.rollout.staleness import (
    Schedule,
    effective_version,
    parse_weight_version,
    refusal,
    weight_version,
    within_bound,
)

SCHEDULE = Schedule(
    groups_per_batch=2,
    updates_per_batch=4,
    publish_interval=2,
    max_staleness=4,
    pipeline_depth=1,
    group_size=8,
    max_concurrent=24,
)


def test_refusal_names_the_rule_that_holds_a_group_back() -> None:
    def ask(position: int, loaded: int, batch: int = 0, running: int = 0) -> str | None:
        return refusal(SCHEDULE, position, loaded_version=loaded, current_batch=batch, running_trajectories=running)

    assert ask(0, 0) is None
    assert ask(3, 0) is None  # batch 1 starts at version 4: exactly 4 updates old
    assert ask(4, 0) == "staleness"  # batch 2 starts at 8
    assert ask(4, 3, batch=1) == "staleness"
    assert ask(4, 4, batch=1) is None
    assert ask(4, 4, batch=0) == "depth"
    assert ask(0, 0, running=16) is None
    assert ask(0, 0, running=17) == "concurrency"


def test_zero_staleness_waits_for_the_weights_of_the_batch_itself() -> None:
    schedule = replace(SCHEDULE, max_staleness=0, publish_interval=4)
    schedule.validate()
    assert refusal(schedule, 2, loaded_version=0, current_batch=1, running_trajectories=0) == "staleness"
    assert refusal(schedule, 2, loaded_version=4, current_batch=1, running_trajectories=0) is None


@pytest.mark.parametrize(
    ("interval", "updates", "least"), [(1, 4, 0), (4, 4, 0), (8, 4, 4), (3, 2, 2), (6, 4, 4), (5, 5, 0)]
)
def test_smallest_staleness(interval: int, updates: int, least: int) -> None:
    schedule = replace(SCHEDULE, publish_interval=interval, updates_per_batch=updates, max_staleness=least)
    assert schedule.smallest_staleness() == least
    schedule.validate()
    if least:
        with pytest.raises(
            ValueError, match=f"--max-staleness {least - 1} can never be met.*--max-staleness {least} or more"
        ):
            replace(schedule, max_staleness=least - 1).validate()


def test_smallest_staleness_is_what_batches_really_meet() -> None:
    for interval in range(1, 13):
        for updates in range(1, 13):
            schedule = replace(SCHEDULE, publish_interval=interval, updates_per_batch=updates)
            ages = {(batch * updates) % interval for batch in range(interval)}
            assert schedule.smallest_staleness() == max(ages)


def test_a_group_that_never_fits_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="--max-concurrent-rollouts 7 is smaller than --group-size 8"):
        replace(SCHEDULE, max_concurrent=7).validate()


def simulate(schedule: Schedule, batches: int, engines: int, seed: int) -> int:
    """Random interleaving of engines, trainer and publications under the real rule; the greatest staleness consumed."""
    rng = random.Random(seed)
    engine_versions = [0] * engines
    target = 0  # the newest published version
    version, batch, left_in_batch = 0, 0, 0
    next_position, worst = 0, 0
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    while batch < batches:
        events = []
        may_start = refusal(
            schedule,
            next_position,
            loaded_version=min(engine_versions),
            current_batch=batch,
            running_trajectories=len(running) * schedule.group_size,
        )
        if may_start is None:
            events.append("admit")
        events += ["finish"] if running else []
        events += ["load"] if min(engine_versions) < target else []
        positions = range(batch * schedule.groups_per_batch, (batch + 1) * schedule.groups_per_batch)
        if left_in_batch or all(p in ready for p in positions):
            events.append("train")
        assert events, f"deadlock at batch {batch}: {schedule}, engines at {engine_versions}, published {target}"
        event = rng.choice(events)
        if event == "admit":
            running[next_position] = rng.choice(engine_versions)
            next_position += 1
        elif event == "finish":
            position = rng.choice(list(running))
            ready[position] = running.pop(position)
        elif event == "load":
            engine_versions[engine_versions.index(min(engine_versions))] = target
        else:
            if not left_in_batch:
                assert version == schedule.first_version(batch)
                for position in positions:
                    assert within_bound(schedule, position, ready[position])
                    worst = max(worst, version - ready.pop(position))
                left_in_batch = schedule.updates_per_batch
            version += 1
            left_in_batch -= 1
            if version % schedule.publish_interval == 0:
                target = version
            if not left_in_batch:
                batch += 1
    return worst


@settings(max_examples=150, deadline=None)
@given(
    interval=st.integers(1, 9),
    updates=st.integers(1, 6),
    slack=st.integers(0, 12),
    depth=st.integers(0, 4),
    groups=st.integers(1, 4),
    concurrent_groups=st.integers(1, 6),
    engines=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_no_deadlock_and_the_bound_holds(
    interval: int, updates: int, slack: int, depth: int, groups: int, concurrent_groups: int, engines: int, seed: int
) -> None:
    schedule = Schedule(
        groups_per_batch=groups,
        updates_per_batch=updates,
        publish_interval=interval,
        max_staleness=interval - math.gcd(interval, updates) + slack,
        pipeline_depth=depth,
        group_size=2,
        max_concurrent=2 * concurrent_groups + 1,
    )
    schedule.validate()
    assert simulate(schedule, batches=10, engines=engines, seed=seed) <= schedule.max_staleness


def test_simulation_finds_the_deadlock_of_an_impossible_bound() -> None:
    impossible = replace(SCHEDULE, publish_interval=8, max_staleness=3)
    with pytest.raises(AssertionError, match="deadlock at batch 1"):
        simulate(impossible, batches=10, engines=1, seed=0)


def test_weight_version_labels() -> None:
    assert parse_weight_version(weight_version(3, 17)) == (3, 17)
    for bad in ("17", "a.1", "1.", ".2", "1.2.3", "", "-1.2"):
        with pytest.raises(ValueError, match="weight version"):
            parse_weight_version(bad)


def test_effective_version_on_abandoned_timelines() -> None:
    starts = {0: 0, 1: 10, 2: 14}
    assert effective_version(12, 2, starts) == 12  # the current timeline
    assert effective_version(9, 0, starts) == 9  # before every fork: shared
    assert effective_version(10, 0, starts) == 10  # the checkpoint itself
    assert effective_version(13, 0, starts) == 7  # 3 updates past the fork at 10, as far from it as version 7
    assert effective_version(17, 1, starts) == 11  # 3 past the fork at 14
    current = 20
    assert current - effective_version(13, 0, starts) == (13 - 10) + (current - 10)
    assert effective_version(5, 0, {0: 0, 1: 2}) == -1  # nothing on the current timeline is as old
