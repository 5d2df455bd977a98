"""Stored rollouts as their rewards saw them, and old rewards beside new ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from rft.extras.judge_lab.rescore import Rescored, StoredAnswer, rescore, summary, transcript_of
from rft.plugins import load_all
from rft.reward.base import FunctionReward, Reward
from rft.reward.build_reward import build
from rft.testing.storage_contract import row
from rft.types.completion import Transcript, VersionSpan
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.task import Task

TASK = Task(taskset="toy", index=0, prompt="2+2?", truth="4", workflow="toy")


def stored(task: int, run: int, answer: str, reward: float | None) -> StoredAnswer:
    group = GroupId(1, 0, 0, task)
    x = replace(row(group.run(run)), response_text=answer, reward=reward)
    return StoredAnswer(TASK, str(group), x, reward)


def several_turns() -> Experience:
    x = row(GroupId(1, 0, 0, 0).run(0), tokens=12)
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0], bool)
    messages = (
        {"role": "user", "content": "search"},
        {"role": "assistant", "content": "calling", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "found 4"},
        {"role": "assistant", "content": [{"type": "text", "text": "it is 4"}]},
    )
    spans = (VersionSpan(x.version_spans[0].version, 2, 10),)
    return replace(
        x,
        version_spans=spans,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        messages=messages,
    )


def test_a_transcript_has_the_turns_of_the_run() -> None:
    x = several_turns()
    found = transcript_of(x, TASK)
    assert [t.completion.text for t in found.turns] == [
        "calling",
        "it is 4",
    ] and found.answer == "it is 4"
    assert [t.completion.tokens.tolist() for t in found.turns] == [
        x.tokens[2:4].tolist(),
        x.tokens[7:10].tolist(),
    ]
    assert found.turns[1].messages == x.messages[:3] and found.turns[0].completion.tool_calls == (
        {"id": "1"},
    )
    single = transcript_of(replace(x, messages=(), response_text="so"), TASK)
    assert (
        single.answer == "so"
        and len(single.turns) == 1
        and single.turns[0].messages[-1]["content"] == "2+2?"
    )
    assert len(single.turns[0].completion.tokens) == 5


def test_a_thought_that_the_prompt_opened_stays_one() -> None:
    """Finding G2: what the model wrote has no <think>, and a draft in its last answer is none."""
    x = replace(several_turns(), info={"in_thought": True})
    assert [t.completion.answer for t in transcript_of(x, TASK).turns] == ["calling", ""]
    closed = replace(x, messages=(), response_text="two</think>4")
    assert transcript_of(closed, TASK).turns[0].completion.answer == "4"


async def score(rows: list[StoredAnswer], reward: Reward) -> list[Rescored]:
    return await rescore(rows, reward, models={}, timeout_s=10, max_concurrent=4)


async def test_old_and_new(tmp_path: object) -> None:
    rows = [
        stored(0, 0, "4", 1.0),
        stored(0, 1, "5", 0.0),
        stored(1, 0, "5", 1.0),
        stored(1, 1, "4", None),
    ]
    load_all()
    found = await score(rows, build("exact_answer", {}))
    assert [(r.old, r.new) for r in found] == [(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (None, 1.0)]
    told = summary(found)["toy"]
    assert (told["answers"], told["unscored"], told["old"], told["changed"]) == (
        4,
        0,
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    )
    assert (
        told["order_kept"] == 1.0
        and told["groups_with_spread_old"] == 1.0 == told["groups_with_spread_new"]
    )


class Half(Reward):
    """Breaks on "5"."""

    def __call__(self, task: Task, transcript: Transcript) -> float:
        if transcript.answer == "5":
            raise ValueError("five")
        return 0.5


class Rank(Reward):
    whole_group = True

    def __call__(self, task: Task, transcripts: list[Transcript]) -> list[float]:
        return [float(i) for i in range(len(transcripts))]


async def test_a_reward_that_breaks_and_one_that_sees_groups() -> None:
    rows = [stored(0, 0, "4", 1.0), stored(0, 1, "5", 0.0), stored(1, 0, "4", 1.0)]
    found = await score(rows, Half())
    assert [r.new for r in found] == [0.5, None, 0.5] and found[1].reason == "ValueError: five"
    assert summary(found)["toy"]["unscored"] == 1.0
    assert [r.new for r in await score(rows, Rank())] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("history", [True, False])
async def test_a_run_of_several_rows_is_scored_whole(history: bool) -> None:
    """A row for each call, which shows the calls before it or not: the reward sees one run, and all
    its rows get what it says.
    """
    said = {0: ("3", "what?", "4"), 1: ("5", "5", "5")}
    rows = []
    for run, answers in said.items():
        shown: tuple[dict[str, str], ...] = ({"role": "user", "content": "2+2?"},)
        for number, answer in enumerate(answers):
            first = stored(0, run, answer, float(number))
            shown = (
                (*shown, {"role": "assistant", "content": answer})
                if history
                else (shown[0], {"role": "assistant", "content": answer})
            )
            x = replace(
                first.experience,
                id=GroupId(1, 0, 0, 0).run(run, 0, number),
                messages=shown,
                info={"at": number},
            )
            rows.append(dataclasses.replace(first, experience=x))
    seen: list[tuple[list[str], list[int]]] = []

    def right(task: Task, transcript: Transcript) -> float:
        seen.append(
            (
                [t.completion.text for t in transcript.turns],
                [t.info["at"] for t in transcript.turns],
            )
        )
        assert all(len(t.completion.tokens) for t in transcript.turns)
        return float(transcript.answer == task.truth)

    found = await score(rows, FunctionReward(right))
    assert sorted(seen) == [(["3", "what?", "4"], [0, 1, 2]), (["5", "5", "5"], [0, 1, 2])]
    assert [(r.old, r.new) for r in found] == [
        (0.0, 1.0),
        (1.0, 1.0),
        (2.0, 1.0),
        (0.0, 0.0),
        (1.0, 0.0),
        (2.0, 0.0),
    ]
    assert [r.id for r in found] == [str(r.experience.id) for r in rows]
    assert [r.new for r in await score(rows, Rank())] == [0.0] * 3 + [1.0] * 3, (
        "a reward of a group sees two runs"
    )


def test_pairs_that_the_new_reward_turns_round() -> None:
    found = [
        Rescored(str(i), "toy", "g", "", old, new)
        for i, (old, new) in enumerate([(0, 1), (1, 0), (2, 3)])
    ]
    assert summary(found)["toy"]["order_kept"] == pytest.approx(2 / 3)
    assert set(summary([*found, Rescored("9", "other", "h", "", None, None)])) == {
        "toy",
        "other",
        "all",
    }


async def test_a_reward_reads_what_the_calls_have_told() -> None:
    def told(task: Task, transcript: Transcript) -> float:
        return float(any(t.info.get("found") for t in transcript.turns))

    rows = [stored(0, run, "4", 1.0) for run in (0, 1)]
    rows[0] = dataclasses.replace(
        rows[0], experience=replace(rows[0].experience, info={"found": True})
    )
    assert [r.new for r in await score(rows, FunctionReward(told))] == [1.0, 0.0]
