"""`rft eval`: evaluate a model on a taskset, by a written configuration in mode bench."""

from __future__ import annotations

import json
import re
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

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
    from rft.cli.run_command import run

    one_of(engine, ENGINES, "--engine")
    source, _, function = taskset.partition(":")
    name = re.sub(r"\W+", "-", function or Path(source).stem).strip("-") or "tasks"
    tasks: dict[str, Any] = {
        "name": name,
        "path": taskset,
        "split": split,
        "repeat_times": runs,
        "rollout_args": {"temperature": temperature},
        "default_reward_fn_type": reward,
        "default_workflow_type": workflow,
        "max_rows": rows,
    }
    lengths = {"max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
    tree = {
        "mode": "bench",
        "group": "eval",
        "name": f"{model.resolve().name}-{name}-{datetime.now():%Y%m%d-%H%M%S}",
        "checkpoint_root_dir": str(out.absolute()),
        "model": {"model_path": str(model), **lengths},
        "buffer": {
            "explorer_input": {"eval_tasksets": [{k: v for k, v in tasks.items() if v is not None}]}
        },
        "explorer": {"eval_on_startup": True, "rollout_model": {"engine_type": engine}},
    }
    with tempfile.TemporaryDirectory(prefix="rft-eval-") as aside:
        config = Path(aside) / "eval.yaml"
        config.write_text(json.dumps(tree, indent=1), encoding="utf-8")  # JSON is YAML
        run(config=config, plugin_dir=plugin_dir, in_process=engine == "transformers")
