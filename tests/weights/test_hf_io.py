"""Weights in and out: exact for every family and layout, whole directories, and errors that name tensor and file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m2po_megatron import cpu
from tests.distributed.harness import leave_layout, run_ranks
from tests.tiny_models import make_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama tied": {"kind": "llama", "tie": True},
    "llama 37": {"kind": "llama", "vocab_size": 37},  # padded to 40, or 20 a rank
    "qwen2": {"kind": "qwen2"},
    "qwen2 tied": {"kind": "qwen2", "tie": True},
    "qwen3": {"kind": "qwen3", "head_dim": 24, "num_key_value_heads": 4, "num_attention_heads": 8},
    "qwen3 tied 37": {"kind": "qwen3", "tie": True, "vocab_size": 37},
    "experts": {"kind": "qwen3_moe"},
    "experts tied 37": {"kind": "qwen3_moe", "tie": True, "vocab_size": 37, "num_experts": 6, "num_hidden_layers": 4},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2 sp": {"tensor": 2, "sequence_parallel": True},
    "dp2": {},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
    "tp2 sp, experts whole": {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1, "expert": 2},
    "pp2 in 2 pieces": {"pipeline": 2, "virtual": 2},
    "ep2 tp2": {"tensor": 2, "sequence_parallel": True, "expert": 2},
    "pp2 ep2": {"pipeline": 2, "expert": 2},
}
ONE_RANK = [("tp1", name) for name in MODELS]
DENSE = [name for name in MODELS if not name.startswith("experts")]
TWO_RANKS = [(layout, name) for layout in ("tp2", "pp2") for name in DENSE] + [("tp2 sp", "qwen2"), ("dp2", "llama 37")]
TWO_RANKS += [(layout, "experts") for layout in ("tp2 sp", "pp2", "ep2", "cp2")]
TWO_RANKS += [(layout, "experts tied 37") for layout in ("tp2 sp, experts whole", "pp2 in 2 pieces", "ep2")]
FOUR_RANKS = [("ep2 tp2", "experts"), ("pp2 ep2", "experts"), ("ep2 tp2", "experts tied 37"), ("pp2 ep2", "experts tied 37")]

Tensors = dict[str, torch.Tensor]


def build(
    path: str,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    sequence_parallel: bool = False,
    bf16: bool = False,
) -> Any:
    """(pieces of the model, architecture) on this rank, with the directory's weights."""
    from m2po_megatron.initialize import initialize
    from m2po_megatron.policy.architecture import read_architecture
    from m2po_megatron.policy.model import build_model
    from m2po_megatron.policy.settings import ModelSettings, ParallelSettings
    from m2po_megatron.weights.hf_io import load_hf

    parallel = ParallelSettings(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        num_virtual_stages_per_pipeline_rank=virtual,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        sequence_parallel=sequence_parallel,
    )
    world = initialize(parallel, seed=0)
    arch = read_architecture(path)
    settings = ModelSettings(hf_path=path, make_vocab_size_divisible_by=4, bf16=bf16)
    chunks = build_model(arch, settings, parallel, world.device)
    load_hf(chunks, arch, path)
    return chunks, arch


def round_trips(rank: int, paths: dict[str, str], cases: list[tuple[str, str]], out: str) -> dict[str, Tensors]:
    """What every rank exports in each (layout, model), and a directory written from each."""
    cpu.install()

    from m2po_megatron.weights.hf_io import export_hf, save_hf

    found = {}
    for layout, name in cases:
        chunks, arch = build(paths[name], **LAYOUTS[layout])
        found[f"{layout}/{name}"] = {key: tensor.clone() for key, tensor in export_hf(chunks, arch)}
        save_hf(chunks, arch, paths[name], Path(out) / layout / name)
        leave_layout()
    return found


def alone(rank: int, paths: dict[str, str], out: str, broken: dict[str, str], bf16: str) -> dict[str, Any]:
    """One rank's part: the round trip, the bfloat16 source, and what each broken directory is answered with."""

    from m2po_megatron.weights.hf_io import export_hf, load_hf

    found: dict[str, Any] = {"exported": round_trips(rank, paths, ONE_RANK, out), "errors": {}, "bf16": {}}
    models = {}
    for name in ("qwen2", "llama tied"):
        leave_layout()
        models[name] = build(paths[name])
    for name, path in broken.items():
        try:
            load_hf(*models["llama tied" if name == "tied twice" else "qwen2"], path)
            found["errors"][name] = "no error"
        except ValueError as error:
            found["errors"][name] = str(error)
    same(dict(export_hf(*models["qwen2"])), source(paths["qwen2"]))  # what was refused has changed nothing
    leave_layout()
    for trained in (False, True):
        found["bf16"][trained] = dict(export_hf(*build(bf16, bf16=trained)))
        leave_layout()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def paths(folder: Path) -> dict[str, str]:
    return {name: str(make_tiny_model(folder / name, **options)) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def one_rank(folder: Path, paths: dict[str, str]) -> dict[str, Any]:
    broken = {name: str(path) for name, path in broken_directories(folder, Path(paths["qwen2"])).items()}
    broken["tied twice"] = str(also_stores_the_tied_copy(folder, Path(paths["llama tied"])))
    bf16 = in_bf16(folder, Path(paths["llama"]))
    return run_ranks(alone, 1, paths, str(folder / "out"), broken, str(bf16))[0]


@pytest.fixture(scope="module")
def two_ranks(folder: Path, paths: dict[str, str]) -> list[dict[str, Tensors]]:
    return run_ranks(round_trips, 2, paths, TWO_RANKS, str(folder / "out"))


@pytest.fixture(scope="module")
def four_ranks(folder: Path, paths: dict[str, str]) -> list[dict[str, Tensors]]:
    return run_ranks(round_trips, 4, paths, FOUR_RANKS, str(folder / "out"))


def source(path: str | Path) -> Tensors:
    return load_file(Path(path) / "model.safetensors")


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def written_and_changed(folder: Path, name: str, origin: Path, change: Callable[[Tensors], object]) -> Path:
    path = folder / "broken" / name
    shutil.copytree(origin, path)
    tensors = source(path)
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def in_bf16(folder: Path, origin: Path) -> Path:
    return written_and_changed(
        folder, "bf16", origin, lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()})
    )


def also_stores_the_tied_copy(folder: Path, origin: Path) -> Path:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    return written_and_changed(folder, "tied twice", origin, add)


LAYER = "model.layers.1."
RESHAPED = {  # each of a shape that summing or cutting alone would let pass
    "model.embed_tokens.weight": (40, 64),
    "lm_head.weight": (31, 64),
    LAYER + "mlp.gate_proj.weight": (120, 64),
    LAYER + "self_attn.q_proj.weight": (48, 64),
    LAYER + "self_attn.k_proj.bias": (16,),
    LAYER + "self_attn.o_proj.weight": (64, 32),
    LAYER + "input_layernorm.weight": (1,),
    "model.norm.weight": (64, 1),
}


def broken_directories(folder: Path, origin: Path) -> dict[str, Path]:
    """Directories that must be refused, by what is wrong with each."""
    broken = {
        "missing": written_and_changed(folder, "missing", origin, lambda t: t.pop(LAYER + "mlp.up_proj.weight")),
        "extra": written_and_changed(
            folder, "extra", origin, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
        ),
    }
    for name, shape in RESHAPED.items():
        broken[name] = written_and_changed(
            folder, name, origin, lambda t, name=name, shape=shape: t.update({name: torch.zeros(shape)})
        )

    def pair(tensors: Tensors) -> None:  # together they have as many rows as they should
        tensors[LAYER + "mlp.gate_proj.weight"] = torch.zeros(120, 64)
        tensors[LAYER + "mlp.up_proj.weight"] = torch.zeros(136, 64)

    broken["pair"] = written_and_changed(folder, "pair", origin, pair)
    for name in ("none", "cut", "index without map", "index is no json", "file of the index", "tensor of the index"):
        broken[name] = folder / "broken" / name
        shutil.copytree(origin, broken[name])
        whole = broken[name] / "model.safetensors"
        index = broken[name] / "model.safetensors.index.json"
        if name == "cut":
            whole.write_bytes(whole.read_bytes()[:-100])
            continue
        names = list(source(origin))
        whole.unlink()
        if name == "index without map":
            index.write_text("{}")
        elif name == "index is no json":
            index.write_text("{")
        elif name == "file of the index":
            index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "gone.safetensors")}))
        elif name == "tensor of the index":
            save_file({"other": torch.ones(1)}, broken[name] / "part.safetensors")
            index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    return broken


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_gives_back_what_it_read(one_rank: dict[str, Any], paths: dict[str, str], name: str) -> None:
    same(one_rank["exported"][f"tp1/{name}"], source(paths[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), TWO_RANKS)
def test_two_ranks_give_back_what_they_read(
    two_ranks: list[dict[str, Tensors]], paths: dict[str, str], layout: str, name: str
) -> None:
    key, expected = f"{layout}/{name}", source(paths[name])
    if not layout.startswith("pp2"):
        for rank in two_ranks:
            same(rank[key], expected)
        return
    first, last = (rank[key] for rank in two_ranks)
    assert not first.keys() & last.keys()  # each tensor from one stage
    assert "model.layers.1.input_layernorm.weight" in last
    assert ("model.layers.2.input_layernorm.weight" in first) == ("pieces" in layout)
    same({**first, **last}, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), FOUR_RANKS)
def test_four_ranks_give_back_every_expert_they_share(
    four_ranks: list[dict[str, Tensors]], paths: dict[str, str], layout: str, name: str
) -> None:
    exported = [rank[f"{layout}/{name}"] for rank in four_ranks]
    whole = {name: tensor for rank in exported for name, tensor in rank.items()}
    same(whole, source(paths[name]))
    stages = [exported[:2], exported[2:]] if layout == "pp2 ep2" else [exported]
    for ranks in stages:
        for each in ranks:
            same(each, ranks[0])
    assert sum(len(ranks[0]) for ranks in stages) == len(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), ONE_RANK + TWO_RANKS + FOUR_RANKS)
def test_a_written_directory_is_the_model_for_transformers(
    one_rank: dict[str, Any],
    two_ranks: list[dict[str, Tensors]],
    four_ranks: list[dict[str, Tensors]],
    folder: Path,
    paths: dict[str, str],
    layout: str,
    name: str,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, origin = folder / "out" / layout / name, Path(paths[name])
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    if layout.startswith("pp2"):
        index = json.loads((path / "model.safetensors.index.json").read_text())
        parts = {f"model-0000{stage}-of-00002.safetensors" for stage in (1, 2)}
        assert set(index["weight_map"].values()) == parts
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in source(origin).values())
        files |= {"model.safetensors.index.json", *parts}
    else:
        files.add("model.safetensors")
    assert {file.name for file in path.iterdir()} == files
    assert not path.with_name(path.name + ".tmp").exists()
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = AutoModelForCausalLM.from_pretrained(origin)
    same(model.state_dict(), expected.state_dict())
    assert AutoTokenizer.from_pretrained(path)("12+3=").input_ids == AutoTokenizer.from_pretrained(origin)("12+3=").input_ids


@pytest.mark.slow
def test_a_bfloat16_source_is_read_exactly(one_rank: dict[str, Any], folder: Path) -> None:
    stored = source(folder / "broken" / "bf16")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    same(one_rank["bf16"][False], {name: t.float() for name, t in stored.items()})
    same(one_rank["bf16"][True], stored)


@pytest.mark.slow
def test_a_stored_tied_copy_and_rotary_buffers_are_no_fault(one_rank: dict[str, Any]) -> None:
    assert one_rank["errors"]["tied twice"] == "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "does not fit Qwen2ForCausalLM: missing ['model.layers.1.mlp.up_proj.weight']"),
        ("extra", "does not fit Qwen2ForCausalLM: not understood ['model.layers.0.self_attn.q_norm.weight']"),
        ("none", "neither model.safetensors nor model.safetensors.index.json is there"),
        ("cut", "/model.safetensors: is not a whole safetensors file"),
        ("index without map", "/model.safetensors.index.json: is not an index of safetensors files"),
        ("index is no json", "/model.safetensors.index.json: is not an index of safetensors files"),
        ("file of the index", "/gone.safetensors: is not a whole safetensors file"),
        ("tensor of the index", "/part.safetensors: lacks lm_head.weight, which the index says is in it"),
        ("pair", "mlp.gate_proj.weight has shape (120, 64), but config.json makes it (128, 64)"),
    ],
)
def test_a_directory_that_is_no_whole_model_is_named(
    one_rank: dict[str, Any], folder: Path, name: str, said: str
) -> None:
    text = one_rank["errors"][name]
    assert text.startswith(str(folder / "broken" / name))
    assert said in text


@pytest.mark.slow
@pytest.mark.parametrize("name", RESHAPED)
def test_a_tensor_of_another_shape_is_named_with_its_file(one_rank: dict[str, Any], folder: Path, name: str) -> None:
    expected = f"{folder / 'broken' / name / 'model.safetensors'}: {name} has shape {RESHAPED[name]}, but config.json makes it"
    assert one_rank["errors"][name].startswith(expected)
