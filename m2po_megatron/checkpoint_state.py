"""What a checkpoint holds, in Megatron's sharded form: tensors by their global names and places, so that ranks laid out
otherwise find their parts. Layers are known by their number in the whole model, whatever stage holds them.

The optimizer's tensors are named after the parameters they belong to. With --use-distributed-optimizer they are pieces of
flat buffers instead, which another number of data-parallel ranks can share out anew, but nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.models.gpt import GPTModel

from m2po_megatron.policy.forward import Policy
from m2po_megatron.randomness import generator_states

RNG_KEY = "rng_state"


def policy_state(policy: Policy, *, is_loading: bool) -> tuple[dict[str, Any], Any]:
    """(what dist_checkpointing saves or loads, the optimizer's tree to fill from its "optimizer" after a load)."""
    model = {}
    metadata: dict[str, Any] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for prefix, chunk in named_chunks(policy):
        state = chunk.sharded_state_dict(metadata=metadata)
        model.update({prefix + name: value for name, value in state.items() if not name.endswith("_extra_state")})
    _prime_optimizer(policy)
    if is_distributed(policy):
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    else:
        metadata["chained_optim_avoid_prefix"] = True
    tree = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    optimizer = tree if is_distributed(policy) else _sharded_leaves(policy, tree)
    state = {
        "model": model,
        "optimizer": optimizer,
        "optimizer_step": _step(policy),
        "scheduler": policy.scheduler.state_dict(),
        "architecture": dataclasses.asdict(policy.architecture),
        "optimizer_layout": optimizer_layout(policy),
        "rank_layout": rank_layout(policy),
    }
    return state, tree


def random_state(policy: Policy) -> dict[str, ShardedObject]:
    """This rank's generators, under its place in the layout."""
    layout = rank_layout(policy)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return {RNG_KEY: ShardedObject(RNG_KEY, generator_states(), tuple(layout["sizes"]), place, replica_id=0)}


def rank_layout(policy: Policy) -> dict[str, Any]:
    """What the ranks' generators are bound to: PP, TP, CP and DP sizes, and the kind of device."""
    sizes = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]
    return {"sizes": sizes, "device": policy.device.type}


def named_chunks(policy: Policy) -> list[tuple[str, GPTModel]]:
    """(prefix of its names in this rank's dictionary, piece). The files know layers by their global number alone."""
    if len(policy.chunks) == 1:
        return [("", policy.chunks[0])]
    return [(f"model{number}.", chunk) for number, chunk in enumerate(policy.chunks)]


def is_distributed(policy: Policy) -> bool:
    return bool(policy.models[0].ddp_config.use_distributed_optimizer)


def optimizer_layout(policy: Policy) -> dict[str, Any]:
    """What the optimizer's part is bound to: nothing but its kind, or all but DP where it is distributed."""
    kind = {"--bf16": policy.gpt.config.bf16, "--use-distributed-optimizer": is_distributed(policy)}
    if not is_distributed(policy):
        return kind
    return {
        **kind,
        "--tensor-model-parallel-size": parallel_state.get_tensor_model_parallel_world_size(),
        "--pipeline-model-parallel-size": parallel_state.get_pipeline_model_parallel_world_size(),
        "--num-virtual-stages-per-pipeline-rank": len(policy.chunks),
        "--expert-model-parallel-size": parallel_state.get_expert_model_parallel_world_size(),
        "--expert-tensor-parallel-size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def fill_optimizer(policy: Policy, tree: Any, state: dict[str, Any]) -> None:
    """Give the optimizer its loaded tensors and its count of steps. Learning rates, betas and the like stay the flags'."""
    flags = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in policy.optimizer.param_groups]
    if is_distributed(policy):
        policy.optimizer.load_state_dict(state["optimizer"])
        _restore_steps(policy)
    else:
        numbers = iter(range(len(state["optimizer"])))

        def loaded(leaf: Any) -> Any:
            return state["optimizer"][str(next(numbers))] if isinstance(leaf, ShardedBase) else leaf

        dict_list_map_inplace(loaded, tree)
        for part, inner in _parts(policy, tree):
            inner["param_groups"] = part.optimizer.state_dict()["param_groups"]
            if isinstance(part.optimizer, torch.optim.Adam):
                inner["state"]["common_step"] = torch.tensor(float(state["optimizer_step"]))
            elif state["optimizer_step"]:
                for group in inner["param_groups"]:
                    group["step"] = state["optimizer_step"]
        policy.optimizer.load_state_dict(tree)
    for group, values in zip(policy.optimizer.param_groups, flags, strict=True):
        group.update(values)


def _sharded_leaves(policy: Policy, tree: Any) -> dict[str, ShardedBase]:
    """The tensors of the optimizer's tree, numbered as they stand there. How parameters are grouped, and numbered, over
    a rank's pieces and experts is another matter in each layout, and none of the files'."""
    leaves: dict[str, ShardedBase] = {}

    def take(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            leaves[str(len(leaves))] = leaf
        return leaf

    for _, inner in _parts(policy, tree):
        del inner["param_groups"]
        inner["state"].pop("common_step", None)
    dict_list_map_inplace(take, tree)
    return leaves


def _parts(policy: Policy, tree: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(Megatron optimizer, its inner optimizer's part of the tree): one, or two where experts have their own."""
    optimizers = _optimizers(policy)
    for number, part in enumerate(optimizers):
        own = tree if len(optimizers) == 1 else tree[number]
        yield part, own.get("optimizer", own)


def _optimizers(policy: Policy) -> list[Any]:
    return list(getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]))


def _step(policy: Policy) -> int:
    """Steps taken: torch's AdamW counts them with each parameter, the fused ones with the group."""
    for part in _optimizers(policy):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                return int(part.optimizer.state[p].get("step", group.get("step", 0)))
    return 0


def _prime_optimizer(policy: Policy) -> None:
    """An optimizer has no state before its first step: loading needs tensors to load into, and a checkpoint of version 0
    the same contents as any other. These are the zeros that the first step would begin with."""
    for part in _optimizers(policy):
        if not isinstance(part.optimizer, torch.optim.Adam):
            part.init_state_fn(part.optimizer, part.config)
            continue
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                if not part.optimizer.state[p]:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    part.optimizer.state[p] = {"step": torch.zeros(()), **zeros}


def _restore_steps(policy: Policy) -> None:
    """Megatron's distributed optimizer leaves torch's AdamW at step 0, and all its parameters with one counter between
    them; the number it was saved at lies in the parameter groups. Elsewhere the groups have none and nothing is done."""
    for part in _optimizers(policy):
        for group in part.optimizer.param_groups:
            for p in group["params"] if "step" in group else ():
                if "step" in part.optimizer.state[p]:
                    part.optimizer.state[p]["step"] = torch.tensor(float(group["step"]))
