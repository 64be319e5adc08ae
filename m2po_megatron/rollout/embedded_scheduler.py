"""The embedded engine's continuous batching: which sequences run, under which weights, and how they end.

Not thread-safe: one thread owns a scheduler and its model. Sequence running[i] owns row i of the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

import torch

from m2po_megatron.rollout.embedded_model import EngineModel
from m2po_megatron.rollout.embedded_sequence import Job, Prompt, RequestError, Sequence

PAUSE_MODES = ("abort", "retract")
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass; one longer sequence is still taken, alone."""


class Scheduler:
    """Waiting and running sequences of one model.

    Every sequence is in exactly one place: waiting, running, or finished. `take_finished` hands a job out when all its
    sequences are finished, or when it failed (`job.error`).
    """

    def __init__(self, engine: EngineModel, max_running: int, weight_version: str) -> None:
        """`max_running`: sequences that run at once; `weight_version`: the label of the weights `engine` has now."""
        self.engine = engine
        self.weight_version = weight_version
        self.paused = False
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._max_running = max_running
        self._finished: list[Job] = []
        self._membership_changed = True
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, dtype=torch.int64)
        self._temperatures: list[float] = []
        self._longest = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return not self.paused and bool(self.running or self.waiting)

    def submit(self, job: Job) -> None:
        """Queue all sequences of `job`; held while paused."""
        job.unfinished = len(job.sequences)
        self.waiting.extend(job.sequences)

    def take_finished(self) -> list[Job]:
        """The jobs finished since the last call, in the order in which they finished."""
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def step(self, admit: bool = True) -> None:
        """Let waiting sequences join (one prefill) if `admit`, then sample one token for every running sequence."""
        if self.paused:
            return
        if admit and self.waiting and len(self.running) < self._max_running:
            self._prefill(self._take_waiting())
        if self.running:
            self._decode()

    def pause(self, mode: str) -> None:
        """Stop sampling until `resume`.

        "abort": everything running or waiting ends with what it has. "retract": running sequences go back to the
        queue's head with their output, and are computed anew, under the weights of that time, when they run again.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(400, f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True, "generation was paused in mode abort")
            return
        for sequence in self.running:
            sequence.retractions += 1
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._membership_changed = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def abort(self, concerns: Callable[[Sequence], bool], message: str) -> int:
        """End the sequences that `concerns` picks with the output they have; returns how many these were."""
        rows = [row for row, sequence in enumerate(self.running) if concerns(sequence)]
        chosen = [self.running[row] for row in rows]
        chosen += [sequence for sequence in self.waiting if concerns(sequence)]
        self._leave(rows)
        self.waiting = deque(sequence for sequence in self.waiting if not concerns(sequence))
        for sequence in chosen:
            self._finish(sequence, {"type": "abort", "message": message})
        return len(chosen)

    @torch.inference_mode()
    def fail_all(self, error: RequestError) -> None:
        """Give up everything, running and waiting, and what the cache holds: its contents are not trusted any more."""
        jobs = {sequence.job: None for sequence in [*self.running, *self.waiting]}
        self.running, self.waiting = [], deque()
        self._membership_changed = True
        self.engine.cache.clear()
        for job in jobs:
            self._fail(job, error)

    @torch.inference_mode()
    def load_weights(self, load: Callable[[], None], weight_version: str | None) -> None:
        """Run `load`, which changes the model's weights or raises without having changed any; None keeps the label.

        Only between sequences: RuntimeError while any is running (pause in mode retract, or wait until they ended).
        """
        if self.running:
            raise RuntimeError(f"{len(self.running)} sequences are running: their cache belongs to the old weights")
        load()
        if weight_version is not None:
            self.weight_version = weight_version

    @torch.inference_mode()
    def flush_cache(self) -> None:
        """Empty the cache; RequestError (400) while sequences are running."""
        if self.running:
            raise RequestError(400, f"cannot flush the cache: {len(self.running)} sequences are running; pause first")
        self.engine.cache.clear()

    def _take_waiting(self) -> list[Sequence]:
        """The sequences of the next prefill: as many as have a row and fit its budget."""
        taken: list[Sequence] = []
        prompts: set[Prompt] = set()
        longest = passes = 0
        for sequence in islice(self.waiting, self._max_running - len(self.running)):
            shares = sequence.fresh and sequence.prompt in prompts
            longest = max(longest, sequence.length)
            passes += not shares
            if taken and passes * longest > PREFILL_TOKENS:
                break
            if sequence.fresh:
                prompts.add(sequence.prompt)
            taken.append(sequence)
        for _ in taken:
            self.waiting.popleft()
        return taken

    def _prefill(self, joining: list[Sequence]) -> None:
        """Compute the prompts (and the output of retracted ones), and sample the next token of each."""
        batch: list[list[int]] = []
        shared: dict[Prompt, int] = {}
        sources: list[int] = []
        for sequence in joining:
            source = shared.get(sequence.prompt) if sequence.fresh else None
            if source is None:
                source = len(batch)
                batch.append(sequence.prompt.ids + sequence.output_ids)
                if sequence.fresh:
                    shared[sequence.prompt] = source
            sources.append(source)
            sequence.enter(self.weight_version)
        first = len(self.running)
        rows = list(range(first, first + len(joining)))
        longest = max(map(len, batch))
        self.engine.cache.reserve(rows[-1] + 1, longest)
        hidden = self.engine.prefill(batch, rows, sources)
        for prompt, source in shared.items():
            if prompt.logprob_start is not None and prompt.input_logprobs is None:
                prompt.input_logprobs = self.engine.prompt_logprobs(hidden[source], prompt.ids, prompt.logprob_start)
        last = hidden[torch.arange(len(batch)), torch.tensor([len(ids) - 1 for ids in batch])]
        logits = self.engine.logits(last)[torch.tensor(sources)]
        tokens, logprobs = self.engine.sample(logits, [sequence.temperature for sequence in joining])
        self.running += joining
        self._membership_changed = True
        self._append(first, tokens, logprobs)

    def _decode(self) -> None:
        """One token for every running sequence."""
        if self._membership_changed:
            running = self.running
            device = self.engine.device
            self._tokens = torch.tensor([sequence.output_ids[-1] for sequence in running], device=device)
            self._positions = torch.tensor([sequence.length - 1 for sequence in running], device=device)
            self._temperatures = [sequence.temperature for sequence in running]
            self._longest = int(self._positions.max()) + 1
            self._membership_changed = False
        self.engine.cache.reserve(len(self.running), self._longest)
        logits = self.engine.decode(self._tokens, self._positions, self._longest)
        self._tokens, logprobs = self.engine.sample(logits, self._temperatures)
        self._positions = self._positions + 1
        self._longest += 1
        self._append(0, self._tokens, logprobs)

    def _append(self, first: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Give the sequences from row `first` on their next token; those that are complete, or broken, leave."""
        ended: list[int] = []
        row = first
        for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            sequence = self.running[row]
            output = sequence.output_ids
            output.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.stop_ids or len(output) >= sequence.max_new_tokens:
                ended.append(row)
            row += 1
        finite = logprobs.isfinite()
        if not finite.all():
            self._drop_broken([first + int(i) for i in (~finite).nonzero()[:, 0]], ended)
        elif ended:
            sequences = [self.running[row] for row in ended]
            self._leave(ended)
            for sequence in sequences:
                self._complete(sequence)

    def _drop_broken(self, broken: list[int], ended: list[int]) -> None:
        """Fail the jobs of the rows `broken`, whose log-probs are not finite; complete the others among `ended`."""
        jobs = {self.running[row].job: None for row in broken}
        complete = [sequence for sequence in (self.running[row] for row in ended) if sequence.job not in jobs]
        gone = sorted({*ended, *(row for row, sequence in enumerate(self.running) if sequence.job in jobs)})
        self.engine.cache.erase(torch.tensor(broken))
        self._leave(gone)
        self.waiting = deque(sequence for sequence in self.waiting if sequence.job not in jobs)
        for sequence in complete:
            self._complete(sequence)
        for job in jobs:
            text = f"request {job.rid}: the logits are not finite under weight version {self.weight_version}"
            self._fail(job, RequestError(500, f"{text}; the weights are broken, or the prompt overflows them"))

    def _leave(self, rows: list[int]) -> None:
        """Take `rows` (ascending) out of the batch; the last running sequences move into the holes."""
        if not rows:
            return
        remaining = len(self.running) - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < remaining]
        movers = [row for row in range(remaining, len(self.running)) if row not in gone]
        if holes:
            longest = max(self.running[row].length for row in movers)
            with torch.inference_mode():
                self.engine.cache.move(torch.tensor(movers), torch.tensor(holes), longest)
        for mover, hole in zip(movers, holes, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[remaining:]
        self._membership_changed = True

    def _complete(self, sequence: Sequence) -> None:
        last = sequence.output_ids[-1]
        # A prefill always samples; a request for no token at all (input log-probs only) does not get to see it.
        del sequence.output_ids[sequence.max_new_tokens :], sequence.logprobs[sequence.max_new_tokens :]
        if sequence.output_ids and last in sequence.stop_ids:
            self._finish(sequence, {"type": "stop", "matched": last})
        else:
            self._finish(sequence, {"type": "length", "length": sequence.max_new_tokens})

    def _finish(self, sequence: Sequence, reason: dict[str, object]) -> None:
        sequence.finish_reason = reason
        sequence.weight_version = self.weight_version
        sequence.job.unfinished -= 1
        if sequence.job.unfinished == 0:
            self._finished.append(sequence.job)

    def _fail(self, job: Job, error: RequestError) -> None:
        job.error = error
        self._finished.append(job)
