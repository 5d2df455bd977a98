"""Plays the fault matrix of the buffer and writes its dated table.

    python scripts/fault_matrix.py [--seeds 20] [--storages sql,file,queue,postgresql] [--only F5]
    [--images] [--write]

Every case is a run with real processes that are killed, stopped, or given a failing disk, and
judged by files alone (`tests.helpers.lab`).  `--images` plays the cases of kill -9 with rows that
show images.  `--write` puts the table of either into docs/measured/fault-matrix.md.
Exit code 1 if any case fails.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pages

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rft.fault_injection import BUFFER_POINTS  # noqa: E402
from tests.helpers.lab.cases import (  # noqa: E402
    EXPLORER,
    TRAINER,
    Case,
    matrix,
    postgres_matrix,
)
from tests.helpers.lab.lab import Nursery, build_shim, nursery  # noqa: E402
from tests.helpers.postgres import PostgresServer, programs  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "fault-matrix.md"
MARKS = (
    ("<!-- matrix: written by scripts/fault_matrix.py -->", "<!-- end of the matrix -->"),
    ("<!-- images: written by scripts/fault_matrix.py -->", "<!-- end of images -->"),
)


@dataclass
class Line:
    """One row of the table: a case on all storages."""

    number: str
    name: str
    storages: list[str] = field(default_factory=list)
    runs: int = 0
    deaths: int = 0  # processes that ended otherwise than by being done
    rows: int = 0  # acknowledged experiences
    lost: int = 0
    twice: int = 0
    failed: list[str] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)

    def text(self) -> str:
        recover = f"{max(self.recovered):.2f}" if self.recovered else "–"
        where = ", ".join(dict.fromkeys(self.storages))
        verdict = f"{len(self.failed)} of {self.runs}" if self.failed else "0"
        counts = (self.runs, self.deaths, self.rows, self.lost, self.twice, verdict)
        return (
            f"| {self.number} | {self.name} | {where} | {' | '.join(map(str, counts))} | "
            f"{recover} |"
        )


HEAD = (
    "| # | Fault | Storages | Runs | Deaths | Acknowledged rows | Lost | Trained twice | Failed "
    "runs | Recovered within, s |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=20,
        help="of the cases that kill -9; a quarter of it for the others, and with --images for those "
        "at a named point",
    )
    parser.add_argument("--storages", default="sql,file,queue,postgresql")
    parser.add_argument("--only", default="", help="numbers of the fault table, e.g. F1,F5")
    parser.add_argument("--images", action="store_true", help="rows show images")
    parser.add_argument(
        "--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    lines: dict[tuple[str, str], Line] = {}
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="rft-lab-") as folder,
        nursery(build_shim(Path(folder))) as processes,
    ):
        for storage in options.storages.split(","):
            for case, plan in cases(storage):
                if options.images:
                    plan = {**plan, "images": True}
                due = case.name.startswith("kill -9") or not options.images
                if due and (not options.only or case.number in options.only.split(",")):
                    line = lines.setdefault((case.number, case.name), Line(case.number, case.name))
                    line.storages.append(storage)
                    play(processes, case, plan, options.seeds, line)
                    print(f"{storage:10} {line.text()}", flush=True)
    table = summary(list(lines.values()), options.seeds, time.monotonic() - began, options.images)
    print(table)
    if options.write:
        pages.put(PAGE, *MARKS[options.images], table)
    return int(any(line.failed for line in lines.values()))


def cases(storage: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Cases with what their plans have in common."""
    if storage != "postgresql":
        yield from ((case, {"storage": storage}) for case in matrix(storage))
        return
    bin = programs()
    if bin is None:
        sys.exit("no PostgreSQL server is installed; leave postgresql out of --storages")
    server = PostgresServer(bin)
    try:
        server.start()
        for case in postgres_matrix(server):
            yield case, {"storage": "sql", "ledger_url": server.url}
    finally:
        server.close()


def play(processes: Nursery, case: Case, plan: dict[str, Any], seeds: int, line: Line) -> None:
    if case.needs_shim and not processes.has_shim:
        sys.exit("a C compiler is needed: some cases make single writes fail")
    often = case.name.startswith("kill -9") and not ("images" in plan and _at_a_point(case))
    for seed in range(seeds if often else max(1, seeds // 4)):
        line.runs += 1
        explorers = 1 + (seed % 4 == 3 and case.name.startswith("kill -9"))
        try:
            result = case.run(processes, seed, **plan, explorers=explorers)
        except (
            Exception
        ) as e:  # the others are played all the same; it is written down, and decides the exit code
            line.failed.append(f"{case.name} seed {seed} {plan}: {e}")
            print(line.failed[-1][:2000], *getattr(e, "__notes__", ()), file=sys.stderr, flush=True)
            continue
        line.deaths += sum(not x.endswith(" 0") for x in result.deaths)
        line.rows += result.verdict.acked
        line.lost += result.verdict.lost
        line.twice += result.verdict.twice
        line.recovered += result.recovered_s


def _at_a_point(case: Case) -> bool:
    return case.name.rpartition(" ")[2] in {
        point.removeprefix(f"lab.{role}.")
        for role, points in (("explorer", EXPLORER), ("trainer", TRAINER), ("", BUFFER_POINTS))
        for point in points
    }


def summary(lines: list[Line], seeds: int, seconds: float, images: bool) -> str:
    lines.sort(key=lambda x: (int(x.number[1:]), x.name))
    runs = sum(x.runs for x in lines)
    failed = sum(len(x.failed) for x in lines)
    kept = [x for x in lines if "durability process" not in x.name]
    total = {k: sum(getattr(x, k) for x in lines) for k in ("deaths", "rows", "twice")}
    about = (
        f"{datetime.date.today()}: {runs} runs, {seeds} seeds of each kill -9 and "
        f"{max(1, seeds // 4)} of the others{' and at each named point' * images}, "
        f"{total['deaths']} processes ended in mid-work, {total['rows']} experiences acknowledged, "
        f"{sum(x.lost for x in kept)} lost, {total['twice']} trained twice, {failed} failed runs; "
        f"{seconds / 60:.0f} minutes with Python {platform.python_version()} on "
        f"{platform.machine()}."
    )
    return "\n".join([about, "", HEAD, *(x.text() for x in lines)])


if __name__ == "__main__":
    sys.exit(main())
