"""TRL's GRPOTrainer on the race's model and prompts, one optimizer step whenever it is told to; runs in the peers' environment.

    python trl_step.py SPEC.json      with {model, rows, runs, prompts, max_tokens, lr, threads, steps, folder}

Protocol on the pipes: it prints {"ready": true} once everything is loaded; for each line on stdin it does one step and prints
{"step", "seconds", "reward", "length"}; it ends when stdin closes.  Generation is TRL's own path through transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
NUMBER = re.compile(r"-?\d+")


def say(**message: Any) -> None:
    print(json.dumps(message), file=OUT, flush=True)


def last_number(completions: list[list[dict[str, str]]], response: list[str], **_: Any) -> list[float]:
    """1 where the last number of the answer is the truth."""
    found = [NUMBER.findall(c[-1]["content"]) for c in completions]
    return [float(bool(n) and n[-1] == truth) for n, truth in zip(found, response, strict=True)]


class OneStepAtATime(TrainerCallback):
    """Waits for a line before each optimizer step and reports after it.  The step holds generation, scoring and the update."""

    began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            say(ready=True)
        if not sys.stdin.readline():
            raise KeyboardInterrupt
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = time.monotonic() - self.began

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            say(step=state.global_step, seconds=self.seconds, reward=logs["reward"], length=logs["completions/mean_length"])


def main() -> None:
    torch.set_num_threads(SPEC["threads"])
    rows = [{"prompt": [{"role": "user", "content": r["prompt"]}], "response": r["response"]} for r in SPEC["rows"]]
    config = GRPOConfig(
        output_dir=SPEC["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # faster, and the memory is there
        learning_rate=SPEC["lr"],
        lr_scheduler_type="constant",
        per_device_train_batch_size=SPEC["prompts"] * SPEC["runs"],
        num_generations=SPEC["runs"],
        max_completion_length=SPEC["max_tokens"],
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
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(SPEC["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(SPEC["model"], padding_side="left"),
        reward_funcs=last_number,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[OneStepAtATime()],
    )
    with contextlib.suppress(KeyboardInterrupt):  # stdin closed: the race is over
        trainer.train()


if __name__ == "__main__":
    main()
