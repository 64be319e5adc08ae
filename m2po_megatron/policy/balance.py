"""The auxiliary loss that balances experts, as Megatron's router adds it to the gradient, in the scale of our loss.

Megatron weighs each micro-batch's auxiliary loss by the tokens that a rank holds of it, and leaves the division by all
tokens to the end, where it would divide the main loss too. Ours is divided beforehand, so the coefficient that the router
reads is divided instead. What is added to the loss is then, whatever the layout,

    coefficient x sum over layers of the mean over the mini-batch's tokens of (their micro-batch's E x sum_e f_e P_e)

E = experts, f_e = share of a micro-batch's choices that fell on expert e, P_e = its mean probability there. The router
counts every token of a micro-batch, prompts and alignment included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from m2po_megatron.data.packing import MicroBatch

_NAME = "load_balancing_loss"
"""Megatron's name of it, in the tracker it adds every layer's value to."""


def scale_aux_loss(config: TransformerConfig, coefficient: float, micro_batches: Sequence[MicroBatch]) -> None:
    """Set what the routers multiply the auxiliary loss of each token by, for an update on these micro-batches of this
    rank. `coefficient`: of the mean over tokens. Collective over the data-parallel ranks where it is above 0."""
    if not (config.num_moe_experts and coefficient):
        return
    clear_aux_losses_tracker()
    device = micro_batches[0].token_ids.device
    tokens = torch.tensor(float(sum(batch.token_ids.numel() for batch in micro_batches)), device=device)
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # A rank holds, and weighs by, its share of a micro-batch's tokens: each counts as many times as there are shares.
    shares = parallel_state.get_tensor_and_context_parallel_group().size()
    config.moe_aux_loss_coeff = coefficient * shares / float(tokens)


def mean_aux_loss(config: TransformerConfig, micro_batches: int) -> float | None:
    """The auxiliary loss since `scale_aux_loss`, without its coefficient: mean over layers and the mini-batch's
    micro-batches (`micro_batches` on each rank), 1 where the choices are spread evenly. Collective over all ranks;
    None without such a loss. Megatron's record is empty afterwards."""
    if not (config.num_moe_experts and config.moe_aux_loss_coeff):
        return None
    record = get_moe_layer_wise_logging_tracker().get(_NAME)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    total = torch.zeros((), device=device) if record is None else record["values"].sum()
    dist.all_reduce(total)  # every layer is on one stage, every token on one rank
    clear_aux_losses_tracker()
    rows = parallel_state.get_data_parallel_world_size() * micro_batches
    return float(total) / (rows * config.num_layers)
