"""vocab_parallel_logprob on one process against float64 PyTorch, for every backend that runs on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.kernels import logprob_native, logprob_torch
from m2po_megatron.kernels.logprob import vocab_parallel_logprob
from tests.kernels.reference import (
    IGNORED,
    Case,
    assert_agrees,
    assert_close,
    expected_of,
    make_case,
    reference_logprob,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LIBRARY_IS_BUILT = not logprob_native.obstacle(torch.zeros(1))
BACKENDS = ["torch", "native"] if LIBRARY_IS_BUILT else ["torch"]  # test_native.py demands it where a compiler is


def backends_for(dtype: torch.dtype) -> list[str]:
    return [b for b in BACKENDS if b == "torch" or not logprob_native.obstacle(torch.zeros(1, dtype=dtype))]


def run(case: Case, backend: str, *, entropy: str = "grad", inplace: bool = False):
    """(log-probs, entropies, gradient); the caller's logits stay as they are."""
    leaf = case.logits.clone().requires_grad_()
    given_up = leaf * 1  # an intermediate tensor, which may be overwritten
    logprobs, entropies = vocab_parallel_logprob(
        given_up,
        case.targets,
        temperature=case.temperature,
        entropy=entropy,
        vocab_size=case.vocab_size,
        inplace_backward=inplace,
        backend=backend,
    )
    total = (logprobs * case.upstream).sum()
    if entropy == "grad":
        total = total + (entropies * case.upstream_entropy).sum()
    total.backward()
    assert torch.equal(leaf.detach().nan_to_num(), case.logits.nan_to_num())
    return logprobs, entropies, leaf.grad


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "vocab", "columns"),
    [
        ((9,), 7, 7),
        ((9,), 7, 12),
        ((3, 5), 1500, 1500),
        ((5,), 32000, 32003),
        ((3,), 151936, 152064),
        ((1,), 1, 1),
        ((0,), 9, 9),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_values_and_gradients(dtype, shape, vocab, columns, temperature) -> None:
    case = make_case(shape, vocab, columns, dtype=dtype, temperature=temperature)
    expected = expected_of(case)
    for backend in backends_for(dtype):
        for inplace in (False, True):
            assert_agrees(*run(case, backend, inplace=inplace), case, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("entropy", ["none", "value"])
def test_without_the_entropys_gradient(dtype, entropy) -> None:
    case = make_case((20,), 77, 80, dtype=dtype, temperature=0.7)
    expected = expected_of(case, entropy_gradient=False)
    for backend in backends_for(dtype):
        logprobs, entropies, gradient = run(case, backend, entropy=entropy)
        assert (entropies is None) == (entropy == "none")
        assert entropies is None or not entropies.requires_grad
        assert_agrees(logprobs, entropies, gradient, case, expected)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_and_dtype(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 300), "vocabulary")
    dtype = data.draw(st.sampled_from(FLOATS), "dtype")
    case = make_case(
        (data.draw(st.integers(0, 12), "tokens"),),
        vocab,
        vocab + data.draw(st.integers(0, 20), "padding"),
        dtype=dtype,
        temperature=data.draw(st.floats(0.3, 3.0), "temperature"),
        scale=data.draw(st.sampled_from([0.0, 1.0, 8.0]), "scale"),
        shift=data.draw(st.sampled_from([0.0, 30.0, -30.0]), "shift"),
        ignored=data.draw(st.sampled_from([0.0, 0.3, 1.0]), "ignored"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    excluded = data.draw(st.integers(0, vocab - 1), "excluded tokens")
    case.logits[:, :excluded] = -torch.inf
    keep = case.targets != IGNORED
    case.targets[keep] = case.targets[keep].clamp(min=excluded)
    expected = expected_of(case)
    for backend in backends_for(dtype):
        assert_agrees(*run(case, backend, inplace=data.draw(st.booleans(), "in place")), case, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logits_spread_over_hundreds(temperature: float, seed: int, backend: str) -> None:
    case = make_case((200,), 50, scale=150.0, temperature=temperature, seed=seed)
    assert_agrees(*run(case, backend), case, expected_of(case))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [-300.0, 300.0, 3e4])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_large_logits(shift: float, temperature: float, backend: str) -> None:
    case = make_case((50,), 1000, 1000)
    case.logits = (case.logits + shift).to(torch.float32)
    case.temperature = temperature
    assert_agrees(*run(case, backend), case, expected_of(case))


@pytest.mark.parametrize("backend", BACKENDS)
def test_excluded_tokens_leave_no_nan(backend: str) -> None:
    case = make_case((8,), 20, 20)
    case.logits[:, 10:] = -torch.inf
    case.targets[case.targets >= 10] -= 10
    expected = expected_of(case)
    _, _, gradient = result = run(case, backend)
    assert_agrees(*result, case, expected)
    assert float(gradient[:, 10:].abs().sum()) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_an_excluded_target_is_impossible(backend: str, entropy: str) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    logits[0, 4] = -torch.inf
    logprobs, _ = vocab_parallel_logprob(logits, torch.tensor([4, 4]), entropy=entropy, backend=backend)
    assert float(logprobs[0]) == -torch.inf
    assert_close(logprobs[1:], reference_logprob(logits[1:].double(), torch.tensor([4]), 1.0, 9)[0], 4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_not_a_number_is_never_hidden(backend: str, entropy: str) -> None:
    case = make_case((6,), 30, 30, ignored=0.0)
    case.logits[2, 7] = torch.nan
    logprobs, entropies, _ = run(case, backend, entropy=entropy)
    assert torch.isnan(logprobs).tolist() == [False, False, True, False, False, False]
    assert entropies is None or torch.isnan(entropies).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_gradient_get_zeros_even_from_nan(backend: str) -> None:
    case = make_case((6,), 30, 34, ignored=0.0)
    case.targets[4] = IGNORED
    case.logits[[2, 4]] = torch.nan
    case.upstream[2] = case.upstream_entropy[2] = 0.0
    _, _, gradient = run(case, backend)
    assert bool(gradient.isfinite().all())
    assert float(gradient[[2, 4]].abs().sum()) == 0.0
    assert bool((gradient[[0, 1, 3, 5], :30].abs().sum(1) > 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_batch_of_ignored_tokens(backend: str, inplace: bool) -> None:
    case = make_case((5,), 30, 34, ignored=1.0)
    logprobs, entropies, gradient = run(case, backend, inplace=inplace)
    assert float((logprobs.abs() + entropies.abs() + gradient.abs().sum(1)).detach().sum()) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_row_sum_to_zero_and_logprobs_are_never_positive(backend: str) -> None:
    case = make_case((200,), 50, 50, scale=40.0, temperature=0.3)
    logprobs, _, gradient = run(case, backend, entropy="none")
    assert float(logprobs.detach().max()) <= 0.0
    assert float(gradient.sum(-1).abs().max()) <= 2e-4  # logits of 400 in float32: 3e-5 of p each
    confident = torch.tensor([[30.0, -30.0, -30.0]], dtype=torch.bfloat16)
    assert float(vocab_parallel_logprob(confident, torch.tensor([0]), backend=backend)[0]) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_writes_into_the_logits_and_only_once(backend: str) -> None:
    case = make_case((5,), 12)
    leaf = case.logits.clone().requires_grad_()
    given_up = leaf * 1
    logprobs, _ = vocab_parallel_logprob(given_up, case.targets, inplace_backward=True, backend=backend)
    logprobs.backward(case.upstream, retain_graph=True)
    assert torch.equal(given_up.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="overwritten"):
        logprobs.backward(case.upstream)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sliced_and_misaligned_tensors(backend: str) -> None:
    case = make_case((4, 9), 33)
    flat = torch.zeros(4 * 9 * 33 + 1)
    shifted = flat[1:].view(4, 9, 33).copy_(case.logits)  # starts four bytes off any alignment
    expected = reference_logprob(case.logits.double(), case.targets, 1.0, 33)[0]
    for logits, targets, part in (
        (case.logits.transpose(0, 1)[1:], case.targets.t()[1:], expected.t()[1:]),
        (case.logits[:, 1::2], case.targets[:, 1::2], expected[:, 1::2]),
        (case.logits.transpose(1, 2).contiguous().transpose(1, 2), case.targets, expected),
        (shifted, case.targets, expected),
    ):
        assert_close(vocab_parallel_logprob(logits, targets, backend=backend)[0], part, 4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_reader_of_overwritten_logits_is_told(backend: str) -> None:
    """Compiled kernels write past autograd, which must still refuse to use what they overwrote."""
    case = make_case((5,), 12)
    leaf = case.logits.clone().requires_grad_()
    given_up = leaf * 1
    squares = (given_up * given_up).sum()
    logprobs, _ = vocab_parallel_logprob(given_up, case.targets, inplace_backward=True, backend=backend)
    torch.autograd.grad(logprobs, given_up, case.upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_rows_that_share_memory_are_not_overwritten() -> None:
    logits = torch.randn(1, 9).expand(4, 9)
    with pytest.raises(ValueError, match="share memory"):
        vocab_parallel_logprob(logits, torch.zeros(4, dtype=torch.int64), inplace_backward=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_rows_get_a_gradient_each(backend: str) -> None:
    base = torch.randn(40, generator=torch.Generator().manual_seed(2))
    windows = base.unfold(0, 33, 1)  # [8, 33], strides (1, 1)
    case = Case(windows.contiguous(), torch.arange(8), 33, 1.0, torch.randn(8), torch.randn(8))
    leaf = windows.detach().requires_grad_()
    logprobs, entropies = vocab_parallel_logprob(leaf, case.targets, entropy="grad", backend=backend)
    total = (logprobs * case.upstream + entropies * case.upstream_entropy).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    assert_agrees(logprobs, entropies, gradient, case, expected_of(case))


def test_a_second_derivative_is_refused() -> None:
    leaf = torch.randn(3, 7, requires_grad=True)
    weights = torch.randn(3, requires_grad=True)
    logprobs, _ = vocab_parallel_logprob(leaf, torch.tensor([0, 1, 2]))
    (first,) = torch.autograd.grad((weights * logprobs).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("backend", [logprob_torch, logprob_native])
def test_a_target_outside_the_vocabulary_is_not_a_number(backend) -> None:
    """Where looking would stall the device, the public functions let it through."""
    statistics = torch.tensor([[[0.0], [2.0], [0.0], [0.0]]]).expand(1, 4, 3)
    logprobs, _, _ = backend.merge(statistics, torch.tensor([1, 9, -5]), 2)
    assert torch.isnan(logprobs).tolist() == [False, True, True]


def test_rows_of_a_chunk_do_not_matter(monkeypatch) -> None:
    case = make_case((40,), 99, 104)
    whole = run(case, "torch")
    monkeypatch.setattr(logprob_torch, "CHUNK_ELEMENTS", 3 * 104)
    for a, b in zip(whole, run(case, "torch"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"vocab_size": 0}, "cannot hold a vocabulary of 0"),
        ({"logits": torch.tensor(1.0)}, "V/TP"),
        ({"temperature": 1e-46}, "temperature"),
        ({"targets": torch.zeros(2, dtype=torch.int64, device="meta")}, "targets are on meta, but logits on cpu"),
        ({"vocab_size": 13}, "13"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": "triton"}, "triton.*cpu"),
        ({"entropy": "yes"}, "entropy"),
        ({"targets": torch.tensor([0, 12])}, "12"),
        ({"targets": torch.tensor([0, -1])}, "-1"),
        ({"targets": torch.tensor([0])}, "targets"),
        ({"targets": torch.tensor([0, 1], dtype=torch.int32)}, "int64"),
        ({"logits": torch.zeros(2, 12, dtype=torch.int64)}, "float"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    arguments = {"logits": torch.zeros(2, 12), "targets": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(arguments.pop("logits"), arguments.pop("targets"), **arguments)
