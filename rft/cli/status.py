"""`rft status`: what a run is doing or how it ended, from its files alone; the run need not be alive, or on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def status(
    run_dir: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """What a run is doing or how it ended, read from its files."""
    facts = collect(run_dir)
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
        return
    for line in lines(facts):
        print(line)


def collect(run_dir: Path) -> dict[str, Any]:
    """Phase, holder, steps, newest numbers, checkpoints.  Raises ConfigError when no run has been in `run_dir`."""
    from rft.errors import ConfigError
    from rft.launch.rundir import RunDir

    run = RunDir(run_dir)
    try:
        state = run.read_state()
    except json.JSONDecodeError as e:
        raise ConfigError(f"{run_dir / 'state.json'} is damaged: {e}", key="RUN_DIR") from e
    if not state:
        raise ConfigError(f"{run_dir} is not the folder of a run: it has no state.json", key="RUN_DIR", given=str(run_dir))
    holder = _holder(run.lock_file)
    phase = str(state.get("phase", "unknown"))
    if holder is None and phase in ("starting", "running", "stopping"):
        phase = "died"
    return {
        "run_dir": str(run_dir),
        "phase": phase,
        "holder": holder,
        "state": state,
        **_metrics(run_dir / "metrics.jsonl"),
        "checkpoints": _checkpoints(run.checkpoints),
        "stages": _stages(run_dir),
    }


def _stages(run_dir: Path) -> list[dict[str, Any]]:
    """The runs below a program's folder, in order; none for an ordinary run."""
    from rft.launch.rundir import RunDir
    from rft.launch.stages import record

    rows = []
    for stage in record(run_dir):
        folder = run_dir / stage["stage_name"]
        phase = "done" if stage["version"] else str(RunDir(folder).read_state().get("phase", "not begun"))
        rows.append({**stage, "phase": phase, "run_dir": str(folder)})
    return rows


def lines(facts: dict[str, Any]) -> list[str]:
    """`facts` of `collect` for people."""
    import time

    from rft.launch.progress import duration, step_facts

    state = facts["state"]
    held = f", process {facts['holder']}" if facts["holder"] is not None else ""
    age = f", since {duration(max(time.time() - state['time'], 0))}" if "time" in state else ""
    out = [f"run          {facts['run_dir']}", f"phase        {facts['phase']}{held}{age}"]
    if facts["phase"] == "died":
        out.append("             its process is gone and did not end properly; run the same command again to go on")
    if reason := state.get("reason"):
        out.append(f"reason       {reason}")
    for s in facts["stages"]:
        model = f", version {s['version']}" if s["version"] else ""
        out.append(f"stage        {s['stage_name']}: {s['phase']}{model}  (rft status {s['run_dir']})")
    out += [f"waiting      {wait}" for wait in state.get("waiting", ())]
    if parts := state.get("parts"):
        out.append("parts        " + ", ".join(f"{name} {_alive(pid)}" for name, pid in parts.items()))
    if step := facts["last_step"]:
        out.append(f"step         {step['step']}  {step_facts(step['values'], step['values'].get('perf/step_s', 0.0))}")
    out += [f"eval         step {e['step']}: {e['name']} {e['value']:.3f}" for e in facts["evals"]]
    out += [
        f"checkpoint   step {c['step']}, version {c['version']}, {c['bytes'] / 1e6:.0f} MB{', model' if c['model'] else ''}"
        if not c["problem"]
        else f"checkpoint   step {c['step']}: {c['problem']}"
        for c in facts["checkpoints"][-3:]
    ]
    return [*out, *(f"note         {n}" for n in facts["notes"] if not facts["stages"])]


def _holder(lock: Path) -> int | None:
    """The process that holds the run's lock now; None when it is free, or its holder was killed.

    The holder's number stands in the file from the moment it took the lock.  The lock itself is left alone: trying it could make a run
    that starts at this moment fail.
    """
    import psutil

    try:
        text, since = lock.read_text().strip(), lock.stat().st_mtime
        return int(text) if text.isdecimal() and psutil.Process(int(text)).create_time() <= since + 1 else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None


def _alive(pid: int) -> str:
    import psutil

    return f"{pid}" if psutil.pid_exists(pid) else f"{pid} (gone)"


def _metrics(path: Path) -> dict[str, Any]:
    """The last train step, and the first and last value of each evaluation mean."""
    from rft.monitor.read import scan

    if not path.exists():
        return {"last_step": None, "evals": [], "notes": ["nothing has been measured yet"]}
    found = scan(path)
    steps = [r for r in found.records if r.role == "trainer"]
    last = {"step": steps[-1].step, "time": steps[-1].time, "values": steps[-1].values} if steps else None
    means = {n for r in found.records for n in r.values if n.startswith("eval/") and "/mean@" in n}
    evals = []
    for name in sorted(means):
        points = [{"step": r.step, "name": name, "value": r.values[name]} for r in found.records if name in r.values]
        evals += [points[0], points[-1]] if len(points) > 1 else points
    return {"last_step": last, "evals": evals, "notes": [found.note] if found.note else []}


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    from rft.errors import CheckpointInvalid
    from rft.trainer import manifest as manifests

    out = []
    for path in manifests.committed(folder):
        row: dict[str, Any] = {"step": int(path.name.rpartition("_")[2]), "folder": str(path), "problem": ""}
        try:
            found = manifests.read(path, verify=False)  # hashing gigabytes is for export and resume
            row |= {"version": str(found.version), "bytes": sum(f.size for f in found.files.values())}
        except CheckpointInvalid as e:
            row["problem"] = str(e)
        out.append({**row, "model": (path / "huggingface").is_dir()})
    return out
