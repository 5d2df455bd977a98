"""Runs a configuration and compares each role's peak memory with what `rft check` estimates.

    python scripts/measure_memory.py -c examples/quickstart/config.yaml [key.path=value ...]     one run
    python scripts/measure_memory.py                                                             the table of docs/measured/memory.md

A role's peak is the sum of VmHWM, the kernel's own high-water mark of resident bytes, over the
living processes of its tree; published weights are in memory of their own (memfd) and counted at
the descriptors that hold them.  Linux only.

Exit codes: 0 all ratios within 15 %, 1 one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import psutil

from rft.preflight.check import check
from rft.preflight.check_report import Report

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "config.yaml"
SHORT = ("trainer.total_steps=3", "explorer.eval_on_startup=false", "explorer.eval_interval=1000")
SETTINGS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "kv_cache_bytes 256 MiB, max_num_seqs 8": (
        "explorer.rollout_model.kv_cache_bytes=268435456",
        "explorer.rollout_model.max_num_seqs=8",
    ),
    "gradient checkpointing": ("trainer.enable_gradient_checkpointing=true",),
    "64 runs a step, token budget 512": (
        "buffer.batch_size=8",
        "trainer.max_token_len_per_gpu=512",
    ),
    "64 runs a step, token budget 2048": (
        "buffer.batch_size=8",
        "trainer.max_token_len_per_gpu=2048",
    ),
    "transformers engine, 64 runs a step, shared prompts off": (
        "explorer.rollout_model.engine_type=transformers",
        "buffer.batch_size=8",
        "trainer.row_layout=padded",
        "trainer.max_token_len_per_gpu=1024",
    ),
}
TITLE = re.compile(r"ray::(engine|trainer)_(\d+)")
SAMPLE_S = 0.2


@dataclass(frozen=True)
class Row:
    """One role of one run, bytes."""

    setting: str
    role: str
    estimate: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.estimate / self.measured


@dataclass
class Watch:
    """The largest sum of high-water marks that each role's living processes had at one time."""

    totals: dict[str, int] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)  # of a process, where its title says it

    def look(self, root: psutil.Process) -> None:
        parents: dict[int, int] = {}
        peaks: dict[int, int] = {}
        now: dict[str, int] = {"other processes": 0}
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error, OSError):  # it has just ended
                parents[process.pid] = process.ppid()
                if found := TITLE.match(" ".join(process.cmdline())):
                    self.roles[process.pid] = f"{found[1]}-{found[2]}"
                peaks[process.pid] = _high_water(process.pid)
                now["other processes"] += _weights(process.pid)
        for pid, peak in peaks.items():
            role = self._of(pid, parents)
            now[role] = now.get(role, 0) + peak
        self.totals = {
            role: max(now.get(role, 0), self.totals.get(role, 0)) for role in {*now, *self.totals}
        }

    def _of(self, pid: int, parents: dict[int, int]) -> str:
        """A process's own title says its role, or that of the nearest process above it."""
        at: int | None = pid
        while at is not None:
            if at in self.roles:
                return self.roles[at]
            at = parents.get(at)
        return "other processes"


def measure(config: Path, overrides: Sequence[str], setting: str = "") -> list[Row]:
    """Runs `config` in a temporary folder.  Raises RuntimeError with the end of its output when it
    fails.
    """
    report = check(config, overrides)
    if not report.ok:
        raise RuntimeError("\n".join(str(e) for e in report.errors))
    with tempfile.TemporaryDirectory(prefix="rft-memory-") as folder:
        seen = _run(config, [*overrides, f"checkpoint_root_dir={folder}"], Path(folder) / "output")
    return _rows(report, seen, setting)


def _rows(report: Report, seen: Watch, setting: str) -> list[Row]:
    return [Row(setting, role.role, role.nbytes, seen.totals[role.role]) for role in report.memory]


def _run(config: Path, overrides: Sequence[str], output: Path) -> Watch:
    command = [sys.executable, "-m", "rft.cli.main", "run", "-c", str(config), *overrides]
    watch = Watch()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    watch.look(psutil.Process(process.pid))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(60)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with "
            f"{process.returncode}:\n{output.read_text(errors='replace')[-2000:]}"
        )
    return watch


def _high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("VmHWM:", "RssShmem:"))
    }
    if not sizes:  # it is a zombie
        return 0
    # who holds published weights has them mapped
    return sizes["VmHWM"] - (sizes["RssShmem"] if _weights(pid) else 0)


def _weights(pid: int) -> int:
    total = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if str(fd.readlink()).startswith("/memfd:rft-weights"):
                total += fd.stat().st_blocks * 512
    return total


def machine() -> str:
    gib = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{os.cpu_count()} cores, {gib:.0f} GiB, no GPU, Python {platform.python_version()}; "
        f"{date.today().isoformat()}"
    )


def table(rows: Sequence[Row]) -> str:
    lines = ["| setting | role | estimate MiB | measured MiB | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.setting} | {r.role} | {r.estimate >> 20:,} | {r.measured >> 20:,} | {r.ratio:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Estimated and measured peak memory of each role.")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument(
        "-c", "--config", type=Path, help="one run of this file; the documented settings without"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    settings = (
        {"": tuple(args.overrides)}
        if args.config
        else {name: (*SHORT, *given) for name, given in SETTINGS.items()}
    )
    rows: list[Row] = []
    for name, given in settings.items():
        rows += measure(args.config or QUICKSTART, given, name)
        if not args.json:
            print(table(rows[-len([r for r in rows if r.setting == name]) :]), flush=True)
    if args.json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "rows": [{**asdict(r), "ratio": round(r.ratio, 3)} for r in rows],
                }
            )
        )
    else:
        print(f"\n{machine()}\n\n{table(rows)}")
    return 0 if all(0.85 <= r.ratio <= 1.15 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
