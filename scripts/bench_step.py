"""`step_vs_trl`: whole GRPO steps of SmolLM2 against TRL's GRPOTrainer.

Both sides hold the same weights in float32 on the same number of threads, see the same questions,
draw completions of at most 24 tokens at temperature 1 and make one AdamW step on the token-mean
loss.  The learning rate is so small that the answers' lengths stay what they are at the start, on
both sides.  Only one side works at a time: the other waits at a gate.  A round is three steps in a
row, as in a run, where the next batch begins while the canary is still being verified; it ends when
the last weights are served and proven.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import bench_harness as harness
import yaml

from rft.monitor.read import read
from rft.taskset.generated_tasks import digit_sums
from rft.testing.models import smollm2
from rft.types.metrics import MetricRecord, Role

PROMPTS = 4
RUNS = 8
MAX_TOKENS = 24
LR = 1e-7
STEPS = 3
START_S = 600.0
STEP_S = 600.0


class Trl(harness.Child):
    """TRL in its own environment; `step` makes optimizer steps."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        path = folder / "trl.json"
        path.write_text(json.dumps({**spec, "folder": str(folder / "trl")}))
        command = [harness.peer_python(), harness.ROOT / "scripts/peers/trl_step.py", path]
        super().__init__(
            "TRL", command, ready_s=START_S, answer_s=STEP_S, env={"HF_HUB_OFFLINE": "1"}
        )
        self.reports: list[dict[str, Any]] = []

    def step(self, steps: int = 1) -> float:
        """Mean seconds of `steps` in a row: generation, scoring, update."""
        began = time.monotonic()
        self.reports += [self.ask("step") for _ in range(steps)]
        return (time.monotonic() - began) / steps


class Ours:
    """`rft run` with vLLM, Ray and the FSDP2 trainer, whose runs wait at a gate; `step` makes whole
    steps.
    """

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(config["buffer"]["explorer_input"]["taskset"]["workflow_args"]["socket"])
        self._server.listen(PROMPTS * RUNS)
        self._held: list[socket.socket] = []
        self._run = folder / config["project"] / config["name"]
        self._run.mkdir(parents=True)
        self._watch = harness.FolderWatch(self._run)
        self._step = 0
        path = folder / "ours.yaml"
        path.write_text(yaml.safe_dump(config))
        self._log = (folder / "ours.log").open("wb")
        command = [sys.executable, "-m", "rft.cli.main", "run", "--config", str(path)]
        self._child = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        self._gather(START_S)
        self._await_served(0)
        return self

    def step(self, steps: int = 1) -> float:
        """Mean seconds of `steps` in a row, from opening the gate until the last weights are served
        and the next runs stand there.
        """
        began = time.monotonic()
        for _ in range(steps):
            for run in self._held:
                run.sendall(b"g")
                run.close()
            self._gather(STEP_S)
        self._step += steps
        self._await_served(self._step)
        return (time.monotonic() - began) / steps

    def records(self) -> list[MetricRecord]:
        return read(self._run / "metrics.jsonl")

    def _gather(self, deadline_s: float) -> None:
        """Wait until every run of a batch stands at the gate."""
        ends = time.monotonic() + deadline_s
        self._held = []
        child = os.pidfd_open(self._child.pid)
        try:
            while len(self._held) < PROMPTS * RUNS:
                ready, _, _ = select.select(
                    [self._server.fileno(), child], [], [], max(0.0, ends - time.monotonic())
                )
                if child in ready:
                    raise RuntimeError(
                        f"rft has ended:\n{Path(self._log.name).read_text()[-3000:]}"
                    )
                if not ready:
                    raise TimeoutError(
                        f"{len(self._held)} of {PROMPTS * RUNS} runs stood at the gate after "
                        f"{deadline_s:.0f} s"
                    )
                self._held.append(self._server.accept()[0])
        finally:
            os.close(child)

    def _await_served(self, step: int) -> None:
        """Wait until the step's weights are proven and its last record, the trainer's, is written;
        step 0 has no training.
        """
        last = "trainer" if step else "synchronizer"

        def served() -> bool:
            path = self._run / "metrics.jsonl"
            return path.exists() and any(r.role == last and r.step == step for r in read(path))

        self._watch.until(served, STEP_S, f"weights of step {step}")

    def __exit__(self, *_: object) -> None:
        for run in self._held:
            run.close()
        self._server.close()
        self._watch.__exit__()
        self._end()
        self._log.close()

    def _end(self) -> None:
        """Ask it to stop, as Ctrl-C does; if it does not, kill what it started."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


def config(model: Path, folder: Path, gate: Path, steps: int) -> dict[str, Any]:
    """The race as a run of ours."""
    taskset = {
        "name": "sums",
        "path": "rft.taskset.generated_tasks:digit_sums",
        "split": "train",
        "workflow_args": {"socket": str(gate)},
    }
    return {
        "project": "bench",
        "name": "step",
        "checkpoint_root_dir": str(folder),
        "plugin_dirs": [str(harness.ROOT / "scripts" / "plugins")],
        "model": {
            "model_path": str(model),
            "max_prompt_tokens": 104,
            "max_response_tokens": MAX_TOKENS,
        },
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": RUNS,
            "kl_loss_fn": "none",
            "optimizer": {"lr": LR},
        },
        "buffer": {
            "batch_size": PROMPTS,
            "total_epochs": 100,
            "explorer_input": {
                "taskset": taskset,
                "default_workflow_type": "gated_workflow",
                "default_reward_fn_type": "exact_answer",
            },
        },
        "explorer": {
            "eval_interval": 0,
            "eval_on_startup": False,
            "eval_at_end": False,
            "rollout_model": {"engine_type": "vllm"},
        },
        "trainer": {"total_steps": steps, "save_hf_checkpoint": "never"},
        "monitor": {"monitor_type": "none"},
    }


def trl_spec(model: Path, steps: int) -> dict[str, Any]:
    """The race as TRL's peer script wants it."""
    return {
        "model": str(model),
        "rows": digit_sums(split="train"),
        "runs": RUNS,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "lr": LR,
        "threads": os.cpu_count(),
        "steps": steps,
    }


def step_vs_trl(quick: bool) -> harness.Result:
    """Seconds of TRL's step / seconds of ours, means of three in a row; at least 3."""
    harness.peer_python()
    rounds = 3 if quick else 6
    model = smollm2()
    measured = harness.probes()
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        ours = stack.enter_context(
            Ours(config(model, folder, folder / "gate", STEPS * rounds + 50), folder)
        )
        harness.note("rft is at the gate")
        trl = stack.enter_context(Trl(trl_spec(model, STEPS * rounds + 50), folder))
        harness.note("TRL is at the gate")
        mine, theirs = harness.in_turn(lambda: ours.step(STEPS), lambda: trl.step(STEPS), rounds)
        kept = range(STEPS + 1, STEPS * (rounds + 1) + 1)
        values = {(r.role, r.step): r.values for r in ours.records()}
        lengths = [values["explorer", k]["rollout/response_length/mean"] for k in kept]
        rewards = [values["explorer", k]["rollout/reward/mean"] for k in kept]
        split = {
            part: round(statistics.median(_split(values, k)[part] for k in kept), 3)
            for part in ("train", "sync")
        }
    reports = trl.reports[STEPS:]
    return harness.Result(
        "step_vs_trl",
        [harness.speed_ratio("step", mine, theirs, 3.0)],
        harness.summary(mine, response_length=_mean(lengths), reward=_mean(rewards), split_s=split),
        harness.summary(
            theirs,
            response_length=_mean([r["length"] for r in reports]),
            reward=_mean([r["reward"] for r in reports]),
        ),
        measured,
    )


def _split(values: dict[tuple[Role, int], dict[str, float]], step: int) -> dict[str, float]:
    return {
        "train": values["trainer", step]["time/train_s"],
        "sync": values["synchronizer", step]["sync/total_s"],
    }


def _mean(numbers: list[float]) -> float:
    return round(statistics.fmean(numbers), 3)
