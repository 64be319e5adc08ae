"""The Triton kernels' arithmetic under Triton's interpreter, against float64 PyTorch and the torch backend; and that
processes without a GPU never import Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2po_megatron.kernels import logprob_torch
from tests.kernels.triton_cases import CASES, IDLE_ROW, IGNORED_ROW, PUBLIC, ROWS, Case, Inputs, inputs_of, public, run

ROOT = Path(__file__).parents[2]
EPSILON = torch.finfo(torch.float32).eps

# dtype of the logits: absolute error of log-prob, log-sum-exp and entropy (float32 whatever the logits are); absolute and
# relative error of the gradient, which is stored in the logits' dtype: float16 is rounded to half a unit in the last place,
# bfloat16 by the interpreter cut off to a whole one (the GPU rounds: test_triton_compile.py looks at the instruction).
TOLERANCES = {
    torch.float32: (4e-6, 3e-6, 0.0),
    torch.bfloat16: (4e-6, 3e-6, 2.0**-7),
    torch.float16: (4e-6, 3e-6, 2.0**-11),
}


def python(*arguments: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernels made of all cases, in one process of their own."""
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    done = python("-m", "tests.kernels.triton_cases", str(path), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def reference(case: Case, given: Inputs) -> dict[str, Tensor]:
    """In float64, by autograd, with the rows that count nothing replaced before they are read."""
    whole = torch.cat(given.logits, 1).double()
    idle = given.targets == -100
    idle[IDLE_ROW] |= case.logits == "nan"
    x = whole.masked_fill(idle[:, None], 0.0)[:, : case.vocab].clone().requires_grad_()
    log_p = torch.log_softmax(x / case.temperature, -1)
    # An excluded token counts 0 x -inf = 0, in the sum and in its derivative.
    entropy = -(log_p.exp() * log_p.masked_fill(x == -torch.inf, 0.0)).sum(-1)
    logprobs = log_p.gather(1, given.targets.clamp(min=0)[:, None])[:, 0]
    upstream = given.upstream.double().masked_fill(given.targets == -100, 0.0)
    objective = logprobs * upstream
    if case.entropy == "grad":
        objective = objective + entropy * given.upstream_entropy.double().masked_fill(given.targets == -100, 0.0)
    (gradient,) = torch.autograd.grad(objective[~idle].sum(), x) if not idle.all() else (torch.zeros_like(x),)
    padded = torch.zeros_like(whole)
    padded[:, : case.vocab] = gradient
    return {
        "logprobs": logprobs.detach().masked_fill(given.targets == -100, 0.0),
        "lse": torch.logsumexp(x / case.temperature, -1).detach(),
        "entropies": entropy.detach().masked_fill(given.targets == -100, 0.0),
        "gradient": padded,
        "idle": idle,
    }


def close(actual: Tensor, expected: Tensor, absolute: float, relative: float = 0.0) -> None:
    """Within the tolerance, and NaN exactly where the other is."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=absolute, rtol=relative, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, results: dict[str, Any]) -> None:
    case, actual = CASES[name], results["cases"][name]
    expected = reference(case, inputs_of(case))
    tolerance, gradient_absolute, gradient_relative = TOLERANCES[case.dtype]
    # Logits of size |shift| over the temperature are known to float32's relative accuracy.
    beyond = 2 * EPSILON * abs(case.shift) / case.temperature
    rows = ~expected["idle"]  # a row that nothing is asked of may have any log-sum-exp
    kept = rows | (inputs_of(case).targets == -100)
    close(actual["logprobs"][kept], expected["logprobs"][kept], tolerance + beyond)
    close(actual["lse"][rows], expected["lse"][rows], tolerance + beyond)
    if case.entropy != "none":
        close(actual["entropies"][kept], expected["entropies"][kept], tolerance + beyond)
    close(actual["gradient"], expected["gradient"], gradient_absolute + beyond, gradient_relative)


@pytest.mark.parametrize("name", CASES)
def test_exact_zeros_and_sums(name: str, results: dict[str, Any]) -> None:
    case, actual = CASES[name], results["cases"][name]
    given, gradient = inputs_of(case), actual["gradient"]
    ignored = given.targets == -100
    assert gradient.shape == (ROWS, case.part_width * case.parts)
    for zeros in (
        actual["logprobs"][ignored],
        actual["entropies"][ignored],
        gradient[ignored],
        gradient[IDLE_ROW],
        gradient[:, case.vocab :],
        gradient[torch.cat(given.logits, 1) == -torch.inf],
    ):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    assert float(actual["logprobs"].nan_to_num(0.0).max()) <= 0.0
    if case.dtype == torch.float32:
        close(gradient.nan_to_num(0.0).double().sum(1), torch.zeros(ROWS), 3e-6 + 4 * EPSILON * abs(case.shift))
    if case.targets != "ignored" and case.logits != "live nan":
        assert float(gradient.abs().amax(1)[[0, 2, 5]].min()) > 0.0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.float32])
def test_equal_to_the_torch_backend_to_the_last_places(name: str, results: dict[str, Any]) -> None:
    """Few units in the last place of the log-sum-exp, the largest number that float32 rounding enters by."""
    case, actual = CASES[name], results["cases"][name]
    given, expected = inputs_of(case), run(case, logprob_torch)
    rows = given.targets != -100
    size = 1.0 + float(expected["lse"][rows].nan_to_num(0.0).abs().max()) if bool(rows.any()) else 1.0
    close(actual["logprobs"], expected["logprobs"], 4 * EPSILON * size)
    close(actual["lse"][rows], expected["lse"][rows], 4 * EPSILON * size)
    if case.entropy != "none":
        close(actual["entropies"], expected["entropies"], 4 * EPSILON * size)
    close(actual["gradient"], expected["gradient"], 4 * EPSILON * size)
    rows &= ~expected["statistics"].isnan().any(0).any(0)  # a NaN logit reaches d for certain, m or not
    ours, theirs = actual["statistics"][..., rows], expected["statistics"][..., rows]
    close(ours[:, 0], theirs[:, 0], 0.0, 2 * EPSILON)
    close(ours[:, 1:], theirs[:, 1:], 4 * EPSILON * size, 4 * EPSILON * size)


def test_ignored_rows_are_not_read(results: dict[str, Any]) -> None:
    """Their statistics are those of a row without finite logits, although the row has some."""
    empty = torch.tensor([torch.finfo(torch.float32).min, 0.0, 0.0, 0.0])
    for name in ("1500-float32-T0.7", "parts4-bfloat16", "ignored-parts2"):
        statistics = results["cases"][name]["statistics"][:, :, IGNORED_ROW]
        assert torch.equal(statistics, empty.expand_as(statistics))
        assert float(results["cases"][name]["lse"][IGNORED_ROW]) == 0.0


def test_parts_without_columns_have_empty_statistics(results: dict[str, Any]) -> None:
    empty = torch.tensor([torch.finfo(torch.float32).min, 0.0, 0.0, 0.0])
    for name, part in (("padded, parts without columns", 2), ("empty part of 2", 1)):
        statistics = results["cases"][name]["statistics"][part].t()
        assert torch.equal(statistics, empty.expand_as(statistics)), name


def test_a_nan_that_counts_is_seen(results: dict[str, Any]) -> None:
    for name in ("nan where it counts", "nan where it counts, parts2"):
        actual = results["cases"][name]
        for output in ("logprobs", "lse", "entropies"):
            assert actual[output].isnan().tolist() == [False, False, True, False, False, False]
        assert bool(actual["gradient"][2].isnan().all())


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_call(name: str, results: dict[str, Any]) -> None:
    shape, columns, vocab, dtype, inplace = PUBLIC[name]
    actual, expected = results["public"][name], public(shape, columns, vocab, dtype, inplace, "torch")
    for output in ("logprobs", "entropies"):
        assert actual[output].shape == torch.Size(shape)
        close(actual[output], expected[output], 8e-6)
    # Two float32 values a rounding error apart may round to neighbours.
    relative = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    close(actual["gradient"], expected["gradient"], 1e-5, relative)


def test_no_rows_launch_nothing(results: dict[str, Any]) -> None:
    assert {name: tensor.shape for name, tensor in results["no rows"].items()} == dict.fromkeys(
        ("logprobs", "lse", "entropies"), torch.Size([0])
    )


def test_unknown_targets_give_nan(results: dict[str, Any]) -> None:
    logprobs = results["unknown targets"]["logprobs"]
    assert logprobs.isnan().tolist() == [False, True, True, True]
    assert float(logprobs[0]) == pytest.approx(-torch.log(torch.tensor(40.0)).item(), abs=1e-6)


def test_rows_beyond_32_bit_offsets(results: dict[str, Any]) -> None:
    far = results["far rows"]
    assert torch.equal(far["far logprobs"], far["near logprobs"])
    assert torch.equal(far["far gradient"], far["near gradient"])
    assert bool((far["far logprobs"] < 0).all())
    assert results["far rows' memory"] < 1000, "MiB: the space between the rows was touched"


def test_obstacles_name_what_is_in_the_way(results: dict[str, Any]) -> None:
    obstacles = results["obstacles"]
    assert "float64" in obstacles["float64"]
    assert "meta" in obstacles["meta"]
    assert obstacles["cpu"] == ""  # the interpreter is on


def test_without_a_gpu_triton_is_not_imported() -> None:
    code = """
import sys, torch
from m2po_megatron.kernels.logprob import linear_logprob, vocab_parallel_logprob
targets = torch.tensor([1, -100, 3])
logits = torch.randn(3, 9, requires_grad=True)
for backend in ("auto", "torch"):
    logprobs, entropies = vocab_parallel_logprob(logits, targets, entropy="grad", backend=backend)
    (logprobs + entropies).sum().backward()
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
linear_logprob(hidden, weight, targets)[0].sum().backward()
assert float(logits.grad.abs().sum()) > 0
raise SystemExit(" ".join(name for name in sys.modules if name.split(".")[0] == "triton"))
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr.strip()) == (1, ""), "SystemExit('') prints an empty line and nothing else"


def test_triton_on_the_cpu_is_refused_with_its_reason() -> None:
    code = """
import torch
from m2po_megatron.kernels.logprob import vocab_parallel_logprob
try:
    vocab_parallel_logprob(torch.randn(3, 9), torch.tensor([1, -100, 3]), backend="triton")
except ValueError as error:
    print(error)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "backend 'triton'" in done.stdout
    assert "cpu" in done.stdout
    assert "interpreter" in done.stdout
