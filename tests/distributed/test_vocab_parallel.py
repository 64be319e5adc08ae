"""vocab_parallel_logprob over gloo ranks: the whole vocabulary's values and gradients, bitwise equal on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks

VOCAB, COLUMNS = 1001, 1004  # padded so that 2 and 4 ranks get equal parts; the padding is the last rank's


def inputs() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(37, COLUMNS, generator=g) * 5 + 50
    logits[:, VOCAB:] = 1e4
    targets = torch.randint(0, VOCAB, (37,), generator=g)
    targets[:8] = torch.tensor([0, 250, 251, 501, 502, 753, VOCAB - 1, -100])  # both edges of parts
    return logits, targets, torch.randn(37, generator=g), torch.randn(37, generator=g)


def score(rank: int, ranks: int) -> dict[str, torch.Tensor | int]:
    import torch.distributed as dist

    from m2po_megatron.kernels.logprob import vocab_parallel_logprob

    logits, targets, upstream, upstream_entropy = inputs()
    part = logits.chunk(ranks, 1)[rank].clone().requires_grad_()
    calls = []
    real = dist.all_gather
    dist.all_gather = lambda *a, **k: (calls.append(a[1].nbytes), real(*a, **k))[1]
    logp, entropy = vocab_parallel_logprob(
        part, targets, temperature=0.7, entropy="grad", tp_group=dist.group.WORLD, vocab_size=VOCAB
    )
    (logp * upstream + entropy * upstream_entropy).sum().backward()
    dist.all_gather = real
    return {"logp": logp.detach(), "entropy": entropy.detach(), "grad": part.grad, "bytes": calls}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_equal_one_process(ranks: int) -> None:
    results = run_ranks(score, ranks, ranks)
    logits, targets, upstream, upstream_entropy = inputs()
    exact = logits[:, :VOCAB].double().requires_grad_()
    log_p = torch.log_softmax(exact / 0.7, -1)
    ignored = targets == -100
    logp = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(ignored, 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(ignored, 0.0)
    (logp * upstream + entropy * upstream_entropy).sum().backward()
    for result in results:
        assert torch.equal(result["logp"], results[0]["logp"])
        assert torch.equal(result["entropy"], results[0]["entropy"])
        assert result["bytes"] == [16 * len(targets)]
    assert float((results[0]["logp"] - logp).abs().max()) <= 1e-5
    assert float((results[0]["entropy"] - entropy).abs().max()) <= 1e-5
    gradient = torch.cat([result["grad"] for result in results], 1)
    assert float((gradient[:, :VOCAB] - exact.grad).abs().max()) <= 2e-5
    assert float(gradient[:, VOCAB:].abs().sum()) == 0.0
    assert float(gradient.sum(1).abs().max()) <= 1e-4


def gathered(rank: int) -> str:
    import torch.distributed as dist

    from m2po_megatron.kernels.logprob import vocab_parallel_logprob

    try:
        vocab_parallel_logprob(torch.zeros(2, 10), torch.tensor([0, 1]), tp_group=dist.group.WORLD, vocab_size=10)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_gathered_logits_are_refused() -> None:
    assert all("gathered" in answer for answer in run_ranks(gathered, 2))
