"""Lets megatron-core run on a machine without CUDA. With CUDA it does nothing at all.

megatron-core 0.16-0.19 reaches its device in three ways: `torch.cuda.current_device()`, the literal `device="cuda"`, and
`Tensor.cuda()` / `Tensor.type()`. The first is one function. The other two are redirected through torch's own override
hook (TorchFunctionMode), so no torch function is replaced and code that names no device is untouched.
This is the only module that knows about any of it. It omits fused kernels, CUDA graphs and the inference engines.
"""

from __future__ import annotations

import os
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
    """Two places in megatron-core that no device redirection reaches."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    rng: Any = random
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without TransformerEngine: NameError in the router
        moe_utils.te_general_gemm = None
    # Activation recomputation saves and restores the CUDA generator; the CPU generator is saved beside it anyway.
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    rng._set_cuda_rng_state = lambda *args, **kwargs: None
