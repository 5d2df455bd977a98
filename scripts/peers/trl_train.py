"""TRL's GRPOTrainer on recorded rollouts, one optimizer step whenever it is told to; runs in the
peers' environment.

    python trl_train.py SPEC.json      with {model, rollouts, lr, threads, steps, micro_batch, per_group, folder}

Generation is stubbed by `rollout_func`, TRL's own hook for it; everything after it is TRL's:
scoring, advantages, padding, loss, backward, clipping, AdamW.  Two numbers are handed to its loss,
so that it is the loss that rft computes: the recorded log-probs as those of the old policy, and the
tokens of the whole step as denominator, also where generation batches are smaller than the step.

Protocol on the pipes: that of trl_side.py; after each step it prints {"step", "seconds", "loss",
"grad_norm", "peak_bytes"}.  The log-probs of the first step are written to logprobs.safetensors in
its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_side import SPEC, OneStepAtATime, race, say, trainer

import torch  # isort: skip  # after trl_side, which says how many threads it has
from safetensors.torch import load_file, save_file  # isort: skip
from trl import GRPOTrainer  # isort: skip


class Rollouts:
    """The recorded rows; prompt "g" stands for group g."""

    def __init__(self, path: str) -> None:
        data = {name: tensor.tolist() for name, tensor in load_file(path).items()}
        self.runs = data["shape"][1]
        self.groups = data["shape"][0]
        self.rows: list[dict[str, Any]] = []
        at = 0
        for length, prompt, reward in zip(
            data["lengths"], data["prompts"], data["rewards"], strict=True
        ):
            ids = data["tokens"][at : at + length]
            logps = data["logprobs"][at : at + length]
            self.rows.append(
                {
                    "prompt": ids[:prompt],
                    "completion": ids[prompt:],
                    "logprobs": logps[prompt:],
                    "reward": reward,
                }
            )
            at += length
        self.trained = sum(len(row["completion"]) for row in self.rows)
        self.number = {tuple(row["completion"]): i for i, row in enumerate(self.rows)}

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's rollout_func: each prompt stands there once for each of its runs."""
        seen: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            run = seen[prompt] = seen.get(prompt, -1) + 1
            rows.append(self.rows[int(prompt) * self.runs + run])
        return {
            "prompt_ids": [row["prompt"] for row in rows],
            "completion_ids": [row["completion"] for row in rows],
            "logprobs": [row["logprobs"] for row in rows],
            "recorded": [row["reward"] for row in rows],
        }


def recorded_reward(completions: list[str], recorded: list[float], **_: Any) -> list[float]:
    return recorded


class Trainer(GRPOTrainer):
    """With the recorded old log-probs and the step's denominator; notes what its loss was."""

    rollouts: Rollouts
    loss = 0.0
    logps: dict[str, torch.Tensor] | None = {}  # noqa: RUF012  # of the first step, by row

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]}
        each = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        inputs["num_items_in_batch"] = torch.tensor(self.rollouts.trained * each)
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        self.loss += loss.item()
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **more: Any
    ) -> Any:
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, *args, **more
        )
        if self.logps is not None:
            keep = args[0]
            for ids, mask, logps in zip(
                input_ids[:, -keep:], attention_mask[:, -keep:], found[0].detach(), strict=True
            ):
                self.logps[str(self.rollouts.number[tuple(ids[mask.bool()].tolist())])] = logps[
                    mask.bool()
                ].clone()
        return found


class RecordedStep(OneStepAtATime):
    """The step holds scoring and the update."""

    trainer: Trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_begin(args, state, control, **more)
        self.trainer.loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_end(args, state, control, **more)
        if self.trainer.logps:
            save_file(self.trainer.logps, str(Path(SPEC["folder"]) / "logprobs.safetensors"))
            self.trainer.logps = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "grad_norm" in logs:
            peak = next(
                int(line.split()[1])
                for line in Path("/proc/self/status").read_text().splitlines()
                if "VmHWM" in line
            )
            say(
                step=state.global_step,
                seconds=self.seconds,
                loss=self.trainer.loss,
                grad_norm=logs["grad_norm"],
                peak_bytes=peak * 1024,
            )


def main() -> None:
    rollouts = Rollouts(SPEC["rollouts"])
    count = len(rollouts.rows)
    micro = SPEC["micro_batch"]
    # rows that are padded to one length
    together = max(rollouts.runs, micro) if SPEC["per_group"] else count
    settings = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": count // micro,
        "steps_per_generation": together // micro,
        "num_generations": rollouts.runs,
        "max_completion_length": 1024,
        "shuffle_dataset": False,
    }
    rows = [{"prompt": str(g)} for g in range(rollouts.groups)]
    waiter = RecordedStep()
    made = trainer(rows, waiter, recorded_reward, settings, Trainer, rollout_func=rollouts)
    made.rollouts = rollouts
    waiter.trainer = made
    race(made)


if __name__ == "__main__":
    main()
