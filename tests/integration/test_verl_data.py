"""veRL's data as it is: parquet files train from end to end, scored by their data source and by a
function with veRL's signature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rft.config.plan import Facts
from rft.errors import ConfigError, RunFailed
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.preflight.check import check, load_plan
from tests.helpers.command import rft

INPUT = "buffer.explorer_input"
CUSTOM = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    """Half a point for each of: a digit was said, it is the right one."""
    assert data_source == "my/copy" and extra_info["split"] in ("train", "test") and not kwargs
    right = ground_truth in solution_str
    return {"score": (any(c.isdigit() for c in solution_str) + right) / 2 + bonus, "acc": right, "pred": solution_str}

async def broken(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 2:
        raise KeyError("nothing to compare with")
    return float("nan")
'''


def verl_row(source: str, index: int, split: str, question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": split, "answer": f"so it is\n#### {answer}"},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of train.parquet and test.parquet, as veRL's preprocessing writes them, and the
    function.
    """
    root = tmp_path_factory.mktemp("verl_data")
    for folder, source in (("gsm8k", "openai/gsm8k"), ("copy", "my/copy")):
        (root / folder).mkdir()
        for split, first in (("train", 0), ("test", 1000)):
            rows = [
                verl_row(source, i, split, f"{first + i}x{i % 10}", str(i % 10)) for i in range(24)
            ]
            pq.write_table(pa.Table.from_pylist(rows), root / folder / f"{split}.parquet")
    long = [verl_row("openai/gsm8k", i, "long", "x" * (20 + 4 * i), "1") for i in range(20)]
    pq.write_table(pa.Table.from_pylist(long), root / "long.parquet")
    mixed = [
        verl_row("openai/gsm8k" if i < 19 else "nobody/knows", i, "train", "x", "1")
        for i in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(mixed), root / "mixed.parquet")
    (root / "custom.py").write_text(CUSTOM)
    return root


@pytest.fixture
def config(data: Path, tiny_model: Path, tmp_path: Path) -> Path:
    values = {
        "name": "verl",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tiny_model), "max_prompt_tokens": 60, "max_response_tokens": 4},
        "algorithm": {"repeat_times": 2, "kl_loss_fn": "none"},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "tasksets": [
                    {
                        "name": "gsm8k",
                        "path": f"{data}/gsm8k",
                        "split": "train",
                        "format": {"preset": "verl"},
                    },
                    {
                        "name": "copy",
                        "path": f"{data}/copy",
                        "split": "train",
                        "format": {
                            "preset": "verl",
                            "prompt_key": "prompt",
                            "reward_fn_key": "data_source",
                        },
                        "default_reward_fn_type": f"{data}/custom.py:compute_score",
                        "reward_fn_args": {"bonus": 0.0},
                        "data_selector": {"selector_type": "shuffle"},
                    },
                ],
                "eval_tasksets": [
                    {
                        "name": f"{name}_eval",
                        "path": f"{data}/{name}",
                        "split": "test",
                        "format": {"preset": "verl"},
                        "rollout_args": {"temperature": 0},
                        **more,
                    }
                    for name, more in (
                        ("gsm8k", {}),
                        (
                            "copy",
                            {
                                "default_reward_fn_type": f"{data}/custom.py:compute_score",
                                "max_rows": 5,
                            },
                        ),
                    )
                ],
            },
        },
        "explorer": {"rollout_model": {"engine_type": "transformers"}},
        "synchronizer": {"sync_interval": 2},
        "trainer": {"total_steps": 4},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def said(config: Path, *overrides: str) -> str:
    return "\n".join(map(str, check(config, overrides, facts=Facts(cpus=2, gpus=0)).errors))


def test_it_trains_two_sync_windows_and_evaluates_greedily(config: Path) -> None:
    outcome = execute(config, [], in_process=True)
    assert outcome.version.step == 4
    metrics = read(load_plan(config)[1].run_dir / "metrics.jsonl")
    assert {r.step for r in metrics if r.role == "synchronizer"} >= {0, 2, 4}
    assert series(metrics, "rollout/acc/mean")  # a part of the function's dict
    for name in ("gsm8k_eval", "copy_eval"):
        assert {step for step, _ in series(metrics, f"eval/{name}/mean@1")} == {0, 4}


def test_check_shows_rows_and_the_gold_reward(config: Path) -> None:
    done = rft("check", "--config", str(config), "--json")
    assert done.code == 0, done.output
    report = json.loads(done.output)
    gsm8k, copy, gsm8k_eval, copy_eval = report["tasksets"]
    assert [r["prompt"] for r in gsm8k["rows"]] == [
        f"<|im_start|>u{i}x{i}<|im_end|><|im_start|>a" for i in (0, 1)
    ]
    assert [r["truth"] for r in gsm8k["rows"]] == ["0", "1"]
    for taskset in report["tasksets"]:
        assert [r["gold_reward"] for r in taskset["rows"]] == [1.0, 1.0]
    assert (gsm8k["num_rows"], copy["num_rows"], gsm8k_eval["num_rows"], copy_eval["num_rows"]) == (
        24,
        24,
        24,
        5,
    )
    assert report["plan"]["explorer"]["eval_tasksets"][0]["sampling"]["temperature"] == 0
    shown = rft("check", "--config", str(config))
    assert "gsm8k: 24 rows; first row: gold answer '0', reward 1" in shown.output


def test_an_unknown_data_source_is_named(config: Path, data: Path) -> None:
    answer = said(config, f"{INPUT}.tasksets.0.path={data}/mixed.parquet")
    assert (
        f"{INPUT}.tasksets[0].format.reward_fn_key: row 19 of" in answer
        and "'nobody/knows'" in answer
    )
    assert "docs/howto/reward.md" in answer and "default_reward_fn_type" in answer
    own = f"{INPUT}.tasksets.0.default_reward_fn_type=exact_answer"
    assert said(config, f"{INPUT}.tasksets.0.path={data}/mixed.parquet", own) == ""


def test_a_function_that_raises_or_says_nan_fails_its_runs(config: Path, data: Path) -> None:
    broken = f"{INPUT}.tasksets.1.default_reward_fn_type={data}/custom.py:broken"
    only = [
        f"{INPUT}.tasksets.0.weight=0.001",
        f"{INPUT}.tasksets.1.weight=1",
        f"{INPUT}.tasksets.1.reward_fn_args={{}}",
    ]
    with pytest.raises(
        RunFailed, match=r"nothing to compare with|is nan; it must be a finite number"
    ):
        execute(
            config,
            [broken, *only, "explorer.eval_on_startup=false", "buffer.max_refill=2"],
            in_process=True,
        )


def test_long_prompts_are_left_out_before_training(config: Path, data: Path) -> None:
    """Prompts of 25, 29, 33 ... 101 tokens; 60 are allowed, so 9 of 20 rows stay."""
    overrides = [
        f"{INPUT}.tasksets.0.path={data}/long.parquet",
        f"{INPUT}.tasksets.0.filter_overlong_prompts=true",
    ]
    report = check(config, overrides, facts=Facts(cpus=2, gpus=0))
    assert report.ok, report.errors
    assert report.tasksets[0].num_rows == 9
    (note,) = [n for n in report.notes if "left out" in n]
    assert (
        note.startswith(f"{INPUT}.tasksets[0]: 11 of 20 rows are left out")
        and "up to 101" in note
        and "Rows 9, 10" in note
    )
    steps = ["buffer.total_epochs=1", "trainer.total_steps=null"]
    assert (
        check(config, [*overrides, *steps], facts=Facts(cpus=2, gpus=0)).plan.total_steps
        == (9 + 24) // 4
    )  # type: ignore[union-attr]
    execute(
        config,
        [*overrides, "explorer.eval_on_startup=false", "trainer.total_steps=2"],
        in_process=True,
    )
    log = (load_plan(config)[1].run_dir / "logs" / "launcher.log").read_text()
    assert "taskset gsm8k: 11 of 20 rows are left out" in log


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("format.reply_prefix=so", "format.reply_prefix"),
        ("format.chosen_key=better", "format.chosen_key"),
    ],
)
def test_what_has_no_meaning_is_refused_by_check_and_run(
    config: Path, override: str, key: str
) -> None:
    overrides = [
        f"{INPUT}.tasksets.1.{override}",
        "trainer.total_steps=null",
        "buffer.total_epochs=1",
    ]
    report = check(config, overrides, facts=Facts(cpus=2, gpus=0))
    assert [e.key for e in report.errors] == [f"{INPUT}.tasksets[1].{key}"]
    with pytest.raises(ConfigError, match=key):
        execute(config, overrides, in_process=True)
