"""A train step of hybrid models with packed rows beside the same step with padded ones.

    python scripts/hybrid_step.py [--rounds 3] [--family NAME]

Four families of small width with random weights, float32: gated delta net, Mamba2 twice, short
convolutions.  Rows have one prompt length and answers of unequal length, as sampling gives them.
Both layouts train the same rows in turn, cut by the default budget; seconds are of the processor,
so that other work on the machine counts little.  Prints one JSON object a family; exit code 1 if
packed rows are less than 1.5 times as fast.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings
from rft.types.row_layout import RowLayout
from tests.helpers import families

GOAL = 1.5
VOCAB = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 128,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 128,
        "ssm_state_size": 32,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 768,
    },
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_ff_dim": 768},
}
ROWS, PROMPT, SHORTEST, LONGEST = 16, 32, 16, 512


def rows() -> list[TrainRow]:
    """Rows whose answers are as often twice as long as half as long."""
    rng = np.random.default_rng(0)
    answers = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), ROWS)).astype(int)
    made = []
    for i, answer in enumerate(answers):
        mask = np.arange(PROMPT + answer) >= PROMPT
        made.append(
            TrainRow(
                tokens=rng.integers(3, VOCAB, PROMPT + answer).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -8.3, 0).astype(np.float32),
                temperatures=1.0,
                advantages=np.full(answer, rng.normal(), np.float32),
                group=str(i),
            )
        )
    return made


def race(family: str, rounds: int) -> dict[str, Any]:
    """Median seconds of a step in each layout; the first step of each warms up."""
    given = rows()
    layouts: tuple[RowLayout, ...] = ("packed", "padded")
    seconds: dict[str, list[float]] = {layout: [] for layout in layouts}
    with tempfile.TemporaryDirectory(prefix="rft-hybrid-") as folder:
        changes = FAMILIES[family]
        layers = len(changes.get("layer_types", ())) or changes["num_hidden_layers"]
        model = families.make(
            family, Path(folder) / "model", **SIZES | {"num_hidden_layers": layers} | changes
        )
        settings = LearnerSettings(model_path=str(model), cpu_threads=1)
        learners, batches, positions = {}, {}, {}
        for layout in layouts:
            budget = Budget(settings.max_token_len_per_gpu, layout)
            (cut,) = plan(given, 1, budget)
            positions[layout] = sum(budget.cost([given[i].inputs for i in m]) for m in cut)
            learners[layout] = Learner(
                LearnerSettings(
                    model_path=str(model), cpu_threads=1, row_layout=layout, total_steps=100
                )
            )
            batches[layout] = tuple(tuple(given[i] for i in m) for m in cut)
        for step in range(1, rounds + 2):
            for layout in layouts:
                batch = RankBatch(
                    step=step,
                    micro_batches=batches[layout],
                    tokens=float(sum(r.loss_mask.sum() for r in given)),
                    rows=float(ROWS),
                )
                began = time.process_time()
                assert learners[layout].step(batch).finite
                if step > 1:
                    seconds[layout].append(time.process_time() - began)
    ratio = statistics.median(seconds["padded"]) / statistics.median(seconds["packed"])
    return {
        "family": family,
        "rows": ROWS,
        "positions": positions,
        "micro_batches": {name: len(b) for name, b in batches.items()},
        "seconds": {name: [round(s, 3) for s in v] for name, v in seconds.items()},
        "ratio": round(ratio, 2),
        "goal": GOAL,
        "date": str(datetime.date.today()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="steps of each layout")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    options = parser.parse_args()
    results = []
    for family in [options.family] if options.family else FAMILIES:
        results.append(race(family, options.rounds))
        print(json.dumps(results[-1]), flush=True)
    return int(any(r["ratio"] < GOAL for r in results))


if __name__ == "__main__":
    sys.exit(main())
