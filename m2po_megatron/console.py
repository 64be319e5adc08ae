"""What a run says on the terminal: rank 0's words, one line each, without the noise of optional parts that are missing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

# What the start-up lines say once, megatron-core and torch say many times on every rank.
_NOISE = (
    (UserWarning, r".*(Apex|Transformer Engine).*"),
    (UserWarning, r"full scope is deprecated.*"),
    (UserWarning, r"When using async grad allreduce.*"),
    (FutureWarning, r"`load_state_dict` is deprecated.*"),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated.*"),
)


def is_main_process() -> bool:
    """Whether this process will be global rank 0, known before torch.distributed is (launchers set RANK)."""
    return os.environ.get("RANK", "0") == "0"


def set_up_console() -> None:
    """Log to stderr, other ranks only from WARNING on. Before megatron-core is imported: it warns while it is."""
    for category, message in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category)
    level = logging.INFO if is_main_process() else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("m2po_megatron").setLevel(level)


def report_error(error: Exception) -> int:
    """Say the error once, not once a rank; returns the exit code: 2 for what the user must change, 1 for the rest."""
    if is_main_process():
        sys.stderr.write(f"pretrain_rl.py: error: {error}\n")
        sys.stderr.flush()
    return 2 if isinstance(error, ValueError) else 1


def report_stop(version: int, number: int, saved: Path | None) -> int:
    """Say that signal `number` stopped the run, and what is left of it; returns the exit code.

    0 where a scheduler's signal (SIGTERM, SIGUSR1) was answered with a checkpoint: the job did what it was asked to. Else
    a shell's code for the signal: Ctrl-C is no success, and a run that leaves nothing behind is none either.
    """
    left = "nothing was saved" if saved is None else f"saved in {saved}"
    if is_main_process():
        sys.stderr.write(f"stopped at update {version} by {signal.Signals(number).name}; {left}\n")
        sys.stderr.flush()
    return 0 if saved is not None and number in (signal.SIGTERM, signal.SIGUSR1) else 128 + number
