"""`rft status`, `rft timeline` and `rft log`: a run's state, a picture of its work, and its logs.

They read files alone: the run may be running or not, also on another machine.
"""

from __future__ import annotations

import heapq
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rft.cli.options import Json, RunDir
from rft.errors import CheckpointInvalid, ConfigError
from rft.monitor.changes import FolderChanges
from rft.secrets import safe

NOTES = 5  # number of newest notes shown
LEVELS = ("debug", "info", "warning", "error", "critical")
# 2026-11-21 10:15:28,123 I rft.launch.drive: text
_HEAD = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[DIWEC]) ")
Entry = tuple[str, str, str]  # time, file, text of one or more lines


def status(
    run_dir: RunDir,
    as_json: Json = False,
) -> None:
    """Show what a run is doing or how it ended, read from its files."""
    from rft.cli import show

    facts = collect(run_dir)
    if as_json:
        print(show.as_json(facts))
        return
    for line in lines(facts):
        print(safe(line))


def collect(run_dir: Path) -> dict[str, Any]:
    """Collect phase, owner, steps, newest metrics and checkpoints of a run.

    Raises ConfigError if `run_dir` is no run's folder.
    """
    from rft.launch.rundir import RunDir

    run = RunDir(run_dir)
    state = run.read_state()
    if not state and not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run_dir} is not the folder of a run: it has neither state.json nor metrics.jsonl",
            key="RUN_DIR",
            given=str(run_dir),
        )
    phase, holder = run.phase(state)
    return {
        "run_dir": str(run_dir),
        "phase": phase,
        "holder": holder,
        "last_sign": run.last_sign(state),
        "worked_s": run.worked_s(state),
        "state": state,
        **_metrics(run_dir / "metrics.jsonl", state.get("started", 0.0)),
        "checkpoints": _checkpoints(run.checkpoints),
        "stages": _stages(run_dir),
    }


def _stages(run_dir: Path) -> list[dict[str, Any]]:
    """Return the runs below a program's folder, in order; none for an ordinary run."""
    from rft.launch.rundir import RunDir
    from rft.launch.stages import record

    rows = []
    for stage in record(run_dir):
        folder = run_dir / stage["stage_name"]
        state = {"phase": "done"} if stage["version"] else RunDir(folder).read_state()
        rows.append(
            {
                **stage,
                "phase": RunDir(folder).phase(state)[0] if state else "not begun",
                "run_dir": str(folder),
            }
        )
    return rows


def lines(facts: dict[str, Any]) -> list[str]:
    """Format `facts` of `collect`."""
    import psutil

    from rft.launch.progress import duration, next_steps, step_facts

    state = facts["state"]
    node = state.get("node", os.uname().nodename)
    away = "" if node == os.uname().nodename else f", on {node}"
    owner = f", process {facts['holder']}" if facts["holder"] is not None else away
    age = f", since {duration(max(time.time() - state['time'], 0))}" if "time" in state else ""
    if facts["phase"] == "died":
        age = f" at {_moment(facts['last_sign'])} (last sign of life)"
    out = [f"run          {facts['run_dir']}", f"phase        {facts['phase']}{owner}{age}"]
    if facts["phase"] in ("died", "failed", "interrupted") and (command := state.get("command")):
        folder = str(state.get("cwd", Path.cwd()))
        change = "" if folder == str(Path.cwd()) else f"cd {shlex.quote(folder)} && "
        out.append(f"resume       {change}{command}")
    if facts["worked_s"] is not None:
        out.append(f"worked       {duration(facts['worked_s'])}")
    if reason := state.get("reason"):
        out.append(f"reason       {reason}")
    for s in facts["stages"]:
        model = f", version {s['version']}" if s["version"] else ""
        out.append(
            f"stage        {s['stage_name']}: {s['phase']}{model}  (rft status {s['run_dir']})"
        )
    out += [f"waiting      {wait}" for wait in state.get("waiting", ())]
    if parts := state.get("parts"):
        pids = (
            f"{name} {pid}{'' if away or psutil.pid_exists(pid) else ' (gone)'}"
            for name, pid in parts.items()
        )
        out.append(f"parts        {', '.join(pids)}")
    if step := facts["last_step"]:
        out.append(
            f"step         {step['step']}  "
            f"{step_facts(step['values'], step['values']['perf/step_s'])}"
        )
    out += [f"eval         step {e['step']}: {e['name']} {e['value']:.3f}" for e in facts["evals"]]
    out += [
        f"checkpoint   step {c['step']}, version {c['version']}, {c['bytes'] / 1e6:.0f} "
        f"MB{', model' if c['model'] else ''}"
        if not c["problem"]
        else f"checkpoint   step {c['step']}: {c['problem']}"
        for c in facts["checkpoints"][-3:]
    ]
    sizes = [c["bytes"] for c in facts["checkpoints"] if not c["problem"]]
    if len(sizes) > 1:
        out.append(f"             {len(sizes)} checkpoints, {sum(sizes) / 1e6:.0f} MB in all")
    if step and not facts["checkpoints"] and facts["phase"] in ("running", "died"):
        out.append("checkpoint   none yet: a restart now would go back to step 0")
    out += [f"curve        {line}" for line in facts["curves"]]
    out += [f"alarm        {a.removeprefix('alarm ')}" for a in facts["alarms"]]
    out += [f"note         {n}" for n in facts["notes"] if not facts["stages"]]
    return [
        *out,
        *(f"next         {line}" for line in next_steps(facts["run_dir"]) if facts["last_step"]),
    ]


def _moment(seconds: float) -> str:
    """Format a time of today, or a date and time."""
    then = time.localtime(seconds)
    today = time.localtime()
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def _metrics(path: Path, since: float) -> dict[str, Any]:
    """Return the last train step, first and last value of each evaluation mean, and notes of the
    process that began at `since`.
    """
    from rft.launch.progress import curve_lines
    from rft.monitor.curves import evaluations, is_main
    from rft.monitor.read import AllSeries, Records

    if not path.exists():
        return {
            "last_step": None,
            "evals": [],
            "curves": [],
            "alarms": [],
            "notes": ["nothing has been measured yet"],
        }
    records = Records(path)
    measured = AllSeries(is_main)
    last = None
    alarms: list[str] = []
    newest: deque[str] = deque(maxlen=NOTES)
    for r in records:
        measured.take(r)
        if r.role == "trainer" and "perf/step_s" in r.values:  # no alarm
            last = {"step": r.step, "time": r.time, "values": r.values}
        if any(n.startswith("alarm/") for n in r.values):
            alarms += [f"{r.role} {r.step}: {n}" for n in r.notes or r.values]
        elif r.time >= since:
            newest += [f"{r.role} {r.step}: {n}" for n in r.notes]
    evals = []
    for name in sorted(evaluations(measured.by_name)):
        points = [
            {"step": step, "name": name, "value": value} for step, value in measured.points(name)
        ]
        evals += [points[0], points[-1]] if len(points) > 1 else points
    notes = [*newest, *([records.note] if records.note else [])]
    return {
        "last_step": last,
        "evals": evals,
        "curves": curve_lines(measured),
        "alarms": alarms,
        "notes": notes,
    }


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    from rft.trainer.checkpoint import manifest as manifests

    out = []
    for path in manifests.committed(folder):
        row: dict[str, Any] = {
            "step": int(path.name.rpartition("_")[2]),
            "folder": str(path),
            "problem": "",
        }
        try:
            manifest = manifests.read(path, verify=False)  # export and resume verify
            row["version"] = str(manifest.version)
            row["bytes"] = sum(f.size for f in manifest.files.values())
        except CheckpointInvalid as e:
            row["problem"] = str(e)
        out.append({**row, "model": (path / "huggingface").is_dir()})
    return out


def timeline(
    run_dir: RunDir,
    out: Annotated[
        Path | None,
        typer.Option(
            help="the SVG file; RUN_DIR/timeline.svg where none is named", show_default=False
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(help="train steps at the end of the run; 0 draws all of it", min=0)
    ] = 30,
) -> None:
    """Draw explore batches, train steps, weight syncs by phase and evaluations over time, and say
    who was idle.
    """
    from rft.monitor.pictures import picture

    if out is not None and out.suffix != ".svg":
        raise ConfigError("must end in .svg", key="--out", given=str(out))
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run_dir} is not the folder of a run: it has no metrics.jsonl",
            key="RUN_DIR",
            given=str(run_dir),
        )
    path = out or run_dir / "timeline.svg"
    for name, share in picture(run_dir, path, last=last or None).items():
        print(f"{name:16}{share:6.1%}")
    print(f"picture         {path}")


def log(
    run_dir: RunDir,
    keyword: Annotated[
        str | None,
        typer.Option(
            "-k", help="only entries that contain this text, in any case", show_default=False
        ),
    ] = None,
    level: Annotated[str, typer.Option("-l", help=f"lowest level: {', '.join(LEVELS)}")] = "info",
    last: Annotated[
        int | None,
        typer.Option(
            "-n", min=0, help="show only this many of the newest entries", show_default=False
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", help="follow the log as the run writes it; Ctrl-C ends it")
    ] = False,
) -> None:
    """Show a run's logs, merged by time."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"{level!r} is none of {', '.join(LEVELS)}", key="-l", given=level)
    if not any((run_dir / "logs").rglob("*.log")):
        below = ", ".join(sorted(str(p.parent) for p in run_dir.glob("*/state.json"))[:5])
        runs = below and f"; it holds the runs {below}"
        raise ConfigError(
            f"{run_dir} has no logs{runs}; give the folder of a run",
            key="RUN_DIR",
            given=str(run_dir),
        )
    tails = _Tails(run_dir / "logs")
    # before the first read, so that nothing falls between
    watch = FolderChanges(run_dir / "logs") if follow else None
    shown: dict[str, bool] = {}  # by file: whether its newest entry was shown

    def matching() -> Iterator[Entry]:
        for entry in heapq.merge(*tails.new()):
            # the rest of an entry that was read while it was written
            continues = not entry[0] and shown.get(entry[1], False)
            shown[entry[1]] = continues or matches(entry, keyword, level.lower())
            if shown[entry[1]]:
                yield entry

    entries_so_far = matching()
    for entry in deque(entries_so_far, maxlen=last) if last is not None else entries_so_far:
        show(entry)
    while watch is not None:
        watch.wait()
        for entry in matching():
            show(entry)


def matches(entry: Entry, keyword: str | None, level: str) -> bool:
    """Return whether an entry has at least `level` (info without a head) and contains `keyword`."""
    head = _HEAD.match(entry[2])
    letters = [name[0].upper() for name in LEVELS]
    rank = letters.index(head["level"] if head else "I")
    return rank >= LEVELS.index(level) and (keyword is None or keyword.lower() in entry[2].lower())


def show(entry: Entry) -> None:
    """Print one entry with the name of its file; model output must not drive the terminal."""
    _, name, text = entry
    print(safe(f"{name:12} {text}", lines=True), flush=True)


class _Tails:
    """Reads what was added to each *.log of a folder since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes taken so far

    def new(self) -> list[list[Entry]]:
        # with log.group_by_node each machine has a folder
        paths = sorted(self._folder.rglob("*.log"))
        return [
            list(entries(str(p.relative_to(self._folder).with_suffix("")), self._lines(p)))
            for p in paths
        ]

    def _lines(self, path: Path) -> Iterator[str]:
        start = self._read.get(path, 0)
        with path.open("rb") as file:
            if start > os.fstat(file.fileno()).st_size:
                start = 0  # a new file
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written
                start += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")
        self._read[path] = start


def entries(name: str, lines: Iterable[str]) -> Iterator[Entry]:
    """Join lines into entries: a line without a time (as of a traceback) continues the entry."""
    began = ""
    text = ""
    for line in lines:
        if head := _HEAD.match(line):
            if text:
                yield began, name, text
            began = head["time"]
            text = line
        else:
            text = f"{text}\n{line}" if text else line
    if text:
        yield began, name, text
