"""Alarms: planted faults are found within a stated number of steps, clean runs are silent, and each
is raised once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import alarm_rates
import pytest
from alarm_rates import PLANTED, Policy, clean, raised, records

from rft.config.load import load
from rft.errors import ConfigError, RunFailed
from rft.launch.coordinator import MonitorPart
from rft.monitor.alarm_rules import RULES
from rft.monitor.alarms import WINDOW, AlarmFinding, Alarms, History
from rft.monitor.read import read
from rft.monitor.settings import AlarmsConfig, MonitorConfig, TrackedRun
from rft.types.metrics import MetricRecord, Role
from tests.helpers.counted import Counted

SMALL = Policy(seed=1, steps=66, tasks=8, runs=4, length=40.0, begins=40)


def record(role: Role, step: int, **values: float) -> MetricRecord:
    return MetricRecord(
        role=role,
        step=step,
        time=float(step),
        values={k.replace("__", "/"): v for k, v in values.items()},
    )


def alarms(found: list[MetricRecord], **levels: str) -> list[AlarmFinding]:
    watch = Alarms({**AlarmsConfig().model_dump(), **levels}, RULES)
    return [f for r in found for f in watch.see(r)]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_in_time(fault: str) -> None:
    changes, alarm, allowed = PLANTED[fault]
    found = raised(records(replace(SMALL, **changes)))  # type: ignore[arg-type]
    assert not [f for f in found if f.step < 40]
    mine = [f for f in found if f.name == alarm]
    assert mine and mine[0].step - 39 <= allowed, found
    assert (
        mine[0].step >= mine[0].since
        and mine[0].saw
        and mine[0].hint
        and (alarm == "starving" or mine[0].rows)
    )


@pytest.mark.parametrize("number", [0, 3, 11])
def test_a_clean_run_is_silent(number: int) -> None:
    assert raised(records(replace(clean(number), steps=60, tasks=8, runs=4))) == []


def test_every_alarm_has_a_rule_and_a_key() -> None:
    assert set(RULES) == set(AlarmsConfig.model_fields)


def explored(step: int, reward: float, **more: float) -> MetricRecord:
    spread = {"rollout__reward__std": 0.4, "rollout__reward__min": 0.0, "rollout__reward__max": 1.0}
    return record("explorer", step, rollout__reward__mean=reward, **spread, **more)


def test_entropy_that_collapses_before_the_tasks_are_solved() -> None:
    def run(reward: float) -> list[AlarmFinding]:
        entropies = [1.0 + 0.01 * (s % 3) if s < 20 else 0.02 for s in range(1, 41)]
        return alarms([explored(s, reward, rollout__entropy=e) for s, e in enumerate(entropies, 1)])

    (found,) = run(0.4)
    assert (found.name, found.step) == (
        "entropy_collapse",
        24,
    ) and found.rows == "batch BETWEEN 23 AND 23"
    assert run(0.95) == [], "a policy that has solved its tasks is sure of itself"


def test_jumps_of_kl_and_mismatch() -> None:
    calm = [
        record(
            "trainer", s, actor__kl_loss=0.01 * s, mismatch__abs_diff_mean=0.004, mismatch__ess=0.99
        )
        for s in range(1, 21)
    ]
    assert alarms(calm) == []
    once = [
        *calm,
        record("trainer", 21, actor__kl_loss=9.0),
        record("trainer", 22, actor__kl_loss=0.2),
    ]
    assert alarms(once) == [], "one step is no jump"
    (kl,) = alarms([*calm, *(record("trainer", s, actor__kl_loss=9.0) for s in (21, 22, 23))])
    assert (kl.name, kl.step, kl.since, kl.rows) == (
        "kl_jump",
        22,
        21,
        "used_step BETWEEN 21 AND 22",
    )
    (ess,) = alarms([*calm, *(record("trainer", s, mismatch__ess=0.3) for s in (21, 22))])
    assert (ess.name, ess.subject) == ("mismatch_jump", "mismatch/ess")


def test_groups_without_spread_are_those_of_the_explorer() -> None:
    """The trainer's share, of the groups that operators leave, has the same name and took its
    place.
    """
    told = [
        r
        for s in range(1, 12)
        for r in (
            record("explorer", s, frac_reward_zero_std=0.99),
            record("trainer", s, frac_reward_zero_std=0.0),
        )
    ]
    assert [(f.name, f.step) for f in alarms(told)] == [("no_spread", 10)]


def test_who_starves() -> None:
    slow = [record("trainer", s, perf__step_s=20.0, time__wait_s=19.5) for s in range(1, 12)]
    assert [(f.name, f.subject, f.step) for f in alarms(slow)] == [("starving", "trainer", 10)]
    quick = [record("trainer", s, perf__step_s=0.2, time__wait_s=0.199) for s in range(1, 12)]
    assert alarms(quick) == [], "steps of less than a second say nothing"
    idle = [
        r
        for s in range(1, 12)
        for r in (
            record("trainer", s, perf__step_s=20.0),
            record("synchronizer", s, explorer__idle_ratio=0.99),
        )
    ]
    assert [(f.subject, f.step) for f in alarms(idle)] == [("explorer", 10)]


def test_a_judge_that_gives_everything_the_same() -> None:
    found = alarms(
        [
            explored(
                s,
                0.5,
                judge__q__calls=64.0 * s,
                rollout__q__std=0.3 if s < 20 else 0.001,
                rollout__q__mean=0.9,
            )
            for s in range(1, 31)
        ]
    )
    assert [(f.name, f.subject, f.step) for f in found] == [("judge", "q saturated", 24)]


def test_an_alarm_is_raised_once_and_off_is_off() -> None:
    jump = [record("trainer", s, actor__kl_loss=0.01 if s <= 20 else 9.0) for s in range(1, 60)]
    watch = Alarms(AlarmsConfig().model_dump(), RULES)
    assert len([f for r in jump for f in watch.see(r)]) == 1
    assert alarms(jump, kl_jump="off") == []


@pytest.mark.parametrize("fault", PLANTED)
async def test_a_resumed_run_raises_nothing_again(fault: str, tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(monitor=MonitorConfig(), tracked_run=TrackedRun(folder=tmp_path))
    told = list(records(replace(SMALL, **PLANTED[fault][0])))  # type: ignore[arg-type]
    first = MonitorPart(plan)
    for r in told:
        await first.log(r)
    await first.close()
    resumed = MonitorPart(plan)
    assert resumed._alarms._raised == first._alarms._raised != set()
    assert resumed._alarms._history.points == first._alarms._history.points
    await resumed.close()


def test_a_record_of_a_resumed_run_costs_the_same_however_many_there_are() -> None:
    """Lines of Python.  Rules read hundreds of points, some milliseconds for each record."""

    def lines(steps: int) -> float:
        told = [
            record(
                "explorer",
                s,
                rollout__reward__mean=s % 7,
                rollout__x__mean=s % 5,
                rollout__x__std=1.0,
            )
            for s in range(steps)
        ]
        with Counted() as counted:
            Alarms(AlarmsConfig().model_dump(), RULES).resume(told)
        return counted.lines / steps

    few = lines(100)
    many = lines(600)
    assert many < 1.25 * few, (few, many)


def test_a_series_of_a_run_that_goes_back_or_reports_late() -> None:
    history = History()
    for step, value in [(1, 1.0), (3, 3.0), (2, 2.0), (3, 3.5), (4, float("nan"))]:
        history.add(record("explorer", step, rollout__entropy=value))
    assert history.series("rollout/entropy") == [(1, 1.0), (2, 2.0), (3, 3.5)]
    for step in range(4, 41):
        history.add(record("explorer", step, rollout__entropy=0.0))
    history.add(record("explorer", 20, rollout__entropy=7.0))
    assert history.series("rollout/entropy")[-1] == (20, 7.0), "it went on from a checkpoint"
    for step in range(21, 2000):
        history.add(record("explorer", step, rollout__entropy=1.0))
    assert len(history.series("rollout/entropy")) <= 550 and history.series("rollout/entropy")[
        0
    ] == (
        1,
        1.0,
    )
    assert history.since("rollout/entropy", lambda v: v < 2) > 20 - WINDOW


async def test_stop_ends_the_run_after_it_was_told(tmp_path: Path) -> None:
    plan = SimpleNamespace(
        monitor=MonitorConfig(alarms=AlarmsConfig(kl_jump="stop")),
        tracked_run=TrackedRun(folder=tmp_path),
    )
    part = MonitorPart(plan)  # type: ignore[arg-type]
    for step in range(1, 22):
        await part.log(record("trainer", step, actor__kl_loss=0.01 if step < 21 else 9.0))
    with pytest.raises(
        RunFailed,
        match=r"actor/kl_loss jumped from 0.01 to 9 .*monitor.alarms.kl_jump is stop.*resumes it",
    ):
        await part.log(record("trainer", 22, actor__kl_loss=9.0))
    await part.close()
    last = read(tmp_path / "metrics.jsonl")[-1]
    assert (
        last.values == {"alarm/kl_jump": 1.0}
        and last.role == "trainer"
        and last.notes[0].startswith("alarm kl_jump: ")
    )
    assert (await part.records(22, wait=False))[1][-1] == last, "the screen shows it too"
    resumed = MonitorPart(plan)  # type: ignore[arg-type]
    await resumed.log(record("trainer", 23, actor__kl_loss=9.0))
    await resumed.close()
    lines = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text("{}\n" + lines)
    damaged = MonitorPart(plan)  # type: ignore[arg-type]
    await damaged.log(record("trainer", 24, actor__kl_loss=9.0))
    await damaged.close()


def test_levels_in_a_file(tmp_path: Path) -> None:
    """YAML takes a bare `off` for false."""
    file = tmp_path / "c.yaml"
    file.write_text("monitor: {alarms: {kl_jump: off, judge: Stop}}\n")
    given = load(file).monitor.alarms
    assert (given.kl_jump, given.judge, given.starving) == ("off", "stop", "warn")
    file.write_text("monitor: {alarms: {kl_jump: loud}}\n")
    with pytest.raises(ConfigError, match=r"monitor\.alarms\.kl_jump.*off.*warn.*stop"):
        load(file)


def test_the_text_names_rows_that_can_be_asked_for() -> None:
    found = AlarmFinding("kl_jump", "", "trainer", 22, 21, "it jumped", "Lower the rate.")
    assert found.text() == (
        "alarm kl_jump: it jumped (since step 21).  Look: rft buffer sample RUN --where 'used_step "
        "BETWEEN 21 AND 22'.  Lower the rate."
    )
    assert json.dumps(found.text()) and alarm_rates.EVERY > 0
