"""Trinity-RFT's reward functions: f(response=..., truth=..., ...) -> {part: number}.  Both ways:
theirs as ours, ours as theirs.

Invariant: the reward of a run is the sum of the parts, which are all kept.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np

from rft.extras.migrate.compat import trinity_home as home
from rft.extras.migrate.compat.trinity_grading import validate_think_pattern
from rft.extras.migrate.compat.trinity_registry import original, stands_for
from rft.plugins import REGISTRY
from rft.reward.base import Reward, score
from rft.reward.build_reward import build
from rft.types import task as ours
from rft.types.completion import Completion, Score, Transcript, Turn
from rft.worker.threads import in_thread


class RewardFn(ABC):
    """Subclass it: `__init__(**reward_fn_args)`, `__call__(response=, truth=, prompt=, ...)` gives
    parts by name.
    """

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]: ...

    @classmethod
    def __rft_adapt__(cls) -> type:
        return _as_ours(cls)


@cache
def _as_ours(cls: type[RewardFn]) -> type:
    """A reward of ours that calls one of theirs, in a thread."""

    class AdaptedReward(Reward):
        __signature__ = inspect.signature(cls)  # arguments are checked against it

        def __init__(self, **args: Any) -> None:
            self._fn = cls(**args)
            parameters = inspect.signature(self._fn.__call__).parameters.values()  # type: ignore[operator]
            self._takes = {p.name for p in parameters}
            self._any = any(p.kind is p.VAR_KEYWORD for p in parameters)

        async def __call__(self, task: ours.Task, transcript: Transcript) -> dict[str, float]:
            last = transcript.turns[-1].completion
            values = {
                "response": last.written,
                "truth": task.truth,
                "prompt": task.prompt,
                "response_token": last.tokens,
            }
            arguments = {k: v for k, v in values.items() if self._any or k in self._takes}
            return parts(
                await in_thread(lambda: self._fn(**arguments), f"reward {cls.__name__}"),
                cls.__name__,
            )

    AdaptedReward.__name__ = AdaptedReward.__qualname__ = cls.__name__
    return stands_for(AdaptedReward, cls)


def parts(result: Any, name: str) -> dict[str, float]:
    """Their result, checked: a dict of numbers."""
    if not isinstance(result, Mapping):
        raise ValueError(
            f"reward {name} returned {type(result).__name__}; it must return a dict of parts and "
            f"numbers"
        )
    return {str(k): float(v) for k, v in result.items()}


@cache
def as_theirs(name: str) -> type[RewardFn]:
    """A RewardFn class that asks our reward `name`.  Theirs are given back as they are."""
    if ":" in name or name in REGISTRY.names("reward"):
        theirs = original(REGISTRY.get("reward", name).obj)
        if isinstance(theirs, type) and issubclass(theirs, RewardFn):
            return theirs
    return type(name, (_Ours,), {"name": name})


class _Ours(RewardFn):
    name: ClassVar[str]

    def __init__(self, **args: Any) -> None:
        self._reward = build(self.name, args, key="reward_fn_args")

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        response = kwargs.get("response", args[0] if args else "")
        truth = kwargs.get("truth", kwargs.get("ground_truth", args[2] if len(args) > 2 else None))
        return home.run(
            self._ask(
                response if isinstance(response, str) else response.response_text,
                truth,
                kwargs.get("response_token"),
            )
        )

    async def _ask(self, response: str, truth: Any, tokens: Any) -> dict[str, float]:
        running = home.HOME.get()
        given = running.task if running is not None else None
        task = ours.Task(
            taskset=given.taskset if given else "",
            index=given.index if given else 0,
            row=given.row if given else {},
            prompt=(given.prompt if given else None) or "",
            truth=truth,
            workflow="",
        )
        await self._reward.prepare(running.contexts[0].models if running is not None else {})
        score_: Score = await score(self._reward, task, make_transcript(response, tokens))
        if score_.value is None:
            raise ValueError(
                f"reward {self.name}: not scored: {score_.reason or 'no reason given'}"
            )
        return dict(score_.parts) or {"score": score_.value}


def make_transcript(text: str, tokens: Any = None) -> Transcript:
    """A run that consists of one answer, of which only the text (and perhaps the tokens) is known."""
    written = np.asarray(tokens if tokens is not None else [], np.int32)
    answer = Completion(
        prompt_tokens=np.zeros(0, np.int32),
        tokens=written,
        logprobs=np.zeros(len(written), np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(),
        sampling=ours.SamplingArgs(),
    )
    return Transcript(turns=(Turn(messages=(), completion=answer),))


class MathBoxedRewardFn(_Ours):
    """Accuracy of the last box; `with_think` takes `format_score_coef` from answers without exactly
    one <think> block.
    """

    name = "math_boxed_reward"

    def __call__(
        self,
        *args: Any,
        with_think: bool = False,
        format_score_coef: float | None = 0.1,
        **kwargs: Any,
    ) -> dict[str, float]:
        named = dict(zip(("response", "truth"), args, strict=False)) | kwargs
        thought = not with_think or validate_think_pattern(str(named.get("response", "")))
        format_score = 0.0 if thought else -(format_score_coef or 0.1)
        return {**super().__call__(**named), "format_score": format_score}


class AccuracyReward(_Ours):
    """Whether math-verify finds the truth in the answer; it reads both itself, so `answer_parser`
    has no effect.
    """

    name = "accuracy_reward"

    def __init__(self, answer_parser: Any = None, **args: Any) -> None:
        super().__init__(**args)


class FormatReward(_Ours):
    """0.1 for an answer of the right shape, else -0.1; `pattern` is another shape."""

    name = "format_reward"

    def __init__(self, pattern: str | None = None, **args: Any) -> None:
        super().__init__(**args)
        self._pattern = pattern and re.compile(pattern, re.DOTALL | re.MULTILINE)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self._pattern:
            return super().__call__(*args, **kwargs)
        return {
            "format_score": 0.1
            if self._pattern.match(kwargs.get("response", args[0] if args else ""))
            else -0.1
        }


MathRewardFn = as_theirs("math_reward")
MathDAPORewardFn = as_theirs("math_dapo_reward")
CountDownRewardFn = as_theirs("countdown_reward")
