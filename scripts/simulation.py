"""What `rft simulate` foretells, beside real runs of this machine, and for clusters of 8, 64 and
1,024 GPUs.

    python scripts/simulation.py [--runs FOLDER] [--pages] [--write]

Plays runs of SmolLM2-135M-Instruct (`examples/quickstart`, transformers engine, no evaluations, a
learning rate so small that answers stay as long as they are); speeds are learnt from the first
three, and the step times of all others are foretold from them.  Runs that FOLDER holds already are
not played again.  `--pages`: without runs. `--write` puts both tables into
docs/measured/simulation.md.  Exit code 1 if a foretold step time is more than 20 % off.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pages

from rft.extras.simulate.cluster_file import load
from rft.extras.simulate.forecast import Simulated, simulated
from rft.monitor.read import read
from rft.preflight.check import check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "simulation.md"
EXAMPLE = ROOT / "examples" / "quickstart" / "config.yaml"
CLUSTERS = ROOT / "examples" / "clusters"
STEPS = 12
WARM_UP = 3
PLAIN = (
    "explorer.rollout_model.engine_type=transformers",
    "buffer.explorer_input.eval_tasksets=[]",
    "explorer.eval_on_startup=false",
    f"trainer.total_steps={STEPS}",
    "algorithm.optimizer.lr=1e-7",
    "trainer.save_interval=0",
    "trainer.save_hf_checkpoint=never",
    "monitor.monitor_type=[]",
)
LEARNT_FROM = {
    "2 tasks x 4": ("buffer.batch_size=2", "algorithm.repeat_times=4"),
    "2 tasks x 16": ("buffer.batch_size=2", "algorithm.repeat_times=16"),
    "8 tasks x 4": ("buffer.batch_size=8", "algorithm.repeat_times=4"),
}
FORETOLD = {
    "4 tasks x 8": (),
    "8 tasks x 8": ("buffer.batch_size=8",),
    "6 tasks x 8": ("buffer.batch_size=6",),
    "4 tasks x 8, interval 3": ("synchronizer.sync_interval=3",),
    "4 tasks x 8, offset 1": ("synchronizer.sync_offset=1",),
    "4 tasks x 8, interval 2, offset 1": (
        "synchronizer.sync_interval=2",
        "synchronizer.sync_offset=1",
    ),
    "6 tasks x 4, trainer_driven, interval 2": (
        "buffer.batch_size=6",
        "algorithm.repeat_times=4",
        "synchronizer.sync_style=trainer_driven",
        "synchronizer.sync_interval=2",
        "synchronizer.max_staleness=2",
    ),
}
MOST_OFF = 0.2
SIZES = {8: 128, 64: 512, 1024: 4096}  # GPUs, tasks of a step


def played(folder: Path, name: str, changes: tuple[str, ...]) -> Path:
    """The folder of the run, which is played where it is not there."""
    slug = re.sub(r"\W+", "-", name)
    run = folder / "rft" / "simulation" / slug
    if not (run / "checkpoints").is_dir() or len(step_ends(run)) < STEPS:
        where = [f"checkpoint_root_dir={folder}", "group=simulation", f"name={slug}"]
        line = [
            sys.executable,
            "-m",
            "rft.cli.main",
            "run",
            "--config",
            str(EXAMPLE),
            *PLAIN,
            *where,
            *changes,
        ]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return run


def step_ends(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    return (
        [r.time for r in read(path) if r.role == "trainer" and "perf/step_s" in r.values]
        if path.is_file()
        else []
    )


def validation(folder: Path) -> list[tuple[str, float, float]]:
    """(run, measured, foretold) seconds of a step."""
    learnt = [played(folder, *x) for x in LEARNT_FROM.items()]
    file = folder / "machine.yaml"
    file.write_text(f"measured: [{', '.join(str(x.relative_to(folder)) for x in learnt)}]\n")
    found = []
    for name, changes in FORETOLD.items():
        ends = step_ends(played(folder, name, changes))
        report = check(EXAMPLE, [*PLAIN, *changes], schema_only=True)
        assert report.plan is not None, report.errors
        measured = (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)
        found.append((name, measured, simulated(load(file), report.plan, folder).forecast.step_s))
        print(f"{name:40} {measured:6.2f} s measured, {found[-1][2]:6.2f} s foretold", flush=True)
    return found


def clusters() -> dict[str, Simulated]:
    """For each file of examples/clusters."""
    found = {}
    for gpus, tasks in SIZES.items():
        file = CLUSTERS / f"{gpus}-gpus.yaml"
        cluster = load(file)
        changes = [
            f"explorer.rollout_model.engine_num={gpus // 2}",
            f"buffer.batch_size={tasks}",
            *cluster.overrides(),
        ]
        report = check(CLUSTERS / "config.yaml", changes, schema_only=True, facts=cluster.facts())
        assert report.plan is not None, report.errors
        found[f"{gpus} GPUs, {8 * tasks:,} answers a step"] = simulated(
            cluster, report.plan, CLUSTERS
        )
    return found


def cluster_table() -> str:
    lines = []
    for name, s in clusters().items():
        lines += [f"### {name}", "", *(f"- {what}: {text}" for what, text in s.rows()), ""]
        heads = (
            "rows at most",
            "engines",
            "ranks",
            "synchronizer",
            "step s",
            "explorer waits",
            "trainer waits",
        )
        lines += [
            f"| {' | '.join(heads)} |",
            "|" + "---|" * len(heads),
            *(f"| {' | '.join(row)} |" for row in s.choices()),
            "",
        ]
    return "\n".join(lines)


def validation_table(found: list[tuple[str, float, float]]) -> str:
    lines = ["| Run | measured, s a step | foretold | off |", "|---|---|---|---|"]
    lines += [f"| {name} | {m:.2f} | {f:.2f} | {f / m - 1:+.0%} |" for name, m, f in found]
    where = f"{os.cpu_count()} cores, {platform.machine()}, {datetime.date.today()}"
    return "\n".join([*lines, "", f"{where}; {STEPS} steps each, the first {WARM_UP} left out."])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "simulation")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    texts = {"clusters": cluster_table()}
    found = [] if given.pages else validation(given.runs.resolve())
    if found:
        texts["validation"] = validation_table(found)
    for name, text in texts.items():
        print(text)
        if given.write:
            pages.put(PAGE, f"<!-- {name} -->", f"<!-- end of {name} -->", text)
    return int(any(abs(f / m - 1) > MOST_OFF for _, m, f in found))


if __name__ == "__main__":
    sys.exit(main())
