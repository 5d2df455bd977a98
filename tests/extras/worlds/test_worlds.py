"""Environments of gymnasium, SQLite, and the adapters for other libraries, played with written
answers.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rft.extras.worlds import adapters
from rft.extras.worlds.adapters import chosen
from rft.plugins import REGISTRY, load_all
from rft.taskset.generated_tasks import frozen_lake_maps, moves, seeds
from rft.testing import ScriptedModel, run_workflow
from rft.types.task import SamplingArgs, Task

LONG = SamplingArgs(max_tokens=20_000)


def task(**changes):
    return Task(
        **{
            "taskset": "worlds",
            "index": 1,
            "prompt": "go",
            "workflow": "x",
            "sampling": LONG,
            **changes,
        }
    )


# ---------------------------------------------------------------- gymnasium


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Left", "Left"),
        ("I go up, then RIGHT.", "Right"),
        ("upright", None),
        ("<action>down</action> not up", "Down"),
        ("", None),
    ],
)
def test_the_action_an_answer_names(text: str, action: str | None) -> None:
    assert chosen(text, {"Left": 0, "Right": 1, "Up": 2, "Down": 3}) == action


LAKE = {"desc": ["SFF", "FHF", "FFG"]}


def test_a_lake_is_crossed():
    pytest.importorskip("gymnasium")
    model = ScriptedModel("Right", "hm", "to the right", "Down", "I say down.")
    (row,) = run_workflow("frozen_lake_workflow", task(row=LAKE), model).group.rows
    assert (row.reward, row.reward_parts) == (1.0, {"success": 1.0})
    assert row.metrics["turns"] == 5.0 and row.metrics["invalid_actions"] == 1.0
    seen = [m["content"] for m in model.calls[-1].messages if m["role"] == "user"]
    assert (
        seen[0].startswith("PFF\nFHF\nFFG\nGoal: 2 down and 2 right. Holes: none.")
        and "Holes: down." in seen[1]
    )
    assert seen[2].startswith("That is no action. SPF") and seen[4].startswith("SFF\nFHP")


def test_a_hole_ends_the_run_and_states_have_names():
    pytest.importorskip("gymnasium")
    args = {"layout": "steps", "history": 0, "view": "map"}
    runs = [
        run_workflow(
            "frozen_lake_workflow", task(row=LAKE), ScriptedModel(*a), workflow_args=args
        ).group.rows
        for a in (("Right", "Down"), ("Left", "Right", "Down"))
    ]
    assert [r.reward for rows in runs for r in rows] == [0.0] * 5
    first, second = ([r.info["env_state_hash"] for r in rows] for rows in runs)
    assert first[0] == second[0] == second[1] and first[1] == second[2] != first[0], (
        "against the edge nothing moves"
    )


def test_lakes_of_rows_with_a_seed_and_wrong_ones():
    pytest.importorskip("gymnasium")
    for _ in range(2):
        model = ScriptedModel("Up")
        run_workflow(
            "frozen_lake_workflow",
            task(row={"seed": 4, "size": 5, "p": 0.9}),
            model,
            workflow_args={"max_turns": 1},
        )
    assert model.calls[0].messages[1]["content"].count("\n") == 5
    bad = run_workflow(
        "frozen_lake_workflow", task(row={"desc": ["SX", "FG"]}), ScriptedModel("Up"), may_fail=True
    )
    assert "is no lake" in bad.runs[0].reason


@pytest.mark.parametrize(
    ("workflow", "args", "answer"),
    [
        ("frozen_lake_workflow", {}, "Up"),
        ("sudoku_workflow", {}, "?"),
        ("text_game_workflow", {"env_id": f"{__file__}:Guess"}, "1"),
        (
            "openenv_workflow",
            {
                "client": f"{__file__}:Client",
                "base_url": "http://127.0.0.1:1",
                "action": f"{__file__}:Move",
                "action_field": "text",
                "reset_args": {"seed": 2},
            },
            "1",
        ),
    ],
)
def test_a_seed_that_is_null_is_none(workflow: str, args: dict[str, Any], answer: str) -> None:
    """Rows of one file have the same columns, so a row that names no seed has null there."""
    pytest.importorskip("gymnasium")
    args = {**args, "max_turns": 1}
    first, second = (
        run_workflow(workflow, task(row=row), ScriptedModel(answer), workflow_args=args)
        .group.rows[0]
        .messages[-2]
        for row in ({}, {"seed": None})
    )
    assert first == second


def test_no_lake_is_in_both_splits_and_all_can_be_crossed():
    train, test = (
        {tuple(r["desc"]) for r in frozen_lake_maps(split=s, size=3, holes=2, distance=2)}
        for s in ("train", "test")
    )
    assert not train & test and len(test) > 100
    assert all(1 <= (moves(lake) or 0) <= 2 for lake in train | test)
    assert (
        {r["seed"] % 2 for r in seeds(split="train", count=5)}
        == {0}
        != {r["seed"] % 2 for r in seeds(split="test", count=5)}
    )
    assert all(
        r["desc"][0][0] == "S"
        for r in frozen_lake_maps(split="test", size=4, holes=3, corners=True, count=5)
    )


def test_a_taxi_ride():
    pytest.importorskip("gymnasium")
    model = ScriptedModel("Pickup", "Dropoff", "fly", "South")
    args = {"max_turns": 4, "layout": "steps", "credit": "step"}
    rows = run_workflow(
        "taxi_workflow", task(row={"seed": 0}), model, workflow_args=args
    ).group.rows
    assert [r.info["action"] for r in rows] == ["Pickup", "Dropoff", "", "South"]
    assert rows[2].reward == 0.0 and all((r.reward or 0) < 0 for i, r in enumerate(rows) if i != 2)
    text = model.calls[0].messages[1]["content"]
    assert "Taxi (row" in text and "Passenger at" in text and "Goal" in text and "Ways:" in text


# ---------------------------------------------------------------- SQL

SHOP = """CREATE TABLE sales (id INTEGER, item TEXT, price REAL);
INSERT INTO sales VALUES (1, 'pen', 2.0), (2, 'cup', 5.0), (3, 'pen', 3.0);"""
SALES = {
    "row": {"database": SHOP},
    "truth": "SELECT item, sum(price) FROM sales GROUP BY item",
    "prompt": "Turnover of each item?",
}


def sql(*answers: str, **more: Any):
    model = ScriptedModel(*answers)
    result = run_workflow(
        "sql_workflow", task(**{**SALES, **more.pop("task", {})}), model, workflow_args=more
    )
    return result.group.rows[0], [
        m["content"] for m in result.group.rows[0].messages if m["role"] == "user"
    ]


def test_a_query_is_tried_and_submitted():
    right = "```sql\nSELECT item, sum(price) AS s FROM sales GROUP BY item ORDER BY s DESC\n```"
    row, said = sql("```sql\nSELECT * FROM sale\n```", right, "SUBMIT")
    assert (row.reward, row.reward_parts) == (1.0, {"success": 1.0})
    assert (
        "CREATE TABLE sales" in said[0]
        and said[1] == "Error: no such table: sale"
        and "pen | 5.0" in said[2]
    )
    row, _ = sql(right, "SUBMIT", ordered=True)
    assert row.reward == 0.0, "another order"
    row, _ = sql("```sql\nSELECT 1\n```", right, max_turns=2)
    assert row.reward == 1.0 and row.metrics["finished"] == 0.0, "not submitted, and right"
    row, _ = sql("SUBMIT")
    assert row.reward == 0.0


def test_the_question_stays_where_the_model_is_shown_its_last_turns_alone():
    model = ScriptedModel(answer=lambda m: "```sql\nSELECT 1\n```")
    run_workflow(
        "sql_workflow",
        task(**SALES),
        model,
        workflow_args={"max_turns": 3, "layout": "steps", "history": 0},
    )
    assert [
        "Turnover of each item?" in m["content"]
        for m in model.calls[-1].messages
        if m["role"] == "user"
    ] == [True, False]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("DROP TABLE sales", "not authorized"),
        ("INSERT INTO sales VALUES (4, 'x', 1)", "not authorized"),
        ("ATTACH DATABASE '/etc/passwd' AS p", "not authorized"),
        ("PRAGMA table_info(sales)", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT 1; DROP TABLE sales", "one statement at a time"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM "
            "n",
            "took longer than 0.2 s",
        ),
        ("SELECT length(zeroblob(900000000))", "too big"),
    ],
)
def test_queries_only_read_and_end(query: str, says: str) -> None:
    row, said = sql(f"```sql\n{query}\n```", "SUBMIT", query_s=0.2)
    assert says in said[1] and row.reward == 0.0


def test_a_database_file_is_opened_for_reading(tmp_path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as db:
        db.executescript(SHOP)
    row, _ = sql(
        "```sql\n" + SALES["truth"] + "\n```",
        "SUBMIT",
        task={"row": {"database": str(tmp_path / "shop.db")}},
    )
    assert row.reward == 1.0


def test_long_results_are_cut():
    _, said = sql(
        "```sql\nSELECT a.id FROM sales a, sales b, sales c\n```",
        "SUBMIT",
        max_rows=3,
        max_chars=20,
    )
    assert said[1].endswith("... 24 more rows")


# ---------------------------------------------------------------- adapters, with objects of their
# shapes


class Guess:
    """textarena's shape."""

    def __init__(self, top=9):
        self.top = top

    def reset(self, num_players, seed=None):
        assert num_players == 1
        self.secret = seed % self.top
        self.said = [(-1, "Guess a digit.", None)]
        self.won = False

    def get_observation(self):
        said = self.said
        self.said = []
        return 0, said

    def step(self, action):
        self.won = action == str(self.secret)
        self.said = [(-1, "no", None)]
        return self.won, {"reason": "won" if self.won else ""}

    def close(self):
        return {0: 1.0 if self.won else -1.0}, {}


def test_text_games(tmp_path) -> None:
    args = {"env_id": f"{__file__}:Guess", "env_args": {"top": 5}}
    model = ScriptedModel("1", "3")
    (row,) = run_workflow(
        "text_game_workflow", task(row={"seed": 13}), model, workflow_args=args
    ).group.rows
    assert (row.reward, row.reward_parts) == (1.0, {"success": 1.0})
    assert [m["content"] for m in row.messages] == ["Guess a digit.", "1", "no", "3"]
    lost = run_workflow(
        "text_game_workflow",
        task(row={"seed": 13}),
        ScriptedModel("1"),
        workflow_args={**args, "max_turns": 1},
    )
    assert lost.runs[0].reward == -1.0, "what the game gives when it is left"


def test_a_game_of_textarena() -> None:
    pytest.importorskip("textarena")
    args = {"env_id": "GuessTheNumber-v0", "max_turns": 2}
    (row,) = run_workflow(
        "text_game_workflow",
        task(row={"seed": 1}),
        ScriptedModel("[1]", "[20]"),
        workflow_args=args,
    ).group.rows
    assert row.status != "failed" and row.metrics["turns"] >= 1


class Sums:
    """verifiers' classic shape."""

    system_prompt = "Add."

    def __init__(self, old=False):
        self.rubric = SimpleNamespace(score_rollout=self.score_old if old else self.score)

    async def setup_state(self, state):
        return {**state, "tries": 0}

    async def is_completed(self, messages, state):
        return state["tries"] >= 2 or messages[-1]["content"] == state["answer"]

    async def env_response(self, messages, state):
        state["tries"] += 1
        return [{"role": "user", "content": f"no ({state['tries']})"}]

    async def score(self, state):
        right = state["completion"][-1]["content"] == state["answer"]
        state["reward"], state["metrics"] = float(right), {"right": float(right)}

    async def score_old(self, state):
        await self.score(state)
        return SimpleNamespace(reward=state["reward"] / 2, metrics={})


def make_sums(**args: Any) -> Sums:
    return Sums(**args)


def test_environments_of_verifiers() -> None:
    args = {"env": f"{__file__}:make_sums"}
    asked = task(truth="4", prompt="2+2?")
    (row,) = run_workflow(
        "verifiers_workflow", asked, ScriptedModel("3", "4"), workflow_args=args
    ).group.rows
    assert (row.reward, row.reward_parts) == (1.0, {"right": 1.0})
    assert [m["content"] for m in row.messages] == ["Add.", "2+2?", "3", "no (1)", "4"]
    (row,) = run_workflow(
        "verifiers_workflow", asked, ScriptedModel("3", "5"), workflow_args=args
    ).group.rows
    assert row.reward == 0.0 and row.metrics["turns"] == 2.0
    short = task(truth="4", prompt="2+2?", sampling=SamplingArgs(max_tokens=1))
    (row,) = run_workflow(
        "verifiers_workflow", short, ScriptedModel("3"), workflow_args=args
    ).group.rows
    assert (row.reward, row.status) == (0.0, "truncated"), (
        "what the rubric gives to a run that a limit ended"
    )
    old = {**args, "env_args": {"old": True}}
    assert (
        run_workflow("verifiers_workflow", asked, ScriptedModel("4"), workflow_args=old)
        .runs[0]
        .reward
        == 0.5
    )
    with pytest.raises(Exception, match=r"has no rubric\.score_rollout"):
        adapters.environment(f"{__file__}:Guess", "{}")


@dataclass
class Move:
    text: str


class Client:
    """OpenEnv's shape."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    async def reset(self, seed: int = 0) -> Any:
        self.left = seed
        return SimpleNamespace(observation=SimpleNamespace(left=self.left), reward=None, done=False)

    async def step(self, action: Move) -> Any:
        self.left -= int(action.text)
        return SimpleNamespace(
            observation=SimpleNamespace(left=self.left),
            reward=float(self.left == 0),
            done=self.left <= 0,
        )

    async def close(self) -> None:
        self.left = -1


def test_environments_of_openenv() -> None:
    args = {
        "client": f"{__file__}:Client",
        "base_url": "http://127.0.0.1:1",
        "action": f"{__file__}:Move",
        "action_field": "text",
        "reset_args": {},
        "instruction": "Count down.",
    }
    (row,) = run_workflow(
        "openenv_workflow", task(row={"seed": 3}), ScriptedModel("1", "2"), workflow_args=args
    ).group.rows
    assert row.reward == 1.0 and [m["content"] for m in row.messages] == [
        "Count down.",
        '{"left":3}',
        "1",
        '{"left":2}',
        "2",
    ]
    shown = {**args, "observation_field": "left"}
    shown["reset_args"] = {"seed": 7}  # the row's own counts
    (row,) = run_workflow(
        "openenv_workflow", task(row={"seed": 1}), ScriptedModel("1"), workflow_args=shown
    ).group.rows
    assert row.messages[1]["content"] == "1"


def test_a_world_that_is_still_at_work_goes_to_no_other_run():
    """A run was given up while its command was executed: the next one got its simulator, in the
    middle of that.
    """
    load_all()
    made = REGISTRY.get("workflow", "sciworld_workflow").obj()
    idle = sys.modules[type(made).__module__]._IDLE
    at_work = threading.Event()
    go_on = threading.Event()

    class World:
        def step(self, command):
            at_work.set()
            go_on.wait(20)
            return "seen", 0, False, {"score": 50}

    made.env = world = World()
    command = threading.Thread(target=made.act, args=("look",))
    command.start()
    assert at_work.wait(20)
    made.close()
    assert world not in idle
    go_on.set()
    command.join(20)
    made.close()
    assert idle.pop() is world, "it is free now"
