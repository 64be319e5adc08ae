"""The kernels on a CUDA device: values, launches, linear_logprob on tensor cores. `pytest -m gpu tests/kernels`."""

from __future__ import annotations

import pytest
import torch

from m2po_megatron.kernels.logprob import linear_logprob, vocab_parallel_logprob
from tests.kernels.reference import assert_agrees, assert_close, expected_of, make_case, reference_logprob

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def on_device(case, backend: str, *, entropy: str = "grad", inplace: bool = False):
    leaf = case.logits.cuda().requires_grad_()
    logprobs, entropies = vocab_parallel_logprob(
        leaf * 1,
        case.targets.cuda(),
        temperature=case.temperature,
        entropy=entropy,
        vocab_size=case.vocab_size,
        inplace_backward=inplace,
        backend=backend,
    )
    (logprobs * case.upstream.cuda() + entropies * case.upstream_entropy.cuda()).sum().backward()
    return logprobs.cpu(), entropies.cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "vocab", "columns"), [(9, 7, 12), (15, 1500, 1500), (5, 32000, 32003), (64, 151936, 152064), (0, 9, 9)]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_values_and_gradients(backend, dtype, tokens, vocab, columns, temperature) -> None:
    case = make_case((tokens,), vocab, columns, dtype=dtype, temperature=temperature)
    expected = expected_of(case)
    for inplace in (False, True):
        assert_agrees(*on_device(case, backend, inplace=inplace), case, expected)


def test_auto_is_triton_and_nothing_waits_for_the_device() -> None:
    case = make_case((64,), 5000, 5008)
    on_device(case, "auto")  # compiles
    logits, targets = case.logits.cuda().requires_grad_(), case.targets.cuda()
    upstream = case.upstream.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, _ = vocab_parallel_logprob(logits, targets, temperature=0.7, entropy="value", vocab_size=5000)
        logprobs.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    explicit = vocab_parallel_logprob(logits, targets, temperature=0.7, vocab_size=5000, backend="triton")[0]
    assert torch.equal(logprobs, explicit)


def test_rows_beyond_two_to_the_31_elements() -> None:
    rows, vocab = 16500, 131072
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 3.0
    targets = torch.full((rows,), 5, device="cuda")
    leaf = logits.requires_grad_()
    logprobs, _ = vocab_parallel_logprob(leaf, targets, backend="triton")
    gradient = torch.autograd.grad(logprobs, leaf, torch.ones_like(logprobs))[0]
    ends = logits.detach()[[0, -1]].double().cpu()
    assert_close(logprobs[[0, -1]].cpu(), reference_logprob(ends, targets[:2].cpu(), 1.0, vocab)[0], 4e-6)
    assert float(gradient[-1, 5]) == pytest.approx(1 - float(logprobs[-1].exp()), rel=2**-8)


@pytest.mark.parametrize("mode", ["store", "recompute"])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer", [False, True])
def test_linear_on_tensor_cores(mode, logits_dtype, buffer) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(300, 128, generator=g).bfloat16(), (torch.randn(1000, 128, generator=g) / 4).bfloat16()
    targets = torch.randint(0, 997, (300,), generator=g)
    upstream = torch.randn(300, generator=g)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected, _ = reference_logprob(exact_hidden @ exact_weight.t(), targets, 0.7, 997)
    (expected * upstream).sum().backward()
    hidden, weight = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
    if buffer:
        weight.main_grad = torch.zeros(1000, 128, device="cuda")
    logprobs, _ = linear_logprob(
        hidden, weight, targets.cuda(), mode=mode, temperature=0.7, vocab_size=997, logits_dtype=logits_dtype, chunk_tokens=77
    )
    logprobs.backward(upstream.cuda())
    rounding = 0.0 if logits_dtype == torch.float32 else 0.1
    assert_close(logprobs.cpu(), expected, 2e-5 + rounding)
    found = (weight.main_grad if buffer else weight.grad).cpu()
    assert_close(found, exact_weight.grad, (0.01 + rounding) * float(exact_weight.grad.abs().max()))
    assert_close(hidden.grad.cpu(), exact_hidden.grad, (0.01 + rounding) * float(exact_hidden.grad.abs().max()))
