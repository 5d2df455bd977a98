"""Workflows and a reward that Trinity-RFT's files name: Sudoku, trainable RULER, the mailbox, RLCR."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.extras.migrate.compat.trinity_rewards import make_transcript
from rft.plugins import REGISTRY, import_file, load_all, shipped_workflows
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.testing import FakeJudge, ScriptedModel, run_workflow, tool_call
from rft.types.completion import Score
from rft.types.task import SamplingArgs, Task
from rft.worker import job_pool

LONG = SamplingArgs(max_tokens=50_000)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    load_all()
    yield
    job_pool.close_all()


def task(**changes: Any) -> Task:
    return Task(
        **{
            "taskset": "t",
            "index": 3,
            "prompt": "1+1?",
            "truth": "2",
            "workflow": "x",
            "sampling": LONG,
            **changes,
        }
    )


# ---------------------------------------------------------------- Sudoku

sudoku = import_file(shipped_workflows() / "sudoku.py")
SOLVED = [[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]


def open_at(*cells: tuple[int, int]) -> dict[str, Any]:
    return {
        "puzzle": [
            [0 if (r, c) in cells else n for c, n in enumerate(line)]
            for r, line in enumerate(SOLVED)
        ]
    }


def test_a_board_is_filled_call_by_call() -> None:
    model = ScriptedModel("0 0 1\n", "8 8 8\n  4 4 9")
    rows = run_workflow(
        "sudoku_workflow", task(row=open_at((0, 0), (4, 4), (8, 8))), model
    ).group.rows
    assert [(r.reward, r.id.step) for r in rows] == [(0.0, 0), (1.0, 1)] and rows[-1].info[
        "success"
    ] is True
    asked = [m["content"] for m in model.calls[1].messages]
    assert len(asked) == 2 and asked[1].startswith("1 2 3"), "the rules, and the board as it is now"


@pytest.mark.parametrize(
    "answer",
    [
        "0 0 2",
        "0 1 1",
        "0 0",
        "0 0 10",
        "9 0 1",
        "-1 0 1",
        "0 0 ١",
        "hello",
        "",
        "0 0 1\n" * 6,
        "0 0 1\n" * 9_000,
        "0 0 1\n0 0 1",
    ],
)
def test_what_breaks_a_rule_ends_the_run(answer: str) -> None:
    rows = run_workflow(
        "sudoku_workflow", task(row=open_at((0, 0), (1, 1))), ScriptedModel(answer)
    ).group.rows
    assert [r.reward for r in rows] == [-1.0]


@pytest.mark.parametrize(("size", "holes"), [(9, 1 / 3), (9, 2 / 3), (4, 1 / 2)])
def test_made_boards_are_sound_and_open(size: int, holes: float) -> None:
    boards = [sudoku.made(size, holes, seed=seed) for seed in range(20)]
    assert all(
        sudoku.sound(b) and sum(n == 0 for line in b for n in line) == round(size * size * holes)
        for b in boards
    )
    assert (
        len({json.dumps(b) for b in boards}) == 20 and sudoku.made(size, holes, seed=3) == boards[3]
    )
    full = sudoku.made(size, 0, seed=1)
    assert all(
        sorted(line) == list(range(1, size + 1)) for line in [*full, *zip(*full, strict=True)]
    )
    row = run_workflow(
        "sudoku_workflow", task(row={"seed": 3}), ScriptedModel("?"), workflow_args={"size": size}
    )
    assert len(row.group.rows[0].messages[1]["content"].splitlines()) == size


@pytest.mark.parametrize(
    ("puzzle", "says"),
    [
        ([[1]], "4 lists of 4"),
        ([[1, 1, 0, 0]] * 4, "breaks the rules"),
        ([[9] * 4] * 4, "0 to 4"),
        (SOLVED, "no open cell"),
    ],
)
def test_a_puzzle_that_is_none_is_named(puzzle: Any, says: str) -> None:
    result = run_workflow(
        "sudoku_workflow", task(row={"puzzle": puzzle}), ScriptedModel("0 0 1"), may_fail=True
    )
    assert says in result.runs[0].reason


# ---------------------------------------------------------------- RULER that is trained

ruler = import_file(shipped_workflows() / "ruler.py")
RIGHT = "<think>a</think><answer>2</answer>"
WRONG = "<think>b</think><answer>3</answer>"


def test_a_fifth_of_the_tasks_uses_gold_answers() -> None:
    drawn = [ruler.TrainableRuler().part(f"1.0.{i}") for i in range(6000)]
    shares = {part: drawn.count(part) / len(drawn) for part in ("solve", "judge", "trust")}
    assert shares == pytest.approx({"solve": 1 / 6, "judge": 1 / 6, "trust": 2 / 3}, abs=0.03)
    assert {ruler.TrainableRuler(gold=1.0).part(f"{i}") for i in range(99)} == {"solve", "judge"}
    assert {ruler.TrainableRuler(gold=0.0).part(f"{i}") for i in range(99)} == {"trust"}


class Policy(ScriptedModel):
    """Answers questions in turn, and judges with `scores` where it is asked to."""

    def __init__(self, scores: list[list[float]], *, readable: bool = True) -> None:
        self.answers = [RIGHT, WRONG]
        self.scores = list(scores)
        self.readable = readable
        super().__init__(answer=self.say)

    def say(self, messages: list[dict[str, Any]]) -> str:
        text = messages[-1]["content"]
        if not text.startswith("Score every answer"):
            self.answers.append(self.answers.pop(0))
            return self.answers[-1]
        key = json.loads(text.splitlines()[-1].split(",")[0] + "}")["key"] if self.readable else "x"
        verdict = {"key": key, **{f"answer {i}": s for i, s in enumerate(self.scores.pop(0), 1)}}
        return f"Hm.\n{json.dumps(verdict)}"


def play(part: str, policy: Policy, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    cls = REGISTRY.get("workflow", "math_trainable_ruler_workflow").obj
    monkeypatch.setattr(cls, "part", lambda self, group: part)
    return run_workflow(
        "math_trainable_ruler_workflow", task(num_runs=2, **changes), policy, reward="math_reward"
    ).group


def test_answers_are_scored_by_the_gold_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    group = play("solve", Policy([]), monkeypatch)
    assert sorted(group.rewards) == [pytest.approx(0.1), pytest.approx(1.1)]


def test_answers_are_scored_by_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy([[0.25, 0.75]])
    group = play("trust", policy, monkeypatch)
    assert group.rewards == [0.25, 0.75] and all(
        r.metrics["judge_success"] == 1.0 for r in group.rows
    )
    assert (
        len(policy.calls) == 3 and "<answer>2</answer>" in policy.calls[-1].messages[-1]["content"]
    )
    group = play("trust", Policy([[0.25, 0.75]], readable=False), monkeypatch)
    assert not group.accepted and group.reason == "unscored", (
        "a verdict that cannot be read is no score"
    )


def test_verdicts_are_trained_by_their_distance_to_the_gold_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gold scores 1.1 and 0.1 are (1.1 + 0.1) / 1.2 = 1 and (0.1 + 0.1) / 1.2 = 1/6
    policy = Policy([[1.0, 1 / 6], [0.5, 0.5]])
    group = play("judge", policy, monkeypatch)
    assert group.rewards == [pytest.approx(1.0), pytest.approx(1 - (1 / 2 + 1 / 3) / 2)]
    asked = {r.messages[-2]["content"] for r in group.rows}
    assert len(asked) == 1 and "<answer>2</answer>" in asked.pop(), (
        "all runs of the group have the same prompt, and only verdicts are rows"
    )
    unreadable = play("judge", Policy([[1.0, 0.0]] * 2, readable=False), monkeypatch)
    assert unreadable.rewards == [0.0, 0.0], "the policy learns to write verdicts that can be read"


def test_an_evaluation_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    group = play("judge", Policy([]), monkeypatch, is_eval=True)
    assert sorted(group.rewards) == [pytest.approx(0.1), pytest.approx(1.1)]


# ---------------------------------------------------------------- a mailbox


@pytest.fixture
def mailbox(tmp_path: Path) -> Path:
    path = tmp_path / "mails.db"
    db = sqlite3.connect(path)
    db.executescript(
        """CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id TEXT, subject TEXT, from_address TEXT, date TEXT, body TEXT);
        CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT);
        CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
        INSERT INTO emails VALUES (1, 'm-a', 'Party', 'ann@x', '2001-05-01 09:00:00', 'The party is on Friday at "Joe''s".'),
          (2, 'm-b', 'Party', 'bob@x', '2001-05-03 09:00:00', 'No party after all.'),
          (3, 'm-c', 'Party', 'eve@x', '2001-05-01 08:00:00', 'Secret party.');
        INSERT INTO recipients VALUES (1, 'me@x', 'to'), (2, 'me@x', 'cc');
        INSERT INTO emails_fts (rowid, subject, body) SELECT id, subject, body FROM emails;"""
    )
    db.close()
    return path


ASKED = {"inbox_address": "me@x", "query_date": "2001-05-02", "message_ids": ["m-a"]}
SEARCH = tool_call("search_emails", keywords=["party"])


def search(mailbox: Path, *answers: Any, judge: FakeJudge | None = None, **reward_args: Any) -> Any:
    of = task(
        prompt="When is the party?",
        truth="on Friday",
        row=ASKED,
        workflow="email_search_workflow",
        reward_args=reward_args,
    )
    return run_workflow(
        "email_search_workflow",
        of,
        ScriptedModel(*answers),
        workflow_args={"database": str(mailbox)},
        reward="email_search_reward",
        reward_args=reward_args,
        models={"judge": judge or FakeJudge("yes")},
    ).group.rows[0]


def test_a_question_is_answered_from_the_mails(mailbox: Path) -> None:
    answer = tool_call("generate_response", answer="Friday", sources=["m-a"])
    row = search(mailbox, SEARCH, tool_call("read_email", message_id="m-a"), answer)
    told = [m["content"] for m in row.messages if m["role"] == "tool"]
    assert "m-a" in told[0] and "m-b" not in told[0] and "m-c" not in told[0], (
        "not what came later, or to others"
    )
    assert "Friday at" in told[1] and "me@x" in told[1]
    assert (
        row.reward == pytest.approx(1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 10))
        and row.reward_parts["accuracy"] == 1.0
    )


@pytest.mark.parametrize(
    ("answers", "says", "reward"),
    [
        ((SEARCH, tool_call("generate_response", answer="Monday", sources=["m-b"])), "no", -0.9),
        ((SEARCH, tool_call("generate_response", answer="I don't know")), "yes", 0.1),
        ((tool_call("generate_response", answer="Friday"),), "yes", 1.09),
        (("Friday, I think.",), "yes", -1.0),
    ],
)
def test_what_other_ends_are_worth(
    mailbox: Path, answers: tuple[Any, ...], says: str, reward: float
) -> None:
    assert search(mailbox, *answers, judge=FakeJudge(says)).reward == pytest.approx(reward)


def test_without_a_judge_the_answer_is_the_gold_answer(mailbox: Path) -> None:
    for answer, reward in (("On friday.", 1.0), ("Monday", 0.0), ("o", 0.0), ("  ", 0.0)):
        assert (
            search(
                mailbox, tool_call("generate_response", answer=answer), llm_as_a_judge=False
            ).reward
            == reward
        )
    build("email_search_reward", {"llm_as_a_judge": False}).check_models({})


@pytest.mark.parametrize(
    "keywords", [['"'], ["NOT party"], ['party" OR "secret'], ["*"], ["party", "x" * 5000], []]
)
def test_keywords_are_words(mailbox: Path, keywords: list[str]) -> None:
    row = search(mailbox, tool_call("search_emails", keywords=keywords), "?")
    told = next(m["content"] for m in row.messages if m["role"] == "tool")
    assert (
        "m-c" not in told
        and "syntax" not in told
        and row.metrics["tool_errors"] == float("no keywords" in told)
    )


def test_a_mailbox_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEFAULT_EMAIL_DB_PATH", raising=False)
    for args, row, says in (
        ({}, ASKED, "workflow_args.database, or in the variable DEFAULT_EMAIL_DB_PATH"),
        ({"database": str(tmp_path / "no.db")}, ASKED, "there is no mailbox"),
        ({"database": __file__}, {}, "query_date is ''"),
    ):
        result = run_workflow(
            "email_search_workflow",
            task(row=row),
            ScriptedModel("?"),
            workflow_args=args,
            may_fail=True,
        )
        assert says in result.runs[0].reason
    assert not (tmp_path / "no.db").exists()


# ---------------------------------------------------------------- stated confidence


def rlcr(answer: str, **args: Any) -> Score:
    return asyncio.run(score(build("rlcr_reward", args), task(), make_transcript(answer)))


SHAPE = "<think>t</think>\n<answer>{}</answer> <analysis>a</analysis><confidence>{}</confidence>\n"


@pytest.mark.parametrize(
    ("answer", "accuracy", "brier", "shape", "stated", "certain"),
    [
        (SHAPE.format(2, 0.8), 1, 0.96, 1, 0.8, 0),
        (SHAPE.format(3, 0.8), 0, 0.36, 1, 0.8, 0),
        (SHAPE.format(2, 1), 1, 1.0, 1, 1.0, 1),
        ("<think>x</think>" + SHAPE.format(2, 0.5), 1, 0.75, 1, 0.5, 0),
        (SHAPE.format(2, 1.5), 0, 0, 0, 0, 0),
        (SHAPE.format(2, "nan"), 0, 0, 0, 0, 0),
        (SHAPE.format(2, 0.8) + "so", 0, 0, 0, 0.8, 0),
        (SHAPE.format("2<think>", 0.8), 0, 0, 0, 0.8, 0),
        ("<answer>2</answer><confidence>0.001", 0, 0, 0, 0, 0),
        ("2", 0, 0, 0, 0, 0),
    ],
)
def test_a_stated_confidence_is_scored(
    answer: str, accuracy: float, brier: float, shape: float, stated: float, certain: float
) -> None:
    found = rlcr(answer)
    assert found.parts == pytest.approx(
        {
            "format": shape,
            "accuracy": accuracy,
            "brier": brier,
            "mean_confidence": stated,
            "confidence_one_or_zero": certain,
        }
    )
    assert found.value == pytest.approx((shape + accuracy + brier) / 2 + (stated + certain) * 1e-5)
    only = rlcr(answer, weights={"format": 0, "accuracy": 0, "brier": 2})
    assert only.value == pytest.approx(2 * brier + (stated + certain) * 1e-5)
