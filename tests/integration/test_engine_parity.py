"""A real engine against the real policy: while the weights are those that sampled, the log-ratios are 0 and nothing is
masked; when the policy moves on and the engine does not, the second moment grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from m2po_megatron.data.trajectory import Batch, Group, Prompt
from m2po_megatron.rollout.codec import decode_batch, encode_batch
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings
from tests.distributed.harness import run_ranks
from tests.distributed.workers import Layout, build, rows_of

MODEL = "examples/arithmetic/model"
UPDATES = 4
OPTIMIZER = {"lr": 1e-4, "clip_grad": 0.0}

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def sample(tmp_path: Path, temperature: float) -> bytes:
    """About 64 trajectories that a controller's embedded engine sampled under version 0."""
    settings = RolloutSettings(
        prompt_data="examples/arithmetic/train.jsonl",
        group_size=4,
        rollout_batch_size=16,
        global_batch_size=16,
        max_response_length=8,
        temperature=temperature,
        engine_start_timeout_s=120,
    )
    job = RolloutJob(run_dir=str(tmp_path / "run"), model_path=MODEL)
    connection = ControllerConnection.start(settings, job)
    try:
        for _ in range(30):
            trajectories = connection.probe(64, 2.0, version=0)
            if trajectories is not None:
                return encode_batch(Batch(0, [Group("probe", Prompt("probe", ""), trajectories)]))
    finally:
        connection.close()
    raise AssertionError("the probe did not finish")


def train_on(rank: int, layout: Layout, payload: bytes) -> dict:
    """Log-ratios before any update, then the M2 of every update on the same data."""
    from m2po_megatron import cpu

    cpu.install()
    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.policy.forward import compute_logprobs
    from m2po_megatron.trainer import find_mask, measure_engine_floor, train_update

    world, policy = build(layout, MODEL)
    trajectories = decode_batch(payload).trajectories
    advantages = np.random.default_rng(0).normal(size=len(trajectories)).astype(np.float32)
    rows = rows_of(layout, world, trajectories, advantages)
    logprobs = compute_logprobs(policy, rows, temperature=layout.temperature)
    ratios = [
        torch.where(row.loss_mask, lp - row.behaviour_logprobs, 0.0) for lp, row in zip(logprobs, rows, strict=True)
    ]
    mask = find_mask(ratios, rows, 0.04)
    floor = measure_engine_floor(policy, rows, temperature=layout.temperature)
    settings = LossSettings(m2_threshold=0.04)
    reports = [
        train_update(policy, rows, settings, temperature=layout.temperature, version=v).metrics for v in range(UPDATES)
    ]
    return {
        "largest": max(float(r.abs().max()) for r in ratios),
        "tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "masked": mask.masked_tokens,
        "floor": floor,
        "m2": [r["m2/before"] for r in reports],
        "after": [r["m2/after"] for r in reports],
        "reported_floor": [r["m2/engine_floor"] for r in reports],
    }


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tp2", tensor=2, optimizer=OPTIMIZER),
        Layout("dp2-cool", micro_batch_size=9, temperature=0.7, optimizer=OPTIMIZER),
    ],
    ids=lambda layout: layout.name,
)
def test_fresh_data_has_no_second_moment_and_stale_data_has_more_and_more(layout: Layout, tmp_path: Path) -> None:
    for result in run_ranks(train_on, 2, layout, sample(tmp_path, layout.temperature)):
        assert result["tokens"] > 50
        assert result["largest"] <= 1e-5
        assert result["masked"] == 0
        assert result["floor"] <= 1e-10
        assert result["m2"][0] <= 1e-10
        assert result["m2"] == sorted(result["m2"])
        assert result["m2"][-1] > 1e-5
        assert all(after <= 0.04 for after in result["after"])
        # Only the first update is made of tokens that the current version sampled.
        assert result["reported_floor"][0] <= 1e-10
        assert result["reported_floor"][1:] == [None] * (UPDATES - 1)
