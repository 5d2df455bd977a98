"""`rollout_engine`: what rft's way from a workflow to vLLM costs, against vLLM alone and against
transformers' `generate`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import bench_harness as harness

from rft.engine.environment import cpu_environment, trainer_environment
from rft.engine.settings import EngineSettings
from rft.testing.models import smollm2

GROUP = 8
MOST_TOKENS = 256
DEADLINE_S = 900.0
WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part".split()


def _side(name: str, spec: Path, env: dict[str, str]) -> harness.Child:
    script = harness.ROOT / "scripts" / "engine_sides.py"
    return harness.Child(
        f"engine_sides.py {name}",
        [sys.executable, script, name, spec],
        answer_s=DEADLINE_S,
        ready_s=DEADLINE_S,
        env={**env, "PYTHONPATH": str(harness.ROOT)},
    )


def rollout_engine(quick: bool) -> harness.Result:
    """Prompts of 128 to 512 tokens in groups of 8, answers of forced lognormal lengths at
    temperature 1, log-probs of what was drawn.

    `throughput`: seconds of vLLM's own `LLM.generate` / seconds of ours, from a workflow through
    the pool and a Ray actor to the same engine, at least 0.95.  `prefill`: 1.4 unique prompt tokens
    / tokens that a group's prompts were computed for (KV blocks of 32 tokens). Published: the same
    against transformers' `generate` on an eighth of the prompts, seconds per token.
    """
    rounds, prompts, mean = (3, 8, 24) if quick else (5, 32, 32)
    measured = harness.probes()
    threads = os.cpu_count() or 1
    seconds: dict[str, list[float]] = {"ours": [], "raw": [], "hf": []}
    tokens: list[float] = []
    prefill: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name, contextlib.ExitStack() as stack:
        spec = Path(name) / "spec.json"
        spec.write_text(
            json.dumps(
                {
                    "model": str(smollm2()),
                    "threads": threads,
                    "max_model_len": 1024,
                    "max_num_seqs": 256,
                    "folder": name,
                }
            )
        )
        plain = cpu_environment(EngineSettings(cpu_threads=threads))
        sides = {
            "ours": stack.enter_context(_side("ours", spec, {})),
            "raw": stack.enter_context(_side("raw", spec, plain)),
            "hf": stack.enter_context(_side("hf", spec, trainer_environment(threads))),
        }
        for i in range(rounds + 1):
            rng = random.Random(i)
            # a word is about a token; evenly spread, so that the share of a prompt's last block,
            # which nobody shares, is no accident
            sizes = [96 + round(384 * (j + 0.5) / prompts) for j in range(prompts)]
            asked = [" ".join(rng.choices(WORDS, k=k)) for k in rng.sample(sizes, prompts)]
            lengths = [[_length(rng, mean) for _ in range(GROUP)] for _ in asked]
            order = ["ours", "raw"] if i % 2 else ["raw", "ours"]
            found = {side: sides[side].ask(prompts=asked, lengths=lengths) for side in order}
            some = prompts // 8
            found["hf"] = sides["hf"].ask(prompts=asked[:some], lengths=lengths[:some])
            wanted = sum(map(sum, lengths))
            if {found["ours"]["tokens"], found["raw"]["tokens"]} != {wanted}:
                raise RuntimeError(
                    f"{wanted} tokens were asked for; ours wrote {found['ours']['tokens']}, vLLM "
                    f"{found['raw']['tokens']}"
                )
            harness.note(
                f"round {i or 'warm-up'}: "
                + ", ".join(f"{k} {v['seconds']:.1f} s" for k, v in found.items())
            )
            if i:
                for side, v in found.items():
                    seconds[side].append(v["seconds"] / v["tokens"])
                tokens.append(wanted)
                prefill.append(found["ours"]["prefilled"] / _unique(asked, spec))
    return harness.Result(
        "rollout_engine",
        [
            harness.speed_ratio("throughput", seconds["ours"], seconds["raw"], 0.95),
            harness.speed_ratio("prefill", [x / 1.4 for x in prefill], [1.0] * len(prefill), 1.0),
            harness.speed_ratio("vs_transformers", seconds["ours"], seconds["hf"], None),
        ],
        {
            "tokens_per_s": round(1 / statistics.median(seconds["ours"]), 1),
            "tokens_a_round": statistics.median(tokens),
            "prefill_per_unique_token": round(statistics.median(prefill), 3),
        },
        {k: {"tokens_per_s": round(1 / statistics.median(seconds[k]), 1)} for k in ("raw", "hf")},
        measured,
    )


def _length(rng: random.Random, mean: int) -> int:
    return max(4, min(MOST_TOKENS, round(mean * rng.lognormvariate(-0.25, 0.7))))


def _unique(prompts: list[str], spec: Path) -> int:
    """Tokens of the prompts, each counted once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(json.loads(spec.read_text())["model"])
    return sum(
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )
        for p in prompts
    )
