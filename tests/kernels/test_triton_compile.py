"""The Triton kernels compiled for three generations of GPUs, without one: what their machine code holds.

Each kernel is compiled as a launch on well aligned rows of a 151936-token vocabulary specialises it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from m2po_megatron.kernels import logprob_triton

ARCHITECTURES = (80, 90, 100)
VOCABULARY = 151936
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# Registers a thread. An SM has 65536: at 80, six programs of 128 threads fit, whose loads keep 6 x 8 KiB on their way,
# more than the 26 to 33 KiB (bandwidth x latency, 33 bytes a ns x 0.8 to 1 us on an H200) that keep its memory busy. The
# gradient kernel also writes, half of its time on the bus is its loads', so it gets more programs.
REGISTERS = {"_row_statistics": 80, "_write_gradient": 56, "_merge": 48}
SHARED_BYTES = 2048  # reductions across a program's four warps; occupancy must not hang on it
NVIDIA = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Machine:
    """What a kernel became."""

    ptx: str
    registers: int
    stack: int
    local: int
    shared: int

    def accesses(self, kind: str) -> set[str]:
        """ "ld" or "st": the widths, such as v4.b32, of its accesses of global memory."""
        return set(re.findall(rf"\b{kind}\.global(?:\.L\w+::\w+|\.[a-z_]+)*?\.((?:v\d\.)?b\d+)", self.ptx))


def compiled(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], warps: int, arch: int, tmp: Path) -> Machine:
    assert isinstance(kernel, triton.JITFunction), "unset TRITON_INTERPRET for this test: it compiles"
    types = {
        **dict.fromkeys(("logits", "gradient"), TYPES[dtype]),
        **dict.fromkeys(("out", "lse", "entropies", "upstream", "upstream_entropy", "parts", "logprobs"), "*fp32"),
        "targets": "*i64",
        "inverse_temperature": "fp32",
    }
    signature = {p.name: "constexpr" if p.is_constexpr else types.get(p.name, "i32") for p in kernel.params}
    # As a launch does: what is specialised and divisible by 16 (addresses, strides, widths) is known to be.
    aligned = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if not p.is_constexpr and not p.do_not_specialize and signature[p.name] != "fp32"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    cubin = tmp / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = subprocess.run(
        [NVIDIA / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True, timeout=60
    )
    found = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage.stdout + usage.stderr))
    return Machine(built.asm["ptx"], *(int(found[name]) for name in ("REG", "STACK", "LOCAL", "SHARED")))


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def gate(machine: Machine, name: str) -> None:
    assert (machine.stack, machine.local) == (0, 0), "registers spill to memory"
    assert machine.registers <= REGISTERS[name]
    assert machine.shared <= SHARED_BYTES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("entropy", [False, True])
def test_row_statistics(arch: int, dtype: torch.dtype, entropy: bool, tmp_path: Path) -> None:
    lanes, depth, warps = logprob_triton.tile_of(dtype, VOCABULARY)
    constants = {"MOMENT": entropy, "LANES": lanes, "DEPTH": depth}
    machine = compiled(logprob_triton._row_statistics, dtype, constants, warps, arch, tmp_path)
    gate(machine, "_row_statistics")
    # The target's id and logit are read alone, all else 16 bytes at a time.
    assert machine.accesses("ld") == {"v4.b32", "b64", f"b{8 * dtype.itemsize}"}
    assert machine.accesses("st") == {"b32"}
    # Nothing crosses threads inside the loop over tiles: its body has no barrier.
    loops = [body for label, body in loops_of(machine.ptx)]
    assert [body for body in loops if "v4.b32" in body] != []
    assert [body for body in loops if "bar.sync" in body] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("entropy", [False, True])
def test_write_gradient(arch: int, dtype: torch.dtype, entropy: bool, tmp_path: Path) -> None:
    lanes, depth, warps = logprob_triton.tile_of(dtype, VOCABULARY)
    constants = {"ENTROPY": entropy, "TILE": lanes * depth}
    machine = compiled(logprob_triton._write_gradient, dtype, constants, warps, arch, tmp_path)
    gate(machine, "_write_gradient")
    assert machine.accesses("ld") == {"v4.b32", "b64", "b32"}  # the row's few numbers are b32 and b64
    assert machine.accesses("st") == {"v4.b32"}
    assert "bar.sync" not in machine.ptx
    assert dtype != torch.bfloat16 or "cvt.rn.bf16x2" in machine.ptx  # rounded to nearest


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_merge(arch: int, tmp_path: Path) -> None:
    constants = {"BLOCK": logprob_triton.MERGE_BLOCK}
    machine = compiled(logprob_triton._merge, torch.float32, constants, logprob_triton.WARPS, arch, tmp_path)
    gate(machine, "_merge")
    # The logarithm of sums near 1 decides the log-probs near 0: the exact one, not the hardware's approximation.
    assert "lg2.approx" not in machine.ptx


@pytest.mark.parametrize("dtype", TYPES)
def test_a_short_row_gets_a_small_tile(dtype: torch.dtype) -> None:
    whole = logprob_triton.tile_of(dtype, VOCABULARY)
    assert whole == (512 * 4 // dtype.itemsize, 4, 4)
    assert whole[0] * whole[1] * dtype.itemsize == 64 * 128  # 64 bytes a thread
    for columns in (0, 1, 7, 100, 600, 1500):
        lanes, depth, warps = logprob_triton.tile_of(dtype, columns)
        assert columns <= lanes * depth <= 2 * max(columns, 1)
        assert lanes * dtype.itemsize <= warps * 512 <= max(512, lanes * dtype.itemsize)


def loops_of(ptx: str) -> list[tuple[str, str]]:
    """(label, text from the label to the branch back to it) of each innermost loop."""
    return re.findall(r"^(\$L__BB\w+):((?:(?!^\$L__BB).)*?bra(?:\.uni)?\s+\1;)", ptx, re.MULTILINE | re.DOTALL)
