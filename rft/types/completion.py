"""What an engine gives back for one prompt, and the transcript a run makes of it.

Invariant: these records are read-only however deep, as workflows, rewards and judges get the very
ones that are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct, field

from rft.types.ids import Version
from rft.types.readonly import freeze
from rft.types.task import SamplingArgs
from rft.types.thoughts import THINK, THINK_END, closes, split_thought

FinishReason = Literal["stop", "length", "abort"]


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) were written by `version`.  Indexes count the tokens of the record that
    holds the span.
    """

    version: Version
    start: int
    end: int


class Completion(Struct, frozen=True, kw_only=True):
    """One answer of an engine.  R = number of generated tokens.

    `version_spans` index the R generated tokens.  `logprobs` are of the processed distribution
    (after temperature), natural log.
    """

    prompt_tokens: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]
    text: str
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    sampling: SamplingArgs
    engine: str = ""  # which engine, e.g. "vllm-0"
    in_thought: bool = False  # the prompt ended inside a thought, with which `text` goes on
    stop_text: str = ""  # the one of `sampling.stop` that ended the answer; `text` is without it
    reasoning: str = ""  # what a reasoning parser cut out of `text`
    tool_calls: tuple[dict[str, Any], ...] = ()  # what a tool-call parser found, in OpenAI's form
    # [P + R - 1, layers, experts], see rft.types.experts; None: it does not tell
    routed_experts: np.ndarray | None = None
    # tokens of prompt and answer as a server counted them, where the tokens are not known
    usage: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        freeze(self, "prompt_tokens", "tokens", "logprobs", "tool_calls", "routed_experts")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of your own, to continue the chat with:
        `messages.append(completion.message)`.
        """
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        made |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return made | ({"tool_calls": copy.deepcopy([*self.tool_calls])} if self.tool_calls else {})

    @property
    def around_text(self) -> dict[str, Any]:
        """What `text` does not say of an answer, kept in an experience's info: it is scored again
        with them.
        """
        return {
            name: value
            for name, value in (("in_thought", self.in_thought), ("stop_text", self.stop_text))
            if value
        }

    @property
    def written(self) -> str:
        """`text`, and the stop text behind it where that closes a tag or a brace: a reward that
        reads <answer>7</answer> looks for it.
        """
        return self.text + (
            self.stop_text if closes(self.text, self.stop_text, opened=self.in_thought) else ""
        )

    @property
    def with_thought(self) -> str:
        """`written` with the thought that a parser took out of it, or the tag that the prompt
        opened: for rewards of a format.
        """
        if self.reasoning:
            return f"{THINK}{self.reasoning}{THINK_END}{self.written}"
        return THINK + self.written if self.in_thought else self.written

    @property
    def answer(self) -> str:
        """The part of `written` behind the last thought (`split_thought`)."""
        thought, answer = split_thought(self.written, opened=self.in_thought)
        return answer.lstrip("\n") if thought else answer

    @property
    def version(self) -> Version:
        """The oldest version that wrote a token of this completion."""
        return min(s.version for s in self.version_spans)


def without_reasoning(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a model that is to read, or takes, no reasoning of the answers among them."""
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


class Score(Struct, frozen=True, kw_only=True):
    """Result of a reward: `value` is what is trained on, `parts` are logged by name.  None =
    unscored, never trained.

    `reason`: why it is so, in words for people; kept as the experience's info `reward_reason`.
    """

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        freeze(self, "parts")


class Turn(Struct, frozen=True, kw_only=True):
    """One model call: the messages given and what came back."""

    messages: tuple[dict[str, Any], ...]
    completion: Completion
    # of this call alone, where the workflow gives one (`ctx.score_step`)
    score: Score | None = None
    info: dict[str, Any] = field(default_factory=dict)
    teacher_logprobs: np.ndarray | None = None  # float32 [R] of another model for the same tokens
    mask: np.ndarray | None = None  # bool [R]: which of its tokens are trained; None = all
    tools: tuple[dict[str, Any], ...] = ()  # that the model was told of

    def __post_init__(self) -> None:
        freeze(self, "messages", "info", "teacher_logprobs", "mask", "tools")


Layout = Literal["joined", "steps", "chains"]
"""How the calls of a run become experiences: one sequence of all; one for each call; one for each
chain of calls in which every prompt begins with the tokens of the call before.
"""


Credit = Literal["run", "step"]
"""Whose reward a row has: that of its whole run, which all rows of the run share, or that of its
own calls; see `rft.types.credit`.
"""


class Transcript(Struct, frozen=True, kw_only=True):
    """Everything one run said and heard, in order; single-turn runs have one turn."""

    turns: tuple[Turn, ...]
    layout: Layout = "joined"
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    # set by workflows that score themselves; else the task's reward is called
    score: Score | None = None
    # a limit of the whole run ended it: its last experience counts as truncated
    limited: bool = False

    def __post_init__(self) -> None:
        freeze(self, "metrics", "info")

    @property
    def answer(self) -> str:
        """Text of the last model call, behind its thought."""
        return self.turns[-1].completion.answer

    @property
    def with_thought(self) -> str:
        """Text of the last model call and the thought before it."""
        return self.turns[-1].completion.with_thought

    @property
    def truncated(self) -> bool:
        return self.limited or any(t.completion.finish_reason == "length" for t in self.turns)
