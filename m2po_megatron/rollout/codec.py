"""Trajectories as bytes: compact blobs for the store, one safetensors blob per batch on the wire. No pickles.

Letters: L = tokens of one trajectory, R = its sampled (loss mask) tokens, S = runs of equal versions among these, N = the
batch's trajectories.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from m2po_megatron.data.trajectory import PROMPT_VERSION, Batch, Group, Prompt, Trajectory

_HEADER = struct.Struct("<4sIII")
_MAGIC = b"TRJ1"
_WIRE = {"token_ids": np.int32, "loss_mask": np.bool_, "behaviour_logprobs": np.float32, "versions": np.int32}
"""Each array's type on the wire: ids and versions fit 32 bits, which saves 8 bytes a token."""
_HERE = {"token_ids": np.int64, "loss_mask": np.bool_, "behaviour_logprobs": np.float32, "versions": np.int64}
"""Each array's type in a Trajectory."""


def pack_arrays(trajectory: Trajectory) -> bytes:
    """The four arrays of a valid trajectory: header (magic, L, R, S), int32 ids [L], mask bits, float32 log-probs [R],
    then versions as runs, int32 version [S] and int32 length [S]. About 8 bytes a token."""
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    versions = np.asarray(trajectory.versions, dtype=np.int64)[mask]
    starts = np.flatnonzero(np.concatenate(([True], versions[1:] != versions[:-1])))
    lengths = np.diff(np.concatenate((starts, [len(versions)])))
    parts = [
        _HEADER.pack(_MAGIC, len(mask), len(versions), len(starts)),
        np.asarray(trajectory.token_ids).astype("<i4").tobytes(),
        np.packbits(mask).tobytes(),
        np.asarray(trajectory.behaviour_logprobs)[mask].astype("<f4").tobytes(),
        versions[starts].astype("<i4").tobytes(),
        lengths.astype("<i4").tobytes(),
    ]
    return b"".join(parts)


def unpack_arrays(blob: bytes) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`: the arrays by their field's name. ValueError for bytes that are not one."""
    if len(blob) < _HEADER.size:
        raise ValueError("trajectory blob is truncated")
    magic, length, sampled, runs = _HEADER.unpack_from(blob)
    mask_bytes = (length + 7) // 8
    if magic != _MAGIC or len(blob) != _HEADER.size + 4 * length + mask_bytes + 4 * sampled + 8 * runs:
        raise ValueError("trajectory blob is truncated or of another format")
    offset = _HEADER.size
    token_ids = np.frombuffer(blob, "<i4", length, offset).astype(np.int64)
    offset += 4 * length
    mask = np.unpackbits(np.frombuffer(blob, np.uint8, mask_bytes, offset), count=length).astype(bool)
    offset += mask_bytes
    logprobs = np.zeros(length, np.float32)
    logprobs[mask] = np.frombuffer(blob, "<f4", sampled, offset)
    offset += 4 * sampled
    values = np.frombuffer(blob, "<i4", runs, offset)
    lengths = np.frombuffer(blob, "<i4", runs, offset + 4 * runs)
    versions = np.full(length, PROMPT_VERSION, np.int64)
    versions[mask] = np.repeat(values, lengths)
    return {"token_ids": token_ids, "loss_mask": mask, "behaviour_logprobs": logprobs, "versions": versions}


def encode_batch(batch: Batch) -> bytes:
    """One safetensors blob: every array concatenated over the batch, `lengths` [N]; ids, prompts, rewards as JSON in its
    metadata."""
    trajectories = batch.trajectories
    tensors: dict[str, np.ndarray] = {
        name: np.concatenate([np.asarray(getattr(t, name)).astype(kind) for t in trajectories] or [np.empty(0, kind)])
        for name, kind in _WIRE.items()
    }
    tensors["lengths"] = np.array([len(t.token_ids) for t in trajectories], dtype=np.int64)
    groups: list[dict[str, Any]] = [
        {
            "id": group.id,
            "prompt": [group.prompt.id, group.prompt.text, group.prompt.answer],
            "trajectories": [[t.id, t.finish_reason, t.reward] for t in group.trajectories],
        }
        for group in batch.groups
    ]
    return save(tensors, metadata={"batch": json.dumps({"id": batch.id, "groups": groups})})


def decode_batch(blob: bytes) -> Batch:
    """Inverse of `encode_batch`; every trajectory is validated (ValueError with its id)."""
    header_size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + header_size])
    description = json.loads(header["__metadata__"]["batch"])
    tensors = load(blob)
    for name, kind in _HERE.items():
        tensors[name] = tensors[name].astype(kind, copy=False)
    ends = np.cumsum(tensors["lengths"])
    starts = ends - tensors["lengths"]
    index = 0
    groups = []
    for entry in description["groups"]:
        trajectories = []
        for trajectory_id, finish_reason, reward in entry["trajectories"]:
            span = slice(int(starts[index]), int(ends[index]))
            arrays = {name: tensors[name][span] for name in _HERE}
            trajectory = Trajectory(
                id=trajectory_id, group_id=entry["id"], finish_reason=finish_reason, reward=reward, **arrays
            )
            trajectory.validate()
            trajectories.append(trajectory)
            index += 1
        groups.append(Group(id=entry["id"], prompt=Prompt(*entry["prompt"]), trajectories=trajectories))
    return Batch(id=description["id"], groups=groups)
