"""Entropy, copies and the price of length in one batch; near-duplicates against exact counting."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from rft.explorer.collapse_metrics import collapse_metrics
from rft.taskset.near_duplicates import earlier, signatures, words
from rft.testing.storage_contract import row
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun


def played(task: int, rows: list[Experience]) -> PlayedGroup:
    what = Task(taskset="toy", index=task, prompt="?", workflow="toy")
    return PlayedGroup(
        GroupId(1, 0, 0, task),
        what,
        tuple(PlayedRun((x,), x.reward, 0.1, 0.0, 1) for x in rows),
        True,
        "",
    )


def sized(
    task: int, run: int, size: int, reward: float, tokens: np.ndarray | None = None
) -> Experience:
    x = row(GroupId(1, 0, 0, task).run(run), reward=reward, tokens=2 * size)
    return (
        x
        if tokens is None
        else replace(x, tokens=np.concatenate([x.tokens[:size], tokens]).astype(np.int32))
    )


def test_by_hand() -> None:
    groups = [played(t, [sized(t, r, 10 * (r + 1), float(r)) for r in range(3)]) for t in range(2)]
    found = collapse_metrics(groups)
    assert found["rollout/entropy"] == pytest.approx(0.5), "every log-prob of these rows is -0.5"
    assert found["rollout/reward_length_corr"] == pytest.approx(1.0)
    assert found["rollout/copied_answers"] == 0.0
    assert "rollout/reward_length_corr" not in collapse_metrics(
        [played(0, [sized(0, r, 4, 1.0) for r in range(3)])]
    )
    assert collapse_metrics([]) == {}


def test_copies_of_other_tasks_count_and_those_of_the_same_do_not() -> None:
    draw = np.random.default_rng(0)
    text = draw.integers(0, 999, 60)
    own = [draw.integers(0, 999, 60) for _ in range(4)]
    alike = [played(t, [sized(t, r, 60, 1.0, own[t]) for r in range(4)]) for t in range(4)]
    assert collapse_metrics(alike)["rollout/copied_answers"] == 0.0
    one_word = text.copy()
    one_word[30] = 5
    some = [
        played(
            t,
            [
                sized(t, r, 60, 1.0, text if t == 0 else one_word if t == 1 else own[t])
                for r in range(4)
            ],
        )
        for t in range(4)
    ]
    assert collapse_metrics(some)["rollout/copied_answers"] in (0.0, 0.5), (
        "55 of 61 shingles are in both, at the threshold"
    )
    every = [played(t, [sized(t, r, 60, 1.0, text) for r in range(8)]) for t in range(100)]
    assert collapse_metrics(every)["rollout/copied_answers"] == 1.0
    short = [played(t, [sized(t, r, 15, 1.0, text[:15]) for r in range(4)]) for t in range(4)]
    assert "rollout/copied_answers" not in collapse_metrics(short), (
        "short answers may be equal by chance"
    )


def test_signatures_estimate_jaccards_measure() -> None:
    draw = np.random.default_rng(1)
    errors = []
    for _ in range(40):
        a = draw.integers(0, 1000, 200)
        b = a.copy()
        changed = int(draw.integers(0, 25))
        b[draw.integers(0, 200, changed)] = draw.integers(0, 1000, changed)
        mine, theirs = ({tuple(x[i : i + 5]) for i in range(196)} for x in (a, b))
        found = signatures([a, b], size=256)
        errors.append(
            float((found[0] == found[1]).mean()) - len(mine & theirs) / len(mine | theirs)
        )
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.05, (
        "the standard deviation of an estimate from 256 is at most 0.031"
    )


def test_near_duplicates_of_texts() -> None:
    base = (
        "a train leaves the station at noon and travels for three hours through the hills until "
        "it comes to a small town by the sea"
    )
    texts = [
        base,
        base.upper() + "  ",
        base.replace("noon", "night"),
        "what is the capital of the country that lies south of the sea",
        "",
    ]
    found = dict(earlier(signatures([words(t) for t in texts], size=128), threshold=0.6))
    assert found == {1: 0, 2: 0}
    assert dict(
        earlier(
            signatures([words(t) for t in texts], size=128), threshold=0.6, labels=[0, 0, 1, 1, 1]
        )
    ) == {2: 0}
    assert (signatures([words(base)]) == signatures([words(base)])).all()
