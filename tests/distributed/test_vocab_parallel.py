"""vocab_parallel_logprob over gloo ranks: the whole vocabulary's values and gradients, bitwise equal on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.kernels.reference import Case, assert_agrees, expected_of, make_case

CASES = [
    # vocabulary, columns (padded so that 4 ranks get equal parts), tokens, dtype, temperature, shift
    (7, 8, 9, torch.float32, 1.0, 0.0),
    (5, 8, 9, torch.float32, 0.7, 0.0),  # on 4 ranks the last one holds padding alone
    (1001, 1004, 37, torch.float32, 0.7, 300.0),
    (1001, 1004, 37, torch.float32, 1.3, -300.0),
    (1500, 1500, 16, torch.bfloat16, 0.7, 0.0),
    (1500, 1500, 16, torch.float16, 1.3, 0.0),
    (32000, 32000, 8, torch.bfloat16, 1.0, 0.0),
    (151936, 152064, 6, torch.float32, 1.3, 0.0),
    (1500, 1500, 0, torch.float32, 1.0, 0.0),  # no tokens: every rank still takes part
]
EXCLUDED_PART, LOWEST_PART = len(CASES), len(CASES) + 1
"""Two more cases: the second half's logits are all -inf (excluded), or all the most negative finite number."""
BACKENDS = ("auto", "torch")


def case_of(number: int) -> Case:
    if number in (EXCLUDED_PART, LOWEST_PART):
        case = make_case((12,), 400, seed=9)
        case.logits[:, 200:] = -torch.inf if number == EXCLUDED_PART else torch.finfo(torch.float32).min
        case.targets[case.targets >= 200] -= 200
        return case
    vocab, columns, tokens, dtype, temperature, shift = CASES[number]
    case = make_case((tokens,), vocab, columns, dtype=dtype, temperature=temperature, shift=shift, seed=number)
    quarter = columns // 4
    edges = torch.tensor([0, quarter - 1, quarter, 2 * quarter - 1, 2 * quarter, vocab - 1])
    case.targets[: len(edges)] = edges.clamp(max=vocab - 1)[: len(case.targets)]
    return case


def score(rank: int, ranks: int) -> dict[str, list[dict]]:
    import torch.distributed as dist

    sent: list[int] = []
    real = dist.all_gather_into_tensor

    def counted(out: torch.Tensor, own: torch.Tensor, **options):
        sent.append(own.nbytes)
        return real(out, own, **options)

    dist.all_gather_into_tensor = counted
    return {backend: [one_call(case_of(n), rank, ranks, backend, sent) for n in range(LOWEST_PART + 1)] for backend in BACKENDS}


def one_call(case: Case, rank: int, ranks: int, backend: str, sent: list[int]) -> dict:
    import torch.distributed as dist

    from m2po_megatron.kernels.logprob import vocab_parallel_logprob

    part = case.logits.chunk(ranks, 1)[rank].clone().requires_grad_()
    sent.clear()
    logprobs, entropies = vocab_parallel_logprob(
        part,
        case.targets,
        temperature=case.temperature,
        entropy="grad",
        tp_group=dist.group.WORLD,
        vocab_size=case.vocab_size,
        backend=backend,
    )
    (logprobs * case.upstream + entropies * case.upstream_entropy).sum().backward()
    return {"values": torch.stack([logprobs, entropies]).detach(), "grad": part.grad, "sent": list(sent)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_equal_one_process(ranks: int) -> None:
    found = run_ranks(score, ranks, ranks)
    for backend in BACKENDS:
        for number in range(LOWEST_PART + 1):
            case, results = case_of(number), [rank[backend][number] for rank in found]
            for result in results:
                assert torch.equal(result["values"], results[0]["values"])
                assert result["sent"] == ([] if ranks == 1 else [16 * len(case.targets)])
            gradient = torch.cat([result["grad"] for result in results], 1)
            assert_agrees(*results[0]["values"], gradient, case, expected_of(case))
            if case.logits.dtype == torch.float32 and len(case.targets):
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
