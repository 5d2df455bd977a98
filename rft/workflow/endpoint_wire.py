"""OpenAI's request and answer bodies, as far as they are served: what is asked is checked field by field, nothing is dropped in silence.

Knows no server and no engine.  Invariant: a request is understood wholly or refused with the name of the field.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft.types.completion import Completion

MAX_N = 128
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_IGNORED = {  # say nothing about the answer
    "model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "return_tokens_as_token_ids", "timeout",
}  # fmt: skip
_NUMBERS: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "presence_penalty": float, "frequency_penalty": float,
    "repetition_penalty": float, "min_tokens": int, "max_tokens": int, "max_completion_tokens": int, "seed": int,
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

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
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


def read(body: Any, *, chat: bool) -> Asked:
    """What a body of /v1/chat/completions (or /v1/completions) asks.  Raises ApiError 400 that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {k: v for k, v in body.items() if v is not None}
    for name, neutral in _NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise ApiError(
                400,
                f"{name} {json.dumps(given[name])[:80]} is not served: the model's answer is recorded as it was sampled, without "
                f"constraints; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    known = _OURS | _IGNORED | _NUMBERS.keys() | _NEUTRAL.keys()
    if unknown := sorted(given.keys() - known):
        raise ApiError(400, f"unknown field {unknown[0]!r}", param=unknown[0], code="unknown_parameter")
    options = _of(given, "stream_options", dict, {})
    n = _of(given, "n", int, 1)
    if not 1 <= n <= MAX_N:
        raise ApiError(400, f"n is {n}; it must be from 1 to {MAX_N}", param="n")
    logprobs = given.get("logprobs", False)
    if not isinstance(logprobs, bool) and (chat or logprobs not in (0, 1)):
        raise ApiError(400, f"logprobs is {logprobs!r}; only the written token's log-prob is known", param="logprobs")
    tools = None if given.get("tool_choice") != "none" else ()
    return Asked(
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


def _of(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"{name} is {json.dumps(value)[:80]}; it must be of type {kind.__name__}", param=name)
    return value


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        if name in given:
            value = given[name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (kind is float and isinstance(value, float) and math.isfinite(value))):
                raise ApiError(400, f"{name} is {json.dumps(value)[:80]}; it must be a number", param=name)
            found[name] = kind(value)
    if "max_completion_tokens" in found:
        found["max_tokens"] = found.pop("max_completion_tokens")
    if "max_tokens" in found and found["max_tokens"] < 1:
        raise ApiError(400, f"max_tokens is {found['max_tokens']}; it must be at least 1", param="max_tokens")
    if "stop" in given:
        stop = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
            raise ApiError(400, "stop must be a text or a list of texts", param="stop")
        found["stop"] = tuple(stop)
    if "ignore_eos" in given:
        found["ignore_eos"] = _of(given, "ignore_eos", bool, False)
    return found


def _messages(given: Any) -> tuple[dict[str, Any], ...]:
    """In one form, so that what a client sends back is equal to what it was given: content a text, no empty fields."""
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return tuple(_message(m, i) for i, m in enumerate(given))


def _message(given: Any, i: int) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise ApiError(400, f"{where} must be an object with a role out of {', '.join(sorted(_ROLES))}", param=where)
    role = "system" if given["role"] == "developer" else given["role"]
    made: dict[str, Any] = {"role": role, "content": _text(given.get("content"), f"{where}.content")}
    if given.get("function_call"):
        raise ApiError(400, f"{where}.function_call is the older form; use tool_calls", param=where)
    if calls := given.get("tool_calls"):
        made["tool_calls"] = [_call(c, f"{where}.tool_calls[{k}]") for k, c in enumerate(calls)]
    return made | {k: given[k] for k in ("name", "tool_call_id") if given.get(k)}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(p.get("text", "")) for p in content)
    raise ApiError(400, f"{where} must be a text or a list of text parts; images and sound are not served", param=where)


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must be an object with id, type and function {{name, arguments}}", param=where)
    called = {"name": function["name"], "arguments": function.get("arguments", "{}")}
    return {"id": str(given.get("id", "")), "type": "function", "function": called}


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise ApiError(400, "tools must be a list", param="tools")
    for i, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ApiError(400, f"tools[{i}] must be {{type: function, function: {{name, ...}}}}", param=f"tools[{i}]")
    return tuple(given)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    made: list[str | tuple[int, ...]] = []
    for prompt in several:
        if isinstance(prompt, str) and prompt:
            made.append(prompt)
        elif isinstance(prompt, list) and prompt and all(isinstance(t, int) and t >= 0 for t in prompt):
            made.append(tuple(prompt))
        else:
            raise ApiError(400, "prompt must be a text, a list of token ids, or a list of these", param="prompt")
    return tuple(made)


# ---------------------------------------------------------------- answers


def chat_body(asked: Asked, completions: Sequence[Completion]) -> dict[str, Any]:
    """A whole chat.completion."""
    return _head(asked, "chat.completion", "chatcmpl") | {
        "choices": [
            {"index": i, "message": _said(c), "finish_reason": _reason(c), "logprobs": _chat_logprobs(c) if asked.logprobs else None}
            | ({"token_ids": c.tokens.tolist()} if asked.token_ids else {})
            for i, c in enumerate(completions)
        ],
        "usage": usage(completions, asked.n),
    } | ({"prompt_token_ids": completions[0].prompt_tokens.tolist()} if asked.token_ids else {})  # fmt: skip


def chat_chunks(asked: Asked, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
    """The same as chat.completion.chunk: for each choice its role, its text, its tool calls, then why it ended; then the usage."""
    head = _head(asked, "chat.completion.chunk", "chatcmpl") | ({"usage": None} if asked.usage_in_stream else {})

    def chunk(i: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": i, "delta": delta, "finish_reason": reason, "logprobs": None} | more]}

    for i, c in enumerate(completions):
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
        yield head | {"choices": [], "usage": usage(completions, asked.n)}


def text_body(asked: Asked, completions: Sequence[Completion]) -> dict[str, Any]:
    """A whole text_completion."""
    choices = [_text_choice(asked, i, c) for i, c in enumerate(completions)]
    return _head(asked, "text_completion", "cmpl") | {"choices": choices, "usage": usage(completions, asked.n)}


def text_chunks(asked: Asked, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
    head = _head(asked, "text_completion", "cmpl")
    for i, c in enumerate(completions):
        yield head | {"choices": [_text_choice(asked, i, c)]}
    if asked.usage_in_stream:
        yield head | {"choices": [], "usage": usage(completions, asked.n)}


def _head(asked: Asked, kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": asked.model}


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


def _text_choice(asked: Asked, i: int, c: Completion) -> dict[str, Any]:
    told = {"tokens": _names(c), "token_logprobs": c.logprobs.tolist(), "top_logprobs": None, "text_offset": []}
    made = {"index": i, "text": c.text, "finish_reason": c.finish_reason, "logprobs": told if asked.logprobs else None}
    return made | ({"token_ids": c.tokens.tolist(), "prompt_token_ids": c.prompt_tokens.tolist()} if asked.token_ids else {})


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Tokens; the `n` answers to one prompt count it once."""
    size: Callable[[Completion], tuple[int, int]] = lambda c: c.usage or (len(c.prompt_tokens), len(c.tokens))  # noqa: E731
    prompt = sum(size(c)[0] for c in completions[::n])
    answer = sum(size(c)[1] for c in completions)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
