"""Functions with veRL's signature as rewards: compute_score(data_source, solution_str,
ground_truth, extra_info=None, **kwargs).

Such a function is known by the names of its parameters.  An ordinary one runs in a separate thread,
so that a slow one blocks nothing else; an async one is awaited.  Invariant: what it raises reaches
the run, and a number that is not finite is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rft.errors import ConfigError
from rft.extras.migrate.score_functions.reward_managers import (
    PRIME_TIMEOUT_S,
    ManagerArgs,
    answer,
    check_manager,
    late,
    with_acc,
)
from rft.reward.base import FunctionReward, Reward, to_score
from rft.types.completion import Score, Transcript
from rft.types.task import Task
from rft.worker.job_pool import WorkerPool

POOL = WorkerPool("functions", "rft.extras.migrate.score_functions.function_worker", memo=False)
GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_compute_score(obj: Any) -> bool:
    """Whether `obj` is a function that takes at least solution_str and ground_truth."""
    return inspect.isroutine(obj) and {"solution_str", "ground_truth"} <= set(
        inspect.signature(obj).parameters
    )


def parameters_of(
    fn: Callable[..., Any], reserved: Sequence[str], args: Mapping[str, Any], *, name: str, key: str
) -> tuple[list[str], bool]:
    """Names of the parameters of `fn`, and whether any other name is taken too.

    A run passes those in `reserved`, `reward_fn_args` gives `args`.  Raises ConfigError for
    arguments that it does not take.
    """
    parameters = inspect.signature(fn).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [n for n in args if n in reserved or (n not in named and not any_name)]:
        names = ", ".join(n for n in named if n not in reserved) or "none"
        raise ConfigError(
            f"unknown argument {unknown[0]!r} for reward {name!r}.  Known: {names}.", key=key
        )
    return named, any_name


def reward_of(
    fn: Callable[..., Any], args: Mapping[str, Any], manager: ManagerArgs, *, name: str, key: str
) -> Reward:
    """The function as a reward, `args` as its keyword arguments.  Raises ConfigError for arguments
    that it does not take.
    """
    check_manager(manager, lists=False, name=name, key=key)
    named, any_name = parameters_of(fn, GIVEN, args, name=name, key=key)
    home = _home(fn, key) if manager.reward_manager == "prime" else None
    takes = GIVEN if any_name else [n for n in GIVEN if n in named]
    try:
        inspect.signature(fn).bind(**dict.fromkeys(takes), **args)
    except TypeError as e:
        raise ConfigError(
            f"reward {name!r} cannot be called with these arguments: {e}", key=key
        ) from None

    async def compute_score(task: Task, transcript: Transcript) -> Score:
        values = {
            "data_source": task.row.get("data_source", task.taskset),
            "solution_str": transcript.turns[-1].completion.written,
            "ground_truth": task.truth,
            "extra_info": task.row.get("extra_info") or {},
        }
        keywords = {n: values[n] for n in takes} | dict(args)
        if home is not None:
            return await _in_process(
                home, fn.__qualname__, keywords, manager.reward_timeout_s or PRIME_TIMEOUT_S
            )
        result = await answer(fn, keywords, manager, name)
        return result if isinstance(result, Score) else to_score(result, name)

    reward = FunctionReward(compute_score)
    return with_acc(reward) if manager.reward_manager == "dapo" else reward


def _home(fn: Callable[..., Any], key: str) -> tuple[str, str]:
    """(file, module) where a worker process finds the function; one of them is empty."""
    if "<" in fn.__qualname__:
        raise ConfigError(
            "reward_manager prime: the function must stand at the top of its file, where a process "
            "can import it",
            key=key,
        )
    file = getattr(sys.modules.get(fn.__module__), "__file__", None)
    return (str(file), "") if fn.__module__.startswith("rft_plugin_") else ("", fn.__module__)


async def _in_process(
    home: tuple[str, str], name: str, keywords: dict[str, Any], timeout_s: float
) -> Score:
    try:
        result = await POOL.call(
            {"file": home[0], "module": home[1], "name": name, "given": keywords}, timeout_s
        )
    except TimeoutError:
        return late(timeout_s)
    return Score(value=result["value"], parts=result["parts"])
