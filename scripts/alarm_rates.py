"""How often alarms are raised where nothing is wrong, and after how many steps where something is.

    python scripts/alarm_rates.py [--clean] [--planted] [--write]

`--clean`: real runs of the tiny model (GRPO in one process, several sizes and seeds), and simulated
ones, whose groups a scripted policy plays and whose metrics are made by the code that runs use.
`--planted`: simulated runs with a judge that can be exploited, a length that is paid, a broken chat
template, an engine with old weights, one text for every task, a judge that cannot be read; the
first four also in real runs, with the faults of planted_faults.py.  Neither: both.  `--write` puts
the tables into docs/measured/alarms.md.  Exit code 1 if a planted fault is missed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pages
from bench_harness import machine
from planted_faults import BROKEN_TEMPLATE, LAST_STEP, MOST_TOKENS

from rft.errors import ConfigError
from rft.explorer.rollout_metrics import rollout_metrics
from rft.monitor.alarm_rules import RULES
from rft.monitor.alarms import AlarmFinding, Alarms
from rft.monitor.read import read
from rft.monitor.settings import AlarmsConfig
from rft.testing import tiny
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version
from rft.types.metrics import MetricRecord
from rft.types.task import Task
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured" / "alarms.md"
EVERY = 10  # steps between two evaluations of a scripted policy


# ------------------------------------------------------------ scripted policies


@dataclass(frozen=True)
class Policy:
    """A scripted policy and its tasks.  Skill goes from `first` to `last` along a logistic curve;
    everything else follows from it.
    """

    seed: int
    steps: int = 120
    tasks: int = 16
    runs: int = 8
    first: float = 0.15
    last: float = 0.9
    length: float = 60.0  # tokens of an answer
    growth: float = 1.3  # of the length, from the first to the last step
    entropy: float = 1.2  # nats, at the first step
    judged: bool = False  # the reward has a part of a noisy judge beside the rule
    begins: int | None = None  # step from which the fault below is there
    fault: str = ""

    def skill(self, step: int) -> float:
        middle = self.steps / 2
        return float(
            self.first
            + (self.last - self.first) / (1 + np.exp(-(step - middle) / (self.steps / 12)))
        )

    def wrong(self, step: int) -> float:
        """How far a fault has come, 0 to 1: a policy needs about 20 steps to exploit something."""
        return 0.0 if self.begins is None else float(np.clip((step - self.begins + 1) / 20, 0, 1))


def records(p: Policy) -> Iterator[MetricRecord]:
    """What a run of `p` would write: explorer, trainer and evaluation."""
    draw = np.random.default_rng(p.seed)
    told = Counter[str]()
    hard = draw.normal(0, 1, 10_000)  # how hard each task is
    for step in range(1, p.steps + 1):
        if step % EVERY == 1:
            yield _evaluation(p, step, draw)
        groups = [_group(p, step, g, hard[draw.integers(len(hard))], draw) for g in range(p.tasks)]
        values = rollout_metrics(groups, 1.0)
        if p.judged:
            values |= _judge(p, step, told)
        yield MetricRecord(role="explorer", step=step, time=float(step), values=values)
        yield MetricRecord(
            role="trainer", step=step, time=float(step), values=_trained(p, step, draw)
        )


def _group(
    p: Policy, step: int, number: int, hard: float, draw: np.random.Generator
) -> PlayedGroup:
    skill = p.skill(step)
    wrong = p.wrong(step)
    if p.fault in ("exploit", "copies"):
        skill *= 1 - wrong
    right = 1 / (1 + np.exp(-(np.log(skill / (1 - skill + 1e-9) + 1e-9) + hard)))
    name = GroupId(1, 0, step - 1, number)
    task = Task(taskset="scripted", index=number, prompt="?", workflow="scripted", num_runs=p.runs)
    grown = p.growth ** (step / p.steps) * (1 + 3 * wrong if p.fault == "length" else 1)
    played = []
    for run in range(p.runs):
        size = max(1, int(draw.lognormal(np.log(p.length * grown), 0.35)))
        ok = float(draw.random() < right)
        if p.fault == "broken" and wrong:
            ok = 0.0
        parts, reward = _reward(p, ok, size, wrong, draw)
        text = draw.integers(0, 50_000, size)
        if p.fault == "copies" and draw.random() < wrong:
            text = np.arange(400, 400 + size)
        surprise = p.entropy * (1 - 0.85 * (step / p.steps) * (p.last > p.first))
        x = Experience(
            id=name.run(run),
            taskset="scripted",
            task_index=number,
            workflow="scripted",
            status="complete",
            finish_reason="stop",
            tokens=np.concatenate([[1], text]).astype(np.int32),
            loss_mask=np.concatenate([[False], np.ones(size, bool)]),
            logprobs=np.concatenate([[0.0], -draw.exponential(max(surprise, 1e-3), size)]).astype(
                np.float32
            ),
            version_spans=(VersionSpan(Version(1, step - 1), 1, size + 1),),
            reward=reward,
            reward_parts=parts,
        )
        played.append(PlayedRun((x,), reward, 0.1, 0.0, 1))
    return PlayedGroup(name, task, tuple(played), True, "")


def _reward(
    p: Policy, ok: float, size: int, wrong: float, draw: np.random.Generator
) -> tuple[dict[str, float], float]:
    if p.fault == "length":
        return {}, (1 - wrong) * ok + wrong * size / (4 * p.length)
    if not p.judged:
        return {}, ok
    fooled = wrong if p.fault == "exploit" else 0.0
    liked = float(
        np.clip((1 - fooled) * (0.6 * ok + 0.2) + fooled + draw.normal(0, 0.1 * (1 - fooled)), 0, 1)
    )
    return {"rule": ok, "quality": liked}, ok * (0.5 if p.fault != "exploit" else 0.2) + liked


def _judge(p: Policy, step: int, told: Counter[str]) -> dict[str, float]:
    asked = p.tasks * p.runs
    told["calls"] += asked
    told["unreadable"] += int(asked * (0.5 if p.fault == "unreadable" and p.wrong(step) else 0.01))
    return {
        f"judge/quality/{name}": float(told[name]) for name in ("calls", "unreadable", "unscored")
    }


def _trained(p: Policy, step: int, draw: np.random.Generator) -> dict[str, float]:
    stale = 40.0 if p.fault == "stale" and p.wrong(step) else 1.0
    return {
        "actor/kl_loss": float(0.002 * step * draw.lognormal(0, 0.3)),
        "actor/ppo_kl": float(draw.normal(0, 0.002)),
        "mismatch/abs_diff_mean": float(stale * 0.004 * draw.lognormal(0, 0.2)),
        "mismatch/ess": float(np.clip(draw.normal(0.97, 0.01), 0, 1)),
        "perf/step_s": 10.0,
        "time/wait_s": float(np.clip(draw.normal(6, 1.5), 0, 9.4)),
    }


def _evaluation(p: Policy, step: int, draw: np.random.Generator) -> MetricRecord:
    skill = p.skill(step) * (1 - p.wrong(step) if p.fault in ("exploit", "copies") else 1.0)
    means = draw.binomial(4, np.clip(draw.normal(skill, 0.2, 100), 0, 1)) / 4
    values = {
        "mean@4": means.mean(),
        "sem@4": means.std(ddof=1) / 10,
        "tasks": 100.0,
        "runs": 400.0,
        "failed": 0.0,
    }
    found = {f"eval/held_out/{k}": float(v) for k, v in values.items()}
    return MetricRecord(role="eval", step=step - 1, time=float(step), values=found)


def raised(source: Iterator[MetricRecord]) -> list[AlarmFinding]:
    """All alarms of a run, in order."""
    watch = Alarms(AlarmsConfig().model_dump(), RULES)
    return [f for r in source for f in watch.see(r)]


def clean(number: int) -> Policy:
    """Clean runs of every kind: sizes, noise, learning or not, judged or not, easy and hard tasks."""
    draw = np.random.default_rng(7000 + number)
    first = float(draw.choice([0.05, 0.15, 0.4, 0.7]))
    return Policy(
        seed=number,
        steps=int(draw.choice([60, 100])),
        tasks=int(draw.choice([8, 16])),
        runs=int(draw.choice([4, 8])),
        first=first,
        last=float(draw.choice([first + 0.02, 0.75, 0.98])),
        length=float(draw.choice([4, 30, 120])),
        growth=float(draw.choice([0.8, 1.3, 2.0])),
        entropy=float(draw.choice([0.4, 1.2, 3.0])),
        judged=bool(draw.random() < 0.5),
    )


# fault → its policy, the alarm, steps allowed from its beginning
PLANTED: dict[str, tuple[dict[str, object], str, int]] = {
    "an exploitable judge": ({"fault": "exploit", "judged": True}, "reward_divergence", 30),
    "a length that is paid": ({"fault": "length"}, "length_drift", 20),
    "a broken chat template": ({"fault": "broken"}, "no_spread", 15),
    "an engine with old weights": ({"fault": "stale"}, "mismatch_jump", 3),
    "one text for every task": ({"fault": "copies", "judged": True}, "identical_answers", 20),
    "a judge that cannot be read": ({"fault": "unreadable", "judged": True}, "judge", 5),
}


def planted(fault: str, seed: int) -> tuple[int | None, str]:
    """(steps from the beginning of a fault to its alarm, None where it was missed; other alarms
    before it began).
    """
    changes, alarm, _ = PLANTED[fault]
    policy = replace(Policy(seed=seed, begins=50), **changes)  # type: ignore[arg-type]
    found = raised(records(policy))
    mine = [f.step - 49 for f in found if f.name == alarm and f.step >= 50]
    return (mine[0] if mine else None), ", ".join(f.name for f in found if f.step < 50)


# ------------------------------------------------------------ real runs of the tiny model

CLEAN_RUNS = (  # overrides of examples/tiny/config.yaml, taken in turn with another seed each
    ("trainer.total_steps=80", "explorer.eval_interval=20"),
    ("trainer.total_steps=60", "buffer.batch_size=32", "explorer.eval_interval=20"),
    (
        "trainer.total_steps=60",
        "algorithm.repeat_times=16",
        "algorithm.optimizer.lr=2e-3",
        "explorer.eval_interval=20",
    ),
    ("trainer.total_steps=80", "synchronizer.sync_offset=1", "explorer.eval_interval=20"),
)


def train(root: Path, name: str, model: Path, seed: int, overrides: tuple[str, ...]) -> Path:
    """One run in this process; its folder."""
    import rft

    given = (
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        f"seed={seed}",
        *overrides,
    )
    return rft.run(ROOT / "examples" / "tiny" / "config.yaml", *given, in_process=True).run_dir


def clean_runs(count: int, root: Path) -> list[tuple[str, list[AlarmFinding]]]:
    """Alarms of `count` clean runs of the tiny model."""
    base = tiny.make(root / "model")
    found = []
    for i in range(count):
        run = train(root, f"clean{i}", base, 100 + i, CLEAN_RUNS[i % len(CLEAN_RUNS)])
        found.append((run.name, raised(iter(read(run / "metrics.jsonl")))))
        print(f"{run.name}: {[f.text() for f in found[-1][1]] or 'silent'}", flush=True)
        shutil.rmtree(run / "checkpoints")
    return found


def planted_runs(root: Path) -> dict[str, str]:
    """Of each fault that was planted in a real run: after how many steps of it the alarm came;
    "missed" where none did.
    """
    base = tiny.make(root / "base")
    mine = ROOT / "scripts" / "planted_faults.py"
    reward = f"buffer.explorer_input.taskset.default_reward_fn_type={mine}:"
    seldom = ("explorer.eval_on_startup=false", "explorer.eval_interval=1000")
    quick = ("buffer.batch_size=8", *seldom)

    def weights(name: str, *overrides: str) -> Path:
        run = train(root, name, base, 100, overrides)
        return max(
            (run / "checkpoints").glob("global_step_*/huggingface"),
            key=lambda p: int(p.parent.name.rpartition("_")[2]),
        )

    def after(name: str, alarm: str, begins: int, model: Path, *overrides: str) -> str:
        alarms = raised(iter(read(train(root, name, model, 5, overrides) / "metrics.jsonl")))
        print(f"{name}: {[f.text() for f in alarms]}", flush=True)
        return next((str(f.step - begins + 1) for f in alarms if f.name == alarm), "missed")

    copier = weights("copier", *CLEAN_RUNS[0])
    brief = weights(
        "brief",
        f"{reward}short_answers",
        "model.max_response_tokens=40",
        "trainer.total_steps=20",
        *quick,
    )
    judged = (f"{reward}big_digits", "trainer.total_steps=60", "explorer.eval_interval=5")
    paid = (
        f"{reward}long_answers",
        f"model.max_response_tokens={MOST_TOKENS}",
        "trainer.total_steps=20",
        *quick,
    )
    stale = (
        f"explorer.rollout_model.engine_type={mine}:OldWeights",
        f"trainer.total_steps={LAST_STEP + 6}",
        *seldom,
    )
    found = {
        "an exploitable judge": after("judged", "reward_divergence", 1, copier, *judged),
        "a length that is paid": after("paid", "length_drift", 1, brief, *paid),
        "an engine with old weights": after("stale", "mismatch_jump", LAST_STEP + 2, base, *stale),
    }
    template = root / "broken.jinja"
    template.write_text(BROKEN_TEMPLATE)
    try:
        found["a broken chat template"] = after(
            "template",
            "no_spread",
            1,
            copier,
            f"model.custom_chat_template={template}",
            *judged[1:],
        )
    except ConfigError as e:
        found["a broken chat template"] = "refused before the first"
        print(f"template: {e}", flush=True)
    return found


# ------------------------------------------------------------ the table


def clean_table(simulated: int, real: list[tuple[str, list[AlarmFinding]]]) -> str:
    """Markdown."""
    falsely = Counter(
        name for i in range(simulated) for name in {f.name for f in raised(records(clean(i)))}
    )
    really = Counter(name for _, found in real for name in {f.name for f in found})
    lines = [
        f"| Alarm | Clean simulated runs with it, of {simulated} | Clean trained runs with it, of "
        f"{len(real)} |",
        "|---|---|---|",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"| `{name}` | {falsely[name]} | {really[name]} |"
                for name in AlarmsConfig.model_fields
            ),
        ]
    )


def planted_table(steps: dict[str, str]) -> tuple[str, bool]:
    """Markdown, and whether every planted fault was found in time."""
    lines = [
        "| Planted | Alarm | Allowed, steps | Simulated, 10 seeds: steps to the alarm | Trained: "
        "steps to the alarm |",
        "|---|---|---|---|---|",
    ]
    good = True
    for fault, (_, alarm, allowed) in PLANTED.items():
        took = [planted(fault, 900 + seed)[0] for seed in range(10)]
        really = steps.get(fault, "")
        good &= all(t is not None and t <= allowed for t in took) and (
            not really.isdecimal() or int(really) <= allowed
        )
        good &= really != "missed"
        known = [t for t in took if t is not None]
        missed = f", missed {took.count(None)}" if None in took else ""
        told = f"{min(known, default=0)} to {max(known, default=0)}{missed}"
        lines.append(f"| {fault} | `{alarm}` | {allowed} | {told} | {really} |")
    return "\n".join(lines), good


def main(say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--trained", type=int, default=12, help="clean runs that are trained")
    parser.add_argument("--simulated", type=int, default=100, help="clean runs that are not")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    both = asked.clean == asked.planted
    good = True
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="alarms-") as root:
        if both or asked.clean:
            texts["clean"] = clean_table(asked.simulated, clean_runs(asked.trained, Path(root)))
        if both or asked.planted:
            texts["planted"], good = planted_table(planted_runs(Path(root)))
    for name, text in texts.items():
        head = (
            f"Written by `python scripts/alarm_rates.py --{name} --write` on {machine()}, "
            f"{datetime.date.today()}."
        )
        say(f"{head}\n\n{text}\n")
        if asked.write:
            pages.put(PAGE, f"<!-- {name} -->", "<!-- end -->", f"{head}\n\n{text}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
