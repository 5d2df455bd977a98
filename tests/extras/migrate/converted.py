"""A converted veRL script, scaled down by overrides alone until a random model learns on a CPU: one
digit to copy, in veRL's data.

What is overridden: the model and lengths, batch, GPUs, learning rate and steps, where the data lie,
and the function that scores them. Everything else is the script's: algorithm, loss, schedule,
layout of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rft.extras.migrate.convert.launch import read_launch
from rft.extras.migrate.convert.report import yaml_text
from rft.extras.migrate.convert.verl import convert
from rft.testing import tiny
from tests.helpers.command import Done, rft

STEPS = 64
SCORE = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
    "float(solution_str == ground_truth)\n"
)
SMALL = (
    "model.max_prompt_tokens=63",
    "model.max_response_tokens=1",
    "model.trust_remote_code=false",
    "cluster.gpu_per_node=0",
    "cluster.node_num=1",
    "algorithm.repeat_times=8",
    "algorithm.optimizer.lr=1e-3",
    "buffer.batch_size=64",
    "buffer.train_batch_size=null",
    f"buffer.total_steps={STEPS}",
    "explorer.max_concurrent_runs=512",
    f"explorer.eval_interval={STEPS // 2}",
    "explorer.eval_on_startup=true",
    "explorer.eval_at_end=true",
    "explorer.rollout_model.engine_type=transformers",
    "explorer.rollout_model.engine_num=1",
    "explorer.rollout_model.tensor_parallel_size=1",
    "explorer.rollout_model.max_num_seqs=512",
    "explorer.rollout_model.max_num_batched_tokens=null",
    "synchronizer.sync_method=memory",
    "trainer.ulysses_sequence_parallel_size=1",
    "trainer.param_dtype=auto",
    "trainer.enable_gradient_checkpointing=false",
    "trainer.offload_policy=false",
    "trainer.ref.param_offload=false",
    "monitor.monitor_type=[]",
)
INPUT = "buffer.explorer_input"


def write_data(folder: Path) -> Path:
    """train.parquet and test.parquet, and score.py with a function of veRL's signature."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "score.py").write_text(SCORE)
    for split, name in (("train", "train"), ("eval", "test")):
        rows = [
            {
                "data_source": "tiny/copy",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "copy",
                "reward_model": {"style": "rule", "ground_truth": row["response"]},
                "extra_info": {"index": i, "split": name},
            }
            for i, row in enumerate(tiny.copy_tasks("train" if split == "train" else "eval"))
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def train(script: Path, model: Path, folder: Path, more: Sequence[str] = ()) -> tuple[Done, Path]:
    """How the run ended, and its folder.  Raises where the conversion is not clean."""
    made = convert(read_launch(script))
    assert not made.refused and not made.errors, (script, made.refused, made.errors)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "converted.yaml"
    config.write_text(yaml_text(made.values))
    data = write_data(folder / "data")
    small = dict(o.split("=", 1) for o in SMALL)
    sets: dict[str, list[Any]] = made.values["buffer"]["explorer_input"]
    for kind, split in (("tasksets", "train"), ("eval_tasksets", "test")):
        for i in range(len(sets[kind])):
            small |= {f"{INPUT}.{kind}.{i}.path": str(data), f"{INPUT}.{kind}.{i}.split": split}
    small |= {
        f"{INPUT}.default_reward_fn_type": f"{data}/score.py:compute_score",
        "model.model_path": str(model),
    }
    small |= {"checkpoint_root_dir": f"{folder}/runs", "project": "converted", "name": script.stem}
    if not made.values["trainer"].get("use_dynamic_bsz"):
        small["trainer.micro_batch_size_per_gpu"] = "64"
    done = rft("run", "--in-process", "-c", config, *(f"{k}={v}" for k, v in small.items()), *more)
    return done, folder / "runs" / "converted" / script.stem
