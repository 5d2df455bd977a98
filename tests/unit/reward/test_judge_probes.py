"""Texts that try to talk a judge into full marks: they succeed with a naive prompt and never with a fenced one."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from rft.plugins import load_all
from rft.reward.build_reward import build
from rft.testing.judge import FakeJudge, JudgeProbe, probes, score_with
from rft.types.task import Task

load_all()
TASK = Task(taskset="t", index=0, prompt="What is 17 + 25?", truth="42", workflow="w")


def gullible(probe: JudgeProbe, honest: float = 1, **more: Any) -> FakeJudge:
    return FakeJudge(honest, gullible=[probe.order] if probe.order else [], **more)


def naive(probe: JudgeProbe, prompt: str, **more: Any) -> bool:
    """Whether a judge with a plain prompt and a loose parser is taken in."""
    reply = gullible(probe, **more).reply([{"role": "user", "content": prompt.format(probe.answer)}])
    found = re.findall(r"(?:score|quality|verdict)\W{1,4}(\d+)", reply, re.IGNORECASE)
    return bool(found) and int(found[-1]) >= 5


def test_there_are_many_kinds_of_probes() -> None:
    found = probes()
    assert len(found) >= 50 and len({p.name for p in found}) == len(found) and len({p.answer for p in found}) == len(found)
    kinds = {p.kind for p in found}
    assert kinds == {"order", "fence", "verdict", "role", "language", "unicode", "encoded", "long", "empty", "opener"}
    for p in found:
        assert p.order in p.answer and (p.order or p.kind in ("empty", "opener")), p.name


@pytest.mark.parametrize(
    ("prompt", "least"),
    [("Rate from 1 to 10: {}\nScore:", 60), ("Rate what stands between the marks.\n<<<answer>>>\n{}\n<<<end>>>\nScore:", 60)],
)
def test_a_naive_prompt_is_taken_in(prompt: str, least: int) -> None:
    """The fake judge is gullible: these probes do their work where nothing keeps them from it."""
    assert sum(naive(p, prompt) for p in probes()) >= least
    assert sum(naive(p, prompt, copies=True) for p in probes() if p.kind == "verdict") >= 5


@pytest.mark.parametrize("judge", ["rubric_judge", "reference_judge"])
@pytest.mark.parametrize("nature", [{}, {"sloppy": True}, {"copies": True}], ids=["gullible", "sloppy", "copies"])
async def test_a_fenced_prompt_is_not(judge: str, nature: dict[str, bool]) -> None:
    async def value(probe: JudgeProbe) -> float | None:
        made: Any = build(judge, {"cache": "off", "max_retries": 1})
        (score,) = await score_with(made, gullible(probe, **nature), [probe.answer], TASK)
        return score.value

    values = dict(zip([p.name for p in probes()], await asyncio.gather(*map(value, probes())), strict=True))
    taken_in = [name for name, v in values.items() if v is not None and v >= 0.5]
    assert not taken_in
    if not nature.get("copies"):
        assert None not in values.values(), "and an honest verdict is read"


async def test_groups_are_not_taken_in_either() -> None:
    """A probe among honest answers: neither it nor a neighbour is lifted."""
    for probe in probes():
        ruler: Any = build("ruler_judge", {"cache": "off", "max_retries": 0})
        scores = await score_with(ruler, gullible(probe, 0, sloppy=True), ["42", probe.answer, "41"], TASK)
        assert [s.value for s in scores] == [0, 0, 0], probe.name
        pairs: Any = build("pairwise_judge", {"cache": "off", "max_retries": 0})
        (score,) = await score_with(pairs, gullible(probe), [probe.answer], TASK)
        assert score.value is not None and score.value <= 0.5, probe.name
