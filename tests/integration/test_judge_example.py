"""The example with its own workflow and judge trains by its configuration alone: a judge behind a
server, with a cap on its cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rft.buffer.query import open_run
from rft.cli.main import make
from rft.errors import ShortBatch
from rft.launch.execute import execute
from rft.reward import judge_metrics
from rft.reward.judge_costs import BudgetUsedUp
from rft.testing.judge import FakeJudge
from tests.helpers.judge_server import JudgeServer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "judge" / "config.yaml"


def variety(prompt: str) -> float:
    """The more different characters an answer has, the better."""
    return 1 + len(set(prompt.split("<<<answer ")[-1].split(">>>")[1])) % 5


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-key-of-the-example")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # of this process, where other tests have judges of the same name
    monkeypatch.setattr(judge_metrics, "_BY_NAME", {})
    with JudgeServer(FakeJudge(variety), usage=(200, 20)) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def changes(model: Path, root: Path, *more: str) -> list[str]:
    small = [
        "model.max_prompt_tokens=64",
        "model.max_response_tokens=120",
        "algorithm.repeat_times=4",
        "trainer.total_steps=3",
    ]
    engine = [
        "explorer.rollout_model.engine_type=transformers",
        "buffer.explorer_input.taskset.rollout_args.max_tokens=8",
    ]
    return [f"model.model_path={model}", f"checkpoint_root_dir={root}", *small, *engine, *more]


def told(folder: Path) -> dict[str, float]:
    """The last value of every metric of the explorer."""
    values: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["role"] == "explorer":
            values |= record["values"]
    return values


def reported(run: Path) -> dict[str, Any]:
    """`rft judge report` of a run, with a rule as the label."""
    arguments = [
        "judge",
        "report",
        "-c",
        str(CONFIG),
        "--run",
        str(run),
        "--gold",
        "format_reward",
        "--json",
    ]
    result = CliRunner().invoke(make("judge"), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_it_trains_by_its_configuration_alone(
    server: JudgeServer, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    done = execute(CONFIG, changes(tiny_model, tmp_path), in_process=True)
    values = told(done.run_dir)
    calls = values["judge/child_judge/calls"]
    assert done.version.step == 3 and calls == len(server.asked) and 40 <= calls <= 48
    cost = values["judge/child_judge/cost_usd"]
    answered = calls * (200 * 0.0002 + 20 * 0.0008) / 1000
    # such a call was sent, and is paid, again: by what it may have cost
    broken = caplog.text.count("; asked again")
    assert cost > answered if broken else cost == pytest.approx(answered)
    assert values["judge/child_judge/unscored"] == 0 and values["judge/child_judge/latency"] > 0
    assert (done.run_dir / "judge_cache.db").is_file()
    told_later = reported(done.run_dir)
    assert (
        told_later["answers"] == 48
        and [d["step"] for d in told_later["drift"]] == [0, 1, 2]
        and told_later["asked"] == {}
    )
    assert told_later["labelled"] == 48 and sum(d["answers"] for d in told_later["drift"]) == 48
    with (
        open_run(done.run_dir) as questions,
        questions.ask("SELECT DISTINCT reward FROM v_experiences") as answer,
    ):
        assert {r[0] for r in answer.rows} <= {0.2, 0.4, 0.6, 0.8, 1.0, None}
    files = [
        p.read_bytes()
        for p in done.run_dir.rglob("*")
        if p.is_file() and p.suffix in (".yaml", ".json", ".jsonl", ".db", ".log")
    ]
    assert not any(b"sk-key-of-the-example" in f for f in files)


def test_a_cap_on_the_cost_stops_the_run_which_goes_on_with_a_higher_one(
    server: JudgeServer, tiny_model: Path, tmp_path: Path
) -> None:
    cap = "buffer.explorer_input.taskset.reward_fn_args.max_cost_usd"
    with pytest.raises(BudgetUsedUp, match="max_cost_usd"):
        execute(CONFIG, changes(tiny_model, tmp_path, f"{cap}=0.0012"), in_process=True)
    paid = len(server.asked)
    assert 0 < paid < 40
    done = execute(CONFIG, changes(tiny_model, tmp_path, f"{cap}=1"), in_process=True)
    assert done.version.step == 3 and len(server.asked) > paid


def test_over_the_cap_answers_stay_unscored_if_one_says_so(
    server: JudgeServer, tiny_model: Path, tmp_path: Path
) -> None:
    args = "buffer.explorer_input.taskset.reward_fn_args"
    limits = [
        f"{args}.max_cost_usd=0.0022",
        f"{args}.over_budget=unscored",
        "buffer.on_short_batch=train",
        "buffer.max_refill=0",
    ]
    with suppress(ShortBatch):  # where no group at all is left for a step
        execute(CONFIG, changes(tiny_model, tmp_path, *limits), in_process=True)
    question = "SELECT count(*), count(reward), min(reward) FROM v_experiences"
    with (
        open_run(tmp_path / "rft" / "examples" / "judge") as questions,
        questions.ask(question) as answer,
    ):
        ((rows, scored, least),) = answer.rows
    assert 0 < len(server.asked) <= scored < rows and least >= 0.2, "none of them is a zero"
