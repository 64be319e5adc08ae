"""Published versions: whole directories under a pointer that moves last, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2po_megatron import cpu
from tests.distributed.harness import run_ranks

STEPS = [  # (version, the oldest version in use, what is there afterwards)
    (0, 0, [0]),
    (1, 0, [0, 1]),
    (2, 0, [0, 1, 2]),
    (3, 0, [0, 1, 2, 3]),  # an engine is still loading 0
    (4, 4, [2, 3, 4]),
    (6, 3, [3, 4, 6]),
    (7, 2, [3, 4, 6, 7]),  # what is gone stays gone
    (5, 5, [3, 4, 5]),  # a resume from version 4: 6 and 7 belong to a life of the run that ended
    (5, 5, [3, 4, 5]),
]


def publish(rank: int, path: str, run_dir: str) -> list[dict[str, Any]]:
    """Writes every step's version, the weights being the version's number, from two tensor-parallel ranks."""
    cpu.install()
    import torch.distributed as dist

    import m2po_megatron.weights.publish as module
    from m2po_megatron.initialize import initialize
    from m2po_megatron.policy.architecture import read_architecture
    from m2po_megatron.policy.model import build_model
    from m2po_megatron.policy.settings import ModelSettings, ParallelSettings

    parallel = ParallelSettings(tensor_model_parallel_size=2)
    world = initialize(parallel, seed=0)
    arch = read_architecture(path)
    chunks = build_model(arch, ModelSettings(hf_path=path), parallel, world.device)
    (Path(run_dir) / "publish").mkdir(parents=True, exist_ok=True)
    pointed: list[bool] = []
    real = module.replace_text

    def watched(file: Path, text: str) -> None:
        pointed.append((file.parent / text / "model.safetensors").is_file())  # whole before anybody is sent there
        real(file, text)

    module.replace_text = watched
    seen = []
    for version, in_use_from, _ in STEPS:
        for parameter in chunks[0].parameters():
            parameter.data.fill_(version)
        written = module.write_version(chunks, arch, path, run_dir, version, in_use_from=in_use_from)
        dist.barrier()
        directory = Path(run_dir) / "publish"
        seen.append(
            {
                "path": str(written),
                "directories": sorted(p.name for p in directory.iterdir() if p.is_dir()),
                "latest": (directory / "latest").read_text(),
                "files": sorted(p.name for p in written.iterdir()),
                "weights": {name: t.unique().tolist() for name, t in load_file(written / "model.safetensors").items()},
            }
        )
        dist.barrier()
    assert pointed == ([True] * len(STEPS) if rank == 0 else [])
    return seen


@pytest.mark.slow
def test_versions_are_whole_pointed_to_last_and_removed_when_nobody_needs_them(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    origin = tiny_model("llama")
    ranks = run_ranks(publish, 2, str(origin), str(tmp_path))
    assert ranks[0] == ranks[1]
    names = set(load_file(origin / "model.safetensors"))
    for (version, _, kept), seen in zip(STEPS, ranks[0], strict=True):
        assert seen["path"] == str(tmp_path / "publish" / f"v{version:08d}")
        assert seen["directories"] == [f"v{number:08d}" for number in kept]
        assert seen["latest"] == f"v{version:08d}\n"
        assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= set(seen["files"])
        assert seen["weights"] == {name: [float(version)] for name in names}
