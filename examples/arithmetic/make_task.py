"""Writes the bundled task's prompts: `a+b=` for every a, b in 0..99, of which 256 pairs are held out.

    python examples/arithmetic/make_task.py [--output examples/arithmetic]

train.jsonl holds 9744 rows and heldout.jsonl the other 256, one `{"id", "prompt", "answer"}` a line. Both the
supervised training of the bundled model (make_model.py) and the RL prompts use train.jsonl alone, so that accuracy on
heldout.jsonl is accuracy on sums that were never seen. (The mirrored sum may be in train.jsonl: where 3+52 is held out,
52+3 need not be.) The same seed always gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

OPERANDS = 100
HELD_OUT = 256
SEED = 123

Row = dict[str, str]


def arithmetic_rows(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """All sums as (train rows, held-out rows), each in ascending order of its operands."""
    pairs = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]
    held_out = set(random.Random(seed).sample(pairs, HELD_OUT))
    train: list[Row] = []
    heldout: list[Row] = []
    for a, b in pairs:
        row = {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)}
        (heldout if (a, b) in held_out else train).append(row)
    return train, heldout


def write_rows(path: Path, rows: list[Row]) -> None:
    """One JSON object a line, UTF-8, ending in a newline."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled task's prompts: train.jsonl and heldout.jsonl.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory to write to")
    parser.add_argument("--seed", type=int, default=SEED, help="decides which 256 pairs are held out")
    settings = parser.parse_args()
    train, heldout = arithmetic_rows(settings.seed)
    settings.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        write_rows(settings.output / name, rows)
        print(f"{settings.output / name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
