"""Rewards whose answer is read: arithmetic with given numbers, tool calls by BFCL's data, boxed
answers with a thought.
"""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.extras.worlds.countdown_reward import evaluated
from rft.extras.worlds.tool_call_answers import gold_calls, mismatch
from rft.taskset.generated_tasks import countdown
from rft.testing import ScriptedModel, run_workflow
from rft.types.task import SamplingArgs, Task

LONG = SamplingArgs(max_tokens=4000)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<answer>(8 - 3) * 2</answer>", 1.0),
        ("<answer>2 * (8 - 3) = 10</answer>", 1.0),
        ("first <answer>1</answer>, no: <answer>8*2-3*2</answer>", 0.1),
        ("<answer>8 + 2</answer>", 0.1),
        ("<answer>10</answer>", 0.1),
        ("<answer>__import__('os').system('x')</answer>", 0.1),
        ("<answer>" + "9" * 300 + "</answer>", 0.1),
        ("<answer>8 ** 2 - 3</answer>", 0.1),
        ("<answer>8 / (3 - 3) + 2</answer>", 0.1),
        ("it is 10", 0.0),
    ],
)
def test_countdown(answer: str, reward: float) -> None:
    task = Task(
        taskset="c",
        index=0,
        prompt="go",
        truth={"numbers": [2, 3, 8], "target": 10},
        workflow="countdown_workflow",
        sampling=LONG,
    )
    assert (
        run_workflow("countdown_workflow", task, ScriptedModel(answer), reward="countdown_reward")
        .runs[0]
        .reward
        == reward
    )


def test_rows_with_bare_numbers_are_asked_in_words() -> None:
    model = ScriptedModel("<answer>1+2</answer>")
    task = Task(
        taskset="c",
        index=0,
        prompt="x",
        row={"nums": [1, 2], "target": 3},
        workflow="countdown_workflow",
        sampling=LONG,
    )
    assert (
        run_workflow("countdown_workflow", task, model, reward="countdown_reward").runs[0].reward
        == 1.0
    )
    assert "1, 2" in model.calls[0].messages[0]["content"]


def test_expressions_are_exact() -> None:
    assert evaluated("(1 / 3) * 3") == (Fraction(1), [1, 3, 3])
    with pytest.raises(ValueError, match="only whole numbers"):
        evaluated("1.5 + 1")


def test_countdown_rows_have_solutions_and_splits_share_no_numbers() -> None:
    train = countdown(split="train", count=200)
    test = countdown(split="test", count=60)
    numbers = [{tuple(sorted(r["response"]["numbers"])) for r in rows} for rows in (train, test)]
    assert not numbers[0] & numbers[1] and train == countdown(split="train", count=200)


GOLD = [{"weather": {"city": ["Oslo"], "days": [1, ""]}}]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([("weather", {"city": "oslo "})], ""),
        ([("weather", {"city": "Oslo", "days": 1})], ""),
        ([("weather", {"city": "Oslo", "days": 2})], "days is 2"),
        ([("weather", {"city": "Oslo", "days": True})], "days is True"),
        ([("weather", {"days": 1})], "city is missing"),
        ([("weather", {"city": "Oslo", "hours": 1})], "argument hours is not wanted"),
        ([("sing", {})], "sing is not wanted"),
        ([], "0 calls instead of 1"),
    ],
)
def test_tool_calls_are_compared(made: list[tuple[str, dict[str, object]]], why: str) -> None:
    assert why in mismatch(made, gold_calls(GOLD)) and bool(why) == bool(
        mismatch(made, gold_calls(GOLD))
    )


BOTH = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]


@pytest.mark.parametrize(
    ("values", "why"),
    [((1, 2), ""), ((2, 1), ""), ((1, 1), ""), ((2, 2), "f: x is 2"), ((1, 3), "f: x is 3")],
)
def test_equal_calls_are_matched_in_any_order(values: tuple[int, int], why: str) -> None:
    """R13: the gold call that allows more is left to the call that needs it."""
    for gold in (BOTH, BOTH[::-1]):
        assert mismatch([("f", {"x": value}) for value in values], gold_calls(gold)) == why


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5), st.data())
def test_calls_match_wherever_some_assignment_does(
    allowed: list[set[int]], data: st.DataObject
) -> None:
    """R13, against all orders."""
    values = data.draw(st.lists(st.integers(0, 3), min_size=len(allowed), max_size=len(allowed)))
    possible = any(
        all(v in a for v, a in zip(order, allowed, strict=True)) for order in permutations(values)
    )
    gold = gold_calls([{"f": {"x": sorted(each)}} for each in allowed])
    assert (mismatch([("f", {"x": v}) for v in values], gold) == "") is possible


@pytest.mark.parametrize(
    ("made", "gold"),
    [
        ("Hawai’i", "Hawai'i"),
        ("cafe\u0301", "café"),
        ("1914–1918", "1914-1918"),
        (" NEW\u00a0York", "New York"),
    ],
)
def test_texts_of_arguments_are_read_in_one_spelling(made: str, gold: str) -> None:
    """G10."""
    assert mismatch([("f", {"x": made})], gold_calls([{"f": {"x": [gold]}}])) == ""


def test_gold_calls_in_several_shapes() -> None:
    assert gold_calls('{"name": "f", "arguments": {"a": [1]}}') == [("f", {"a": [[1]]})]
    assert (
        mismatch([("b", {}), ("a", {"x": [1, 2]})], gold_calls([{"a": {"x": [[1, 2]]}}, {"b": {}}]))
        == ""
    )
    assert gold_calls([{"a": {"x": [1], "y": None}, "b": None}]) == [("a", {"x": [1]})], (
        "as a table holds it"
    )
    only = gold_calls([{"name": "f", "arguments": {"x": {"tags": ["a"], "of": {"n": [1, 2]}}}}])
    assert mismatch([("f", {"x": {"tags": ["a"], "of": {"n": [1, 2]}}})], only) == ""
    assert mismatch([("f", {"x": {"tags": "a", "of": {"n": [1, 2]}}})], only) and mismatch(
        [("f", {"x": {"tags": ["a"]}})], only
    )
    several = gold_calls([{"f": {"x": [{"city": ["NYC", "New York"], "days": [1, ""]}]}}])
    for right in ({"city": "new york"}, {"city": "NYC", "days": 1}):
        assert mismatch([("f", {"x": right})], several) == ""
    assert mismatch([("f", {"x": {"city": "Oslo"}})], several) and mismatch(
        [("f", {"x": {"days": 1}})], several
    )
    for bad in (
        3,
        ["x"],
        [{"a": {}, "b": {}}],
        [{"name": "f", "arguments": "{"}],
        [{"name": "f", "arguments": "[1]"}],
        [{"a": 3}],
    ):
        with pytest.raises(ValueError, match="gold call"):
            gold_calls(bad)


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        },
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Oslo"}},
            "id": None,
        },
    ],
)
def test_gold_calls_in_openais_form(call: dict[str, object]) -> None:
    """Finding G7: every run of such a row failed."""
    assert gold_calls([call]) == gold_calls(json.dumps(call)) == [("weather", {"city": ["Oslo"]})]


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_gold_calls_without_arguments(arguments: object) -> None:
    assert gold_calls([{"name": "now", "arguments": arguments}]) == [("now", {})]
    assert gold_calls([{"function": {"name": "now", "arguments": arguments}}]) == [("now", {})]


ROW = {
    "question": [[{"role": "user", "content": "Weather in Oslo?"}]],
    "function": [
        {
            "name": "weather",
            "description": "d",
            "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}},
        }
    ],
    "ground_truth": GOLD,
}


OSLO = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ROME = OSLO.replace("Oslo", "Rome")


@pytest.mark.parametrize(
    ("answer", "args", "reward"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>', {}, 1.0),
        ('{"name": "weather", "arguments": {"city": "Bergen"}}', {}, 0.0),
        ("Oslo is cold", {}, 0.0),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
            {"with_think": True},
            0.0,
        ),
        (
            '<think>hm</think><tool_call>{"name": "weather", "arguments": {"city": '
            '"Oslo"}}</tool_call>',
            {"with_think": True},
            1.0,
        ),
        (f"<think>{ROME}?</think>{OSLO}", {}, 1.0),  # G2
        (f"<think>{OSLO}?</think>It is cold.", {}, 0.0),
        (f"<think>{OSLO}?</think>{ROME}", {}, 0.0),
        (f"{ROME}?</think>{OSLO}", {}, 1.0),
        (f"<think>{OSLO}", {}, 0.0),
    ],
)
def test_a_row_of_bfcl(answer: str, args: dict[str, object], reward: float) -> None:
    task = Task(
        taskset="b",
        index=0,
        prompt="x",
        row=json.loads(json.dumps(ROW)),
        workflow="tool_call_workflow",
        sampling=LONG,
    )
    model = ScriptedModel(answer)
    assert (
        run_workflow("tool_call_workflow", task, model, workflow_args=args).runs[0].reward == reward
    )
    told, asked = model.calls[0].messages
    assert '"type":"object"' in told["content"] and asked["content"] == "Weather in Oslo?"
