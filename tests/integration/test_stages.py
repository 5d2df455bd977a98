"""Programs of several stages: each begins with the model that the one before exported, and what is
done is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from rft.cli.export_command import copy_model
from rft.cli.status_command import collect, lines
from rft.errors import CheckpointInvalid, ConfigError, ConfigErrors, RftError, SetupError
from rft.launch.execute import execute
from rft.launch.step_again import again

TINY = Path(__file__).parent / "tiny_config.yaml"
INPUT = {"default_workflow_type": "simple_workflow", "default_reward_fn_type": "exact_answer"}


def taskset(name: str, **more: Any) -> dict[str, Any]:
    return {
        "batch_size": 4,
        "explorer_input": {
            **INPUT,
            "taskset": {"name": name, "path": "rft.testing.tiny:copy_tasks", **more},
        },
    }


def algorithm(lr: float) -> dict[str, Any]:
    return {"repeat_times": 2, "kl_loss_fn": "none", "optimizer": {"lr": lr, "weight_decay": 0.0}}


STAGES: list[dict[str, Any]] = [
    {
        "stage_name": "one",
        "buffer": taskset("copy"),
        "algorithm": algorithm(1e-2),
        "trainer": {"total_steps": 2},
    },
    # too small a rate to change a float32: what comes out is what went in
    {
        "stage_name": "two",
        "buffer": taskset("few", max_rows=8),
        "algorithm": algorithm(1e-30),
        "trainer": {"total_steps": 1},
    },
]


@pytest.fixture
def program(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    def write(stages: list[dict[str, Any]] | None = STAGES, **more: Any) -> Path:
        file = tmp_path / "program.yaml"
        values = {
            "extends": str(TINY),
            "name": "program",
            "checkpoint_root_dir": str(tmp_path / "runs"),
            **more,
        }
        file.write_text(
            yaml.safe_dump(
                {**values, "model": {"model_path": str(tiny_model)}, "stages": stages},
                sort_keys=False,
            )
        )
        return file

    return write


def folder(tmp_path: Path, name: str = "program") -> Path:
    return tmp_path / "runs" / "project" / "group" / name


def weights(model: Path) -> dict[str, bytes]:
    return {n: a.tobytes() for n, a in load_file(model / "model.safetensors").items()}


def exported(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step_{step}" / "huggingface"


def test_the_second_stage_begins_with_what_the_first_exported(
    program: Callable[..., Path],
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = execute(program(), [], in_process=True)
    root = folder(tmp_path)
    one = exported(root / "one", 2)
    two = exported(root / "two", 1)
    assert outcome.run_dir == root / "two" and outcome.version.step == 1
    assert weights(two) == weights(one), "the second stage began with other weights"
    assert weights(one) != weights(tiny_model), "the first stage learnt nothing"

    rows = [json.loads(line) for line in (root / "two" / "metrics.jsonl").read_text().splitlines()]
    assert any("rollout/few/reward/mean" in r["values"] for r in rows), "its own taskset"
    kept = yaml.safe_load((root / "two" / "config.resolved.yaml").read_text())
    assert kept["algorithm"]["optimizer"]["lr"] == 1e-30 and kept["name"] == "program"
    assert kept["model"]["model_path"] == str(one), "what is run again begins with another model"
    whole = yaml.safe_load((root / "two" / "config.yaml").read_text())
    assert "extends" not in whole and len(whole["stages"]) == 2, "the program itself, complete"

    facts = collect(root)
    assert facts["phase"] == "done" and [s["phase"] for s in facts["stages"]] == ["done", "done"]
    assert any("stage        one: done, version 1:2" in line for line in lines(facts))
    assert weights(copy_model(root, tmp_path / "out", None)) == weights(two)
    assert weights(copy_model(root / "one", tmp_path / "first", None)) == weights(one)

    capsys.readouterr()
    resumed = execute(program(), [], in_process=True)
    said = capsys.readouterr().out
    assert (
        resumed.version == outcome.version
        and "stage one is done at step 2" in said
        and "begins" not in said
    )

    execute(program([{**STAGES[0], "algorithm": algorithm(1e-3)}, STAGES[1]]), [], in_process=True)
    said = capsys.readouterr().out
    assert (
        "stage one is done; that algorithm.optimizer.lr is 0.001 now (was 0.01) has no effect on it"
        in said
    )
    _changed(program, root)


def _changed(program: Callable[..., Path], root: Path) -> None:
    """What may not change under a program that is done, or half done."""
    with pytest.raises(ConfigErrors, match=r"algorithm\.repeat_times: was 2"):
        execute(
            program(
                [{**STAGES[0], "algorithm": {**algorithm(1e-2), "repeat_times": 4}}, STAGES[1]]
            ),
            [],
            in_process=True,
        )
    with pytest.raises(
        ConfigError, match="stage one is done at step 2 and the next one began with its model"
    ):
        execute(program(), ["stages.0.trainer.total_steps=3"], in_process=True)
    with pytest.raises(ConfigError, match="begin with one, two"):
        execute(program(STAGES[1:]), [], in_process=True)
    with pytest.raises(ConfigError, match="holds a program of stages"):
        execute(program(None), [], in_process=True)
    three = [*STAGES, {**STAGES[1], "stage_name": "three"}]
    file = exported(root / "two", 1) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointInvalid, match="the file has changed"):
        execute(program(three), [], in_process=True)
    file.parent.rename(file.parent.with_name("away"))
    with pytest.raises(SetupError, match="stage two is done, but its model"):
        execute(program(three), [], in_process=True)
    assert not (root / "three").exists()


def test_a_step_of_a_later_stage_is_trained_again_from_its_own_model(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "spread.py").write_text(
        "def spread(task, transcript):\n    return sum(transcript.answer.encode()) / 1000\n"
    )
    given = taskset("copy", default_reward_fn_type=f"{tmp_path}/spread.py:spread")
    execute(program([{**s, "buffer": given} for s in STAGES]), [], in_process=True)
    rows = again(folder(tmp_path) / "two", 1).rows
    assert any(r.loss for r in rows) and max(abs(r.apart) for r in rows) < 1e-4, (
        "not what the first stage exported"
    )


def test_a_killed_program_skips_what_is_done(
    program: Callable[..., Path], tmp_path: Path, launch: Callable[..., Any]
) -> None:
    arguments = ("run", "-c", str(program()), "--in-process")
    first = launch(*arguments)
    first.wait_for("stage two begins")
    first.process.kill()
    assert first.end() == -9
    assert collect(folder(tmp_path))["stages"][0]["phase"] == "done"
    moved = tmp_path / "runs" / "project" / "group" / "moved"
    folder(tmp_path).rename(moved)
    second = launch(*arguments, "--name", "moved")
    assert second.end() == 0, second.output
    assert (
        "stage one is done at step 2" in second.output and "stage one begins" not in second.output
    )
    assert weights(exported(moved / "two", 1)) == weights(exported(moved / "one", 2))


def test_a_stage_that_fails_stops_the_program(
    program: Callable[..., Path], tmp_path: Path, launch: Callable[..., Any]
) -> None:
    (tmp_path / "bad.py").write_text(
        "def grade(task, transcript):\n    raise ArithmeticError('cannot judge')\n"
    )
    broken = {
        **STAGES[1],
        "buffer": taskset("few", default_reward_fn_type=f"{tmp_path}/bad.py:grade"),
    }
    stages = [STAGES[0], broken, {**STAGES[1], "stage_name": "three"}]
    run = launch("run", "-c", str(program(stages)), "--in-process")
    assert run.end() == 4 and "cannot judge" in run.output, run.output
    facts = collect(folder(tmp_path))
    assert facts["phase"] == "failed" and [s["phase"] for s in facts["stages"]] == [
        "done",
        "failed",
        "not begun",
    ]
    assert not (folder(tmp_path) / "three").exists()
    assert copy_model(folder(tmp_path), tmp_path / "out", None).is_dir(), (
        "what the first stage exported"
    )


def test_a_mistake_in_a_later_stage_is_told_before_anything_starts(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    stages = [
        STAGES[0],
        {**STAGES[1], "buffer": taskset("few", path=str(tmp_path / "missing.jsonl"))},
    ]
    with pytest.raises(ConfigErrors, match=r"stages\[1\]\.buffer.*\(stage two\)"):
        execute(program(stages), [], in_process=True)
    assert not folder(tmp_path).exists()


def test_a_fresh_program_beside_an_old_one(program: Callable[..., Path], tmp_path: Path) -> None:
    short = [{**s, "trainer": {"total_steps": 1}} for s in STAGES]
    execute(program(short), [], in_process=True)
    again = execute(program(short), ["continue_from_checkpoint=false"], in_process=True)
    sibling = again.run_dir.parent
    assert sibling.name.startswith("program_2") and again.resumed_from is None
    assert weights(exported(sibling / "two", 1)) == weights(exported(sibling / "one", 1))


def test_the_folder_of_a_run_is_not_taken(program: Callable[..., Path], tmp_path: Path) -> None:
    execute(program(None), ["trainer.total_steps=1"], in_process=True)
    with pytest.raises(RftError, match="holds a run without stages"):
        execute(program(), [], in_process=True)


def test_the_last_stage_may_go_on(
    program: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other stage has begun with its model; `nothing to do` says that trainer.total_steps
    continues it.
    """
    execute(program(STAGES[:1]), [], in_process=True, plugin_dirs=[str(tmp_path)])
    outcome = execute(
        program(STAGES[:1]),
        ["stages.0.trainer.total_steps=3"],
        in_process=True,
        plugin_dirs=[str(tmp_path)],
    )
    assert (
        outcome.version.step == 3
        and outcome.resumed_from is not None
        and outcome.resumed_from.step == 2
    )
    assert collect(folder(tmp_path))["stages"][0]["version"] == str(outcome.version)
    tasks = [
        {
            **STAGES[0],
            "trainer": {"total_steps": None},
            "buffer": {**taskset("copy"), "total_tasks": 4},
        }
    ]
    assert execute(program(tasks, name="tasks"), [], in_process=True).version.step == 1
    outcome = execute(
        program(tasks, name="tasks"), ["stages.0.buffer.total_tasks=8"], in_process=True
    )
    assert outcome.version.step == 2 and "has no effect" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["bench", "explore"])
def test_a_stage_that_has_no_model_to_hand_on_is_refused(
    mode: str, program: Callable[..., Path], tmp_path: Path
) -> None:
    evals = {
        **INPUT,
        "eval_tasksets": [
            {"name": "copied", "path": "rft.testing.tiny:copy_tasks", "split": "eval"}
        ],
    }
    given = {"batch_size": 4, "explorer_input": {**taskset("copy")["explorer_input"], **evals}}
    with pytest.raises(ConfigErrors, match=r"mode: is for a run of its own.*stage score"):
        execute(
            program([STAGES[0], {"stage_name": "score", "mode": mode, "buffer": given}]),
            [],
            in_process=True,
        )
    assert not folder(tmp_path).exists()
