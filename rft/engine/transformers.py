"""An engine without vLLM: a Hugging Face model, batched sampling with a key/value cache, one thread.

Knows nothing of Ray, trainer or buffer.  All requests that wait are batched; completions of the same prompt share its prefill; rows that
end leave the batch.  Everything that touches the model happens on one thread, between two decode steps, so pause, load and resume need
no locks around the model.

Reproducible: each row draws from its own random numbers (seed + index in the request), so which rows are beside it changes nothing but
rounding.  Bit equality needs the same batches: submit the same requests in the same order while paused, with the same threads.
Invariant: every generated token is labelled with the version whose weights made its logits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from msgspec.structs import replace

from rft.engine.base import check_base, check_row, engine, no_scores, not_loaded
from rft.engine.chat import Chat, load_tokenizer
from rft.engine.parsing import Parsers
from rft.engine.settings import EngineSettings
from rft.engine.weights import Intake
from rft.errors import DeadlineExceeded, EngineFailed, OutOfMemory, RftError, SetupError, is_out_of_memory
from rft.types import rotary
from rft.types.completion import Completion, FinishReason, VersionSpan
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, HeldRequests, LoadReport, ScoreRow, WeightManifest

if TYPE_CHECKING:
    import torch

    from rft.engine.sampling import RowState

log = logging.getLogger(__name__)
T = TypeVar("T")

FIXED = Version(1, 0)
PREFILL_TOKENS = 4096  # of one forward; padded
KV_CACHE_BYTES = 2 << 30
SCORE_BYTES = 256 << 20  # of the logits that are looked at together when given tokens are scored
_SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # models that change their logits after the output layer
STOP_WINDOW = 4  # tokens decoded per character of a stop string: a character can take four byte tokens


@dataclass(eq=False)
class _Job:
    """A request under way; its rows' completions are gathered in `done`."""

    request: GenerateRequest
    prompt: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    done: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class _Row:
    """One completion being written."""

    job: _Job
    index: int
    state: RowState
    limit: int  # most tokens it may write
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens that are in the cache: all but the last one written, which is the next input."""
        return len(self.state.prompt) + len(self.state.written) - 1

    @property
    def need(self) -> int:
        return len(self.state.prompt) + self.limit


@engine("transformers")
class TransformersEngine:
    """Made by `start`; `generate`, `pause`, `load`, `resume` may be called from any event loop."""

    def __init__(self, settings: EngineSettings, model: Any, chat: Chat) -> None:
        from rft.engine.adapted import Adapted
        from rft.engine.kvcache import RowCache

        self.settings = settings
        self.model = model
        self.version: Version | None = FIXED if settings.fixed_weights else None
        self._chat = chat
        self._parse = Parsers(settings, chat.tokenizer)
        self._adapted = Adapted(model, settings.model_path)
        self._device: torch.device = next(model.parameters()).device
        self._cache = RowCache(self._device)
        self._seeds = np.random.Generator(np.random.Philox(settings.seed))
        self._ends = _end_tokens(model, chat.tokenizer)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._intake = Intake()
        self._paused = False
        self._step_s = 0.0  # of the last token of every row
        self._stale = False  # the cache was made by older weights and has to be made anew
        self._closing = False
        self._dead: BaseException | None = None
        self._wake = threading.Condition()
        self._counted = dict.fromkeys(
            ("requests", "prompt_tokens", "prefilled_tokens", "recomputed_tokens", "generated_tokens"), 0
        )
        self._thread = threading.Thread(target=self._run, name=settings.name, daemon=True)
        self._thread.start()

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Loads model and tokenizer of `model_path`.  Raises SetupError when it cannot."""
        return await asyncio.to_thread(lambda: cls(settings, _load_model(settings), Chat(settings, load_tokenizer(settings))))

    # ------------------------------------------------------------ Engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.version is None:
            raise not_loaded(self.settings.name)
        prompt = self._chat.encode(request)
        choices = self._chat.choices(request) if request.choices else []
        loop = asyncio.get_running_loop()
        job = _Job(request, prompt, loop, loop.create_future())
        rows = [self._row(job, i, choices) for i in range(request.n)]
        with self._wake:
            self._check_alive()
            self._counted["requests"] += request.n
            self._counted["prompt_tokens"] += len(prompt)
            self._waiting.extend(rows)
            self._wake.notify()
        return await self._within("answer a request", job.future, self.settings.request_timeout_s)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        """Under the weights there are now, at the row's temperature."""
        if self.version is None:
            raise not_loaded(self.settings.name)
        tokens = check_row(row, self.settings, longest=self.settings.max_model_len)
        if scaled := [name for name in _SCALED if getattr(self.model.config, name, None) not in (None, 1.0)]:
            raise ValueError(f"{self.settings.name}: the model has {scaled[0]}, which this engine does not score with; use vllm")
        return await self._on_thread("score tokens", lambda: self._score(tokens, row.prompt_length, row.temperature))

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        raise no_scores(self.settings.name)

    async def pause(self, *, clear_cache: bool = True) -> None:
        def stop() -> None:
            self._paused = True
            self._stale = self._stale or (clear_cache and bool(self._rows))

        await self._on_thread("pause", stop)

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """Only while paused.  Where the report is not clean the old weights may be served on, under their old label."""
        if self.settings.fixed_weights:
            raise EngineFailed(f"{self.settings.name}: its weights are fixed (fixed_weights); nothing can be published to it")
        if not self._paused and self.version is not None:
            raise EngineFailed(f"{self.settings.name}: load needs a paused engine; call pause first")

        if manifest.adapter is not None and self.version is None:
            await asyncio.to_thread(check_base, self.settings.name, self.settings.model_path, manifest.adapter)

        def load() -> LoadReport:
            from rft.engine.inplace import load_in_place

            report = load_in_place(self.model, manifest, self._intake, self._adapted)
            if report.whole:
                self.version = report.version
            return replace(report, held=self._held())

        return await self._on_thread("load weights", load)

    async def resume(self) -> None:
        def go() -> None:
            self._paused = False

        await self._on_thread("resume", go)

    async def health(self) -> None:
        await self._on_thread("answer a health check", lambda: None)

    async def metrics(self) -> list[Metric]:
        running = Metric("engine/requests_running", float(len(self._rows) + len(self._waiting)), "sum")
        differing = Metric("engine/tokenization_differs", float(self._chat.differing), "sum")
        return [running, differing, *(Metric(f"engine/{name}", float(value), "sum") for name, value in self._counted.items())]

    async def close(self) -> None:
        """Ends the thread; what is under way fails.  May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self.settings.call_timeout_s)
        self._intake.close()

    # ------------------------------------------------------------ calls from event loops

    def _row(self, job: _Job, index: int, choices: Sequence[int]) -> _Row:
        from rft.engine.sampling import RowState

        sampling = job.request.sampling
        seed = sampling.seed + index if sampling.seed is not None else int(self._seeds.integers(1 << 62))
        limit = min(1 if choices else sampling.max_tokens, self.settings.max_model_len - len(job.prompt))
        return _Row(job, index, RowState(sampling, seed, job.prompt, self._ends, choices=choices), limit)

    async def _on_thread(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, run by the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = call()
            except BaseException as e:
                _answer(loop, future, error=e)
                raise
            _answer(loop, future, result)

        with self._wake:
            self._check_alive()
            self._commands.append(run)
            self._wake.notify()
        return await self._within(what, future, self.settings.call_timeout_s)

    async def _within(self, what: str, future: asyncio.Future[T], limit: float) -> T:
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"{self.settings.name}: the engine did not {what} within {limit:.0f} s") from None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise _failure(self.settings.name, self._dead)
        if self._closing:
            raise EngineFailed(f"{self.settings.name} is closed")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        import torch

        if self._device.type == "cpu":
            torch.set_num_threads(self.settings.cpu_threads)
        error: BaseException = EngineFailed(f"{self.settings.name} is closed")
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as e:  # whatever ends the thread is told to everyone who waits for it
            log.exception("%s stopped", self.settings.name)
            error = e
        with self._wake:
            self._dead = error
            rows, self._rows = [*self._rows, *self._waiting], []
            self._waiting.clear()
            commands, self._commands = self._commands, deque()
        for row in rows:
            _answer(row.job.loop, row.job.future, error=_failure(self.settings.name, error))
        if commands:
            log.warning("%s: %d calls were waiting when it stopped", self.settings.name, len(commands))

    def _turn(self) -> bool:
        """One thing at a time: commands first, then new rows, then one token for every row.  False = the engine is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._commands or (not self._paused and (self._rows or self._waiting)))
            if self._closing:
                return False
            command = self._commands.popleft() if self._commands else None
        if command is not None:
            command()
            return True
        self._drop_abandoned()
        if self._stale:
            self._recompute()
        self._admit()
        if self._rows:
            began = time.monotonic()
            self._decode()
            self._step_s = time.monotonic() - began
        return True

    def _held(self) -> HeldRequests:
        rows = self._rows
        return HeldRequests(
            requests=len(rows) + len(self._waiting),
            recomputed_tokens=sum(row.cached for row in rows) if self._stale else 0,
            tokens_per_s=len(rows) / self._step_s if self._step_s else 0.0,
        )

    def _admit(self) -> None:
        """Prefill as many waiting rows as there is room for, each prompt once."""
        new: list[_Row] = []
        with self._wake:
            while self._waiting and self._fits([*self._rows, *new, self._waiting[0]]):
                new.append(self._waiting.popleft())
        while new:
            prompts = list({tuple(row.state.prompt): None for row in new})
            longest, count = 0, 0
            for prompt in prompts:
                if count and (self.settings.deterministic or max(longest, len(prompt)) * (count + 1) > PREFILL_TOKENS):
                    break
                longest, count = max(longest, len(prompt)), count + 1
            chosen = set(prompts[:count])
            batch = [row for row in new if tuple(row.state.prompt) in chosen]
            new = [row for row in new if tuple(row.state.prompt) not in chosen]
            self._prefill(batch, prompts[:count])

    def _prefill(self, batch: list[_Row], prompts: list[tuple[int, ...]]) -> None:
        number = {prompt: i for i, prompt in enumerate(prompts)}
        source = [number[tuple(row.state.prompt)] for row in batch]
        logits = self._forward([list(p) for p in prompts])
        self._counted["prefilled_tokens"] += sum(map(len, prompts))
        first = len(self._rows)
        self._rows += batch
        capacity = max(row.need for row in self._rows)
        into = list(range(first, len(self._rows)))
        self._cache.keep(source, [len(row.state.prompt) for row in batch], into, rows=len(self._rows), capacity=capacity)
        self._write(logits[source], batch)

    def _recompute(self) -> None:
        """Keys and values of all rows anew, under the weights there are now."""
        self._stale = False
        rows, at = self._rows, 0
        while at < len(rows):
            count, longest = 1, rows[at].cached
            while (
                not self.settings.deterministic
                and at + count < len(rows)
                and max(longest, rows[at + count].cached) * (count + 1) <= PREFILL_TOKENS
            ):
                longest, count = max(longest, rows[at + count].cached), count + 1
            batch = rows[at : at + count]
            self._forward([[*row.state.prompt, *row.state.written][: row.cached] for row in batch])
            lengths = [row.cached for row in batch]
            into = list(range(at, at + count))
            self._cache.keep(list(range(count)), lengths, into, rows=len(rows), capacity=max(row.need for row in rows))
            self._counted["recomputed_tokens"] += sum(lengths)
            at += count

    def _forward(self, sequences: list[list[int]]) -> torch.Tensor:
        """Logits [N, V] after the last token of each of N sequences; their keys wait in the cache for `keep`."""
        import torch

        lengths = torch.tensor([len(s) for s in sequences], device=self._device)
        longest = int(lengths.max())
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=self._device)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()[None, None]
        kept, where = (lengths - 1).unique(return_inverse=True)
        self._cache.begin_prefill()
        out = self.model(
            input_ids=ids,
            attention_mask=causal,
            position_ids=torch.arange(longest, device=self._device).expand(len(sequences), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=kept,
        )
        result: torch.Tensor = out.logits[torch.arange(len(sequences), device=self._device), where]
        return result

    def _score(self, tokens: list[int], first: int, temperature: float) -> np.ndarray:
        """float32 [len(tokens) - first]; the logits of a few positions at a time."""
        import torch

        from rft.engine.kvcache import RowCache

        cache = RowCache(self._device)
        cache.begin_prefill()
        ids, count = torch.tensor([tokens], device=self._device), len(tokens)
        hidden = self.model.base_model(
            input_ids=ids,
            attention_mask=torch.ones(count, count, dtype=torch.bool, device=self._device).tril()[None, None],
            position_ids=torch.arange(count, device=self._device)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, first - 1 : -1]
        head, chunk = self.model.get_output_embeddings(), max(1, SCORE_BYTES // (4 * self.model.config.vocab_size))
        out = np.empty(count - first, np.float32)
        for at in range(0, len(out), chunk):
            logits = head(hidden[at : at + chunk]).float() / (temperature or 1.0)
            wanted = ids[0, first + at : first + at + len(logits), None]
            out[at : at + chunk] = logits.log_softmax(-1).gather(1, wanted)[:, 0].cpu().numpy()
        return out

    def _decode(self) -> None:
        """One token for every row."""
        import torch

        rows = list(self._rows)
        if self.settings.deterministic:
            logits = torch.cat([self._next([row], i) for i, row in enumerate(rows)])
        else:
            logits = self._next(rows)
        self._write(logits, rows)

    def _next(self, rows: list[_Row], only: int | None = None) -> torch.Tensor:
        """Logits [N, V] after the last token of each of `rows`: all there are, or the one at place `only`."""
        import torch

        cached = torch.tensor([row.cached for row in rows], device=self._device)
        length = int(cached.max()) + 1
        seen = torch.arange(length, device=self._device) <= cached.unsqueeze(1)
        self._cache.begin_decode(cached, length, only)
        out = self.model(
            input_ids=torch.tensor([[row.state.written[-1]] for row in rows], device=self._device),
            attention_mask=seen[:, None, None],
            position_ids=cached.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _write(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        """Draw a token for each of `rows` and let those that are complete leave."""
        from rft.engine.sampling import draw

        assert self.version is not None
        tokens, logps = draw(logits, [row.state for row in rows])
        self._counted["generated_tokens"] += len(tokens)
        ended: list[tuple[_Row, FinishReason]] = []
        for row, token, logp in zip(rows, tokens, logps, strict=True):
            at = len(row.state.written)
            row.state.written.append(token)
            row.logprobs.append(logp)
            if row.spans and row.spans[-1].version == self.version:
                row.spans[-1] = VersionSpan(self.version, row.spans[-1].start, at + 1)
            else:
                row.spans.append(VersionSpan(self.version, at, at + 1))
            if (reason := self._end(row, token)) is not None:
                ended.append((row, reason))
        self._remove([row for row, _ in ended])
        for row, reason in ended:
            self._finish(row, reason)

    def _end(self, row: _Row, token: int) -> FinishReason | None:
        sampling, written = row.state.sampling, row.state.written
        if token in self._ends and not sampling.ignore_eos:
            return "stop"
        if sampling.stop and len(written) > sampling.min_tokens:
            window = written[-STOP_WINDOW * (1 + max(map(len, sampling.stop))) :]
            text = self._chat.decode(window)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(written) >= row.limit else None

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        text = self._chat.decode(row.state.written)
        for stop in row.state.sampling.stop:
            text = text.split(stop, 1)[0]
        job = row.job
        made = Completion(
            prompt_tokens=np.array(job.prompt, np.int32),
            tokens=np.array(row.state.written, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            text=text,
            finish_reason=reason,
            version_spans=tuple(row.spans),
            sampling=job.request.sampling,
            engine=self.settings.name,
        )
        job.done[row.index] = self._parse(made, job.request.tools)
        if len(job.done) == job.request.n:
            _answer(job.loop, job.future, [job.done[i] for i in range(job.request.n)])

    def _remove(self, ended: list[_Row]) -> None:
        """Rows that ended leave the batch; the last row moves into the gap."""
        for row in ended:
            i = self._rows.index(row)
            last = self._rows.pop()
            if last is not row:
                self._rows[i] = last
            self._cache.drop(i, last.cached)

    def _drop_abandoned(self) -> None:
        """Nobody waits any more for the rows of a cancelled request."""
        self._remove([row for row in self._rows if row.job.future.cancelled()])
        with self._wake:
            if any(row.job.future.cancelled() for row in self._waiting):
                self._waiting = deque(row for row in self._waiting if not row.job.future.cancelled())

    def _fits(self, rows: list[_Row]) -> bool:
        """Whether the cache may hold `rows`: the number of sequences and its bytes are bounded; one row always fits."""
        if len(rows) == 1:
            return True
        limit = self.settings.kv_cache_bytes or KV_CACHE_BYTES
        return (
            len(rows) <= self.settings.max_num_seqs and len(rows) * max(r.need for r in rows) * _token_bytes(self.model) <= limit
        )


def _load_model(settings: EngineSettings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from rft.engine import kvcache, packed

    kvcache.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model_path,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=kvcache.ATTENTION,
            trust_remote_code=settings.trust_remote_code,
            **rotary.applied_to(settings.model_path, settings.extra_engine_args),
        )
    except (OSError, ValueError, TypeError) as e:
        raise SetupError(f"{settings.name}: no model could be loaded from {settings.model_path}: {e}") from e
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise SetupError(
            f"{settings.name}: the transformers engine has full attention only; "
            f"{settings.model_path} has {', '.join(sorted(kinds))}: use vllm"
        )
    model = model.to(settings.device).eval().requires_grad_(False)
    if settings.fixed_weights:
        packed.pack(model)
    return model


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    for given in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(given) if isinstance(given, list | tuple) else {given} if given is not None else set()
    return tuple(sorted(ids))


def _token_bytes(model: Any) -> int:
    """Bytes of one token in the cache: keys and values of all layers."""
    c = model.config
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return int(2 * c.num_hidden_layers * c.num_key_value_heads * size * model.dtype.itemsize)


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T | None = None, *, error: BaseException | None = None
) -> None:
    def settle() -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


def _failure(name: str, error: BaseException) -> RftError:
    if isinstance(error, RftError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(
            f"{name} ran out of memory.  Lower explorer.rollout_model.max_num_seqs or model.max_model_len, or give the machine more "
            f"({type(error).__name__}: {error})"
        )
    return EngineFailed(f"{name}: {type(error).__name__}: {error}")
