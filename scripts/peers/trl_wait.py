"""TRL's GRPOTrainer on a task whose scores take their time, one optimizer step whenever it is told
to; runs in the peers' environment.

    python trl_wait.py SPEC.json      with {model, rows, runs, prompts, max_tokens, lr, threads, steps, folder, waits}

`waits` holds as many lists as there are rows: the seconds that each run's score takes.  All scores
of a step are waited for at once. Protocol on the pipes: that of trl_side.py; after each step it
prints {"step", "seconds", "reward", "length"}.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from trl_side import SPEC, whole_steps


def scored(
    completions: list[list[dict[str, str]]], response: list[str], row: list[int], **_: Any
) -> list[float]:
    """1 where the answer is the truth, after the tool of each run has taken its time."""
    seen: Counter[int] = Counter()
    waits = []
    for r in row:
        waits.append(SPEC["waits"][r][seen[r] % SPEC["runs"]])
        seen[r] += 1

    async def tools() -> None:
        await asyncio.gather(*(asyncio.sleep(s) for s in waits))

    asyncio.run(tools())
    return [
        float(c[-1]["content"].strip() == truth)
        for c, truth in zip(completions, response, strict=True)
    ]


if __name__ == "__main__":
    whole_steps(scored)
