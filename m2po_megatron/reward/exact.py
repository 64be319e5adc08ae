"""Exact match after trimming: for tasks whose answer is a short text."""

from __future__ import annotations


def exact_reward(prompt: str, response: str, answer: str) -> float:
    """1.0 if the response equals the answer, white space at either end ignored, else 0.0."""
    del prompt
    return 1.0 if response.strip() == answer.strip() else 0.0
