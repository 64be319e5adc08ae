"""What a run says on the terminal: rank 0's words once, warnings of every rank, no noise, one line for an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2po_megatron import console

ROOT = Path(__file__).parent.parent
TALK = """
import logging, warnings
from m2po_megatron import console
console.set_up_console()
ours, theirs = logging.getLogger("m2po_megatron.startup"), logging.getLogger("megatron.core")
ours.info("our info"); ours.warning("our warning"); ours.debug("our debug")
theirs.info("their info"); theirs.warning("their warning")
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", UserWarning)
warnings.warn("`torch.distributed._all_gather_base` is deprecated.", FutureWarning)
warnings.warn("`load_state_dict` is deprecated and will be removed in future versions.", FutureWarning)
warnings.warn("something that matters", UserWarning)
"""


def said(rank: str | None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    if rank is not None:
        environment["RANK"] = rank
    done = subprocess.run(
        [sys.executable, "-c", TALK], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # reserved for nothing: everything goes to stderr
    return done.stderr


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_rank_0_informs_and_every_rank_warns(rank: str | None) -> None:
    text = said(rank)
    assert ("our info\n" in text) is (rank != "1")
    for warning in ("our warning\n", "their warning\n", "something that matters"):
        assert warning in text
    for noise in ("debug", "their info", "Transformer Engine", "deprecated"):
        assert noise not in text


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("--lr nan: must be a finite number"), 2), (RuntimeError("engine-0 died"), 1)]
)
def test_an_error_is_said_once_and_tells_whose_it_is(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert console.report_error(error) == code
    assert capsys.readouterr() == ("", f"pretrain_rl.py: error: {error}\n")
    monkeypatch.setenv("RANK", "3")
    assert console.report_error(error) == code
    assert capsys.readouterr() == ("", "")
