"""Rewards by name: the built-in ones and a user's own as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from m2po_megatron.reward.arithmetic import arithmetic_reward
from m2po_megatron.reward.exact import exact_reward


class UnknownReward(ValueError):
    """A --reward that cannot be had; the text names the flag and its value."""


RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, answer) -> reward; response is the sampled text without special tokens."""

BUILT_IN: dict[str, RewardFunction] = {"arithmetic": arithmetic_reward, "exact": exact_reward}


def is_built_in(name: str) -> bool:
    """Whether `name` is one of ours (trusted to be quick and not to hang)."""
    return name in BUILT_IN


def reward_function(name: str) -> RewardFunction:
    """The reward called `name`; UnknownReward, saying what is wrong with it, for one that cannot be had."""
    if is_built_in(name):
        return BUILT_IN[name]
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise UnknownReward(f"--reward {name!r} is neither one of {', '.join(sorted(BUILT_IN))} nor module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownReward(f"--reward {name}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UnknownReward(f"--reward {name}: {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]
