"""Log-probs of logits, forward and backward: ours against log_softmax and gather, and against megatron-core. Time, memory.

    python tools/bench_logprob.py [--sizes 2048x32768 1024x151936] [--repeats 5] [--check] [--output FILE.json]
    python tools/bench_logprob.py --device cuda [--output FILE.json]        tools/bench_logprob_cuda.py says what it does

On the CPU: float32 logits, all methods in turn so that whatever else the machine does meets each of them, random upstream
gradients for every token, and results compared in the same run: a method that disagrees ends it. Memory is what the process's
resident set grew by at its highest point, over the logits it already held, each method in a fresh process. With entropy, the
baseline computes entropy and its gradient too; megatron-core has none. megatron-core overwrites float32 logits in its forward
pass, so it needs no memory here either; of bfloat16 logits it keeps a float32 copy.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

if importlib.util.find_spec("m2po_megatron") is None:  # a bare GPU machine: run from a checkout, nothing installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_logprob_methods import (
    Method,
    Results,
    forward_backward,
    log_softmax_gather,
    make_problem,
    megatron_cross_entropy,
    ours,
)

from m2po_megatron.kernels.backends import choose_backend

BASELINE = "log_softmax+gather"
MEGATRON = "megatron-core"
IN_PLACE = " in place"
REQUIRED_SPEEDUP = 1.8
REQUIRED_MEMORY = 1 / 8
"""In place, as a fraction of the baseline's memory beyond the logits."""
TOLERANCES = {"log-probs": 5e-5, "entropies": 5e-5, "gradients": 2e-5}
"""Largest differences from the baseline, absolute: two float32 results over up to 150 thousand columns."""
CHILD_LIMIT_S = 600


def method_named(name: str) -> Method:
    if name == BASELINE:
        return log_softmax_gather
    if name == MEGATRON:
        return megatron_cross_entropy
    return functools.partial(ours, backend=name.removesuffix(IN_PLACE), inplace=name.endswith(IN_PLACE))


def start_megatron(folder: str) -> None:
    """One gloo rank that is the whole tensor-parallel group."""
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine)")  # megatron-core says so without them
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{os.getpid()}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def usable_backends() -> list[str]:
    """Those that run here, what "auto" takes first."""
    usable = []
    for name in ("native", "torch"):
        try:
            choose_backend(name, torch.empty(1, 1))
            usable.append(name)
        except (ValueError, ImportError) as error:
            print(f"{name}: left out, {error}")
    return usable


def resident(field: str) -> int:
    """Bytes: VmRSS (now) or VmHWM (the highest since the last reset)."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}: memory can be measured on Linux only")
    return 1024 * int(match[1])


def grown_memory(name: str, tokens: int, columns: int, with_entropy: bool, threads: int, folder: str) -> int:
    """Bytes beyond the logits (and targets) at the highest point of one forward and backward pass; in its own process."""
    torch.set_num_threads(threads)
    if name == MEGATRON:
        start_megatron(folder)
    method = method_named(name)
    tiny = make_problem(4, 64, torch.float32, torch.device("cpu"))
    forward_backward(method, tiny, tiny.logits.requires_grad_(), with_entropy)
    problem = make_problem(tokens, columns, torch.float32, torch.device("cpu"))
    logits = problem.logits.requires_grad_()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM falls to VmRSS
    before = resident("VmRSS")
    results = forward_backward(method, problem, logits, with_entropy)
    grown = resident("VmHWM") - before
    del results
    if name == MEGATRON:
        dist.destroy_process_group()
    return max(0, grown)


def grown_memory_of_fresh_process(*arguments: Any) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(grown_memory, arguments).get(CHILD_LIMIT_S)


def largest_difference(mine: Tensor, reference: Tensor) -> float:
    """By rows, as both may be large. NaN anywhere gives infinity."""
    differences = [float((a - b).detach().abs().max()) for a, b in zip(mine.split(64), reference.split(64), strict=True)]
    return max(torch.inf if d != d else d for d in differences)


def compare(name: str, mine: Results, reference: Results, logits: Tensor) -> dict[str, float]:
    """Largest differences by kind. Exits with the method's name if one is too large, or "in place" is not."""
    pairs = {"log-probs": (mine.logprobs, reference.logprobs), "gradients": (mine.gradient, reference.gradient)}
    if mine.entropies is not None and reference.entropies is not None:
        pairs["entropies"] = (mine.entropies, reference.entropies)
    differences = {kind: largest_difference(*pair) for kind, pair in pairs.items()}
    for kind, difference in differences.items():
        if difference > TOLERANCES[kind]:
            raise SystemExit(
                f"{name}: {kind} differ from {BASELINE} by {difference:.2e}, allowed {TOLERANCES[kind]:.0e}"
            )
    if name.endswith(IN_PLACE) and mine.gradient.data_ptr() != logits.data_ptr():
        raise SystemExit(f"{name}: the gradient does not lie where the logits were")
    return differences


def measure(
    names: list[str], tokens: int, columns: int, with_entropy: bool, arguments: argparse.Namespace, folder: str
) -> list[dict[str, Any]]:
    """One row a method. The first of `names` is what the others are compared with."""
    problem = make_problem(tokens, columns, torch.float32, torch.device("cpu"))
    rows: list[dict[str, Any]] = [
        {"method": name, "tokens": tokens, "vocabulary": columns, "entropy": with_entropy} for name in names
    ]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    reference: Results | None = None
    for repeat in range(arguments.repeats + 1):
        for row in rows:
            name = row["method"]
            logits = problem.logits.clone().requires_grad_()
            start = time.perf_counter()
            results = forward_backward(method_named(name), problem, logits, with_entropy)
            seconds[name].append(time.perf_counter() - start)
            if repeat == 0:
                reference = reference or results
                row["differences"] = compare(name, results, reference, logits)
                row["overwrites_logits"] = results.gradient.data_ptr() == logits.data_ptr()
            del results, logits
        reference = None
    del problem
    for row in rows:
        timed = seconds[row["method"]][1:]  # the first one warms up
        row["ms"], row["min_ms"] = 1e3 * statistics.median(timed), 1e3 * min(timed)
        row["faster"] = rows[0]["ms"] / row["ms"]
        row["faster_by_min"] = rows[0]["min_ms"] / row["min_ms"]
        row["bytes"] = grown_memory_of_fresh_process(
            row["method"], tokens, columns, with_entropy, arguments.threads, folder
        )
        row["memory_fraction"] = row["bytes"] / rows[0]["bytes"]
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    tokens, columns = first["tokens"], first["vocabulary"]
    entropy = "with entropy and its gradient" if first["entropy"] else "without entropy"
    print(f"\nT={tokens} V={columns}, {entropy}: logits {tokens * columns / 2**18:.0f} MiB")
    header = f"{'':20} {'ms':>9} {'(min)':>9} {'faster':>8} {'(min)':>8} {'MiB beyond logits':>18} {'fraction':>9}"
    print(header + "  largest differences")
    for row in rows:
        print(
            f"{row['method']:20} {row['ms']:>9.1f} {row['min_ms']:>9.1f} {row['faster']:>7.2f}x {row['faster_by_min']:>7.2f}x "
            f"{row['bytes'] / 2**20:>18.1f} {row['memory_fraction']:>9.4f}  "
            + ", ".join(f"{kind} {value:.0e}" for kind, value in row["differences"].items() if row is not first)
            + (" (overwrites the logits)" if row["overwrites_logits"] else "")
        )
    if first["entropy"]:
        print(f"{MEGATRON:20} {'-':>9} {'-':>9} {'-':>8} {'-':>8} {'-':>18} {'-':>9}  has no entropy")


def check_bounds(rows: list[dict[str, Any]], backend: str) -> bool:
    """Of the backend that "auto" takes: what must hold, and whether it does.

    Judged by the fastest repeats: other load on the machine only ever adds time, and most to whoever allocates.
    """
    in_place = [row for row in rows if row["method"] == backend + IN_PLACE]
    fresh = [row for row in rows if row["method"] == backend]
    slowest, slowest_fresh = (min(row["faster_by_min"] for row in mine) for mine in (in_place, fresh))
    largest = max(row["memory_fraction"] for row in in_place)
    fast, small = min(slowest, slowest_fresh) >= REQUIRED_SPEEDUP, largest <= REQUIRED_MEMORY
    print(
        f"\nbackend {backend}, required: at least {REQUIRED_SPEEDUP}x faster than {BASELINE}: "
        f"{'holds' if fast else 'DOES NOT HOLD'} (lowest {slowest:.2f}x in place, {slowest_fresh:.2f}x otherwise);\n"
        f"in place at most {REQUIRED_MEMORY:.3f} of its memory: {'holds' if small else 'DOES NOT HOLD'} (highest {largest:.4f})"
    )
    return fast and small


def run_cpu(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, {arguments.threads} thread(s) of {os.cpu_count()}, float32, forward and backward"
    )
    backends = usable_backends()
    names = [BASELINE, MEGATRON, *(b + suffix for b in backends for suffix in ("", IN_PLACE))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        start_megatron(folder)
        for tokens, columns in arguments.sizes:
            for with_entropy in (False, True):
                able = [name for name in names if name != MEGATRON or not with_entropy]
                rows += measure(able, tokens, columns, with_entropy, arguments, folder)
                print_rows(rows[-len(able) :])
        dist.destroy_process_group()
    holds = check_bounds(rows, backends[0])
    return {"torch": torch.__version__, "threads": arguments.threads, "backend": backends[0], "rows": rows}, holds


def size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKENSxVOCABULARY, as 2048x32768")
    return int(match[1]), int(match[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=size, nargs="+", default=[(2048, 32768), (1024, 151936)], help="CPU only")
    parser.add_argument("--repeats", type=int, default=None, help="default: 5 on the CPU, 20 on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="CPU only")
    parser.add_argument("--check", action="store_true", help="end with 1 if the required bounds do not hold (CPU)")
    parser.add_argument("--output", type=Path, default=None, help="also write the rows as JSON")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (5 if arguments.device == "cpu" else 20)
    holds = True
    if arguments.device == "cuda":
        import bench_logprob_cuda

        result = bench_logprob_cuda.run(arguments.repeats)
    else:
        result, holds = run_cpu(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if arguments.check and not holds else 0


if __name__ == "__main__":
    raise SystemExit(main())
