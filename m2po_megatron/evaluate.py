"""Held-out evaluation on the engines: the mean reward over several samples a prompt, all under one version."""

from __future__ import annotations

from m2po_megatron.rollout.settings import RolloutSettings
from m2po_megatron.rollout_feed import RolloutFeed
from m2po_megatron.run_settings import RunSettings


def evaluate(feed: RolloutFeed, run: RunSettings, rollout: RolloutSettings, version: int) -> dict[str, float]:
    """Metrics `eval/accuracy`, `eval/samples` and `eval/version`, or {} without --eval-data or when the run is stopping.

    The weights of `version` must have been published. Collective over all ranks.
    """
    if not run.eval_data:
        return {}
    result = feed.evaluate(
        {
            "name": "eval",
            "prompts_file": run.eval_data,
            "samples_per_prompt": run.eval_samples_per_prompt,
            "temperature": run.eval_temperature,
            "max_new_tokens": rollout.max_response_length,
            "version": version,
        }
    )
    if result is None:
        return {}
    return {f"eval/{key}": float(result[key]) for key in ("accuracy", "samples", "version")}
