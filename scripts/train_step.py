"""rft's trainer on recorded rollouts, one train step whenever it is told to: the side of
`bench_trainer.py` that is ours.

    python scripts/train_step.py SPEC.json      with {model, rollouts, lr, noise, folder, [overrides]}

It runs the training loop, the ranks and the learner that `rft run` runs, with the settings that a
configuration gives; the buffer is a reader that holds one block of rows and leases it for every
step.

Protocol on the pipes: it completes the rollouts with log-probs of a sampler (its own, with noise),
writes its own to logprobs.safetensors and prints {"ready": true, "budget", "threads"}; for each
line on stdin it does one step and prints {"step", "seconds", "loss", "grad_norm", "peak_bytes",
"positions", "phases"}; it ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from rft.config.plan import Plan
from rft.launch.start import Start, schedule
from rft.preflight.check import check
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.trainer import Trainer
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.metrics import MetricRecord
from rft.types.ports import GroupStats, Lease, ScoreRow
from rft.types.task import SamplingArgs

ENDLESS = 1_000_000  # train steps; stdin ends the race


def peak_bytes() -> int:
    """The most that this process has held, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Stopped(Exception):
    """stdin was closed: the race is over."""


def plan(spec: dict[str, Any], groups: int, runs: int, longest: tuple[int, int]) -> Plan:
    """The settings of a run with these rows; everything that is not written is rft's default."""
    overrides = [
        f"model.model_path={spec['model']}",
        f"model.max_prompt_tokens={longest[0]}",
        f"model.max_response_tokens={longest[1]}",
        f"buffer.batch_size={groups}",
        f"algorithm.repeat_times={runs}",
        f"algorithm.optimizer.lr={spec['lr']}",
        *spec.get("overrides", ()),
    ]
    config = Path(spec["folder"]) / "ours.yaml"
    config.write_text(json.dumps(CONFIG | {"checkpoint_root_dir": spec["folder"]}))
    report = check(config, overrides)
    if report.plan is None or not report.ok:
        raise SystemExit("\n".join(str(e) for e in report.errors))
    return report.plan


CONFIG: dict[str, Any] = {
    "project": "bench",
    "name": "trainer",
    "algorithm": {
        "algorithm_type": "grpo",
        "kl_loss_fn": "none",
        "advantage_fn_args": {"epsilon": 1e-4},  # as the peer's
        "optimizer": {"weight_decay": 0.0},
    },
    "buffer": {
        "total_epochs": 1000,
        "explorer_input": {
            "taskset": {
                "name": "sums",
                "path": "rft.taskset.generated_tasks:digit_sums",
                "split": "train",
            },
            "default_workflow_type": "math_workflow",
        },
    },
    "explorer": {
        "eval_interval": 0,
        "eval_on_startup": False,
        "rollout_model": {"engine_type": "transformers"},
    },
    "trainer": {"save_hf_checkpoint": "never"},
    "monitor": {"monitor_type": "none"},
}


def rows_of(data: dict[str, np.ndarray]) -> tuple[list[Experience], tuple[GroupStats, ...]]:
    """The recorded rows as an explorer would have written them."""
    runs = int(data["shape"][1])
    starts = np.cumsum(data["lengths"]) - data["lengths"]
    rows = []
    groups = []
    for i, (at, length, prompt) in enumerate(
        zip(starts, data["lengths"], data["prompts"], strict=True)
    ):
        group = GroupId(1, 0, 0, i // runs)
        rows.append(
            Experience(
                id=group.run(i % runs),
                taskset="race",
                task_index=i // runs,
                workflow="math_workflow",
                status="complete",
                finish_reason="stop",
                tokens=data["tokens"][at : at + length],
                loss_mask=np.arange(length) >= prompt,
                logprobs=data["logprobs"][at : at + length],
                version_spans=(VersionSpan(Version(1, 0), int(prompt), int(length)),),
                sampling=(
                    SamplingRecord(start=int(prompt), end=int(length), sampling=SamplingArgs()),
                ),
                reward=float(data["rewards"][i]),
            )
        )
        if i % runs == runs - 1:
            given = data["rewards"][i + 1 - runs : i + 1].astype(np.float64)
            groups.append(
                GroupStats(
                    group=str(group),
                    rewards=tuple(given.tolist()),
                    mean=float(given.mean()),
                    std=float(given.std(ddof=1)),
                )
            )
    return rows, tuple(groups)


class Pipes:
    """In place of the buffer and the monitor: a line on stdin leases the rows once more, a record
    is reported.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._began = 0.0

    async def lease(self, step: int, **_: Any) -> Lease:
        if not await asyncio.to_thread(sys.stdin.readline):
            raise Stopped
        self._began = time.monotonic()
        return replace(self._lease, step=step)

    async def use(self, step: int, logprobs: bytes | None = None) -> None:
        """Every step may have the rows again."""

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Nothing is sampled here."""

    async def progress(self, text: str) -> None:
        """Nobody looks on."""

    async def log(self, record: MetricRecord) -> None:
        seconds = time.monotonic() - self._began
        v = record.values
        phases = {
            name.removeprefix("time/"): round(value, 3)
            for name, value in v.items()
            if name.startswith("time/")
        }
        say(
            step=record.step,
            seconds=seconds,
            loss=v["actor/loss"],
            grad_norm=v["actor/grad_norm"],
            peak_bytes=peak_bytes(),
            positions=v["perf/computed_positions"],
            phases=phases,
        )


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


async def main(spec: dict[str, Any]) -> None:
    path = Path(spec["rollouts"])
    data = load_file(path)
    groups, runs = (int(n) for n in data["shape"])
    longest = int(data["prompts"].max()), int((data["lengths"] - data["prompts"]).max())
    made = await asyncio.to_thread(plan, spec, groups, runs, longest)
    ranks = Ranks(await asyncio.to_thread(Learner, made.learner))
    ends = np.cumsum(data["lengths"])
    asked = [
        ScoreRow(tokens=data["tokens"][end - length : end], prompt_length=int(prompt))
        for end, length, prompt in zip(ends, data["lengths"], data["prompts"], strict=True)
    ]
    scores = await ranks.score(asked)
    save_file(
        {str(i): s for i, s in enumerate(scores)}, Path(spec["folder"]) / "logprobs.safetensors"
    )
    noise = np.random.default_rng(1)
    sampled = [
        np.minimum(s + noise.normal(0, spec["noise"], len(s)), 0).astype(np.float32) for s in scores
    ]
    prompts = [np.zeros(n, np.float32) for n in data["prompts"]]
    data["logprobs"] = np.concatenate(
        [part for pair in zip(prompts, sampled, strict=True) for part in pair]
    )
    save_file(data, path)
    rows, stats = rows_of(data)
    pipes = Pipes(Lease(step=1, frame=encode(rows), groups=stats))
    start = Start(1)
    when = schedule(made, start)
    trainer = Trainer(
        dataclasses.replace(made.trainer, total_steps=ENDLESS, save_interval=0),
        ranks,
        pipes,  # type: ignore[arg-type]
        None,
        pipes,
        transport=None,
        lineage=1,
        start_step=0,
        parent=None,
        must_publish=lambda step: False,
        first_after=when.first_after,
    )
    say(ready=True, budget=made.learner.max_token_len_per_gpu, threads=made.learner.cpu_threads)
    try:
        await trainer.run()
    except Stopped:
        return


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
