"""Check and read the bodies of requests, as far as they are served; those of OpenAI's chat and text
completions whole.

Depends on no server and no engine.  Invariant: every field of a request is applied, or refused by
name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from rft.files.strict_json import no_key_twice
from rft.images import data_url
from rft.types.images import Image
from rft.workflow.message_content import check_shown, shows, taken, wrong

MAX_BYTES = 16 << 20  # of a body
MAX_VALUES = 1 << 20  # in a body: numbers, texts, lists, objects
MAX_DEPTH = 64
MAX_N = 128
MAX_IMAGES = 64  # in a body, different ones: each takes up to a second to decode
MAX_STOPS = 64
MAX_STOP_CHARS = 1000
# texts of JSON, also an unclosed last one
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")
_SHOWN = 80  # characters of a wrong value in a message
_MOST = (1 << 31) - 1
_MOST_SEED = (1 << 62) - 1
_UNSUPPORTED = "unsupported_parameter"
UNCONSTRAINED = (
    "not served, because answers are recorded as they were sampled, without "
    "constraints; leave it out"
)
M = TypeVar("M", bound=BaseModel)


class ApiError(Exception):
    """An answer that is an error; `body` is OpenAI's form."""

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
    """A checked request: `prompts` of /v1/completions, texts or token ids, or `messages`.

    `sampling`: the fields of SamplingArgs that the request sets; `tools` None: not set.
    `previous`: id of the answer that `messages` continue, behind other `instructions`; those of its
    own request are left out if it had any (`without_instructions`).  `ignored`: fields that are not
    applied.  `echo`: fields that the answer repeats.
    """

    model: str
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[Image, ...] = ()  # that `messages` show, each once
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    previous: str = ""
    instructions: str = ""
    without_instructions: bool = False
    ignored: tuple[str, ...] = ()
    echo: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (count := len(self.images)) > MAX_IMAGES:
            raise ApiError(400, f"the body has {count} images; at most {MAX_IMAGES} are taken")


def parse(body: bytes) -> Any:
    """Parse a body as JSON.  Raises ApiError 413 or 400, for too large ones before parsing."""
    if len(body) > MAX_BYTES:
        raise ApiError(413, f"the body has {len(body)} bytes; at most {MAX_BYTES} are taken")
    opened = body.count(b"[") + body.count(b"{")
    # the count of brackets is an upper bound of depth and size
    if opened > MAX_DEPTH or opened + body.count(b",") > MAX_VALUES:
        _check_size(_TEXTS.sub(b"", body))
    try:
        value = json.loads(body.decode(), parse_constant=_no_number, object_pairs_hook=no_key_twice)
        # surrogates and numbers beyond 64 bits cannot be stored
        msgspec.msgpack.encode(value)
        return value
    except (ValueError, OverflowError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON that can be stored: {str(e)[:200]}") from None


def _check_size(structure: bytes) -> None:
    """Raises ApiError 413 for too many or too deep values; `structure`: a body without its texts."""
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


def checked(model: type[M], body: Any, *, also: Iterable[str] = ()) -> M:
    """Return `body` as `model`.  Raises ApiError 400 that names the first wrong field, its value and
    what is allowed; `also`: further fields that the caller takes.
    """
    try:
        return model.model_validate(body)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
    kind = first["type"]
    loc = _without_tags(body, first["loc"])
    if kind == "missing":
        loc.append(first["loc"][-1])
    where = _path(loc)
    code = None
    if kind == "extra_forbidden":
        code = "unknown_parameter"
        text = f"unknown field {where}; this takes {', '.join((*model.model_fields, *also))}"
    elif kind == "missing":
        text = f"{where} is required"
    elif kind == "union_tag_invalid":
        code = _UNSUPPORTED
        named = first["ctx"]["discriminator"].strip("'")
        text = f"{where}.{named} is {first['ctx']['tag'][:_SHOWN]!r}: this takes "
        text += (
            f"{first['ctx']['expected_tags']}; sound, files and tools of the server are not served"
        )
    else:
        text = f"{where or 'the body'} is {json.dumps(first['input'])[:_SHOWN]}: "
        text += f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        if kind == _UNSUPPORTED:
            code = kind
    raise ApiError(400, text[:1000], param=_param(loc), code=code)


def _without_tags(value: Any, loc: Sequence[str | int]) -> list[str | int]:
    """Return the part of a path that is there: pydantic adds names of kinds."""
    path: list[str | int] = []
    for part in loc:
        in_list = isinstance(value, list) and isinstance(part, int)
        if in_list or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    return path


def _path(loc: Sequence[str | int]) -> str:
    """messages[0].content"""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in loc
    ).lstrip(".")


def _param(loc: Sequence[str | int]) -> str | None:
    """Return the path of the list item that is wrong, of a message that of its content."""
    items = [i for i, part in enumerate(loc) if isinstance(part, int)]
    return _path(loc if not items or loc[-1] == "content" else loc[: items[-1] + 1]) or None


def only(*values: Any, reason: str) -> AfterValidator:
    """Allow these values of a field alone."""

    def check(value: Any) -> Any:
        if value not in values:
            raise wrong(reason, _UNSUPPORTED)
        return value

    return AfterValidator(check)


def _file_of(part: Any) -> bytes:
    """Return the file of a part image_url.  Raises ValueError."""
    url = part.get("image_url")
    return data_url.read(url.get("url") if isinstance(url, dict) else url)


def stops(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if (
        isinstance(texts, list)
        and len(texts) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in texts)
    ):
        return tuple(texts)
    raise wrong(
        f"it must be a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} "
        f"characters"
    )


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_N:
        raise wrong(f"it has {len(prompts)} prompts; at most {MAX_N} are taken")
    return tuple(map(_prompt, prompts))


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    tokens = prompt if isinstance(prompt, list) else []
    if tokens and all(type(token) is int and 0 <= token <= _MOST for token in tokens):
        return tuple(tokens)
    raise wrong(
        f"it must be a text, a list of token ids (whole numbers from 0 to {_MOST}), or a list of "
        f"these"
    )


def _not_zero(top_k: int) -> int:
    if top_k == 0:
        raise wrong("it must be -1, for all tokens, or at least 1")
    return top_k


class Part(BaseModel):
    """A part of a body; clients add fields that are not read here."""

    model_config = ConfigDict(strict=True, extra="ignore")


class CalledFunction(Part):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ApiToolCall(Part):
    id: str | None = None
    function: CalledFunction


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, shows("image_url", _file_of)] = ""
    tool_calls: list[ApiToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    function_call: Annotated[
        Any, only(None, {}, reason="this is the older form; use tool_calls")
    ] = None
    weight: Annotated[
        Any,
        only(None, 1, reason="every recorded answer is trained; a run without a reward is not"),
    ] = None

    @model_validator(mode="after")
    def _check_shown(self) -> Self:
        check_shown(self.role, self.content)
        return self

    def normalized(self) -> dict[str, Any]:
        """Return the message in one form, equal to the answer that a client got: content a text or
        `merged` parts, no empty fields.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or "", "type": "function", "function": call.function.model_dump()}
                for call in self.tool_calls
            ]
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class Function(Part):
    name: str
    parameters: dict[str, Any] | None = None


class ApiTool(Part):
    type: Literal["function"]
    function: Function


Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=_MOST)]


class ApiBody(BaseModel):
    """Fields of all dialects; None: not set."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    model: str = "policy"
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class Sampling(ApiBody):
    """Sampling arguments; None: not set."""

    top_k: Annotated[int, Field(ge=-1, le=_MOST), AfterValidator(_not_zero)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    seed: Annotated[int, Field(ge=0, le=_MOST_SEED)] | None = None
    stop: Annotated[Any, AfterValidator(stops)] = None
    ignore_eos: bool | None = None

    def sampling_args(self) -> dict[str, Any]:
        """Return the fields of SamplingArgs that are set."""
        names = Sampling.model_fields.keys() - {"model", "stream"}
        args = self.model_dump(include=names, exclude_unset=True)
        if "max_completion_tokens" in args:
            args["max_tokens"] = args.pop("max_completion_tokens")
        return args


# do not change the answer
IGNORED = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "return_tokens_as_token_ids",
    "timeout",
)
# what the taskset decides; listed in the header of the answer
UNAPPLIED = ("reasoning_effort", "verbosity")
# would constrain the answer, except with these values
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (False,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}


class Body(Sampling):
    """Fields of both addresses, besides IGNORED, UNAPPLIED and NEUTRAL."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream_options: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False


class ChatBody(Body):
    """POST /v1/chat/completions."""

    tools: list[ApiTool] | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False


class TextBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    logprobs: Annotated[
        Any, only(0, 1, reason="only the written token's log-prob is known; write 0 or 1")
    ] = False


def applied(
    model: type[M],
    body: Any,
    ignored: Iterable[str],
    neutral: Mapping[str, Sequence[Any]],
    unapplied: Iterable[str],
) -> tuple[M, list[str]]:
    """Return the body as `model`, and which of `unapplied` it sets.  Raises ApiError 400, also for
    other values of `neutral` fields than these.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {k: v for k, v in body.items() if v is not None and k not in ignored}
    for name, values in neutral.items():
        if name in fields and fields.pop(name) not in values:
            text = f"{name} is {json.dumps(body[name])[:_SHOWN]}: {UNCONSTRAINED}"
            raise ApiError(400, text, param=name, code=_UNSUPPORTED)
    unapplied_set = [name for name in unapplied if fields.pop(name, None) is not None]
    return checked(model, fields, also=(*unapplied, *neutral, *ignored)), unapplied_set


def in_call_order(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages with the results of parallel calls in the order of the calls."""
    ordered: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for message in [*messages, {}]:
        if message.get("role") == "tool":
            results.append(message)
            continue
        ordered += sorted(results, key=lambda m: order.get(m.get("tool_call_id", ""), len(order)))
        results = []
        order = {call["id"]: i for i, call in enumerate(message.get("tool_calls", ()))}
        ordered.append(message)
    return tuple(ordered[:-1])


def read(body: Any, *, chat: bool) -> ApiRequest:
    """Return the request of a body of /v1/chat/completions (or /v1/completions).  Raises ApiError
    400 that names the field.
    """
    model: type[ChatBody | TextBody] = ChatBody if chat else TextBody
    request, ignored = applied(model, body, IGNORED, NEUTRAL, UNAPPLIED)
    content: dict[str, Any] = {}
    tools = None
    if isinstance(request, TextBody):
        content = {"prompts": request.prompt}
    else:
        content = taken(in_call_order(m.normalized() for m in request.messages))
        tools = None if request.tools is None else tuple(body["tools"])
    return ApiRequest(
        model=request.model,
        tools=() if body.get("tool_choice") == "none" else tools,
        ignored=tuple(ignored),
        n=request.n,
        stream=request.stream,
        usage_in_stream=bool(request.stream_options.get("include_usage")),
        logprobs=request.logprobs is not False,
        token_ids=request.return_token_ids,
        chat_template_args=request.chat_template_kwargs,
        sampling=request.sampling_args(),
        **content,
    )
