"""An OpenAI-compatible server as an engine, for judges.  Its answers are text and cannot be
trained.

Uses POST {base_url}/chat/completions and depends on no particular server.  Key and secret headers
come from environment variables and stay out of every log.  Invariant: a request is repeated only if
the server did not answer it (429, 5xx, a broken connection).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rft.engine.base import BaseEngine, engine
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.errors import ConfigError, EngineFailed, SetupError
from rft.images import data_url
from rft.secrets import learn_secrets, redact
from rft.types.completion import Completion, FinishReason, without_reasoning
from rft.types.ports import GenerateRequest
from rft.types.throttled import RESENT, UNPAID, RateLimiter

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
AGAIN = {
    408,
    409,
    425,
    429,
    500,
    502,
    503,
    504,
    529,
}  # statuses that allow a repeat
# the server may have processed the request, or passed it to another server
WORKED_ON = {408, 500, 502, 504}
LARGEST = 16 << 20  # bytes of an answer
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
TOP = 20  # log-probs of the first token; servers return no more
NOTHING = np.empty(0, np.int32)
_ENDS: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}


class _Later(Exception):
    """The request may be repeated, after `wait_s` seconds if the server said so.  `sent`: the
    server may have processed it.
    """

    def __init__(self, reason: str, wait_s: float | None = None, *, sent: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.sent = sent


@engine("external")
class ExternalEngine(BaseEngine):
    """Created by `start`; belongs to one event loop."""

    COUNTED = ("requests", "retries", "prompt_tokens", "generated_tokens")
    FIXED_WEIGHTS = "the weights of a model behind a server are its owner's"

    def __init__(self, settings: EngineSettings, client: httpx.AsyncClient) -> None:
        assert settings.external is not None
        super().__init__(settings)
        self._server: ExternalModelConfig = settings.external
        self._client = client
        self._rate = RateLimiter(settings.external.requests_per_minute)
        self._random = random.Random(settings.seed)

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Create the client; send no request.  Raises SetupError when the address, or a variable
        named by a header, is missing.
        """
        import httpx

        s = settings.external
        if s is None:
            raise ConfigError(
                "engine_type external needs external_model_config", key="external_model_config"
            )
        url = s.base_url or os.environ.get(s.base_url_env)
        if not url:
            raise SetupError(
                f"{settings.name}: no address; set {s.base_url_env}, or write "
                f"external_model_config.base_url"
            )
        headers = dict(s.headers)
        for header, variable in s.header_envs.items():
            if variable not in os.environ:
                raise SetupError(
                    f"{settings.name}: header {header} comes from the environment variable "
                    f"{variable}, which is not set"
                )
            headers[header] = os.environ[variable]
        if key := os.environ.get(s.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
            learn_secrets([key])
        learn_secrets(os.environ[v] for v in s.header_envs.values())
        limits = httpx.Limits(
            max_connections=settings.max_concurrent,
            max_keepalive_connections=settings.max_concurrent,
        )
        client = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(settings.request_timeout_s, pool=None),
        )
        return cls(settings, client)

    # ------------------------------------------------------------ Engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Raises ValueError when the server refuses the request, EngineFailed when it does not
        answer.
        """
        if not request.messages or request.written is not None:
            raise ValueError(
                f"{self.settings.name}: a server is asked with messages, not with tokens or answers"
            )
        completions: list[Completion] = []
        while len(completions) < request.n:  # some servers return one answer whatever `n` is
            answers = self._read(
                await self._post(self._body(request, request.n - len(completions))), request
            )
            if not answers:
                raise EngineFailed(f"{self.settings.name}: the server answered without choices")
            completions += answers
        return completions[: request.n]

    async def health(self) -> None:
        if self._client.is_closed:
            raise EngineFailed(f"{self.settings.name} is closed")

    async def close(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------ inside

    def _body(self, request: GenerateRequest, n: int) -> dict[str, Any]:
        """Build the request body; values outside the protocol are sent only if they differ from
        their off value.
        """
        s = request.sampling
        body: dict[str, Any] = {
            "model": self._server.model_name,
            # some servers refuse reasoning in the history
            "messages": data_url.as_urls(without_reasoning(request.messages), request.images),
            "temperature": s.temperature,
            "max_tokens": s.max_tokens,
        }
        optional: dict[str, tuple[Any, Any]] = {
            "n": (n, 1),
            "top_p": (s.top_p, 1.0),
            "top_k": (s.top_k, -1),
            "min_p": (s.min_p, 0.0),
            "presence_penalty": (s.presence_penalty, 0.0),
            "frequency_penalty": (s.frequency_penalty, 0.0),
            "repetition_penalty": (s.repetition_penalty, 1.0),
            "min_tokens": (s.min_tokens, 0),
            "ignore_eos": (s.ignore_eos, False),
            "stop": (list(s.stop), []),
            "seed": (s.seed, None),
            "tools": ([dict(t) for t in request.tools], []),
            "chat_template_kwargs": (request.chat_template_args, {}),
        }
        body |= {name: value for name, (value, off) in optional.items() if value != off}
        if request.choices:
            body |= {"logprobs": True, "top_logprobs": TOP, "max_tokens": 1}
        return {k: v for k, v in (body | self._server.extra_body).items() if v is not None}

    def _read(self, answer: Any, request: GenerateRequest) -> list[Completion]:
        try:
            choices = answer["choices"]
            usage = answer.get("usage") or {}
            counted = (_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))
            completions = [
                self._completion(c, request, counted if i == 0 else (0, 0))
                for i, c in enumerate(choices)
            ]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
            raise EngineFailed(
                f"{self.settings.name}: not an answer of the protocol ({type(e).__name__}: {e}): "
                f"{_short(answer)}"
            ) from e
        self._counted["prompt_tokens"] += counted[0]
        self._counted["generated_tokens"] += counted[1]
        return completions

    def _completion(
        self, choice: dict[str, Any], request: GenerateRequest, usage: tuple[int, int]
    ) -> Completion:
        """Build a completion; `usage` of several choices is counted at the first."""
        message = choice["message"]
        text = message.get("content") or ""
        logprobs = np.empty(0, np.float32)
        stop_reason = choice.get("stop_reason")  # vLLM's servers return the stop text or token
        if request.choices:
            text, logprobs = _chosen(choice, request.choices)
        return Completion(
            prompt_tokens=NOTHING,
            tokens=NOTHING,
            logprobs=logprobs,
            text=text,
            finish_reason=_ENDS.get(choice.get("finish_reason") or "stop", "abort"),
            version_spans=(),
            sampling=request.sampling,
            engine=self.settings.name,
            stop_text=stop_reason if isinstance(stop_reason, str) else "",
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            tool_calls=tuple(message.get("tool_calls") or ()),
            usage=usage,
        )

    async def _post(self, body: dict[str, Any]) -> Any:
        for attempt in itertools.count():
            await self._rate.acquire(1)
            self._counted["requests"] += 1
            try:
                return await self._once(body)
            except _Later as e:
                if attempt >= self._server.max_retries:
                    if not e.sent:
                        UNPAID.get()()
                    raise EngineFailed(
                        f"{self.settings.name}: no answer after {attempt + 1} requests; the last: "
                        f"{e}"
                    ) from e
                wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * (
                    0.5 + self._random.random()
                )
                self._counted["retries"] += 1
                log.info("%s: %s; asked again", self.settings.name, e)
                await asyncio.sleep(wait if e.wait_s is None else min(LONGEST_WAIT_S, e.wait_s))
                if e.sent:
                    await RESENT.get()()
        raise AssertionError("the loop ends by an answer or an error")

    async def _once(self, body: dict[str, Any]) -> Any:
        status, answer, after = await self._answer(body)
        excerpt = _short(answer[:4000].decode("utf-8", "replace"))
        if status in AGAIN:
            raise _Later(f"HTTP {status}: {excerpt}", _seconds(after), sent=status in WORKED_ON)
        if status in (401, 403, 404):
            UNPAID.get()()
            raise EngineFailed(
                f"{self.settings.name}: HTTP {status} from {redact(str(self._client.base_url))}: "
                f"{excerpt}; check the "
                f"address, the key in {self._server.api_key_env} and the model's name "
                f"{self._server.model_name!r}"
            )
        if status >= 400:
            raise ValueError(f"{self.settings.name}: HTTP {status}: {excerpt}")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as e:
            raise EngineFailed(
                f"{self.settings.name}: the server did not answer with JSON: {excerpt}"
            ) from e

    async def _answer(self, body: dict[str, Any]) -> tuple[int, bytearray, str | None]:
        """Return (status, body, Retry-After).  The deadline covers the whole answer.  Raises _Later
        without an answer.
        """
        import httpx

        got = bytearray()
        try:
            async with (
                asyncio.timeout(self.settings.request_timeout_s),
                self._client.stream("POST", "chat/completions", json=body) as response,
            ):
                async for piece in response.aiter_bytes():
                    got += piece
                    if len(got) > LARGEST:
                        raise EngineFailed(
                            f"{self.settings.name}: the server's answer has more than {LARGEST} "
                            f"bytes"
                        )
        except TimeoutError as e:
            reason = (
                f"its answer was not complete within {self.settings.request_timeout_s:g} s "
                f"({len(got)} bytes came)"
            )
            raise _Later(reason, sent=True) from e
        except httpx.HTTPError as e:
            unsent = isinstance(e, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            raise _Later(redact(f"{type(e).__name__}: {e}"), sent=not unsent) from e
        return response.status_code, got, response.headers.get("retry-after")


def _count(reported: Any) -> int:
    """Return a token count reported by a server.  Raises ValueError for a negative or absurd count."""
    count = int(reported or 0)
    if not 0 <= count < 1 << 31:
        raise ValueError(f"{_short(reported)} tokens")
    return count


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None  # an HTTP date: use our own back-off


def _chosen(choice: dict[str, Any], words: Sequence[str]) -> tuple[str, np.ndarray]:
    """Return the likeliest of `words` as first token and its log-prob among them [1]; "" and [0] if
    the server reports none of them.

    Case and spaces are ignored.  A word outside the first TOP tokens gets probability 0.
    """
    top_logprobs = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get(
        "top_logprobs"
    ) or []
    share = dict.fromkeys(words, 0.0)
    for token in top_logprobs:
        for word in words:
            if token["token"].strip().lower() == word.strip().lower():
                share[word] += math.exp(float(token["logprob"]))
    best = max(share, key=share.__getitem__)
    if not share[best]:
        return "", np.empty(0, np.float32)
    return best, np.array([math.log(share[best] / math.fsum(share.values()))], np.float32)


def _short(what: object) -> str:
    return redact(str(what))[:300]
