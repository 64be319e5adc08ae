"""The log-prob kernel for CPUs as compiled code: logprob_native.cpp, called with ctypes.

Installing the package builds the library where there is a C++ compiler, `python setup.py build_ext --inplace` builds it in
a source tree; without it the torch backend serves. The contract of each function is in kernels/backends.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from m2po_megatron.kernels import logprob_torch
from m2po_megatron.kernels.backends import Shard

BINARY = Path(__file__).parent / f"_logprob_native{EXTENSION_SUFFIXES[0]}"
INTERFACE = 1
"""What the library's logprob_native_interface() must answer."""

NARROWER = 0
"""Which of the machine's instruction sets: 0 is the widest; the tests also run the others."""

_BFLOAT16 = {torch.float32: 0, torch.bfloat16: 1}
_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "statistics": [_LONG] * 3 + [_POINTER, _LONG, _INT, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _INT, _LONG, _INT],
    "gradient": [_LONG] * 4 + [_POINTER, _LONG, _POINTER, _LONG, _INT] + [_POINTER] * 5 + [_FLOAT, _LONG, _INT],
}

merge = logprob_torch.merge


def obstacle(logits: Tensor) -> str:
    if logits.device.type != "cpu":
        return f"it runs on the CPU, and these logits are on {logits.device}"
    if logits.dtype not in _BFLOAT16:
        return f"it takes float32 and bfloat16, not {logits.dtype}"
    library = _library()
    return library if isinstance(library, str) else ""


def row_statistics(
    logits: Tensor, targets: Tensor, out: Tensor, shard: Shard, temperature: float, with_moment: bool
) -> None:
    targets = targets.contiguous()
    _function("statistics")(
        logits.shape[0],
        shard.columns,
        shard.first,
        logits.data_ptr(),
        logits.stride(0),
        _BFLOAT16[logits.dtype],
        targets.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        temperature,
        with_moment,
        torch.get_num_threads(),
        NARROWER,
    )


def write_gradient(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    upstream: Tensor,
    upstream_entropy: Tensor | None,
    shard: Shard,
    temperature: float,
) -> None:
    targets, lse, entropies, upstream = (each.contiguous() for each in (targets, lse, entropies, upstream))
    upstream_entropy = None if upstream_entropy is None else upstream_entropy.contiguous()
    _function("gradient")(
        logits.shape[0],
        shard.columns,
        logits.shape[1],
        shard.first,
        logits.data_ptr(),
        logits.stride(0),
        gradient.data_ptr(),
        gradient.stride(0),
        _BFLOAT16[logits.dtype],
        targets.data_ptr(),
        lse.data_ptr(),
        entropies.data_ptr(),
        upstream.data_ptr(),
        None if upstream_entropy is None else upstream_entropy.data_ptr(),
        temperature,
        torch.get_num_threads(),
        NARROWER,
    )


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none."""
    build = "`python setup.py build_ext --inplace` in the source tree builds it"
    if not BINARY.exists():
        return f"its library {BINARY.name} was not built (no C++ compiler at installation?); {build}"
    try:
        library = ctypes.CDLL(str(BINARY))
    except OSError as error:
        return f"its library cannot be loaded ({error}); {build}"
    found = library.logprob_native_interface()
    if found != INTERFACE:
        return f"its library {BINARY.name} is of another version (interface {found}, not {INTERFACE}); {build}"
    for name, types in _ARGUMENTS.items():
        function = getattr(library, f"logprob_native_{name}")  # one object, kept by the library
        function.argtypes, function.restype = types, None
    return library


def _function(name: str) -> Callable[..., None]:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(f"backend 'native' of the log-prob kernels cannot be used here: {library}")
    return cast(Callable[..., None], getattr(library, f"logprob_native_{name}"))
