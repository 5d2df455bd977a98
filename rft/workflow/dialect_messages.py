"""Anthropic's Messages: blocks in, blocks out.

Invariant: blocks that were given are the messages that chat completions would have; an answer's
blocks, given back in any order and with or without its thoughts, are that answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field

from rft.engine.base import PromptTooLong
from rft.images import data_url
from rft.types.completion import Completion
from rft.workflow.endpoint_answers import ApiAnswer, Dialect, usage
from rft.workflow.endpoint_wire import (
    UNCONSTRAINED,
    ApiBody,
    ApiError,
    ApiRequest,
    Count,
    Part,
    applied,
    in_call_order,
    only,
    stops,
)
from rft.workflow.message_content import image_of, merged, shows, taken, text_of

IGNORED = (
    "betas",
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# what the taskset decides; listed in the header of the answer
UNAPPLIED = ("context_management", "thinking")
NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
# arguments that are no JSON object travel in an object of this one field
TEXT_ARGUMENTS = "arguments_text"
_MAX_BRACKETS = 32  # of arguments that travel as an object; a body has at most 64 levels
# Claude Code puts a line of other numbers before each prompt
_BILLING = "x-anthropic-billing-header:"


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system(content: Any) -> str:
    """Leave out the line that differs in each request."""
    if isinstance(content, list):
        content = [
            block
            for block in content
            if not (isinstance(block, dict) and str(block.get("text")).startswith(_BILLING))
        ]
    return text_of(content)


def _file_of(block: Any) -> bytes:
    """Return the file of a block image.  Raises ValueError."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind != "base64":
        raise ValueError(
            f"an image's source is of type base64, not {kind!r}: nothing is downloaded, and no files "
            f"are kept"
        )
    return data_url.from_base64(source.get("data"))


class TextBlock(Part):
    type: Literal["text"]
    text: str


class ImageBlock(Part):
    type: Literal["image"]
    source: Annotated[Any, BeforeValidator(lambda s: image_of({"source": s}, _file_of))]


class ThoughtBlock(Part):
    """A thought, which is in the tokens of its answer already."""

    type: Literal["thinking", "redacted_thinking"]


class CallBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def call(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": _arguments(self.input)},
        }


class ResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, shows("image", _file_of)] = ""

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "content": self.content, "tool_call_id": self.tool_use_id}


class UserMessage(Part):
    role: Literal["user"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock | ResultBlock, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(_blocks),
    ]

    def messages(self) -> list[dict[str, Any]]:
        """Return the results of calls, then the text and the images."""
        results = [block.message() for block in self.content if isinstance(block, ResultBlock)]
        parts = [
            {"type": "text", "text": block.text}
            if isinstance(block, TextBlock)
            else {"type": "image", "image": block.source}
            for block in self.content
            if not isinstance(block, ResultBlock)
        ]
        return [*results, *([{"role": "user", "content": merged(parts)}] if parts else [])]


class AssistantMessage(Part):
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[TextBlock | ThoughtBlock | CallBlock, Field(discriminator="type")]],
        BeforeValidator(_blocks),
    ]


class SystemMessage(Part):
    role: Literal["system"]
    content: Annotated[str, BeforeValidator(_system)]

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.content}]


class CustomTool(Part):
    type: Annotated[
        Any,
        only(None, "custom", reason="only functions are served, no tools of the server"),
    ] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def chat_form(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        function = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class ToolChoice(Part):
    type: Annotated[str, only("auto", "none", reason=UNCONSTRAINED)]
    disable_parallel_tool_use: bool = False


class OutputConfig(Part):
    format: Annotated[Any, only(None, reason=UNCONSTRAINED)] = None


class MessagesBody(ApiBody):
    """POST /v1/messages, besides IGNORED, UNAPPLIED and NEUTRAL."""

    messages: Annotated[
        list[
            Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
        ],
        Field(min_length=1),
    ]
    max_tokens: Count
    system: Annotated[str, BeforeValidator(_system)] = ""
    stop_sequences: Annotated[Any, AfterValidator(stops)] = ()
    top_k: Count | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


# ---------------------------------------------------------------- requests


def read(body: Any, *, counting: bool = False) -> ApiRequest:
    """Return the request of a body of /v1/messages; `counting`: of /v1/messages/count_tokens, which
    needs no max_tokens.  Raises ApiError 400 that names the field.
    """
    if counting and isinstance(body, dict):
        body = {"max_tokens": 1, **body}
    request, ignored = applied(MessagesBody, body, IGNORED, NEUTRAL, UNAPPLIED)
    if request.messages[-1].role == "assistant":
        text = (
            "messages must not end with one of the assistant: answers are not begun for the model"
        )
        raise ApiError(400, text, param="messages")
    choice = request.tool_choice
    if choice and choice.disable_parallel_tool_use:
        ignored.append("tool_choice.disable_parallel_tool_use")
    if request.output_config:
        ignored.append("output_config")
    sampling = request.model_dump(include={"temperature", "top_p", "top_k"}, exclude_unset=True)
    sampling["max_tokens"] = request.max_tokens
    if request.stop_sequences:
        sampling["stop"] = request.stop_sequences
    tools = None if request.tools is None else tuple(tool.chat_form() for tool in request.tools)
    system = [{"role": "system", "content": request.system}] if request.system else []
    return ApiRequest(
        model=request.model,
        **taken(in_call_order([*system, *_messages(request.messages)])),
        tools=() if choice and choice.type == "none" else tools,
        stream=request.stream,
        sampling=sampling,
        ignored=tuple(ignored),
    )


def _messages(
    messages: Iterable[UserMessage | AssistantMessage | SystemMessage],
) -> list[dict[str, Any]]:
    """Return messages in the form of chat completions; those of the assistant that follow each other
    are one.
    """
    written: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, AssistantMessage):
            written += message.messages()
            continue
        if not written or written[-1]["role"] != "assistant":
            written.append({"role": "assistant", "content": ""})
        answer = written[-1]
        for block in message.content:
            if isinstance(block, TextBlock):
                answer["content"] += block.text
            elif isinstance(block, CallBlock):
                answer.setdefault("tool_calls", []).append(block.call())
    return written


def _arguments(value: dict[str, Any]) -> str:
    text = value.get(TEXT_ARGUMENTS)
    return (
        text if len(value) == 1 and isinstance(text, str) else json.dumps(value, ensure_ascii=False)
    )


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object that a client can give back as it is."""
    try:
        value = json.loads(arguments or "{}")
        msgspec.msgpack.encode(value)  # halves of characters, numbers beyond 64 bits
        json.dumps(value, allow_nan=False)
    except (ValueError, OverflowError, RecursionError):
        value = None
    if not isinstance(value, dict) or arguments.count("{") + arguments.count("[") > _MAX_BRACKETS:
        return {TEXT_ARGUMENTS: arguments}
    return value


# ---------------------------------------------------------------- answers


def message_body(request: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """Return a complete message."""
    (c,) = answer.completions
    counted = usage([c], 1)
    stopped = c.stop_text if c.stop_text in request.sampling.get("stop", ()) else None
    reasons = {"length": "max_tokens", "stop": "stop_sequence" if stopped else "end_turn"}
    reason = "tool_use" if c.tool_calls and c.finish_reason == "stop" else reasons[c.finish_reason]
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _content(c),
        "stop_reason": reason,
        "stop_sequence": stopped,
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "output_tokens": counted["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _content(c: Completion) -> list[dict[str, Any]]:
    """Return the blocks of an answer: its thought, its text, its calls."""
    blocks: list[dict[str, Any]] = []
    if c.reasoning:
        blocks.append({"type": "thinking", "thinking": c.reasoning, "signature": "rft"})
    if c.text:
        blocks.append({"type": "text", "text": c.text})
    for call in c.tool_calls:
        function = call["function"]
        named = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**named, "input": _input(function["arguments"])})
    return blocks


def message_events(request: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """Yield the events of a message: its begin, each block in one piece, its end."""
    message = message_body(request, answer)
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**message["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**message, **begun}}
    for index, block in enumerate(message["content"]):
        place = {"index": index}
        empty, deltas = _pieces(block)
        yield {"type": "content_block_start", **place, "content_block": {**block, **empty}}
        for delta in deltas:
            yield {"type": "content_block_delta", **place, "delta": delta}
        yield {"type": "content_block_stop", **place}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the fields of a block that begin empty, and the pieces that fill them."""
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"])
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {"thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(error: ApiError) -> dict[str, Any]:
    """Return an error in the form of Messages."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    text = str(error)
    if isinstance(long := error.__cause__, PromptTooLong):  # agents read these words and compact
        text = f"prompt is too long: {long.tokens} tokens > {long.limit} maximum; {text}"
    return {"type": "error", "error": {"type": _KINDS.get(error.status, usual), "message": text}}


MESSAGES = Dialect(
    read=read,
    body=message_body,
    events=message_events,
    error=message_error,
    error_event=message_error,
    statuses={503: 529},
)
COUNT = replace(MESSAGES, read=partial(read, counting=True))
