"""A process that scores with a user's reward: JSON lines in on stdin, JSON lines out; ends when stdin closes.

Started by reward/pool.py as `python -m m2po_megatron.reward.worker module:function PARENT_PID`, and killed by the system
when that parent dies, even while it scores. First line out: {"ready": true} or
{"error": text}. Then per request {"prompt", "response", "answer"} one line {"reward": float} or {"error": text}.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from typing import Any

from m2po_megatron.parentage import ask_for_death_signal
from m2po_megatron.reward.registry import RewardFunction, UnknownReward, reward_function


def score(function: RewardFunction, request: dict[str, str]) -> dict[str, Any]:
    """The answer to one request. A user's function may raise anything: it becomes an error line, the worker lives on."""
    try:
        reward = float(function(request["prompt"], request["response"], request["answer"]))
    except Exception as error:  # noqa: BLE001 - a user's function
        return {"error": f"{type(error).__name__}: {error}"}
    if not math.isfinite(reward):
        return {"error": f"the reward is {reward}"}
    return {"reward": reward}


def main() -> int:
    name, parent_pid = sys.argv[1], int(sys.argv[2])
    # SIGKILL: a user's function may have a handler for every other signal.
    ask_for_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return 1
    # The user's function may print: stdout is kept for answers, and prints go to the controller's log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        function = reward_function(name)
    except UnknownReward as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    except Exception as error:  # noqa: BLE001 - importing runs the user's code; the pool reports the text
        answers.write(json.dumps({"error": f"--reward {name}: {type(error).__name__}: {error}"}) + "\n")
        return 1
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(score(function, json.loads(line))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
