"""An engine for tests: answers come from a script, log-probs from a hash; no torch, no model.

It fulfils `rft.types.ports.Engine` and passes the engine contract.  Its tokens are bytes (ids
0..255) and two marks; a conversation is rendered as `BEGIN role \\n content END ...`, so an
assistant's answer continues its prompt token by token.
Invariant: equal weights, prompt and tokens give equal log-probs, and other weights give other
log-probs; a skipped load is therefore visible.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import xxhash
from msgspec.structs import replace

import rft.plugins as plugins
from rft.engine.base import (
    BaseEngine,
    check_prompt,
    check_row,
    check_tokens,
    cut_at_stop,
    prompt_limit,
    row_behind,
)
from rft.engine.settings import EngineSettings
from rft.engine.weights import WeightIntake
from rft.errors import ConfigError, EngineFailed
from rft.types.completion import Completion, FinishReason, TokenScores, VersionSpan
from rft.types.ids import FIXED
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, LoadReport, ScoreRow, WeightManifest
from rft.types.thoughts import TAIL_TOKENS, opens_thought

BEGIN = 256  # marks around a message; END is the end-of-sequence token
END = 257
VOCAB_SIZE = 258
Answer = Callable[[list[dict[str, Any]]], str]


def encode(messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
    """Return the int32 token ids of a conversation, ready for the assistant's answer."""
    head = [{"role": "tools", "content": json.dumps(list(tools), sort_keys=True)}] if tools else []
    ids: list[int] = []
    for m in [*head, *messages]:
        ids += [BEGIN, *f"{m['role']}\n{m.get('content') or ''}".encode(), END]
    return np.array([*ids, BEGIN, *b"assistant\n"], np.int32)


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens without marks."""
    return bytes(int(t) for t in tokens if t < BEGIN).decode("utf-8", "replace")


def weights_key(manifest: WeightManifest) -> int:
    """Return the key of the log-probs: a hash of all tensor hashes, or of the version without
    tensors.
    """
    text = "".join(sorted(t.name + t.xxh3_128 for t in manifest.tensors)) or str(
        manifest.version.published
    )
    return xxhash.xxh3_64_intdigest(text.encode())


def logprobs(
    prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray, key: int
) -> np.ndarray:
    """Return float32 [R] in [-2, -0.1]: log-probs of `tokens` after `prompt` with the weights
    `key`.

    A scorer may use the same function.
    """
    digest = xxhash.xxh3_64(np.asarray(prompt, np.int32).tobytes(), seed=key)
    out = np.empty(len(tokens), np.float32)
    for i, token in enumerate(np.asarray(tokens, np.int32)):
        digest.update(token.tobytes())
        out[i] = -0.1 - 1.9 * (digest.intdigest() >> 11) / (1 << 53)
    return out


class ScriptedEngine(BaseEngine):
    """Returns queued answers (`will_say`, one per completion), then `answer(messages)` if it is
    set.

    Events for tests: `hold()` stops all answers, `hold(after_tokens=k)` stops each after k tokens,
    `release()` continues; `waiting(n)` waits until n completions are in progress;
    `will_fail(error)` fails the next request.
    """

    def __init__(
        self, *texts: str, answer: Answer | None = None, settings: EngineSettings | None = None
    ) -> None:
        super().__init__(settings or EngineSettings(engine_type="scripted", name="scripted-0"))
        self.answer = answer
        self.calls: list[GenerateRequest] = []
        self.version = FIXED  # serves immediately; a load replaces the version
        self.loads: list[WeightManifest] = []
        self._key = xxhash.xxh3_64_intdigest(str(FIXED).encode())
        # tensor names of the first load; later loads must have the same
        self._names: frozenset[str] | None = None
        self._texts: deque[str] = deque(texts)
        self._failures: deque[Exception] = deque()
        self._dead = ""
        self._go = asyncio.Event()  # cleared while paused
        self._go.set()
        self._released: asyncio.Event | None = None
        self._hold_after = 0
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._num_tokens = 0
        self._intake = WeightIntake()

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Start from a configuration: `extra_engine_args` may hold `texts` (a list) or `answer`
        ("pkg.module:function"); the default is an echo.
        """
        args = dict(settings.extra_engine_args)
        texts = args.pop("texts", [])
        answer = args.pop("answer", None)
        if args:
            raise ConfigError(
                f"unknown arguments {', '.join(args)} for the scripted engine; known: texts, "
                f"answer",
                key="extra_engine_args",
            )
        answer_function = (
            plugins.REGISTRY.get("answer", answer).obj if answer else (None if texts else echo)
        )
        return cls(*texts, answer=answer_function, settings=settings)

    # ------------------------------------------------------------ for tests

    def will_say(self, *texts: str) -> None:
        """Queue the next completions in order."""
        self._texts.extend(texts)

    def will_fail(self, error: Exception) -> None:
        """Raise `error` at the next request."""
        self._failures.append(error)

    def die(self, reason: str = "killed by the test") -> None:
        """Raise EngineFailed at every call from now on."""
        self._dead = reason
        self.release()
        self._go.set()

    def hold(self, *, after_tokens: int = 0) -> None:
        """Stop completions after `after_tokens` tokens, until `release`."""
        self._released = asyncio.Event()
        self._hold_after = after_tokens

    def release(self) -> None:
        if self._released is not None:
            self._released.set()
            self._released = None

    async def waiting(self, count: int, *, timeout_s: float = 10.0) -> None:
        """Return when `count` completions are in progress (held, paused, or being generated)."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._under_way >= count)

    # ------------------------------------------------------------ Engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self._check_alive()
        with self.admission.counted(request):
            self.calls.append(request)
            if self._failures:
                raise self._failures.popleft()
            return await self._answers(request)

    async def _answers(self, request: GenerateRequest) -> list[Completion]:
        if not request.prompt_tokens and not request.messages:
            raise ValueError("a request needs messages or prompt_tokens")
        if request.choices:
            raise ValueError(
                f"{self.settings.name}: a scripted engine has no choice probabilities; use "
                f"rft.testing.FakeJudge"
            )
        prompt = conversation(request)
        goes_on = request.prefix_tokens is not None
        check_prompt(len(prompt), prompt_limit(self.settings, goes_on=goes_on))
        check_tokens(prompt.tolist(), VOCAB_SIZE, self.settings.name)
        texts = [
            self._next(request) if request.written is None else request.written
            for _ in range(request.n)
        ]
        await self._count(request.n)
        try:
            return list(
                await asyncio.gather(*(self._write(request, prompt, text) for text in texts))
            )
        finally:
            await self._count(-request.n)

    async def score(self, row: ScoreRow) -> TokenScores:
        """Return the log-probs this engine would report if it had generated these tokens."""
        self._check_alive()
        assert self.version is not None
        if row.top:
            raise ValueError(
                f"{self.settings.name}: a scripted engine has no most likely tokens; use "
                f"transformers"
            )
        longest = self.settings.max_model_len
        if row.prompt is not None:
            prompt = conversation(row.prompt)
            check_prompt(len(prompt), longest - len(row.tokens))
            row = row_behind(prompt, row)
        tokens = check_row(row, self.settings, longest=longest, vocab_size=VOCAB_SIZE)
        scored = logprobs(tokens[: row.prompt_length], tokens[row.prompt_length :], self._key)
        return TokenScores(logprobs=scored, version=self.version)

    async def pause(self, *, clear_cache: bool = True) -> None:
        self._check_alive()
        self._go.clear()

    async def load(self, manifest: WeightManifest) -> LoadReport:
        self._check_alive()
        if self._go.is_set():
            raise EngineFailed(
                f"{self.settings.name}: load needs a paused engine; call pause first"
            )
        start = time.monotonic()
        taken = LoadReport(version=manifest.version, num_tensors=0, nbytes=0)
        if manifest.broadcast is not None:  # the sender may run in this event loop's process
            taken = (await asyncio.to_thread(self._intake.take, manifest)).report
            self._check_alive()
        elif manifest.tensors:
            taken = self._intake.take(manifest).report
        if taken.failed:
            return taken
        names = frozenset(t.name for t in manifest.tensors)
        expected = names if self._names is None else self._names
        complete = names == expected and not taken.bad_hash
        if complete:
            self._names = names
            self.loads.append(manifest)
            self.version = manifest.version
            self._key = weights_key(manifest)
        return replace(
            taken,
            version=manifest.version,
            num_tensors=len(names) if complete else 0,
            nbytes=manifest.nbytes if complete else 0,
            missing=tuple(sorted(expected - names)),
            unexpected=tuple(sorted(names - expected)),
            probed_layers=len(names),
            load_s=time.monotonic() - start,
        )

    async def resume(self) -> None:
        self._check_alive()
        self._go.set()

    async def health(self) -> None:
        self._check_alive()

    async def metrics(self) -> list[Metric]:
        return [
            Metric("engine/requests_running", float(self._under_way), "sum"),
            Metric("engine/generated_tokens", float(self._num_tokens), "sum"),
        ]

    async def close(self) -> None:
        self.die("closed")
        self._intake.close()

    # ------------------------------------------------------------ inside

    async def _write(self, request: GenerateRequest, prompt: np.ndarray, text: str) -> Completion:
        tokens, reason, stop_text = _spoken(
            text, request, self.settings.max_model_len - len(prompt)
        )
        logps = np.empty(len(tokens), np.float32)
        spans: list[VersionSpan] = []
        hold = self._released
        for i in range(len(tokens)):
            if hold is not None and i == self._hold_after:
                await hold.wait()
            if not self._go.is_set():
                await self._go.wait()
            self._check_alive()
            assert self.version is not None
            if spans and spans[-1].version == self.version:
                spans[-1] = VersionSpan(self.version, spans[-1].start, i + 1)
            else:
                logps[i:] = logprobs(prompt, tokens, self._key)[i:]
                spans.append(VersionSpan(self.version, i, i + 1))
        self._num_tokens += len(tokens)
        return Completion(
            prompt_tokens=prompt,
            tokens=tokens,
            logprobs=logps,
            text=decode(tokens),
            finish_reason=reason,
            version_spans=tuple(spans),
            sampling=request.sampling,
            engine=self.settings.name,
            stop_text=stop_text,
            in_thought=opens_thought(decode(prompt[-TAIL_TOKENS:])),
        )

    def _next(self, request: GenerateRequest) -> str:
        if self._texts:
            return self._texts.popleft()
        if self.answer is None:
            raise EngineFailed(
                f"{self.settings.name}: the script is over and there is no `answer`; call will_say "
                f"with more texts"
            )
        messages = [dict(m) for m in request.messages] or [
            {"role": "user", "content": decode(request.prompt_tokens)}
        ]
        return self.answer(messages)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self._under_way += change
            self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineFailed(f"{self.settings.name}: {self._dead}")


def conversation(request: GenerateRequest) -> np.ndarray:
    """Return the prompt of a request, int32, after the tokens that the request extends."""
    if request.prompt_tokens:
        return np.array(request.prompt_tokens, np.int32)
    if request.prefix_tokens is None:
        return encode(request.messages, request.tools)
    end = [] if request.prefix_tokens[-1] == END else [END]
    return np.concatenate(
        [request.prefix_tokens, end, encode(request.messages[request.prefix_messages :])]
    ).astype(np.int32)


def echo(messages: list[dict[str, Any]]) -> str:
    """Return the content of the last message."""
    return str(messages[-1]["content"])


def _spoken(text: str, request: GenerateRequest, room: int) -> tuple[np.ndarray, FinishReason, str]:
    s = request.sampling
    text, stop_text = cut_at_stop(text, s.stop)
    ids = [*text.encode(), END]
    limit = min(s.max_tokens, room)
    if len(ids) > limit:
        return np.array(ids[:limit], np.int32), "length", ""
    return np.array(ids, np.int32), "stop", stop_text
