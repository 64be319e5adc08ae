"""Every generator of random numbers that training may draw from: seeding, and their states for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, and Megatron's own, which differ by model-parallel rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global one, which other code may draw from)
    torch.manual_seed(seed)
    # Without CUDA there is no CUDA generator to track; Megatron's inference tracker keeps none (a public argument).
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True
    )


def generator_states() -> dict[str, Any]:
    """The states of all of them, as plain numbers and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Go on where `generator_states` was taken, on a rank of the same place and kind."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
