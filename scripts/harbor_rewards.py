"""Rewards of the reference runner: Harbor plays each of `examples/terminal_tasks` with its solution and
with an agent that does nothing, in Podman; rft gave 1 and 0 (tests/extras/sandbox/test_terminal_tasks.py).

    python3.12 -m venv F && F/bin/pip install harbor==0.25.0 podman-compose
    python scripts/harbor_rewards.py --harbor F/bin [--tasks leap-year,sort-names] [--write]

The image python:3.12-slim must be there, or `--image` names another.  Harbor's filter of networks
needs an image of a registry, so the tasks are copies without `network_mode`; podman-compose gets
`network_mode: none`.  Trials that end without a reward are repeated.  `--write` puts each row into
docs/measured/harbor.md as it is known; rows of other tasks stay.  Exit code 1 if a reward differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pages

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples" / "terminal_tasks" / "tasks"
PAGE = ROOT / "docs" / "measured" / "harbor.md"
BEGIN = "<!-- rewards: written by scripts/harbor_rewards.py -->"
END = "<!-- end of the rewards -->"
AGENTS = {"oracle": 1.0, "nop": 0.0}  # Harbor's names, and rft's rewards
NO_NETWORK = "services:\n  main:\n    network_mode: none\n"
HEAD = "| Task | Agent | Harbor | rft | Equal |\n|---|---|---|---|---|"
LIMIT_S = 1800.0
IMAGE = "python:3.12-slim"
TRIALS = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(path.name for path in TASKS.iterdir())
    parser.add_argument("--harbor", type=Path, required=True, help="folder of its programs")
    parser.add_argument("--tasks", default=",".join(every))
    parser.add_argument("--image", default=IMAGE, help="in place of that of the tasks")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    names = options.tasks.split(",")
    if unknown := [name for name in names if name not in every]:
        parser.error(f"--tasks {', '.join(unknown)}: not known; {', '.join(every)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
        for name in names:
            for agent, wanted in AGENTS.items():
                for number in range(TRIALS):
                    place = Path(folder, str(number))
                    reward = played(place, name, agent, options.harbor, options.image)
                    if re.fullmatch(r"[\d.]+", reward):
                        break
                    print(f"{name}, {agent}: {reward}", file=sys.stderr, flush=True)
                rows.append(
                    f"| {name} | {agent} | {reward} | {wanted:g} | {equal(reward, wanted)} |"
                )
                print(rows[-1], flush=True)
                if options.write:
                    write(rows)
    return int(any("| no |" in row for row in rows))


def write(rows: list[str]) -> None:
    """Put rows into the page, in place of those of the same task and agent."""
    kept = re.findall(r"(?m)^\| [\w-]+ \| (?:oracle|nop) \|.*$", PAGE.read_text())
    latest = {tuple(row.split(" | ")[:2]): row for row in [*kept, *rows]}
    about = f"{datetime.date.today()}: Harbor 0.25.0, `--env podman`."
    pages.put(PAGE, BEGIN, END, "\n".join([about, "", HEAD, *sorted(latest.values())]))


def equal(reward: str, wanted: float) -> str:
    return "yes" if re.fullmatch(r"[\d.]+", reward) and float(reward) == wanted else "no"


def played(folder: Path, name: str, agent: str, programs: Path, image: str) -> str:
    """Return the reward of a trial, or what went wrong."""
    task = folder / name
    shutil.copytree(TASKS / name, task, dirs_exist_ok=True)
    table = (task / "task.toml").read_text().replace('network_mode = "no-network"\n', "")
    (task / "task.toml").write_text(table)
    dockerfile = task / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(IMAGE, image))
    (folder / "none.yaml").write_text(NO_NETWORK)
    trial = f"{name}-{agent}"
    line = [str(programs / "harbor"), "trials", "start", "--path", str(task), "--agent", agent]
    line += ["--env", "podman", "--trials-dir", str(folder / "trials"), "--trial-name", trial]
    line += ["--extra-docker-compose", str(folder / "none.yaml")]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    result = folder / "trials" / trial / "result.json"
    if not result.is_file():
        return f"exit {done.returncode}: {(done.stdout + done.stderr)[-200:]!r}"
    found = json.loads(result.read_text())
    if found.get("verifier_result") is None:
        return str((found.get("exception_info") or {}).get("exception_message"))[:200]
    return f"{found['verifier_result']['rewards']['reward']:g}"


if __name__ == "__main__":
    sys.exit(main())
