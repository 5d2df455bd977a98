"""kill -9 and kill -STOP of each process of a run on Ray, Ray's own too, in each phase; writes a
dated table.

    python scripts/kill_table.py [--only raylet,gcs_server] [--phases explore,train] [--actions
    KILL,STOP] [--engine vllm]
                                 [--cells FILE] [--keep] [--minutes M] [--write]

Each cell is two runs of the tiny model: one that is hit, whose rewards then wait for 25 s, and the
same command again.  Good: within 60 s the first has ended or has finished another step; what was
hit is named; the exit code is as documented; nothing is left; the second finishes, and the audit of
its buffer balances.  `--cells` adds each cell to a file and passes by those that are there, so that
a table can be played in parts: with `--minutes` no cell begins that may take longer than is left,
and the same command goes on.  `--keep` counts the page's cells as played, too.  `--write` puts the
table into docs/measured/kill-table.md.  Exit code 1 if any cell is not good, 2 if all that were
played are good and some are missing.  Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pages
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rft.launch import leftovers  # noqa: E402
from rft.testing import tiny  # noqa: E402
from tests.helpers import runs  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "kill-table.md"
BEGIN = "<!-- kill table: written by scripts/kill_table.py -->"
END = "<!-- end of the kill table -->"
LIMIT_S = 60.0
CELL_S = 150.0  # what a cell is taken to need before one has needed longer
START_S = 300.0
POLL_S = 0.01
HELD_S = 25.0  # longer than the limits within which what is stopped counts as hung
STOPPED_COMMAND_S = 20.0  # a command that is stopped cannot act; it goes on when it is continued
ENDED = "ended before"
AGENTS = ("Ray's dashboard agent", "Ray's runtime-env agent")
PROCESSES = (
    "command",
    "coordinator",
    "buffer",
    "explorer",
    "engine",
    "trainer",
    "raylet",
    "gcs_server",
    *AGENTS,
)
PHASES = ("start", "explore", "train", "sync", "evaluate", "end")
POINTS = {"train": "trainer.update.before:3=stop", "sync": "trainer.staged:3=stop"}
HELD = {"explore": "copy", "evaluate": "copy_eval"}  # tasksets whose rewards wait in these phases
REWARD = """
import asyncio
from pathlib import Path

async def held(task, transcript):
    hold = Path(__file__).with_name(f"hold-{task.taskset}")
    while hold.exists():
        hold.with_suffix(".held").touch()
        await asyncio.sleep(0.01)
    return float(sum(transcript.answer.encode()) % 2)
"""
HEAD = (
    "| Process | Signal | Phase | Outcome | After, s | Named | Same command again | Audit | Left | "
    "Good |\n" + "|---" * 10 + "|"
)


@dataclass
class Cell:
    process: str
    action: str
    phase: str
    outcome: str = ""
    seconds: float = 0.0
    named: bool = False
    again: int | None = None
    balanced: bool = False
    engine: str = "transformers"
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    left: list[str] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, str, str]:
        return self.process, self.action, self.phase

    @property
    def good(self) -> bool:
        mute = self.process == "command" or self.outcome in ("goes on", ENDED)
        ends = self.outcome in ("goes on", "exit 0", "exit 4", ENDED) or (
            self.process == "command" and self.outcome == "exit -9"
        )
        fine = self.balanced and self.again == 0 and not self.left
        return (
            fine
            and ends
            and (self.named or mute or self.outcome == "exit 0")
            and self.seconds <= LIMIT_S
        )

    def text(self) -> str:
        named = (
            "yes"
            if self.named
            else "–"
            if self.process == "command" or self.outcome in ("goes on", "exit 0", ENDED)
            else "no"
        )
        counts = (
            self.outcome,
            f"{self.seconds:.0f}",
            named,
            f"exit {self.again}",
            "balanced" if self.balanced else "wrong",
        )
        end = (str(len(self.left)), "yes" if self.good else "**no**")
        return f"| {self.process} | {self.action} | {self.phase} | {' | '.join((*counts, *end))} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(PROCESSES), help="processes; with --engine vllm also engine core"
    )
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--actions", default="KILL,STOP")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument(
        "--cells", type=Path, help="a line a cell; without its line a cell is played again"
    )
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault(leftovers.MARK, uuid.uuid4().hex)
    os.environ["PYTHONPATH"] = str(ROOT)
    wanted = places(
        *(value.split(",") for value in (options.only, options.actions, options.phases))
    )
    cells = {cell.place: cell for cell in (from_page(PAGE.read_text()) if options.keep else [])}
    cells |= {cell.place: cell for cell in played(options.cells)}
    end = time.monotonic() + 60 * options.minutes
    longest = CELL_S
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        model = tiny.make(Path(folder) / "model")
        for number, place in enumerate(wanted):
            if place in cells:
                continue
            began = time.monotonic()
            if began + longest > end:
                break
            cell = Cell(*place, engine=options.engine)
            root = Path(folder) / str(number)
            root.mkdir()
            play(cell, model, root)
            cells[place] = cell
            if options.cells is not None:
                with options.cells.open("a") as file:
                    print(json.dumps(asdict(cell)), file=file)
            print(cell.text(), *cell.left, sep="\n    ", flush=True)
            longest = max(longest, time.monotonic() - began)
    missing = sum(place not in cells for place in wanted)
    table = summary(sorted(cells.values(), key=lambda cell: PHASES.index(cell.phase)))
    if options.write:
        pages.put(PAGE, BEGIN, END, table)
    print(table)
    print(f"{missing} of {len(wanted)} cells are missing")
    return 1 if not all(cell.good for cell in cells.values()) else 2 if missing else 0


def places(
    processes: Sequence[str], actions: Sequence[str], phases: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Each process, signal and phase, phase by phase."""
    return [
        (process, action, phase)
        for phase, process, action in itertools.product(phases, processes, actions)
    ]


def played(file: Path | None) -> list[Cell]:
    """Return the cells of a file of `--cells`."""
    if file is None or not file.exists():
        return []
    return [Cell(**json.loads(line)) for line in file.read_text().splitlines()]


def from_page(page: str) -> list[Cell]:
    """Return the cells of a written table; what was left is its number alone."""
    cells = []
    for line in page.splitlines():
        row = [value.strip() for value in line.strip("|").split("|")]
        if len(row) != HEAD.count(" |") or row[1] not in ("KILL", "STOP"):
            continue
        process, action, phase, outcome, seconds, named, again, audit, left, _ = row
        cell = Cell(process, action, phase, outcome, float(seconds), named == "yes")
        cell.again = None if again == "exit None" else int(again.removeprefix("exit "))
        cell.balanced = audit == "balanced"
        cell.left = ["left, by the page"] * int(left)
        cells.append(cell)
    return cells


def play(cell: Cell, model: Path, root: Path) -> None:
    reward = root / "reward.py"
    reward.write_text(REWARD)
    arguments = runs.arguments(
        model,
        root,
        *runs.SMALL[:3],
        f"buffer.explorer_input.default_reward_fn_type={reward}:held",
        f"explorer.rollout_model.engine_type={cell.engine}",
        "explorer.eval_interval=1",
        "trainer.total_steps=8",
        "trainer.save_interval=1",
    )
    before = leftovers.snapshot()
    run = runs.Run(
        *arguments, env={"RFT_FAULT": POINTS[cell.phase]} if cell.phase in POINTS else {}
    )
    try:
        victim = None
        if cell.phase == "end":  # a process may end before the others
            run.wait_for("step 2/", START_S)
            victim = find(cell.process, run)
        release = reach(cell, run, root)
        victim = victim or find(cell.process, run)
        hold(root, "copy")
        victim.send_signal(signal.Signals[f"SIG{cell.action}"])
        struck = time.monotonic()
        lines = len(run.lines)
        release(victim)
        follow(cell, run, root, victim, struck, lines)
    except AssertionError as e:
        cell.outcome = f"phase not reached: {e}"[:2000]
    except psutil.NoSuchProcess:
        cell.outcome = ENDED if run.end(START_S) == 0 else "ends with an error"
    finally:
        stop(run)
        let_go(root)
    killed = (cell.process, cell.action) == ("command", "KILL")  # the next start cleans up
    if not killed:
        cell.left = leftovers.compare(before)
    again = runs.Run(*arguments)
    try:
        cell.again = again.end(START_S)
        cell.balanced = audit(root)
    except subprocess.TimeoutExpired:
        cell.again = None
    finally:
        stop(again)
    if killed:
        cell.left = leftovers.compare(before)
    if not cell.good:
        print(
            run.output[-4000:],
            again.output[-4000:],
            sep="\n---- again\n",
            file=sys.stderr,
            flush=True,
        )


def reach(cell: Cell, run: runs.Run, root: Path) -> Callable[[psutil.Process], None]:
    """Returns in the phase, with what lets the run go on from there once its process was hit."""
    if cell.phase in HELD:
        run.wait_for("step 2/", START_S)
        until(hold(root, HELD[cell.phase]).with_suffix(".held").exists, run)
        return lambda _: None
    if cell.phase in POINTS:
        run.wait_for("step 1/", START_S)
        trainer = find("trainer", run)
        until(lambda: trainer.status() == psutil.STATUS_STOPPED, run)
        return lambda victim: trainer.send_signal(signal.SIGCONT) if victim != trainer else None
    if cell.phase == "start":
        run.wait_for("start Ray is up", START_S)
    else:
        run.wait_for("step 7/", START_S)
        until(lambda: runs.state(root)["phase"] == "stopping", run)
    return lambda _: None


def hold(root: Path, taskset: str) -> Path:
    """Rewards of the taskset wait as long as this file is there."""
    file = root / f"hold-{taskset}"
    file.touch()
    return file


def let_go(root: Path) -> None:
    for taskset in HELD.values():
        (root / f"hold-{taskset}").unlink(missing_ok=True)


def find(name: str, run: runs.Run) -> psutil.Process:
    found: list[psutil.Process] = []

    def seen() -> bool:
        found.extend(p for n, p in runs.family(run.process.pid).items() if n == name)
        return bool(found)

    until(seen, run)
    return found[0]


def until(reached: Callable[[], bool], run: runs.Run) -> None:
    end = time.monotonic() + START_S
    while not reached():
        assert run.process.poll() is None and time.monotonic() < end, (
            f"the run ended, or took too long:\n{run.output}"
        )
        with contextlib.suppress(subprocess.TimeoutExpired):  # its end is seen at once
            run.process.wait(POLL_S)


def follow(
    cell: Cell, run: runs.Run, root: Path, victim: psutil.Process, struck: float, lines: int
) -> None:
    """What the run does: it ends, or goes on to its end after another step."""
    stopped = cell.process == "command" and cell.action == "STOP"
    stepped = None
    while run.process.poll() is None:
        now = time.monotonic() - struck
        if now > HELD_S:
            let_go(root)
        if stopped and now > STOPPED_COMMAND_S:
            victim.send_signal(signal.SIGCONT)
            stopped = False
        if (
            stepped is None
            and not stopped
            and any(line.startswith("step ") for line in run.lines[lines:])
        ):
            stepped = now
        if now > LIMIT_S and stepped is None:
            cell.outcome = "hangs"
            cell.seconds = now
            return
        if now > 3 * LIMIT_S:
            cell.outcome = "hangs later"
            cell.seconds = now
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # its end is seen at once
            run.process.wait(POLL_S)
    code = run.end()
    cell.seconds = time.monotonic() - struck if stepped is None or code else stepped
    cell.outcome = "goes on" if stepped is not None and code == 0 else f"exit {code}"
    said = "".join(run.lines[lines:])
    cell.named = (
        f"(pid {victim.pid})" in said
        or f"{cell.process}-0 died" in said
        or f"{cell.process} died" in said
    )
    cell.named |= f"{cell.process} hangs" in said or f"{cell.process}-0 hangs" in said


def stop(run: runs.Run) -> None:
    """Ends what hangs, so that it does not count against the next cell."""
    if run.process.poll() is None:
        family = runs.family(run.process.pid).values()
        runs.kill(family)
        run.end()


def audit(root: Path) -> bool:
    ok, found = runs.audit(runs.folder(root))
    return ok and bool(found["balanced"]) and not found["used_twice"]


def summary(cells: list[Cell]) -> str:
    good = sum(cell.good for cell in cells)
    ended = [cell.seconds for cell in cells]
    about = (
        f"{max(cell.date for cell in cells)}: {len(cells)} cells, {good} good; vLLM where its engine core is hit, "
        f"else transformers; the slowest took "
        f"{max(ended):.0f} s.  Python {platform.python_version()} on {platform.machine()}, "
        f"{os.cpu_count()} cores."
    )
    return "\n".join([about, "", HEAD, *(cell.text() for cell in cells)])


if __name__ == "__main__":
    sys.exit(main())
