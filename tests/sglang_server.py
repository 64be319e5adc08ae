"""A real SGLang server on this machine's CPU, for tests (not a test module)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from m2po_megatron.rollout.launch import free_port, log_tail

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0


@contextmanager
def running_sglang(python: str | Path, model: str | Path, log: Path) -> Iterator[str]:
    """The URL of a server of `model` in float32 on a free loopback port; all its processes are ended on exit.

    python: the interpreter of an environment made by tests/integration/sglang_cpu/install.sh.
    """
    port = free_port()
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    command += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    # Without a limit its KV cache takes the machine's memory.
    command += ["--max-total-tokens", "65536", "--max-running-requests", "64"]
    command += ["--sleep-on-idle", "--skip-server-warmup"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        # A session of its own: its scheduler and detokenizer are processes too, and are ended with it.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log)
        yield url
    finally:
        _stop(process)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"the SGLang server ended with {process.returncode}:\n{log_tail(log)}"
        assert time.monotonic() < deadline, f"the SGLang server is not up after {START_TIMEOUT_S:.0f} s:\n{log_tail(log)}"
        try:
            if httpx.get(f"{url}/model_info", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)  # a foreign process: nothing to await


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
