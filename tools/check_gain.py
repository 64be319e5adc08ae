"""Did a run learn? Compares the held-out accuracy before the first update with the last one.

    python tools/check_gain.py RUN_DIR [--at-least 0.1] [--samples 1024] [--updates 20]

Prints both accuracies and exits with 0; exits with 1, saying why, where the gain is below --at-least, where either
evaluation has fewer than --samples samples, or where the run made fewer than --updates updates. A condition that is not
given is not checked.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from m2po_megatron.metrics import read_metrics

Record = dict[str, Any]


def judge(
    updates: list[Record], evaluations: list[Record], *, at_least: float | None, samples: int, least_updates: int
) -> str:
    """The verdict in words. Raises ValueError, saying what is missing, where a condition is not met."""
    if len(updates) < least_updates:
        raise ValueError(f"the run made {len(updates)} updates, {least_updates} were asked for")
    judged = [e for e in evaluations if e.get("eval/accuracy") is not None]
    if len(judged) < 2:
        raise ValueError(
            f"{len(judged)} evaluations with an accuracy, at least 2 are needed (before and after): was --eval-data given, "
            "and did the run reach its end?"
        )
    before, after = judged[0], judged[-1]
    for evaluation in (before, after):
        if (evaluation.get("eval/samples") or 0) < samples:
            raise ValueError(
                f"the evaluation of version {evaluation['version']} has {evaluation.get('eval/samples') or 0:.0f} samples, "
                f"{samples} were asked for: raise --eval-samples-per-prompt"
            )
    gain = after["eval/accuracy"] - before["eval/accuracy"]
    words = f"{_describe(before)} -> {_describe(after)}: gain {gain:+.4f}"
    if at_least is not None and gain < at_least:
        raise ValueError(f"{words}, below the {at_least:+.4f} asked for")
    return words


def _describe(evaluation: Record) -> str:
    """Accuracy with its standard error, as far as the samples are independent."""
    accuracy, samples = evaluation["eval/accuracy"], evaluation.get("eval/samples") or 0
    error = math.sqrt(max(accuracy * (1 - accuracy), 0.0) / samples) if samples else math.nan
    return f"version {evaluation['version']} held-out accuracy {accuracy:.4f} +- {error:.4f} ({samples:.0f} samples)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare held-out accuracy before and after training.")
    parser.add_argument("run_dir", help="the run's --run-dir")
    parser.add_argument("--at-least", type=float, default=None, help="smallest gain in accuracy (0.1 = ten points)")
    parser.add_argument("--samples", type=int, default=0, help="fewest samples either evaluation may have")
    parser.add_argument("--updates", type=int, default=0, help="fewest updates the run must have made")
    arguments = parser.parse_args(argv)
    try:
        updates, evaluations = read_metrics(arguments.run_dir)
        words = judge(
            updates,
            evaluations,
            at_least=arguments.at_least,
            samples=arguments.samples,
            least_updates=arguments.updates,
        )
    except ValueError as error:
        print(f"check_gain.py: {arguments.run_dir}: FAILED: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.run_dir}: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
