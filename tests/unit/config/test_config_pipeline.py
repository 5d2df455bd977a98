"""data_processor.experience_pipeline: what reaches the plan, what is refused and under which key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rft.buffer.settings import OperatorSettings
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError
from rft.preflight.check import check

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
KEY = "data_processor.experience_pipeline"
TINY = Path(__file__).parents[2] / "integration" / "tiny_config.yaml"
OWN = """
from rft.buffer.operators.base import EngineName, Operator, OperatorArgs, Result, operator

class JudgeArgs(OperatorArgs):
    model: EngineName = "rollout_model"

@operator("test_own_judge", args=JudgeArgs)
class Judge(Operator):
    stage = "reward"

    def __init__(self, model):
        self.model = model

    def process(self, rows, group):
        return Result(rows)
"""


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


def errors(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    return {e.key: e.message for e in getattr(caught.value, "errors", [caught.value])}


def test_operators_reach_the_explorer_in_their_order() -> None:
    given = "[{name: pass_rate_calculator}, {name: reward_filter, args: {threshold: 1}}]"
    found = plan(f"{KEY}.operators={given}").explorer.pipeline
    assert found.operators == (
        OperatorSettings(name="pass_rate_calculator", key=f"{KEY}.operators[0]"),
        OperatorSettings(name="reward_filter", args={"threshold": 1}, key=f"{KEY}.operators[1]"),
    )
    assert found.input_path is None and not plan().explorer.pipeline.operators


def test_every_fault_is_told_with_its_path() -> None:
    given = (
        "{name: reward_filter, args: {treshold: 1}}, {name: datajuicer}, {name: deduplicate, "
        "args: {max_copies: 0}}"
    )
    found = errors(f"{KEY}.operators=[{given}]")
    assert "Did you mean threshold?" in found[f"{KEY}.operators[0].args"]
    assert "write data_juicer, or data_juicer_filter" in found[f"{KEY}.operators[1].name"]
    assert "greater than or equal to 1" in found[f"{KEY}.operators[2].args"]


def test_another_order_is_refused_with_the_right_one() -> None:
    found = errors(f"{KEY}.operators=[{{name: reward_filter}}, {{name: pass_rate_calculator}}]")
    assert "Write them so: pass_rate_calculator, reward_filter" in found[f"{KEY}.operators[1]"]


@pytest.mark.parametrize("name", ["grpo", "multi_step_grpo"])
def test_the_threshold_of_grpo_is_an_operator(name: str) -> None:
    given = (f"algorithm.algorithm_type={name}", "algorithm.advantage_fn_args.std_threshold=0.1")
    p = plan(*given, f"{KEY}.operators=[{{name: pass_rate_calculator}}]")
    args = {"threshold": 0.1} if name == "grpo" else {"threshold": 0.1, "of_runs": True}
    last = OperatorSettings(
        name="reward_std_filter", args=args, key="algorithm.advantage_fn_args.std_threshold"
    )
    assert p.explorer.pipeline.operators[1:] == (last,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("null", "buffer/explorer_output.jsonl"),
        ("/x/rows.jsonl", "/x/rows.jsonl"),
        ("/dump", "/dump/explorer_output.jsonl"),
    ],
)
def test_where_the_copy_goes(given: str, expected: str) -> None:
    p = plan(f"{KEY}.save_input=true", f"{KEY}.input_save_path={given}")
    assert p.explorer.pipeline.input_path == p.run_dir / expected
    off = plan(f"{KEY}.input_save_path={given}")
    assert off.explorer.pipeline.input_path is None and any(
        "save_input is false" in n for n in off.notes
    ) is (given != "null")


def test_a_copy_in_a_database_is_refused() -> None:
    found = errors(f"{KEY}.save_input=true", f"{KEY}.input_save_path=sqlite:///x.db")
    assert "rft buffer query" in found[f"{KEY}.input_save_path"]


def test_rows_that_operators_leave_out_are_missed_where_a_step_counts_rows() -> None:
    operators = f"{KEY}.operators=[{{name: reward_filter}}]"
    told = "a row that an operator leaves out is missing then"
    assert any(told in w for w in plan(operators, "buffer.train_batch_size=9").warnings)
    assert not any(told in w for w in plan(operators).warnings)


def test_ones_own_operator_is_checked_when_the_plugins_are_loaded(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def told(operator: str, *more: str) -> list[str]:
        given = [f"model.model_path={tiny_model}", f"{KEY}.operators=[{operator}]", *more]
        report = check(TINY, given, plugin_dirs=[str(tmp_path)])
        return [str(e) for e in report.errors]

    assert told("{name: test_own_judge}") == []
    (unknown,) = told("{name: test_own_juge}")
    assert (
        unknown.startswith(f"{KEY}.operators[0].name: unknown operator")
        and "Did you mean test_own_judge?" in unknown
    )
    (engine,) = told("{name: test_own_judge, args: {model: referee}}")
    assert (
        engine.startswith(f"{KEY}.operators[0].args.model: ")
        and "there is rollout_model (explorer.auxiliary_models)" in engine
    )
    beside = (
        f"explorer.auxiliary_models=[{{name: referee, model_path: {tiny_model}, engine_type: "
        f"transformers}}]"
    )
    assert told("{name: test_own_judge, args: {model: referee}}", beside) == []
    (path,) = told(f"{{name: '{tmp_path}/own.py:Nobody'}}")
    assert "has no 'Nobody'" in path
    assert told(f"{{name: '{tmp_path}/own.py:Judge'}}") == []


def test_without_operators_their_code_is_not_imported() -> None:
    code = (
        "import sys; from rft.config.load import load; from rft.config.resolve import resolve\n"
        f"resolve(load({str(FILE)!r}, ()))\n"
        "print([m for m in ('rft.buffer.operators.base', "
        "'rft.buffer.operators.experience_pipeline') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
