"""Plays one task with a workflow, as the explorer does, and keeps everything that happened: for tests and for `rft debug`.

It uses the rooms' own code (`rft.workflow.group`, rewards, records) and adds nothing to it but eyes.  No torch, no Ray, no buffer.
Every result is checked against `rft.testing.invariants`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from rft import plugins
from rft.errors import RftError
from rft.plugins import REGISTRY, Plugin
from rft.reward import build as rewards
from rft.reward.base import Reward
from rft.testing.invariants import check
from rft.types.completion import Completion, Score, Transcript
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, Workflow
from rft.workflow.build import Recipe, recipe
from rft.workflow.group import Group, run_group
from rft.workflow.run import Limits, Played, RunError

POLICY = "policy"
_RUN: ContextVar[int | None] = ContextVar("rft_testing_run", default=None)


@dataclass(frozen=True)
class Call:
    """One call of a model: whose it was, what it gave or raised, and how long it took.  `run` is None where it belongs to no run."""

    model: str
    run: int | None
    asked: GenerateRequest | ScoreRow | list[dict[str, Any]]
    answers: tuple[Completion, ...] = ()
    values: tuple[float, ...] = ()  # log-probs or scores
    error: BaseException | None = None
    took_s: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """One run.  `transcript` holds what was said, also of a run that failed (None if nothing was)."""

    number: int
    played: Played
    transcript: Transcript | None
    calls: tuple[Call, ...]  # of every model, in the order in which they ended
    error: BaseException | None  # what the workflow or the reward raised

    @property
    def experiences(self) -> tuple[Experience, ...]:
        return self.played.experiences

    @property
    def failed(self) -> bool:
        return self.played.failed

    @property
    def reason(self) -> str:
        """Why it failed, in one line; empty for a run that did not."""
        return self.experiences[0].reason

    @property
    def traceback(self) -> str:
        return str(self.experiences[0].info.get("traceback", ""))

    @property
    def reward(self) -> float | None:
        return self.played.value

    @property
    def score(self) -> Score:
        """Reward, its parts and its reason."""
        first = self.experiences[0]
        return Score(value=self.reward, parts=first.reward_parts, reason=str(first.info.get("reward_reason", "")))

    @property
    def answers(self) -> list[str]:
        """What the policy said, call by call."""
        return [] if self.transcript is None else [t.completion.text for t in self.transcript.turns]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: what the last call was asked, and its answer."""
        if self.transcript is None or not self.transcript.turns:
            return []
        last = self.transcript.turns[-1]
        return [*last.messages, last.completion.message]


@dataclass(frozen=True)
class WorkflowResult:
    """All runs of one task.  What is named in the singular is the first run's."""

    group: Group
    runs: tuple[RunResult, ...]
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def task(self) -> Task:
        return self.group.task

    @property
    def experiences(self) -> list[Experience]:
        return self.group.rows

    @property
    def rewards(self) -> list[float | None]:
        return [r.reward for r in self.runs]

    @property
    def failed(self) -> bool:
        return any(r.failed for r in self.runs)

    @property
    def reason(self) -> str:
        return next((r.reason for r in self.runs if r.failed), "")

    @property
    def transcript(self) -> Transcript:
        if (found := self.runs[0].transcript) is None:
            raise ValueError(f"the run has no transcript: {self.runs[0].reason}")
        return found

    @property
    def experience(self) -> Experience:
        return self.runs[0].experiences[0]

    @property
    def reward(self) -> float | None:
        return self.runs[0].reward

    @property
    def score(self) -> Score:
        return self.runs[0].score

    @property
    def answers(self) -> list[str]:
        return self.runs[0].answers

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.runs[0].messages

    @property
    def metrics(self) -> dict[str, float]:
        return self.experience.metrics

    @property
    def info(self) -> dict[str, Any]:
        return self.experience.info

    def trace(self, *, tokens: bool = False) -> str:
        """Everything that happened, for people; with `tokens` also which tokens are trained and how likely each was."""
        from rft.testing.trace import trace

        return trace(self, tokens=tokens)

    def __str__(self) -> str:
        return self.trace()


class OneAnswer(Workflow):
    """Asks once, with the task's prompt or, where it has none, its row: for looking at rewards."""

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        opening = bool(task.messages or task.prompt is not None)
        await ctx.chat(task.chat() if opening else [{"role": "user", "content": json.dumps(task.row, default=str)}])
        return ctx.transcript()


def task_of(row: Task | Mapping[str, Any] | str, **fields: Any) -> Task:
    """A task for a test: a prompt, or a row with `prompt` or `messages` and perhaps `truth`, `response` or `answer`.

    `fields` replace fields of the task, e.g. sampling=SamplingArgs(max_tokens=8).
    """
    if isinstance(row, Task):
        return msgspec.structs.replace(row, **fields) if fields else row
    row = {"prompt": row} if isinstance(row, str) else dict(row)
    given: dict[str, Any] = {
        "taskset": "test",
        "index": 0,
        "row": row,
        "prompt": row.get("prompt"),
        "messages": tuple(row.get("messages") or ()),
        "tools": tuple(row.get("tools") or ()),
        "truth": next((row[k] for k in ("truth", "response", "answer") if k in row), None),
        "sampling": SamplingArgs(max_tokens=1 << 16),  # a scripted model's tokens are bytes
        "workflow": "",
    }
    return Task(**{**given, **fields})


def run_workflow(
    workflow: Any,
    task: Task | Mapping[str, Any] | str,
    model: ChatModel,
    *,
    reward: Any = None,
    models: Mapping[str, ChatModel] | None = None,
    n: int | None = None,
    workflow_args: Mapping[str, Any] | None = None,
    reward_args: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    max_retry_times: int = 0,
    plugin_dirs: Iterable[str] = (),
    may_fail: bool = False,
) -> WorkflowResult:
    """Plays all runs of one task in this process.  In an async test: `await run_workflow_async(...)`.

    `workflow` and `reward` are classes, functions, or names as in a configuration; they default to those of the task.  `model` is the
    policy, `models` are the auxiliary ones by name.  `n` runs at once (default: the task's, 1).

    What a workflow or reward raises is raised here, unless `may_fail`: then look at `result.reason`, `.runs[i].error`, `.traceback`.
    Always raises ConfigError for arguments that do not fit, and InvariantBroken where experiences are not what was said.
    """
    asked = run_workflow_async(
        workflow,
        task,
        model,
        reward=reward,
        models=models,
        n=n,
        workflow_args=workflow_args,
        reward_args=reward_args,
        timeout_s=timeout_s,
        max_retry_times=max_retry_times,
        plugin_dirs=plugin_dirs,
        may_fail=may_fail,
    )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asked)
    asked.close()
    raise RuntimeError("run_workflow was called inside an event loop; write `await run_workflow_async(...)` there")


async def run_workflow_async(
    workflow: Any,
    task: Task | Mapping[str, Any] | str,
    model: ChatModel,
    *,
    reward: Any = None,
    models: Mapping[str, ChatModel] | None = None,
    n: int | None = None,
    workflow_args: Mapping[str, Any] | None = None,
    reward_args: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    max_retry_times: int = 0,
    plugin_dirs: Iterable[str] = (),
    may_fail: bool = False,
    on_call: Callable[[Call], None] | None = None,
) -> WorkflowResult:
    """As `run_workflow`; `on_call` is told of every model call when it ends."""
    plugins.load_all(plugin_dirs)
    given = task_of(task)
    plugin = _plugin("workflow", given.workflow if workflow is None else workflow)
    scored_by = given.reward if reward is None else reward
    changes: dict[str, Any] = {
        "workflow": plugin.name,
        "reward": None if scored_by is None else _plugin_name(scored_by),
        "num_runs": n or given.num_runs,
    }
    if workflow_args is not None:
        changes["workflow_args"] = dict(workflow_args)
    if reward_args is not None:
        changes["reward_args"] = dict(reward_args)
    given = task_of(given, **changes)
    made = None if scored_by is None else _reward(scored_by, given)
    eyes = _Eyes(on_call)
    seen = eyes.on(recipe(plugin, given, made))
    watched = {name: _Watched(m, name, eyes) for name, m in (models or {}).items()}
    limits = Limits(max_timeout_s=timeout_s, max_retry_times=max_retry_times)
    try:
        if callable(prepare := getattr(made, "prepare", None)):
            await prepare(watched)
        policy = _Watched(model, POLICY, eyes)
        group = await run_group(given, seen, policy, GroupId(1, 0, 0, 0), limits=limits, models=watched)
    finally:
        if callable(close := getattr(made, "close", None)):
            await close()
    runs = tuple(eyes.run(i, played) for i, played in enumerate(group.runs))
    if not may_fail:
        for run in runs:
            if run.failed:
                raise _told(run)
    check(group, [r.transcript for r in runs])
    return WorkflowResult(group, runs, tuple(eyes.calls))


def _told(run: RunResult) -> BaseException:
    """What ended a run, with a word on how to look at it instead."""
    error = run.error if run.error is not None else RunError(run.reason)
    error.add_note(f"(run {run.number} of the workflow failed; may_fail=True returns its record instead)")
    return error


def _plugin(kind: str, given: Any) -> Plugin:
    if isinstance(given, str):
        return REGISTRY.get(kind, given)
    marked = getattr(given, "__rft_plugin__", None)
    if marked is not None and marked.obj is given:
        return cast(Plugin, marked)
    return Plugin(kind, _plugin_name(given), given, str(getattr(given, "__module__", "?")), getattr(given, "Args", None))


def _plugin_name(given: Any) -> str:
    if isinstance(given, str):
        return given
    return str(getattr(given, "__name__", type(given).__name__))


def _reward(given: Any, task: Task) -> Reward:
    if isinstance(given, str):
        return rewards.build(given, task.reward_args, key="reward_args")
    if inspect.isclass(given) or inspect.isroutine(given):
        return rewards.of(_plugin("reward", given), task.reward_args, key="reward_args")
    if task.reward_args:
        raise TypeError(f"reward_args are for a class, a function or a name; {type(given).__name__} is an object already")
    return cast(Reward, given)


class _Eyes:
    """Sees what workflows and rewards are given, return and raise."""

    def __init__(self, on_call: Callable[[Call], None] | None) -> None:
        self.calls: list[Call] = []
        self._on_call = on_call
        self._contexts: dict[int, Any] = {}
        self._transcripts: dict[int, Transcript] = {}
        self._errors: dict[int, BaseException] = {}

    def on(self, recipe: Recipe) -> Recipe:
        """A recipe that is watched.  An isolated workflow is played in this process, where a debugger reaches it."""
        reward = None if recipe.reward is None else _SeenReward(recipe.reward, self)
        return replace(recipe, make=lambda: cast(Any, _Seen(recipe, self)), reward=cast(Any, reward), place=None)

    def called(self, call: Call) -> None:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    def begins(self, contexts: Sequence[Any]) -> None:
        for c in contexts:
            self._contexts[c.run] = c
            self._errors.pop(c.run, None)
            self._transcripts.pop(c.run, None)

    def ends(self, contexts: Sequence[Any], result: Any) -> None:
        for c, t in zip(contexts, result if isinstance(result, list | tuple) else [result], strict=False):
            if isinstance(t, Transcript):
                self._transcripts[c.run] = t

    def raised(self, contexts: Sequence[Any], error: BaseException) -> None:
        for c in contexts:
            self._errors[c.run] = error

    def run_of(self, scored: Transcript | Sequence[Transcript]) -> int | None:
        """None for several runs, and for a transcript that no run has returned."""
        return next((run for run, transcript in self._transcripts.items() if transcript is scored), None)

    def reward_raised(self, scored: Transcript | Sequence[Transcript], error: BaseException) -> None:
        ids = {id(t) for t in ([scored] if isinstance(scored, Transcript) else scored)}
        for run, transcript in self._transcripts.items():
            if id(transcript) in ids:
                self._errors[run] = error

    def run(self, number: int, played: Played) -> RunResult:
        transcript = self._transcripts.get(number)
        if transcript is None and number in self._contexts:
            so_far = self._contexts[number].transcript()
            transcript = so_far if so_far.turns else None
        calls = tuple(c for c in self.calls if c.run == number)
        return RunResult(number, played, transcript, calls, self._errors.get(number) if played.failed else None)


class _Seen:
    """A workflow object that is watched."""

    def __init__(self, recipe: Recipe, eyes: _Eyes) -> None:
        self._recipe, self._eyes = recipe, eyes

    def run(self, task: Task, ctx: RunContext) -> Any:
        _RUN.set(ctx.run)
        return self._watch([ctx], lambda inner: inner.run(task, ctx))

    def run_group(self, task: Task, contexts: list[RunContext]) -> Any:
        return self._watch(contexts, lambda inner: inner.run_group(task, contexts))

    def _watch(self, contexts: Sequence[Any], play: Callable[[Any], Any]) -> Any:
        if not self._recipe.blocking:
            return self._later(contexts, play)
        self._eyes.begins(contexts)
        try:
            result = play(self._recipe.make())
        except BaseException as e:
            self._eyes.raised(contexts, e)
            raise
        self._eyes.ends(contexts, result)
        return result

    async def _later(self, contexts: Sequence[Any], play: Callable[[Any], Awaitable[Any]]) -> Any:
        self._eyes.begins(contexts)
        try:
            result = await play(self._recipe.make())
        except asyncio.CancelledError:
            raise  # its deadline; the record says so
        except BaseException as e:
            self._eyes.raised(contexts, e)
            raise
        self._eyes.ends(contexts, result)
        return result


class _SeenReward:
    """A reward that is watched."""

    def __init__(self, inner: Any, eyes: _Eyes) -> None:
        self._inner, self._eyes = inner, eyes
        self.whole_group = bool(getattr(inner, "whole_group", False))

    def __call__(self, task: Task, scored: Any) -> Any:
        _RUN.set(self._eyes.run_of(scored))
        try:
            result = self._inner(task, scored)
        except Exception as e:
            self._eyes.reward_raised(scored, e)
            raise
        return self._later(scored, result) if inspect.isawaitable(result) else result

    async def _later(self, scored: Any, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except Exception as e:
            self._eyes.reward_raised(scored, e)
            raise


class _Watched:
    """A model whose calls are seen; in everything else it is that model."""

    def __init__(self, model: ChatModel, name: str, eyes: _Eyes) -> None:
        self._model, self._name, self._eyes = model, name, eyes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        answers: list[Completion] = await self._ask(request, self._model.generate(request))
        return answers

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        found: np.ndarray = await self._ask(row, self._model.logprobs(row))
        return found

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        scores: list[float] = await self._ask(list(messages), self._model.classify(messages))
        return scores

    async def _ask(self, asked: Any, call: Awaitable[Any]) -> Any:
        began = time.monotonic()
        seen = Call(self._name, _RUN.get(), asked)
        try:
            answer = await call
        except BaseException as e:
            self._eyes.called(replace(seen, error=e, took_s=time.monotonic() - began))
            if isinstance(e, RftError) and not isinstance(e, asyncio.CancelledError):
                e.add_note(f"(raised by the model {self._name})")
            raise
        done = replace(seen, took_s=time.monotonic() - began)
        if isinstance(asked, GenerateRequest):
            done = replace(done, answers=tuple(answer))
        else:
            done = replace(done, values=tuple(float(v) for v in answer))
        self._eyes.called(done)
        return answer
