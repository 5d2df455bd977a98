"""Trinity-RFT's Task, made from ours, and the two parts of the configuration that workflows read
from it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft.types import task as ours

if TYPE_CHECKING:
    from rft.extras.migrate.compat.trinity_model import ModelWrapper


@dataclass
class TrinityFormatConfig:
    """How a row becomes a task.  `prompt_key` and `response_key` name columns of `task.raw_task`."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    tools_key: str = "tools"
    system_prompt: str | None = None
    reply_prefix: str | None = None
    chat_template: str | None = None
    enable_thinking: bool | None = None


@dataclass
class GenerationConfig:
    """Sampling; the taskset's `rollout_args`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass
class TrinityTask:
    """What a workflow is given.  `raw_task` is the row; `task_desc` and `truth` are its prompt and
    gold answer.
    """

    workflow: Any = None
    repeat_times: int | None = None
    format_args: TrinityFormatConfig = field(default_factory=TrinityFormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    raw_task: dict[str, Any] | None = None
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    def to_workflow(
        self, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None
    ) -> Any:
        return self.workflow(model=model, task=self, auxiliary_models=auxiliary_models)

    @property
    def task_desc(self) -> Any:
        return (self.raw_task or {}).get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        return (self.raw_task or {}).get(self.format_args.response_key)

    def to_dict(self) -> dict[str, Any]:
        return self.raw_task or {}


def of(task: ours.Task, workflow: type, reward_fn: Any) -> TrinityTask:
    """Ours as Trinity's.  Where prompt or truth are no column of the row, they are put into
    `raw_task` as one.
    """
    raw = copy.deepcopy(task.row)
    form = TrinityFormatConfig(
        prompt_key=_column(
            raw, list(task.messages) or None if task.prompt is None else task.prompt, "prompt"
        ),
        response_key=_column(raw, task.truth, "response"),
        system_prompt=task.system_prompt,
        chat_template=task.chat_template,
    )
    s = task.sampling
    return TrinityTask(
        workflow=workflow,
        repeat_times=task.num_runs,
        format_args=form,
        rollout_args=GenerationConfig(s.temperature, s.top_p, s.top_k, 0, s.max_tokens, 1),
        workflow_args=copy.deepcopy(task.workflow_args),
        reward_fn_args=copy.deepcopy(task.reward_args),
        is_eval=task.is_eval,
        reward_fn=reward_fn,
        raw_task=raw,
        index={"index": task.index, "taskset_id": task.taskset},
    )


def _column(row: dict[str, Any], value: Any, name: str) -> str:
    if value is None:
        return name
    match = next(
        (k for k, v in row.items() if v is value or (type(v) is type(value) and v == value)), None
    )
    if match is None:
        row[name] = value
    return match or name
