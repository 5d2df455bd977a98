"""Does a model learn from an agent that lives elsewhere?  `rft serve` with vLLM and SmolLM2; a
LangGraph agent in a process of its own.

    python scripts/learning_serve.py [--seeds 42,1,2] [--steps 15] [--keep FOLDER] [--write]

The agent runs in an environment with examples/serve/frameworks.txt: that of RFT_FRAMEWORKS_PYTHON,
or one that is made for it.  After every EVERY steps it answers the questions that are never
trained, RUNS times each at temperature 1, through the same service. `--keep` keeps runs and what
was measured in FOLDER: called again, it goes on from the last evaluation.  `--write` puts table and
picture into docs/howto/serve.md and docs/assets.  Exit code 1 if a seed misses the goal.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bench_harness
import pages
from learning import REAL_SEEDS, pretrained

from rft.monitor.read import read
from rft.taskset.generated_tasks import digit_sums

ROOT = Path(__file__).resolve().parents[1]
SERVE = ROOT / "examples" / "serve"
PAGE = ROOT / "docs" / "howto" / "serve.md"
PICTURE = ROOT / "docs" / "assets" / "serve_langgraph.png"
GOAL = 0.8
EVERY = 5
RUNS = 8
GROUPS = 4  # of a step, as smollm2.yaml says
BEGIN = "<!-- learning: written by scripts/learning_serve.py -->"
END = "<!-- /learning -->"
WAIT_S = 1200.0  # for a start, or for the steps between two evaluations
Curve = list[tuple[int, float]]  # (steps, held-out reward)


@dataclass
class Kept:
    """What was measured, by seed, and its file in `folder`."""

    folder: Path
    curves: dict[int, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (file := self.folder / "curves.json").exists():
            self.curves = {
                seed: [(step, value) for step, value in curve]
                for seed, curve in json.loads(file.read_text())
            }

    def add(self, seed: int, step: int, value: float) -> None:
        print(f"seed {seed}, step {step}: held out {value:.3f}", flush=True)
        self.curves.setdefault(seed, []).append((step, value))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "curves.json").write_text(json.dumps(list(self.curves.items())))


@dataclass(frozen=True)
class Served:
    """A service that listens, and the agent's process."""

    folder: Path
    agent: bench_harness.Child

    def play(self, tasks: list[dict[str, str]], *, train: bool) -> list[float]:
        """The agent plays each task RUNS times at the same time; its rewards."""
        return [
            float(p["reward"]) for p in self.agent.ask(tasks=tasks, runs=RUNS, train=train)["plays"]
        ]

    def step(self) -> int:
        """The step whose weights are served: what was published last."""
        told = [
            r.values["sync/version"]
            for r in read(self.folder / "metrics.jsonl")
            if "sync/version" in r.values
        ]
        return int(told[-1])

    def wait(self, service: subprocess.Popen[str], step: int) -> None:
        """Until the weights of `step` are served."""
        for _ in _moments(service):
            if self.step() >= step:
                return


def _moments(service: subprocess.Popen[str]) -> Iterator[None]:
    """A moment each second, while the service lives.  Raises RuntimeError when it has ended, or
    after WAIT_S.
    """
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.wait(1.0)
            break
    raise RuntimeError("the service has ended, or took too long; see its output")


def client_alone(folder: Path) -> Path:
    """Return a path with the client and nothing else of rft, which the agent's Python has not."""
    client = Path("rft", "extras", "serve", "client.py")
    alone = folder / "path" / client
    alone.parent.mkdir(parents=True, exist_ok=True)
    alone.write_text((ROOT / client).read_text())
    return folder / "path"


@contextlib.contextmanager
def _service(
    folder: Path, seed: int, steps: int, model: Path, python: str
) -> Iterator[tuple[subprocess.Popen[str], Served]]:
    key = secrets.token_hex(24)
    command = [
        sys.executable,
        "-m",
        "rft.cli.main",
        "serve",
        "--config",
        str(SERVE / "smollm2.yaml"),
    ]
    command += [
        f"checkpoint_root_dir={folder}",
        f"seed={seed}",
        f"trainer.total_steps={steps + EVERY}",  # with its last step the service ends
        "trainer.save_interval=1",
        "trainer.max_checkpoints_to_keep=1",
    ]
    environment = {**os.environ, "RFT_SERVE_KEY": key, "MODEL_PATH": str(model)}
    run = folder / "rft" / "examples" / "langgraph"
    (run / "serve.json").unlink(missing_ok=True)  # of one that was killed
    with (folder / "serve.log").open("a") as output:
        service = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
        )
        try:
            for _ in _moments(service):
                if (run / "serve.json").exists():
                    break
            address = json.loads((run / "serve.json").read_text())["base_url"]
            own = {"PYTHONPATH": str(client_alone(folder)), "RFT_SERVE_KEY": key}
            command = [python, str(SERVE / "langgraph_agent.py"), address]
            with bench_harness.Child(
                "langgraph_agent.py", command, answer_s=WAIT_S, env=own
            ) as agent:
                yield service, Served(run, agent)
        except BaseException:
            print((folder / "serve.log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(120)


def learn(kept: Kept, seed: int, steps: int, model: Path, python: str) -> None:
    """Up to `steps` train steps of one run, from where it was left."""
    train = digit_sums(split="train")
    held_out = digit_sums(split="test")
    random.Random(seed).shuffle(train)
    with _service(kept.folder / f"seed{seed}", seed, steps, model, python) as (run, served):
        for step in itertools.count(served.step()):
            if step % EVERY == 0 and step not in dict(kept.curves.get(seed, ())):
                kept.add(seed, step, statistics.mean(served.play(held_out, train=False)))
            if step >= steps:
                break
            tasks = itertools.islice(itertools.cycle(train), GROUPS * step, GROUPS * (step + 1))
            rewards = served.play(list(tasks), train=True)
            served.wait(run, step + 1)
            print(
                f"seed {seed}, step {step + 1}: reward {statistics.mean(rewards):.3f}", flush=True
            )


def picture(curves: dict[int, Curve]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for seed, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", lw=1.6, label=f"seed {seed}")
    axes.axhline(GOAL, color="#888888", lw=1, ls=":")
    axes.set(xlabel="train steps", ylabel="held-out answers that are right", ylim=(0, 1))
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(PICTURE, transparent=True)


def table(curves: dict[int, Curve]) -> str:
    """What the page says of these runs."""
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    lines = [
        f"| Seed | {' | '.join(f'step {s}' for s in steps)} |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for seed, curve in curves.items():
        values = dict(curve)
        lines.append(
            f"| {seed} | {' | '.join(f'{values[s]:.3f}' if s in values else '' for s in steps)} |"
        )
    about = (
        f"{bench_harness.machine()}; {datetime.date.today()}; `python "
        f"scripts/learning_serve.py --write`."
    )
    title = [
        "## An agent in LangGraph that learns",
        "",
        "Single-digit sums with SmolLM2-135M-Instruct: held-out answers that are right, by train "
        "steps.",
    ]
    return "\n".join(
        [
            *title,
            "",
            about,
            "",
            *lines,
            "",
            f"![Held-out answers that are right](../assets/{PICTURE.name})",
        ]
    )


def environment() -> str:
    """The Python that has the frameworks."""
    if given := os.environ.get("RFT_FRAMEWORKS_PYTHON"):
        return given
    folder = ROOT / ".venv-frameworks"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [
                str(folder / "bin" / "pip"),
                "install",
                "--quiet",
                "-r",
                str(SERVE / "frameworks.txt"),
            ],
            check=True,
        )
    return str(folder / "bin" / "python")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", default=",".join(map(str, REAL_SEEDS)), help="whole numbers, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=15, help=f"a multiple of {EVERY}")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; a temporary one without")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended
    model = pretrained()
    python = environment()
    with tempfile.TemporaryDirectory(prefix="rft-learning-") as aside:
        kept = Kept((options.keep or Path(aside)).absolute())
        for seed in map(int, options.seeds.split(",")):
            if seed not in kept.curves or kept.curves[seed][-1][0] < options.steps:
                learn(kept, seed, options.steps, model, python)
    curves = kept.curves
    made = table(curves)
    print(made)
    if options.write:
        picture(curves)
        pages.put(PAGE, BEGIN, END, made)
    return int(any(curve[-1][1] < GOAL for curve in curves.values()))


if __name__ == "__main__":
    sys.exit(main())
