"""Benchmarks, each against its peer on the same machine in the same run.

    python scripts/bench.py NAME [--quick] [--json]      one; the last line printed is its result
    python scripts/bench.py                              all; writes docs/benchmarks.md

Exit codes: 0 goals reached, 1 a goal missed, 3 a peer is missing (`make peers`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

import bench_harness as harness
from bench_buffer import buffer_append_durable, buffer_read_collate, buffer_wakeup, priority_read_at_scale
from bench_start import time_to_first
from bench_step import step_vs_trl

BENCHMARKS: dict[str, Callable[[bool], harness.Result]] = {
    made.__name__: made
    for made in (
        step_vs_trl,
        time_to_first,
        buffer_append_durable,
        buffer_read_collate,
        buffer_wakeup,
        priority_read_at_scale,
    )
}


def page(results: list[harness.Result]) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Each ratio is seconds of the peer / seconds of `rft`, both measured in turn in one run.",
        "",
    ]
    for r in results:
        lines += [f"## {r.name}", "", (BENCHMARKS[r.name].__doc__ or "").strip(), "", f"{r.machine}; {r.date}.", ""]
        lines += ["| check | ratio | 95 % interval | goal |", "|---|---|---|---|"]
        lines += [
            f"| {c.name} | {c.ratio} | {c.low} – {c.high} | {'published' if c.goal is None else f'≥ {c.goal}'} |"
            for c in r.checks
        ]
        facts = {"rft": r.ours, "peer": r.peer, "machine probes": r.probes, "versions": r.versions}
        lines += ["", *(f"- {name}: " + ", ".join(f"{k} {v}" for k, v in values.items()) for name, values in facts.items()), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks of rft against its peers.")
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="which one; all without")
    parser.add_argument("--quick", action="store_true", help="at least 3 rounds, at most 6 minutes")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON, not as a table")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    results = []
    try:
        for name in [args.name] if args.name else BENCHMARKS:
            results.append(BENCHMARKS[name](args.quick))
            print(results[-1].json() if args.json else page(results[-1:]), flush=True)
    except harness.PeerMissing as missing:
        print(f"{name}: {missing}", file=sys.stderr)
        return 3
    if not args.name:
        (harness.ROOT / "docs" / "benchmarks.md").write_text(page(results), encoding="utf-8")
    return 0 if all(c.passed for r in results for c in r.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
