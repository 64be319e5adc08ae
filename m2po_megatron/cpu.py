"""Lets megatron-core run on a machine without CUDA. With CUDA it does nothing at all.

megatron-core 0.16-0.19 reaches its device in three ways: `torch.cuda.current_device()`, the literal `device="cuda"`, and
`Tensor.cuda()` / `Tensor.type()`. The first is one function. The other two are redirected through torch's own override
hook (TorchFunctionMode), so no torch function is replaced and code that names no device is untouched.
This is the only module that knows about any of it. It omits fused kernels, CUDA graphs and the inference engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_mode: _CudaToCpu | None = None


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaToCpu(TorchFunctionMode):
    """Answers every request for a CUDA tensor with the CPU tensor of the same contents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # DDP and the optimizer compare this string with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """Takes the place of torch.cuda.Stream and Event: on a CPU everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


def install() -> None:
    """Prepare this process for megatron-core; call before the first import of it. Safe to call twice."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    # megatron.core.jit wraps functions in torch.compile at import; compiling them on a CPU takes minutes and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda s: stream
    _mode = _CudaToCpu()
    _mode.__enter__()
    _mend_megatron()


def _mend_megatron() -> None:
    """The places in megatron-core that no device redirection reaches."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    rng: Any = random
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without TransformerEngine: NameError in the router
        moe_utils.te_general_gemm = None
    # Counts of tokens for an all-to-all are made lists of integers on their way from the GPU, which none of ours is.
    token_dispatcher.maybe_move_tensor_to_cpu = _on_cpu
    # An expert cut over ranks is given parts of different sizes, which gloo neither gathers nor scatters.
    mappings._gather_along_first_dim = _gather_of_sizes(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_of_sizes(mappings._reduce_scatter_along_first_dim)
    # Activation recomputation saves and restores the CUDA generator; the CPU generator is saved beside it anyway.
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    rng._set_cuda_rng_state = lambda *args, **kwargs: None


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_of_sizes(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's gather of [n_rank, ...] along dimension 0: filled up to the largest part where sizes are given."""

    def gather(
        part: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return equal(part, group, output_split_sizes, use_global_buffer)
        filled = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        filled[: len(part)] = part
        parts = [torch.empty_like(filled) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, filled, group=group)
        return torch.cat([each[:size] for each, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def _reduce_scatter_of_sizes(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's sum over ranks, of which each keeps its [n_rank, ...]: a whole sum, cut, where sizes are given."""

    def reduce_scatter(
        whole: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return equal(whole, group, input_split_sizes, use_global_buffer)
        total = whole.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    return reduce_scatter
