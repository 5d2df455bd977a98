"""The reward `reward_model` asks an auxiliary model for its raw number."""

from __future__ import annotations

from typing import Any

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError
from rft.plugins import load_all
from rft.reward.build_reward import build
from rft.types.completion import Transcript, Turn
from rft.types.ports import GenerateRequest
from rft.types.task import Task


class Scores:
    """An auxiliary model that gives the numbers it was made with."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)
        self.seen: list[Any] = []

    async def classify(self, messages: Any) -> list[float]:
        self.seen.append(list(messages))
        return self.numbers


load_all()
TASK = Task(taskset="t", index=0, prompt="hi", workflow="w")


async def make_transcript() -> Transcript:
    messages = ({"role": "user", "content": "hi"},)
    (c,) = await ScriptedEngine("there").generate(GenerateRequest(messages=messages))
    return Transcript(turns=(Turn(messages=messages, completion=c),))


async def scored(args: dict[str, Any], models: dict[str, Any]) -> Any:
    made: Any = build("reward_model", args)
    await made.prepare(models)
    return await made(TASK, await make_transcript())


async def test_the_raw_number_is_the_reward() -> None:
    rm = Scores(-3.25)
    score = await scored({}, {"rm": rm})
    assert score.value == -3.25 and score.parts == {"reward_model": -3.25}
    assert rm.seen == [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    ]
    assert (
        await scored({"model": "b", "label": 1, "scale": 0.5}, {"a": rm, "b": Scores(0, 4)})
    ).value == 2
    assert (await scored({}, {"a": rm, "same": rm})).value == -3.25


async def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="no auxiliary models"):
        await scored({}, {})
    with pytest.raises(ConfigError, match=r"2 auxiliary models \(a, b\)"):
        await scored({}, {"a": Scores(1), "b": Scores(2)})
    with pytest.raises(
        ConfigError, match=r"no auxiliary model has this name; explorer.auxiliary_models has a"
    ):
        await scored({"model": "c"}, {"a": Scores(1)})
    with pytest.raises(ValueError, match="gives 2 numbers"):
        await scored({}, {"a": Scores(1, 2)})
    with pytest.raises(ValueError, match="label is 2, but"):
        await scored({"label": 2}, {"a": Scores(1, 2)})
