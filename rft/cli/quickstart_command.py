"""`rft quickstart`: train a pretrained model on this machine, and show the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from rft.secrets import safe


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key.path=value, as for `rft run`", show_default=False),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm, or transformers where vLLM cannot be installed")
    ] = "vllm",
    seed: Annotated[int, typer.Option(help="seed of data order and sampling")] = 42,
    root: Annotated[Path, typer.Option(help="folder for the run")] = Path("runs"),
) -> None:
    """Fetch SmolLM2-135M-Instruct and train it on single-digit sums with GRPO; shows held-out
    accuracy before and after.
    """
    from rich.console import Console

    from rft.launch.execute import execute
    from rft.testing.models import NAME, cache_root, smollm2

    console = Console(soft_wrap=True)
    if not (cache_root() / "models" / NAME).is_dir():
        console.print(f"fetching {NAME} (93 MB, once), then converting it ...")
    model = smollm2()
    changes = [
        f"model.model_path={model}",
        f"explorer.rollout_model.engine_type={engine}",
        f"checkpoint_root_dir={root}",
        f"name={engine}-seed{seed}",
        f"seed={seed}",
        *(overrides or []),
    ]
    outcome = execute(config_file(), changes)
    report(outcome.run_dir, outcome.seconds if outcome.resumed_from is None else None, console)


def config_file() -> Path:
    """Return the quickstart's configuration, of the source tree or the installed package."""
    package = Path(__file__).parent.parent
    for folder in (package.parent / "examples", package / "_examples"):
        if (path := folder / "quickstart" / "config.yaml").exists():
            return path
    raise FileNotFoundError(
        "examples/quickstart/config.yaml is neither in the source tree nor in the package"
    )


def report(run_dir: Path, seconds: float | None, console: Any) -> None:
    """Print held-out accuracy, answers before and after, the curve and next commands.

    `seconds`: duration of an uninterrupted run.
    """
    from rft.monitor.curves import Picture, evaluations, is_main, main_curves, svg
    from rft.monitor.read import AllSeries, Records

    measured = AllSeries(is_main, Records(run_dir / "metrics.jsonl"))
    name = next(iter(evaluations(measured.names)), "")
    points = measured.points(name)
    took = "" if seconds is None else f", {seconds:.0f} s"
    if len(points) > 1:
        taskset, _, mean = name.removeprefix("eval/").rpartition("/")
        if (shown := _answers(run_dir, taskset, points[0][0], points[-1][0])).row_count:
            console.print(shown)
        gain = f"[bold]{points[0][1]:.2f} -> {points[-1][1]:.2f}[/bold] in {points[-1][0]} steps"
        console.print(f"\nheld-out accuracy ({mean}, temperature 1): {gain}{took}")
    else:
        console.print(
            f"\nno accuracy to compare: the run has no evaluation before and after training "
            f"(explorer.eval_*){took}"
        )
    picture = run_dir / "reward_curve.svg"
    Picture(svg(main_curves(measured), title=run_dir.resolve().name)).save(picture)
    console.print(f"curve     {picture}\nrun       {run_dir}")
    for model in sorted(
        run_dir.glob("checkpoints/global_step_*/huggingface"), key=lambda m: m.stat().st_mtime_ns
    )[-1:]:
        console.print(f"model     {model}")
    console.print(f"next      rft status {run_dir}, or rft view {run_dir}")
    console.print(
        "          rft run --config examples/quickstart/config.yaml model.model_path=YOUR_MODEL"
    )
    console.print("          docs/ explains how to write a workflow, a reward, a taskset")


def _answers(run_dir: Path, taskset: str, first: int, last: int) -> Any:
    """Tabulate first answers to six held-out questions, before and after training."""
    from rich.table import Table

    before = _samples(run_dir, taskset, first)
    after = _samples(run_dir, taskset, last)
    table = Table(title="held-out questions, first answer of each", title_justify="left")
    for column in (
        "question",
        "truth",
        "untrained" if first == 0 else f"after {first} steps",
        f"after {last} steps",
    ):
        table.add_column(column, overflow="fold")
    for prompt in list(before)[:6]:
        if prompt in after:
            table.add_row(
                _escaped(prompt),
                _escaped(before[prompt]["truth"]),
                _short(before[prompt]),
                _short(after[prompt]),
            )
    return table


def _samples(run_dir: Path, taskset: str, step: int) -> dict[str, dict[str, Any]]:
    """Return the first answer per prompt of one evaluation (none with monitor.log_eval_samples=0)."""
    first: dict[str, dict[str, Any]] = {}
    file = run_dir / "samples" / f"eval_{taskset}_{step}.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else ():
        row = json.loads(line)
        first.setdefault(row["prompt"], row)
    return first


def _short(row: dict[str, Any]) -> str:
    mark = "[green]✓[/green]" if row["reward"] == 1 else "[red]✗[/red]"
    return f"{mark} {_escaped(' '.join(str(row['answer']).split())[:60])}"


def _escaped(text: Any) -> str:
    """Escape brackets, which are not markup."""
    return escape(safe(str(text)))
