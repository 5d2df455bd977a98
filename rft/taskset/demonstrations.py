"""Rows of a taskset as token sequences to imitate: the chat up to the answer, and the answer that the row gives.

Knows the tokenizer's files (`chatfiles`), no losses.  Invariant: the tokens before the answer are those that an engine would be given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rft.errors import ConfigError
from rft.taskset.base import Taskset
from rft.taskset.chatfiles import ChatFiles
from rft.types.experience import Demonstration
from rft.types.ids import ExperienceId
from rft.types.task import Task


def demonstrations(taskset: Taskset, chat: ChatFiles, *, max_tokens: int) -> Iterator[Demonstration]:
    """One demonstration for each row.

    The answer is the chat's last message, where the assistant says it, else the row's gold answer.  Raises ConfigError that names the
    row when there is none, when its tokens are more than `max_tokens`, or when the template writes a chat differently once it goes on.
    """
    for index in range(len(taskset)):
        task = taskset.task(index)
        where = f"row {task.index} of {taskset.settings.name}"
        messages = _with_answer(task, where)
        template = task.chat_template or taskset.settings.format.chat_template
        args = {**taskset.settings.format.chat_template_args, **task.chat_template_args}
        tools = list(task.tools)
        prompt = chat.render(messages[:-1], tools, template=template, **args)
        whole = chat.render(messages, tools, template=template, opening=False, **args)
        if not whole.startswith(prompt):
            raise ConfigError(
                f"{where}: the chat template does not write an answer behind its prompt, so it is not known which tokens to imitate; "
                "give another format.chat_template",
                key="buffer.trainer_input.auxiliary_buffers",
            )
        before, answer = chat.encode_each([prompt, whole[len(prompt) :]])
        if len(before) + len(answer) > max_tokens or not answer:
            raise ConfigError(
                f"{where} has {len(before)} + {len(answer)} tokens; an answer is needed, and at most {max_tokens} in all",
                key="buffer.trainer_input.auxiliary_buffers",
            )
        yield Demonstration(
            id=ExperienceId(0, 0, 0, task.index, 0),
            tokens=np.asarray([*before, *answer], np.int32),
            loss_mask=np.arange(len(before) + len(answer)) >= len(before),
            messages=tuple(messages),
        )


def _with_answer(task: Task, where: str) -> list[dict[str, Any]]:
    messages = task.chat()
    if messages[-1].get("role") == "assistant":
        return messages
    if not isinstance(task.truth, str) or not task.truth:
        raise ConfigError(
            f"{where} has no answer: the chat must end with the assistant, or format.response_key name the answer's text",
            key="buffer.trainer_input.auxiliary_buffers",
        )
    return [*messages, {"role": "assistant", "content": task.truth}]
