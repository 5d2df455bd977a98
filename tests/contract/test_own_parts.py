"""A tracker, a task source, an advantage and a policy loss in a user's file, named in the YAML
alone, keep the contracts of ours.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rft.algorithm.base import Denominators, LossInputs, StepInputs, StepRow
from rft.algorithm.composition import build
from rft.config.plan import Plan
from rft.monitor.monitor import ALARM, Monitor
from rft.monitor.read import read
from rft.preflight.check import check
from rft.preflight.check_report import Report
from rft.taskset.open_source import open_taskset
from rft.types.metrics import MetricRecord
from rft.types.ports import GroupStats

PARTS = """
import json

from pydantic import BaseModel

from rft import TaskSource, Tracker, TrackerArgs
from rft.algorithm.aggregate import aggregate
from rft.algorithm.base import Advantages, LossOutput


class LinesArgs(TrackerArgs):
    file: str


class Lines(Tracker):
    Args = LinesArgs

    def __init__(self, settings, args):
        super().__init__(settings, args)
        self.file = open(settings.folder / args.file, "a")

    def log(self, record):
        self.file.write(json.dumps([record.role, record.step, record.values]) + "\\n")

    def table(self, name, step, rows):
        self.file.write(json.dumps([name, step, len(rows)]) + "\\n")

    def close(self):
        self.file.close()


class Digits(TaskSource):
    class Args(BaseModel, extra="forbid"):
        size: int

    def __init__(self, path, split, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"prompt": f"Say {index}.", "response": str(index)}


class CentredArgs(BaseModel, extra="forbid"):
    scale: float = 1.0


def centred(x, args):
    return Advantages(values=[args.scale * (r.rewards.sum() - x.stats(r).mean) * (r.logprobs * 0 + 1) for r in x.rows])


centred.Args = CentredArgs


class PlainArgs(BaseModel, extra="forbid"):
    weight: float


def plain(x, args):
    return LossOutput(loss=-args.weight * aggregate(x.advantages * x.logprobs, x))


plain.Args = PlainArgs
"""
CONFIG = """
checkpoint_root_dir: {root}
model: {{model_path: {model}, max_prompt_tokens: 63, max_response_tokens: 1}}
algorithm:
  repeat_times: 2
  advantage_fn: "{root}/parts.py:centred"
  advantage_fn_args: {{scale: 2.0}}
  policy_loss_fn: "{root}/parts.py:plain"
  policy_loss_fn_args: {{weight: 3.0}}
  kl_loss_fn: none
  entropy_loss_fn: none
buffer:
  batch_size: 2
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: exact_answer
    taskset: {{name: digits, path: digits, storage_type: "{root}/parts.py:Digits", args: {{size: 4}}}}
explorer: {{rollout_model: {{engine_type: transformers}}}}
trainer: {{total_steps: 2}}
monitor: {{monitor_type: "{root}/parts.py:Lines", monitor_args: {{file: lines.jsonl}}}}
"""


@pytest.fixture(scope="session")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    (root / "parts.py").write_text(PARTS)
    path = root / "config.yaml"
    path.write_text(CONFIG.format(root=root, model=tiny_model))
    return path


@pytest.fixture(scope="session")
def plan(config: Path) -> Plan:
    report = check(config)
    assert report.ok and report.plan is not None, report.errors
    return report.plan


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (
            "algorithm.advantage_fn_args={scal: 1}",
            "algorithm.advantage_fn_args.scal",
            "Did you mean scale?",
        ),
        ("algorithm.policy_loss_fn_args={}", "algorithm.policy_loss_fn_args.weight", "required"),
        (
            "buffer.explorer_input.taskset.args={sise: 4}",
            "buffer.explorer_input.taskset.args",
            "Did you mean size?",
        ),
        ("monitor.monitor_type=[no_tracker]", "monitor.monitor_type", "no_tracker"),
    ],
)
def test_what_is_written_wrong_is_refused_by_its_key(
    config: Path, change: str, key: str, message: str
) -> None:
    report: Report = check(config, [change])
    assert [e for e in report.errors if e.key == key and message in e.message], report.errors


async def test_tracker_gets_everything(plan: Plan, tmp_path: Path) -> None:
    monitor = Monitor(plan.monitor, replace(plan.tracked_run, folder=tmp_path))
    await monitor.log(MetricRecord(role="trainer", step=1, time=0.0, values={"actor/loss": 0.5}))
    await monitor.samples("sums", 0, [{"prompt": "1+1?"}])
    await monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == [["trainer", 1, {"actor/loss": 0.5}], ["sums", 0, 1]]
    assert not [r for r in read(tmp_path / "metrics.jsonl") if ALARM in r.values]


def test_task_source_gives_the_same_rows_whenever_it_is_asked(plan: Plan) -> None:
    (settings,) = plan.explorer.tasksets
    first = open_taskset(settings)
    again = open_taskset(settings)
    assert [first.task(i).truth for i in (3, 0, 1, 2)] == ["3", "0", "1", "2"] and len(first) == 4
    assert [first.task(i) for i in range(4)] == [again.task(i) for i in range(4)]
    assert first.fingerprint == again.fingerprint


def test_parts_of_the_algorithm_give_the_same_gradient_in_every_cut(plan: Plan) -> None:
    algorithm = build(plan.learner.algorithm)
    rows = [
        StepRow(
            group="g", run=i, step=0, reward=float(i), logprobs=np.full(2 + i, -1.0, np.float32)
        )
        for i in range(2)
    ]
    stats = GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.5**0.5)
    prepared = algorithm.prepare(StepInputs(rows=rows, groups={"g": stats}))
    assert [a.tolist() for a in prepared.advantages] == [[-1.0] * 2, [1.0] * 3]

    def gradient(*cuts: list[int]) -> list[list[float]]:
        weights = [torch.full((r.length,), -1.0, requires_grad=True) for r in rows]
        for cut in cuts:
            inputs = LossInputs(
                logprobs=torch.cat([weights[i] for i in cut]),
                old_logprobs=torch.cat([weights[i].detach() for i in cut]),
                advantages=torch.cat(
                    [torch.tensor(prepared.advantages[i], dtype=torch.float32) for i in cut]
                ),
                mask=torch.ones(sum(rows[i].length for i in cut), dtype=torch.bool),
                row=torch.cat([torch.full((rows[i].length,), n) for n, i in enumerate(cut)]),
                num_rows=len(cut),
                denominators=Denominators(tokens=5, rows=2, max_response_tokens=4),
            )
            algorithm.loss(inputs).loss.backward()
        return [w.grad.tolist() for w in weights if w.grad is not None]

    assert (
        gradient([0, 1])
        == gradient([0], [1])
        == [[pytest.approx(3 / 5)] * 2, [pytest.approx(-3 / 5)] * 3]
    )
