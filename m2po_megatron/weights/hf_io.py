"""Hugging Face safetensors directories: read into a tensor-parallel model, and written back from one.

`load_hf` fills this rank's part of a GPTModel; `export_hf` yields whole tensors in Hugging Face's layout, gathered over
tensor-parallel and expert-parallel ranks; `save_hf` writes a complete directory from every pipeline stage at once, aside,
then renames it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m2po_megatron.policy.architecture import Architecture
from m2po_megatron.weights.hf_mapping import Row, hf_shapes, table

_CARRIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of the template directory that go along with new weights: config, tokenizer, chat template."""


class HFReader:
    """The tensors of a safetensors directory (one file or an index), opened lazily."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            self.weight_map = _read_index(index)
        elif single.is_file():
            self.weight_map = dict.fromkeys(_shapes_in(single), single.name)
        else:
            raise ValueError(f"{self.path}: neither model.safetensors nor model.safetensors.index.json is there")

    def get(self, name: str) -> Tensor:
        """One tensor, in the file's dtype. Raises ValueError with the name and the file."""
        if name not in self.weight_map:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        file = self.path / self.weight_map[name]
        try:
            with safe_open(file, "pt") as tensors:
                return tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: cannot read {name}: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, from the files' headers. Raises ValueError where a file or a promised tensor is missing."""
        found: dict[str, tuple[int, ...]] = {}
        for file_name in sorted(set(self.weight_map.values())):
            promised = [name for name, holder in self.weight_map.items() if holder == file_name]
            present = _shapes_in(self.path / file_name)
            missing = sorted(set(promised) - present.keys())
            if missing:
                raise ValueError(f"{self.path / file_name}: lacks {missing[0]}, which the index says is in it")
            found.update((name, present[name]) for name in promised)
        return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is not an index of safetensors files: {error!r}") from error


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: is not a whole safetensors file: {error}") from error


def check_tensors(reader: HFReader, arch: Architecture) -> None:
    """Raise ValueError, naming tensor and file, unless the directory holds exactly the tensors the table speaks of, each
    of its shape: never a partial model, and no tensor cut or filled up to fit."""
    expected, present = hf_shapes(arch), reader.shapes()
    extra = {name for name in present.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq")}
    if arch.tied_embeddings:
        extra.discard("lm_head.weight")  # some writers store the tied copy too
    missing = expected.keys() - present.keys()
    if missing or extra:
        what = [f"missing {sorted(missing)[:3]}" if missing else "", f"not understood {sorted(extra)[:3]}" if extra else ""]
        raise ValueError(f"{reader.path}: does not fit {arch.name}: {'; '.join(w for w in what if w)}")
    for name, shape in expected.items():
        if present[name] != shape:
            raise ValueError(
                f"{reader.path / reader.weight_map[name]}: {name} has shape {present[name]}, but config.json makes it {shape}"
            )


def _stage_tensors(chunks: Sequence[GPTModel], arch: Architecture) -> Iterator[tuple[Row, int, list[Tensor]]]:
    """(row, global layer number, this rank's parameters) for every row that lives on this pipeline stage: one parameter,
    or one for each expert this rank holds."""
    held = arch.num_experts // parallel_state.get_expert_model_parallel_world_size()
    for gpt in chunks:
        parameters = dict(gpt.named_parameters())
        offset = gpt.decoder.layers[0].layer_number - 1 if len(gpt.decoder.layers) else 0
        tied_copy = arch.tied_embeddings and not gpt.pre_process
        for row in table(arch):
            experts = range(held) if row.per_expert else range(1)
            for local in range(len(gpt.decoder.layers)) if row.per_layer else range(1):
                for name in (row.megatron, row.te):
                    names = [name.format(layer=local, expert=expert) for expert in experts] if name else []
                    if names and names[0] in parameters:
                        yield row, local + offset, [parameters[each] for each in names]
            if tied_copy and row.megatron == "embedding.word_embeddings.weight" and "output_layer.weight" in parameters:
                yield row, 0, [parameters["output_layer.weight"]]


def local_tensors(chunks: Sequence[GPTModel], arch: Architecture) -> Iterator[tuple[Row, int, int, Tensor]]:
    """(row, global layer number, global expert number or 0, this rank's parameter) for everything this rank holds."""
    rank = parallel_state.get_expert_model_parallel_rank()
    for row, layer, parameters in _stage_tensors(chunks, arch):
        first = rank * len(parameters) if row.per_expert else 0
        for number, parameter in enumerate(parameters):
            yield row, layer, first + number, parameter


@torch.no_grad()
def load_hf(chunks: Sequence[GPTModel], arch: Architecture, path: str | Path) -> None:
    """Copy a Hugging Face directory into this rank's parameters, reading no expert that it does not hold.

    Raises ValueError naming the tensor and the file for anything missing, unknown or of another shape.
    """
    reader = HFReader(path)
    check_tensors(reader, arch)
    for row, layer, expert, parameter in local_tensors(chunks, arch):
        group = _shard_group(row)
        names = row.hf_names(layer, expert)
        tensors = [reader.get(name) for name in names]
        shard = row.transform.shard(tensors, group.rank(), group.size(), arch, parameter.size(0))
        if shard.shape != parameter.shape:  # the files are right: this rank was built for another layout
            raise ValueError(
                f"{reader.path}: {', '.join(names)} gives a shard of shape {tuple(shard.shape)}, but "
                f"{row.megatron.format(layer=layer, expert=expert)} is {tuple(parameter.shape)}"
            )
        parameter.copy_(shard)


def _shard_group(row: Row) -> dist.ProcessGroup:
    """The ranks that share one tensor of this row."""
    if row.per_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def export_hf(chunks: Sequence[GPTModel], arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of this pipeline stage in Hugging Face's layout, every expert included, one Megatron
    tensor's worth at a time. Collective over tensor-parallel, expert-tensor-parallel and expert-parallel ranks.

    Every rank of the stage must consume it to the end; all of them get the same tensors.
    """
    last = chunks[-1]
    tied_copy = None if last.pre_process or not (arch.tied_embeddings and last.post_process) else last.output_layer.weight
    for row, layer, parameters in _stage_tensors(chunks, arch):
        if parameters[0] is tied_copy:
            continue  # the last stage's copy of the tied embedding: the first stage exports it
        group = _shard_group(row)
        for expert in range(arch.num_experts) if row.per_expert else range(1):
            shard = _from_holder(parameters, expert) if row.per_expert else parameters[0].detach().contiguous()
            shards = [shard]
            if group.size() > 1:
                shards = [torch.empty_like(shard) for _ in range(group.size())]
                dist.all_gather(shards, shard, group=group)
            yield from zip(row.hf_names(layer, expert), row.transform.merge(shards, arch), strict=True)


def _from_holder(held: Sequence[Tensor], expert: int) -> Tensor:
    """The shard of expert number `expert` of a layer, from the expert-parallel rank that holds it."""
    group = parallel_state.get_expert_model_parallel_group()
    holder, number = divmod(expert, len(held))
    if group.size() == 1:
        return held[number].detach().contiguous()
    mine = holder == group.rank()
    shard = held[number].detach().contiguous() if mine else torch.empty_like(held[0], memory_format=torch.contiguous_format)
    dist.broadcast(shard, src=dist.get_global_rank(group, holder), group=group)
    return shard


def save_hf(chunks: Sequence[GPTModel], arch: Architecture, template: str | Path, path: str | Path) -> None:
    """Write a complete Hugging Face directory at `path`. Collective over all ranks; every stage writes its own file.

    Written beside its final place and renamed by global rank 0 when all files are there, so that a reader finds the
    whole directory or none. All ranks that write must share the file system.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for pattern in _CARRIED:
            for file in Path(template).glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, aside / file.name)
    dist.barrier()
    # One rank of each stage: the others take part in the export and keep nothing of it.
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    writes = parallel_state.get_tensor_model_parallel_rank() == 0 and copy == 0
    tensors = {name: tensor.cpu().contiguous() for name, tensor in export_hf(chunks, arch) if writes}
    if writes:
        name = "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
        save_file(tensors, str(aside / name), metadata={"format": "pt"})
    dist.barrier()
    if dist.get_rank() == 0:
        if stages > 1:
            _write_index(aside)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(aside, path)
    dist.barrier()


def _write_index(directory: Path) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for file in sorted(directory.glob("model-*.safetensors")):
        with open(file, "rb") as raw:  # a file is: the header's length in 8 bytes, the header, the tensors
            total += file.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
        with safe_open(file, "pt") as tensors:
            weight_map.update(dict.fromkeys(tensors.keys(), file.name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
