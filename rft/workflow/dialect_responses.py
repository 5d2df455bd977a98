"""OpenAI's Responses: items in, items out.

Invariant: items that were given are the messages that chat completions would have; an answer's
items, given back in any order and with or without its thoughts, are that answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

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
)
from rft.workflow.message_content import check_shown, shows, taken, wrong

IGNORED = (
    "client_metadata",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)
# what the taskset decides; listed in the header of the answer
UNAPPLIED = ("reasoning", "parallel_tool_calls")
# would constrain the answer, except with these values
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
}
_TEXT_TYPES = ("input_text", "output_text", "text")
_WITH_INSTRUCTIONS = "_i"  # ends the id of a response whose conversation begins with instructions


def _file_of(part: Any) -> bytes:
    """Return the file of a part input_image.  Raises ValueError."""
    if part.get("file_id") is not None:
        raise ValueError("an image is given in image_url: no files are kept, so file_id names none")
    return data_url.read(part.get("image_url"))


def _texts(content: Any) -> Any:
    """Give parts of texts the type `text`."""
    if isinstance(content, list):
        return [
            part | {"type": "text"}
            if isinstance(part, dict) and part.get("type") in _TEXT_TYPES
            else part
            for part in content
        ]
    return content


def _typed(item: Any) -> Any:
    """Name the type of a message, which may be left out."""
    return {"type": "message"} | item if isinstance(item, dict) else item


Content = Annotated[Any, shows("input_image", _file_of), BeforeValidator(_texts)]


class MessageItem(Part):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @model_validator(mode="after")
    def _check_shown(self) -> Self:
        check_shown(self.role, self.content)
        return self

    def message(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class CallItem(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def call(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ResultItem(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "content": self.output, "tool_call_id": self.call_id}


class ReasoningItem(Part):
    """A thought, which is in the tokens of its answer already."""

    type: Literal["reasoning"]


Item = Annotated[
    Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_typed),
]


class ToolItem(Part):
    type: Annotated[
        str, only("function", reason="only functions are served, no tools of the server")
    ]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def chat_form(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _plain_format(text: dict[str, Any]) -> dict[str, Any]:
    if text.get("format") not in (None, {"type": "text"}):
        raise wrong(f"format other than {{type: text}} is {UNCONSTRAINED}")
    return text


def _no_logprobs(include: list[str]) -> list[str]:
    if "message.output_text.logprobs" in include:
        raise wrong("log-probs of tokens are served by chat completions alone")
    return include


class ResponsesBody(ApiBody):
    """POST /v1/responses, besides IGNORED, UNAPPLIED and NEUTRAL."""

    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(_items)]
    instructions: str = ""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    max_output_tokens: Count | None = None
    tools: list[ToolItem] | None = None
    text: Annotated[dict[str, Any], AfterValidator(_plain_format)] | None = None
    include: Annotated[list[str], AfterValidator(_no_logprobs)] | None = None


# ---------------------------------------------------------------- requests


def read(body: Any) -> ApiRequest:
    """Return the request of a body of /v1/responses.  Raises ApiError 400 that names the field."""
    request, ignored = applied(ResponsesBody, body, IGNORED, NEUTRAL, UNAPPLIED)
    if not (messages := _messages(request.input)):
        raise ApiError(400, "input has thoughts alone; it needs a message", param="input")
    if "verbosity" in (request.text or ()):
        ignored.append("text.verbosity")
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    previous = request.previous_response_id or ""
    call = previous.removeprefix("resp_")
    sampling = request.model_dump(include={"temperature", "top_p"}, exclude_unset=True)
    if request.max_output_tokens:
        sampling["max_tokens"] = request.max_output_tokens
    tools = None if request.tools is None else tuple(tool.chat_form() for tool in request.tools)
    return ApiRequest(
        model=request.model,
        **taken(in_call_order([*([] if previous else system), *messages])),
        tools=() if body.get("tool_choice") == "none" else tools,
        stream=request.stream,
        sampling=sampling,
        previous=call.removesuffix(_WITH_INSTRUCTIONS),
        instructions=request.instructions,
        without_instructions=call.endswith(_WITH_INSTRUCTIONS),
        ignored=tuple(ignored),
        echo={name: value for name, value in body.items() if name in _ECHOED and value is not None},
    )


def _messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the messages of items: the text and the calls of one answer are one message."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, CallItem):
            if answer is None:
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            answer.setdefault("tool_calls", []).append(item.call())
            continue
        message = item.message()
        if message["role"] != "assistant":
            answer = None
        elif answer is not None and not answer["content"]:
            answer["content"] = message["content"]
            continue
        else:
            answer = message
        messages.append(message)
    return messages


# ---------------------------------------------------------------- answers

# fields of the request that its response repeats, with their values where they are not set
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}


def response_body(request: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """Return a complete response."""
    (c,) = answer.completions
    cut = c.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    suffix = _WITH_INSTRUCTIONS if request.instructions else ""
    counted = usage([c], 1)
    return {
        "id": f"resp_{answer.id}{suffix}",
        "object": "response",
        "created_at": int(answer.created),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": request.model,
        "output": _output(answer.id, c, status),
        "temperature": c.sampling.temperature,
        "top_p": c.sampling.top_p,
        "truncation": "disabled",
        "store": True,
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
        **_ECHOED,
        **request.echo,
    }


def _output(id: str, c: Completion, status: str) -> list[dict[str, Any]]:
    """Return the items of an answer: its thought, its text, its calls."""
    items: list[dict[str, Any]] = []
    if c.reasoning:
        thought = {"type": "reasoning_text", "text": c.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": [thought]})
    if c.text or not c.tool_calls:
        text = {"type": "output_text", "text": c.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": status}
        items.append({**message, "content": [text]})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{id}_{i}",
            "call_id": call["id"],
            **call["function"],
            "status": status,
        }
        for i, call in enumerate(c.tool_calls)
    ]
    return items


def response_events(request: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """Yield the events of a response: its begin, each item in one piece, its end."""
    for number, event in enumerate(_events(response_body(request, answer))):
        yield {**event, "sequence_number": number}


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "incomplete_details": None}
    begun |= {"output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        empty: Any = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", **place, "item": added}
        yield from _pieces(item, {**place, "item_id": item["id"]})
        yield {"type": "response.output_item.done", **place, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _pieces(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
        return
    place = {**place, "content_index": 0}
    (part,) = item["content"]
    kind = f"response.{part['type']}"
    more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **more}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **place, "part": part}


def _error_event(error: ApiError) -> dict[str, Any]:
    flat = {"code": error.code, "message": str(error), "param": error.param}
    return {"type": "error", "sequence_number": 0, **flat, **error.body}


RESPONSES = Dialect(read=read, body=response_body, events=response_events, error_event=_error_event)
