"""Runs a workflow class of Trinity-RFT's shape as one of ours, and finds the recorded calls behind
what it returns.

Independent of engines.  Invariant: an experience becomes a row only if its tokens are those of
calls recorded in this run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from rft.errors import ConfigError
from rft.extras.migrate.compat import trinity_rewards as rewards
from rft.extras.migrate.compat import trinity_task as tasks
from rft.extras.migrate.compat.trinity_experience import TrinityExperience, plain
from rft.extras.migrate.compat.trinity_home import HOME, Home
from rft.extras.migrate.compat.trinity_model import ModelWrapper
from rft.extras.migrate.compat.trinity_registry import stands_for
from rft.types.completion import Score, TokenScores, Transcript, Turn
from rft.types.ids import FIXED
from rft.types.task import Task
from rft.worker.threads import in_thread
from rft.workflow.base import RunContext


class CompatError(Exception):
    """A workflow of Trinity-RFT's shape gave back something that cannot be trained."""


@cache
def adapter(cls: Any) -> type:
    """The workflow class of ours that stands for `cls`; any `workflow_args` are taken, as there.
    Raises ConfigError if it is isolated.
    """
    if cls.isolated:
        raise ConfigError(
            f"{cls.__name__}: isolated is for workflows with run(self, task, ctx); take it out, or "
            f"write it so"
        )

    class Single:
        def __init__(self, **workflow_args: Any) -> None: ...

        async def run(self, task: Task, ctx: RunContext) -> Transcript:
            return (await play(cls, task, [ctx]))[0]

    class Grouped:
        def __init__(self, **workflow_args: Any) -> None: ...

        async def run_group(self, task: Task, contexts: Sequence[RunContext]) -> list[Transcript]:
            return await play(cls, task, contexts)

    workflow: Any = Grouped if cls.can_repeat else Single
    workflow.__name__ = workflow.__qualname__ = cls.__name__
    return stands_for(workflow, cls)


async def play(cls: Any, task: Task, contexts: Sequence[RunContext]) -> list[Transcript]:
    """One transcript for each context."""
    home = Home(task, contexts, asyncio.get_running_loop())

    def work() -> list[Transcript]:
        HOME.set(home)
        result = _run(cls, home)
        home.collect()
        return _transcripts(cls, result, home)

    try:
        return await in_thread(work, f"workflow {cls.__name__}")
    finally:
        await home.end()


def _run(cls: Any, home: Home) -> Any:
    """In the run's own thread.  What is async has an event loop of its own there."""
    task = home.task
    model = ModelWrapper(home)
    auxiliary = [ModelWrapper(home, name) for name in home.contexts[0].models]
    theirs_task = tasks.of(
        task, cls, rewards.as_theirs(task.reward) if task.reward is not None else None
    )

    def make() -> Any:
        instance = theirs_task.to_workflow(model, auxiliary or None)
        if cls.can_repeat:
            instance.set_repeat_times(len(home.contexts), 0)
        return instance

    async def within() -> Any:
        try:
            return await make().run_async()
        finally:
            for m in (model, *auxiliary):
                await m.close()

    if cls.is_async:
        return asyncio.run(within())
    try:
        return make().run()
    finally:
        for m in (model, *auxiliary):
            asyncio.run(m.close())


def _transcripts(cls: Any, result: Any, home: Home) -> list[Transcript]:
    name = cls.__name__
    if not isinstance(result, list | tuple) or not all(
        isinstance(x, TrinityExperience) for x in result
    ):
        raise CompatError(
            f"workflow {name} returned {type(result).__name__}; it must return a list of "
            f"rft.extras.migrate.compat.Experience"
        )
    if not result:
        raise CompatError(f"workflow {name} returned no experience")
    runs: list[list[TrinityExperience]] = [[] for _ in home.contexts]
    if len(result) == len(runs) and not any(x.eid.run for x in result):
        for i, x in enumerate(result):  # the workflow left the numbers out
            x.eid.run = i
    for x in result:
        run = x.eid.run if len(runs) > 1 else 0
        if not 0 <= run < len(runs):
            raise CompatError(
                f"workflow {name}: eid.run {run}; this task has runs 0 to {len(runs) - 1}"
            )
        runs[run].append(x)
    if len(kinds := dict.fromkeys(x.eid.task for x in result)) > 1:
        raise CompatError(
            f"workflow {name}: experiences of {len(kinds)} tasks ({', '.join(map(str, kinds))}), "
            f"which would be compared with each other; "
            "all runs of a task are one group here, so let a task's runs all do the same, as "
            "math_trainable_ruler_workflow does"
        )
    unmatched = list(home.turns)
    return [
        _untrained(name, xs, ctx)
        if xs and not any(x.action_mask.any() for x in xs)
        else _transcript(name, _in_order(xs), unmatched, steps=cls.scores_steps)
        for xs, ctx in zip(runs, home.contexts, strict=True)
    ]


def _in_order(experiences: Sequence[TrinityExperience]) -> list[TrinityExperience]:
    return sorted((x for x in experiences if x.action_mask.any()), key=lambda x: x.eid.step)


def _untrained(name: str, experiences: Sequence[TrinityExperience], ctx: RunContext) -> Transcript:
    """A run without a usable answer: its last call, of which nothing is trained, with the reward
    that it was given or 0.
    """
    last = experiences[-1]
    turns = ctx.transcript().turns
    if not turns:
        raise CompatError(
            f"workflow {name} made no call, and returned nothing to train: "
            f"{last.info.get('error_reason', 'no reason')}"
        )
    mask = np.zeros(len(turns[-1].completion.tokens), np.bool_)
    turn = msgspec.structs.replace(turns[-1], mask=mask, info=plain(last.info))
    return Transcript(
        turns=(turn,), metrics=_mean([last.metrics]), score=Score(value=float(last.reward or 0.0))
    )


def _transcript(
    name: str, experiences: Sequence[TrinityExperience], unmatched: list[Turn], *, steps: bool
) -> Transcript:
    """The calls of one run's experiences; those that became none are left out.  `left`: calls that
    have no experience yet.

    One reward on all experiences is that of the run, unless the workflow rewards `steps`.
    """
    chains = [_scored(x, _calls(name, x, unmatched)) for x in experiences]
    turns = tuple(t for chain in chains for t in chain)
    several = len(chains) > 1
    shared = not several or (not steps and len({x.reward for x in experiences}) == 1)
    if shared:
        turns = tuple(msgspec.structs.replace(t, score=None) for t in turns)
    if several and any(len(c) > 1 for c in chains):
        raise CompatError(
            f"workflow {name} returned several experiences of a run, one of several turns; return "
            f"one sequence"
        )
    truncated = any(x.truncate_status is not None for x in experiences[-1:])
    return Transcript(
        turns=turns,
        layout="steps" if several else "joined",
        metrics=_mean([x.metrics for x in experiences]),
        score=_score(experiences[0])
        if shared and experiences and experiences[0].reward is not None
        else None,
        limited=truncated,
    )


def _calls(name: str, x: TrinityExperience, unmatched: list[Turn]) -> list[Turn]:
    """The recorded calls whose tokens `x` consists of, in order."""
    tokens = x.tokens.numpy()

    def whole(turn: Turn) -> int:
        return len(turn.completion.prompt_tokens) + len(turn.completion.tokens)

    fitting = [
        t
        for t in unmatched
        if len(t.completion.prompt_tokens) >= x.prompt_length and _begins(t, tokens)
    ]
    chain: list[Turn] = []
    for t in sorted(fitting, key=whole, reverse=True):
        if (
            whole(t) == len(tokens)
            if not chain
            else whole(t) <= len(chain[0].completion.prompt_tokens)
        ):
            chain.insert(0, t)
    if not chain or len(chain[0].completion.prompt_tokens) != x.prompt_length:
        raise CompatError(
            f"workflow {name} returned an experience ({len(tokens)} tokens, prompt_length "
            f"{x.prompt_length}) that is no call of this "
            "run's model.  Return what model.chat, generate or extract_experience_from_history "
            "gave, tokens unchanged; to imitate "
            "texts from elsewhere use mode: train, or algorithm_type: mix"
        )
    unmatched[:] = [t for t in unmatched if not any(t is taken for taken in chain)]
    return chain


def _begins(turn: Turn, tokens: np.ndarray) -> bool:
    c = turn.completion
    sequence = np.concatenate([c.prompt_tokens, c.tokens])
    return len(sequence) <= len(tokens) and np.array_equal(tokens[: len(sequence)], sequence)


def _scored(x: TrinityExperience, turns: list[Turn]) -> list[Turn]:
    """The calls with the experience's reward, info, mask and teacher."""
    experiences = []
    for i, turn in enumerate(turns):
        at = len(turn.completion.prompt_tokens) - x.prompt_length
        here = slice(at, at + len(turn.completion.tokens))
        mask = x.action_mask.numpy()[here]
        teacher = None
        if x.teacher_logprobs is not None:
            scored = x.teacher_logprobs.numpy()[here]
            teacher = TokenScores(logprobs=scored, version=FIXED)
        last = i == len(turns) - 1
        experiences.append(
            msgspec.structs.replace(
                turn,
                mask=None if mask.all() else mask,
                teacher=teacher,
                score=_score(x) if last and x.reward is not None else None,
                info=plain(x.info) if last else {},
            )
        )
    return experiences


def _score(x: TrinityExperience) -> Score:
    assert x.reward is not None
    return Score(value=float(x.reward), parts={})


def _mean(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of each metric over the experiences that have it."""
    names = {name for m in metrics for name in m}
    return {n: float(np.mean([float(m[n]) for m in metrics if n in m])) for n in sorted(names)}
