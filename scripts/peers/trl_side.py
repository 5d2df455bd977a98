"""What the scripts that drive TRL share: the pipes, a trainer's settings, one optimizer step
whenever it is told to.

Runs in the peers' environment.  Importing it reads SPEC.json, the script's argument, with at least
{model, lr, threads, steps, folder}, and takes stdout for the protocol: it prints {"ready": true,
"versions"} once everything is loaded; each line on stdin makes one step; it ends when stdin closes.
 Invariant: all scripts' steps have the same loss, optimizer and schedule.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
os.environ["OMP_NUM_THREADS"] = str(SPEC["threads"])

import torch  # noqa: E402  # reads OMP_NUM_THREADS when it is imported
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

OUT = sys.stdout
sys.stdout = sys.stderr  # whatever the libraries print is not part of the protocol


def say(**message: Any) -> None:
    print(json.dumps(message), file=OUT, flush=True)


class OneStepAtATime(TrainerCallback):
    """Waits for a line before each optimizer step and takes its time; a subclass reports it in
    `on_log`.
    """

    began = seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            say(
                ready=True,
                versions={
                    name: importlib.metadata.version(name)
                    for name in ("trl", "torch", "transformers")
                },
            )
        if not sys.stdin.readline():
            raise KeyboardInterrupt
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.monotonic() - self.began


class WholeStep(OneStepAtATime):
    """The step holds generation, scoring (with its tools) and the update."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            say(
                step=state.global_step,
                seconds=self.seconds,
                reward=logs["reward"],
                length=logs["completions/mean_length"],
            )


def trainer(
    rows: list[dict[str, Any]],
    waiter: OneStepAtATime,
    reward: Any,
    settings: dict[str, Any],
    kind: Any = GRPOTrainer,
    **more: Any,
) -> Any:
    """A GRPOTrainer (or `kind`) in float32 without dropout, KL or decay of the rate; `settings` are
    further ones of GRPOConfig.
    """
    torch.set_num_threads(SPEC["threads"])
    config = GRPOConfig(
        output_dir=SPEC["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # faster, and the memory is there
        learning_rate=SPEC["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the step, as rft's token-mean
        num_iterations=1,
        max_steps=SPEC["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    return kind(
        model=AutoModelForCausalLM.from_pretrained(SPEC["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(SPEC["model"], padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[waiter],
        **more,
    )


def race(made: Any) -> None:
    """Train until stdin closes."""
    with contextlib.suppress(KeyboardInterrupt):
        made.train()


def whole_steps(reward: Any) -> None:
    """The race of whole steps; SPEC has also {rows, runs, prompts, max_tokens}.  `reward` is told
    the number of each row as `row`.
    """
    rows = [
        {"prompt": [{"role": "user", "content": r["prompt"]}], "response": r["response"], "row": i}
        for i, r in enumerate(SPEC["rows"])
    ]
    settings = {
        "per_device_train_batch_size": SPEC["prompts"] * SPEC["runs"],
        "num_generations": SPEC["runs"],
        "max_completion_length": SPEC["max_tokens"],
    }
    race(trainer(rows, WholeStep(), reward, settings))
