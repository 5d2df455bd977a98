"""`e2e_async`, `weight_sync`, `mismatch_and_exactness`: what overlapping gains, what moving weights
costs, and whether both stay exact.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_harness as harness
import numpy as np
import torch
import yaml
from sync_matrix import ages, begun, run_rft

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.launch.execute import execute
from rft.monitor.pictures import bars, shares
from rft.monitor.read import read, series
from rft.sync.transport.memory import MemoryTransport
from rft.testing import tiny
from rft.testing.models import smollm2
from rft.types.ids import Version
from rft.types.metrics import MetricRecord

THREADS = os.cpu_count() or 1
START_S = 600.0
ANSWER_S = 300.0
PLUGINS = harness.ROOT / "scripts" / "plugins"

# ---------------------------------------------------------------- weight_sync

REQUESTS = 32
TOKENS = 64
GOAL_S = 0.4
CANARY = 1e-3


def weight_sync(quick: bool) -> harness.Result:
    """New weights for a vLLM engine that serves 32 requests, SmolLM2 in float32, from the trainer's
    tensors until it goes on.

    `vs_file`: seconds of a safetensors file, synced to disk, and vLLM's own `reload_weights` / ours
    (staged in memory with hashes, verified, loaded, layers probed); at least 2.
    `published_at_most`: 0.4 s / seconds from publishing to going on, staging apart; at least
    1.  `kept`: requests that went on as if nothing had been / all; 1.  `canary_at_most`: 1e-3 nats
       / its error; at least 1.
    `bfloat16_staging`: seconds of staging a byte in float32 / in bfloat16; at least 0.5.
    """
    rounds = 5 if quick else 15
    measured = harness.probes()
    model = smollm2()
    bfloat16, float32 = _staging(model, rounds)
    answers: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    # on a disk: the peer's file is synced
    with tempfile.TemporaryDirectory(prefix="rft-bench-", dir=harness.ROOT) as name:
        folder = Path(name)
        for file in (
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ):
            (folder / file).write_bytes((model / file).read_bytes())
        with _sides(folder, model, REQUESTS, TOKENS) as child:

            def side(which: str) -> float:
                answers[which].append(child.ask(which))
                seconds: float = answers[which][-1]["seconds"]
                return seconds

            # two versions are held, and each touches new memory once
            ours, peer = harness.in_turn(
                lambda: side("ours"), lambda: side("peer"), rounds, discard=2
            )
    mine = answers["ours"][-rounds:]
    theirs = answers["peer"][-rounds:]
    published = [a["seconds"] - a["phases"]["stage"] for a in mine]
    kept = [1 - a["aborted"] / a["running"] for a in answers["ours"]]
    canary = max(a["canary"] for a in answers["ours"])
    return harness.Result(
        "weight_sync",
        [
            harness.speed_ratio("vs_file", ours, peer, 2.0),
            harness.speed_ratio("published_at_most", published, [GOAL_S] * rounds, 1.0),
            harness.speed_ratio("with_staging_at_most", ours, [GOAL_S] * rounds, None),
            harness.speed_ratio("kept", [1.0] * len(kept), kept, 1.0),
            harness.speed_ratio("canary_at_most", [canary], [CANARY], 1.0),
            harness.speed_ratio("bfloat16_staging", bfloat16, float32, 0.5),
        ],
        harness.summary(
            ours,
            phases_s=_medians(mine),
            canary_max_abs=canary,
            canary_s=_median(a["canary_s"] for a in mine),
        ),
        harness.summary(peer, phases_s=_medians(theirs)),
        measured,
    )


def _staging(model: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of staging a GB of the model's weights through memory, in bfloat16 and in float32."""
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    with ExitStack() as opened:

        def side(dtype: torch.dtype) -> Callable[[], float]:
            tensors = {name: tensor.to(dtype) for name, tensor in weights.items()}
            transport = MemoryTransport(
                Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rft-bench-")))
            )
            opened.callback(transport.close)
            steps = itertools.count()

            def stage() -> float:
                step = next(steps)
                began = time.perf_counter()
                manifest = transport.stage(Version(1, step), tensors.items(), {})
                seconds = time.perf_counter() - began
                if step:
                    transport.release(Version(1, step - 1))
                return seconds / manifest.nbytes * 1e9

            return stage

        return harness.in_turn(side(torch.bfloat16), side(torch.float32), rounds, discard=2)


def _sides(folder: Path, model: Path, requests: int, tokens: int) -> harness.Child:
    spec = folder / "spec.json"
    spec.write_text(
        json.dumps(
            {
                "model": str(model),
                "threads": THREADS,
                "requests": requests,
                "max_tokens": tokens,
                "folder": str(folder),
            }
        )
    )
    env = {
        **cpu_environment(EngineSettings(model_path=str(model), cpu_threads=THREADS)),
        "PYTHONPATH": str(harness.ROOT),
    }
    script = harness.ROOT / "scripts" / "sync_sides.py"
    return harness.Child(
        "sync_sides.py", [sys.executable, script, spec], answer_s=ANSWER_S, ready_s=START_S, env=env
    )


def _medians(answers: list[dict[str, Any]]) -> dict[str, float]:
    return {k: _median(a["phases"][k] for a in answers) for k in answers[0]["phases"]}


def _median(values: Any) -> float:
    return round(float(statistics.median(values)), 4)


# ---------------------------------------------------------------- e2e_async

PROMPTS = 8
RUNS = 8
LR = 1e-3
WARM = 2  # steps that are left out
SYNC = {"sync_style": "fixed", "sync_interval": 1}
ASYNC = {"sync_style": "trainer_driven", "sync_interval": 2, "max_staleness": 5}
NEAR = {**ASYNC, "max_staleness": 2}


def e2e_async(quick: bool) -> harness.Result:
    """Whole runs of the tiny model to the same number of trained samples, 64 a step, with Ray, vLLM
    and a version every 1 or 2 steps.

    Each run of the task waits 0.2 to 2 s for its tool.  `vs_sync`: seconds of our own synchronous
    run / seconds of the asynchronous one (`trainer_driven`, at most 5 steps old); at least 1.6.
    `vs_trl`: seconds of TRL's GRPOTrainer, which waits for all tools of a step at once / ours; at
    least 2.  `compute_bound`: ours without waits, synchronous / at most 2 steps old; at least 0.97.
     A round is a fifth of a run.  `reward_vs_sync`, `reward_vs_trl`, `reward_compute_bound`:
     rewards of the asynchronous runs in their last fifth / those of the others; at least 0.95.
     Means of three seeds, but for the two long runs (TRL, and ours that is synchronous and waits).
     All sides begin
    with one model that gets about 0.6 of the rewards.  With --quick (15 steps, one seed) a fifth
    has three steps, and what the asynchronous run sampled ahead of the first round counts for it.
    """
    harness.peer_python()
    steps = WARM + (15 if quick else 100)
    block = (steps - WARM) // 5
    seeds = range(1 if quick else 3)
    measured = harness.probes()
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        folder = Path(name)
        model = begun(folder / "begun", 0)

        def side(sync: dict[str, Any], waits: bool, seeds: Iterable[int]) -> _Side:
            root = Path(tempfile.mkdtemp(dir=folder))
            return _Side(
                steps, block, [_run(root / str(s), model, steps, sync, waits, s) for s in seeds]
            )

        sides = {
            "sync": side(SYNC, True, seeds[:1]),
            "async": side(ASYNC, True, seeds),
            "sync_computing": side(SYNC, False, seeds),
            "async_computing": side(NEAR, False, seeds),
        }
        trl, trl_rewards = _trl(folder, model, steps)
    seconds = {k: v.seconds for k, v in sides.items()} | {
        "trl": [sum(trl[WARM + i * block : WARM + (i + 1) * block]) for i in range(5)]
    }
    rewards = {k: v.rewards for k, v in sides.items()} | {"trl": trl_rewards[-block:]}

    def check(
        name: str, values: dict[str, list[float]], ours: str, peer: str, goal: float
    ) -> harness.Check:
        return harness.speed_ratio(name, values[ours], values[peer], goal)

    def facts(name: str) -> dict[str, float]:
        return {
            "step_s": round(sum(seconds[name]) / 5 / block, 3),
            "reward_last": round(statistics.fmean(rewards[name]), 3),
        }

    return harness.Result(
        "e2e_async",
        [
            check("vs_sync", seconds, "async", "sync", 1.6),
            check("vs_trl", seconds, "async", "trl", 2.0),
            check("compute_bound", seconds, "async_computing", "sync_computing", 0.97),
            check("reward_vs_sync", rewards, "sync", "async", 0.95),
            check("reward_vs_trl", rewards, "trl", "async", 0.95),
            check("reward_compute_bound", rewards, "sync_computing", "async_computing", 0.95),
        ],
        {name: facts(name) | side.idle | {"oldest": side.oldest} for name, side in sides.items()},
        {"trl": facts("trl")},
        measured,
    )


@dataclass(frozen=True)
class _Run:
    records: list[MetricRecord]
    oldest: int  # staleness of a trained token, in train steps


class _Side:
    """Runs of one kind with several seeds: `seconds` of each fifth and `rewards` of each of the
    last fifth's batches, means over seeds.
    """

    def __init__(self, steps: int, block: int, runs: Sequence[_Run]) -> None:
        fifths = [
            [r.time for r in run.records if r.role == "trainer" and r.step >= WARM][::block]
            for run in runs
        ]
        self.seconds = _means([b - a for a, b in itertools.pairwise(times)] for times in fifths)
        self.rewards = _means(
            [v for _, v in series(r.records, "rollout/reward/mean")][:steps][-block:] for r in runs
        )
        idle = [shares(bars(r.records)) for r in runs]
        self.idle = {
            name.replace(" ", "_"): round(statistics.fmean(x[name] for x in idle), 3)
            for name in idle[0]
        }
        self.oldest = max(r.oldest for r in runs)


def _means(lists: Iterable[list[float]]) -> list[float]:
    return [statistics.fmean(x) for x in zip(*lists, strict=True)]


def _run(
    folder: Path, model: Path, steps: int, sync: dict[str, Any], waits: bool, seed: int
) -> _Run:
    taskset = {
        "name": "copy",
        "path": "rft.testing.tiny:copy_tasks",
        "split": "train",
        "workflow_args": {"waits": waits},
    }
    config = {
        "project": "bench",
        "name": "waiting",
        "seed": seed,
        "checkpoint_root_dir": str(folder),
        "plugin_dirs": [str(PLUGINS)],
        "model": {"model_path": str(model), "max_prompt_tokens": 63, "max_response_tokens": 1},
        "algorithm": {"repeat_times": RUNS, "kl_loss_fn": "none", "optimizer": {"lr": LR}},
        "buffer": {
            "batch_size": PROMPTS,
            "total_epochs": 100,
            "explorer_input": {
                "taskset": taskset,
                "default_workflow_type": "waiting_workflow",
                "default_reward_fn_type": "exact_answer",
            },
        },
        "explorer": {
            "max_concurrent_runs": 1024,
            "eval_interval": 0,
            "eval_on_startup": False,
            "eval_at_end": False,
            "rollout_model": {"engine_type": "vllm", "max_num_seqs": 256},
        },
        "trainer": {"total_steps": steps, "save_hf_checkpoint": "never"},
        "synchronizer": sync,
    }
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    run_rft("--config", str(path))
    metrics = _metrics(folder)
    return _Run(read(metrics), max(ages(metrics.parent)))


def _metrics(root: Path) -> Path:
    (found,) = root.rglob("metrics.jsonl")
    return found


def _trl(folder: Path, model: Path, steps: int) -> tuple[list[float], list[float]]:
    rows = tiny.copy_tasks()
    wait_s = runpy.run_path(str(PLUGINS / "waiting_workflow.py"))["wait_s"]
    spec = folder / "trl.json"
    spec.write_text(
        json.dumps(
            {
                "model": str(model),
                "rows": rows,
                "runs": RUNS,
                "prompts": PROMPTS,
                "max_tokens": 1,
                "lr": LR,
                "threads": THREADS,
                "steps": steps + 1,
                "folder": str(folder / "trl"),
                "waits": [[wait_s(i, k) for k in range(RUNS)] for i in range(len(rows))],
            }
        )
    )
    command = [harness.peer_python(), harness.ROOT / "scripts/peers/trl_wait.py", spec]
    with harness.Child(
        "TRL", command, ready_s=START_S, answer_s=ANSWER_S, env={"HF_HUB_OFFLINE": "1"}
    ) as trl:
        answers = [trl.ask("step") for _ in range(steps)]
    return [a["seconds"] for a in answers], [a["reward"] for a in answers]


# ---------------------------------------------------------------- mismatch_and_exactness

LATER = 3  # versions after the first
MEAN = 1e-4
VLLM = 1e-4
SEQUENCES = 256


def mismatch_and_exactness(quick: bool) -> harness.Result:
    """Log-probs that vLLM reported for 256 sequences, against the trainer's under the same weights;
    and whether staleness 0 is synchronous.

    `version_0`, `version_k`: 1e-4 nats / the mean difference of a token's log-prob at the first
    version and 3 steps later; at least 1. `replay_exact`: a run with `max_staleness: 0` of each
    asynchronous style ends with the bytes of the synchronous one (`transformers` engine); 1.
    `replay_vllm`: 1e-4 / the largest difference of a weight after the same with vLLM; at least 1.
    Published: how many ratios lie outside [0.9, 1.1], also where vLLM samples with top_p 0.8, whose
    log-probs are those of what is left (`rft check` refuses that for training).
    """
    measured = harness.probes()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rft-bench-")))
        tiny_model = tiny.make(folder / "tiny", seed=0)
        model = tiny_model if quick else smollm2()
        whole = _mismatch(folder, model, tiny=quick)
        with _sides(folder, model, SEQUENCES, 24) as child:
            sampled = {
                top_p: child.ask("sample", top_p=top_p, sequences=SEQUENCES) for top_p in (1.0, 0.8)
            }
        exact = _replays(folder / "exact", tiny_model, engine="transformers")
        near = _replays(
            folder / "near", tiny_model, engine="vllm", styles=("fixed", "trainer_driven")
        )
    first = whole[0]["abs_diff_mean"]
    later = whole[LATER]["abs_diff_mean"]
    same = all(
        np.array_equal(w, exact["fixed"][n]) for other in exact.values() for n, w in other.items()
    )
    apart = max(
        float(np.abs(w - near["fixed"][n]).max()) for n, w in near["trainer_driven"].items()
    )
    return harness.Result(
        "mismatch_and_exactness",
        [
            harness.speed_ratio("version_0", [first], [MEAN], 1.0),
            harness.speed_ratio("version_k", [later], [MEAN], 1.0),
            harness.speed_ratio("replay_exact", [1.0], [float(same)], 1.0),
            harness.speed_ratio("replay_vllm", [max(apart, 1e-12)], [VLLM], 1.0),
        ],
        {
            "versions": whole,
            "sampled_top_p_1": sampled[1.0],
            "sampled_top_p_0.8": sampled[0.8],
            "replay_vllm_max_abs": apart,
        },
        {},
        measured,
    )


def _mismatch(folder: Path, model: Path, *, tiny: bool) -> dict[int, dict[str, float]]:
    """Version -> the numbers of the step that trained what it sampled."""
    root = folder / "mismatch"
    task = "rft.testing.tiny:copy_tasks" if tiny else "rft.taskset.generated_tasks:digit_sums"
    config = {
        "project": "bench",
        "name": "mismatch",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": str(model), "max_prompt_tokens": 104, "max_response_tokens": 24},
        "algorithm": {
            "repeat_times": 8,
            "kl_loss_fn": "none",
            "optimizer": {"lr": 1e-3 if tiny else 2e-5},
            "rollout_correction": {"rollout_is": "token"},
        },
        "buffer": {
            "batch_size": SEQUENCES // 8,
            "total_epochs": 10,
            "explorer_input": {
                "taskset": {"name": "t", "path": task, "split": "train"},
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "exact_answer",
            },
        },
        "explorer": {
            "eval_interval": 0,
            "eval_on_startup": False,
            "eval_at_end": False,
            "rollout_model": {"engine_type": "vllm", "max_num_seqs": 256},
        },
        "trainer": {"total_steps": LATER + 1, "save_hf_checkpoint": "never"},
    }
    path = folder / "mismatch.yaml"
    path.write_text(yaml.safe_dump(config))
    run_rft("--config", str(path))
    records = [r for r in read(_metrics(root)) if r.role == "trainer"]
    return {
        r.step - 1: {
            name.removeprefix("mismatch/"): v
            for name, v in r.values.items()
            if name.startswith("mismatch/")
        }
        for r in records
    }


STYLES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "explorer_driven": ("max_staleness=0",),
    "trainer_driven": ("max_staleness=0",),
    "fully_async": ("staleness_threshold=0.5", "max_staleness=0"),
}


def _replays(
    root: Path, model: Path, *, engine: str, styles: tuple[str, ...] = tuple(STYLES)
) -> dict[str, dict[str, np.ndarray]]:
    """Style -> the weights after 6 steps."""
    from safetensors.numpy import load_file

    config = harness.ROOT / "examples" / "tiny" / "config.yaml"
    weights = {}
    for style in styles:
        keys = [
            f"model.model_path={model}",
            f"checkpoint_root_dir={root / style}",
            "trainer.total_steps=6",
            "explorer.eval_interval=1000",
            "explorer.eval_on_startup=false",
            "explorer.eval_at_end=false",
            "deterministic=true",
            f"explorer.rollout_model.engine_type={engine}",
            f"synchronizer.sync_style={style}",
            *(f"synchronizer.{x}" for x in STYLES[style]),
        ]
        if engine == "transformers":
            execute(config, keys, in_process=True)
        else:
            run_rft("--config", str(config), *keys)
        (exported,) = (root / style).rglob("huggingface/model.safetensors")
        weights[style] = load_file(exported)
    base = load_file(model / "model.safetensors")
    if all(np.array_equal(base[n], w) for n, w in weights["fixed"].items()):
        raise RuntimeError(
            "nothing was learnt, so equal weights prove nothing; raise the batch size"
        )
    return weights
