"""What a user writes in a file is named in the configuration, checked against its `Args`, and used."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rft.algorithm.base import Denominators, LossInputs, StepInputs, StepRow
from rft.algorithm.catalog import algorithm_defaults
from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError, ConfigErrors, PluginError
from rft.monitor.monitor import ALARM, Monitor, check_available
from rft.monitor.read import read
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import TasksetSettings
from rft.types.metrics import MetricRecord
from rft.types.ports import GroupStats

Write = Callable[[str, str], str]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    """Writes a plugin file and gives the name under which a configuration finds one of its objects."""

    def write(code: str, name: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return f"{path}:{name}"

    return write


# ---------------------------------------------------------------- task sources

SOURCE = """
    from pydantic import BaseModel, ConfigDict
    from rft import TaskSource

    class Digits(TaskSource):
        class Args(BaseModel):
            model_config = ConfigDict(extra="forbid")
            size: int = 3

        def __init__(self, path, split, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            return {"prompt": f"Say {index}.", "response": str(index)}
"""


def test_a_task_source(file: Write) -> None:
    settings = TasksetSettings(
        name="t", path="digits", storage_type=file(SOURCE, "Digits"), workflow="w", args={"size": 4}
    )
    taskset = open_taskset(settings)
    assert [taskset.task(i).truth for i in range(len(taskset))] == ["0", "1", "2", "3"]
    assert taskset.fingerprint == open_taskset(settings).fingerprint


@pytest.mark.extra
def test_a_task_source_is_refused_with_its_reason(file: Write) -> None:
    name = file(SOURCE, "Digits")
    with pytest.raises(ConfigError, match=r"unknown argument 'sise'.*Did you mean size"):
        open_taskset(
            TasksetSettings(name="t", path="x", storage_type=name, workflow="w", args={"sise": 4})
        )
    with pytest.raises(PluginError, match="has no 'Digit'"):
        open_taskset(TasksetSettings(name="t", path="x", storage_type=name[:-1], workflow="w"))
    with pytest.raises(
        ConfigError, match="'fiel' is not known; use file, sql, python, reasoning_gym"
    ):
        open_taskset(TasksetSettings(name="t", path="x", storage_type="fiel", workflow="w"))
    with pytest.raises(ConfigError, match="has no __len__ and no __getitem__"):
        bare = file(
            "from rft import TaskSource\n\nclass Bare(TaskSource):\n    def __init__(self, "
            "**given): ...\n",
            "Bare",
        )
        open_taskset(TasksetSettings(name="t", path="x", storage_type=bare, workflow="w"))


# ---------------------------------------------------------------- monitors

TRACKER = """
    import json
    from rft import Tracker, TrackerArgs

    class LinesArgs(TrackerArgs):
        end: str

    class Lines(Tracker):
        Args = LinesArgs

        def __init__(self, settings, args):
            super().__init__(settings, args)
            self.file = open(settings.folder / "lines.jsonl", "a")

        def log(self, record):
            self.file.write(json.dumps([record.role, record.step, record.values]) + self.args.end)

        def table(self, name, step, rows):
            self.file.write(json.dumps([name, step, len(rows)]) + self.args.end)

        def close(self):
            self.file.close()
"""


async def test_a_tracker(file: Write, tmp_path: Path) -> None:
    name = file(TRACKER, "Lines")
    args = {"end": "\n"}
    check_available([name], {name: args})
    with pytest.raises(ConfigError, match="end: Field required"):
        check_available([name], {name: {}})
    monitor = Monitor(
        MonitorConfig(monitor_type=(name,), monitor_args={name: args}),
        TrackedRun(folder=tmp_path / "run"),
    )
    await monitor.log(MetricRecord(role="trainer", step=1, time=0.0, values={"loss": 0.5}))
    await monitor.samples("sums", 0, [{"prompt": "1+1?"}])
    await monitor.close()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "lines.jsonl").read_text().splitlines()
    ]
    assert lines == [["trainer", 1, {"loss": 0.5}], ["sums", 0, 1]]
    assert not [r for r in read(tmp_path / "run" / "metrics.jsonl") if ALARM in r.values]


def test_what_is_no_tracker_is_refused(file: Write) -> None:
    with pytest.raises(ConfigError, match=r"must be a class X\(Tracker\)"):
        check_available([file("def lines(): ...", "lines")])


# ---------------------------------------------------------------- algorithms

ALGORITHM = """
    from pydantic import Field
    from rft import Args, LossOutput, define_algorithm
    from rft.algorithm.aggregate import aggregate, masked_sum, valid

    class Scaled(Args):
        factor: float = Field(2.0, gt=0)

    def advantage(x, args):
        return [args.factor * row.reward for row in x.rows]

    advantage.Args = Scaled

    def loss(x, args):
        return LossOutput(loss=aggregate(-args.factor * valid(x.advantages * x.logprobs, x.mask), x))

    loss.Args = Scaled

    def kl(x, args):
        out = aggregate(args.factor * valid(x.logprobs - x.ref_logprobs, x.mask), x)
        return LossOutput(loss=out, sums={"kl_loss": out.detach() * x.denominators.tokens})

    kl.Args = Scaled

    def bonus(x, args):
        return LossOutput(loss=-args.factor * aggregate(x.entropy, x), sums={"entropy": masked_sum(x.entropy, x.mask)})

    bonus.Args = Scaled

    def last(x, args):
        return [len(x.rows) - 1]
"""
WHOLE = """
    from rft import define_algorithm

    HERE = __file__
    MINE = define_algorithm("mine", "Scaled rewards.", advantage_fn="grpo", policy_loss_fn=f"{HERE}:loss", repeat_times=3)
"""
PARTS = {
    "advantage_fn": "advantage",
    "policy_loss_fn": "loss",
    "kl_loss_fn": "kl",
    "entropy_loss_fn": "bonus",
    "sample_strategy": "last",
}


def inputs() -> LossInputs:
    numbers = torch.tensor([-1.0, -2.0])
    return LossInputs(
        logprobs=numbers.clone().requires_grad_(),
        old_logprobs=numbers,
        advantages=torch.tensor([1.0, 1.0]),
        mask=torch.tensor([True, True]),
        row=torch.tensor([0, 0]),
        num_rows=1,
        denominators=Denominators(2.0, 1.0, 8),
        ref_logprobs=torch.tensor([-1.5, -2.0]),
        entropy=torch.tensor([0.5, 1.5]),
    )


def test_every_part_of_an_algorithm(file: Write) -> None:
    path = file(ALGORITHM, "x").rpartition(":")[0]
    algorithm = build(AlgorithmSettings(**{kind: f"{path}:{name}" for kind, name in PARTS.items()}))
    rows = [
        StepRow(group="g", run=i, step=0, reward=float(i), logprobs=np.zeros(2, np.float32))
        for i in range(2)
    ]
    stats = GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.5**0.5)
    prepared = algorithm.prepare(StepInputs(rows=rows, groups={"g": stats}))
    assert prepared.selected == [1] and [a.tolist() for a in prepared.advantages] == [[2.0, 2.0]]
    assert algorithm.needs.kl_loss and algorithm.needs.entropy
    out = algorithm.loss(inputs())
    assert out.loss.item() == pytest.approx(2 * 1.5 + 2 * 0.25 - 2 * 1.0), (
        "loss 2 x 3/2, KL 2 x 0.5/2, bonus 2 x 2/2"
    )


@pytest.mark.parametrize("kind", [k for k in PARTS if k != "sample_strategy"])
def test_arguments_of_a_part_are_checked(file: Write, kind: str) -> None:
    path = file(ALGORITHM, "x").rpartition(":")[0]
    with pytest.raises(ConfigErrors) as e:
        build(AlgorithmSettings(**{kind: f"{path}:{PARTS[kind]}", f"{kind}_args": {"factr": 1.0}}))  # type: ignore[arg-type]
    assert e.value.errors[0].key == f"algorithm.{kind}_args.factr" and "Did you mean factor" in str(
        e.value
    )


def test_a_whole_algorithm(file: Write) -> None:
    name = file(WHOLE, "MINE")
    found = algorithm_defaults(name)
    assert (found.name, found.repeat_times, found.kl_loss_fn) == (
        "mine",
        3,
        "none",
    ) and found.policy_loss_fn.endswith("MINE.py:loss")
    with pytest.raises(ConfigError, match="write NAME = define_algorithm"):
        algorithm_defaults(f"{name.rpartition(':')[0]}:HERE")
