"""`rft check --schema-only` looks up what a file names and says in one line what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.cli import check_command
from rft.preflight.check import check
from rft.preflight.check_report import Report


def report(
    folder: Path, *overrides: str, workflow: str = "math_workflow", **taskset: Any
) -> Report:
    path = folder / "c.yaml"
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "response": "2"}\n')
    given = {"name": "sums", "path": str(rows), "default_workflow_type": workflow, **taskset}
    model = {"model_path": str(folder / "model"), "max_prompt_tokens": 32, "max_response_tokens": 8}
    buffer = {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": given}}
    path.write_text(yaml.safe_dump({"model": model, "buffer": buffer}))
    return check(path, overrides, schema_only=True)


def needed(found: Report) -> list[str]:
    return [str(n) for n in found.needs if n.kind != "model"]


def test_a_shipped_name_needs_nothing_but_its_model(tmp_path: Path) -> None:
    found = report(tmp_path)
    assert [n.kind for n in found.needs] == ["model"] and found.outcome == "needs model"
    assert "no such folder" in str(found.needs[0])


@pytest.mark.extra
def test_with_a_model_it_runs(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(tmp_path, f"model.model_path={tiny_model}")
    assert found.needs == () and found.outcome == "runs as it is"
    found = report(
        tmp_path, f"model.model_path={tiny_model}", "algorithm.kl_loss_fn_args.kl_coef=0.1"
    )
    assert found.outcome == "runs with the listed warnings"
    found = report(tmp_path, f"model.model_path={tiny_model}", "trainer.total_stops=1")
    assert found.outcome == "refused because of 1 error(s)"
    check_command.check([f"model.model_path={tiny_model}"], tmp_path / "c.yaml", schema_only=True)
    assert (
        "is fine (the file and its names; plugins, data and model were not opened): runs as it is."
        in capsys.readouterr().out
    )


@pytest.mark.extra
@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        ("webshop_workflow", "its simulator is not part of this package"),
        ("no_such_workflow", "no such name is shipped; give its file with --plugin-dir"),
        (
            "no_such_package.flow:Mine",
            "there is no module no_such_package.flow; add its folder to PYTHONPATH",
        ),
        ("rft.no_such_module:Mine", "there is no module rft.no_such_module"),
        ("missing.py:Mine", "no such file"),
    ],
)
def test_a_workflow_that_is_not_here(tmp_path: Path, workflow: str, says: str) -> None:
    found = report(tmp_path, workflow=workflow)
    assert found.ok and found.outcome == "needs workflow, model"
    (line,) = needed(found)
    assert (
        line.startswith("buffer.explorer_input.taskset.default_workflow_type: workflow ")
        and says in line
    )


@pytest.mark.extra
def test_files_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from trinity.common.workflows.workflow import SimpleWorkflow\nraise SystemExit\n"
    )
    (line,) = needed(report(tmp_path, workflow=f"{tmp_path}/a.py:Mine"))
    assert "a.py imports trinity; change that to rft.extras.migrate.compat" in line
    (tmp_path / "b.py").write_text("def f():\n    import no_such_library.part\nraise SystemExit\n")
    (line,) = needed(report(tmp_path, workflow=f"{tmp_path}/b.py:Mine"))
    assert "b.py imports no_such_library, not installed" in line
    (tmp_path / "c.py").write_text(
        "import json\nfrom rft.extras.migrate.compat import SimpleWorkflow\nraise SystemExit\n"
    )
    assert needed(report(tmp_path, workflow=f"{tmp_path}/c.py:Mine")) == []
    (tmp_path / "d.py").write_text("this is no Python")
    assert needed(report(tmp_path, workflow=f"{tmp_path}/d.py:Mine")) == []


@pytest.mark.extra
def test_what_a_file_imports_of_its_own_folder_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "looked_at"
    folder.mkdir()
    (folder / "flow.py").write_text("from looked_at.helper import helper\nraise SystemExit\n")
    (folder / "helper.py").write_text("import no_such_library\nimport looked_at.flow\n")
    found = report(tmp_path, workflow="looked_at.flow:Mine")
    assert "there is no module looked_at.flow" in needed(found)[0]
    monkeypatch.syspath_prepend(str(tmp_path))
    (line,) = needed(report(tmp_path, workflow="looked_at.flow:Mine"))
    assert "flow.py imports no_such_library, not installed" in line


@pytest.mark.extra
def test_rewards_data_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "no such name is shipped"
        in needed(report(tmp_path, default_reward_fn_type="no_such_reward"))[0]
    )
    assert "no such file or folder" in needed(report(tmp_path, path=str(tmp_path / "other")))[0]
    assert needed(report(tmp_path, path="openai/gsm8k")) == []
    monkeypatch.setattr(
        "rft.preflight.missing_dependencies.importlib.util.find_spec", lambda name: None
    )
    (line,) = needed(report(tmp_path, workflow="taxi_workflow"))
    assert "needs the package gymnasium: pip install 'rft-platform[gymnasium]'" in line


@pytest.mark.extra
def test_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> str:
        return (
            f"data_processor.experience_pipeline.operators=[{{name: {name}, args: {{operators: "
            f"[{{text_length_filter: {{}}}}]}}}}]"
        )

    assert "no such name is shipped" in needed(report(tmp_path, named("nosuch")))[0]
    monkeypatch.setattr(
        "rft.preflight.missing_dependencies.importlib.util.find_spec", lambda name: None
    )
    (line,) = needed(report(tmp_path, named("data_juicer")))
    assert line.startswith(
        "data_processor.experience_pipeline.operators[0]: operator 'data_juicer' needs the package "
        "data_juicer"
    )


def test_own_folders_may_bring_the_name(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir(mode=0o755)
    assert needed(report(tmp_path, f"plugin_dirs=[{tmp_path}/plugins]", workflow="mine")) == []


def test_a_file_with_a_folder_is_no_hub_id(tmp_path: Path) -> None:
    found = report(tmp_path, path="no_such_data/train.jsonl")
    assert "data 'no_such_data/train.jsonl': no such file or folder" in needed(found)[0]
    assert needed(report(tmp_path, path="somebody/data")) == []


def test_data_to_train_on_that_is_not_here(tmp_path: Path) -> None:
    key = "buffer.trainer_input.experience_buffer.path"
    data = ("mode=train", "algorithm.algorithm_type=sft", f"{key}={tmp_path}/none.jsonl")
    assert needed(report(tmp_path, *data)) == [
        f"{key}: data '{tmp_path}/none.jsonl': no such file or folder"
    ]
