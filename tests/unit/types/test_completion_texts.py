"""The texts of an answer: as it was written, with its thought, and behind it (findings G3, G17)."""

from __future__ import annotations

import msgspec
import pytest

from rft.explorer.stored import transcript
from rft.extras.judge_lab.rescore import transcript_of
from rft.types.completion import Completion, Transcript
from rft.types.ids import GroupId
from rft.workflow.run_rows import experiences
from tests.helpers.answers import make_transcript, task


def completion(text: str, **fields: object) -> Completion:
    return msgspec.structs.replace(make_transcript(text).turns[-1].completion, **fields)


@pytest.mark.parametrize(
    ("text", "stop", "written"),
    [
        ("<answer>7", "</answer>", "<answer>7</answer>"),
        ("<answer>7", "</answer>\n", "<answer>7</answer>\n"),
        ("7", "</answer>", "7"),
        ("<answer>7</answer>", "</answer>", "<answer>7</answer>"),
        (r"\boxed{7", "}", r"\boxed{7}"),
        (r"\boxed{7}", "}", r"\boxed{7}"),
        ("7", "\n", "7"),
        ("<answer>7", "Observation:", "<answer>7"),
    ],
)
def test_a_stop_text_that_closes_a_tag_is_read(text: str, stop: str, written: str) -> None:
    """G17."""
    c = completion(text, stop_text=stop)
    assert (c.text, c.written) == (text, written)


@pytest.mark.parametrize(
    ("text", "fields", "with_thought", "answer"),
    [
        ("<think>k</think>\n\n7", {}, "<think>k</think>\n\n7", "7"),
        ("k</think>\n7", {"in_thought": True}, "<think>k</think>\n7", "7"),
        ("k", {"in_thought": True, "stop_text": "</think>"}, "<think>k</think>", ""),
        ("k", {"in_thought": True}, "<think>k", ""),
        ("7", {"reasoning": "k"}, "<think>k</think>7", "7"),
        ("    return 7", {}, "    return 7", "    return 7"),
    ],
)
def test_an_answer_is_read_behind_its_thought(
    text: str, fields: dict[str, object], with_thought: str, answer: str
) -> None:
    """G3."""
    c = completion(text, **fields)
    run = Transcript(turns=(msgspec.structs.replace(make_transcript("").turns[0], completion=c),))
    assert (run.with_thought, run.answer) == (with_thought, answer)


def test_stored_answers_are_read_as_they_were_sampled() -> None:
    c = completion("k</think><answer>7", in_thought=True, stop_text="</answer>")
    run = make_transcript("")
    run = msgspec.structs.replace(run, turns=(msgspec.structs.replace(run.turns[0], completion=c),))
    (row,) = experiences(task("7"), "w", run, None, GroupId(1, "e", 1, 0), 0, 0)
    assert row.info == {"in_thought": True, "stop_text": "</answer>"}
    again = transcript_of(row, task("7"))
    assert (again.answer, again.with_thought) == (run.answer, run.with_thought)


def test_a_thought_that_an_answer_only_closes_was_opened_by_its_prompt() -> None:
    assert transcript(task("7"), "k</think>7").with_thought == "<think>k</think>7"
    assert transcript(task("7"), "<think>k</think>7").with_thought == "<think>k</think>7"
    assert transcript(task("7"), "7").with_thought == "7"
