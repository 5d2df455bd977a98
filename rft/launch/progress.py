"""Progress of a run: a bar on a terminal, one line per step elsewhere.

Depends on metric records, and log records with `extra=STARTING`, on no Ray and no part of the run.
Invariant: it changes and delays nothing, and shows only content of metrics.jsonl and the logs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import shlex
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rft.launch.rundir import RunDir
from rft.monitor.curves import is_evaluation, is_main, main_values, sparkline
from rft.monitor.read import AllSeries, Records
from rft.secrets import redact, safe
from rft.sync.waits import cancel
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.worker.teller import LOOK_S, Teller
from rft.worker.teller import show as show_wait
from rft.worker.waiting import Activity, activities

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

log = logging.getLogger(__name__)
STARTING = {"starting": True}  # marks log records shown until the first step
_WINDOW = 10  # steps over which the time per step is averaged


class Progress:
    """Context manager that shows the bar while open; `update` takes records in any order.

    `teller` says what is waited for.  `total_steps` None: until stopped.  `what`: name of a run
    without steps.  `served`: clients supply the rows, so there is no ETA.
    """

    def __init__(
        self,
        run_dir: Path,
        teller: Teller,
        *,
        total_steps: int | None,
        notes: Sequence[str] = (),
        console: Console | None = None,
        what: str = "",
        served: bool = False,
    ) -> None:
        from rich.console import Console

        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._run_dir = run_dir
        self._teller = teller
        self._notes = notes
        self._what = what
        self._served = served
        self._bar: Bar | None = None
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._began = 0.0
        self._starting = _Handler(self.started)

    def __enter__(self) -> Self:
        self._teller.show = self._wait
        self._teller.served = self._served
        steps = "until it is stopped" if self._total is None else f"{self._total} steps"
        folder = shlex.quote(str(self._run_dir))
        self._say(f"run   {self._run_dir}  ({self._what or steps})")
        self._say(f"watch rft status {folder}, or rft view {folder}")
        for note in self._notes:
            self._say(f"note  {note}")
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._bar.add_task("starting", total=self._total, facts="")
            self._bar.start()
        self._began = time.monotonic()
        logging.getLogger("rft.launch").addHandler(self._starting)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rft.launch").removeHandler(self._starting)
        if self._bar is not None:
            self._bar.stop()
        self._teller.show = show_wait
        self._teller.served = False

    def started(self, record: logging.LogRecord) -> None:
        """Show that a part has started."""
        if "starting" in vars(record):
            self._say(f"start {record.getMessage()}, {duration(time.monotonic() - self._began)}")

    @asynccontextmanager
    async def telling(
        self, look: Callable[[], Awaitable[Sequence[Activity]]]
    ) -> AsyncIterator[None]:
        """Let the teller ask this event loop for the activities of all parts."""
        inquiry = _Inquiry(look)
        answering = asyncio.ensure_future(inquiry.answer())
        self._teller.look = inquiry.activities
        try:
            yield
        finally:
            self._teller.look = activities
            await cancel([answering])

    def update(self, record: MetricRecord) -> None:
        """Show a record."""
        for name, value in record.values.items():
            if name.startswith("eval/") and is_evaluation(name):
                self._say(f"eval  step {record.step}: {name} {value:.3f}")
        for note in record.notes:
            self._say(f"note  {record.role} {record.step}: {note}")
        if "perf/step_s" in record.values:  # not an alarm
            self._step(record)
        elif record.role == "synchronizer" and self._bar is not None and not self._times:
            self._bar.update(self._bar.task_ids[0], description="exploring")

    def _wait(self, text: str) -> None:
        log.info("%s", text)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=redact(text))
        else:
            self._say(f"wait  {text}")

    def _step(self, record: MetricRecord) -> None:
        seconds = record.values["perf/step_s"]
        self._times.append(seconds)
        facts = step_facts(record.values, seconds)
        remaining_s = (
            None
            if self._total is None or self._served
            else max(self._total - record.step, 0) * sum(self._times) / len(self._times)
        )
        eta = "" if remaining_s is None else f"  ETA {duration(remaining_s)}"
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=record.step,
                description="training",
                facts=facts + eta,
            )
        else:
            out_of = "" if self._total is None else f"/{self._total}"
            self._say(f"step {record.step}{out_of}  {facts}{eta}")

    def _say(self, line: str) -> None:
        self._console.print(safe(redact(line), lines=True), markup=False)
        self._console.file.flush()  # files and pipes get each line at once
        self._teller.printed()


class _Inquiry:
    """Lets another thread ask an event loop for the activities of all parts."""

    def __init__(self, look: Callable[[], Awaitable[Sequence[Activity]]]) -> None:
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._pending = asyncio.Event()
        self._answers: queue.SimpleQueue[Sequence[Activity]] = queue.SimpleQueue()

    async def answer(self) -> None:
        try:
            while True:
                await self._pending.wait()
                self._pending.clear()
                self._answers.put(await self._look())
        finally:
            self._answers.put(activities())  # for one who waits

    def activities(self) -> Sequence[Activity]:
        """Return the answer, or this process's own activities if the loop is blocked or closed."""
        try:
            while not self._answers.empty():  # of a look that was too late
                self._answers.get_nowait()
            self._loop.call_soon_threadsafe(self._pending.set)
            return self._answers.get(timeout=LOOK_S)
        except (queue.Empty, RuntimeError):
            return activities()


class _Handler(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


def summary(run_dir: Path, version: Version, seconds: float, resumed_from: Version | None) -> None:
    """Print the last lines of a successful run."""
    if seconds == 0.0 and resumed_from is not None:
        print(
            f"nothing to do: {run_dir} is trained to step {version.step} already.  To continue, "
            f"raise trainer.total_steps, "
            "and buffer.total_steps or buffer.total_epochs where one is written"
        )
        return
    rundir = RunDir(run_dir)
    worked_s = rundir.worked_s(rundir.read_state()) or seconds
    since = (
        f", {duration(seconds)} of them from step {resumed_from.step} on"
        if resumed_from is not None
        else ""
    )
    print(f"done  step {version.step} in {duration(worked_s)}{since}")
    model = run_dir / "checkpoints" / f"global_step_{version.step}" / "huggingface"
    if model.is_dir():
        print(f"model {model}")
    if (path := run_dir / "metrics.jsonl").is_file():
        for line in curve_lines(AllSeries(is_main, Records(path))):
            print(f"curve {line}")
    for line in (f"rft status {shlex.quote(str(run_dir))}", *next_steps(run_dir)):
        print(f"next  {line}")


def next_steps(run_dir: Path | str) -> list[str]:
    """Return commands that show more of a run."""
    folder = shlex.quote(str(run_dir))
    return [
        f"rft view {folder}",
        f"rft report {folder} -o report.html",
        f"rft compare {folder} OTHER_RUN",
    ]


def curve_lines(measured: AllSeries) -> list[str]:
    """Return a line for the reward and for each evaluation: first value, sparkline, last value."""
    curves = main_values(measured)
    return [
        f"{values[0]:.3f} {sparkline(values, 32)} {values[-1]:.3f}  {name}"
        for name, values in curves.items()
    ]


def step_facts(values: dict[str, float], seconds: float) -> str:
    """Describe a train step in one line, with the values that its record has."""
    tokens = values.get("experience/response_tokens")
    shown = (
        ("reward", values.get("experience/reward/mean"), ".3f"),
        (
            "loss",
            values.get("actor/loss") if "experience/reward/mean" not in values else None,
            ".3f",
        ),
        ("length", values.get("experience/response_length/mean"), ".0f"),
        ("staleness", values.get("experience/staleness/max"), ".0f"),
        ("tok/s", tokens / seconds if tokens is not None and seconds > 0 else None, ".0f"),
        ("s/step", seconds, ".1f"),
    )
    text = "  ".join(f"{name} {value:{form}}" for name, value, form in shown if value is not None)
    return text + (
        "  SKIPPED: the gradient is not finite" if values.get("train/finite", 1.0) == 0.0 else ""
    )


def duration(seconds: float) -> str:
    """Format seconds as 7s, 3m20s or 2h05m."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _bar(console: Console) -> Bar:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bar

    return Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )
