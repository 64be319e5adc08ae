"""Blobs and the wire format give back what was put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.data.trajectory import Batch, Group, Trajectory
from m2po_megatron.rollout.codec import decode_batch, encode_batch, pack_arrays, unpack_arrays
from tests.rollout.samples import assert_same, make_prompt, make_trajectory


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blob_round_trip_with_any_mask_and_versions(data: st.DataObject) -> None:
    mask = [False, *data.draw(st.lists(st.booleans(), max_size=40)), True]
    sampled = sum(mask)
    trajectory = make_trajectory(prompt=len(mask) - sampled, response=sampled)
    trajectory.loss_mask = np.array(mask)
    trajectory.versions = np.full(len(mask), -1, np.int64)
    trajectory.versions[trajectory.loss_mask] = data.draw(
        st.lists(st.integers(0, 3), min_size=sampled, max_size=sampled)
    )
    trajectory.behaviour_logprobs = np.where(trajectory.loss_mask, np.float32(-0.25), np.float32(0)).astype(np.float32)
    arrays: dict[str, Any] = unpack_arrays(pack_arrays(trajectory))
    back = Trajectory(
        id=trajectory.id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        **arrays,
    )
    assert_same(back, trajectory)


def test_blob_is_compact() -> None:
    trajectory = make_trajectory(prompt=96, response=4000)
    assert len(pack_arrays(trajectory)) < 9 * 4096


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"XXXX" + b[4:], lambda b: b"", lambda b: b + b"\0"])
def test_damaged_blob_is_refused(damage: object) -> None:
    with pytest.raises(ValueError, match="trajectory blob"):
        unpack_arrays(damage(pack_arrays(make_trajectory())))  # type: ignore[operator]


def test_batch_round_trip() -> None:
    groups = [
        Group(
            id=f"g{g}",
            prompt=make_prompt(g),
            trajectories=[
                make_trajectory(f"g{g}", s, 2 + g, 1 + s, versions=g, reward=None if s else 0.5) for s in range(3)
            ],
        )
        for g in range(2)
    ]
    back = decode_batch(encode_batch(Batch(id=7, groups=groups)))
    assert back.id == 7
    assert [g.prompt for g in back.groups] == [g.prompt for g in groups]
    assert [g.oldest_version for g in back.groups] == [0, 1]
    for left, right in zip(back.trajectories, [t for g in groups for t in g.trajectories], strict=True):
        assert_same(left, right)


def test_an_unusable_trajectory_does_not_pass_the_wire() -> None:
    trajectory = make_trajectory("g3", 1)
    trajectory.behaviour_logprobs[-1] = np.nan
    batch = Batch(id=0, groups=[Group(id="g3", prompt=make_prompt(), trajectories=[trajectory])])
    with pytest.raises(ValueError, match=r"g3\.1.*finite"):
        decode_batch(encode_batch(batch))
