"""What the embedded engine's server and scheduler hand each other: a request (Job) and its samples (Sequence)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class RequestError(Exception):
    """A request that cannot be served; `status` is the HTTP status it is answered with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt shared by the samples drawn from it; prefilled once where they start together.

    `logprob_start`: first token whose own log-prob is wanted (None: none). `input_logprobs`: from the first prefill;
    entry i belongs to token logprob_start + i, entry 0 is None as in SGLang, at temperature 1.
    """

    ids: list[int]
    logprob_start: int | None = None
    input_logprobs: list[float | None] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample in the making. `spans`: (weight version, index of its first output token), oldest first.

    `output_ids` and `logprobs` (at the sampling temperature) grow together, one entry per sampled token.
    """

    job: Job
    id: str
    prompt: Prompt
    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    weight_version: str = ""

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt.ids) + len(self.output_ids)

    @property
    def fresh(self) -> bool:
        """Nothing sampled yet: it starts where every other sample of its prompt starts."""
        return not self.output_ids

    def enter(self, version: str) -> None:
        """It starts, or goes on, under the weights called `version`."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output_ids)))

    def version_spans(self) -> list[dict[str, Any]]:
        """[{"version", "start", "end"}] over the output tokens, as SGLang reports them; empty spans left out."""
        if not self.spans:  # it never ran
            return []
        ends = [start for _, start in self.spans[1:]] + [len(self.output_ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.spans, ends, strict=True)
            if end > start
        ]


@dataclass(slots=True, eq=False)
class Job:
    """One /generate call: all its samples are answered together. `unfinished` counts those still running or waiting."""

    rid: str
    return_logprob: bool
    as_list: bool
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    error: RequestError | None = None
