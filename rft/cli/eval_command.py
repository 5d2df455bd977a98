"""`rft eval`: evaluate a model on a taskset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rft.cli.options import PluginDirs, one_of

ENGINES = ("transformers", "vllm")


def evaluate(
    model: Annotated[Path, typer.Argument(help="folder of a model", show_default=False)],
    taskset: Annotated[
        str,
        typer.Argument(
            help="a file, a data set of the hub, or module:function", show_default=False
        ),
    ],
    reward: Annotated[
        str, typer.Option(help="name of a reward, or file.py:function")
    ] = "exact_answer",
    workflow: Annotated[str, typer.Option(help="name of a workflow")] = "simple_workflow",
    split: Annotated[str | None, typer.Option(help="of the taskset", show_default=False)] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="at most so many tasks; default: all", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="answers to each task")] = 4,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="of sampling; 0: the likeliest token")
    ] = 1.0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="longest prompt")] = 512,
    max_response_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 512,
    engine: Annotated[str, typer.Option(help=", ".join(ENGINES))] = "transformers",
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="folder of runs; this one is OUT/rft/eval/MODEL-TASKSET-TIME"
        ),
    ] = Path("runs"),
    plugin_dir: PluginDirs = None,
) -> None:
    """Evaluate a model on a taskset: mean reward and pass@k, without training."""
    from rft.api.evaluation import evaluate as evaluated
    from rft.launch.progress import summary

    one_of(engine, ENGINES, "--engine")
    outcome = evaluated(
        model,
        taskset,
        reward=reward,
        workflow=workflow,
        split=split,
        rows=rows,
        runs=runs,
        temperature=temperature,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        engine=engine,
        out=out,
        plugin_dirs=plugin_dir or (),
    ).outcome
    assert outcome is not None
    summary(outcome.run_dir, outcome.version, outcome.seconds, outcome.resumed_from)
