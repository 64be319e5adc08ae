"""Writes the table of flags in docs/usage.md from the settings themselves; `tests/test_house.py` keeps the two equal.

    python docs/flags.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from m2po_megatron import cpu

cpu.install()

from m2po_megatron.arguments import build_parser  # noqa: E402

USAGE = Path(__file__).parent / "usage.md"
BEGIN, END = "<!-- flags: written by docs/flags.py -->", "<!-- end of flags -->"


def table() -> str:
    """One Markdown table per group of flags: flag, meaning, default."""
    parts = []
    for group in build_parser()._action_groups:
        rows = [row(action) for action in group._group_actions if action.dest not in ("help", "config")]
        if rows:
            parts.append(f"### {group.title}\n\n| Flag | Meaning | Default |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def row(action: argparse.Action) -> str:
    text, _, default = (action.help or "").replace("%%", "%").rpartition(" (default: ")
    default = default.removesuffix(")")
    if action.choices:
        text += " (" + ", ".join(map(str, action.choices)) + ")"
    shown = "" if default in ("None", "", "[]") else f"`{default}`"
    return f"| `{action.option_strings[0]}` | {text.replace('|', chr(92) + '|')} | {shown} |"


def rewritten(text: str) -> str:
    """`text` with its table made anew. ValueError where the marks are missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{USAGE}: the marks {BEGIN} and {END} are missing")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    USAGE.write_text(rewritten(USAGE.read_text()))
    print(USAGE)
