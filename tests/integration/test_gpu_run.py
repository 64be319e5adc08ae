"""The main job on one CUDA device: NCCL, bfloat16, the Triton kernel, TransformerEngine where it is installed, and the
embedded engine on the same card.

    python -m pytest -m gpu tests/kernels tests/integration/test_gpu_run.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2po_megatron.metrics import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.integration]


def run(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "1", "pretrain_rl.py", "--config", "examples/arithmetic/demo.yaml"]
    command += ["--tensor-model-parallel-size", "1", "--train-iters", "5", "--run-dir", str(folder), "--bf16"]
    command += ["--embedded-device", "cuda", "--eval-interval", "0", "--eval-samples-per-prompt", "1", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_five_updates(tmp_path: Path, mode: str) -> None:
    said = run(tmp_path / "run", "--logprob-mode", mode)
    assert "on cuda (nccl)" in said
    assert f"triton kernel, fp32 logits, mode {mode}" in said
    updates, _ = read_metrics(tmp_path / "run")
    assert [m["version"] for m in updates] == [1, 2, 3, 4, 5]
    for m in updates:
        assert m["grad_norm"] > 0
        assert m["m2/nonfinite"] == 0
        # a bfloat16 policy against a float32 engine: the first update's data is fresh, so this is rounding alone
        assert abs(m["kl/behavior"]) < 0.1
    # the same weights, whether the policy or the engine scores them
    assert updates[0]["m2/before"] < 0.05
