"""OpenAI's request and answer bodies, as far as they are served: what is asked is checked field by field, nothing is dropped in silence.

Knows no server and no engine.  Invariant: a request is understood wholly or refused with the name of the field.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft.types.completion import Completion

MAX_BYTES = 16 << 20  # of a body
MAX_VALUES = 1 << 20  # in a body: numbers, texts, lists, objects
MAX_DEPTH = 64
MAX_N = 128
MAX_STOPS, MAX_STOP_CHARS = 64, 1000
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # the last one may not be closed
_BRACKETS = re.compile(rb"[\[\]{}]")
_TOLD = 80  # characters of a wrong value that are repeated
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_IGNORED = {  # say nothing about the answer
    "model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "return_tokens_as_token_ids", "timeout",
}  # fmt: skip
_MOST, _MOST_SEED = (1 << 31) - 1, (1 << 62) - 1
_NUMBERS: dict[str, tuple[type, float, float]] = {  # kind, least, most
    "temperature": (float, 0, 100), "top_p": (float, 0, 1), "top_k": (int, -1, _MOST), "min_p": (float, 0, 1),
    "presence_penalty": (float, -2, 2), "frequency_penalty": (float, -2, 2), "repetition_penalty": (float, 0.01, 100),
    "min_tokens": (int, 0, _MOST), "max_tokens": (int, 1, _MOST), "max_completion_tokens": (int, 1, _MOST), "seed": (int, 0, _MOST_SEED),
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that would constrain the answer, with the values that do not
    "response_format": ({"type": "text"},), "logit_bias": ({},), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,),
    "top_logprobs": (0,), "modalities": (["text"],), "echo": (False,), "best_of": (1,), "suffix": ("",), "add_special_tokens": (False,),
}  # fmt: skip
_OURS = {
    "messages", "prompt", "tools", "n", "stream", "stream_options", "logprobs", "stop", "ignore_eos", "chat_template_kwargs",
    "return_token_ids",
}  # fmt: skip


class ApiError(Exception):
    """An answer in OpenAI's error form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_s: float | None = None
    ) -> None:
        """`retry_s`: the client may try again then."""
        super().__init__(message)
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}

    @property
    def body(self) -> dict[str, Any]:
        kind = (
            "server_error"
            if self.status >= 500
            else "authentication_error"
            if self.status == 401
            else "rate_limit_error"
            if self.status == 429
            else "invalid_request_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked request.  `prompts`: texts or token ids of /v1/completions; else `messages` are set.

    `sampling` holds fields of SamplingArgs that the request names.
    """

    model: str
    messages: tuple[dict[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None  # None: not named
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ApiAnswer:
    """What a request got; `id` and `created` (epoch seconds) are the same when it is sent again."""

    completions: Sequence[Completion]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)


def parse(body: bytes) -> Any:
    """The JSON value of a body.  Raises ApiError 413 or 400 before more is made of it than its bytes."""
    if len(body) > MAX_BYTES:
        raise ApiError(413, f"the body has {len(body)} bytes; at most {MAX_BYTES} are taken")
    opened = body.count(b"[") + body.count(b"{")
    if opened > MAX_DEPTH or opened + body.count(b",") > MAX_VALUES:  # else it cannot be too large or too deep
        _check_size(_TEXTS.sub(b"", body))
    try:
        return json.loads(body.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {str(e)[:200]}") from None


def _check_size(structure: bytes) -> None:
    """Raises ApiError 413 for too many values, or too deep ones; `structure` is a body without its texts."""
    opened = structure.count(b"[") + structure.count(b"{")
    if structure.count(b"]") + structure.count(b"}") > opened:
        raise ApiError(400, "the body is not JSON: it closes more lists and objects than it opens")
    values = opened + structure.count(b",")
    if values > MAX_VALUES:
        raise ApiError(413, f"the body has about {values} values; at most {MAX_VALUES} are taken")
    depth = 0
    for mark in _BRACKETS.finditer(structure):
        depth += 1 if mark[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(413, f"lists and objects of the body are nested deeper than {MAX_DEPTH}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def read(body: Any, *, chat: bool) -> ApiRequest:
    """What a body of /v1/chat/completions (or /v1/completions) asks.  Raises ApiError 400 that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {k: v for k, v in body.items() if v is not None}
    for name, neutral in _NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise ApiError(
                400,
                f"{name} {_shown(given[name])} is not served: the model's answer is recorded as it was sampled, without "
                f"constraints; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    known = _OURS | _IGNORED | _NUMBERS.keys() | _NEUTRAL.keys()
    if unknown := sorted(given.keys() - known):
        raise ApiError(400, f"unknown field {_shown(unknown[0])}", param=unknown[0][:_TOLD], code="unknown_parameter")
    options = _of(given, "stream_options", dict, {})
    n = _of(given, "n", int, 1)
    if not 1 <= n <= MAX_N:
        raise ApiError(400, f"n is {n}; it must be from 1 to {MAX_N}", param="n")
    logprobs = given.get("logprobs", False)
    if not isinstance(logprobs, bool) and (chat or logprobs not in (0, 1)):
        raise ApiError(400, f"logprobs is {_shown(logprobs)}; only the written token's log-prob is known", param="logprobs")
    tools = None if given.get("tool_choice") != "none" else ()
    return ApiRequest(
        model=_of(given, "model", str, "policy"),
        messages=_messages(given.get("messages")) if chat else (),
        prompts=() if chat else _prompts(given.get("prompt")),
        tools=_tools(given["tools"]) if "tools" in given and tools is None else tools,
        n=n,
        stream=_of(given, "stream", bool, False),
        usage_in_stream=bool(options.get("include_usage")),
        logprobs=logprobs is not False,
        token_ids=_of(given, "return_token_ids", bool, False),
        chat_template_args=_of(given, "chat_template_kwargs", dict, {}),
        sampling=_sampling(given),
    )


def _shown(value: Any) -> str:
    return json.dumps(value)[:_TOLD]


def _of(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"{name} is {_shown(value)}; it must be of type {kind.__name__}", param=name)
    return value


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _number(name, given[name]) for name in _NUMBERS if name in given}
    if "max_completion_tokens" in found:
        found["max_tokens"] = found.pop("max_completion_tokens")
    if "stop" in given:
        stop = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(_is_stop(s) for s in stop):
            raise ApiError(
                400,
                f"stop must be a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters",
                param="stop",
            )
        found["stop"] = tuple(stop)
    if "ignore_eos" in given:
        found["ignore_eos"] = _of(given, "ignore_eos", bool, False)
    return found


def _number(name: str, value: Any) -> Any:
    kind, least, most = _NUMBERS[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (kind is float and isinstance(value, float))):
        raise ApiError(400, f"{name} is {_shown(value)}; it must be a {'whole ' if kind is int else ''}number", param=name)
    if not least <= value <= most or (name == "top_p" and value == 0) or (name == "top_k" and value == 0):
        raise ApiError(400, f"{name} is {_shown(value)}; it must be from {least} to {most}", param=name)
    return kind(value)


def _is_stop(given: Any) -> bool:
    return isinstance(given, str) and 0 < len(given) <= MAX_STOP_CHARS


def _messages(given: Any) -> tuple[dict[str, Any], ...]:
    """In one form, so that what a client sends back is equal to what it was given: content a text, no empty fields."""
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return tuple(_message(m, i) for i, m in enumerate(given))


def _message(given: Any, i: int) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or given["role"] not in _ROLES:
        raise ApiError(400, f"{where} must be an object with a role out of {', '.join(sorted(_ROLES))}", param=where)
    role = "system" if given["role"] == "developer" else given["role"]
    made: dict[str, Any] = {"role": role, "content": _text(given.get("content"), f"{where}.content")}
    if given.get("function_call"):
        raise ApiError(400, f"{where}.function_call is the older form; use tool_calls", param=where)
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls must be a list", param=where)
        made["tool_calls"] = [_call(c, f"{where}.tool_calls[{k}]") for k, c in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if not isinstance(value := given.get(name) or "", str):
            raise ApiError(400, f"{where}.{name} must be a text", param=where)
        if value:
            made[name] = value
    return made


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(p) for p in content):
        return "".join(p.get("text", "") for p in content)
    raise ApiError(400, f"{where} must be a text or a list of text parts; images and sound are not served", param=where)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text", ""), str)


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must be an object with id, type and function {{name, arguments}}", param=where)
    called = {"name": function["name"], "arguments": function.get("arguments", "{}")}
    if not isinstance(called["arguments"], str | dict) or not isinstance(given.get("id") or "", str):
        raise ApiError(400, f"{where}: id must be a text, function.arguments JSON text or an object", param=where)
    return {"id": given.get("id") or "", "type": "function", "function": called}


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise ApiError(400, "tools must be a list", param="tools")
    for i, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ApiError(400, f"tools[{i}] must be {{type: function, function: {{name, ...}}}}", param=f"tools[{i}]")
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, dict):
            raise ApiError(400, f"tools[{i}].function: name must be a text and parameters an object", param=f"tools[{i}]")
    return tuple(given)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    several = given if isinstance(given, list) and given and isinstance(given[0], list | str) else [given]
    if len(several) > MAX_N:
        raise ApiError(400, f"prompt has {len(several)} prompts; at most {MAX_N} are taken", param="prompt")
    return tuple(_prompt(p) for p in several)


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(t) is int and 0 <= t <= _MOST for t in given):
        return tuple(given)
    raise ApiError(
        400, f"prompt must be a text, a list of token ids (whole numbers from 0 to {_MOST}), or a list of these", param="prompt"
    )


# ---------------------------------------------------------------- answers


def chat_body(asked: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """A whole chat.completion."""
    return _head(asked, answer, "chat.completion", "chatcmpl") | {
        "choices": [
            {"index": i, "message": _said(c), "finish_reason": _reason(c), "logprobs": _chat_logprobs(c) if asked.logprobs else None}
            | ({"token_ids": c.tokens.tolist()} if asked.token_ids else {})
            for i, c in enumerate(answer.completions)
        ],
        "usage": usage(answer.completions, asked.n),
    } | ({"prompt_token_ids": answer.completions[0].prompt_tokens.tolist()} if asked.token_ids else {})  # fmt: skip


def chat_chunks(asked: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """The same as chat.completion.chunk: for each choice its role, its text, its tool calls, then why it ended; then the usage."""
    head = _head(asked, answer, "chat.completion.chunk", "chatcmpl") | ({"usage": None} if asked.usage_in_stream else {})

    def chunk(i: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": i, "delta": delta, "finish_reason": reason, "logprobs": None} | more]}

    for i, c in enumerate(answer.completions):
        first = chunk(i, {"role": "assistant", "content": ""})
        yield first | ({"prompt_token_ids": c.prompt_tokens.tolist()} if asked.token_ids else {})
        if c.reasoning:
            yield chunk(i, {"reasoning_content": c.reasoning})
        more: dict[str, Any] = {"logprobs": _chat_logprobs(c)} if asked.logprobs else {}
        yield chunk(i, {"content": c.text}, **more, **({"token_ids": c.tokens.tolist()} if asked.token_ids else {}))
        if c.tool_calls:
            yield chunk(i, {"tool_calls": [{"index": k, **call} for k, call in enumerate(c.tool_calls)]})
        yield chunk(i, {}, _reason(c))
    if asked.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, asked.n)}


def text_body(asked: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """A whole text_completion."""
    choices = [_text_choice(asked, i, c) for i, c in enumerate(answer.completions)]
    return _head(asked, answer, "text_completion", "cmpl") | {"choices": choices, "usage": usage(answer.completions, asked.n)}


def text_chunks(asked: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    head = _head(asked, answer, "text_completion", "cmpl")
    for i, c in enumerate(answer.completions):
        yield head | {"choices": [_text_choice(asked, i, c)]}
    if asked.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, asked.n)}


def _head(asked: ApiRequest, answer: ApiAnswer, kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer.id}", "object": kind, "created": int(answer.created), "model": asked.model}


def _said(c: Completion) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": c.text if c.text or not c.tool_calls else None, "refusal": None}
    if c.reasoning:
        made["reasoning_content"] = c.reasoning
    return made | ({"tool_calls": list(c.tool_calls)} if c.tool_calls else {})


def _reason(c: Completion) -> str:
    return "tool_calls" if c.tool_calls and c.finish_reason == "stop" else c.finish_reason


def _names(c: Completion) -> list[str]:
    return [f"token_id:{t}" for t in c.tokens.tolist()]  # the words of single tokens are known to the engine alone


def _chat_logprobs(c: Completion) -> dict[str, Any]:
    pairs = zip(_names(c), c.logprobs.tolist(), strict=True)
    return {"content": [{"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs], "refusal": None}


def _text_choice(asked: ApiRequest, i: int, c: Completion) -> dict[str, Any]:
    told = {"tokens": _names(c), "token_logprobs": c.logprobs.tolist(), "top_logprobs": None, "text_offset": []}
    made = {"index": i, "text": c.text, "finish_reason": c.finish_reason, "logprobs": told if asked.logprobs else None}
    return made | ({"token_ids": c.tokens.tolist(), "prompt_token_ids": c.prompt_tokens.tolist()} if asked.token_ids else {})


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Tokens; the `n` answers to one prompt count it once."""
    size: Callable[[Completion], tuple[int, int]] = lambda c: c.usage or (len(c.prompt_tokens), len(c.tokens))  # noqa: E731
    prompt = sum(size(c)[0] for c in completions[::n])
    answer = sum(size(c)[1] for c in completions)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
