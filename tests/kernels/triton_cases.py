"""Inputs for a log-prob backend and what it makes of them; run as a program, it runs them through the Triton kernels.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases RESULTS.pt

A program of its own because Triton reads that variable when it is imported, and the tests' process must not import it.
"""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from m2po_megatron.kernels.backends import Backend, Shard

ROWS = 6
IGNORED_ROW, IDLE_ROW = 1, 3
"""The rows whose target is -100 and whose upstream gradients are 0, in every case."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    vocab: int
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    parts: int = 1
    width: int = 0  # V' where it is not vocab / parts
    entropy: Literal["none", "value", "grad"] = "grad"
    inplace: bool = False
    strided: bool = False  # logits and statistics are slices of larger tensors
    shift: float = 0.0
    logits: Literal["random", "excluded", "empty part", "nan", "live nan"] = "random"
    targets: Literal["random", "edges", "ignored"] = "random"
    seed: int = 0

    @property
    def shards(self) -> list[Shard]:
        width = self.width or self.vocab // self.parts
        return [Shard(p * width, max(0, min(width, self.vocab - p * width)), self.vocab) for p in range(self.parts)]

    @property
    def part_width(self) -> int:
        return self.width or self.vocab // self.parts


CASES: dict[str, Case] = {
    **{
        f"{vocab}-{str(dtype)[6:]}-T{temperature}": Case(vocab, dtype, temperature)
        for vocab, dtype, temperature in product((7, 1500, 4748), FLOATS, (0.7, 1.0, 1.3))
    },
    **{
        f"shift{shift:+}-parts{parts}": Case(4748, shift=shift, parts=parts, temperature=1.3)
        for shift, parts in product((-300.0, 300.0), (1, 4))
    },
    **{f"edges-parts{parts}": Case(4748, parts=parts, targets="edges", temperature=0.7) for parts in (1, 2, 4)},
    **{f"parts{parts}-{str(dtype)[6:]}": Case(4748, dtype, parts=parts) for parts, dtype in product((2, 4), FLOATS)},
    "excluded": Case(1500, logits="excluded", temperature=1.3),
    "excluded-parts4": Case(4748, logits="excluded", parts=4),
    "excluded-bfloat16": Case(4748, torch.bfloat16, logits="excluded", temperature=0.7),
    "empty part of 2": Case(1500, logits="empty part", parts=2, temperature=0.7),
    "empty part of 4": Case(4748, logits="empty part", parts=4),
    "padded": Case(1500, width=1536, temperature=0.7),
    "padded, block of padding": Case(1500, width=6000, inplace=True),
    "padded, aligned": Case(4750, width=4768, dtype=torch.bfloat16, parts=1),
    "padded, parts without columns": Case(1500, width=768, parts=4, targets="edges", temperature=1.3),
    "padded, in place": Case(1500, width=800, parts=2, inplace=True, targets="edges"),
    "ignored": Case(1500, targets="ignored"),
    "ignored-parts2": Case(1500, targets="ignored", parts=2, logits="nan", inplace=True),
    "nan where nothing counts": Case(1500, logits="nan"),
    "nan where nothing counts, in place": Case(4748, torch.bfloat16, logits="nan", inplace=True, strided=True),
    "nan where it counts": Case(4748, logits="live nan"),
    "nan where it counts, parts2": Case(4748, logits="live nan", parts=2),
    **{
        f"entropy {entropy}-{str(dtype)[6:]}": Case(4748, dtype, 0.7, parts=2, entropy=entropy)
        for entropy, dtype in product(("none", "value"), FLOATS)
    },
    **{f"in place-{str(dtype)[6:]}": Case(4748, dtype, 1.3, parts=2, inplace=True) for dtype in FLOATS},
    "32000-parts2": Case(32000, parts=2, temperature=0.7),
    "151936, padded": Case(151936, torch.bfloat16, width=152064, inplace=True, temperature=1.3),
    "strided": Case(1500, strided=True),
    "strided, in place": Case(4748, torch.bfloat16, parts=2, strided=True, inplace=True),
    "in place, no entropy": Case(1500, inplace=True, entropy="none", temperature=0.7),
}


@dataclass(frozen=True)
class Inputs:
    logits: list[Tensor]  # per part [ROWS, V']
    targets: Tensor
    upstream: Tensor
    upstream_entropy: Tensor


def inputs_of(case: Case) -> Inputs:
    """The same tensors in every process: drawn on the CPU from the case's seed."""
    g = torch.Generator().manual_seed(case.seed)
    width = case.part_width
    whole = (torch.randn(ROWS, width * case.parts, generator=g) * 3 + case.shift).to(case.dtype)
    whole[:, case.vocab :] = 1e4  # counted, padding would dominate everything
    targets = torch.randint(0, case.vocab, (ROWS,), generator=g)
    if case.targets == "edges":
        edges = [id_ for s in case.shards if s.columns for id_ in (s.first, s.first + s.columns - 1)]
        targets = torch.tensor((edges * ROWS)[:ROWS])
        targets[2], targets[4], targets[5] = edges[0], edges[-1], edges[len(edges) // 2]
    upstream, upstream_entropy = (torch.randn(ROWS, generator=g) for _ in range(2))
    upstream[IDLE_ROW] = upstream_entropy[IDLE_ROW] = 0.0
    upstream[4] = 0.0  # the entropy's alone
    targets[IGNORED_ROW] = -100
    if case.targets == "ignored":
        targets[:] = -100
    if case.logits == "excluded":
        drop = torch.rand(whole.shape, generator=g) < 0.3
        drop[targets != -100] = drop[targets != -100].scatter(1, targets[targets != -100, None], False)
        whole[drop] = -torch.inf
    elif case.logits == "empty part":
        whole[:, width : 2 * width] = -torch.inf
        whole[:, 3 * width :] = -torch.inf
        targets[targets >= 0] %= width
    elif case.logits == "nan":
        whole[[IGNORED_ROW, IDLE_ROW]] = torch.nan
    elif case.logits == "live nan":
        whole[2, case.vocab // 2 + 5] = torch.nan
    return Inputs([_part(w, case.strided) for w in whole.split(width, 1)], targets, upstream, upstream_entropy)


def _part(columns: Tensor, strided: bool) -> Tensor:
    if not strided:
        return columns.clone()
    room = torch.full((columns.shape[0], columns.shape[1] + 48), torch.nan, dtype=columns.dtype)
    view = room[:, 16 : 16 + columns.shape[1]]
    view.copy_(columns)
    return view


def run(case: Case, backend: Backend) -> dict[str, Tensor]:
    """statistics [W, 4, t], logprobs, lse, entropies [t] and gradient [t, W V'] of the case."""
    given = inputs_of(case)
    room = torch.full((case.parts, 4, ROWS + 5), -7.0)
    statistics = room[..., 2 : 2 + ROWS] if case.strided else torch.empty(case.parts, 4, ROWS)
    for logits, out, shard in zip(given.logits, statistics, case.shards, strict=True):
        backend.row_statistics(logits, given.targets, out, shard, case.temperature, case.entropy != "none")
    if case.strided:
        assert float(room[..., :2].max()) == -7.0 == float(room[..., 2 + ROWS :].max()), "written beside its columns"
    logprobs, lse, entropies = backend.merge(statistics.contiguous(), given.targets, case.vocab)
    gradients = []
    for logits, shard in zip(given.logits, case.shards, strict=True):
        gradient = logits if case.inplace else torch.full_like(logits, torch.nan)
        upstream_entropy = given.upstream_entropy if case.entropy == "grad" else None
        backend.write_gradient(
            logits,
            gradient,
            given.targets,
            lse,
            entropies,
            given.upstream,
            upstream_entropy,
            shard,
            case.temperature,
        )
        gradients.append(gradient.clone())
        assert case.inplace or torch.equal(
            logits.nan_to_num(7.0), inputs_of(case).logits[shard.first // case.part_width].nan_to_num(7.0)
        )
    return {
        "statistics": statistics.clone(),
        "logprobs": logprobs,
        "lse": lse,
        "entropies": entropies,
        "gradient": torch.cat(gradients, 1),
    }


def no_rows(backend: Backend) -> dict[str, Tensor]:
    """No tokens at all: nothing to launch, nothing written."""
    logits, none, out = torch.empty(0, 40), torch.empty(0), torch.empty(4, 0)
    targets = torch.empty(0, dtype=torch.int64)
    backend.row_statistics(logits, targets, out, Shard(0, 40, 40), 1.0, True)
    merged = backend.merge(out[None], targets, 40)
    backend.write_gradient(logits, logits, targets, none, none, none, none, Shard(0, 40, 40), 1.0)
    return dict(zip(("logprobs", "lse", "entropies"), merged, strict=True))


def unknown_targets(backend: Backend) -> dict[str, Tensor]:
    """Targets below, above and far above the vocabulary, the last a known column in 32 bits."""
    targets = torch.tensor([3, -1, 40, 2**32 + 3])
    out = torch.empty(4, 4)
    backend.row_statistics(torch.ones(4, 40), targets, out, Shard(0, 40, 40), 1.0, True)
    return {"logprobs": backend.merge(out[None], targets, 40)[0]}


def far_rows(backend: Backend) -> dict[str, Tensor]:
    """Rows whose first element is beyond 2^31 from the tensor's: an offset in 32 bits would leave the tensor.

    The 4 GiB between the rows are never touched, so that they cost address space and no memory.
    """
    columns, stride = 1100, 2**30 + 16
    room = torch.empty(2 * stride + columns, dtype=torch.bfloat16)
    logits = room.as_strided((3, columns), (stride, 1))
    g = torch.Generator().manual_seed(0)
    near = (torch.randn(3, columns, generator=g) * 3).bfloat16()
    logits.copy_(near)
    targets, upstream, shard = torch.tensor([0, 500, 1099]), torch.tensor([1.0, -2.0, 0.5]), Shard(0, columns, columns)
    results = {}
    for name, x in (("far", logits), ("near", near)):
        out = torch.empty(4, 3)
        backend.row_statistics(x, targets, out, shard, 0.7, True)
        logprobs, lse, entropies = backend.merge(out[None], targets, columns)
        backend.write_gradient(x, x, targets, lse, entropies, upstream, upstream, shard, 0.7)
        results |= {f"{name} logprobs": logprobs, f"{name} gradient": x.clone(memory_format=torch.contiguous_format)}
    return results


def public(shape: tuple[int, ...], columns: int, vocab: int, dtype: torch.dtype, inplace: bool, backend: Any) -> Any:
    """The call everything else makes, with autograd: inputs, outputs and the gradient of the leaf."""
    from m2po_megatron.kernels.logprob import vocab_parallel_logprob

    g = torch.Generator().manual_seed(1)
    leaf = (torch.randn(*shape, columns, generator=g) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (*shape, 2), generator=g)[..., 1]  # a strided view
    targets.view(-1)[::3] = -100
    upstream = [torch.randn(shape, generator=g) for _ in range(2)]
    logprobs, entropies = vocab_parallel_logprob(
        leaf * 1,
        targets,
        temperature=0.7,
        entropy="grad",
        vocab_size=vocab,
        inplace_backward=inplace,
        backend=backend,
    )
    assert entropies is not None
    (logprobs * upstream[0] + entropies * upstream[1]).sum().backward()
    return {"logprobs": logprobs.detach(), "entropies": entropies.detach(), "gradient": leaf.grad}


PUBLIC = {
    f"{str(dtype)[6:]}{', in place' if inplace else ''}": ((3, 5), 1510, 1500, dtype, inplace)
    for dtype in FLOATS
    for inplace in (False, True)
}


def main(path: Path) -> None:
    from m2po_megatron.kernels import logprob_triton

    backend: Any = logprob_triton
    results = {
        "cases": {name: run(case, backend) for name, case in CASES.items()},
        "public": {name: public(*arguments, "triton") for name, arguments in PUBLIC.items()},
        "no rows": no_rows(backend),
        "unknown targets": unknown_targets(backend),
        "obstacles": {
            "float64": logprob_triton.obstacle(torch.empty(0, dtype=torch.float64)),
            "meta": logprob_triton.obstacle(torch.empty(0, device="meta")),
            "cpu": logprob_triton.obstacle(torch.empty(0)),
        },
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results["far rows"] = far_rows(backend)
    results["far rows' memory"] = math.ceil((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    torch.save(results, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
