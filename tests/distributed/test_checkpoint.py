"""Checkpoints: a resumed run is the uninterrupted run, under the same layout bit for bit; what is not whole is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2po_megatron.checkpoint import RunPosition, latest_checkpoint, read_position
from tests.distributed.checkpoint_worker import UPDATES_BEFORE, Data, run, run_misfits
from tests.distributed.harness import run_ranks
from tests.distributed.reference_policy import make_trajectories
from tests.tiny_models import tiny_network

SAME = ["one", "tp2", "dp2", "pp2", "sharded", "bf16"]
FIRST = [("one", "one")]
SECOND = [(name, name) for name in SAME[1:]] + [("dp2", "tp2"), ("tp2", "dp2"), ("tp2", "one"), ("dp2", "pp2"), ("pp2", "tp2")]
THIRD = [("one", "tp2"), ("one", "dp2"), ("one", "pp2"), ("sharded", "sharded")]
"""(layout, the layout that saved); the first and third on one rank, the second on two."""
OTHER_LAYOUT = [pair for pair in SECOND + THIRD if pair[0] != pair[1]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def data(tiny_model: Callable[..., Path]) -> Data:
    model = tiny_network("llama")
    return Data(
        str(tiny_model("llama")),
        [make_trajectories(model, 12, seed, 1.0) for seed in range(3)],
        [np.random.default_rng(seed).normal(size=12).astype(np.float32) for seed in range(3)],
    )


@pytest.fixture(scope="module")
def one(data: Data, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 1, ["one"], FIRST, data, str(folder))


@pytest.fixture(scope="module")
def two(one: list[dict[str, Any]], data: Data, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 2, SAME[1:], SECOND, data, str(folder))


@pytest.fixture(scope="module")
def three(two: list[dict[str, Any]], data: Data, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 1, [], THIRD, data, str(folder))


@pytest.fixture(scope="module")
def found(
    one: list[dict[str, Any]], two: list[dict[str, Any]], three: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """What each step gave on every rank, by "save LAYOUT", "load LAYOUT from LAYOUT" or, on one rank, "... 1"."""
    results = {name: [rank[name] for rank in ranks] for ranks in (one, two) for name in ranks[0]}
    results.update({f"{name} 1" if name in results else name: [three[0][name]] for name in three[0]})
    return results


def identical(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            identical(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            identical(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def exported(ranks: list[dict[str, Any]], moment: str) -> dict[str, torch.Tensor]:
    """Whole tensors, from all pipeline stages."""
    return {name: tensor for rank in ranks for name, tensor in rank[moment]["exported"].items()}


@pytest.mark.parametrize("layout", SAME)
def test_a_resume_in_the_same_layout_is_the_uninterrupted_run_bit_for_bit(found: dict[str, Any], layout: str) -> None:
    for before, after in zip(found[f"save {layout}"], found[f"load {layout} from {layout}"], strict=True):
        assert after["position"].version == UPDATES_BEFORE
        assert len(before["saved"]["moments"]) > 5
        assert before["saved"]["schedule"]["num_steps"] == UPDATES_BEFORE
        identical(after["saved"], before["saved"])
        identical(after["metrics"], before["metrics"])
        identical(after["after"], before["after"])
    assert before["after"]["lr"] != before["saved"]["lr"]
    assert before["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize(("layout", "origin"), OTHER_LAYOUT)
def test_a_resume_in_another_layout_goes_on_with_the_same_weights(
    found: dict[str, Any], layout: str, origin: str
) -> None:
    compare_layouts(found[f"save {origin}"], found[f"load {layout} from {origin}"])


def test_a_distributed_optimizer_is_spread_over_another_number_of_ranks(found: dict[str, Any]) -> None:
    compare_layouts(found["save sharded"], found["load sharded from sharded 1"])


def compare_layouts(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    saved = exported(before, "saved")
    identical(exported(after, "saved"), saved)
    assert after[0]["saved"]["lr"] == before[0]["saved"]["lr"]
    moved = 0.0
    for name, tensor in exported(before, "after").items():
        moved = max(moved, float((tensor - saved[name]).abs().max()))
        assert (exported(after, "after")[name] - tensor).abs().max() <= 1e-6, name
    assert moved > 1e-4  # the update did something
    for key in ("loss/policy", "grad_norm", "lr"):
        assert after[0]["metrics"][key] == pytest.approx(before[0]["metrics"][key], rel=1e-5)


def test_the_position_is_kept(found: dict[str, Any], data: Data, folder: Path) -> None:
    expected = RunPosition(version=2, consumed_batches=1, incarnation=3, hf_path=data.model_path)
    assert found["load one from one"][0]["position"] == expected
    path = latest_checkpoint(folder / "one")
    assert path == folder / "one" / "iter_0000002" == Path(found["save one"][0]["path"])
    assert read_position(path) == expected
    assert sorted(p.name for p in (folder / "one").iterdir()) == ["iter_0000002", "latest"]


@pytest.fixture(scope="module")
def misfits(
    two: list[dict[str, Any]], data: Data, folder: Path, tiny_model: Callable[..., Path]
) -> dict[str, Any]:
    others = {
        "another vocabulary": tiny_model("llama", vocab_size=40),
        "tied": tiny_model("llama", tie=True),
        "another family": tiny_model("qwen2"),
        "another rotary base": tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    }
    for name, victim in {"no part": "__0_0.distcp", "no metadata": ".metadata", "no common": "common.pt"}.items():
        shutil.copytree(folder / "one", folder / name)
        (folder / name / "iter_0000002" / victim).unlink()
    return run_ranks(run_misfits, 1, data, str(folder), {name: str(path) for name, path in others.items()})[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another vocabulary", "is of a model with vocab_size 32, but at --hf-path it is 40"),
        ("tied", "is of a model with tied_embeddings False, but at --hf-path it is True"),
        ("another family", "is of a model with name LlamaForCausalLM, but at --hf-path it is Qwen2ForCausalLM"),
        ("another rotary base", "is of a model with rope_theta 10000.0, but at --hf-path it is 500000.0"),
        ("no part", "is not a whole checkpoint: [Errno 2] No such file or directory"),
        ("no metadata", "is not a whole checkpoint: [Errno 2] No such file or directory"),
        ("no common", "is not a whole checkpoint"),
        (
            "sharded, was not",
            "was saved under --use-distributed-optimizer False; its optimizer cannot be loaded under "
            "--use-distributed-optimizer True, --tensor-model-parallel-size 1",
        ),
        ("not sharded, was", "was saved under --use-distributed-optimizer True"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(misfits: dict[str, Any], name: str, said: str) -> None:
    assert misfits["errors"][name].startswith("--load: ")
    assert "iter_0000002" in misfits["errors"][name]
    assert said in misfits["errors"][name]


def test_learning_rates_follow_the_flags_and_their_place_the_checkpoint(misfits: dict[str, Any]) -> None:
    """Resumed with ten times the rate and twice the length: the rate is that of a run which had these from the start."""
    resumed, from_start = misfits["other flags"], misfits["other flags from the start"]
    assert resumed["lr"] == from_start["lr"]
    assert resumed["schedule"] == from_start["schedule"]
    assert resumed["schedule"]["num_steps"] == UPDATES_BEFORE


def test_latest_moves_last_and_a_version_saved_again_replaces_the_old(misfits: dict[str, Any]) -> None:
    assert misfits["pointed to whole"] == [True, True]
    assert misfits["left"] == ["iter_0000002", "latest"]
    assert misfits["incarnation saved last"] == 5


def make_checkpoint(path: Path, version: int = 2) -> None:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(dataclasses.asdict(RunPosition(version=version))))


def test_without_any_checkpoint_a_run_begins(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "gone") is None
    assert latest_checkpoint(tmp_path) is None
    make_checkpoint(tmp_path / "iter_0000002.tmp")  # the first save did not come to its end
    assert latest_checkpoint(tmp_path) is None


def test_only_what_latest_names_is_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "iter_0000002")
    make_checkpoint(tmp_path / "iter_0000004", 4)
    (tmp_path / "latest").write_text("iter_0000002\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"


@pytest.mark.parametrize("named", ["iter_0000009", "iter_0000004", "iter_0000002.tmp"])
def test_latest_naming_what_is_not_whole_is_refused(tmp_path: Path, named: str) -> None:
    make_checkpoint(tmp_path / "iter_0000002.tmp")
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest").write_text(named + "\n")
    with pytest.raises(ValueError) as error:
        latest_checkpoint(tmp_path)
    assert str(error.value) == f"--load {tmp_path}: latest names {named}, which is not a complete checkpoint there"


def test_checkpoints_without_latest_do_not_start_the_run_anew(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "iter_0000002")
    with pytest.raises(ValueError, match=r"has no file latest; to resume from iter_0000002, write this name into it"):
        latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"iter_0000002: is one checkpoint; give the directory that holds it"):
        latest_checkpoint(tmp_path / "iter_0000002")
