"""OpenAI's request and answer bodies, as far as they are served: what is asked is a pydantic model,
nothing is dropped in silence.

Knows no server and no engine.  Invariant: a request is understood wholly or refused with the name
of the field.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from rft.files.strict_json import no_key_twice
from rft.types.completion import Completion
from rft.types.task import plain_text

MAX_BYTES = 16 << 20  # of a body
MAX_VALUES = 1 << 20  # in a body: numbers, texts, lists, objects
MAX_DEPTH = 64
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1000
# the last one may not be closed
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")
_TOLD = 80  # characters of a wrong value that are repeated
_MOST = (1 << 31) - 1
_MOST_SEED = (1 << 62) - 1
_UNSUPPORTED = "unsupported_parameter"
_UNCONSTRAINED = (
    "not served, because answers are recorded as they were sampled, without "
    "constraints; leave it out"
)
M = TypeVar("M", bound=BaseModel)


class ApiError(Exception):
    """An answer in OpenAI's error form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        """`retry_s`: the client may try again then."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = (
            "server_error"
            if self.status >= 500
            else kinds.get(self.status, "invalid_request_error")
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked request.  `prompts`: texts or token ids of /v1/completions; else `messages` are
    set.

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
    """The JSON value of a body.  Raises ApiError 413 or 400 before more is made of it than its
    bytes.
    """
    if len(body) > MAX_BYTES:
        raise ApiError(413, f"the body has {len(body)} bytes; at most {MAX_BYTES} are taken")
    opened = body.count(b"[") + body.count(b"{")
    # else it cannot be too large or too deep
    if opened > MAX_DEPTH or opened + body.count(b",") > MAX_VALUES:
        _check_size(_TEXTS.sub(b"", body))
    try:
        value = json.loads(body.decode(), parse_constant=_no_number, object_pairs_hook=no_key_twice)
        # halves of characters and numbers beyond 64 bits fit into no record
        msgspec.msgpack.encode(value)
        return value
    except (ValueError, OverflowError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON that can be stored: {str(e)[:200]}") from None


def _check_size(structure: bytes) -> None:
    """Raises ApiError 413 for too many values, or too deep ones; `structure` is a body without its
    texts.
    """
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


# ---------------------------------------------------------------- requests


def checked(model: type[M], body: Any) -> M:
    """`body` as `model`.  Raises ApiError 400 that names the first wrong field, what was given and
    what is taken.
    """
    try:
        return model.model_validate(body)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
    where = _where(first["loc"])
    kind = first["type"]
    text = {
        "extra_forbidden": f"unknown field {where}; this takes {', '.join(model.model_fields)}",
        "missing": f"{where} is required",
    }.get(
        kind,
        f"{where or 'the body'} is {_shown(first['input'])}: "
        f"{first['msg'][:1].lower()}{first['msg'][1:]}",
    )
    code = {"extra_forbidden": "unknown_parameter", _UNSUPPORTED: _UNSUPPORTED}.get(kind)
    raise ApiError(400, text[:1000], param=_param(first["loc"]), code=code)


def _where(loc: Sequence[str | int]) -> str:
    """messages[0].content"""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part[:_TOLD]}" for part in loc
    ).lstrip(".")


def _param(loc: Sequence[str | int]) -> str | None:
    """Of what is wrong in an item of a list the item, but for what a message says."""
    items = [i for i, part in enumerate(loc) if isinstance(part, int)]
    return _where(loc if not items or loc[-1] == "content" else loc[: items[-1] + 1]) or None


def _shown(value: Any) -> str:
    return json.dumps(value)[:_TOLD]


def _wrong(text: str, kind: str = "wrong") -> PydanticCustomError:
    return PydanticCustomError(kind, text)  # type: ignore[arg-type]  # pydantic wants literals, to translate them


def _neutral(*values: Any, why: str = _UNCONSTRAINED) -> AfterValidator:
    """The only values of a field; by default of one that would constrain the answer."""

    def check(given: Any) -> Any:
        if given not in values:
            raise _wrong(why, _UNSUPPORTED)
        return given

    return AfterValidator(check)


def _text(given: Any) -> str:
    if (text := plain_text(given)) is not None:
        return text
    raise _wrong("it must be a text or a list of text parts; images and sound are not served")


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops)
    ):
        return tuple(stops)
    raise _wrong(
        f"it must be a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} "
        f"characters"
    )


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    several = (
        given if isinstance(given, list) and given and isinstance(given[0], list | str) else [given]
    )
    if len(several) > MAX_N:
        raise _wrong(f"it has {len(several)} prompts; at most {MAX_N} are taken")
    return tuple(_prompt(p) for p in several)


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(t) is int and 0 <= t <= _MOST for t in given):
        return tuple(given)
    raise _wrong(
        f"it must be a text, a list of token ids (whole numbers from 0 to {_MOST}), or a list of "
        f"these"
    )


def _spoken(given: Any) -> Any:
    if not isinstance(given, str | dict):
        raise _wrong("it must be JSON text or an object")
    return given


def _not_zero(given: int) -> int:
    if given == 0:
        raise _wrong("it must be -1, for all tokens, or at least 1")
    return given


class _Part(BaseModel):
    """Clients fill it with more than what is read here."""

    model_config = ConfigDict(strict=True, extra="ignore")


class CalledFunction(_Part):
    name: str
    arguments: Annotated[Any, AfterValidator(_spoken)] = "{}"


class ApiToolCall(_Part):
    id: str | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        return {"id": self.id or "", "type": "function", "function": self.function.model_dump()}


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[ApiToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    function_call: Annotated[
        Any, _neutral(None, {}, why="this is the older form; use tool_calls")
    ] = None
    weight: Annotated[
        Any,
        _neutral(None, 1, why="every recorded answer is trained; a run without a reward is not"),
    ] = None

    def plain(self) -> dict[str, Any]:
        """In one form, so that what a client sends back is equal to what it was given: content a
        text, no empty fields.
        """
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            made["tool_calls"] = [call.plain() for call in self.tool_calls]
        return made | {
            k: v for k, v in (("name", self.name), ("tool_call_id", self.tool_call_id)) if v
        }


class Function(_Part):
    name: str
    parameters: dict[str, Any] | None = None


class ApiTool(_Part):
    type: Literal["function"]
    function: Function


Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=_MOST)]


class Sampling(BaseModel):
    """How tokens are drawn; None: not named."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST), AfterValidator(_not_zero)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    seed: Annotated[int, Field(ge=0, le=_MOST_SEED)] | None = None
    stop: Annotated[Any, AfterValidator(_stops)] = None
    ignore_eos: bool | None = None

    def named(self) -> dict[str, Any]:
        """The fields of SamplingArgs that it names."""
        found = self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)
        return found | (
            {"max_tokens": found.pop("max_completion_tokens")}
            if "max_completion_tokens" in found
            else {}
        )


class Body(Sampling):
    """What both addresses take.  Fields of type Any say nothing about the answer, or are taken with
    their neutral values alone.
    """

    model: str = "policy"
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None
    return_tokens_as_token_ids: Any = None
    timeout: Any = None
    logit_bias: Annotated[Any, _neutral({})] = None
    echo: Annotated[Any, _neutral(False)] = None
    best_of: Annotated[Any, _neutral(1)] = None
    suffix: Annotated[Any, _neutral("")] = None
    add_special_tokens: Annotated[Any, _neutral(False)] = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None
    parallel_tool_calls: Annotated[Any, _neutral(True)] = None
    top_logprobs: Annotated[Any, _neutral(0)] = None
    modalities: Annotated[Any, _neutral(["text"])] = None
    tool_choice: Annotated[Any, _neutral("auto", "none")] = None
    tools: list[ApiTool] | None = None

    def request(self, given: Mapping[str, Any], **more: Any) -> ApiRequest:
        """`given`: the body itself, for what is passed on as it is."""
        tools = None if self.tools is None else tuple(given["tools"])
        return ApiRequest(
            model=self.model,
            tools=() if self.tool_choice == "none" else tools,
            n=self.n,
            stream=self.stream,
            usage_in_stream=bool(self.stream_options.get("include_usage")),
            token_ids=self.return_token_ids,
            chat_template_args=self.chat_template_kwargs,
            sampling=self.named(),
            **more,
        )


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False


class TextBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    logprobs: Annotated[
        Any, _neutral(0, 1, why="only the written token's log-prob is known; write 0 or 1")
    ] = False


def read(body: Any, *, chat: bool) -> ApiRequest:
    """What a body of /v1/chat/completions (or /v1/completions) asks.  Raises ApiError 400 that
    names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {k: v for k, v in body.items() if v is not None}
    if chat:
        asked = checked(ChatBody, given)
        return asked.request(
            given, messages=tuple(m.plain() for m in asked.messages), logprobs=asked.logprobs
        )
    text = checked(TextBody, given)
    return text.request(given, prompts=text.prompt, logprobs=text.logprobs is not False)


# ---------------------------------------------------------------- answers


def chat_body(asked: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """A whole chat.completion."""
    return (
        _head(asked, answer, "chat.completion", "chatcmpl")
        | {
            "choices": [
                {
                    "index": i,
                    "message": _said(c),
                    "finish_reason": _reason(c),
                    "logprobs": _chat_logprobs(c) if asked.logprobs else None,
                }
                | ({"token_ids": c.tokens.tolist()} if asked.token_ids else {})
                for i, c in enumerate(answer.completions)
            ],
            "usage": usage(answer.completions, asked.n),
        }
        | (
            {"prompt_token_ids": answer.completions[0].prompt_tokens.tolist()}
            if asked.token_ids
            else {}
        )
    )


def chat_chunks(asked: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    """The same as chat.completion.chunk: for each choice its role, its text, its tool calls, then
    why it ended; then the usage.
    """
    head = _head(asked, answer, "chat.completion.chunk", "chatcmpl") | (
        {"usage": None} if asked.usage_in_stream else {}
    )

    def chunk(
        i: int, delta: dict[str, Any], reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        return head | {
            "choices": [
                {"index": i, "delta": delta, "finish_reason": reason, "logprobs": None} | more
            ]
        }

    for i, c in enumerate(answer.completions):
        first = chunk(i, {"role": "assistant", "content": ""})
        yield first | ({"prompt_token_ids": c.prompt_tokens.tolist()} if asked.token_ids else {})
        if c.reasoning:
            yield chunk(i, {"reasoning_content": c.reasoning})
        more: dict[str, Any] = {"logprobs": _chat_logprobs(c)} if asked.logprobs else {}
        yield chunk(
            i,
            {"content": c.text},
            **more,
            **({"token_ids": c.tokens.tolist()} if asked.token_ids else {}),
        )
        if c.tool_calls:
            yield chunk(
                i, {"tool_calls": [{"index": k, **call} for k, call in enumerate(c.tool_calls)]}
            )
        yield chunk(i, {}, _reason(c))
    if asked.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, asked.n)}


def text_body(asked: ApiRequest, answer: ApiAnswer) -> dict[str, Any]:
    """A whole text_completion."""
    choices = [_text_choice(asked, i, c) for i, c in enumerate(answer.completions)]
    return _head(asked, answer, "text_completion", "cmpl") | {
        "choices": choices,
        "usage": usage(answer.completions, asked.n),
    }


def text_chunks(asked: ApiRequest, answer: ApiAnswer) -> Iterator[dict[str, Any]]:
    head = _head(asked, answer, "text_completion", "cmpl")
    for i, c in enumerate(answer.completions):
        yield head | {"choices": [_text_choice(asked, i, c)]}
    if asked.usage_in_stream:
        yield head | {"choices": [], "usage": usage(answer.completions, asked.n)}


def _head(asked: ApiRequest, answer: ApiAnswer, kind: str, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": int(answer.created),
        "model": asked.model,
    }


def _said(c: Completion) -> dict[str, Any]:
    made: dict[str, Any] = {
        "role": "assistant",
        "content": c.text if c.text or not c.tool_calls else None,
        "refusal": None,
    }
    if c.reasoning:
        made["reasoning_content"] = c.reasoning
    return made | ({"tool_calls": list(c.tool_calls)} if c.tool_calls else {})


def _reason(c: Completion) -> str:
    return "tool_calls" if c.tool_calls and c.finish_reason == "stop" else c.finish_reason


def _names(c: Completion) -> list[str]:
    # the words of single tokens are known to the engine alone
    return [f"token_id:{t}" for t in c.tokens.tolist()]


def _chat_logprobs(c: Completion) -> dict[str, Any]:
    pairs = zip(_names(c), c.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs
        ],
        "refusal": None,
    }


def _text_choice(asked: ApiRequest, i: int, c: Completion) -> dict[str, Any]:
    told = {
        "tokens": _names(c),
        "token_logprobs": c.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": [],
    }
    made = {
        "index": i,
        "text": c.text,
        "finish_reason": c.finish_reason,
        "logprobs": told if asked.logprobs else None,
    }
    return made | (
        {"token_ids": c.tokens.tolist(), "prompt_token_ids": c.prompt_tokens.tolist()}
        if asked.token_ids
        else {}
    )


def usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    """Tokens; the `n` answers to one prompt count it once."""

    def size(c: Completion) -> tuple[int, int]:
        return c.usage or (len(c.prompt_tokens), len(c.tokens))

    prompt = sum(size(c)[0] for c in completions[::n])
    answer = sum(size(c)[1] for c in completions)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
