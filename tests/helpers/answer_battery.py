"""The battery of answers in tests/data/answers.jsonl, and what a shipped reward gives for one of
its lines.

A line has `reward`, `args`, `truth`, `answer`, `value` (the right one; "refused" where the truth
cannot be read) and `source`: where the notation comes from.  `row`: further columns; `stop`: the
stop text that ended the answer; `opened`: the prompt had opened a thought. Judges are asked of a
model that gives full marks where what it is shown has the truth.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.plugins import REGISTRY, load_all
from rft.reward.base import score, score_group
from rft.reward.build_reward import build
from rft.reward.judge_base import Judge
from rft.reward.readings import UnreadableTruth
from rft.testing.fakes import ScriptedModel
from rft.testing.judge import FakeJudge
from rft.types.completion import Completion, Transcript, Turn
from rft.types.task import SamplingArgs, Task

FILE = Path(__file__).parents[1] / "data" / "answers.jsonl"
REFUSED = "refused"
_BLOCK = re.compile(r"^<<<([\w ]+) \w+>>>\n(.*?)\n<<<end \w+>>>$", re.MULTILINE | re.DOTALL)


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    reward: str
    truth: Any
    answer: str
    value: float | str
    source: str
    args: dict[str, Any] = {}
    row: dict[str, Any] = {}
    stop: str = ""
    opened: bool = False

    @property
    def task(self) -> Task:
        sampling = SamplingArgs(stop=(self.stop,) if self.stop else ())
        return Task(
            taskset="battery",
            index=0,
            prompt="?",
            truth=self.truth,
            row=self.row,
            workflow="w",
            sampling=sampling,
        )

    @property
    def transcript(self) -> Transcript:
        none = np.zeros(0, np.int32)
        completion = Completion(
            prompt_tokens=none,
            tokens=none,
            logprobs=none.astype(np.float32),
            text=self.answer,
            finish_reason="stop",
            version_spans=(),
            sampling=self.task.sampling,
            in_thought=self.opened,
            stop_text=self.stop,
        )
        info = {"email": {"answer": self.answer}} if self.reward == "email_search_reward" else {}
        return Transcript(
            turns=(
                Turn(
                    messages=({"role": "user", "content": "?"},), completion=completion, info=info
                ),
            )
        )

    @property
    def model(self) -> Any:
        """The auxiliary model: it looks for the truth in what it is shown."""
        if self.reward == "reward_model":
            return ScriptedModel(
                scores=lambda messages: [float(self.truth in str(messages[-1]["content"]))]
            )
        return FakeJudge(self._says)

    def _says(self, prompt: str) -> Any:
        blocks = dict(_BLOCK.findall(prompt))
        if self.reward == "pairwise_judge":
            return next(
                (place for place in ("first", "second") if self.truth in blocks[place]), "tie"
            )
        shown = [text for name, text in blocks.items() if name.startswith("answer")]
        right = any(self.truth in text for text in shown)
        return {
            "either_or_judge": float(right),
            "reference_judge": "yes" if right else "no",
            "ruler_judge": float(right),
            "rubric_judge": 10 if right else 1,
        }[self.reward]


@cache
def lines() -> list[Line]:
    return [
        msgspec.json.decode(line, type=Line)
        for line in FILE.read_text(encoding="utf-8").splitlines()
    ]


@cache
def shipped() -> list[str]:
    """Names of the shipped rewards that read an answer."""
    load_all()
    home = Path(__file__).parents[2]
    names = (
        name
        for name in REGISTRY.names("reward")
        if _within(REGISTRY.get("reward", name).source, home)
    )
    return [name for name in names if name != "length_reward"]


def _within(source: str, home: Path) -> bool:
    return source.startswith("rft.") or any(
        Path(source).is_relative_to(home / folder) for folder in ("rft", "workflows")
    )


async def value_of(line: Line) -> float | str | None:
    """The value of a line's answer with its reward; "refused" for a truth that cannot be read."""
    judged = {"cache": "off"} if line.reward.endswith("_judge") else {}
    reward = build(line.reward, {**judged, **line.args})
    await reward.prepare({"model": line.model})
    try:
        if reward.whole_group:
            return (await score_group(reward, line.task, [line.transcript]))[0].value
        return (await score(reward, line.task, line.transcript)).value
    except UnreadableTruth:
        return REFUSED
    finally:
        if isinstance(reward, Judge):  # of programs all rewards share one sandbox
            await reward.close()
