"""What a teacher's likely tokens cost: a train step and the bytes of a trained token, beside plain
on-policy distillation from the sampled token.

    python scripts/distill_step.py [--k 20] [--rounds 3] [--layers 30]

A model of SmolLM2-135M's sizes with random weights, float32, all cores; both algorithms train the
same rows in turn.  Seconds are of the processor, so that other work on the machine counts little.
Prints one JSON object; exit code 1 if a step takes more than 1.15 times as long.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings
from rft.testing import tiny
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import ExperienceId, Version

GOAL = 1.15
VOCAB = 49_152
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
GROUPS, RUNS, PROMPT, ANSWER = 4, 2, 32, 128
PLAIN = AlgorithmSettings(advantage_fn="on_policy_distill")


def rows(k: int) -> list[TrainRow]:
    rng = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        prompt = rng.integers(3, VOCAB, PROMPT)
        for _ in range(RUNS):
            count = PROMPT + ANSWER
            mask = np.arange(count) >= PROMPT
            ids = np.stack([rng.choice(VOCAB, k, replace=False) for _ in range(ANSWER)])
            teacher = np.log(rng.dirichlet(np.ones(k + 1), ANSWER))
            made.append(
                TrainRow(
                    tokens=np.concatenate([prompt, rng.integers(3, VOCAB, ANSWER)]).astype(
                        np.int32
                    ),
                    loss_mask=mask,
                    logprobs=np.where(mask, -10.8, 0).astype(np.float32),
                    temperatures=1.0,
                    advantages=rng.normal(size=ANSWER).astype(np.float32),
                    group=str(group),
                    top_ids=ids.astype(np.int32),
                    top_logprobs=teacher.astype(np.float16),
                )
            )
    return made


def token_bytes(given: list[TrainRow]) -> dict[str, float]:
    """Bytes of a trained token in the buffer, arrays alone."""
    stored = [
        Experience(
            id=ExperienceId(1, 0, 0, i, 0),
            taskset="t",
            task_index=i,
            workflow="w",
            status="complete",
            tokens=row.tokens[PROMPT:],
            loss_mask=np.ones(ANSWER, np.bool_),
            logprobs=row.logprobs[PROMPT:],
            teacher_logprobs=row.logprobs[PROMPT:],
            version_spans=(VersionSpan(Version(1, 0), 0, ANSWER),),
            teacher_spans=(VersionSpan(Version(1, 0), 0, ANSWER),),
            reward=0.0,
            teacher_top_ids=row.top_ids,
            teacher_top_logprobs=row.top_logprobs,
        )
        for i, row in enumerate(given)
    ]
    bare = [
        msgspec.structs.replace(x, teacher_top_ids=None, teacher_top_logprobs=None) for x in stored
    ]
    tokens = len(stored) * ANSWER
    return {"plain": len(encode(bare)) / tokens, "top": len(encode(stored)) / tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=20, help="likely tokens at each position")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each algorithm")
    parser.add_argument(
        "--layers", type=int, default=30, help="fewer: the output layer weighs more"
    )
    options = parser.parse_args()
    top = AlgorithmSettings(
        advantage_fn="none",
        policy_loss_fn="distill_top",
        policy_loss_fn_args={"k": options.k},
    )
    given = rows(options.k)
    sides = {
        "plain": (PLAIN, [without_top(row) for row in given]),
        "top": (top, given),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="rft-distill-") as folder:
        sizes = SIZES | {"num_hidden_layers": options.layers}
        model = tiny.make(Path(folder) / "model", **sizes)
        settings = LearnerSettings(model_path=str(model), cpu_threads=os.cpu_count() or 1)
        learner = Learner(dataclasses.replace(settings, total_steps=1000))
        for step in range(1, 2 * options.rounds + 3):  # the first of each warms up
            name = ("plain", "top")[step % 2]
            algorithm, trained = sides[name]
            learner.algorithm = build(algorithm)
            (cut,) = plan(trained, 1, Budget(settings.max_token_len_per_gpu))
            batch = RankBatch(
                step=step,
                micro_batches=tuple(tuple(trained[i] for i in m) for m in cut),
                tokens=float(len(trained) * ANSWER),
                rows=float(len(trained)),
            )
            began = time.process_time()
            assert learner.step(batch).finite
            if step > 2:
                seconds[name].append(time.process_time() - began)
    ratio = statistics.median(seconds["top"]) / statistics.median(seconds["plain"])
    told = {
        "k": options.k,
        "layers": options.layers,
        "seconds": {n: [round(s, 3) for s in v] for n, v in seconds.items()},
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "token_bytes": {n: round(v, 1) for n, v in token_bytes(given).items()},
        "date": str(datetime.date.today()),
    }
    print(json.dumps(told))
    return int(ratio > GOAL)


def without_top(row: TrainRow) -> TrainRow:
    """The row without a teacher's likely tokens."""
    return msgspec.structs.replace(row, top_ids=None, top_logprobs=None)


if __name__ == "__main__":
    sys.exit(main())
