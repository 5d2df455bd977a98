"""Check that a workflow's teacher can score the policy's tokens, and that its prompts fit.

Part of the second stage of `rft.preflight.check`.  Depends on the workflow's argument `teacher` and
its `teacher_messages`; a workflow without them is judged when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rft.algorithm.needs import needs
from rft.config.context import Problems
from rft.config.plan import Plan
from rft.engine.settings import SELF, EngineSettings
from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args
from rft.preflight.compared_prompts import rendered
from rft.preflight.model_folder import ModelFiles
from rft.taskset.chatfiles import ChatFiles, open_chat
from rft.taskset.settings import TasksetSettings
from rft.workflow.recipes import Recipes
from rft.workflow.tools import ELSEWHERE

if TYPE_CHECKING:
    from rft.taskset.base import Taskset

ROWS = 64  # of a taskset whose prompts are counted


def prompts_fit(
    plan: Plan, tasksets: Sequence[Taskset], model: ModelFiles | None, problems: Problems
) -> None:
    """Compare the teacher's prompts that are known before a run with the room for prompt and answer."""
    if model is None or not model.can_count:
        return
    recipes = Recipes()
    for taskset in tasksets:
        if taskset.settings.is_eval or not len(taskset):
            continue
        # the preview tells which programs are not here
        token = ELSEWHERE.set(None if plan.cluster.ray_address is None else [])
        try:
            recipe = recipes.find(taskset.task(0))
        finally:
            ELSEWHERE.reset(token)
        engine = _engine(plan, recipe.keywords.get("teacher"))
        if engine is None:
            continue
        files: ChatFiles = model
        if engine.policy_tokenizer is not None:
            files = open_chat(engine.tokenizer_path or engine.model_path)
        count = min(ROWS, len(taskset))
        lengths = []
        for n in range(count):
            task = taskset.task(n * len(taskset) // count)
            told = tuple(recipe.make().teacher_messages(task))
            if told:
                text = rendered(msgspec.structs.replace(task, messages=told), files, engine)
                lengths.append(files.count_tokens(text))
        room = engine.max_model_len - (engine.engine_type == "vllm")
        answer = taskset.settings.sampling.max_tokens
        if lengths and max(lengths) + answer > room:
            own = engine is plan.engines[0]
            key = "model.max_model_len" if own else "explorer.auxiliary_models"
            text = (
                f"is {engine.max_model_len} for the teacher of {taskset.settings.key}; its prompt "
                f"has up to {max(lengths)} tokens and an answer {answer}: runs whose answer does "
                f"not fit behind it fail.  Write {max(lengths) + answer + engine.max_model_len - room}"
            )
            problems.error(key, text, given=engine.max_model_len)


def _engine(plan: Plan, teacher: Any) -> EngineSettings | None:
    """Return the settings of the engine that scores; None if the workflow names none."""
    if teacher == SELF:
        return plan.engines[0]
    return next((m.engines[0] for m in plan.auxiliary if teacher in m.names), None)


def can_score(plan: Plan, workflow: str, taskset: TasksetSettings, problems: Problems) -> None:
    """Report a teacher that is missing, or cannot score tokens of the policy."""
    teacher = None
    with suppress(ConfigError):  # the check of its arguments reports it
        args = checked_args(REGISTRY.get("workflow", workflow), taskset.workflow_args)
        teacher = args.get("teacher")
    temperature = taskset.sampling.temperature
    if teacher == SELF:
        if (text := _cannot_score_itself(plan.engines[0], temperature, taskset.name)) != "":
            problems.error("explorer.rollout_model.engine_type", text)
        return
    engine_types = {name: m.engines[0].engine_type for m in plan.auxiliary for name in m.names}
    used = {kind for name, kind in engine_types.items() if teacher in (None, name)}
    chosen = [m for m in plan.auxiliary if teacher is None or teacher in m.names][:1]
    for m in chosen:
        if m.unscorable:
            problems.error("explorer.auxiliary_models", m.unscorable, m.engines[0].model_path)
            return
        if text := _cannot_align(plan, m.engines[0], taskset):
            problems.error("explorer.auxiliary_models", f"alignment: text of {m.name} {text}")
            return
    if not engine_types:
        name = teacher or "teacher"
        text = f"{workflow} asks a teacher; name one: [{{name: {name}, model_path: ...}}]"
        problems.error("explorer.auxiliary_models", text)
    elif not used:
        text = (
            f"no model has the name of workflow_args.teacher; the models are "
            f"{', '.join(engine_types)}"
        )
        if teacher == "ema":
            text += (
                ".  A moving average of the policy is one: [{name: ema, model_path: "
                "${model.model_path}, moving_average: 0.99}]"
            )
        problems.error("explorer.auxiliary_models", text, teacher)
    elif temperature != 1 and used == {"vllm"}:
        text = (
            f"is {temperature:g} for {taskset.name}, and a teacher of engine_type vllm has "
            f"log-probs at temperature 1 only; sample at 1, or write engine_type: transformers "
            f"for the teacher"
        )
        problems.error("model.temperature", text)


def _cannot_align(plan: Plan, e: EngineSettings, taskset: TasksetSettings) -> str:
    """Return why a teacher's scores of text cannot be used; "" if they can."""
    if e.policy_tokenizer is None:
        return ""
    algorithm = plan.learner.algorithm
    if needs(algorithm).teacher_top:
        return (
            f"gives one log-prob a token, and {algorithm.policy_loss_fn} reads the most likely "
            f"tokens, which are of the teacher's vocabulary; use on_policy_distill or jsd, or a "
            f"teacher of the policy's family"
        )
    if taskset.format.image_key:
        return f"reads no images, which {taskset.name} has; use a teacher of the policy's family"
    return ""


def _cannot_score_itself(e: EngineSettings, temperature: float, taskset: str) -> str:
    """Return why the policy's engine cannot score the policy's tokens; "" if it can."""
    if e.engine_type == "external":
        return "external gives no log-probs of given tokens; use vllm or transformers"
    if e.engine_type != "vllm":
        return ""
    if temperature != 1:
        return (
            f"vllm scores given tokens at temperature 1 only, and model.temperature is "
            f"{temperature:g} for {taskset}; sample at 1, or use transformers"
        )
    if e.lora_rank is not None:
        return "vllm cannot score given tokens with its LoRA layers; write enforce_eager: true"
    return ""
