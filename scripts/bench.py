"""Benchmarks, each against its peer on the same machine in the same run.

    python scripts/bench.py NAME [--quick] [--json]      one; the last line printed is its result
    python scripts/bench.py NAME [--quick] --write       one, and its section of docs/measured/benchmarks.md
    python scripts/bench.py                              all; writes docs/measured/benchmarks.md

Exit codes: 0 goals reached, 1 a goal missed, 3 a peer is missing (`make peers`).
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from collections.abc import Callable

import bench_harness as harness
from bench_buffer import (
    buffer_append_durable,
    buffer_read_collate,
    buffer_wakeup,
    priority_read_at_scale,
)
from bench_engine import rollout_engine
from bench_explorer import rollout_many
from bench_growth import growth
from bench_logprob import logprob_kernel
from bench_rolling import serve_rolling
from bench_serve import serve_overhead
from bench_start import time_to_first
from bench_step import step_vs_trl
from bench_sync import e2e_async, mismatch_and_exactness, weight_sync
from bench_trainer import trainer_step
from bench_view import view_beside_a_run, view_million

BENCHMARKS: dict[str, Callable[[bool], harness.Result]] = {
    made.__name__: made
    for made in (
        step_vs_trl,
        time_to_first,
        trainer_step,
        logprob_kernel,
        buffer_append_durable,
        buffer_read_collate,
        buffer_wakeup,
        priority_read_at_scale,
        rollout_engine,
        rollout_many,
        e2e_async,
        weight_sync,
        mismatch_and_exactness,
        serve_overhead,
        serve_rolling,
        view_million,
        view_beside_a_run,
        growth,
    )
}


PAGE = harness.ROOT / "docs" / "measured" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

Written by `make bench`, or one section by `python scripts/bench.py NAME --write`. Each ratio is seconds of the peer / seconds of `rft`, \
both measured in turn in one run; a check named `at_most` is the limit / what was measured.
"""


def section(r: harness.Result, how: str) -> str:
    """What docs/measured/benchmarks.md says of one benchmark."""
    about = inspect.getdoc(BENCHMARKS[r.name]) or ""
    lines = [f"## {r.name}", "", about, "", f"{r.machine}; {r.date}; `{how}`.", ""]
    lines += ["| check | ratio | 95 % interval | goal |", "|---|---|---|---|"]
    lines += [
        f"| {c.name} | {c.ratio} | {c.low} – {c.high} | "
        f"{'published' if c.goal is None else f'≥ {c.goal}'} |"
        for c in r.checks
    ]
    facts = {"rft": r.ours, "peer": r.peer, "machine probes": r.probes, "versions": r.versions}
    lines += [
        "",
        *(
            f"- {name}: " + ", ".join(f"{k} {v}" for k, v in values.items())
            for name, values in facts.items()
        ),
        "",
    ]
    return "\n".join(lines)


def write(made: dict[str, str]) -> None:
    """Puts these sections into docs/measured/benchmarks.md; the others and what stands before them
    stay.
    """
    head, *old = (
        PAGE.read_text(encoding="utf-8").split("\n## ") if PAGE.exists() else [INTRODUCTION]
    )
    sections = {text.split("\n", 1)[0]: f"## {text.rstrip()}\n" for text in old} | made
    PAGE.write_text(
        "\n".join(
            [head.rstrip() + "\n", *(sections[name] for name in BENCHMARKS if name in sections)]
        ),
        encoding="utf-8",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks of rft against its peers.")
    parser.add_argument(
        "name", nargs="?", choices=sorted(BENCHMARKS), help="which one; all without"
    )
    parser.add_argument("--quick", action="store_true", help="at least 3 rounds, at most 6 minutes")
    parser.add_argument(
        "--json", action="store_true", help="print the result as one line of JSON, not as a table"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the result into docs/measured/benchmarks.md"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    results: list[harness.Result] = []
    made: dict[str, str] = {}
    try:
        for name in [args.name] if args.name else BENCHMARKS:
            results.append(BENCHMARKS[name](args.quick))
            made[name] = section(results[-1], f"bench.py {name}{' --quick' * args.quick}")
            print(results[-1].json() if args.json else made[name], flush=True)
    except harness.PeerMissing as missing:
        print(f"{name}: {missing}", file=sys.stderr)
        return 3
    if args.write or not args.name:
        write(made)
    return 0 if all(c.passed for r in results for c in r.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
