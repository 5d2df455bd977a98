"""What an engine gives back for one prompt, and the transcript a run makes of it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct, field

from rft.types.ids import Version
from rft.types.task import SamplingArgs

FinishReason = Literal["stop", "length", "abort"]


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) were written by `version`.  Indexes count the tokens of the record that holds the span."""

    version: Version
    start: int
    end: int


class Completion(Struct, frozen=True, kw_only=True):
    """One answer of an engine.  R = number of generated tokens.

    `version_spans` index the R generated tokens.  `logprobs` are of the processed distribution (after temperature), natural log.
    """

    prompt_tokens: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]
    text: str
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    sampling: SamplingArgs
    engine: str = ""  # which engine, e.g. "vllm-0"

    @property
    def version(self) -> Version:
        """The oldest version that wrote a token of this completion."""
        return min(s.version for s in self.version_spans)


class Turn(Struct, frozen=True, kw_only=True):
    """One model call: the messages given and what came back."""

    messages: tuple[dict[str, Any], ...]
    completion: Completion


class Score(Struct, frozen=True, kw_only=True):
    """Result of a reward: `value` is what is trained on, `parts` are logged by name.  None = unscored, never trained."""

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)


class Transcript(Struct, frozen=True, kw_only=True):
    """Everything one run said and heard, in order; single-turn runs have one turn."""

    turns: tuple[Turn, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    score: Score | None = None  # set by workflows that score themselves; else the task's reward is called

    @property
    def answer(self) -> str:
        """Text of the last model call."""
        return self.turns[-1].completion.text

    @property
    def truncated(self) -> bool:
        return any(t.completion.finish_reason == "length" for t in self.turns)
