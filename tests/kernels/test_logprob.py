"""vocab_parallel_logprob on one process against float64 PyTorch."""

from __future__ import annotations

import pytest
import torch

from m2po_megatron.kernels import logprob_torch
from m2po_megatron.kernels.logprob import vocab_parallel_logprob

SHAPES = [((7,), 11), ((3, 5), 130), ((1,), 1), ((0,), 9), ((40,), 4099)]


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab: int):
    """(log-probs, entropies) in float64, differentiable; 0 where ignored."""
    log_p = torch.log_softmax(logits.double()[..., :vocab] / temperature, -1)
    ignored = targets == -100
    logp = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return logp.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def case(shape: tuple[int, ...], columns: int, vocab: int, dtype: torch.dtype, seed: int = 0, scale: float = 4.0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, columns, generator=g) * scale).to(dtype)
    targets = torch.randint(0, vocab, shape, generator=g)
    targets[torch.rand(shape, generator=g) < 0.2] = -100
    upstream = [torch.randn(shape, generator=g) for _ in range(2)]
    return logits, targets, upstream


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.numel() == 0 or float((actual.detach().double() - expected.detach().double()).abs().max()) <= tolerance


@pytest.mark.parametrize(("shape", "vocab"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients(shape, vocab, dtype, temperature, padding, inplace, monkeypatch) -> None:
    monkeypatch.setattr(logprob_torch, "CHUNK_ELEMENTS", 3 * (vocab + padding))  # several chunks, the last one ragged
    logits, targets, upstream = case(shape, vocab + padding, vocab, dtype)
    if padding:
        logits[..., vocab:] = 1e4  # counted, it would dominate everything
    exact = logits.double().requires_grad_()
    expected = reference(exact, targets, temperature, vocab)
    (expected[0] * upstream[0] + expected[1] * upstream[1]).sum().backward()
    leaf = logits.clone().requires_grad_()
    given = leaf * 1  # an intermediate tensor, which may be given up
    logp, entropy = vocab_parallel_logprob(
        given, targets, temperature=temperature, entropy="grad", vocab_size=vocab, inplace_backward=inplace
    )
    close(logp, expected[0], 5e-6)
    close(entropy, expected[1], 1e-5)
    (logp * upstream[0] + entropy * upstream[1]).sum().backward()
    close(leaf.grad, exact.grad, 2e-5 if dtype == torch.float32 else 2e-2)
    assert float(leaf.grad[..., vocab:].abs().sum()) == 0.0
    assert float(leaf.grad[targets == -100].abs().sum()) == 0.0
    assert torch.equal(leaf.detach(), logits)


def test_entropy_by_value_has_no_gradient_and_none_is_none() -> None:
    logits, targets, _ = case((6,), 30, 30, torch.float32)
    leaf = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob(leaf, targets, entropy="value")
    assert logp.requires_grad
    assert not entropy.requires_grad
    close(entropy, reference(logits, targets, 1.0, 30)[1], 1e-5)
    assert vocab_parallel_logprob(leaf, targets)[1] is None


@pytest.mark.parametrize("shift", [-300.0, 300.0, 3e4])
def test_large_logits(shift: float) -> None:
    logits, targets, _ = case((16,), 500, 500, torch.float32)
    shifted = logits + shift
    expected = reference(shifted, targets, 1.0, 500)
    logp, entropy = vocab_parallel_logprob(shifted, targets, entropy="value")
    close(logp, expected[0], 1e-5)
    close(entropy, expected[1], 1e-5)


def test_excluded_tokens_leave_no_nan() -> None:
    logits, targets, upstream = case((8,), 20, 10, torch.float32)
    logits[:, 10:] = -torch.inf
    leaf = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob(leaf, targets, entropy="grad")
    expected = reference(logits, targets, 1.0, 10)
    close(logp, expected[0], 5e-6)
    close(entropy, expected[1], 1e-5)
    (logp * upstream[0] + entropy * upstream[1]).sum().backward()
    assert bool(leaf.grad.isfinite().all())
    assert float(leaf.grad[:, 10:].abs().sum()) == 0.0


def test_rows_without_gradient_get_zeros_even_from_nan() -> None:
    logits, targets, _ = case((6,), 30, 30, torch.float32)
    targets[:] = torch.arange(6)
    logits[2] = torch.nan
    leaf = logits.clone().requires_grad_()
    logp, _ = vocab_parallel_logprob(leaf, targets)
    logp.backward(torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0, 1.0]))
    assert bool(leaf.grad.isfinite().all())
    assert float(leaf.grad[[2, 4]].abs().sum()) == 0.0
    assert float(leaf.grad[0].abs().sum()) > 0


def test_gradients_of_a_row_sum_to_zero_and_logprobs_are_never_positive() -> None:
    logits, targets, upstream = case((200,), 50, 50, torch.float32, scale=40.0)
    leaf = logits.clone().requires_grad_()
    logp, _ = vocab_parallel_logprob(leaf, targets, temperature=0.3)
    assert float(logp.max()) <= 0.0
    logp.backward(upstream[0])
    assert float(leaf.grad.sum(-1).abs().max()) <= 2e-4  # logits of 400 in float32: 3e-5 of p each


def test_in_place_writes_into_the_logits_and_only_once() -> None:
    logits, targets, upstream = case((5,), 12, 12, torch.float32)
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    logp, _ = vocab_parallel_logprob(given, targets, inplace_backward=True)
    logp.backward(upstream[0], retain_graph=True)
    assert torch.equal(given.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="overwritten"):
        logp.backward(upstream[0])


def test_a_sliced_view_of_targets_and_logits() -> None:
    logits, targets, _ = case((4, 9), 33, 33, torch.float32)
    logp, _ = vocab_parallel_logprob(logits.transpose(0, 1)[1:], targets.t()[1:])
    close(logp, reference(logits, targets, 1.0, 33)[0].t()[1:], 5e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"vocab_size": 13}, "13"),
        ({"backend": "cuda"}, "backend"),
        ({"entropy": "yes"}, "entropy"),
        ({"targets": torch.tensor([0, 12])}, "12"),
        ({"targets": torch.tensor([0, -1])}, "-1"),
        ({"targets": torch.tensor([0])}, "targets"),
        ({"logits": torch.zeros(2, 12, dtype=torch.int64)}, "float"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    arguments = {"logits": torch.zeros(2, 12), "targets": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(arguments.pop("logits"), arguments.pop("targets"), **arguments)
