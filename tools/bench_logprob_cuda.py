"""The CUDA half of bench_logprob.py: each log-prob kernel against the traffic limit of this card, and against other kernels.

    python tools/bench_logprob.py --device cuda [--repeats 20] [--output FILE.json]

Needs torch (and Triton for the Triton kernels); a checkout is enough, nothing of ours has to be installed. In this order:
results against float32 torch, copy bandwidth and matrix-product rate, the kernels at TP=1- and TP=8-sized shards of a
vocabulary of 151936, other kernels where they are installed, the output layer with its log-probs.

The limit of a kernel is its bytes (logits read once, gradient written once) over the copy bandwidth. Times are CUDA events'
medians. Before every timed call the logits are restored and a tensor larger than the L2 cache is read, not written: dirty
lines would be written back at the timed kernel's expense, and while the card is busy with that, the launches are queued.
Liger writes its gradient in the forward pass; the upstream gradient of every token costs it another pass.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_logprob_methods import (
    Method,
    Problem,
    check_linear,
    check_logits,
    first_line,
    forward_backward,
    gpu_methods,
    linear_problem,
    log_softmax_gather,
    make_problem,
)
from torch import Tensor

from m2po_megatron.kernels.backends import Shard, choose_backend
from m2po_megatron.kernels.logprob import linear_logprob

SHAPES = [(tokens, columns) for tokens in (8192, 32768) for columns in (151936, 18992)]
COMPILED_TOKENS = 8192
"""torch.compile is measured at these tokens only: it compiles anew, for many seconds, at every shape."""
LINEAR = (8192, 4096, 18992)
"""Tokens, hidden size, vocabulary shard."""
GOAL = 1.15
WARM_UPS = 3
LARGER_THAN_CACHE = 1 << 30

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    copy: float
    matmul: float
    """Bytes a second, read and written; bfloat16 operations a second."""


def describe(device: torch.device) -> dict[str, str]:
    driver = "unknown"
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"driver version: nvidia-smi did not answer ({error})")
    return {
        "card": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": importlib.import_module("triton").__version__
        if importlib.util.find_spec("triton")
        else "not installed",
    }


def median_ms(work: Callable[[], object], prepare: Callable[[], object], repeats: int, device: torch.device) -> float:
    """`prepare` runs before every call and is not timed."""
    if device.type == "cpu":
        seconds = []
        for _ in range(repeats):
            prepare()
            start_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start_s)
        return 1e3 * statistics.median(seconds)
    pairs = []
    for _ in range(WARM_UPS + repeats):
        prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs[WARM_UPS:])


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """What `work` allocates at its highest point beyond what exists before; 0 on the CPU, where torch does not count."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = work()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 1 << 62
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def measure_limits(device: torch.device, copied: int, side: int, repeats: int) -> Limits:
    """From a copy of `copied` bytes, and a product of two bfloat16 matrices [side, side]."""
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), lambda: None, repeats, device)
    left = torch.randn(side, side, device=device).bfloat16()
    right = torch.randn(side, side, device=device).bfloat16()
    matmul_ms = median_ms(lambda: left @ right, lambda: None, repeats, device)
    limits = Limits(2 * copied / copy_ms * 1e3, 2 * side**3 / matmul_ms * 1e3)
    print(f"copy {limits.copy / 1e9:.0f} GB/s (read and written), bfloat16 product {limits.matmul / 1e12:.0f} TFLOP/s")
    return limits


def kernel_rows(
    problem: Problem, with_entropy: bool, limits: Limits, repeats: int, evict: Callable[[], object]
) -> list[Row]:
    """Forward (statistics and merge) and backward in place of the backend that runs here, on one rank's shard."""
    logits = problem.logits.clone()
    tokens, columns = logits.shape
    backend = choose_backend("auto", logits)
    shard = Shard(0, columns, columns)
    parts = torch.empty(1, 4, tokens, dtype=torch.float32, device=logits.device)
    upstream_entropy = problem.upstream_entropy if with_entropy else None

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        backend.row_statistics(logits, problem.targets, parts[0], shard, 1.0, with_entropy)
        return backend.merge(parts, problem.targets, columns)

    def backward() -> None:
        backend.write_gradient(
            logits, logits, problem.targets, lse, entropies, problem.upstream, upstream_entropy, shard, 1.0
        )

    def restore() -> None:
        logits.copy_(problem.logits)
        evict()

    _, lse, entropies = forward()
    rows = []
    for name, work, passes in (("forward", forward, 1), ("backward in place", backward, 2)):
        ms = median_ms(work, restore, repeats, logits.device)
        moved = passes * logits.nbytes
        ratio = ms * 1e-3 / (moved / limits.copy)
        row: Row = {"kernel": name, "tokens": tokens, "columns": columns, "entropy": with_entropy, "ms": ms}
        rows.append(row | {"bytes": moved, "gb_per_s": moved / ms / 1e6, "over_limit": ratio, "goal": ratio <= GOAL})
    return rows


def method_row(
    name: str, method: Method, problem: Problem, with_entropy: bool, repeats: int, evict: Callable[[], object]
) -> Row:
    """One method through autograd, on a copy of the logits that it may overwrite."""
    logits = problem.logits.clone().requires_grad_()
    device = logits.device

    def restore() -> None:
        with torch.no_grad():
            logits.copy_(problem.logits)
        evict()

    def both() -> object:
        return forward_backward(method, problem, logits, with_entropy)

    both()  # compiles, so that neither memory nor time has that in it
    restore()
    peak = peak_bytes(both, device)
    forward_ms = median_ms(lambda: method(logits, problem.targets, with_entropy), restore, repeats, device)
    row: Row = {"method": name, "tokens": logits.shape[0], "columns": logits.shape[1], "entropy": with_entropy}
    return row | {"forward_ms": forward_ms, "both_ms": median_ms(both, restore, repeats, device), "peak_bytes": peak}


def method_rows(
    methods: dict[str, tuple[Method, bool]],
    problem: Problem,
    with_entropy: bool,
    repeats: int,
    evict: Callable[[], object],
) -> list[Row]:
    rows: list[Row] = []
    for name, (method, has_entropy) in methods.items():
        too_slow = name == "torch.compile" and len(problem.targets) != COMPILED_TOKENS
        if too_slow or (with_entropy and not has_entropy):
            continue
        try:
            rows.append(method_row(name, method, problem, with_entropy, repeats, evict))
        except Exception as error:  # noqa: BLE001 - out of memory or another project's failure: a line, and on
            print(f"  {name}: failed, {first_line(error)}")
            continue
        row = rows[-1]
        print(
            f"  {name:20} forward {row['forward_ms']:>8.3f} ms, with backward {row['both_ms']:>8.3f} ms "
            f"({row['both_ms'] / rows[0]['both_ms']:>6.2f}x), peak {row['peak_bytes'] / 2**20:>9.1f} MiB beyond the logits"
        )
    return rows


def linear_rows(
    device: torch.device, sizes: tuple[int, int, int], limits: Limits, repeats: int, evict: Callable[[], object]
) -> list[Row]:
    """Output layer and log-probs, forward and backward. The limit is three matrix products at the measured rate."""
    hidden, weight, targets, upstream = linear_problem(device, *sizes)
    least_s = 6 * sizes[0] * sizes[1] * sizes[2] / limits.matmul
    variants: dict[str, Callable[[], Tensor]] = {
        "store, float32 logits": lambda: linear_logprob(hidden, weight, targets, mode="store")[0],
        "store, bfloat16 logits": lambda: linear_logprob(hidden, weight, targets, logits_dtype=torch.bfloat16)[0],
        "recompute": lambda: linear_logprob(hidden, weight, targets, mode="recompute")[0],
        "torch": lambda: log_softmax_gather(hidden @ weight.T, targets, False)[0],
    }
    rows: list[Row] = []
    print(f"output layer and log-probs, T={sizes[0]} H={sizes[1]} V'={sizes[2]}, bfloat16, forward and backward")
    for name, forward in variants.items():

        def both(forward: Callable[[], Tensor] = forward) -> object:
            return torch.autograd.grad([forward()], [hidden, weight], [upstream])

        both()
        peak = peak_bytes(both, device)
        ms = median_ms(both, evict, repeats, device)
        rows.append({"variant": name, "ms": ms, "over_limit": ms * 1e-3 / least_s, "peak_bytes": peak})
        print(f"  {name:24} {ms:>8.3f} ms, {ms * 1e-3 / least_s:>5.2f} of three products, peak {peak / 2**20:.1f} MiB")
    return rows


def measure_shape(
    methods: dict[str, tuple[Method, bool]],
    device: torch.device,
    shape: tuple[int, int],
    limits: Limits,
    repeats: int,
    evict: Callable[[], object],
) -> tuple[list[Row], list[Row]]:
    """(rows of our kernels, rows of all methods) at [tokens, columns] bfloat16 logits, with and without entropy."""
    tokens, columns = shape
    needed = 5 * tokens * columns  # the logits, a copy to restore them from, half as much again to work in
    if (free := free_bytes(device)) < needed:
        print(f"T={tokens} V'={columns}: left out, needs {needed >> 20} MiB and {free >> 20} MiB are free")
        return [], []
    problem = make_problem(tokens, columns, torch.bfloat16, device)
    kernels: list[Row] = []
    others: list[Row] = []
    for with_entropy in (False, True):
        print(f"T={tokens} V'={columns}, bfloat16, {'with' if with_entropy else 'without'} entropy")
        rows = kernel_rows(problem, with_entropy, limits, repeats, evict)
        for row in rows:
            print(
                f"  {row['kernel']:20} {row['ms']:>8.3f} ms, {row['bytes'] / 1e6:>9.1f} MB, {row['gb_per_s']:>7.0f} GB/s, "
                f"{row['over_limit']:>5.2f} of the limit: goal {GOAL}x {'holds' if row['goal'] else 'DOES NOT HOLD'}"
            )
        kernels += rows
        others += method_rows(methods, problem, with_entropy, min(repeats, 10), evict)
    return kernels, others


def run(repeats: int) -> dict[str, Any]:
    """Everything, printed as it is measured, and as one dictionary for JSON."""
    if not torch.cuda.is_available():
        raise SystemExit(f"--device cuda: torch {torch.__version__} sees no CUDA device on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    machine = describe(device)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for tokens, columns in ((64, 18992), (33, 5003)):
        check_logits(device, tokens, columns)
    check_linear(device, 64, 256, 5003)
    backend = getattr(choose_backend("auto", torch.empty(1, 1, device=device)), "__name__", "?")
    print(f"results agree with float32 torch; backend {backend}")
    limits = measure_limits(device, min(4 << 30, free_bytes(device) // 4), 8192, repeats)
    scratch = torch.zeros(LARGER_THAN_CACHE // 4, dtype=torch.float32, device=device)
    methods = gpu_methods()
    kernels: list[Row] = []
    others: list[Row] = []
    for shape in SHAPES:
        rows = measure_shape(methods, device, shape, limits, repeats, scratch.sum)
        kernels += rows[0]
        others += rows[1]
    linear = linear_rows(device, LINEAR, limits, repeats, scratch.sum)
    measured = {"copy_bytes_per_s": limits.copy, "matmul_flop_per_s": limits.matmul}
    return machine | {"backend": backend} | measured | {"kernels": kernels, "methods": others, "linear": linear}
