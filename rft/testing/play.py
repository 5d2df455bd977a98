"""Run one task with a workflow as the explorer does, and record every call: for tests and for `rft
debug`.

Uses the production code (`rft.workflow.group`, rewards, records) and only observes it.  No torch,
no Ray, no buffer.  Every result is checked: its rows are compared with the calls they were made of,
because the trainer relies on it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, cast

import msgspec
import numpy as np

import rft.plugins as plugins
from rft.errors import RftError
from rft.plugins import REGISTRY, Plugin
from rft.reward import build_reward as rewards
from rft.reward.base import Reward, hook
from rft.reward.readings import AnswerReading, explained
from rft.testing.trace import POLICY, Call, RunResult, WorkflowResult
from rft.types.block import decode, encode
from rft.types.completion import Completion, TokenScores, Transcript, Turn
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.types.thoughts import was_opened
from rft.workflow.base import RunContext, Workflow
from rft.workflow.call_workflow import RunError
from rft.workflow.group import PlayedGroup, run_group
from rft.workflow.play_run import PlayedRun, RunLimits
from rft.workflow.recipes import Recipe, recipe
from rft.workflow.run_rows import cut

P = ParamSpec("P")
_RUN: ContextVar[int | None] = ContextVar("rft_testing_run", default=None)


class OneAnswer(Workflow):
    """Makes one call with the task's prompt, or its row without a prompt; for inspecting rewards."""

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        opening = bool(task.messages or task.prompt is not None)
        answer = await ctx.chat(
            task.chat()
            if opening
            else [{"role": "user", "content": json.dumps(task.row, default=str)}]
        )
        run = ctx.transcript()
        if not was_opened(answer.text):
            return run
        answer = msgspec.structs.replace(answer, in_thought=True)
        return msgspec.structs.replace(
            run, turns=(msgspec.structs.replace(run.turns[0], completion=answer),)
        )


def task_of(row: Task | Mapping[str, Any] | str, **fields: Any) -> Task:
    """Make a task for a test from a prompt, or from a row with `prompt` or `messages` and
    optionally `truth`, `response` or `answer`.

    `fields` replace fields of the task, e.g. sampling=SamplingArgs(max_tokens=8).
    """
    if isinstance(row, Task):
        return msgspec.structs.replace(row, **fields) if fields else row
    row = {"prompt": row} if isinstance(row, str) else dict(row)
    defaults: dict[str, Any] = {
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
    return Task(**{**defaults, **fields})


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
    """Play all runs of one task in this process; without an event loop use `run_workflow(...)`.

    `workflow` and `reward` are classes, functions, or names as in a configuration; default: those
    of the task.  `model` is the policy, `models` are the auxiliary ones by name.  `n`: concurrent
    runs (default: the task's, 1).  `on_call` is called after every model call.

    Errors of a workflow or reward are raised, unless `may_fail`; then see `result.reason`,
    `.runs[i].error`, `.traceback`.  Always raises ConfigError for invalid arguments, and
    InvariantBroken for experiences that differ from the calls.
    """
    plugins.load_all(plugin_dirs)
    played_task = task_of(task)
    plugin = _plugin("workflow", played_task.workflow if workflow is None else workflow)
    scored_by = played_task.reward if reward is None else reward
    changes: dict[str, Any] = {
        "workflow": plugin.name,
        "reward": None if scored_by is None else _plugin_name(scored_by),
        "num_runs": n or played_task.num_runs,
    }
    if workflow_args is not None:
        changes["workflow_args"] = dict(workflow_args)
    if reward_args is not None:
        changes["reward_args"] = dict(reward_args)
    played_task = task_of(played_task, **changes)
    scorer = None if scored_by is None else _reward(scored_by, played_task)
    eyes = _Eyes(on_call)
    watched_recipe = eyes.on(recipe(plugin, played_task, scorer))
    watched = {name: _Watched(m, name, eyes) for name, m in (models or {}).items()}
    limits = RunLimits(max_timeout_s=timeout_s, max_retry_times=max_retry_times)
    try:
        if scorer is not None:
            await hook(scorer.prepare, watched)
        policy = _Watched(model, POLICY, eyes)
        group = await run_group(
            played_task, watched_recipe, policy, GroupId(1, 0, 0, 0), limits=limits, models=watched
        )
    finally:
        if scorer is not None:
            await hook(scorer.close)
    runs = tuple(eyes.run(i, played) for i, played in enumerate(group.runs))
    if not may_fail:
        for run in runs:
            if run.failed:
                raise _with_hint(run)
    check(group, [r.transcript for r in runs])
    return WorkflowResult(group, runs, tuple(eyes.calls))


def _blocking(
    play: Callable[P, Coroutine[Any, Any, WorkflowResult]],
) -> Callable[P, WorkflowResult]:
    @wraps(play)
    def run(*args: P.args, **kwargs: P.kwargs) -> WorkflowResult:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(play(*args, **kwargs))
        raise RuntimeError(
            "run_workflow was called inside an event loop; write `await run_workflow_async(...)` "
            "there"
        )

    return run


run_workflow = _blocking(run_workflow_async)


def _with_hint(run: RunResult) -> BaseException:
    """Return the error of a failed run, with a note on how to inspect the run instead."""
    error = run.error if run.error is not None else RunError(run.reason)
    error.add_note(
        f"(run {run.number} of the workflow failed; may_fail=True returns its record instead)"
    )
    return error


def _plugin(kind: str, plugin: Any) -> Plugin:
    if isinstance(plugin, str):
        return REGISTRY.get(kind, plugin)
    return plugins.mark_of(plugin) or plugins.unmarked(kind, _plugin_name(plugin), plugin)


def _plugin_name(plugin: Any) -> str:
    if isinstance(plugin, str):
        return plugin
    return str(getattr(plugin, "__name__", type(plugin).__name__))


def _reward(reward: Any, task: Task) -> Reward:
    if isinstance(reward, str):
        return rewards.build(reward, task.reward_args, key="reward_args")
    if inspect.isclass(reward) or inspect.isroutine(reward):
        return rewards.from_plugin(_plugin("reward", reward), task.reward_args, key="reward_args")
    if task.reward_args:
        raise TypeError(
            f"reward_args are for a class, a function or a name; {type(reward).__name__} is an "
            f"object already"
        )
    return (
        reward
        if isinstance(reward, Reward)
        else rewards.from_plugin(_plugin("reward", reward), {}, key="reward")
    )


class _Eyes:
    """Records arguments, results and errors of workflows and rewards."""

    def __init__(self, on_call: Callable[[Call], None] | None) -> None:
        self.calls: list[Call] = []
        self._on_call = on_call
        self._contexts: dict[int, Any] = {}
        self._transcripts: dict[int, Transcript] = {}
        self._errors: dict[int, BaseException] = {}
        self._readings: dict[int, list[AnswerReading]] = {}

    def on(self, recipe: Recipe) -> Recipe:
        """Return a recipe whose workflow and reward are watched.

        An isolated workflow is played in this process, where a debugger reaches it.
        """
        reward = None if recipe.reward is None else _SeenReward(recipe.reward, self)
        return replace(
            recipe,
            make=lambda: cast(Any, _Seen(recipe, self)),
            reward=cast(Any, reward),
            isolation=None,
        )

    def called(self, call: Call) -> None:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    @contextmanager
    def playing(self, contexts: Sequence[Any]) -> Iterator[Callable[[Any], Any]]:
        """Record a workflow's errors inside the block; yields a function to pass its result
        through.
        """
        for c in contexts:
            self._contexts[c.run] = c
            self._errors.pop(c.run, None)
            self._transcripts.pop(c.run, None)

        def keep(result: Any) -> Any:
            for c, t in zip(
                contexts, result if isinstance(result, list | tuple) else [result], strict=False
            ):
                if isinstance(t, Transcript):
                    self._transcripts[c.run] = t
            return result

        try:
            yield keep
        except asyncio.CancelledError:
            raise  # its deadline, which the record reports
        except BaseException as e:
            self._errors.update((c.run, e) for c in contexts)
            raise

    def run_of(self, scored: Transcript | Sequence[Transcript]) -> int | None:
        """Return the run of a transcript; None for several, or for a transcript not returned by a
        run.
        """
        return next(
            (run for run, transcript in self._transcripts.items() if transcript is scored), None
        )

    @contextmanager
    def scoring(self, scored: Transcript | Sequence[Transcript]) -> Iterator[None]:
        number = self.run_of(scored)
        # a group's readings are shown at run 0
        readings = self._readings.setdefault(0 if number is None else number, [])
        try:
            with explained() as new:
                yield
            readings += new
        except Exception as e:
            ids = {id(t) for t in ([scored] if isinstance(scored, Transcript) else scored)}
            self._errors.update(
                (run, e) for run, transcript in self._transcripts.items() if id(transcript) in ids
            )
            raise

    def run(self, number: int, played: PlayedRun) -> RunResult:
        transcript = self._transcripts.get(number)
        if transcript is None and number in self._contexts:
            so_far = self._contexts[number].transcript()
            transcript = so_far if so_far.turns else None
        calls = tuple(c for c in self.calls if c.run == number)
        error = self._errors.get(number) if played.failed else None
        return RunResult(
            number, played, transcript, calls, error, tuple(self._readings.get(number, ()))
        )


class _Seen:
    """A watched workflow object."""

    def __init__(self, recipe: Recipe, eyes: _Eyes) -> None:
        self._recipe = recipe
        self._eyes = eyes

    def run(self, task: Task, ctx: RunContext) -> Any:
        _RUN.set(ctx.run)
        return self._watch([ctx], lambda inner: inner.run(task, ctx))

    def run_group(self, task: Task, contexts: list[RunContext]) -> Any:
        return self._watch(contexts, lambda inner: inner.run_group(task, contexts))

    def _watch(self, contexts: Sequence[Any], play: Callable[[Any], Any]) -> Any:
        if not self._recipe.blocking:
            return self._later(contexts, play)
        with self._eyes.playing(contexts) as keep:
            return keep(play(self._recipe.make()))

    async def _later(self, contexts: Sequence[Any], play: Callable[[Any], Awaitable[Any]]) -> Any:
        with self._eyes.playing(contexts) as keep:
            return keep(await play(self._recipe.make()))


class _SeenReward:
    """A watched reward."""

    def __init__(self, inner: Reward, eyes: _Eyes) -> None:
        self._inner = inner
        self._eyes = eyes
        self.whole_group = inner.whole_group

    def __call__(self, task: Task, scored: Any) -> Any:
        _RUN.set(self._eyes.run_of(scored))
        with self._eyes.scoring(scored):
            result = self._inner(task, scored)
        return self._later(scored, result) if inspect.isawaitable(result) else result

    async def _later(self, scored: Any, result: Awaitable[Any]) -> Any:
        _RUN.set(self._eyes.run_of(scored))  # the call above may have run in its own thread
        with self._eyes.scoring(scored):
            return await result


class _Watched:
    """Forwards to a model and records its calls."""

    def __init__(self, model: ChatModel, name: str, eyes: _Eyes) -> None:
        self._model = model
        self._name = name
        self._eyes = eyes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        answers: list[Completion] = await self._ask(request, self._model.generate(request))
        return answers

    async def score(self, row: ScoreRow) -> TokenScores:
        scores: TokenScores = await self._ask(row, self._model.score(row))
        return scores

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        scores: list[float] = await self._ask(list(messages), self._model.classify(messages))
        return scores

    async def _ask(self, request: Any, call: Awaitable[Any]) -> Any:
        began = time.monotonic()
        entry = Call(self._name, _RUN.get(), request)
        try:
            answer = await call
        except BaseException as e:
            self._eyes.called(replace(entry, error=e, took_s=time.monotonic() - began))
            if isinstance(e, RftError) and not isinstance(e, asyncio.CancelledError):
                e.add_note(f"(raised by the model {self._name})")
            raise
        done = replace(entry, took_s=time.monotonic() - began)
        if isinstance(request, GenerateRequest):
            done = replace(done, answers=tuple(answer))
        else:
            values = answer.logprobs if isinstance(answer, TokenScores) else answer
            done = replace(done, values=tuple(float(v) for v in values))
        self._eyes.called(done)
        return answer


# ------------------------------------------------ invariants of every group, for any workflow


class InvariantBroken(AssertionError):
    """Experiences differ from the calls; a fault of the workflow or of the platform."""


def check(group: PlayedGroup, transcripts: Sequence[Transcript | None]) -> None:
    """Check a group against its runs' `transcripts`, in order.  Raises InvariantBroken naming the
    run and the violation.
    """
    rows = group.rows
    ids = [x.id for x in rows]
    _holds(len(set(ids)) == len(ids), f"group {group.id}: two experiences have one id")
    _holds(ids == sorted(ids), f"group {group.id}: experiences are not in the order of their ids")
    for number, (played, transcript) in enumerate(zip(group.runs, transcripts, strict=True)):
        for step, row in enumerate(played.experiences):
            where = f"run {number}, step {step}"
            _holds(
                row.group == group.id and row.id.run == number and row.id.step == step,
                f"{where}: its id is {row.id}",
            )
            try:
                msgspec.json.encode([row.info, row.metrics, row.messages, row.tools])
            except (TypeError, RecursionError) as e:
                raise InvariantBroken(
                    f"{where}: info, metrics, messages and tools must be JSON values: {e}"
                ) from None
        if not played.failed:
            _holds(transcript is not None, f"run {number}: it has experiences and no transcript")
            assert transcript is not None
            history(transcript, where=f"run {number}")
            parts = cut(transcript)
            _holds(
                len(parts) == len(played.experiences),
                f"run {number}: {len(parts)} parts, {len(played.experiences)} rows",
            )
            for step, (turns, row) in enumerate(zip(parts, played.experiences, strict=True)):
                _row(row, [t.completion for t in turns], f"run {number}, step {step}")
    back = decode(encode(rows))
    _holds([x.id for x in back] == ids, f"group {group.id}: it does not survive being stored")


def history(transcript: Transcript, *, where: str = "run") -> None:
    """Check that a call that extends an earlier one (its messages begin with that call's messages
    and answer) begins with that call's tokens.
    """
    for k, turn in enumerate(transcript.turns):
        before = next((t for t in reversed(transcript.turns[:k]) if _goes_on(turn, t)), None)
        if before is None:
            continue
        old = np.concatenate([before.completion.prompt_tokens, before.completion.tokens])
        prompt = turn.completion.prompt_tokens
        same = len(prompt) >= len(old) and np.array_equal(prompt[: len(old)], old)
        _holds(
            same,
            f"{where}, call {k}: earlier turns were tokenised again; its prompt does not begin "
            f"with their tokens",
        )


def _goes_on(turn: Turn, before: Turn) -> bool:
    n = len(before.messages)
    return (
        len(turn.messages) > n
        and turn.messages[:n] == before.messages
        and turn.messages[n] == before.completion.message
    )


def _row(x: Experience, completions: Sequence[Completion], where: str) -> None:
    last = completions[-1]
    _holds(
        x.num_tokens == len(last.prompt_tokens) + len(last.tokens),
        f"{where}: it ends elsewhere than its last call",
    )
    mask = np.zeros(x.num_tokens, np.bool_)
    logps = np.zeros(x.num_tokens, np.float32)
    for c in completions:
        start = len(c.prompt_tokens)
        end = len(c.prompt_tokens) + len(c.tokens)
        mask[start:end] = True
        logps[start:end] = np.minimum(c.logprobs, 0)
        _holds(
            np.array_equal(x.tokens[start:end], c.tokens),
            f"{where}: tokens {start} to {end} are not what the model wrote",
        )
        for span in c.version_spans:
            written = [
                s
                for s in x.version_spans
                if s.start <= start + span.start and start + span.end <= s.end
            ]
            fits = len(written) == 1 and written[0].version == span.version
            _holds(
                fits,
                f"{where}: tokens {start + span.start} to {start + span.end} must be of version "
                f"{span.version} alone",
            )
    _holds(
        np.array_equal(x.loss_mask, mask),
        f"{where}: loss_mask does not cover exactly the tokens that the policy wrote",
    )
    _holds(
        np.array_equal(x.logprobs, logps),
        f"{where}: log-probs are not those of the model, or are outside loss_mask",
    )


def _holds(it: bool | np.bool_, otherwise: str) -> None:
    if not it:
        raise InvariantBroken(otherwise)
