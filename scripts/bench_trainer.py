"""`trainer_step`: GRPO forward, backward and AdamW on one fixed file of rollouts, against TRL's
GRPOTrainer with generation stubbed.

The rows: 64 completions (16 with --quick) of SmolLM2-135M in groups of 8 that share a prompt;
completions of lognormal length (sigma 0.6, mean 300, at most 1024 tokens), prompts of 60 to 199
tokens, as chat questions have them, ids drawn uniformly.  Rewards are 0 or 1; the sampler's
log-probs are the model's own with noise of 0.1 nats, so that ratios are not 1 and some are clipped.

Both sides: float32, the same weights, all cores, the same allocator (tcmalloc, where it is
installed), no gradient checkpointing, the mean over all tokens of the PPO loss clipped at 0.2,
advantages (r - mean) / (std + 1e-4), gradient norm clipped at 1, fused AdamW without decay.  Ours
runs as `rft run` does with its defaults, the buffer being a reader of the file.  TRL's side gets
what is best for it: generation batches of one group, so that rows are padded to the longest of
their group and not of all 64, and the micro-batch that was fastest among those that fit the
machine.  Both must agree on every log-prob, the loss and the gradient's norm before they are raced.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench_harness as harness
import numpy as np
from safetensors.numpy import load_file, save_file

from rft.engine.environment import trainer_environment
from rft.testing.models import NUM_PARAMETERS, smollm2

GROUP = 8
LR = 1e-6
NOISE = 0.1
# TRL's; 2, 4 and its default of 8 take as long (within 5 %), and 8 rows of these lengths more than
# 15 GiB
MICRO_BATCH = 4
NEAR = 1e-5  # relative
START_S = 900.0
STEP_S = 3600.0
LIBRARIES = ("torch", "transformers", "numpy")


def rollouts(count: int, path: Path) -> dict[str, float]:
    """Writes `count` rows without log-probs; says how long they are."""
    rng = np.random.default_rng(0)
    sigma = 0.6
    prompts = np.repeat(rng.integers(60, 200, count // GROUP), GROUP)
    drawn = rng.lognormal(-(sigma**2) / 2, sigma, count)
    responses = np.clip(drawn / drawn.mean() * 300, 8, 1024).astype(np.int64)
    tokens: list[np.ndarray] = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if i % GROUP == 0:
            shared = rng.integers(100, 49_000, prompt, np.int32)
        tokens += [shared, rng.integers(100, 49_000, response, np.int32)]
    data = {
        "shape": np.array([count // GROUP, GROUP]),
        "prompts": prompts.astype(np.int64),
        "lengths": prompts + responses,
        "tokens": np.concatenate(tokens),
        "rewards": (rng.random(count) < 0.5).astype(np.float32),
    }
    save_file(data, path)
    return {
        "rows": count,
        "completion_tokens": int(responses.sum()),
        "longest": int(responses.max()),
        "mean_prompt": round(float(prompts.mean()), 1),
    }


class Side(harness.Child):
    """One trainer in a process of its own; `step` makes one train step."""

    def __init__(
        self,
        python: Path | str,
        script: str,
        spec: dict[str, Any],
        folder: Path,
        threads: int,
        **env: str,
    ) -> None:
        folder.mkdir()
        path = folder / "spec.json"
        path.write_text(json.dumps({**spec, "folder": str(folder)}))
        super().__init__(
            folder.name,
            [python, harness.ROOT / "scripts" / script, path],
            ready_s=START_S,
            answer_s=STEP_S,
            env={**trainer_environment(threads), "HF_HUB_OFFLINE": "1", **env},
        )
        self.folder = folder
        self.reports = list[dict[str, Any]]()

    def step(self) -> float:
        """Seconds from the rows at hand until the weights are updated."""
        self.reports.append(self.ask("step"))
        return float(self.reports[-1]["seconds"])

    def logprobs(self) -> dict[str, np.ndarray]:
        """Of all rows, before the first update."""
        found: dict[str, np.ndarray] = load_file(self.folder / "logprobs.safetensors")
        return found


class Unequal(Exception):
    """The two sides did not compute the same; no ratio is worth anything."""


def agreement(ours: Side, peer: Side) -> dict[str, float]:
    """How far log-probs, loss and gradient norm of the first step are apart, relative.  Raises
    Unequal above NEAR.
    """
    mine = ours.logprobs()
    theirs = peer.logprobs()
    a, b = (
        np.concatenate([side[name] for name in sorted(mine)]).astype(np.float64)
        for side in (mine, theirs)
    )
    apart = {"logprobs": float(np.abs(a - b).max() / np.abs(a).mean())}
    for name in ("loss", "grad_norm"):
        x = ours.reports[0][name]
        y = peer.reports[0][name]
        apart[name] = abs(x - y) / abs(x)
    if not max(apart.values()) <= NEAR:
        raise Unequal(f"the first step's numbers differ by {apart}; allowed are {NEAR}")
    return {name: float(f"{value:.1e}") for name, value in apart.items()}


def trainer_step(quick: bool) -> harness.Result:
    """Useful (completion) tokens per second of our train step / of TRL's on the same rollouts;
    memory: TRL's peak / ours.

    At least 1.5 times the speed, and at most 0.6 of the memory (1.667 the other way round).  Ours
    computes a group's prompt once and no padding; log-probs, loss and gradient norm are the same on
    both sides.  `share_of_sgemm`: of the multiplications that the useful tokens need, 6 FLOP for
    each weight and token, against the machine's float32 matrix product.
    """
    python = harness.peer_python()
    rounds, count, threads = (3, 16, os.cpu_count() or 1) if quick else (4, 64, os.cpu_count() or 1)
    model = smollm2()
    before = harness.probes()
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        path = folder / "rollouts.safetensors"
        size = rollouts(count, path)
        spec = {
            "model": str(model),
            "rollouts": str(path),
            "lr": LR,
            "steps": rounds + 50,
            "threads": threads,
        }
        ours = stack.enter_context(
            Side(
                sys.executable, "train_step.py", {**spec, "noise": NOISE}, folder / "ours", threads
            )
        )
        more = {"micro_batch": MICRO_BATCH, "per_group": True}
        trl = stack.enter_context(
            Side(python, "peers/trl_train.py", {**spec, **more}, folder / "trl", threads)
        )
        harness.note("both are ready")
        mine, theirs = harness.in_turn(ours.step, trl.step, rounds)
        apart = agreement(ours, trl)
    after = harness.probes()
    memory = [side.reports[-1]["peak_bytes"] for side in (ours, trl)]
    tokens = size["completion_tokens"]
    needed = 6.0 * NUM_PARAMETERS * tokens
    # of a machine that others may use too
    sgemm = max(before["sgemm_gflops"], after["sgemm_gflops"])
    share = [needed / s / 1e9 / sgemm for s in mine]
    kept = ours.reports[1:]
    split = {
        part: round(statistics.median(r["phases"][part] for r in kept), 3)
        for part in kept[0]["phases"]
        if part != "wait_s"
    }
    return harness.Result(
        "trainer_step",
        [
            harness.speed_ratio("useful_tokens_per_s", mine, theirs, 1.5),
            _same("peak_memory", memory[1] / memory[0], 1 / 0.6),
            harness.Check(
                "share_of_sgemm",
                round(statistics.median(share), 3),
                round(min(share), 3),
                round(max(share), 3),
                None,
            ),
        ],
        {
            **_summary(mine, tokens, memory[0]),
            **size,
            "computed_positions": int(kept[-1]["positions"]),
            "token_budget": ours.ready["budget"],
            "split_s": split,
            "apart": apart,
        },
        {**_summary(theirs, tokens, memory[1]), "micro_batch": MICRO_BATCH},
        before,
        versions={
            **harness.versions(*LIBRARIES),
            **{f"peer's {name}": v for name, v in trl.ready["versions"].items()},
        },
    )


def _summary(seconds: list[float], tokens: float, peak: int) -> dict[str, Any]:
    per_s = round(tokens / statistics.median(seconds), 1)
    return harness.summary(seconds, tokens_per_s=per_s, peak_gib=round(peak / 2**30, 2))


def _same(name: str, ratio: float, goal: float) -> harness.Check:
    """A number that is no sample of many."""
    shown = round(ratio, 3)
    return harness.Check(name, shown, shown, shown, round(goal, 3))
