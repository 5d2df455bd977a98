"""TRL's GRPOTrainer on the race's model and prompts, one optimizer step whenever it is told to;
runs in the peers' environment.

    python trl_step.py SPEC.json      with {model, rows, runs, prompts, max_tokens, lr, threads, steps, folder}

Protocol on the pipes: that of trl_side.py; after each step it prints {"step", "seconds", "reward",
"length"}.  Generation is TRL's own path through transformers.
"""

from __future__ import annotations

import re
from typing import Any

from trl_side import whole_steps

NUMBER = re.compile(r"-?\d+")


def last_number(
    completions: list[list[dict[str, str]]], response: list[str], **_: Any
) -> list[float]:
    """1 where the last number of the answer is the truth."""
    found = [NUMBER.findall(c[-1]["content"]) for c in completions]
    return [float(bool(n) and n[-1] == truth) for n, truth in zip(found, response, strict=True)]


if __name__ == "__main__":
    whole_steps(last_number)
