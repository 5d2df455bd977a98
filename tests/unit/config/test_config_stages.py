"""Files with stages: what each stage's configuration is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rft.cli.main import make
from rft.config.load import load, stage_names
from rft.errors import ConfigError, ConfigErrors
from rft.preflight.check import check

BASE: dict[str, Any] = {
    "name": "program",
    "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8},
    "algorithm": {"repeat_times": 4, "optimizer": {"lr": 1e-5}},
    "buffer": {
        "batch_size": 4,
        "total_steps": 2,
        "explorer_input": {
            "default_workflow_type": "simple_workflow",
            "taskset": {"path": "rft.testing.tiny:copy_tasks"},
        },
    },
    "trainer": {"grad_clip": 0.5, "save_hf_checkpoint": "never"},
}
TWO: list[dict[str, Any]] = [
    {"stage_name": "one"},
    {"stage_name": "two", "algorithm": {"optimizer": {"lr": 2e-5}}, "trainer": {"total_steps": 1}},
]


def write(folder: Path, stages: Any, **more: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**BASE, **more, "stages": stages}, sort_keys=False))
    return file


def test_a_stage_replaces_whole_sections(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    assert stage_names(file) == ("one", "two")
    one, two = (load(file, stage=s) for s in stage_names(file))
    assert one.algorithm.repeat_times == 4 and one.trainer.grad_clip == 0.5
    assert two.algorithm.optimizer.lr == 2e-5 and two.algorithm.repeat_times is None, "not merged"
    assert two.trainer.grad_clip == 1.0 and two.trainer.total_steps == 1
    assert two.buffer == one.buffer and two.name == "program"
    line = two.source.where(("trainer", "total_steps"))
    assert line.startswith("line ") and two.source.stage == "two"


def test_stages_hand_on_their_last_model(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    one = load(file, stage="one")
    assert (
        one.trainer.save_hf_checkpoint == "last"
        and "last instead of never" in one.source.warnings[0]
    )
    assert (
        load(file, stage="two").trainer.save_hf_checkpoint == "last"
        and not load(file, stage="two").source.warnings
    )


def test_folders_and_reports(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    plan = check(file, schema_only=True, stage="two").plan
    assert (
        plan is not None
        and plan.run_dir.parts[-2:] == ("program", "two")
        and plan.tracked_run.name == "program/two"
    )
    other = check(file, schema_only=True, stage="two", model_path="/x/huggingface", name="again")
    assert other.plan is not None and other.plan.run_dir.parts[-2:] == ("again", "two")
    assert (
        {e.model_path for e in other.plan.engines}
        == {"/x/huggingface"}
        == {other.plan.learner.model_path}
    )
    assert any(
        d.key == "model.model_path" and d.reason == "what the stage before exported"
        for d in other.plan.derived
    )
    assert other.config is not None and other.config.model.model_path == "m", (
        "what is saved does not hold a path of this machine"
    )


def test_no_stages(tmp_path: Path) -> None:
    for none in (None, []):
        file = write(tmp_path, none)
        assert stage_names(file) == () and load(file).name == "program"
    with pytest.raises(ConfigError, match="no stage is called 'x'; the stages are: none"):
        load(file, stage="x")


def test_one_run_of_a_program(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a program of several; the stages are: one, two"):
        load(write(tmp_path, TWO))
    with pytest.raises(ConfigError, match="no stage is called 'three'"):
        load(write(tmp_path, TWO), stage="three")


@pytest.mark.parametrize(
    ("stages", "key", "message"),
    [
        ({"one": {}}, "stages", "must be a list"),
        ("one", "stages", "must be a list"),
        (["one"], "stages[0]", "must be a mapping"),
        ([{}], "stages[0].stage_name", "is required"),
        ([{"stage_name": "a/b"}], "stages[0].stage_name", "holds no slash"),
        ([{"stage_name": 3}], "stages[0].stage_name", "given 3"),
        (
            [{"stage_name": "a"}, {"stage_name": "a"}],
            "stages[1].stage_name",
            "is also the name of stages[0]",
        ),
        (
            [{"stage_name": "a", "model": {}}],
            "stages[0].model",
            "what the stage before it exported",
        ),
        ([{"stage_name": "a", "trainr": {}}], "stages[0].trainr", "Did you mean trainer?"),
    ],
)
def test_bad_lists(stages: Any, key: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_names(write(tmp_path, stages))
    assert caught.value.key == key and message in caught.value.message


def test_errors_have_the_key_that_was_written(tmp_path: Path) -> None:
    bad = [{"stage_name": "one", "trainer": {"total_step": 1}}]
    with pytest.raises(ConfigErrors) as caught:
        load(write(tmp_path, bad), stage="one")
    (e,) = caught.value.errors
    assert (
        e.key == "stages[0].trainer.total_step" and "Did you mean trainer.total_steps" in e.message
    )
    bad = [{"stage_name": "one", "algorithm": {"policy_loss_fn_args": {"clip": 1}}}]
    (e,) = check(write(tmp_path, bad), schema_only=True, stage="one").errors
    assert e.key == "stages[0].algorithm.policy_loss_fn_args.clip"


def test_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    given = ["algorithm.optimizer.lr=3e-5", "stages.1.trainer.total_steps=7", "seed=3"]
    one, two = (load(file, given, stage=s) for s in stage_names(file, given))
    assert one.algorithm.optimizer.lr == 3e-5 and two.algorithm.optimizer.lr == 2e-5
    assert two.trainer.total_steps == 7 and one.seed == two.seed == 3
    assert not any("has no effect" in w for w in one.source.warnings)
    assert any(
        "the override of algorithm.optimizer.lr has no effect in it" in w
        for w in two.source.warnings
    )


def test_an_adapter_to_begin_with_is_for_the_first_stage_alone(tmp_path: Path) -> None:
    """The second begins with weights to which it is added already."""
    file = write(tmp_path, TWO, model={**BASE["model"], "lora_configs": [{"path": "there"}]})
    assert not check(file, schema_only=True, stage="one").errors
    (e,) = check(file, schema_only=True, stage="two").errors
    assert (
        e.key == "model.lora_configs[0].path"
        and "stage two begins with the model of the one before" in e.message
    )
    for more in ({"lora_configs": [{"lora_rank": 4}]}, {}):
        assert not check(
            write(tmp_path, TWO, model={**BASE["model"], **more}), schema_only=True, stage="two"
        ).errors


def test_interpolations_see_the_stage(tmp_path: Path) -> None:
    file = write(tmp_path, TWO, group="lr_${algorithm.optimizer.lr}")
    assert [load(file, stage=s).group for s in ("one", "two")] == ["lr_1e-05", "lr_2e-05"]


def test_check_shows_every_stage(tmp_path: Path) -> None:
    def run(file: Path, *more: str) -> tuple[int, str]:
        done = CliRunner().invoke(make("check"), ["check", "-c", str(file), "--schema-only", *more])
        return done.exit_code, done.output

    file = write(tmp_path, TWO)
    code, text = run(file)
    assert (
        code == 0
        and "stage one\n" in text
        and "stage two\n" in text
        and "program/two" in text.replace("\n", "")
    )
    code, text = run(file, "--json")
    found = json.loads(text)
    assert (
        code == 0 and found["ok"] and [s["stage_name"] for s in found["stages"]] == ["one", "two"]
    )
    code, text = run(
        write(tmp_path, [*TWO, {"stage_name": "three", "trainer": {"grad_clip": -1}}]), "--json"
    )
    found = json.loads(text)
    assert (
        code == 2 and not found["ok"] and [s["ok"] for s in found["stages"]] == [True, True, False]
    )
    assert [e["key"] for e in found["errors"]] == ["stages[2].trainer.grad_clip"]
    code, text = run(write(tmp_path, [{}]), "--json")
    assert code == 2 and json.loads(text)["errors"][0]["key"] == "stages[0].stage_name"
