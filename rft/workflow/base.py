"""What a workflow is: a task and a context in, a transcript out.

A workflow is a class with one method, async or not; one object serves one run.  It knows neither
buffer nor trainer.

    @workflow("my_workflow")
    class MyWorkflow(Workflow):
        async def run(self, task, ctx):
            await ctx.chat(task.chat())
            return ctx.transcript()
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec
import numpy as np

from rft.plugins import Provider, kind
from rft.types.completion import Completion, Layout, Score, Transcript, Turn
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.readonly import read_only
from rft.types.task import Task, plain_text

workflow = kind("workflow")
NO_MODELS: Mapping[str, ChatModel] = {}


class Workflow(Provider):
    """Plays one run of a task.  `__init__` takes the checked `workflow_args` as keyword arguments.

    Override `run`, or `run_group` to play all runs of a task at once.  The attributes declare what
    a class is like: `isolated` (True or an `Isolation`) plays each run in a process of its own;
    `needs` maps libraries to the extra that installs them; `gives` names what algorithms find in
    the rows ("info.NAME" or a field), also as a static method of `workflow_args`; `scores_itself`
    says that every run brings its own score, so that a reward of the taskset would never be used;
    `usual_reward`, with `usual_reward_args`, scores runs where the taskset names none.
    """

    isolated: ClassVar[Any] = False
    needs: ClassVar[Mapping[str, str]] = {}
    scores_itself: ClassVar[bool] = False
    usual_reward: ClassVar[str | None] = None
    usual_reward_args: ClassVar[Mapping[str, Any]] = {}

    def run(self, task: Task, ctx: RunContext) -> Any:
        """The transcript of one run."""
        raise NotImplementedError(f"{type(self).__name__} needs a method run(self, task, ctx)")

    def run_group(self, task: Task, contexts: list[RunContext]) -> Any:
        """The transcripts of all runs of the task, in order."""
        raise NotImplementedError(f"{type(self).__name__} plays one run at a time")


class RunContext:
    """What one run may use: the policy's engine with the task's own rollout arguments, and the
    auxiliary models by name.

    It records every call of the policy; `transcript()` gives them back in order.  A call whose
    messages begin with those of an earlier call and its answer goes on from that call's tokens;
    nothing is tokenised twice.  `seed(turn)` gives each call's seed in a deterministic run; without
    it the engine draws freely.
    """

    def __init__(
        self,
        model: ChatModel,
        task: Task,
        *,
        run: int,
        request_id: str,
        seed: Callable[[int], int] | None = None,
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        self._model = model
        self._task = task
        self._turns: list[Turn] = []
        self._asked = 0
        self.run = run
        self.request_id = request_id
        self.seed = seed
        self.models = models

    @property
    def policy(self) -> ChatModel:
        """The policy's engine itself; its calls are not recorded (`chat` is)."""
        return self._model

    def model(self, name: str) -> ChatModel:
        """The auxiliary model `name`.  Raises KeyError that lists what there is."""
        if name not in self.models:
            raise KeyError(
                f"no auxiliary model {name!r}; explorer.auxiliary_models has "
                f"{', '.join(self.models) or 'none'}"
            )
        return self.models[name]

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        **overrides: Any,
    ) -> Completion:
        """One model call.  `overrides` replace fields of the task's sampling arguments, e.g.
        max_tokens=8.
        """
        if overrides.get("n", 1) != 1:
            raise ValueError(
                "ctx.chat gives one answer; ctx.sample(messages, n=4) gives a list of several"
            )
        (completion,) = await self.sample(messages, tools=tools, **overrides)
        return completion

    async def sample(
        self, messages: Sequence[dict[str, Any]] = (), **asked: Any
    ) -> list[Completion]:
        """`n` answers to the same messages, or to `prompt_tokens`; each is recorded as a call of
        its own.  Takes what `request` takes.
        """
        request = self.request(messages, **asked)
        completions = await self._model.generate(request)
        for completion in completions:
            self.record(Turn(messages=request.messages, tools=request.tools, completion=completion))
        return completions

    def request(
        self,
        messages: Sequence[dict[str, Any]] = (),
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        prompt_tokens: Sequence[int] = (),
        chat_template: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        strict_template_args: Sequence[str] = (),
        **overrides: Any,
    ) -> GenerateRequest:
        """What `sample` asks the policy's engine.  Every call of a run has a number of its own,
        also of those at the same time.
        """
        sampling = self._task.sampling
        if "max_tokens" in overrides:  # of a run that may only write so much more
            overrides["min_tokens"] = min(
                overrides.get("min_tokens", sampling.min_tokens), overrides["max_tokens"]
            )
        sampling = msgspec.structs.replace(sampling, **overrides) if overrides else sampling
        number = self._asked
        self._asked = self._asked + 1
        if self.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self.seed(number))
        # a caller may go on with its own
        conversation: tuple[dict[str, Any], ...] = read_only(tuple(map(_plain, messages)))
        told: tuple[dict[str, Any], ...] = read_only(
            tuple(tools if tools is not None else self._task.tools)
        )
        before = (
            None if chat_template is not None else self._before(conversation, prompt_tokens, told)
        )
        return GenerateRequest(
            messages=conversation,
            tools=told,
            prompt_tokens=tuple(prompt_tokens),
            prefix_tokens=None if before is None else _tokens(before.completion),
            prefix_messages=0 if before is None or not conversation else len(before.messages) + 1,
            chat_template=chat_template if chat_template is not None else self._task.chat_template,
            chat_template_args={**self._task.chat_template_args, **(chat_template_args or {})},
            strict_template_args=tuple(strict_template_args),
            prompt_truncation=self._task.prompt_truncation if not self._turns else "error",
            sampling=sampling,
            n=n,
            request_id=f"{self.request_id}-{number}",
        )

    def record(self, turn: Turn) -> None:
        """Adds a call that something else has made with the policy's engine."""
        self._turns.append(turn)

    def _before(
        self,
        messages: Sequence[dict[str, Any]],
        prompt_tokens: Sequence[int],
        tools: tuple[Any, ...],
    ) -> Turn | None:
        """The latest call that is gone on from: by its messages and its answer, or by its tokens;
        one that was told of these tools.
        """
        prompt = np.asarray(prompt_tokens)
        told = (t for t in reversed(self._turns) if not tools or t.tools == tools)
        return next((t for t in told if _goes_on(t, messages, prompt)), None)

    def score_step(
        self, value: float | None, *, parts: dict[str, float] | None = None, **info: Any
    ) -> None:
        """A reward for the last call alone, and what its experience's `info` is to hold (a state's
        hash, for example).
        """
        if not self._turns:
            raise ValueError("score_step: there is no model call to score yet")
        score = None if value is None else Score(value=float(value), parts=parts or {})
        last = self._turns[-1]
        self._turns[-1] = msgspec.structs.replace(last, score=score, info={**last.info, **info})

    async def teach(self, name: str) -> None:
        """Asks auxiliary model `name`, which must have the policy's tokenizer, for its log-probs of
        every token written so far, at the temperature of the call that wrote it.
        """
        teacher = self.model(name)
        for i, turn in enumerate(self._turns):
            if turn.teacher_logprobs is None:
                c = turn.completion  # greedily chosen ones as they are
                scale = turn.completion.sampling.temperature or 1.0
                row = ScoreRow(
                    tokens=_tokens(c), prompt_length=len(c.prompt_tokens), temperature=scale
                )
                self._turns[i] = msgspec.structs.replace(
                    turn, teacher_logprobs=await teacher.logprobs(row)
                )

    @property
    def completions(self) -> list[Completion]:
        return [t.completion for t in self._turns]

    def transcript(
        self,
        *,
        score: Score | None = None,
        metrics: dict[str, float] | None = None,
        info: dict[str, Any] | None = None,
        layout: Layout = "joined",
        limited: bool = False,
    ) -> Transcript:
        """The calls so far.  Give `score` if the workflow scores itself; otherwise the taskset's
        reward is called.
        """
        turns = tuple(self._turns)
        return Transcript(
            turns=turns,
            score=score,
            metrics=metrics or {},
            info=info or {},
            layout=layout,
            limited=limited,
        )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its parts of text joined.  Raises ValueError for images and sound, which
    templates leave out or write as code.
    """
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message must be a dict with role and content, not {type(message).__name__}; of an "
            f"answer: answer.message"
        )
    content = message.get("content")
    if (text := plain_text(content)) is None:
        raise ValueError(
            "content of a message must be a text or a list of text parts; images and sound are not "
            "offered"
        )
    return {**message, "content": text} if isinstance(content, list) else dict(message)


def _tokens(c: Completion) -> np.ndarray:
    joined: np.ndarray = np.concatenate([c.prompt_tokens, c.tokens])
    return joined.astype(np.int32, copy=False)


def _goes_on(turn: Turn, messages: Sequence[dict[str, Any]], prompt: np.ndarray) -> bool:
    if not messages:
        told = _tokens(turn.completion)
        return len(told) > 0 and np.array_equal(prompt[: len(told)], told)
    n = len(turn.messages)
    return (
        len(messages) > n
        and _answers(messages[n], turn.completion)
        and tuple(messages[:n]) == turn.messages
    )


def _answers(message: Mapping[str, Any], c: Completion) -> bool:
    """Whether `message` is this answer: the same text, and the same tool calls where it has any."""
    if message.get("role") != "assistant" or (message.get("content") or "") != c.text:
        return False
    calls = message.get("tool_calls")
    return not calls or [*map(_called, calls)] == [*map(_called, c.tool_calls)]


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments, which clients that have read them write anew."""
    function = dict(call.get("function") or {})
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        # a NaN is not equal to itself
        function["arguments"] = json.loads(function.get("arguments", ""), parse_constant=str)
    return function


def seed_for(seed: int, *place: int | str) -> Callable[[int], int]:
    """Gives, for turn 0, 1, ... of the run at `place` (batch, task, run), the seed in [0, 2**31):
    blake2b over everything.

    The attempt is left out on purpose: a run that is played again draws the same tokens.
    """

    def turn_seed(turn: int) -> int:
        digest = blake2b(repr((seed, *place, turn)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 2**31

    return turn_seed
