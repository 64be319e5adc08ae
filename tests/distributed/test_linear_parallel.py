"""linear_logprob over gloo ranks: each rank's own gradients are right, whole or sequence parallel, and summed once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.kernels.reference import IGNORED, assert_close, reference_logprob

TOKENS, HIDDEN, VOCAB, COLUMNS = 24, 12, 1001, 1004
SIZES = [(TOKENS, VOCAB, COLUMNS), (TOKENS, 251, 1004), (0, VOCAB, COLUMNS)]
"""(tokens, vocabulary, columns of all ranks): the usual; one rank's part holds everything, the rest is padding; no tokens."""
CASES = list(product(["store", "recompute"], [False, True], SIZES))  # (mode, sequence parallel, size)


def inputs(tokens: int, vocab: int, columns: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(11)
    hidden, weight = torch.randn(tokens, HIDDEN, generator=g), torch.randn(columns, HIDDEN, generator=g)
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    edges = torch.tensor([0, 250, 251, 501, 502, 753, vocab - 1, IGNORED])  # of parts, on both sides
    targets[:8] = edges.clamp(max=vocab - 1)[:tokens]
    return hidden, weight, targets, torch.randn(tokens, generator=g), torch.randn(tokens, generator=g)


def score(rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    import torch.distributed as dist

    from m2po_megatron.kernels.logprob import linear_logprob

    results = []
    for mode, sequence_parallel, size in CASES:
        hidden, weight, targets, upstream, upstream_entropy = inputs(*size)
        own = (hidden.chunk(ranks)[rank] if sequence_parallel else hidden).clone().requires_grad_()
        part = weight.chunk(ranks)[rank].clone().requires_grad_()
        logprobs, entropies = linear_logprob(
            own,
            part,
            targets,
            mode=mode,
            temperature=1.3,
            entropy="grad",
            tp_group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
            vocab_size=size[1],
            chunk_tokens=7,
        )
        (logprobs * upstream + entropies * upstream_entropy).sum().backward()
        results.append({"values": torch.stack([logprobs, entropies]).detach(), "hidden": own.grad, "weight": part.grad})
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_equal_one_process(ranks: int) -> None:
    found = run_ranks(score, ranks, ranks)
    for case, (_, sequence_parallel, size) in enumerate(CASES):
        hidden, weight, targets, upstream, upstream_entropy = inputs(*size)
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logprobs, entropies = reference_logprob(hidden @ weight.t(), targets, 1.3, size[1])
        (logprobs * upstream + entropies * upstream_entropy).sum().backward()
        results = [rank[case] for rank in found]
        for result in results:
            assert torch.equal(result["values"], results[0]["values"])
            if not sequence_parallel:
                assert torch.equal(result["hidden"], results[0]["hidden"])
        assert_close(results[0]["values"], torch.stack([logprobs, entropies]), 1e-5)
        whole = torch.cat([r["hidden"] for r in results]) if sequence_parallel else results[0]["hidden"]
        for found_gradient, exact in ((whole, hidden.grad), (torch.cat([r["weight"] for r in results]), weight.grad)):
            assert_close(found_gradient, exact, 2e-6 * float(exact.abs().max()) if exact.numel() else 0.0)
