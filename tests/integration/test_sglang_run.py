"""The main job with a real SGLang server as its engine."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest

from m2po_megatron.metrics import read_metrics
from tests.integration.test_pretrain import TASK, Job
from tests.sglang_server import running_sglang

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.mark.timeout(600)
def test_training_on_rollouts_of_sglang(tmp_path: Path, sglang_python: str) -> None:
    job = Job(tmp_path)
    with running_sglang(sglang_python, TASK / "model", tmp_path / "sglang.log") as url:
        engines = ["--rollout-engine", "sglang", "--sglang-urls", url]
        job.run(*engines, "--tensor-model-parallel-size", "2", "--train-iters", "6")
        # The server holds the last version that was published, under this run's name for it.
        assert httpx.get(f"{url}/model_info", trust_env=False).json()["weight_version"] == "0.6"
        job.run(*engines, "--tensor-model-parallel-size", "2", "--train-iters", "8", "--load", str(job.save))
        assert httpx.get(f"{url}/model_info", trust_env=False).json()["weight_version"] == "1.8"
        # Ours to use, not ours to end.
        assert httpx.get(f"{url}/health", trust_env=False, timeout=30.0).status_code == 200
    updates, evaluations = read_metrics(job.run_dir)
    assert [r["iteration"] for r in updates] == list(range(1, 9))
    assert [r["version"] for r in evaluations] == [0, 6, 8]
    assert updates[0]["m2/before"] < 1e-9
    floors = [r["m2/engine_floor"] for r in updates if r["m2/engine_floor"] is not None]
    assert floors
    assert max(floors) < 1e-9  # float32 on both sides
    assert all(0 <= r["staleness/min"] <= r["staleness/max"] <= 4 for r in updates)
    with sqlite3.connect(job.run_dir / "rollouts.sqlite") as store:
        trained = store.execute("SELECT position FROM groups WHERE state = 'trained' ORDER BY position").fetchall()
    assert trained == [(position,) for position in range(16)]
