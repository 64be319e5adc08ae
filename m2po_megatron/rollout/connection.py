"""The trainer's side of the rollout controller: starts the process, talks to it over loopback HTTP (global rank 0 only).

Synchronous: the trainer has no event loop. Every wait is bounded, and a controller that died is an error at the next call.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

import m2po_megatron
from m2po_megatron.data.trajectory import Batch, Trajectory
from m2po_megatron.rollout.codec import decode_batch
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings, write_settings

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0
"""What the controller has to end its engines after SIGTERM, before it is killed (its engines die with it)."""
CALL_TIMEOUT_S = 30.0
"""What one answer may take beyond the wait that was asked for."""


class ControllerConnection:
    """A started controller. Use `with ControllerConnection.start(settings, job) as connection:`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self._client = httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S, trust_env=False)
        self.last_lease_info: dict[str, Any] = {}
        """What the controller said with the last lease: wait_reason, dropped, running, loaded_version, ..."""

    @classmethod
    def start(cls, settings: RolloutSettings, job: RolloutJob) -> ControllerConnection:
        """Start controller and engines; return once every engine is healthy and has the start version.

        Raises ValueError for settings that cannot work and RolloutError, with the log's path and its tail, when something
        does not come up within --engine-start-timeout-s. Call it from a thread that lives as long as the run: the
        controller ends when the thread that started it does.
        """
        settings.validate()
        job.validate(settings)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.address_path.unlink(missing_ok=True)
        settings_path = Path(job.run_dir) / "controller_settings.json"
        write_settings(settings_path, settings, job)
        command = [sys.executable, "-m", "m2po_megatron.rollout.controller"]
        command += ["--settings", str(settings_path), "--parent-pid", str(os.getpid())]
        with job.controller_log.open("ab") as log:
            # A session of its own: a terminal's Ctrl-C reaches the trainer alone, which decides when the controller ends.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_child_environment(),
            )
        deadline = time.monotonic() + settings.engine_start_timeout_s + CALL_TIMEOUT_S
        connection: ControllerConnection | None = None
        try:
            port = _wait_for_port(process, job, deadline)
            connection = cls(f"http://127.0.0.1:{port}", process, job.controller_log)
            connection._wait_ready(deadline)
        except BaseException:
            if connection is not None:
                connection.close()
            else:
                _end_process(process)
            raise
        return connection

    def lease(self, version: int, wait_s: float) -> Batch | None:
        """The next batch, when it is ready within `wait_s` seconds; None = not yet.

        `version` is the trainer's: the updates done. Asking again before `trained` gives the same batch. Raises
        RolloutError when no engine is left (naming each and its log) or a group cannot be sampled.
        """
        response = self._call("GET", "/lease", params={"version": version, "wait_s": wait_s}, wait_s=wait_s)
        self.last_lease_info = json.loads(response.headers.get("X-Lease-Info", "{}"))
        if response.status_code == 204:
            return None
        batch = decode_batch(response.content)
        bound = int(self.last_lease_info["max_staleness"])
        for trajectory in batch.trajectories:
            if version - trajectory.oldest_version > bound:
                raise RolloutError(
                    f"trajectory {trajectory.id} of batch {batch.id} is {version - trajectory.oldest_version} updates old, "
                    f"over --max-staleness {bound}: this is a defect of the controller, see {self._log_path}"
                )
        return batch

    def trained(self, batch_id: int, version: int) -> None:
        """The batch is consumed and the weights are at `version`; on record when this returns."""
        self._call("POST", "/trained", json={"batch_id": batch_id, "version": version})

    def publish(self, path: str, version: int) -> None:
        """Have the engines load the HF directory `path` as `version`. Returns at once; of several waiting the newest wins."""
        self._call("POST", "/publish", json={"path": str(path), "version": version})

    def loaded_version(self) -> int:
        """The oldest version over the living engines; RolloutError when none lives."""
        loaded = self.status()["loaded_version"]
        if loaded is None:
            raise RolloutError(f"no rollout engine is left; see {self._log_path}")
        return int(loaded)

    def wait_loaded(self, version: int, timeout_s: float) -> None:
        """Wait until every living engine has `version` or a newer one; RolloutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(10.0, max(0.0, deadline - time.monotonic()))
            reply = self._call("GET", "/loaded", params={"version": version, "wait_s": wait_s}, wait_s=wait_s).json()
            if reply["loaded_version"] >= version:
                return
            if time.monotonic() >= deadline:
                raise RolloutError(
                    f"the engines have not loaded version {version} within {timeout_s:.0f} s (they have "
                    f"{reply['loaded_version']}); see {self._log_path}"
                )

    def evaluate_start(
        self,
        name: str,
        prompts_file: str,
        samples_per_prompt: int,
        temperature: float,
        max_new_tokens: int,
        version: int,
    ) -> str:
        """Start an evaluation of `version`, which must be published; returns its job id.

        Publications of newer versions wait until it is done. temperature 0 is greedy.
        """
        body = {
            "name": name,
            "prompts_file": str(prompts_file),
            "samples_per_prompt": samples_per_prompt,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "version": version,
        }
        return str(self._call("POST", "/evaluate", json=body).json()["job_id"])

    def evaluate_result(self, job_id: str, wait_s: float) -> dict[str, Any] | None:
        """{"name", "accuracy" (mean reward), "samples", "version", "seconds"} when done within `wait_s`, else None."""
        response = self._call("GET", f"/evaluate/{job_id}", params={"wait_s": wait_s}, wait_s=wait_s)
        return None if response.status_code == 204 else dict(response.json())

    def probe(self, samples: int, wait_s: float, version: int | None = None) -> list[Trajectory] | None:
        """About `samples` trajectories of training prompts, every token by one live version; None = not done in `wait_s`.

        Consumes no prompt of the run. With `version`, sampling starts once the engines have that version or a newer one.
        Asking again continues the same probe. Unscored (reward None).
        """
        params: dict[str, Any] = {"samples": samples, "wait_s": wait_s}
        if version is not None:
            params["version"] = version
        response = self._call("GET", "/probe", params=params, wait_s=wait_s)
        return None if response.status_code == 204 else decode_batch(response.content).trajectories

    def status(self) -> dict[str, Any]:
        """Queue depths by state, drops by reason, engines, loaded version, tokens generated: and more."""
        return dict(self._call("GET", "/status").json())

    def close(self) -> None:
        """End controller and engines; bounded, and fine to call twice."""
        self._client.close()
        if self._process is not None:
            _end_process(self._process)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, deadline: float) -> None:
        while True:
            try:
                if self._call("GET", "/ready", params={"wait_s": 1.0}, wait_s=1.0).json()["ready"]:
                    return
            except RolloutError as error:
                raise RolloutError(f"{error}\n(the rollout controller's log: {self._log_path})") from error
            if time.monotonic() > deadline:
                raise RolloutError(f"the engines did not come up in time; {_tail(self._log_path)}")

    def _call(self, method: str, path: str, wait_s: float = 0.0, **arguments: Any) -> httpx.Response:
        """One request; RolloutError with the controller's own words, or with its log when it does not answer."""
        try:
            response = self._client.request(method, path, timeout=wait_s + CALL_TIMEOUT_S, **arguments)
        except (httpx.HTTPError, RuntimeError) as error:
            raise RolloutError(f"{self._why_silent(error)}; {_tail(self._log_path)}") from error
        if response.status_code >= 400:
            raise RolloutError(_error_text(response))
        return response

    def _why_silent(self, error: Exception) -> str:
        if self._process is None:
            return f"the rollout controller is not running ({error or type(error).__name__})"
        try:
            # A reset connection is seen a moment before the process can be reaped.
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"the rollout controller does not answer ({error or type(error).__name__})"
        return f"the rollout controller (pid {self._process.pid}) died with exit code {code}"


def _child_environment() -> dict[str, str]:
    """The environment, with this package importable (the trainer may run from a checkout) and one OpenMP thread."""
    root = str(Path(m2po_megatron.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}


def _wait_for_port(process: subprocess.Popen[bytes], job: RolloutJob, deadline: float) -> int:
    while True:
        if job.address_path.exists():
            address = json.loads(job.address_path.read_text())
            if "error" in address:
                raise RolloutError(f"{address['error']} (log: {job.controller_log})")
            return int(address["port"])
        if process.poll() is not None and not job.address_path.exists():
            raise RolloutError(
                f"the rollout controller ended at start with exit code {process.returncode}; {_tail(job.controller_log)}"
            )
        if time.monotonic() > deadline:
            raise RolloutError(f"the rollout controller did not start in time; {_tail(job.controller_log)}")
        time.sleep(0.05)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a bounded wait, SIGKILL; by this process's own handle only."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the rollout controller (pid %d) ignored SIGTERM for %.0f s; killing it", process.pid, CLOSE_TIMEOUT_S
            )
            process.kill()
            process.wait()


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"the rollout controller answered {response.status_code}: {response.text[:500]}"


def _tail(path: Path, lines: int = 15) -> str:
    """The end of a log for an error text, with its path."""
    if not path.exists():
        return f"log: {path} (not written)"
    content = path.read_text(errors="replace").splitlines()[-lines:]
    return f"log: {path}\n" + "\n".join(f"    {line}" for line in content)
