"""The laboratory's supervisor: plays one run with its faults to the end, by the rules of a real
launcher, and asks the judge.

A dead explorer is started again; a dead trainer too, which begins a new lineage, so that the
explorer follows; when the buffer dies or fails, everything is.  It uses no clock but deadlines.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rft.worker.framing import ChannelClosed
from rft.worker.process import WorkerProcess
from tests.helpers.lab.judge import Verdict, judge, told
from tests.helpers.lab.nursery import Order
from tests.helpers.lab.plan import Plan
from tests.helpers.lab.roles import DONE, FAILED, FENCED, LOST

SHIM = Path(__file__).with_name("shim.c")
TRAINERS = ("trainer", "rival0")
KINDS = {"twin": "explorer", "rival": "trainer"}
PATIENCE_S = 60.0  # for the next thing to happen


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one process: at its start number `life` (from 0) it gets these orders."""

    role: str  # buffer, trainer, explorer0 ...
    life: int = 0
    fault: str = ""
    sql: int = 0
    first_write: int = 0
    last_write: int = 0
    error: int = 0
    everyone: bool = False  # when it dies, all die (the machine stops, the launcher was killed)


class Result(msgspec.Struct, kw_only=True):
    """How a run went.  `recovered_s`: from each death until the next trained step."""

    verdict: Verdict
    deaths: list[str]  # "role code" in order
    recovered_s: list[float]
    seconds: float


def build_shim(folder: Path) -> Path | None:
    """The library to preload, or None where there is no C compiler or no Linux."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None or ctypes.util.find_library("c") is None:
        return None
    library = folder / "labshim.so"
    if not library.exists():
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            str(library),
            str(SHIM),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


class Nursery:
    """The process that forks the others.  `shim` from `build_shim`."""

    def __init__(self, shim: Path | None = None) -> None:
        self.has_shim = shim is not None
        self._process = WorkerProcess(
            "tests.helpers.lab.nursery", env={"LD_PRELOAD": str(shim)} if shim else None
        )
        self._pids: dict[str, int] = {}

    def start(self, order: Order) -> None:
        self._process.send(msgspec.json.encode(order))

    def next(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next thing that happened: {"born": tag, "pid": n}, {"stopped": tag}, {"told": tag,
        "event": name} or {"exit": tag, "code": n}.
        """
        try:
            news: dict[str, Any] = msgspec.json.decode(
                self._process.receive(time.monotonic() + timeout_s)
            )
        except TimeoutError:
            raise TimeoutError(f"nothing happened within {timeout_s:g} s") from None
        except ChannelClosed:
            raise RuntimeError("the nursery ended; its error is above") from None
        if "born" in news:
            self._pids[news["born"]] = news["pid"]
        if "exit" in news:
            del self._pids[news["exit"]]
        return news

    def send(self, tag: str, what: int) -> None:
        with suppress(ProcessLookupError):  # it ended a moment ago, which will be told
            if tag in self._pids:
                os.kill(self._pids[tag], what)

    def clear(self) -> None:
        """End whatever still runs, after a case that failed."""
        for tag in list(self._pids):
            self.send(tag, signal.SIGKILL)
        while self._pids:
            self.next()

    def close(self) -> None:
        self._process.release()


@contextmanager
def nursery(shim: Path | None = None) -> Iterator[Nursery]:
    made = Nursery(shim)
    try:
        yield made
    finally:
        made.close()


class Lab:
    """One run: its living processes, what happens to them, and how often each was started."""

    def __init__(
        self,
        nursery: Nursery,
        plan: Plan,
        faults: tuple[Fault, ...] = (),
        *,
        first_life: int = 0,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """`on_stop` is called when a process has stopped at a fault point; then it is woken up
        again.
        """
        self._on_stop = on_stop
        self.plan = plan
        self._nursery = nursery
        self._faults = faults
        self.living: dict[str, str] = {}  # role -> tag
        self.lives: dict[str, int] = {}
        self._first_life = first_life
        self.deaths: list[str] = []
        self._seen: set[tuple[str, str]] = set()  # (tag, event)
        self._ended: deque[tuple[str, int]] = deque()  # deaths that nobody has dealt with yet
        self._over: int | None = None  # how many deaths there were when the trainer was done
        self._when: list[float] = []
        self._began = time.monotonic()
        for folder in (plan.run, plan.events):
            folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------ processes

    def start(self, role: str) -> None:
        life = self.lives.get(role, self._first_life)
        self.lives[role] = life + 1
        tag = f"{self.plan.root}|{role}|{life}"
        given = next(
            (f for f in self._faults if f.role == role and f.life == life), Fault(role=role)
        )
        kind, number = (role[:-1], int(role[-1])) if role[-1].isdigit() else (role, 0)
        kind = KINDS.get(kind, kind)
        self._nursery.start(
            Order(
                tag=tag,
                role=kind,
                number=number,
                plan=self.plan,
                fault=given.fault,
                sql=given.sql,
                first_write=given.first_write,
                last_write=given.last_write,
                error=given.error,
            )
        )
        self.living[role] = tag
        self.wait_for("born", tag)

    def start_buffer(self) -> bool:
        """Whether it came up.  It may say so before the nursery says that it was born."""
        self.start("buffer")
        ready = (self.living["buffer"], "ready")
        while "buffer" in self.living and ready not in self._seen:
            self._note(self._nursery.next())
        return ready in self._seen

    def begin(self, *roles: str) -> None:
        """Start these; the buffer, if it is one of them, comes first and must come up."""
        for role in roles:
            if role != "buffer":
                self.start(role)
            elif not self.start_buffer():
                raise AssertionError(f"the buffer did not come up: {self.deaths}")

    def wait_for(self, event: str, tag: str) -> dict[str, Any]:
        while True:
            news = self._nursery.next()
            if news.get(event) == tag:
                return news
            self._note(news)

    def _note(self, news: dict[str, Any]) -> str | None:
        """The role that ended, if one of this run did."""
        if "told" in news:
            self._seen.add((news["told"], news["event"]))
        if "stopped" in news:
            self._seen.add((news["stopped"], "stopped"))
        for role, tag in list(self.living.items()):
            if news.get("stopped") == tag and self._on_stop is not None:
                self._on_stop()
                self.go_on(role)
            if news.get("exit") == tag:
                self._died(role, news["code"])
                return role
        return None

    def _died(self, role: str, code: int) -> None:
        del self.living[role]
        self._ended.append((role, code))
        self.deaths.append(f"{role} {code}")
        if code == 1:
            kind, number = (role[:-1], role[-1]) if role[-1].isdigit() else (role, "0")
            log = Path(self.plan.root) / f"{KINDS.get(kind, kind)}{number}.log"
            raise AssertionError(f"{role} failed in an unexpected way: {log.read_text()[-800:]}")
        if code != DONE:
            self._when.append(time.monotonic())

    def end(self, roles: list[str], what: int = signal.SIGKILL) -> None:
        """Send the signal and wait until they are gone."""
        tags = {role: self.living[role] for role in roles if role in self.living}
        for tag in tags.values():
            self._nursery.send(tag, what)
        while any(self.living.get(role) == tag for role, tag in tags.items()):
            self._note(self._nursery.next())
        self._ended.clear()

    def go_on(self, role: str) -> None:
        """Wake up a stopped process."""
        self._nursery.send(self.living[role], signal.SIGCONT)

    def nothing_happens(self, seconds: float = 1.0) -> None:
        """For so long no process of the run ends."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                news = self._nursery.next(left)
            except TimeoutError:
                return
            assert self._note(news) is None, self.deaths

    def wait_until(self, role: str, what: str) -> None:
        """Until the process has "stopped", or has written this event."""
        tag = self.living[role]
        while (tag, what) not in self._seen:
            self._note(self._nursery.next())

    def wait_for_end(self, role: str) -> None:
        while role in self.living:
            self._note(self._nursery.next())

    # ------------------------------------------------------------ a whole run

    def play(self, *, between: Callable[[], None] | None = None, most: int = 40) -> int:
        """Until the trainer is done; returns its exit code.  `between` is called each time when
        nothing runs.
        """
        explorers = [f"explorer{n}" for n in range(self.plan.explorers)]
        for _ in range(most):
            if self.start_buffer():
                for role in ("trainer", *explorers):
                    self.start(role)
                code = self._until_over(explorers)
                if code == DONE:
                    self.end(
                        ["buffer", *explorers],
                        signal.SIGTERM if len(self.deaths) % 2 else signal.SIGKILL,
                    )
                    return DONE
            self.end(list(self.living))
            if between is not None:
                between()
        raise AssertionError(f"the run did not end within {most} lives: {self.deaths}")

    def play_on(self) -> None:
        """To the end, with what lives now."""
        explorers = [f"explorer{n}" for n in range(self.plan.explorers)]
        if self._until_over(explorers) == DONE:
            self.end(list(self.living))
        else:
            self.end(list(self.living))
            self.play()

    def _until_over(self, explorers: list[str]) -> int | None:
        """DONE, or None when everything has to be started again."""
        while True:
            while not self._ended:
                self._note(self._nursery.next())
            role, code = self._ended.popleft()
            everyone = any(
                f.everyone and f.role == role and f.life == self.lives[role] - 1
                for f in self._faults
            )
            if role == "buffer" or code == LOST or (everyone and code != DONE):
                return None
            if role in TRAINERS:
                if code in (DONE, FAILED):
                    self._over = len(self.deaths)
                    return DONE if code == DONE else None
                if code != FENCED:  # a fenced one was replaced
                    self.start(role)
            elif code == FAILED:  # refused: right for one of two with the same number
                if not {"explorer0", "twin0"} & self.living.keys() or "twin0" not in self.lives:
                    return None
            elif role in explorers:
                self.start(role)

    def result(self, *, finished: bool = True, may_lose: bool = False) -> Result:
        verdict = judge(self.plan, finished=finished, may_lose=may_lose)
        steps = [e["at"] for e in told(self.plan) if e["event"] in ("used", "skipped")]
        recovered = [
            min(later) - at for at in self._when if (later := [s for s in steps if s > at])
        ]
        return Result(
            verdict=verdict,
            deaths=self.deaths[: self._over],
            recovered_s=recovered,
            seconds=time.monotonic() - self._began,
        )


def lose_power(plan: Plan) -> None:
    """What was not synced is gone: the run's folder becomes its shadow."""
    shutil.rmtree(plan.run)
    kept = plan.shadow / ".bytes"
    shutil.rmtree(kept, ignore_errors=True)
    if not plan.shadow.exists():
        plan.run.mkdir()
        return
    shutil.copytree(plan.shadow, plan.run)
    kept.mkdir()
    for path in plan.run.rglob("*"):
        if path.is_file():
            shutil.copy(path, kept / str(path.stat().st_ino))


__all__ = ["FENCED", "Fault", "Lab", "Nursery", "Result", "build_shim", "lose_power", "nursery"]
