"""Every sync style over every transport: whole runs of the tiny model with Ray, vLLM and the FSDP2
trainer, one after the other.

    python scripts/sync_matrix.py [--styles "fixed;fully_async"] [--transports memory,checkpoint]
    [--seeds 0,1,2] [--write] [--missing]

`--transports` takes names of `synchronizer.sync_method` (without the option: all that work), each
with further keys where it needs some: `NAME:key=value;key=value`.  `--write` puts the rows into
docs/measured/sync-matrix.md; rows that were not measured stay as they are. `--missing` leaves out
what has a row there. Exit code 1 if a row is older than its run's bound, or the mean accuracies of
two cells differ by more than 0.05.

A seed is that of the random weights, the data and the sampling.  All runs of a seed begin with the
same model, which has learnt about 0.6 of the task (`begun`).  Every run evaluates while it explores
(`eval_in_background`).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rft.monitor.read import read, series
from rft.sync.settings import SyncConfig
from rft.testing import tiny

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "sync-matrix.md"
TINY, IMITATES = (ROOT / "examples" / name / "config.yaml" for name in ("tiny", "sft_tiny"))
BEGUN = 35
STEPS = 50
TASKS = 32
EVALUATED_EVERY = 25
MOST_APART = 0.05
RUN_S = 3600.0
STYLES = {
    "fixed": (),
    "fixed, offset 1": ("sync_offset=1",),
    "fixed, interval 2, offset 1": ("sync_interval=2", "sync_offset=1"),
    "explorer_driven": ("sync_interval=2", "max_staleness=2"),
    "trainer_driven": ("sync_interval=2", "max_staleness=2"),
    "fully_async": ("sync_interval=2", "staleness_threshold=0.5"),
    "fully_async, whole groups": (
        "sync_interval=2",
        "staleness_threshold=1.0",
        "max_staleness=1",
        "partial_rollout=false",
    ),
}
AGES = (
    "SELECT u.step - 1 - t.version_step, sum(t.num_tokens) FROM v_tokens t JOIN uses u ON "
    "u.experience = t.id GROUP BY 1"
)
INTRODUCTION = """# Styles and transports

Whole runs of the tiny model (`examples/tiny`: copy the digit that is shown) with Ray, vLLM and the FSDP2 trainer, written by \
`python scripts/sync_matrix.py --write`. All runs of a seed begin with the same model, which has learnt about 0.6 of the task, and take 50 \
steps of 256 answers. *Oldest* is the largest staleness of a trained token, in train steps, by the version spans in the \
ledger; *bound* is what the run promised; evaluations ran beside exploring. \
A cell that is not here has not been measured.
"""
HEAD = (
    "| style | transport | seed | accuracy | oldest | bound | versions | sync, s | run, s | date "
    "|\n" + "|---" * 10 + "|"
)


@dataclass(frozen=True)
class Cell:
    """One run, measured."""

    style: str
    transport: str
    seed: int
    accuracy: float
    oldest: int
    bound: int
    versions: int
    sync_s: float  # median, canary included
    run_s: float
    date: str

    @property
    def row(self) -> str:
        values = (
            f"{self.accuracy:.2f}",
            self.oldest,
            self.bound,
            self.versions,
            f"{self.sync_s:.2f}",
            f"{self.run_s:.0f}",
            self.date,
        )
        return f"| {self.style} | {self.transport} | {self.seed} | {' | '.join(map(str, values))} |"


def working() -> list[str]:
    """The shipped values of sync_method; the rest of the type are transports of one's own."""
    return list(get_args(get_args(SyncConfig.model_fields["sync_method"].annotation)[0]))


def changes(style: str, transport: str) -> list[str]:
    """The keys of a cell."""
    method, _, more = transport.partition(":")
    sync = (f"sync_method={method}", f"sync_style={style.partition(',')[0]}", *STYLES[style])
    return [*(f"synchronizer.{x}" for x in sync), *filter(None, more.split(";"))]


def ages(folder: Path) -> dict[int, int]:
    """Staleness in train steps -> tokens, by the version that wrote each token and the step that
    trained it.
    """
    with closing(
        sqlite3.connect(f"file:{folder / 'buffer' / 'experience_buffer.db'}?mode=ro", uri=True)
    ) as db:
        return dict(db.execute(AGES).fetchall())


def run_rft(*arguments: str) -> str:
    """What `rft run` printed; raises RuntimeError with its end where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "rft.cli.main", "run", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"rft run {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return done.stdout


def begun(folder: Path, seed: int) -> Path:
    """A tiny model after 35 steps of supervised learning, which gives each digit a probability of
    about 0.6.

    With random weights the first right answers are luck, and some runs never see one to a certain
    digit.
    """
    model = tiny.make(folder / "model", seed=seed)
    run_rft(
        "--in-process",
        "--config",
        str(IMITATES),
        f"model.model_path={model}",
        f"checkpoint_root_dir={folder}",
        f"seed={seed}",
        "buffer.train_batch_size=64",
        "buffer.total_epochs=2",
        f"trainer.total_steps={BEGUN}",
        "trainer.eval_interval=0",
        "trainer.save_hf_checkpoint=last",
    )
    (exported,) = folder.rglob("huggingface")
    return exported


def play(
    style: str, transport: str, seed: int, folder: Path, model: Path, *more: str, steps: int = STEPS
) -> Cell:
    """One run in `folder` that begins with `model`."""
    given = [
        f"model.model_path={model}",
        f"checkpoint_root_dir={folder}",
        f"seed={seed}",
        "explorer.rollout_model.engine_type=vllm",
        f"trainer.total_steps={steps}",
        f"buffer.batch_size={TASKS}",
        "trainer.save_hf_checkpoint=never",
        f"explorer.eval_interval={EVALUATED_EVERY}",
        "explorer.eval_in_background=true",
        *changes(style, transport),
        *more,
    ]
    began = time.monotonic()
    run_rft("--config", str(TINY), *given)
    took = time.monotonic() - began
    run = folder / "rft" / "examples" / "tiny"
    values = read(run / "metrics.jsonl")
    syncs = series(values, "sync/total_s")
    return Cell(
        style,
        transport,
        seed,
        accuracy=dict(series(values, "eval/copy_eval/mean@1"))[steps],
        oldest=max(ages(run)),
        bound=int(series(values, "sync/staleness_bound")[0][1]),
        versions=len(syncs),
        sync_s=statistics.median(s for _, s in syncs[1:]),
        run_s=took,
        date=datetime.date.today().isoformat(),
    )


# ---------------------------------------------------------------- the page

_NAMES = r"\| (?P<style>[^|]+) \| (?P<transport>[^|]+) \| (?P<seed>\d+) "
_ROW = re.compile(_NAMES + r"\| (?P<accuracy>[\d.]+) \| (?P<oldest>\d+) \| (?P<bound>\d+) \|")


def page() -> str:
    return PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""


def known(text: str) -> dict[tuple[str, str, int], str]:
    """The rows of a page by style, transport and seed."""
    return {
        (m["style"], m["transport"], int(m["seed"])): line
        for line in text.splitlines()
        if (m := _ROW.match(line))
    }


def merged(text: str, cells: Sequence[Cell]) -> list[str]:
    """All rows, new ones in place of old ones, in the order of styles, transports and seeds."""
    rows = known(text)
    rows |= {(c.style, c.transport, c.seed): c.row for c in cells}
    styles = list(STYLES)
    return [
        rows[k]
        for k in sorted(
            rows, key=lambda k: (styles.index(k[0]) if k[0] in styles else 99, k[1], k[2])
        )
    ]


def verdict(rows: Sequence[str]) -> tuple[bool, str]:
    """Whether every row keeps its bound and the means of the cells lie together, and a sentence
    that says so.
    """
    found, means = [m for row in rows if (m := _ROW.match(row))], defaultdict(list)
    for m in found:
        means[m["style"], m["transport"]].append(float(m["accuracy"]))
    each = {cell: statistics.fmean(values) for cell, values in means.items()}
    apart = max(each.values()) - min(each.values())
    older = sum(int(m["oldest"]) > int(m["bound"]) for m in found)
    text = (
        f"{len(found)} runs in {len(each)} cells; mean accuracies of the cells from "
        f"{min(each.values()):.3f} to {max(each.values()):.3f} "
        f"({apart:.3f} apart, allowed {MOST_APART}); {older} runs with a row older than the bound."
    )
    return older == 0 and apart <= MOST_APART, text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--styles", help=f"separated by semicolons: {'; '.join(STYLES)}")
    parser.add_argument(
        "--transports", help=f"separated by commas; without it {','.join(working())}"
    )
    parser.add_argument("--seeds", default="0,1,2", help="whole numbers, separated by commas")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"put the rows into {PAGE.relative_to(ROOT)} after every run",
    )
    parser.add_argument("--missing", action="store_true", help="only what the page has no row of")
    options = parser.parse_args()
    styles = [s.strip() for s in options.styles.split(";")] if options.styles else list(STYLES)
    if unknown := [s for s in styles if s not in STYLES]:
        parser.error(f"--styles {'; '.join(unknown)}: not known; {'; '.join(STYLES)}")
    transports = options.transports.split(",") if options.transports else working()
    cells: list[Cell] = []
    there = known(page()) if options.missing else {}
    for seed in map(int, options.seeds.split(",")):
        asked = [
            cell for cell in itertools.product(styles, transports) if (*cell, seed) not in there
        ]
        with tempfile.TemporaryDirectory(prefix="rft-matrix-") as name:
            model = begun(Path(name) / "begun", seed) if asked else Path()
            for i, (style, transport) in enumerate(asked):
                cells.append(play(style, transport, seed, Path(name) / str(i), model))
                print(cells[-1].row, flush=True)
                if options.write:
                    write(cells)
    if not cells:
        print("nothing is missing")
        return 0
    good, text = verdict(merged("", cells))
    print(f"\n{text}")
    return int(not good)


def write(cells: Sequence[Cell]) -> None:
    rows = merged(page(), cells)
    about = (
        f"{verdict(rows)[1]} Python {platform.python_version()} on {platform.machine()}, "
        f"{os.cpu_count()} cores."
    )
    PAGE.write_text("\n".join([INTRODUCTION, about, "", HEAD, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
