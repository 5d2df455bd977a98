"""Evaluate a model on a taskset, by a written configuration in mode bench."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rft.api.stored_run import StoredRun, run


def evaluate(
    model: str | Path,
    taskset: str | Path,
    *,
    reward: str = "exact_answer",
    workflow: str = "simple_workflow",
    split: str | None = None,
    rows: int | None = None,
    runs: int = 4,
    temperature: float = 1.0,
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 512,
    engine: str = "transformers",
    out: str | Path = "runs",
    plugin_dirs: Sequence[str | Path] = (),
) -> StoredRun:
    """Evaluate like `rft eval MODEL TASKSET`, wait for the end, and open the run of the evaluation.

    Raises RftError.
    """
    source, _, function = str(taskset).partition(":")
    name = re.sub(r"\W+", "-", function or Path(source).stem).strip("-") or "tasks"
    tasks: dict[str, Any] = {
        "name": name,
        "path": str(taskset),
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
        "name": f"{Path(model).resolve().name}-{name}-{datetime.now():%Y%m%d-%H%M%S}",
        "checkpoint_root_dir": str(Path(out).absolute()),
        "model": {"model_path": str(model), **lengths},
        "buffer": {
            "explorer_input": {"eval_tasksets": [{k: v for k, v in tasks.items() if v is not None}]}
        },
        "explorer": {"eval_on_startup": True, "rollout_model": {"engine_type": engine}},
    }
    with tempfile.TemporaryDirectory(prefix="rft-eval-") as aside:
        config = Path(aside) / "eval.yaml"
        config.write_text(json.dumps(tree, indent=1), encoding="utf-8")  # JSON is YAML
        return run(config, plugin_dirs=plugin_dirs, in_process=engine == "transformers")
