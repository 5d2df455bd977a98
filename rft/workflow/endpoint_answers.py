"""Write answers: the dialects of the endpoint, and those of OpenAI's chat and text completions.

Invariant: a dialect translates at the edge; one conversation is the same `ApiRequest` in all.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from rft.types.completion import Completion
from rft.workflow.endpoint_wire import ApiError, ApiRequest, read


@dataclass(frozen=True, kw_only=True)
class ApiAnswer:
    """The answer to a request; `id` and `created` (epoch seconds) stay the same when it is sent
    again.
    """

    completions: Sequence[Completion]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API: `read` checks a body; `body`, `events` and `error` write.

    `statuses`: HTTP statuses that this API has for ours.  `end`: what ends a stream.
    """

    read: Callable[[Any], ApiRequest]
    body: Callable[[ApiRequest, ApiAnswer], dict[str, Any]]
    events: Callable[[ApiRequest, ApiAnswer], Iterable[dict[str, Any]]]
    error: Callable[[ApiError], dict[str, Any]] = attrgetter("body")
    error_event: Callable[[ApiError], dict[str, Any]] = attrgetter("body")
    statuses: Mapping[int, int] = field(default_factory=dict)
    end: bytes = b""

    def stream(self, request: ApiRequest, answer: ApiAnswer) -> bytes:
        """Write an answer as server-sent events."""
        return b"".join(map(server_sent, self.events(request, answer))) + self.end


def server_sent(event: Mapping[str, Any]) -> bytes:
    """Write one event, named by its type if it has one."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def chat_body(request: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """Return a complete chat.completion."""
    body = _head(request, answer, "chat.completion", "chatcmpl")
    body["choices"] = []
    for i, c in enumerate(answer.completions):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": c.text if c.text or not c.tool_calls else None,
            "refusal": None,
        }
        if c.reasoning:
            message["reasoning_content"] = c.reasoning
        if c.tool_calls:
            message["tool_calls"] = list(c.tool_calls)
        choice = {
            "index": i,
            "message": message,
            "finish_reason": _finish_reason(c),
            "logprobs": _chat_logprobs(c) if request.logprobs else None,
        }
        if request.token_ids:
            choice["token_ids"] = c.tokens.tolist()
        body["choices"].append(choice)
    body["usage"] = usage(answer.completions, request.n)
    if request.token_ids:
        body["prompt_token_ids"] = answer.completions[0].prompt_tokens.tolist()
    return body


def chat_chunks(request: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """Yield the answer as chat.completion.chunk: of each choice its role, text, tool calls and
    finish reason; then the usage.
    """
    head = _head(request, answer, "chat.completion.chunk", "chatcmpl")
    if request.usage_in_stream:
        head["usage"] = None

    def chunk(i: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None} | fields
        return head | {"choices": [choice]}

    for i, c in enumerate(answer.completions):
        first = chunk(i, {"role": "assistant", "content": ""})
        if request.token_ids:
            first["prompt_token_ids"] = c.prompt_tokens.tolist()
        yield first
        if c.reasoning:
            yield chunk(i, {"reasoning_content": c.reasoning})
        fields: dict[str, Any] = {}
        if request.logprobs:
            fields["logprobs"] = _chat_logprobs(c)
        if request.token_ids:
            fields["token_ids"] = c.tokens.tolist()
        yield chunk(i, {"content": c.text}, **fields)
        if c.tool_calls:
            yield chunk(
                i, {"tool_calls": [{"index": k, **call} for k, call in enumerate(c.tool_calls)]}
            )
        yield chunk(i, {}, finish_reason=_finish_reason(c))
    if request.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, request.n)}


def text_body(request: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """Return a complete text_completion."""
    return _head(request, answer, "text_completion", "cmpl") | {
        "choices": [_text_choice(request, i, c) for i, c in enumerate(answer.completions)],
        "usage": usage(answer.completions, request.n),
    }


def text_chunks(request: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """Yield the answer as text_completion, one choice each; then the usage."""
    head = _head(request, answer, "text_completion", "cmpl")
    for i, c in enumerate(answer.completions):
        yield head | {"choices": [_text_choice(request, i, c)]}
    if request.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, request.n)}


def _head(request: ApiRequest, answer: ApiAnswer, kind: str, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": int(answer.created),
        "model": request.model,
    }


def _finish_reason(c: Completion) -> str:
    return "tool_calls" if c.tool_calls and c.finish_reason == "stop" else c.finish_reason


def _token_names(c: Completion) -> list[str]:
    # only the engine has the texts of single tokens
    return [f"token_id:{t}" for t in c.tokens.tolist()]


def _chat_logprobs(c: Completion) -> dict[str, Any]:
    pairs = zip(_token_names(c), c.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs
        ],
        "refusal": None,
    }


def _text_choice(request: ApiRequest, i: int, c: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": i,
        "text": c.text,
        "finish_reason": c.finish_reason,
        "logprobs": None,
    }
    if request.logprobs:
        choice["logprobs"] = {
            "tokens": _token_names(c),
            "token_logprobs": c.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": [],
        }
    if request.token_ids:
        choice["token_ids"] = c.tokens.tolist()
        choice["prompt_token_ids"] = c.prompt_tokens.tolist()
    return choice


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Count tokens; the `n` answers to one prompt count it once."""
    sizes = [c.usage or (len(c.prompt_tokens), len(c.tokens)) for c in completions]
    prompt = sum(size[0] for size in sizes[::n])
    answer = sum(size[1] for size in sizes)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


_DONE = b"data: [DONE]\n\n"
CHAT = Dialect(read=partial(read, chat=True), body=chat_body, events=chat_chunks, end=_DONE)
TEXT = Dialect(read=partial(read, chat=False), body=text_body, events=text_chunks, end=_DONE)
