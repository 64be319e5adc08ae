"""A fault on one rank is the same error on every rank, and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from m2po_megatron import cpu
from tests.distributed.harness import run_ranks

LONG = "the end matters: " + "x" * 9000 + " ñ see logs/controller.log"
"""Longer than one small tensor, with a letter of two bytes."""


def fails(error: Exception) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def scenes(rank: int) -> dict[str, Any]:
    cpu.install()
    from m2po_megatron.initialize import World
    from m2po_megatron.rollout.errors import RolloutError
    from m2po_megatron.startup import together

    group = torch.distributed.group.WORLD
    assert group is not None
    world = World(rank, 2, torch.device("cpu"), group)
    fine: Callable[[], Any] = lambda: rank + 10  # noqa: E731
    on_one = {
        "rank 0": (0, ValueError("--hf-path x: no config.json there")),
        "rank 1": (1, ValueError("tensor a is missing")),
        "a rollout error": (0, RolloutError("engine-0 did not come up")),
        "a file": (1, FileNotFoundError(2, "No such file or directory", "/data/ü.jsonl")),
        "long, rank 0": (0, ValueError(LONG)),
        "long, rank 1": (1, ValueError(LONG)),
        "no words": (1, ValueError()),
        "a name that is no UTF-8": (1, OSError("/data/\udcff.jsonl is gone")),
    }
    actions = {name: fails(error) if rank == where else fine for name, (where, error) in on_one.items()}
    actions["both"] = fails(ValueError(f"rank {rank} failed"))
    out: dict[str, Any] = {"nobody": together(world, fine)}
    for name, action in actions.items():
        try:
            out[name] = ("no error", together(world, action))
        except ValueError as error:
            out[name] = str(error)
        out[f"after {name}"] = together(world, fine)  # the ranks are still in step
    try:
        if rank == 0:  # what nobody foresaw is not made a user's error
            together(world, fails(ZeroDivisionError("a defect")))
        out["defect"] = "no error"
    except ZeroDivisionError as error:
        out["defect"] = str(error)
    return out


EXPECTED = {
    "rank 0": "--hf-path x: no config.json there",
    "rank 1": "tensor a is missing",
    "a rollout error": "engine-0 did not come up",
    "a file": "[Errno 2] No such file or directory: '/data/ü.jsonl'",
    "long, rank 0": LONG,
    "long, rank 1": LONG,
    "no words": "ValueError()",
    "a name that is no UTF-8": "/data/?.jsonl is gone",
    "both": "rank 0 failed",
}


@pytest.mark.slow
def test_an_error_on_any_rank_is_the_same_error_on_all() -> None:
    ranks = run_ranks(scenes, 2, timeout_s=60)
    for rank, found in enumerate(ranks):
        assert found["nobody"] == rank + 10
        assert {name: found[name] for name in EXPECTED} == EXPECTED
        assert {found[f"after {name}"] for name in EXPECTED} == {rank + 10}
    assert [found["defect"] for found in ranks] == ["a defect", "no error"]
