"""Checkpoints: a resumed run is the uninterrupted run, under the same layout bit for bit; what is not whole is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2po_megatron.checkpoint_files import (
    RunPosition,
    WriteResults,
    begin_directory,
    check_batch_sizes,
    complete_directory,
    latest_checkpoint,
    read_position,
)
from tests.distributed.checkpoint_worker import UPDATES_BEFORE, Data, run, run_misfits, run_writer
from tests.distributed.harness import run_ranks
from tests.distributed.reference_policy import make_trajectories
from tests.tiny_models import tiny_network

ALONE = ["one", "moe"]
SAME = [*ALONE, "tp2", "dp2", "pp2", "tp2sp", "vpp2", "cp2", "moe-ep2", "sharded", "bf16"]
FIRST = [(name, name) for name in ALONE]
SECOND = [(name, name) for name in SAME if name not in ALONE] + [
    *(("dp2", "tp2"), ("tp2", "one"), ("dp2", "pp2"), ("pp2", "tp2"), ("tp2", "dp2")),
    *(
        ("vpp2", "pp2"),
        ("pp2", "vpp2"),
        ("tp2sp", "vpp2"),
        ("vpp2", "tp2sp"),
        ("cp2", "vpp2"),
        ("tp2", "cp2"),
        ("vpp2", "one"),
    ),
    *(("moe-ep2", "moe"), ("moe-pp2", "moe-ep2"), ("moe-tp2sp", "moe-ep2")),
]
THIRD = [
    *(("one", "tp2"), ("one", "dp2"), ("one", "pp2"), ("one", "vpp2"), ("one", "cp2"), ("moe", "moe-ep2")),
    ("sharded", "sharded"),
]
"""(layout, the layout that saved); the first and third on one rank, the second on two. Pairs, not all combinations."""
LAYERS = {"num_hidden_layers": 4}  # two pieces on each of two pipeline ranks
OTHER_LAYOUT = [pair for pair in SECOND + THIRD if pair[0] != pair[1]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # several times what they take where nothing else runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def data(tiny_model: Callable[..., Path]) -> Data:
    model = tiny_network("llama")
    return Data(
        str(tiny_model("llama", **LAYERS)),
        str(tiny_model("qwen3_moe", **LAYERS)),
        [make_trajectories(model, 12, seed, 1.0) for seed in range(3)],
        [np.random.default_rng(seed).normal(size=12).astype(np.float32) for seed in range(3)],
    )


@pytest.fixture(scope="module")
def one(data: Data, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 1, ALONE, FIRST, data, str(folder))


@pytest.fixture(scope="module")
def two(one: list[dict[str, Any]], data: Data, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run, 2, [name for name in SAME if name not in ALONE], SECOND, data, str(folder), timeout_s=560.0)


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
    before, after = found[f"save {origin}"], found[f"load {layout} from {origin}"]
    compare_layouts(before, after)
    if {layout, origin} == {"pp2", "vpp2"}:  # the same ranks
        assert [rank["metrics"]["draws"] for rank in after] == [rank["metrics"]["draws"] for rank in before]
    else:  # seeded anew, and not as the run began
        drawn = {value for rank in before for value in rank["metrics"]["draws"]}
        assert not drawn & set(after[0]["metrics"]["draws"])


def test_a_distributed_optimizer_is_spread_over_another_number_of_ranks(found: dict[str, Any]) -> None:
    compare_layouts(found["save sharded"], found["load sharded from sharded 1"])


def compare_layouts(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    saved = exported(before, "saved")
    identical(exported(after, "saved"), saved)
    assert set(after[0]["saved"]["lr"]) == set(before[0]["saved"]["lr"])  # one a group of parameters
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


DAMAGED = {
    "part": ("__0_0.distcp", "is not a whole checkpoint: "),
    "tensors' index": (".metadata", "is not a whole checkpoint: "),
    "common part": ("common.pt", "is not a whole checkpoint: "),
    "format": ("metadata.json", "is not a whole checkpoint: "),
    "position": ("run.json", "iter_0000002/run.json cannot be read: "),
}
HOW = ("no", "short", "empty")


@pytest.fixture(scope="module")
def misfits(two: list[dict[str, Any]], data: Data, folder: Path, tiny_model: Callable[..., Path]) -> dict[str, Any]:
    others = {
        "another vocabulary": tiny_model("llama", vocab_size=40, **LAYERS),
        "tied": tiny_model("llama", tie=True, **LAYERS),
        "another family": tiny_model("qwen2", **LAYERS),
        "fewer layers": tiny_model("llama", num_hidden_layers=2),
        "another rotary base": tiny_model(
            "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **LAYERS
        ),
    }
    damaged = []
    for what, (victim, _) in DAMAGED.items():
        for how in HOW:
            damaged.append(f"{how} {what}")
            shutil.copytree(folder / "one", folder / damaged[-1])
            file = folder / damaged[-1] / "iter_0000002" / victim
            contents = file.read_bytes()
            file.unlink()
            if how != "no":
                file.write_bytes(contents[: len(contents) // 2] if how == "short" else b"")
    shutil.copytree(folder / "one", folder / "another kind of format")
    damaged.append("another kind of format")
    (folder / damaged[-1] / "iter_0000002" / "metadata.json").write_text("[]")
    return run_ranks(run_misfits, 1, data, str(folder), {name: str(path) for name, path in others.items()}, damaged)[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another vocabulary", "is of a model with vocab_size 32, but at --hf-path it is 40"),
        ("tied", "is of a model with tied_embeddings False, but at --hf-path it is True"),
        ("another family", "is of a model with name LlamaForCausalLM, but at --hf-path it is Qwen2ForCausalLM"),
        ("another rotary base", "is of a model with rope_theta 10000.0, but at --hf-path it is 500000.0"),
        ("fewer layers", "is of a model with num_layers 4, but at --hf-path it is 2"),
        ("no part", "is not a whole checkpoint: [Errno 2] No such file or directory"),
        *((f"{how} {what}", said) for what, (_, said) in DAMAGED.items() for how in HOW),
        (
            "sharded, was not",
            "was saved under --bf16 False, --use-distributed-optimizer False; its optimizer cannot be loaded under "
            "--bf16 False, --use-distributed-optimizer True, --tensor-model-parallel-size 1",
        ),
        (
            "bfloat16, was not",
            "was saved under --bf16 False, --use-distributed-optimizer False; its optimizer cannot be loaded",
        ),
        ("not sharded, was", "was saved under --bf16 False, --use-distributed-optimizer True"),
        ("another kind of format", "is not a whole checkpoint: "),
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


def test_a_run_that_is_resumed_before_its_first_update_begins_alike(misfits: dict[str, Any]) -> None:
    first, resumed = misfits["version 0"]
    identical(resumed, first)


@pytest.fixture(scope="module")
def written(data: Data, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_writer, 2, data, str(tmp_path_factory.mktemp("writer") / "save"))


def test_what_is_written_in_the_background_is_of_the_moment_of_the_save(written: list[dict[str, Any]]) -> None:
    for rank in written:
        identical(rank["loaded"]["parameters"], rank["saved"]["parameters"])
        identical(rank["loaded"]["moments"], rank["saved"]["moments"])
        assert rank["position"].version == 1
        moved = rank["moved"]["parameters"]
        assert any(not torch.equal(moved[name], tensor) for name, tensor in rank["saved"]["parameters"].items())


def test_latest_moves_when_all_is_written_and_not_for_what_failed(written: list[dict[str, Any]]) -> None:
    first, second = written
    assert first["latest"] == second["latest"]
    assert first["latest"] == [None, *["iter_0000001"] * 3, "iter_0000004", "iter_0000005"]
    assert [len(names) for names in first["left"]] == [1, 2, 2, 2, 3, 3]
    assert first["left"][0][0].startswith("iter_0000001.")
    assert first["left"][0][0].endswith(".tmp")
    assert first["left"][3] == ["iter_0000001", "latest"]  # nothing is left of the failed ones
    assert first["left"][5] == ["iter_0000004", "iter_0000005", "latest"]  # two stay
    assert first["mark"]  # a version that has a whole checkpoint is not written again


def test_a_failed_save_is_told_on_every_rank_until_one_succeeds(written: list[dict[str, Any]]) -> None:
    for rank in written:
        told = [failure is not None for failure in rank["failures"]]
        assert told == [False, False, True, True, False, False]
        assert "save: iter_0000002 could not be written: " in rank["failures"][2]
    assert written[0]["failures"][2].endswith("written: on rank 1: Worker failure: [Errno 28] No space left on device")
    assert written[0]["failures"][3].endswith(
        "iter_0000003 could not be written: on rank 1: its writing process was killed"
    )


def make_checkpoint(path: Path, version: int = 2) -> None:
    path.mkdir(parents=True)
    (path / "tensors").write_text(f"of version {version}")
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


@pytest.mark.parametrize("held", [b"", b"\xff\xfe", b"iter_\0", b"../other", b".."])
def test_latest_that_holds_no_name_is_refused_and_the_next_save_writes_it_anew(tmp_path: Path, held: bytes) -> None:
    make_checkpoint(tmp_path / "iter_0000002")
    (tmp_path / "latest").write_bytes(held)
    with pytest.raises(ValueError, match=f"--load {tmp_path}: what its file latest holds is no name of a checkpoint"):
        latest_checkpoint(tmp_path)
    assert write_version(tmp_path, 4) == latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"version": "x"}, "version is 'x', not a number of 0 or more"),
        ({"version": True}, "version is True, not a number"),
        ({"consumed_batches": None}, "consumed_batches is None, not a number"),
        ({"incarnation": -1}, "incarnation is -1, not a number"),
        ({"batch_sizes": [3]}, r"batch_sizes is \[3\], not numbers by flags"),
        ({"other": 1}, "cannot be read: .*other"),
    ],
)
def test_a_position_that_cannot_be_is_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    make_checkpoint(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000002" / "run.json").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match=f"--load: {tmp_path}/iter_0000002/run.json:? {said}"):
        read_position(tmp_path / "iter_0000002")


def test_a_place_counted_in_other_batches_is_refused(tmp_path: Path) -> None:
    sizes = {"--group-size": 4, "--rollout-batch-size": 32, "--global-batch-size": 16}
    path = write_version(tmp_path, 2, batch_sizes=sizes)
    check_batch_sizes(path, sizes)
    with pytest.raises(ValueError) as error:
        check_batch_sizes(path, {**sizes, "--rollout-batch-size": 64, "--global-batch-size": 32})
    assert str(error.value) == (
        f"--load: {path} counts its place in the prompts with --rollout-batch-size 32 (now 64), "
        "--global-batch-size 16 (now 32): resume with the same"
    )


def test_checkpoints_without_latest_do_not_start_the_run_anew(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "iter_0000002")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"  # killed between the first one's name and `latest`
    make_checkpoint(tmp_path / "iter_0000004", 4)
    with pytest.raises(ValueError, match=r"has no file latest; to resume from iter_0000004, write this name into it"):
        latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"iter_0000002: is one checkpoint; give the directory that holds it"):
        latest_checkpoint(tmp_path / "iter_0000002")


def write_version(root: Path, version: int, keep_last: int = 0, in_use: Path | None = None, **position: Any) -> Path:
    aside = begin_directory(root, version)
    (aside / "tensors").write_text(f"new of version {version}")
    return complete_directory(aside, RunPosition(version=version, **position), keep_last, in_use)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_older_ones_go_but_not_the_one_in_use(tmp_path: Path) -> None:
    for version in (2, 4, 6):
        assert write_version(tmp_path, version) == tmp_path / f"iter_{version:07d}"
    make_checkpoint(tmp_path / "iter_0000020", 20)  # of a life of the run that was given up
    (tmp_path / "iter_0000001").mkdir()  # not whole, and not ours to remove
    (tmp_path / "iter_of_mine").mkdir()
    write_version(tmp_path, 8, 2, tmp_path / "iter_0000002")
    kept = ["iter_0000001", "iter_0000002", "iter_0000006", "iter_0000008", "iter_0000020", "iter_of_mine", "latest"]
    assert names(tmp_path) == kept
    write_version(tmp_path, 10, 1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000010", "iter_0000020", "iter_of_mine", "latest"]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"


def test_leftovers_of_killed_saves_go_at_the_next(tmp_path: Path) -> None:
    first, second = begin_directory(tmp_path, 2), begin_directory(tmp_path, 2)
    assert first != second
    assert not first.exists()
    (tmp_path / "iter_0000001.old.tmp").mkdir()
    (tmp_path / "mine.tmp").mkdir()
    write_version(tmp_path, 4)
    assert names(tmp_path) == ["iter_0000004", "latest", "mine.tmp"]


@pytest.mark.parametrize("named", [2, 4])
@pytest.mark.parametrize("steps", range(7))
def test_a_save_killed_between_any_two_steps_leaves_what_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, named: int
) -> None:
    """Version 4 is written once more over an old version 4, while `latest` names `named`."""
    import m2po_megatron.checkpoint_files as module

    for version in (2, 4, named):
        write_version(tmp_path, version)
    done = 0

    class Killed(BaseException):
        pass

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == steps:
                raise Killed
            done += 1
            return real(*args, **kwargs)

        return step

    (tmp_path / "iter_0000004" / "tensors").write_text("old of version 4")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", counted(module.os.replace))
        patch.setattr(module.shutil, "rmtree", counted(module.shutil.rmtree))
        with contextlib.suppress(Killed):
            write_version(tmp_path, 4)
    pointed = (tmp_path / "latest").read_text().strip()
    path = latest_checkpoint(tmp_path)
    assert path == tmp_path / pointed
    assert read_position(path).version == int(pointed[-1])
    assert (path / "tensors").read_text() in (f"old of version {pointed[-1]}", f"new of version {pointed[-1]}")
    write_version(tmp_path, 6)
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000006", "latest"] or (
        # the old one had been taken away, and `latest` did not need it
        names(tmp_path) == ["iter_0000002", "iter_0000006", "latest"] and named == 2
    )


def test_what_a_writer_came_to_reaches_its_rank_once_and_whole() -> None:
    results = WriteResults()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    for number in (300_000, 2):  # more than a pipe holds; then less, over what was there
        came_to = {i: f"file {i}" for i in range(number)}
        writer = get_context("fork").Process(target=results.put, args=(came_to,))
        writer.start()
        writer.join(60)
        assert writer.exitcode == 0
        assert results.get_nowait() == came_to
        with pytest.raises(queue.Empty):
            results.get_nowait()


def test_a_writer_killed_before_its_last_word_has_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = WriteResults()
    write, calls = os.pwrite, []

    def until_killed(file: int, content: bytes, offset: int) -> int:
        calls.append(offset)
        if offset == 0:  # the last step, which makes it count
            raise KeyboardInterrupt
        return write(file, content, offset)

    monkeypatch.setattr(os, "pwrite", until_killed)
    with pytest.raises(KeyboardInterrupt):
        results.put({0: "file 0"})
    assert calls[-1] == 0 and len(calls) > 1
    with pytest.raises(queue.Empty):
        results.get_nowait()
