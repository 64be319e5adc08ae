"""What a log-prob backend must offer, and which one a call gets.

A backend is a module of these functions over one rank's part of the vocabulary; the collective between them, autograd and
all checks are written once, above them. To add one, write the module, name it in `BACKENDS`, and let the tests of
kernels/README.md run over it. Letters: t = tokens, V' = columns of this rank's logits, W = tensor-parallel size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

IGNORED = -100
"""A target that stands for "no token": log-prob 0, entropy 0, gradient 0."""

BACKENDS = ("triton", "native", "torch")
"""Modules logprob_<name>.py of this directory. "native" is the CPU's compiled one, there where it could be built."""


@dataclass(frozen=True)
class Shard:
    """Which part of the vocabulary this rank's logits are: columns [0, columns) hold ids [first, first + columns).

    columns may be less than V' (padding at the vocabulary's end) and may be 0 (a rank of padding alone).
    """

    first: int
    columns: int
    vocab_size: int


def shard_of(columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> Shard:
    """This rank's part where every rank of `group` holds `columns` columns, parts in rank order."""
    first = dist.get_rank(group) * columns if group is not None else 0
    return Shard(first, max(0, min(columns, vocab_size - first)), vocab_size)


class Backend(Protocol):
    """All arithmetic is float32, x = logits / temperature. No function stalls the device or talks to other ranks."""

    def obstacle(self, logits: Tensor) -> str:
        """Why this backend cannot take these logits (device, dtype, an installation without it); "" if it can."""

    def row_statistics(
        self, logits: Tensor, targets: Tensor, out: Tensor, shard: Shard, temperature: float, with_moment: bool
    ) -> None:
        """Fill out float32 [4, t] (rows may be strided) from logits [t, V'] (last dimension contiguous), targets int64 [t]:

            m = max x,  d = sum e^(x - m),  s = sum (x - m) e^(x - m) (0 unless with_moment),  x at the target

        over this rank's columns; the last is 0 where another rank owns the target. m is the most negative finite float32,
        and d = s = 0, where there is no finite logit; so may be the rows of ignored targets. s takes 0 x -inf as 0, and a
        NaN logit makes d NaN.
        """

    def merge(self, parts: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs, log-sum-exps, entropies), each float32 [t], from the statistics float32 [W, 4, t] of all ranks.

        Ranks are merged in their order. Log-prob and entropy are 0 at ignored targets; the log-prob is NaN at a target
        outside the vocabulary. The entropies mean something only if the statistics have their moment, and the
        log-sum-exp not at ignored targets.
        """

    def write_gradient(
        self,
        logits: Tensor,
        gradient: Tensor,
        targets: Tensor,
        lse: Tensor,
        entropies: Tensor,
        upstream: Tensor,
        upstream_entropy: Tensor | None,
        shard: Shard,
        temperature: float,
    ) -> None:
        """Fill gradient [t, V'], which may be the logits themselves, in the logits' dtype.

            dx = (1 / temperature) [g (1_y - p) - g_H p (log p + H)],   p = e^(x - lse)

        with g = upstream, g_H = upstream_entropy (None: 0), float32 [t]. Rows with g = g_H = 0, rows of ignored targets
        and padding columns become exact zeros whatever the logits hold.
        """


def choose_backend(name: str, logits: Tensor) -> Backend:
    """The backend of that name, or for "auto" the fastest that runs on the tensor's device here.

    "auto" looks for Triton on a GPU only, so that CPU processes never import it.

    Raises:
        ValueError: unknown, or not usable on this device or installation.
    """
    if name == "auto":
        candidates = {"cuda": ("triton", "torch"), "cpu": ("native", "torch")}.get(logits.device.type, ("torch",))
        return next(b for b in map(_load, candidates) if not isinstance(b, str) and not b.obstacle(logits))
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} of the log-prob kernels is not known; known: auto, {', '.join(BACKENDS)}")
    backend = _load(name)
    if obstacle := backend if isinstance(backend, str) else backend.obstacle(logits):
        raise ValueError(f"backend {name!r} of the log-prob kernels cannot be used here: {obstacle}")
    return cast(Backend, backend)


def backend_name(logits: Tensor) -> str:
    """What "auto" takes for these logits, for the start-up line."""
    return cast(ModuleType, choose_backend("auto", logits)).__name__.rpartition("_")[2]


@functools.cache
def _load(name: str) -> Backend | str:
    """The backend's module, or why it cannot be imported."""
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return cast(Backend, importlib.import_module(f"m2po_megatron.kernels.logprob_{name}"))
