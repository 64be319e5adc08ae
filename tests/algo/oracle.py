"""Algorithm 1 as the paper states it, one token at a time, in exact arithmetic: the oracle of the mask's tests."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    log_ratio: np.ndarray  # float32 [n]
    advantages: np.ndarray  # float32 [n]
    loss_mask: np.ndarray  # bool [n]
    ids: np.ndarray  # int64 [n], unique
    threshold: float


@dataclass
class LiteralMask:
    mask: list[bool]
    m2_before: float
    m2_after: float
    trust_region_tokens: int
    masked_tokens: int
    nonfinite_tokens: int
    cutoff: float | None


def random_case(rng: np.random.Generator, tokens: int | None = None) -> Case:
    """Heavy-tailed log-ratios, now and then rounded (ties), zero, non-finite, tiny or huge."""
    n = int(rng.integers(1, 400)) if tokens is None else tokens
    ratio = (rng.standard_t(2, n) * 0.2).astype(np.float32)
    if rng.random() < 0.4:
        ratio = np.round(ratio, int(rng.integers(0, 3))).astype(np.float32)
    if rng.random() < 0.2:
        ratio *= np.float32(rng.choice([1e-21, 1e-15, 1e10]))
    for value, share in ((0.0, 0.3), (np.nan, 0.05), (np.inf, 0.05), (1e25, 0.05)):
        if rng.random() < 0.2:
            ratio[rng.random(n) < share] = value
    return Case(
        ratio,
        rng.choice([-1.0, 0.0, 0.5], n, p=[0.45, 0.1, 0.45]).astype(np.float32),
        rng.random(n) < rng.choice([0.0, 0.5, 1.0], p=[0.05, 0.45, 0.5]),
        rng.permutation(n).astype(np.int64) * int(rng.choice([1, 2**33])) - int(rng.integers(0, n + 1)),
        float(rng.choice([0.0, 0.001, 0.01, 0.04, 0.1, 1.0])),
    )


def literal_mask(case: Case) -> LiteralMask:
    """While the mean of the squares in the trust region exceeds the threshold, drop the largest (of equals: the largest id)."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = case.log_ratio * case.log_ratio
    mask = [bool(m) and bool(np.isfinite(s)) for m, s in zip(case.loss_mask, squares, strict=True)]
    region = [
        i
        for i, (x, a) in enumerate(zip(case.log_ratio, case.advantages, strict=True))
        if mask[i] and ((a > 0 and x > 0) or (a < 0 and x < 0))
    ]
    exact = {i: Fraction(float(squares[i])) for i in region}
    order = sorted(region, key=lambda i: (exact[i], int(case.ids[i])))
    total = sum(exact.values(), Fraction(0))
    before = total / len(order) if order else Fraction(0)
    while order and (case.threshold != float("inf") and total / len(order) > Fraction(case.threshold)):
        largest = order.pop()
        total -= exact[largest]
        mask[largest] = False
    dropped = len(region) - len(order)
    return LiteralMask(
        mask,
        float(before),
        float(total / len(order)) if order else 0.0,
        len(region),
        dropped,
        int(case.loss_mask.sum()) - sum(bool(m) and bool(np.isfinite(s)) for m, s in zip(case.loss_mask, squares, strict=True)),
        None if not dropped else float(squares[order[-1]]) if order else 0.0,
    )
