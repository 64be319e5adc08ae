"""The reward of the bundled arithmetic task (`a+b=`)."""

from __future__ import annotations


def arithmetic_reward(prompt: str, response: str, answer: str) -> float:
    """1.0 if the response is the answer, character by character, else 0.0. The special tokens are gone already, so
    an answer followed by further digits is wrong, and so is one with a space."""
    del prompt
    return 1.0 if response == answer else 0.0
