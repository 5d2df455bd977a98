"""Preview tasks: rows through the chat template, prompt lengths, the reward of the gold answer,
overlap of train and eval.

Depends on no engine.  Plugins must be loaded.  Invariant: nothing is generated; only the task's own
gold answer is scored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rft.config.context import Problems
from rft.config.plan import Plan
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, PluginError, SetupError
from rft.explorer.stored import transcript
from rft.preflight import judge_questions
from rft.preflight.compared_prompts import overlap, rendered
from rft.preflight.conversation_check import left_out, left_out_later
from rft.preflight.gold_answers import check_gold_answer, score_gold_answers, unreadable_message
from rft.preflight.model_folder import ModelFiles
from rft.reward.base import Reward
from rft.taskset.base import Taskset
from rft.taskset.chatfiles import ImageTokens
from rft.taskset.settings import TasksetSettings
from rft.taskset.task_pipeline import PreparedRows, opened, prepare
from rft.types.task import Task
from rft.workflow.recipes import (
    Recipes,
    refuse_group_reward,
    refuse_missing_reward,
    refuse_unused_reward,
)
from rft.workflow.tools import ELSEWHERE

ROWS_COUNTED = 200
ROWS_SCORED = 8  # rows spread over a set whose gold answers are scored, and the time limit for it
GOLDS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class RowPreview:
    index: int
    prompt: str  # after the chat template
    tokens: int | None
    truth: Any
    gold_reward: float | None = None
    images: tuple[str, ...] = ()  # size and tokens of each


@dataclass(frozen=True, kw_only=True)
class TasksetPreview:
    name: str
    key: str
    num_rows: int
    is_eval: bool
    rows: tuple[RowPreview, ...]
    workflows: tuple[str, ...] = ()  # of the previewed rows; they may add to the prompts
    mean_prompt_tokens: float | None = None
    max_prompt_tokens: int | None = None
    max_image_tokens: int | None = None  # of a prompt
    # mean tokens of a training row, and mean trained tokens of it
    mean_tokens: float | None = None
    mean_trained_tokens: float | None = None


@dataclass
class Look:
    """The opened tasksets and their previews."""

    tasksets: list[TasksetPreview] = field(default_factory=list)
    opened: list[Taskset] = field(default_factory=list)


def look(plan: Plan, model: ModelFiles | None, problems: Problems) -> Look:
    """Open every taskset of the plan."""
    away: list[str] = []  # programs that only explorers' machines may have
    token = ELSEWHERE.set(None if plan.cluster.ray_address is None else away)
    try:
        return _look(plan, model, problems)
    finally:
        ELSEWHERE.reset(token)
        for program in away:
            problems.warn(f"{program}.  Explorers that run on other machines need it there")


def _look(plan: Plan, model: ModelFiles | None, problems: Problems) -> Look:
    result = Look()
    recipes = Recipes()
    hung: set[str] = set()  # rewards that took too long
    prepared = _prepared(plan, problems)
    if plan.task_pipeline is not None and prepared is None:
        return result
    for settings in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets):
        key = settings.key
        try:
            taskset = opened(settings, plan.task_pipeline, prepared)
            tasks = [taskset.task(i) for i in range(min(2, len(taskset)))]
            rewards = [recipes.find(task).reward for task in tasks]
            for task in tasks:
                refuse_unused_reward(recipes.find(task), task)
                refuse_missing_reward(recipes.find(task), task)
            _every_name(taskset, recipes)
            if plan.explorer.baseline and not settings.is_eval:
                for index in {*range(len(tasks)), *taskset.rewards().values()}:
                    refuse_group_reward(recipes.find(taskset.task(index)), taskset.task(index))
            models = {name: m for m in plan.auxiliary for name in m.names}
            for reward in (
                *rewards,
                *(recipes.find(taskset.task(i)).reward for i in taskset.rewards().values()),
            ):
                if reward is not None:
                    reward.check_models(models, {name: m.task for name, m in models.items()})
            for line in dict.fromkeys(
                line for reward in rewards if reward is not None for line in reward.remarks()
            ):
                problems.note(f"{key}: {line}")
            if settings.feature_keys:
                taskset.features(settings.feature_keys)
        except (ConfigError, SetupError) as e:
            problems.add_errors(
                placed(e, settings) if isinstance(e, ConfigError) else ConfigError(str(e), key=key)
            )
            continue
        if taskset.skipped is not None:
            problems.warn(f"{key}: {taskset.skipped}")
        if taskset.left_out is not None:
            problems.note(f"{key}: {taskset.left_out}")
        rows, lengths = _rows(plan, taskset, tasks, rewards, model, problems, hung)
        _tools_shown(plan, tasks, recipes, model, key, problems)
        if model is not None and (
            omission := left_out_later(
                tasks[0], model, plan.engines[0], recipes.find(tasks[0]).keywords
            )
        ):
            problems.error(key, omission)
        _more_golds(taskset, recipes, key, problems, hung)
        preview = TasksetPreview(
            name=settings.name,
            key=key,
            num_rows=len(taskset),
            is_eval=settings.is_eval,
            rows=tuple(rows),
            workflows=tuple(
                dict.fromkeys(
                    t.workflow for t in tasks if t.workflow != "simple_workflow" or t.workflow_args
                )
            ),
            **lengths,
        )
        result.tasksets.append(preview)
        result.opened.append(taskset)
    overlap(result.opened, problems)
    return result


def _prepared(plan: Plan, problems: Problems) -> PreparedRows | None:
    """Return the output of the task pipeline in memory, without writing it."""
    if plan.task_pipeline is None:
        return None
    try:
        prepared = prepare(plan.task_pipeline)
    except ConfigError as e:
        problems.add_errors(e)
        return None
    problems.note(
        f"data_processor.task_pipeline: "
        f"{prepared}{'' if prepared.reused else f'; goes into {plan.task_pipeline.output}'}"
    )
    return prepared


def _every_name(taskset: Taskset, recipes: Recipes) -> None:
    """Find all workflows and rewards that rows name.

    Raises ConfigError naming the row and the unknown name.
    """
    path = taskset.settings.path
    name = taskset.settings.name
    column = taskset.settings.format.reward_fn_key
    no_reward = (
        f"in column {column!r}, which is neither a reward nor a data source that has one here "
        "(docs/howto/reward.md).  Name a reward in "
        "default_reward_fn_type, e.g. path/file.py:compute_score, or correct the column."
    )
    for key, rows_by_name in (
        ("reward_fn_key", taskset.rewards()),
        ("workflow_key", taskset.workflows()),
    ):
        for value, index in rows_by_name.items():
            try:
                recipes.find(taskset.task(index))
            except PluginError as e:
                where = f"row {taskset.task(index).index} of {path}"
                if key == "workflow_key":
                    text = f"{where} names the workflow {value!r}: {e.message}"
                else:
                    text = f"{where} has {value!r} {no_reward}  ({e.message.partition('.')[0]})"
                raise ConfigError(text, key=f"taskset {name}.format.{key}", given=value) from None


def _check_reward(plan: Plan, reward: Reward, task: Task, key: str, problems: Problems) -> None:
    """Let the reward check a task with its gold answer, and its models have room for it."""
    models = {name: m for m in plan.auxiliary for name in m.names}
    try:
        reward.check_task(task, transcript(task, str(task.truth)))
        judge_questions.fit(reward, task, models, key, problems)
    except ConfigError as e:
        problems.error(f"{key}.reward_fn_args.{e.key}".rstrip("."), e.message, given=e.given)
    except Exception as e:  # of a plugin
        problems.warn(
            f"{key}: the reward {task.reward} raised {type(e).__name__}: {e}  (for the gold answer "
            f"of row {task.index})"
        )


def _rows(
    plan: Plan,
    taskset: Taskset,
    tasks: Sequence[Task],
    rewards: Sequence[Reward | None],
    model: ModelFiles | None,
    problems: Problems,
    hung: set[str],
) -> tuple[list[RowPreview], dict[str, Any]]:
    engine = plan.engines[0]
    limit = plan.engines[0].max_prompt_tokens
    key = taskset.settings.key
    lengths, rows = list[int](), []
    images = ImageTokens(taskset.settings, engine.model_path, engine.image_processor_args)
    count = min(ROWS_COUNTED, len(taskset)) if model is not None and model.can_count else len(tasks)
    for n in range(count):
        spread = n if n < len(tasks) else n * len(taskset) // count
        try:
            task = tasks[n] if n < len(tasks) else taskset.task(spread)
            text, tokens = _prompt(task, model, engine, images)
        except ConfigError as e:
            problems.add_errors(placed(e, taskset.settings))
            break
        except ValueError:
            break  # the workflow builds its own prompt from the row
        if model is not None and (omission := left_out(task, model, engine)):
            problems.error(key, f"row {task.index}: {omission}")
            break
        lengths += [tokens] if tokens is not None else []
        if n == 0 and taskset.settings.format.prompt_key == "instruction" and task.row.get("input"):
            problems.warn(
                f"{key}: rows have a column 'input' beside 'instruction', as Alpaca's have, and the "
                f"model does not see it; write both into one column"
            )
        if n == 0 and task.messages and task.messages[-1]["role"] == "assistant":
            problems.warn(
                f"{key}: the chat of row {task.index} ends with an answer, which the model reads "
                f"before it answers"
            )
        if n == 0 and rewards and rewards[0] is not None:
            _check_reward(plan, rewards[0], task, key, problems)
        if n < len(tasks):
            gold = check_gold_answer(task, rewards[n], key, problems, hung)
            rows.append(
                RowPreview(
                    index=task.index,
                    prompt=text,
                    tokens=tokens,
                    truth=task.truth,
                    gold_reward=gold,
                    images=described(images, task) if model is not None else (),
                )
            )
    cut = taskset.settings.prompt_truncation
    if limit is not None and lengths and min(lengths) > limit and cut == "error":
        problems.error(
            "model.max_prompt_tokens",
            f"is {limit}, but every prompt of {key} that was inspected is longer (from "
            f"{min(lengths)} tokens); raise it",
            given=limit,
        )
    elif limit is not None and (over := sum(n > limit for n in lengths)):
        problems.warn(
            f"{key}: {over} of {len(lengths)} rows inspected have prompts of more than "
            f"model.max_prompt_tokens {limit} (longest: "
            f"{max(lengths)}); "
            f"{'their runs will fail.  Raise it' if cut == 'error' else f'they are cut (prompt_truncation_side: {cut})'}"
        )
    return rows, _lengths(lengths, images.most)


def _lengths(tokens: list[int], of_images: int) -> dict[str, Any]:
    if not tokens:
        return {}
    return {
        "mean_prompt_tokens": float(np.mean(tokens)),
        "max_prompt_tokens": max(tokens),
        "max_image_tokens": of_images,
    }


def _prompt(
    task: Task, model: ModelFiles | None, engine: EngineSettings, images: ImageTokens
) -> tuple[str, int | None]:
    """Return the prompt and its tokens, those of images included."""
    if model is None:
        return json.dumps(task.chat(), ensure_ascii=False), None
    more = images.beyond(task, model) if model.can_count else 0
    text = rendered(task, model, engine)
    images.expand(task, task.messages, [text])  # the template has a place for each
    return text, model.count_tokens(text) + more if model.can_count else None


def described(images: ImageTokens, task: Task) -> tuple[str, ...]:
    sizes = ((*image.size, image.num_tokens) for image in images.read(task).values())
    return tuple(f"{width} x {height} pixels, {tokens} tokens" for width, height, tokens in sizes)


def _tools_shown(
    plan: Plan,
    tasks: Sequence[Task],
    recipes: Recipes,
    model: ModelFiles | None,
    key: str,
    problems: Problems,
) -> None:
    """Warn if the model would not see its tools, or no part reads its tool calls."""
    reads, engine = recipes.find(task := tasks[0]).keywords.get("tools_in"), plan.engines[0]
    if (
        reads is None
        and any(t.tools for t in tasks)
        and engine.tool_call_parser is None
        and engine.external is None
    ):
        problems.warn(
            f"{key}: rows bring tools, and calls of them stay text in the answers.  Write "
            "explorer.rollout_model.tool_call_parser, or use tool_workflow, which reads them there"
        )
    if model is None or reads != "template":
        return
    name = "a_tool_of_rft_check"
    tool = {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    with suppress(ConfigError, ValueError):  # reported above
        if name not in rendered(
            msgspec.structs.replace(task, tools=(tool,)), model, plan.engines[0]
        ):
            problems.warn(
                f"{key}: the chat template does not show tools, so the model is not told of them.  "
                f"Use one that does, or tool_workflow "
                "with workflow_args.tools_in: system"
            )


def _more_golds(
    taskset: Taskset, recipes: Recipes, key: str, problems: Problems, hung: set[str]
) -> None:
    """Score gold answers of a few rows spread over the set within a time limit; `rft data audit`
    scores all of them.
    """
    until = time.monotonic() + GOLDS_S
    low = []
    checked = 0
    for i in dict.fromkeys(n * len(taskset) // ROWS_SCORED for n in range(1, ROWS_SCORED)):
        if i < 2 or time.monotonic() > until:
            continue
        try:
            task = taskset.task(i)
            score = score_gold_answers([task], [recipes.find(task).reward], hung=hung)[0]
        except (ConfigError, PluginError) as e:
            problems.warn(f"{key}: row {i} cannot be played: {e}")
            return
        checked += score is not None
        if score is not None and score.unreadable:
            problems.error(key, unreadable_message(task, score))
            return
        if score is not None and not score.full:
            low.append(score)
    if low:
        scores = (
            low[0].failure("it")
            if low[0].failed
            else f"scores {low[0].best:g}, an empty one {low[0].empty:g}"
        )
        problems.warn(
            f"{key}: {len(low)} of {checked} further gold answers do not get full marks, e.g. that "
            f"of row {low[0].index} {scores}; "
            "`rft data audit` scores all of them"
        )


def placed(error: ConfigError, settings: TasksetSettings) -> ConfigError:
    """Replace the taskset's name in an error's key by its config key."""
    prefix = f"taskset {settings.name}"
    # rewards and workflows know no taskset
    of_plugin = error.key.startswith(("reward_fn_args", "workflow_args"))
    named = f"{prefix}.{error.key}" if of_plugin else error.key
    key = (
        settings.key + named.removeprefix(prefix)
        if named.startswith(prefix)
        else named or settings.key
    )
    return ConfigError(error.message, key=key, given=error.given)
