"""The second-moment mask over gloo ranks: one answer however the tokens are spread, at a constant price."""

from __future__ import annotations

import numpy as np
import torch

from tests.algo.oracle import Case, LiteralMask, literal_mask, random_case
from tests.distributed.harness import run_ranks

CASES = 60


def spread(case: Case, seed: int, ranks: int) -> list[np.ndarray]:
    """Which tokens each rank has: any split, in any order, empty ones included."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(case.ids))
    cuts = np.sort(rng.integers(0, len(order) + 1, ranks - 1))
    if seed % 3 == 0:
        cuts[:] = len(order)  # one rank has everything
    return np.split(order, cuts)


def masks_of_rank(rank: int, ranks: int) -> tuple[list[tuple], list[int]]:
    """This rank's answers for every case, and the bytes it put into collectives for each."""
    import torch.distributed as dist

    from m2po_megatron.algo.m2 import second_moment_mask

    sent, results = [], []
    real = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent[-1] += tensor.numel() * tensor.element_size()
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    for seed in range(CASES):
        case = random_case(np.random.default_rng(seed))
        mine = spread(case, seed, ranks)[rank]
        sent.append(0)
        result = second_moment_mask(
            torch.from_numpy(case.log_ratio[mine]),
            torch.from_numpy(case.advantages[mine]),
            torch.from_numpy(case.loss_mask[mine]),
            case.threshold,
            token_ids=torch.from_numpy(case.ids[mine]),
            group=dist.group.WORLD,
        )
        numbers = LiteralMask(
            [],
            result.m2_before,
            result.m2_after,
            result.trust_region_tokens,
            result.masked_tokens,
            result.nonfinite_tokens,
            result.cutoff,
        )
        results.append((mine.tolist(), result.mask.tolist(), numbers))
    dist.all_reduce = real
    return results, sent


def check_ranks(ranks: int) -> list[list[int]]:
    answers = run_ranks(masks_of_rank, ranks, ranks)
    for seed in range(CASES):
        case = random_case(np.random.default_rng(seed))
        expected = literal_mask(case)
        bits: dict[int, bool] = {}
        for results, _ in answers:
            mine, mask, numbers = results[seed]
            bits.update(zip(mine, mask, strict=True))
            numbers.mask = expected.mask
            assert numbers == expected, f"case {seed}"
        assert [bits[i] for i in range(len(case.ids))] == expected.mask, f"case {seed}"
    return [sent for _, sent in answers]


def test_two_ranks() -> None:
    check_ranks(2)


def test_four_ranks_send_the_same_few_bytes() -> None:
    sent = check_ranks(4)
    assert all(bytes_of_rank == sent[0] for bytes_of_rank in sent)
    assert max(sent[0]) <= 100 * 1024
    assert len(set(sent[0])) <= 4  # within the budget, cut, cut with no equal kept, equals at the cut
