"""The rollout store's tables, and a group's row.

Tables (schema version in `PRAGMA user_version`):
  meta(key, value)                what must survive a restart: the prompt cursor
  incarnations(incarnation, start_version)   every start of the run; needed to age tokens of abandoned timelines
  groups(position, attempt, ...)  one row per attempt at a group. `position` is k of rollout/staleness.py: the order of
                                  admission and of consumption. A dropped attempt stays, for the record; the next attempt
                                  has the same position and prompt.
  trajectories(position, attempt, sample, ...)   `arrays` as rollout/codec.py packs them

States: pending -> running -> ready -> leased -> trained, and from each of the first four -> dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from m2po_megatron.data.prompts import Cursor
from m2po_megatron.data.trajectory import Prompt

SCHEMA_VERSION = 1
STATES = ("pending", "running", "ready", "leased", "trained", "dropped")

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE incarnations(incarnation INTEGER PRIMARY KEY, start_version INTEGER NOT NULL);
CREATE TABLE groups(
    position INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
    prompt_id TEXT NOT NULL, prompt TEXT NOT NULL, answer TEXT NOT NULL, epoch INTEGER NOT NULL, prompt_index INTEGER NOT NULL,
    incarnation INTEGER, admitted_version INTEGER, oldest_version INTEGER, newest_version INTEGER,
    reason TEXT,
    PRIMARY KEY(position, attempt));
CREATE INDEX groups_by_state ON groups(state, position);
CREATE TABLE trajectories(
    position INTEGER NOT NULL, attempt INTEGER NOT NULL, sample INTEGER NOT NULL,
    id TEXT NOT NULL, finish_reason TEXT NOT NULL, reward REAL, tokens INTEGER NOT NULL, arrays BLOB NOT NULL,
    PRIMARY KEY(position, attempt, sample));
"""
GROUP_COLUMNS = (
    "position, attempt, state, prompt_id, prompt, answer, epoch, prompt_index, "
    "oldest_version, newest_version, incarnation"
)


@dataclass(frozen=True)
class GroupRecord:
    """A group's row without its trajectories. `oldest_version` is on the current timeline (None until ready)."""

    position: int
    attempt: int
    state: str
    prompt: Prompt
    place: Cursor
    oldest_version: int | None = None

    @property
    def group_id(self) -> str:
        return f"g{self.position}" + (f"r{self.attempt}" if self.attempt else "")

    def in_state(self, state: str) -> GroupRecord:
        return replace(self, state=state)
