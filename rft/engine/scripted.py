"""An engine that says what a test tells it to.  No torch, no model: answers come from a script,
log-probs from a hash.

It fulfils `rft.types.ports.Engine` and passes the engine contract.  Its tokens are bytes (ids
0..255) and two marks; a conversation is rendered as `BEGIN role \\n content END ...`, so an
assistant's answer continues its prompt token by token. Invariant: equal weights, prompt and tokens
give equal log-probs, and other weights give other ones; so a load that did not happen shows.
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
from rft.engine.base import BaseEngine, check_prompt, check_row, check_tokens, cut_at_stop
from rft.engine.settings import EngineSettings
from rft.engine.weights import WeightIntake
from rft.errors import ConfigError, EngineFailed
from rft.types.completion import Completion, FinishReason, VersionSpan
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, LoadReport, ScoreRow, WeightManifest
from rft.types.thoughts import TAIL_TOKENS, opens_thought

BEGIN = 256  # marks around a message; END is the end-of-sequence token
END = 257
VOCAB_SIZE = 258
FIXED = Version(1, 0)
Answer = Callable[[list[dict[str, Any]]], str]


def encode(messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
    """int32 token ids of a conversation, ready for the assistant to answer."""
    head = [{"role": "tools", "content": json.dumps(list(tools), sort_keys=True)}] if tools else []
    ids: list[int] = []
    for m in [*head, *messages]:
        ids += [BEGIN, *f"{m['role']}\n{m.get('content') or ''}".encode(), END]
    return np.array([*ids, BEGIN, *b"assistant\n"], np.int32)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; marks are left out."""
    return bytes(int(t) for t in tokens if t < BEGIN).decode("utf-8", "replace")


def weights_key(manifest: WeightManifest) -> int:
    """What the log-probs of a scripted engine depend on: the hashes of all tensors, or the version
    where there are none.
    """
    text = "".join(sorted(t.name + t.xxh3_128 for t in manifest.tensors)) or str(
        manifest.version.published
    )
    return xxhash.xxh3_64_intdigest(text.encode())


def logprobs(
    prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray, key: int
) -> np.ndarray:
    """float32 [R] in [-2, -0.1]: what an engine with the weights `key` reports for `tokens` after
    `prompt`.  A scorer may use it too.
    """
    seen = xxhash.xxh3_64(np.asarray(prompt, np.int32).tobytes(), seed=key)
    out = np.empty(len(tokens), np.float32)
    for i, token in enumerate(np.asarray(tokens, np.int32)):
        seen.update(token.tobytes())
        out[i] = -0.1 - 1.9 * (seen.intdigest() >> 11) / (1 << 53)
    return out


class ScriptedEngine(BaseEngine):
    """`will_say` queues answers (one per completion); when the queue is empty `answer(messages)` is
    asked, if there is one.

    Events for tests: `hold()` stops all answers, `hold(after_tokens=k)` stops each once k tokens
    are written, `release()` lets them go on; `waiting(n)` waits until n completions are under way;
    `will_fail(error)` fails the next request.
    """

    def __init__(
        self, *texts: str, answer: Answer | None = None, settings: EngineSettings | None = None
    ) -> None:
        super().__init__(settings or EngineSettings(engine_type="scripted", name="scripted-0"))
        self.answer = answer
        self.calls: list[GenerateRequest] = []
        self.version = FIXED  # serves at once; a load replaces it
        self.loads: list[WeightManifest] = []
        self._key = xxhash.xxh3_64_intdigest(str(FIXED).encode())
        # the tensors of the first load; later ones must have the same
        self._names: frozenset[str] | None = None
        self._texts: deque[str] = deque(texts)
        self._failures: deque[Exception] = deque()
        self._dead = ""
        self._go = asyncio.Event()  # cleared while paused
        self._go.set()
        self._held: asyncio.Event | None = None
        self._hold_after = 0
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._num_tokens = 0
        self._intake = WeightIntake()

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """From a configuration: `extra_engine_args` may hold `texts` (a list) or `answer`
        ("pkg.module:function"); else it echoes.
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
        found = plugins.REGISTRY.get("answer", answer).obj if answer else (None if texts else echo)
        return cls(*texts, answer=found, settings=settings)

    # ------------------------------------------------------------ for tests

    def will_say(self, *texts: str) -> None:
        """The next completions, in order."""
        self._texts.extend(texts)

    def will_fail(self, error: Exception) -> None:
        """The next request raises `error`."""
        self._failures.append(error)

    def die(self, why: str = "killed by the test") -> None:
        """From now on every call raises EngineFailed."""
        self._dead = why
        self.release()
        self._go.set()

    def hold(self, *, after_tokens: int = 0) -> None:
        """Completions stop once `after_tokens` tokens are written, until `release`."""
        self._held = asyncio.Event()
        self._hold_after = after_tokens

    def release(self) -> None:
        if self._held is not None:
            self._held.set()
            self._held = None

    async def waiting(self, count: int, *, timeout_s: float = 10.0) -> None:
        """Return when `count` completions are under way (held, paused, or being written)."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._under_way >= count)

    # ------------------------------------------------------------ Engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self._check_alive()
        with self.admission.of(request):
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
        check_prompt(len(prompt), self.settings, goes_on=request.prefix_tokens is not None)
        check_tokens(prompt.tolist(), VOCAB_SIZE, self.settings.name)
        texts = [self._next(request) for _ in range(request.n)]
        await self._count(request.n)
        try:
            return list(
                await asyncio.gather(*(self._write(request, prompt, text) for text in texts))
            )
        finally:
            await self._count(-request.n)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        """What this engine would have reported had it written these tokens."""
        self._check_alive()
        tokens = check_row(
            row, self.settings, longest=self.settings.max_model_len, vocab_size=VOCAB_SIZE
        )
        return logprobs(tokens[: row.prompt_length], tokens[row.prompt_length :], self._key)

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
        if manifest.broadcast is not None:  # the sender may live in this event loop's process
            taken = (await asyncio.to_thread(self._intake.take, manifest)).report
            self._check_alive()
        elif manifest.tensors:
            taken = self._intake.take(manifest).report
        if taken.failed:
            return taken
        names = frozenset(t.name for t in manifest.tensors)
        wanted = names if self._names is None else self._names
        whole = names == wanted and not taken.bad_hash
        if whole:
            self._names = names
            self.loads.append(manifest)
            self.version = manifest.version
            self._key = weights_key(manifest)
        return replace(
            taken,
            version=manifest.version,
            num_tensors=len(names) if whole else 0,
            nbytes=manifest.nbytes if whole else 0,
            missing=tuple(sorted(wanted - names)),
            unexpected=tuple(sorted(names - wanted)),
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
        said, reason, stop_text = _spoken(text, request, self.settings.max_model_len - len(prompt))
        logps = np.empty(len(said), np.float32)
        spans: list[VersionSpan] = []
        hold = self._held
        for i in range(len(said)):
            if hold is not None and i == self._hold_after:
                await hold.wait()
            if not self._go.is_set():
                await self._go.wait()
            self._check_alive()
            assert self.version is not None
            if spans and spans[-1].version == self.version:
                spans[-1] = VersionSpan(self.version, spans[-1].start, i + 1)
            else:
                logps[i:] = logprobs(prompt, said, self._key)[i:]
                spans.append(VersionSpan(self.version, i, i + 1))
        self._num_tokens += len(said)
        return Completion(
            prompt_tokens=prompt,
            tokens=said,
            logprobs=logps,
            text=decode(said),
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
    """int32: the prompt of a request, after the tokens that it goes on from."""
    if request.prompt_tokens:
        return np.array(request.prompt_tokens, np.int32)
    if request.prefix_tokens is None:
        return encode(request.messages, request.tools)
    end = [] if request.prefix_tokens[-1] == END else [END]
    return np.concatenate(
        [request.prefix_tokens, end, encode(request.messages[request.prefix_messages :])]
    ).astype(np.int32)


def echo(messages: list[dict[str, Any]]) -> str:
    """Says the last message again."""
    return str(messages[-1]["content"])


def _spoken(text: str, request: GenerateRequest, room: int) -> tuple[np.ndarray, FinishReason, str]:
    s = request.sampling
    text, stop_text = cut_at_stop(text, s.stop)
    ids = [*text.encode(), END]
    limit = min(s.max_tokens, room)
    if len(ids) > limit:
        return np.array(ids[:limit], np.int32), "length", ""
    return np.array(ids, np.int32), "stop", stop_text
