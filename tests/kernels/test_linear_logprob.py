"""linear_logprob on one process: values and gradients against float64, Megatron's gradient buffer, and peak memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m2po_megatron.kernels.logprob import linear_logprob
from tests.kernels.reference import IGNORED, assert_close, reference_logprob

ROOT = Path(__file__).resolve().parents[2]
MODES = ["store", "recompute"]
TOKENS, HIDDEN, VOCAB, COLUMNS = 37, 16, 101, 104
TOLERANCE = {
    # (log-prob and entropy, relative error of the gradients' largest element) by (hidden's dtype, the logits')
    (torch.float32, torch.float32): (1e-5, 2e-6),
    (torch.bfloat16, torch.float32): (1e-5, 2**-8),
    (torch.float16, torch.float32): (1e-5, 2**-10),
    (torch.bfloat16, torch.bfloat16): (0.2, 0.03),  # the logits' own rounding: 2^-9 of logits up to 20, over 0.7
}


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    weight = torch.randn(COLUMNS, HIDDEN, generator=g).to(dtype)
    weight[VOCAB:] = 50.0
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[::5] = IGNORED
    return hidden, weight, targets, torch.randn(TOKENS, generator=g), torch.randn(TOKENS, generator=g)


def with_buffer(dtype: torch.dtype) -> Tensor:
    weight = torch.zeros(COLUMNS, HIDDEN)
    weight.main_grad = torch.zeros(COLUMNS, HIDDEN, dtype=dtype)
    return weight


def expected(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(log-probs, entropies, gradient of hidden, gradient of weight) in float64."""
    hidden, weight, targets, upstream, upstream_entropy = inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropies = reference_logprob(hidden @ weight.t(), targets, 0.7, VOCAB)
    (logprobs * upstream + entropies * upstream_entropy).sum().backward()
    return logprobs, entropies, hidden.grad, weight.grad


def run(hidden: Tensor, weight: Tensor, targets: Tensor, mode: str, **options):
    settings = {"temperature": 0.7, "entropy": "grad", "vocab_size": VOCAB, "chunk_tokens": 10, **options}
    return linear_logprob(hidden, weight, targets, mode=mode, **settings)


def backward(logprobs: Tensor, entropies: Tensor, upstream: Tensor, upstream_entropy: Tensor) -> None:
    (logprobs * upstream + entropies * upstream_entropy).sum().backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "logits_dtype"), list(TOLERANCE))
@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_values_and_gradients(mode, dtype, logits_dtype, chunk) -> None:
    value, relative = TOLERANCE[dtype, logits_dtype]
    hidden, weight, targets, *upstream = inputs(dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropies = run(hidden, weight, targets, mode, logits_dtype=logits_dtype, chunk_tokens=chunk)
    backward(logprobs, entropies, *upstream)
    exact = expected(dtype)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert_close(logprobs, exact[0], value)
    assert_close(entropies, exact[1], value)
    assert_close(hidden.grad, exact[2], relative * float(exact[2].abs().max()))
    assert_close(weight.grad, exact[3], relative * float(exact[3].abs().max()))
    assert float(weight.grad[VOCAB:].float().abs().sum()) == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_goes_into_megatrons_buffer(mode, dtype) -> None:
    hidden, weight, targets, *upstream = inputs(dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad = torch.full((COLUMNS, HIDDEN), 3.0)
    weight.grad_added_to_main_grad = False
    backward(*run(hidden, weight, targets, mode), *upstream)
    exact = expected(dtype)[3]
    assert weight.grad_added_to_main_grad is True
    # float32 all the way: a bfloat16 weight's gradient is never rounded to bfloat16
    assert_close(weight.main_grad - 3.0, exact, 2e-6 * float(exact.abs().max()) + 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_tied_embeddings_keep_both_gradients(mode) -> None:
    """The placeholder that autograd adds to the embedding's own gradient must be zero."""
    hidden, weight, targets, *upstream = inputs(torch.float32)
    weight.requires_grad_()
    weight.main_grad = torch.zeros(COLUMNS, HIDDEN)
    weight.zero_out_wgrad = True
    ids = torch.arange(TOKENS)
    embedded = hidden.requires_grad_() + weight[ids]
    backward(*run(embedded, weight, targets, mode), *upstream)

    exact = inputs(torch.float32)[1].double().requires_grad_()
    logprobs, entropies = reference_logprob((hidden.detach().double() + exact[ids]) @ exact.t(), targets, 0.7, VOCAB)
    backward(logprobs, entropies, *upstream)
    assert_close(weight.main_grad + weight.grad, exact.grad, 3e-6 * float(exact.grad.abs().max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(mode, frozen) -> None:
    hidden, weight, targets, *upstream = inputs(torch.float32)
    moving = weight if frozen == "hidden" else hidden
    moving.requires_grad_()
    backward(*run(hidden, weight, targets, mode), *upstream)
    exact = expected(torch.float32)[3 if frozen == "hidden" else 2]
    assert_close(moving.grad, exact, 2e-6 * float(exact.abs().max()))
    assert (hidden if frozen == "hidden" else weight).grad is None


@pytest.mark.parametrize("entropy", ["none", "value"])
def test_entropy_without_gradient(entropy) -> None:
    hidden, weight, targets, *_ = inputs(torch.float32)
    logprobs, entropies = run(hidden.requires_grad_(), weight, targets, "recompute", entropy=entropy)
    assert logprobs.requires_grad
    assert_close(logprobs, expected(torch.float32)[0], 1e-5)
    if entropy == "none":
        assert entropies is None
    else:
        assert not entropies.requires_grad
        assert_close(entropies, expected(torch.float32)[1], 1e-5)


def test_storing_goes_backward_once_and_recomputing_often() -> None:
    hidden, weight, targets, *upstream = inputs(torch.float32)
    for mode in MODES:
        leaf = hidden.clone().requires_grad_()
        logprobs, _ = run(leaf, weight, targets, mode)
        logprobs.backward(upstream[0], retain_graph=True)
        first = leaf.grad.clone()
        if mode == "store":
            with pytest.raises(RuntimeError, match="recompute"):
                logprobs.backward(upstream[0])
        else:
            logprobs.backward(upstream[0])
            torch.testing.assert_close(leaf.grad, 2 * first, rtol=0, atol=0)


def test_stored_logits_are_given_back_by_the_backward_pass() -> None:
    hidden, weight, targets, *upstream = inputs(torch.float32)
    logprobs, _ = run(hidden.requires_grad_(), weight, targets, "store")
    node = logprobs.grad_fn
    assert node.logits.shape == (TOKENS, COLUMNS)
    logprobs.backward(upstream[0], retain_graph=True)  # the graph lives on, as it does while a micro-batch is reported
    assert node.logits is None


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_and_only_ignored_tokens(mode) -> None:
    hidden, weight, targets, *upstream = inputs(torch.float32)
    weight.requires_grad_()
    for tokens in (0, TOKENS):
        leaf = hidden[:tokens].clone().requires_grad_()
        logprobs, entropies = run(leaf, weight, torch.full_like(targets[:tokens], IGNORED), mode)
        backward(logprobs, entropies, upstream[0][:tokens], upstream[1][:tokens])
        assert float((logprobs.abs() + entropies.abs()).detach().sum()) == 0.0
        assert float(leaf.grad.abs().sum()) == 0.0
        assert float(weight.grad.abs().sum()) == 0.0


PEAK = """
import sys
from pathlib import Path
import torch
from m2po_megatron.kernels.logprob import linear_logprob

mode, tokens, chunk, gradient = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
dtype, logits_dtype = getattr(torch, sys.argv[5]), getattr(torch, sys.argv[6])
torch.manual_seed(0)


def one_pass(tokens):
    hidden = torch.randn(tokens, 32, dtype=dtype, requires_grad=gradient)
    targets = torch.randint(0, vocab, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    logprobs, _ = linear_logprob(hidden, weight, targets, mode=mode, chunk_tokens=chunk, logits_dtype=logits_dtype)
    if gradient:
        logprobs.sum().backward()
    return resident("VmHWM") - before


def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


vocab = 40000
weight = torch.randn(vocab, 32, dtype=dtype, requires_grad=gradient)
weight.main_grad = torch.zeros(vocab, 32)
one_pass(8)
print(one_pass(tokens))
"""


def peak_bytes(
    mode: str, tokens: int, chunk: int, gradient: bool, dtype: str = "float32", logits_dtype: str = "float32"
) -> int:
    """Memory beyond the arguments, measured in a process of its own."""
    arguments = [mode, str(tokens), str(chunk), str(gradient), dtype, logits_dtype]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gradient"), [("recompute", True), ("recompute", False), ("store", False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_bounded_by_the_chunk(mode, gradient, dtype) -> None:
    chunk, vocab, slack = 64, 40000, 40 << 20  # the slack holds a converted block of weights, and the allocator's own
    one_chunk = 4 * chunk * vocab
    for tokens in (1024, 2048):  # 164 and 328 MB of float32 logits
        assert peak_bytes(mode, tokens, chunk, gradient, dtype) <= one_chunk + slack


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "logits_dtype", "size"), [("float32", "float32", 4), ("bfloat16", "float32", 4), ("bfloat16", "bfloat16", 2)]
)
def test_storing_holds_the_logits_once(dtype: str, logits_dtype: str, size: int) -> None:
    tokens, vocab, slack = 2048, 40000, 40 << 20
    peak = peak_bytes("store", tokens, 64, True, dtype, logits_dtype)
    assert size * tokens * vocab <= peak <= size * tokens * vocab + slack


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "keep"}, "store"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 2.5}, "chunk_tokens"),
        ({"weight": torch.zeros(0, HIDDEN)}, "1 parts of 0 columns cannot hold a vocabulary"),
        ({"weight": with_buffer(torch.bfloat16)}, "main_grad"),
        ({"logits_dtype": torch.bfloat16}, "logits_dtype"),
        ({"weight": torch.zeros(COLUMNS, 3)}, "hidden"),
        ({"weight": torch.zeros(COLUMNS, HIDDEN, dtype=torch.bfloat16)}, "dtype"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets"),
        ({"targets": torch.full((TOKENS,), VOCAB)}, "101"),
        ({"targets": torch.zeros(TOKENS, dtype=torch.int64, device="meta")}, "targets are on meta, but hidden on cpu"),
        ({"weight": torch.zeros(COLUMNS, HIDDEN, device="meta")}, "hidden is on cpu, but weight on meta"),
        ({"temperature": -1.0}, "temperature"),
        ({"entropy": "all"}, "entropy"),
        ({"vocab_size": 105}, "105"),
    ],
)
def test_bad_arguments(change, message) -> None:
    hidden, weight, targets, *_ = inputs(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "mode": "store", **change}
    with pytest.raises(ValueError, match=message):
        run(**arguments)
