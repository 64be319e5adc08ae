"""Loading weights into a model that is served: a good directory is taken whole, a bad one changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m2po_megatron.rollout.embedded_model import ModelError, load_model
from m2po_megatron.rollout.embedded_weights import load_weights

MakeModel = Callable[..., Path]


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def split(directory: Path) -> None:
    """Into two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, directory / f"part-{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"part-{number}.safetensors"))
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_the_files(
    tiny_model: MakeModel, tmp_path: Path, tie: bool, files: int, dtype: torch.dtype
) -> None:
    model = load_model(tiny_model("qwen2", tie=tie), dtype)
    new = tmp_path / "new"
    shutil.copytree(tiny_model("qwen2", tie=tie, seed=1), new)
    wanted = load_file(new / "model.safetensors")
    if tie:  # some writers store the tied copy, and old ones a buffer: neither is a parameter
        edit_tensors(
            new,
            lambda t: t.update(
                {
                    "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                }
            ),
        )
    if files == 2:
        split(new)
    load_weights(model, new)
    found = snapshot(model)
    assert set(found) == set(wanted) and ("lm_head.weight" in found) == (not tie)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].to(dtype)), name
    if tie:
        assert torch.equal(model.lm_head.weight, wanted["model.embed_tokens.weight"].to(dtype))


def test_experts_are_taken_matrix_by_matrix(tiny_model: MakeModel, tmp_path: Path) -> None:
    """transformers holds a layer's experts as one tensor, files hold each matrix by itself."""
    served, new = load_model(tiny_model("qwen3_moe"), torch.float32), tiny_model("qwen3_moe", seed=1)
    split(shutil.copytree(new, tmp_path / "two files"))
    load_weights(served, tmp_path / "two files")
    wanted = snapshot(load_model(new, torch.float32))
    assert wanted["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 96, 64)
    found = snapshot(served)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    for number, (spoil, text) in enumerate(
        (
            (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "experts.3.up_proj.weight is missing"),
            (lambda t: t.update({"model.layers.0.mlp.experts.4.up_proj.weight": torch.ones(48, 64)}), "experts.4.* is not a"),
            (lambda t: t.update({"model.layers.0.mlp.experts.0.down_proj.weight": torch.ones(48, 64)}), r"not \(64, 48\)"),
        )
    ):
        bad = shutil.copytree(tiny_model("qwen3_moe", seed=2), tmp_path / f"bad {number}")
        edit_tensors(bad, spoil)
        with pytest.raises(ModelError, match=text):
            load_weights(served, bad)
    edit_config(tmp_path / "two files", norm_topk_prob=False)
    with pytest.raises(ModelError, match="norm_topk_prob is False, but the model that is served has True"):
        load_weights(served, tmp_path / "two files")
    for name, tensor in snapshot(served).items():
        assert torch.equal(tensor, wanted[name]), name


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


def integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)


BAD = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "truncated": (truncate, "model.safetensors cannot be read"),
    "missing": (
        lambda d: edit_tensors(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "model.layers.1.mlp.up_proj.weight is missing",
    ),
    "unknown": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.layers.2.x": torch.ones(1)})),
        "model.layers.2.x is not a parameter",
    ),
    "shape": (lambda d: edit_tensors(d, reshape), r"model.norm.weight has shape \(63,\), not \(64,\)"),
    "integers": (lambda d: edit_tensors(d, integers), "model.norm.weight is stored as I32"),
    "rope": (
        lambda d: edit_config(d, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        "rope_parameters is .*500000",
    ),
    "epsilon": (lambda d: edit_config(d, rms_norm_eps=1e-3), "rms_norm_eps is 0.001"),
    "another family": (lambda d: edit_config(d, model_type="qwen2"), "model_type is 'qwen2'"),
    "index": (
        lambda d: (d / "model.safetensors.index.json").write_text("[]"),
        "is not an index of safetensors",
    ),
    "index names a file that is not there": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "b.safetensors cannot be read",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_directory_changes_nothing(tiny_model: MakeModel, tmp_path: Path, case: str) -> None:
    model = load_model(tiny_model("llama"), torch.float32)
    before = snapshot(model)
    bad = tmp_path / "bad"
    shutil.copytree(tiny_model("llama", seed=1), bad)
    spoil, text = BAD[case]
    spoil(bad)
    with pytest.raises(ModelError, match=text) as caught:
        load_weights(model, bad)
    assert str(bad) in str(caught.value)
    for name, tensor in snapshot(model).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model_type": "gpt2"}, "does not support model type 'gpt2' .only llama, qwen2, qwen3"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "does not support rope type 'dynamic'",
        ),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(
    tiny_model: MakeModel, tmp_path: Path, overrides: dict[str, Any], text: str
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "m")
    edit_config(tmp_path / "m", **overrides)
    with pytest.raises(ModelError, match=text):
        load_model(tmp_path / "m", torch.float32)
