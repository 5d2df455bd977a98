"""Plays one task with a workflow, as the explorer does, and keeps everything that happened: for
tests and for `rft debug`.

It uses the rooms' own code (`rft.workflow.group`, rewards, records) and adds nothing to it but
eyes.  No torch, no Ray, no buffer. Every result is checked: its rows are compared with the calls
they were made of, because the trainer relies on it.
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
from rft.types.completion import Completion, Transcript, Turn
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.types.thoughts import was_opened
from rft.workflow.base import RunContext, Workflow
from rft.workflow.group import PlayedGroup, run_group
from rft.workflow.play_run import PlayedRun, RunError, RunLimits, cut
from rft.workflow.recipes import Recipe, recipe

P = ParamSpec("P")
_RUN: ContextVar[int | None] = ContextVar("rft_testing_run", default=None)


class OneAnswer(Workflow):
    """Asks once, with the task's prompt or, where it has none, its row: for looking at rewards."""

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
    """A task for a test: a prompt, or a row with `prompt` or `messages` and perhaps `truth`,
    `response` or `answer`.

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
    """Plays all runs of one task in this process; in a test without an event loop write
    `run_workflow(...)`.

    `workflow` and `reward` are classes, functions, or names as in a configuration; they default to
    those of the task.  `model` is the policy, `models` are the auxiliary ones by name.  `n` runs at
    once (default: the task's, 1).  `on_call` is told of every model call when it ends.

    What a workflow or reward raises is raised here, unless `may_fail`: then look at
    `result.reason`, `.runs[i].error`, `.traceback`. Always raises ConfigError for arguments that do
    not fit, and InvariantBroken where experiences are not what was said.
    """
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
    limits = RunLimits(max_timeout_s=timeout_s, max_retry_times=max_retry_times)
    try:
        if made is not None:
            await hook(made.prepare, watched)
        policy = _Watched(model, POLICY, eyes)
        group = await run_group(
            given, seen, policy, GroupId(1, 0, 0, 0), limits=limits, models=watched
        )
    finally:
        if made is not None:
            await hook(made.close)
    runs = tuple(eyes.run(i, played) for i, played in enumerate(group.runs))
    if not may_fail:
        for run in runs:
            if run.failed:
                raise _told(run)
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


def _told(run: RunResult) -> BaseException:
    """What ended a run, with a word on how to look at it instead."""
    error = run.error if run.error is not None else RunError(run.reason)
    error.add_note(
        f"(run {run.number} of the workflow failed; may_fail=True returns its record instead)"
    )
    return error


def _plugin(kind: str, given: Any) -> Plugin:
    if isinstance(given, str):
        return REGISTRY.get(kind, given)
    return plugins.mark_of(given) or plugins.unmarked(kind, _plugin_name(given), given)


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
        raise TypeError(
            f"reward_args are for a class, a function or a name; {type(given).__name__} is an "
            f"object already"
        )
    return (
        given
        if isinstance(given, Reward)
        else rewards.from_function(_plugin("reward", given), {}, key="reward")
    )


class _Eyes:
    """Sees what workflows and rewards are given, return and raise."""

    def __init__(self, on_call: Callable[[Call], None] | None) -> None:
        self.calls: list[Call] = []
        self._on_call = on_call
        self._contexts: dict[int, Any] = {}
        self._transcripts: dict[int, Transcript] = {}
        self._errors: dict[int, BaseException] = {}
        self._readings: dict[int, list[AnswerReading]] = {}

    def on(self, recipe: Recipe) -> Recipe:
        """A recipe that is watched.  An isolated workflow is played in this process, where a
        debugger reaches it.
        """
        reward = None if recipe.reward is None else _SeenReward(recipe.reward, self)
        return replace(
            recipe,
            make=lambda: cast(Any, _Seen(recipe, self)),
            reward=cast(Any, reward),
            place=None,
        )

    def called(self, call: Call) -> None:
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    @contextmanager
    def playing(self, contexts: Sequence[Any]) -> Iterator[Callable[[Any], Any]]:
        """While a workflow plays; what it gives back is passed through the function."""
        for c in contexts:
            self._contexts[c.run] = c
            self._errors.pop(c.run, None)
            self._transcripts.pop(c.run, None)

        def given(result: Any) -> Any:
            for c, t in zip(
                contexts, result if isinstance(result, list | tuple) else [result], strict=False
            ):
                if isinstance(t, Transcript):
                    self._transcripts[c.run] = t
            return result

        try:
            yield given
        except asyncio.CancelledError:
            raise  # its deadline; the record says so
        except BaseException as e:
            self._errors.update((c.run, e) for c in contexts)
            raise

    def run_of(self, scored: Transcript | Sequence[Transcript]) -> int | None:
        """None for several runs, and for a transcript that no run has returned."""
        return next(
            (run for run, transcript in self._transcripts.items() if transcript is scored), None
        )

    @contextmanager
    def scoring(self, scored: Transcript | Sequence[Transcript]) -> Iterator[None]:
        number = self.run_of(scored)
        # of several together: shown at the first
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
    """A workflow object that is watched."""

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
        with self._eyes.playing(contexts) as given:
            return given(play(self._recipe.make()))

    async def _later(self, contexts: Sequence[Any], play: Callable[[Any], Awaitable[Any]]) -> Any:
        with self._eyes.playing(contexts) as given:
            return given(await play(self._recipe.make()))


class _SeenReward:
    """A reward that is watched."""

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
        _RUN.set(self._eyes.run_of(scored))  # the call above may have had its own thread
        with self._eyes.scoring(scored):
            return await result


class _Watched:
    """A model whose calls are seen; in everything else it is that model."""

    def __init__(self, model: ChatModel, name: str, eyes: _Eyes) -> None:
        self._model = model
        self._name = name
        self._eyes = eyes

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


# ---------------------------------------------------------------- what must hold of every group,
# whatever the workflow does


class InvariantBroken(AssertionError):
    """Experiences that are not what was said; a fault of the workflow, or of the platform."""


def check(group: PlayedGroup, transcripts: Sequence[Transcript | None]) -> None:
    """`transcripts` are those of the runs, in order.  Raises InvariantBroken that names the run and
    what does not hold.
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
    """A call that goes on from an earlier one (its messages begin with that one's messages and
    answer) begins with its tokens.
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


def _row(x: Experience, said: Sequence[Completion], where: str) -> None:
    last = said[-1]
    _holds(
        x.num_tokens == len(last.prompt_tokens) + len(last.tokens),
        f"{where}: it ends elsewhere than its last call",
    )
    own = np.zeros(x.num_tokens, np.bool_)
    logps = np.zeros(x.num_tokens, np.float32)
    for c in said:
        start = len(c.prompt_tokens)
        end = len(c.prompt_tokens) + len(c.tokens)
        own[start:end] = True
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
        np.array_equal(x.loss_mask, own),
        f"{where}: loss_mask does not cover exactly the tokens that the policy wrote",
    )
    _holds(
        np.array_equal(x.logprobs, logps),
        f"{where}: log-probs are not those of the model, or are outside loss_mask",
    )


def _holds(it: bool | np.bool_, otherwise: str) -> None:
    if not it:
        raise InvariantBroken(otherwise)
