"""Check that the chat template writes every message of a workflow's conversation.

Depends on templates and the arguments of workflows, on no engine.  Invariant: nothing is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.preflight.model_folder import ModelFiles
from rft.taskset.chatfiles import ChatFiles
from rft.types.task import Task
from rft.types.written import MessageLeftOut, Render, behind_answer, check_written, way_out

_ANSWER = {"role": "assistant", "content": "An answer."}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "a_tool_of_rft_check", "arguments": "{}"},
}


def renderer(task: Task, model: ChatFiles, engine: EngineSettings) -> Render:
    """Return the chat template as the engine uses it for this task."""
    template = task.chat_template or engine.chat_template
    values = {**engine.chat_template_kwargs, **task.chat_template_args}
    return partial(model.render, tools=list(task.tools), template=template, **values)


def left_out(task: Task, model: ModelFiles, engine: EngineSettings) -> str:
    """Describe what the template omits of the task's own messages; "" if nothing.

    Raises ValueError if the workflow builds its own messages.
    """
    chat = task.chat()
    try:
        check_written(chat, renderer(task, model, engine))
    except MessageLeftOut as e:
        return str(e)
    return ""


def left_out_later(
    task: Task, model: ModelFiles, engine: EngineSettings, arguments: Mapping[str, Any]
) -> str:
    """Describe what the template omits after the first answer of a workflow with several turns; ""
    if nothing.
    """
    if arguments.get("max_turns", 1) < 2:
        return ""
    try:
        chat = task.chat()
    except ValueError:  # the workflow builds its own prompt
        chat = [{"role": "user", "content": "A question."}]
    role = arguments.get("result_role", "user")
    called = role == "tool" and engine.tool_call_parser is not None
    answer = {**_ANSWER, "tool_calls": [_CALL]} if called else _ANSWER
    reply = {"role": role, "content": "A reply."} | (
        {"tool_call_id": _CALL["id"], "name": "a_tool_of_rft_check"} if called else {}
    )
    messages = [*chat, answer, reply]
    render = renderer(task, model, engine)
    try:
        render(chat)
    except ConfigError:  # another check reports this error
        return ""
    try:
        behind_answer(messages, len(chat), render)
    except MessageLeftOut as e:
        return str(e)
    except ConfigError as e:
        return f"{e.message}; {way_out(messages)}"
    return ""
