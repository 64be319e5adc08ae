"""When a group may start, and how old a token is: pure functions, no clock, no I/O.

Letters: k = a group's position in the run (0 is the first group of version 0), G = groups per batch, U = updates per
batch, P = updates between two publications, s = --max-staleness.

Derivation of the admission rule. Groups are consumed strictly in order of admission, G at a time, so group k is consumed
in batch b = k // G. The batches before it cost b*U updates, so its batch's first update starts at version b*U, whatever
happens in between. Every token of the group is sampled by some engine after the group started, hence by a version at
least as new as the OLDEST version any living engine has loaded at that moment (`loaded_version`; engines only move
forward, and a fenced engine comes back only with the current version). So its staleness at consumption is at most
b*U - loaded_version, and admitting only where that is <= s keeps the bound for every token, also for a group that is
interrupted by publications, since those only make its later tokens newer.

Why s >= P - gcd(P, U). When the trainer waits for batch b, the newest version it can have published is the last multiple
of P up to b*U, so the youngest possible data are (b*U mod P) updates old. Over all b this takes every multiple of gcd(P, U)
below P; the largest is P - gcd(P, U). A smaller s blocks at that batch for ever. With s at or above it there is no
deadlock: the trainer waits for batch b only when everything before is consumed and published, so the first missing group
of batch b passes the staleness rule (above) and the depth rule (b = current batch), and it passes the concurrency rule
because running groups end without waiting for anybody. s = 0 (with P dividing U) is synchronous on-policy training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The numbers of the admission rule; all counts, `max_concurrent` and `group_size` in trajectories."""

    groups_per_batch: int
    updates_per_batch: int
    publish_interval: int
    max_staleness: int
    pipeline_depth: int
    group_size: int
    max_concurrent: int

    def batch_of(self, position: int) -> int:
        """The batch in which group `position` is consumed."""
        return position // self.groups_per_batch

    def first_version(self, batch: int) -> int:
        """The version at which `batch`'s first update starts."""
        return batch * self.updates_per_batch

    def smallest_staleness(self) -> int:
        """The smallest --max-staleness that can be met (see the module's derivation)."""
        return self.publish_interval - math.gcd(self.publish_interval, self.updates_per_batch)

    def validate(self) -> None:
        """Raise ValueError, naming the flag, for a schedule that could never make progress."""
        least = self.smallest_staleness()
        if self.max_staleness < least:
            raise ValueError(
                f"--max-staleness {self.max_staleness} can never be met: with --publish-interval {self.publish_interval} and "
                f"{self.updates_per_batch} updates per batch, the newest published weights are up to {least} updates old "
                f"when a batch starts. Use --max-staleness {least} or more, or publish more often"
            )
        if self.max_concurrent < self.group_size:
            raise ValueError(
                f"--max-concurrent-rollouts {self.max_concurrent} is smaller than --group-size {self.group_size}: "
                "no group could ever start"
            )


def refusal(
    schedule: Schedule, position: int, *, loaded_version: int, current_batch: int, running_trajectories: int
) -> str | None:
    """Why group `position` may not start now: "staleness", "depth" or "concurrency"; None = it may.

    loaded_version        the oldest version over the living engines
    current_batch         the batch the trainer consumes now or waits for
    running_trajectories  trajectories in flight
    """
    batch = schedule.batch_of(position)
    if not within_bound(schedule, position, loaded_version):
        return "staleness"
    if batch > current_batch + schedule.pipeline_depth:
        return "depth"
    if running_trajectories + schedule.group_size > schedule.max_concurrent:
        return "concurrency"
    return None


def within_bound(schedule: Schedule, position: int, oldest_version: int) -> bool:
    """Whether a token of `oldest_version` is young enough when group `position` is consumed."""
    return schedule.first_version(schedule.batch_of(position)) - oldest_version <= schedule.max_staleness


def parse_weight_version(label: str) -> tuple[int, int]:
    """("incarnation", version) of an engine's label "<incarnation>.<version>"; ValueError for anything else."""
    incarnation, dot, version = label.partition(".")
    if not dot or not incarnation.isdecimal() or not version.isdecimal():
        raise ValueError(f"weight version {label!r} is not of the form <incarnation>.<version>")
    return int(incarnation), int(version)


def weight_version(incarnation: int, version: int) -> str:
    """The label an engine is given with its weights."""
    return f"{incarnation}.{version}"


def effective_version(version: int, incarnation: int, starts: dict[int, int]) -> int:
    """The version on the current timeline that is as stale as `version` of `incarnation` is.

    `starts` maps every incarnation so far to the version it started from. Later incarnations may have started from
    before `version`; then the token's weights lie on an abandoned timeline, (version - c) updates away from the common
    ancestor c, and the current weights v are (v - c) away from it: staleness (version - c) + (v - c), which is that of
    version 2c - version. The result may be negative (nothing on the current timeline is as old).
    """
    ancestor = min([version, *(start for later, start in starts.items() if later > incarnation)])
    return 2 * ancestor - version
