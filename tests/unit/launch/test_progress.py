"""Progress on a terminal and without one."""

from __future__ import annotations

import asyncio
import io
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from rft.launch import progress
from rft.launch.progress import STARTING, Progress, duration, step_facts, summary
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.worker.teller import LOOK_S, Teller
from rft.worker.waiting import Activity, works
from tests.helpers.asked_ledger import EVIL

VALUES = {
    "experience/reward/mean": 0.53125,
    "experience/response_length/mean": 12.4,
    "experience/staleness/max": 1.0,
    "experience/response_tokens": 400.0,
    "perf/step_s": 8.0,
    "train/finite": 1.0,
}


def record(step: int, role: str = "trainer", **values: float) -> MetricRecord:
    return MetricRecord(role=role, step=step, time=0.0, values=values)  # type: ignore[arg-type]


def shown(terminal: bool, total: int | None, *records: MetricRecord) -> str:
    out = io.StringIO()
    with Progress(
        Path("/runs/a"),
        Teller(),
        total_steps=total,
        notes=("device cpu",),
        console=Console(file=out, force_terminal=terminal, width=160),
    ) as p:
        for r in records:
            p.update(r)
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    """N20: metrics have the names here that `--best`, `plot` and metrics.jsonl take."""
    text = shown(
        False,
        15,
        record(0, "explorer", **{"eval/sums/mean@8": 0.28, "eval/sums/failed": 0.0}),
        record(3, **VALUES),
    )
    assert text.splitlines() == [
        "run   /runs/a  (15 steps)",
        "watch rft status /runs/a, or rft view /runs/a",
        "note  device cpu",
        "eval  step 0: eval/sums/mean@8 0.280",
        "step 3/15  reward 0.531  length 12  staleness 1  tok/s 50  s/step 8.0  ETA 1m36s",
    ]


def test_control_characters_of_a_note_are_escapes() -> None:
    note = MetricRecord(role="explorer", step=1, time=0.0, values={}, notes=(EVIL,))
    text = shown(False, 15, note)
    assert "a\\x1b[31mred" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_an_alarm_of_the_trainer_is_no_step() -> None:
    """It was shown as a step of 0 seconds, which halved the time that was left."""
    alarm = MetricRecord(
        role="trainer",
        step=3,
        time=0.0,
        values={"alarm/kl_jump": 1.0},
        notes=("alarm kl_jump: too large",),
    )
    steps = shown(False, 15, record(3, **VALUES), alarm, record(4, **VALUES)).splitlines()[3:]
    assert (
        steps[1] == "note  trainer 3: alarm kl_jump: too large"
        and steps[2].endswith("s/step 8.0  ETA 1m28s")
        and len(steps) == 3
    )


class Timed(io.StringIO):
    """A clock, and lines with the second in which each was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines += [(self.now, line) for line in text.splitlines() if line.startswith("wait")]
        return super().write(text)


def waited(
    seconds: float,
    *records: tuple[float, MetricRecord],
    served: bool = False,
    terminal: bool = False,
) -> Timed:
    """What is printed in so many seconds in which 32 questions wait for a judge; `records` come at
    their time.
    """
    out = Timed()
    teller = Teller(clock=lambda: out.now)
    console = Console(file=out, force_terminal=terminal, width=160)
    coming = deque(records)

    def pass_until(time: float) -> None:
        while coming and coming[0][0] <= time:
            out.now, r = coming.popleft()
            p.update(r)
        out.now = time

    def look() -> list[Activity]:
        pass_until(out.now + LOOK_S)
        return [Activity("judge [/bold]", "question", False, 32, out.now)]

    teller.look = look
    with Progress(Path("/runs/a"), teller, total_steps=15, console=console, served=served) as p:
        while (due := out.now + max(0.0, teller.due_s())) < seconds:
            pass_until(due)
            teller.tell()
    return out


def test_a_wait_is_said_every_fifteen_seconds() -> None:
    """N2: it was said only after a group was stored, so that nothing was said of a judge that did
    not answer.
    """
    found = waited(110.0).lines
    assert [at for at, _ in found] == [15.0, 30.0, 45.0, 60.0, 75.0, 90.0, 105.0]
    assert found[1] == (30.0, "wait  32 questions wait for judge [/bold], 30 s")


def test_a_wait_is_not_said_while_steps_are() -> None:
    found = waited(
        60.0, (14.0, record(1, **VALUES)), (25.0, record(2, **VALUES)), (53.0, record(3, **VALUES))
    )
    assert [at for at, _ in found.lines] == [40.0]


def test_a_service_says_a_long_wait_ever_later() -> None:
    found = waited(1000.0, (500.0, record(1, **VALUES)), served=True)
    assert [at for at, _ in found.lines] == [
        15.0,
        45.0,
        105.0,
        225.0,
        465.0,
        515.0,
        545.0,
        605.0,
        725.0,
        965.0,
    ]
    assert "step 1/15  reward" in found.getvalue() and "ETA" not in found.getvalue(), (
        "N21: of clients who are not there"
    )


def test_a_wait_is_in_the_bar_on_a_terminal() -> None:
    found = waited(20.0, terminal=True)
    assert found.lines == [] and "32 questions wait for judge [/bold], 15 s" in found.getvalue()


def test_a_blocked_event_loop_delays_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """N2: one process that computes could not answer, and nothing was said."""
    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    teller = Teller()

    async def look() -> list[Activity]:
        return [Activity("all parts", "", False, 1, 0.0)]

    async def play() -> list[list[str]]:
        async with Progress(Path("/runs/a"), teller, total_steps=1).telling(look):
            asked = await asyncio.to_thread(teller.look)
            with works("starting trainer-0"), ThreadPoolExecutor() as thread:
                blocked = thread.submit(teller.look).result()
        return [[a.text for a in found] for found in (asked, blocked, teller.look())]

    assert asyncio.run(play()) == [["all parts"], ["starting trainer-0"], []]


def test_what_is_there_is_told_while_the_run_starts() -> None:
    out = io.StringIO()
    log = logging.getLogger("rft.launch.ray_runtime")
    log.setLevel("INFO")
    with Progress(
        Path("/runs/a"), Teller(), total_steps=2, console=Console(file=out, width=160)
    ) as p:
        log.info("%s is up (pid %d)", "engine-0", 7, extra=STARTING)
        log.info("something else")
        p.update(record(0, "explorer"))
    log.info("%s is up (pid %d)", "engine-0", 8, extra=STARTING)
    assert out.getvalue().splitlines()[2:] == ["start engine-0 is up (pid 7), 0s"]


def test_a_bar_on_a_terminal() -> None:
    text = shown(True, 15, record(0, "synchronizer"), record(3, **VALUES))
    assert "3/15" in text and "reward 0.531" in text and "ETA" in text


def test_without_a_number_of_steps_there_is_no_eta() -> None:
    assert "ETA" not in shown(False, None, record(3, **VALUES)) and "step 3  reward" in shown(
        False, None, record(3, **VALUES)
    )


def test_a_skipped_step_is_named() -> None:
    assert "SKIPPED" in step_facts({**VALUES, "train/finite": 0.0}, 1.0)


def test_markup_and_secrets_in_names_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[red]x" in shown(False, 1, record(0, "eval", **{"eval/[red]x/mean@1": 1.0}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_commands_can_be_pasted_where_a_folder_has_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(tmp_path / "a b", Version(1, 2), 3.0, None)
    assert f"next  rft status '{tmp_path}/a b'\n" in capsys.readouterr().out


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "global_step_15" / "huggingface").mkdir(parents=True)
    summary(tmp_path, Version(2, 15), 63.0, Version(1, 10))
    summary(tmp_path, Version(2, 15), 0.0, Version(2, 15))
    out = capsys.readouterr().out
    assert (
        "done  step 15 in 1m03s, 1m03s of them from step 10 on" in out
        and "global_step_15/huggingface" in out
        and "nothing to do" in out
    )
