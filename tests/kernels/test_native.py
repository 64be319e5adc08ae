"""The compiled CPU backend: against float64 and the torch backend, its independence of threads and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from m2po_megatron.kernels import logprob_native, logprob_torch
from m2po_megatron.kernels.backends import Shard
from m2po_megatron.kernels.logprob import vocab_parallel_logprob
from tests.kernels.reference import Case, assert_agrees, assert_close, expected_of, make_case, reference_logprob

WHOLE_BLOCKS = 3 * 4096  # of logprob_native.cpp
OTHERS = Shard(first=1 << 40, columns=0, vocab_size=1 << 41)
"""A part whose first id is so high that no target of these tests lies in it."""


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[0, 1, 2], ids=["widest", "narrower", "narrowest"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set that this machine has (the last repeatedly where it has fewer)."""
    monkeypatch.setattr(logprob_native, "NARROWER", request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def whole(columns: int) -> Shard:
    return Shard(0, columns, columns)


def statistics(backend, case: Case, shard: Shard, moment: bool = True) -> Tensor:
    out = torch.full((4, len(case.targets)), torch.nan)
    backend.row_statistics(case.logits, case.targets, out, shard, case.temperature, moment)
    return out


def both_passes(case: Case, entropy: str = "grad", inplace: bool = False, rows: slice = slice(None)):
    """(log-probs, entropies, gradient) with the case's upstream gradients; the entropy's where it has a gradient."""
    leaf = case.logits[rows].detach().clone().requires_grad_()
    logp, entropies = vocab_parallel_logprob(
        leaf * 1,  # an intermediate tensor, which may be given up
        case.targets[rows],
        temperature=case.temperature,
        entropy=entropy,
        vocab_size=case.vocab_size,
        inplace_backward=inplace,
        backend="native",
    )
    loss = (logp * case.upstream[rows]).sum()
    if entropy == "grad":
        loss = loss + (entropies * case.upstream_entropy[rows]).sum()
    loss.backward()
    return logp.detach(), None if entropies is None else entropies.detach(), leaf.grad


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize(
    ("vocab", "padding"), [(1, 0), (7, 0), (15, 4), (16, 0), (17, 15), (1500, 3), (32000, 256), (WHOLE_BLOCKS, 0)]
)
def test_values_and_gradients_against_float64(dtype, temperature, vocab, padding) -> None:
    case = make_case((9,), vocab, vocab + padding, dtype=dtype, temperature=temperature)
    expected = expected_of(case)
    plain, inplace = both_passes(case), both_passes(case, inplace=True)
    assert_agrees(*plain, case, expected)
    for one, other in zip(plain, inplace, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_entropy_mode_decides_what_is_computed(dtype) -> None:
    case = make_case((12,), 3000, dtype=dtype)
    none, value, grad = (both_passes(case, mode) for mode in ("none", "value", "grad"))
    assert none[1] is None
    assert torch.equal(none[0], grad[0])
    assert torch.equal(value[1], grad[1])
    assert torch.equal(none[2], value[2])
    assert_agrees(value[0], value[1], value[2], case, expected_of(case, entropy_gradient=False))
    assert not statistics(logprob_native, case, whole(3000), moment=False)[2].any()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_statistics_and_gradients_are_those_of_the_torch_backend(temperature: float) -> None:
    case = make_case((20,), 9000, temperature=temperature)
    case.targets[case.targets != -100] *= 3
    for shard in (Shard(0, 9000, 30000), Shard(9000, 9000, 30000), Shard(27000, 3000, 30000), Shard(36000, 0, 30000)):
        ours, theirs = (statistics(backend, case, shard) for backend in (logprob_native, logprob_torch))
        assert torch.equal(ours[[0, 3]], theirs[[0, 3]])
        assert_close(ours[1:3], theirs[1:3], 0.0, 2e-6)
        if shard.columns == 0:
            continue
        lse, entropies = theirs[0].clamp(min=0) + 9, theirs[1].clamp(max=9)  # any numbers will do
        gradients = [torch.full_like(case.logits, torch.nan) for _ in range(2)]
        for backend, gradient in zip((logprob_native, logprob_torch), gradients, strict=True):
            rest = (lse, entropies, case.upstream, case.upstream_entropy, shard, temperature)
            backend.write_gradient(case.logits, gradient, case.targets, *rest)
        assert_close(*gradients, 1e-7, 5e-6)
    assert logprob_native.merge is logprob_torch.merge


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("columns", [151936, 151936 + 17])
def test_sums_over_a_large_vocabulary_keep_their_accuracy(columns: int) -> None:
    case = make_case((6,), columns, scale=1.0, ignored=0.0)
    case.logits *= torch.tensor([0.01, 1, 2, 3, 5, 9])[:, None]
    _, d, s, _ = statistics(logprob_native, case, whole(columns))
    x = case.logits.double() - case.logits.double().amax(1, keepdim=True)
    assert_close(d, x.exp().sum(1), 0.0, 3e-7)
    assert_close(s, (x * x.exp()).sum(1), 0.0, 3e-7)
    expected = reference_logprob(case.logits.double(), case.targets, 1.0, columns)
    for actual, exact in zip(both_passes(case)[:2], expected, strict=True):
        assert_close(actual, exact, 1e-6, 1e-7)


def exponentials(z: Tensor) -> Tensor:
    """e^z as the library has it: a row of columns with lse 0, upstream -1 and the target elsewhere has it as gradient."""
    gradient = torch.full_like(z[None], torch.nan)
    zero = torch.zeros(1)
    shard = Shard(OTHERS.first, len(z), OTHERS.vocab_size)
    logprob_native.write_gradient(z[None], gradient, torch.tensor([0]), zero, zero, zero - 1, None, shard, 1.0)
    return gradient[0]


@pytest.mark.usefixtures("instructions")
def test_the_exponential_is_good_to_an_ulp_and_keeps_what_is_no_number() -> None:
    z = torch.linspace(-87.33, 88.37, 2_000_003)
    exact = z.double().exp()
    ulp = torch.finfo(torch.float32).eps * 2.0 ** exact.log2().floor()
    assert float(((exponentials(z).double() - exact).abs() / ulp).max()) < 1.2
    near = torch.cat([-torch.logspace(-45, -1, 400), torch.logspace(-45, -1, 400), torch.tensor([0.0, -0.0])])
    assert_close(exponentials(near), near.double().exp(), 0.0, 1.2e-7)
    assert torch.equal(exponentials(torch.tensor([0.0, -0.0])), torch.ones(2))
    assert not exponentials(torch.tensor([-87.4, -89.0, -104.0, -1e3, -1e30, -3.4e38, -torch.inf])).any()
    assert exponentials(torch.tensor([89.0, 1e3, 1e30, torch.inf])).isposinf().all()
    for width in (1, 16, 37):
        assert exponentials(torch.full((width,), torch.nan)).isnan().all()


@pytest.mark.parametrize("shift", [-300.0, 300.0, 3e4])
def test_shifted_logits(shift: float) -> None:
    case = make_case((10,), 5000, shift=shift)
    expected = expected_of(case)
    logp, entropies, gradient = both_passes(case)
    assert_close(logp, expected.logprobs, 4e-6)
    assert_close(entropies, expected.entropies, 4e-6)
    log_p = torch.log_softmax(case.logits.double(), 1)
    surprise = (log_p + expected.entropies[:, None]).abs() + 1
    terms = case.upstream[:, None].abs() + case.upstream_entropy[:, None].abs() * surprise
    # log p = x - lse, and lse is rounded at the shift's size
    allowed = 1e-6 + 2.0**-23 * abs(shift) * log_p.exp() * terms
    assert bool(((gradient.double() - expected.gradient).abs() <= allowed).all())


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits_leave_one_token_with_all_the_probability(dtype, temperature: float) -> None:
    case = make_case((8,), 900, dtype=dtype, temperature=temperature)
    case.logits[:, 5] = 1e30
    case.logits[:, 6] = -1e30
    case.targets[:] = 5
    for result in both_passes(case):
        assert not result.any()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_minus_infinity_have_no_probability_and_no_gradient(dtype) -> None:
    case = make_case((10,), WHOLE_BLOCKS + 5, dtype=dtype)
    case.logits[:, :4500] = -torch.inf  # the first block whole, and a part of the second
    case.logits[:, -2:] = -torch.inf
    case.targets.clamp_(max=WHOLE_BLOCKS)
    case.targets[case.targets != -100] += 4500 - case.targets[case.targets != -100].clamp(max=4500)
    assert_agrees(*both_passes(case), case, expected_of(case))
    gradient = both_passes(case)[2]
    assert not gradient[:, :4500].any()
    assert not gradient[:, -2:].any()
    empty = Case(torch.full((2, 40), -torch.inf, dtype=dtype), torch.tensor([1, -100]), 40)
    lowest = torch.finfo(torch.float32).min
    assert statistics(logprob_native, empty, whole(40)).T.tolist() == [
        [lowest, 0.0, 0.0, -torch.inf],
        [lowest, 0, 0, 0],
    ]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 77, 4096, 9002])
def test_what_is_no_number_stays_visible_in_its_row_alone(value: float, dtype, column: int) -> None:
    case = make_case((6,), 9003, dtype=dtype, ignored=0.0)
    clean = both_passes(case)
    case.logits[2, column] = value
    results = both_passes(case)
    others = [0, 1, 3, 4, 5]
    for actual, expected in zip(results, clean, strict=True):
        assert bool(actual[2].isnan().all())
        assert torch.equal(actual[others], expected[others])


def test_idle_and_ignored_rows_are_exact_zeros_whatever_their_logits() -> None:
    case = make_case((5,), 100, ignored=0.0)
    case.targets[0] = -100
    case.logits[:3] = torch.nan
    case.upstream[1:3] = 0
    case.upstream_entropy[1] = 0
    zero = torch.zeros(5)
    for upstream_entropy, nan_rows in ((None, []), (case.upstream_entropy, [2])):
        gradient = torch.full_like(case.logits, torch.nan)
        rest = (zero, zero, case.upstream, upstream_entropy, whole(100), 1.0)
        logprob_native.write_gradient(case.logits, gradient, case.targets, *rest)
        assert gradient.isnan().all(1).nonzero()[:, 0].tolist() == nan_rows
        assert (gradient == 0).all(1).nonzero()[:, 0].tolist() == [row for row in (0, 1, 2) if row not in nan_rows]


@pytest.mark.usefixtures("instructions")
def test_bfloat16_gradients_round_to_nearest_even_and_a_nan_stays_one() -> None:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=g).to(torch.int32)
    bits[:2048] = bits[:2048] >> 16 << 16 | 0x8000  # halfway between two bfloat16 numbers
    bits[-1] = 0x7FFFFFFF  # a NaN that rounding would carry into another number
    upstream = bits.view(torch.float32)
    zero, gradient = torch.zeros(4096), torch.full((4096, 1), 7.0, dtype=torch.bfloat16)
    rest = (torch.zeros(4096, dtype=torch.int64), zero, zero, upstream, None, replace(OTHERS, columns=1), 1.0)
    logprob_native.write_gradient(torch.zeros(4096, 1, dtype=torch.bfloat16), gradient, *rest)
    torch.testing.assert_close(gradient[:, 0], (-upstream).bfloat16(), atol=0, rtol=0, equal_nan=True)


def test_strides_of_every_argument() -> None:
    for dtype in DTYPES:
        case = make_case((11,), 650, 700, dtype=dtype)
        shard = whole(650)
        dense = statistics(logprob_native, case, shard)
        rest = (*logprob_native.merge(dense[None], case.targets, 650)[1:], case.upstream, case.upstream_entropy)
        gradient = torch.empty_like(case.logits)
        logprob_native.write_gradient(case.logits, gradient, case.targets, *rest, shard, 1.0)

        wide = torch.full((11, 733), 7.0, dtype=dtype)
        logits = wide[:, 13:713].copy_(case.logits)
        targets, *apart = (torch.stack([each, each + 1], 1)[:, 0] for each in (case.targets, *rest))
        columns, turned = torch.full((4, 30), 5.0), torch.empty(11, 4)
        logprob_native.row_statistics(logits, targets, columns[:, 9:20], shard, 1.0, True)
        logprob_native.row_statistics(logits, targets, turned.T, shard, 1.0, True)
        assert torch.equal(columns[:, 9:20], dense)
        assert torch.equal(turned.T, dense)
        assert bool((columns[:, :9] == 5).all() and (columns[:, 20:] == 5).all())

        other = torch.full((11, 801), 7.0, dtype=dtype)
        for target, into in ((other, other[:, 1:701]), (wide, logits)):  # the second is in place
            logprob_native.write_gradient(logits, into, targets, *apart, shard, 1.0)
            assert torch.equal(into, gradient)
            into.fill_(7)
            assert bool((target == 7).all())
            logits.copy_(case.logits)


def test_no_rows_and_no_columns() -> None:
    none = make_case((0,), 5)
    assert statistics(logprob_native, none, whole(5)).shape == (4, 0)
    assert both_passes(none)[2].shape == (0, 5)
    case = make_case((3,), 5)
    zero = torch.zeros(3)
    logprob_native.write_gradient(case.logits, case.logits, case.targets, zero, zero, case.upstream, None, OTHERS, 1.0)
    assert not case.logits.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_chunks_of_rows_change_no_bit(dtype, threads: None) -> None:
    case = make_case((37,), 20011, dtype=dtype, temperature=0.8)  # several threads' worth of logits
    expected = both_passes(case)
    for count, step in ((1, 37), (2, 37), (5, 37), (1, 1), (2, 11)):
        torch.set_num_threads(count)
        pieces = [both_passes(case, rows=slice(start, start + step)) for start in range(0, 37, step)]
        for parts, one in zip(zip(*pieces, strict=True), expected, strict=True):
            assert torch.equal(torch.cat(parts), one)
