"""A task and an answer to it, for tests of rewards that read no more of a run than its text and its
length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rft.types.completion import Completion, Transcript, Turn, VersionSpan
from rft.types.ids import Version
from rft.types.task import SamplingArgs, Task


def make_transcript(text: str, tokens: int = 1) -> Transcript:
    """A run of one call that was answered with `text`, of so many tokens."""
    completion = Completion(
        prompt_tokens=np.arange(3, dtype=np.int32),
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(VersionSpan(Version(1, 0), 0, tokens),),
        sampling=SamplingArgs(),
    )
    return Transcript(turns=(Turn(messages=(), completion=completion),))


def task(truth: Any = None, messages: tuple[dict[str, Any], ...] = (), **row: Any) -> Task:
    """One of at most 100 tokens."""
    sampling = SamplingArgs(max_tokens=100)
    return Task(
        taskset="t",
        index=0,
        prompt="?",
        messages=messages,
        truth=truth,
        workflow="w",
        row=row,
        sampling=sampling,
    )
