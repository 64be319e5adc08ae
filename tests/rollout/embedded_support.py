"""References and a server process for the tests of the embedded engine (not a test module)."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from m2po_megatron.rollout.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
ARITHMETIC_MODEL = ROOT / "examples" / "arithmetic" / "model"
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


def plain_model(path: str | Path) -> PreTrainedModel:
    """The directory's model as transformers alone has it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float
) -> torch.Tensor:
    """float32 [len(output)]: log_softmax(logits / temperature) at the output's tokens, from one full forward pass."""
    logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0].float()
    rows = logits[len(prompt) - 1 : len(prompt) + len(output) - 1] / temperature
    return rows.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def gap(values: list[float], reference: torch.Tensor) -> float:
    """The largest absolute difference; a value that is not finite is no match for anything."""
    assert len(values) == len(reference) > 0
    difference = float((torch.tensor(values) - reference).abs().max())
    assert math.isfinite(difference)
    return difference


def engine_command(model: str | Path, port: int, *options: str) -> list[str]:
    command = [sys.executable, "-m", "m2po_megatron.rollout.embedded", "--model-path", str(model), "--port", str(port)]
    return [*command, *options]


def engine_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; AssertionError with its log if it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the engine ended with {process.returncode}:\n{log.read_text()}"
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)  # a foreign process: nothing to await
    raise AssertionError(f"the engine is not healthy after {START_TIMEOUT_S} s:\n{log.read_text()}")


@contextmanager
def running_engine(model: str | Path, log: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(url, process) of an embedded engine on a free loopback port; ended on exit."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            engine_command(model, port, *options), stdout=output, stderr=output, env=engine_environment(), cwd=ROOT
        )
    try:
        wait_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Whether process `pid`, which need not be a child of this one, ends within the time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
