"""`mode: bench`: the base model and every checkpoint of a run, with the numbers that the run's own
evaluation gave.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.api.stored_run import open_run
from rft.cli.status_command import collect
from rft.errors import CheckpointInvalid, ConfigError
from rft.launch.execute import execute
from rft.monitor.read import read, series

TINY = Path(__file__).with_name("tiny_config.yaml")
EVAL = (
    "buffer.explorer_input.eval_tasksets=[{name: copied, path: 'rft.testing.tiny:copy_tasks', "
    "split: eval, "
    "repeat_times: 2, rollout_args: {temperature: 0}}]"
)


PLUGIN = """
from rft.types.completion import Score

def any_answer_counts(task, transcript):
    return Score(value=sum(transcript.answer.encode()) / 1000)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of two steps with a checkpoint of each; the first has no model folder."""
    root = tmp_path_factory.mktemp("bench")
    return execute(
        TINY, options(root, tiny_model, "trainer.save_interval=1"), in_process=True
    ).run_dir


def options(root: Path, model: Path, *more: str) -> list[str]:
    (root / "plugin.py").write_text(PLUGIN)
    reward = f"buffer.explorer_input.default_reward_fn_type={root / 'plugin.py'}:any_answer_counts"
    return [
        reward,
        f"checkpoint_root_dir={root}",
        f"model.model_path={model}",
        EVAL,
        "trainer.cpu_threads=1",
        *more,
    ]


def told(folder: Path, name: str) -> dict[int, float]:
    return dict(series(read(folder / "metrics.jsonl"), name))


def test_every_checkpoint_is_evaluated_and_the_run_s_own_files_stay(
    run_dir: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run_dir.parents[2]
    state = (run_dir / "state.json").read_text()
    saved = sorted(p.name for p in run_dir.iterdir())
    execute(
        TINY,
        options(root, tiny_model, "mode=bench", "continue_from_checkpoint=false"),
        in_process=True,
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[-4:]]
    assert rows[0][:2] == ["step", "bench/copied/mean@2"] and [r[0] for r in rows[1:]] == [
        "base",
        "1",
        "2",
    ]
    benched = told(run_dir, "bench/copied/mean@2")
    assert (
        list(benched) == [0, 1, 2]
        and benched[0] > 0
        and [f"{v:.4f}" for v in benched.values()] == [r[1] for r in rows[1:]]
    )
    # greedy: the same answers
    assert benched[0] == pytest.approx(told(run_dir, "eval/copied/mean@2")[0])
    assert benched[2] == pytest.approx(told(run_dir, "eval/copied/mean@2")[2])
    assert (run_dir / "state.json").read_text() == state and set(saved) <= {
        p.name for p in run_dir.iterdir()
    }
    assert not any((run_dir / "bench").glob("*"))  # the model that was put together is gone


def test_only_the_last_one_of_another_run(run_dir: Path, tiny_model: Path, tmp_path: Path) -> None:
    more = (
        "mode=bench",
        f"resume_from_path={run_dir}",
        "explorer.bench_on_latest_checkpoint=true",
        "explorer.eval_on_startup=false",
    )
    outcome = execute(TINY, options(tmp_path, tiny_model, *more), in_process=True)
    assert list(told(outcome.run_dir, "bench/copied/pass@2")) == [2]
    facts = collect(outcome.run_dir)  # a folder of its own is one that all commands know
    assert facts["phase"] == "done" and open_run(outcome.run_dir).config()["mode"] == "bench"
    rows = [
        json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert {r["role"] for r in rows} == {"eval"}


def test_nothing_to_evaluate_and_damage_are_told(
    run_dir: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no checkpoint in .*explorer\.eval_on_startup: true"
    ):
        execute(
            TINY,
            options(tmp_path, tiny_model, "mode=bench", "explorer.eval_on_startup=false"),
            in_process=True,
        )
    # and not: the base model alone
    with pytest.raises(ConfigError, match=r"resume_from_path: holds no checkpoint"):
        execute(
            TINY,
            options(tmp_path, tiny_model, "mode=bench", f"resume_from_path={tmp_path}"),
            in_process=True,
        )
    with pytest.raises(ConfigError, match="mode bench plays these tasks"):
        execute(
            TINY,
            [
                *options(tmp_path, tiny_model, "mode=bench"),
                "buffer.explorer_input.eval_tasksets=[]",
            ],
            in_process=True,
        )
    broken = next((run_dir / "checkpoints" / "global_step_1" / "trainer").glob("*.safetensors"))
    data = broken.read_bytes()
    broken.write_bytes(data[:-1])
    try:
        with pytest.raises(CheckpointInvalid, match="the manifest says"):
            execute(TINY, options(run_dir.parents[2], tiny_model, "mode=bench"), in_process=True)
    finally:
        broken.write_bytes(data)
