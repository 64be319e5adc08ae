"""Prompt files and the order in which a run takes prompts from them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2po_megatron.data.trajectory import Prompt


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSONL file with rows {"prompt": str, "answer": str, "id": str or int, optional}.

    A row without an id gets "<file name>:<line number>". Blank lines are skipped. Raises FileNotFoundError for a missing
    file, and ValueError with file and line number for a malformed row, an id given twice, or a file without prompts.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} does not exist")
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                prompt = _parse_row(line, default_id=f"{path.name}:{number}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if prompt.id in line_of_id:
                raise ValueError(
                    f"{path}, line {number}: id {prompt.id!r} is already used by line {line_of_id[prompt.id]}"
                )
            line_of_id[prompt.id] = number
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _parse_row(line: bytes, default_id: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"is not a JSON object but {type(row).__name__}")
    unknown = sorted(set(row) - {"prompt", "answer", "id"})
    if "prompt" not in row:
        raise ValueError('has no "prompt"' + (f" (it has {', '.join(unknown)})" if unknown else ""))
    if not isinstance(row["prompt"], str) or not row["prompt"]:
        raise ValueError('"prompt" must be a text that is not empty')
    answer = row.get("answer")
    if not isinstance(answer, str):
        raise ValueError('"answer" must be a text' if "answer" in row else 'has no "answer"')
    identifier = row.get("id", default_id)
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise ValueError('"id" must be a text or an integer')
    for name, value in (("prompt", row["prompt"]), ("answer", answer), ("id", str(identifier))):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f'"{name}" holds a lone surrogate (half of a \\u pair), which is no text')
    return Prompt(id=str(identifier), text=row["prompt"], answer=answer)


@dataclass(frozen=True)
class Cursor:
    """The place of the next prompt: epoch, and index within the epoch's order."""

    epoch: int = 0
    index: int = 0


class PromptQueue:
    """Prompts for ever, in an order of its own per epoch that depends on the seed and the epoch alone.

    Resumable: the same prompts, seed and cursor give the same continuation.
    """

    def __init__(self, prompts: list[Prompt], seed: int, cursor: Cursor | None = None) -> None:
        if not prompts:
            raise ValueError("a prompt queue needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        cursor = cursor or Cursor()
        if cursor.epoch < 0 or not 0 <= cursor.index <= len(prompts):
            raise ValueError(
                f"prompt cursor {cursor} does not fit a file of {len(prompts)} prompts: was the file changed?"
            )
        self._epoch, self._index = cursor.epoch, cursor.index
        self._order = self._shuffled(self._epoch)
        self._wrap()

    @property
    def cursor(self) -> Cursor:
        """Where `take` continues."""
        return Cursor(self._epoch, self._index)

    def take(self) -> tuple[Prompt, Cursor]:
        """The next prompt and its own place."""
        place = self.cursor
        prompt = self._prompts[self._order[place.index]]
        self._index += 1
        self._wrap()
        return prompt, place

    def _wrap(self) -> None:
        if self._index == len(self._prompts):
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        # A text seed is hashed by SHA-512: the same on every platform and for every epoch apart.
        random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        return order
