"""An engine without vLLM: a Hugging Face model, batched sampling with a key/value cache, one
thread.

Independent of Ray, trainer or buffer.  All waiting requests are batched; completions of one
prompt share its prefill; rows that end leave the batch.  The model is used on one thread, and
pause, load and resume run between two decode steps, so the model needs no locks.

Reproducible: each row draws from its own random numbers (seed + index in the request), so other
rows affect only rounding.  Bit equality needs the same batches: submit the same requests in the
same order while paused, with the same threads.
Invariant: every generated token is labelled with the version whose weights computed its logits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from msgspec.structs import replace

from rft.engine.auto_class import auto_class
from rft.engine.base import RequestFailed, checked_model, engine
from rft.engine.chat import Chat, load_images, load_tokenizer
from rft.engine.local_engine import LocalEngine
from rft.engine.settings import EngineSettings
from rft.errors import (
    DeadlineExceeded,
    EngineFailed,
    OutOfMemory,
    RftError,
    SetupError,
    is_out_of_memory,
)
from rft.types import rotary
from rft.types.completion import Completion, FinishReason, TokenScores
from rft.types.ids import FIXED
from rft.types.ports import GenerateRequest, LoadReport, PausedRequests, ScoreRow, WeightManifest

if TYPE_CHECKING:
    import torch

    from rft.engine.rowbatch import BatchJob, BatchRow

log = logging.getLogger(__name__)
T = TypeVar("T")

# tokens decoded per character of a stop string: a character can take four byte tokens
STOP_WINDOW = 4


@dataclass(eq=False)
class _Command:
    """A call that the thread runs between two steps."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def run(self) -> None:
        try:
            result = self.call()
        except BaseException as e:
            self.fail(e)
            raise
        _answer(self.loop, self.future, result)

    def fail(self, error: BaseException) -> None:
        _answer(self.loop, self.future, error=error)


@engine("transformers")
class TransformersEngine(LocalEngine):
    """Created by `start`; `generate`, `pause`, `load`, `resume` may be called from any event loop."""

    def __init__(self, settings: EngineSettings, model: Any, chat: Chat) -> None:
        from rft.engine.model_loader import ModelLoader
        from rft.engine.rowbatch import RowBatch

        super().__init__(settings, chat)
        self.model = model
        self.version = FIXED if settings.fixed_weights else None
        self._loader = ModelLoader(model, settings.model_path)
        self._batch = RowBatch(model, settings, self._counted)
        self._seeds = np.random.Generator(np.random.Philox(settings.seed))
        self._ends = _end_tokens(model, chat.tokenizer)
        self._waiting: deque[BatchRow] = deque()
        self._new: list[BatchRow] = []  # admitted rows whose prompts are not computed yet
        self._commands: deque[_Command] = deque()
        self._step_s = 0.0  # duration of the last decode step
        self._closing = False
        self._dead: BaseException | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=settings.name, daemon=True)
        self._thread.start()

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Load model and tokenizer of `model_path`.  Raises SetupError on failure."""
        return await asyncio.to_thread(lambda: cls._load(settings))

    @classmethod
    def _load(cls, settings: EngineSettings) -> Self:
        model = _load_model(settings)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        chat = Chat(settings, load_tokenizer(settings), vocab_size, load_images(settings))
        return cls(settings, model, chat)

    # ------------------------------------------------------------ Engine

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        from rft.engine.rowbatch import BatchJob

        prompt = await self.prompt(request)
        choices = self._chat.choices(request) if request.choices else []
        loop = asyncio.get_running_loop()
        places = self._chat.places(request, prompt)
        sight = self._chat.sight(prompt, places, request.images)
        job = BatchJob(request, prompt, loop, loop.create_future(), places, sight)
        with self.admission.counted(request):
            rows = [self._row(job, i, choices) for i in range(request.n)]
            with self._wake:
                self._check_alive()
                self._counted["requests"] += request.n
                self._counted["prompt_tokens"] += len(prompt)
                self._waiting.extend(rows)
                self._wake.notify()
            return await self._within(
                "answer a request", job.future, self.settings.request_timeout_s
            )

    async def score_own(self, row: ScoreRow) -> TokenScores:
        row, tokens = await self.row(row, longest=self.settings.max_model_len)
        sight = self._chat.sight(tokens, row.places, row.images)

        def score() -> TokenScores:
            assert self.version is not None, "`row` checks it"
            known = len(self._chat.tokenizer)
            scored = self._batch.score(
                tokens, row.prompt_length, row.temperature, row.top, known, sight
            )
            return TokenScores(version=self.version, **scored)

        return await self._on_thread("score tokens", score)

    async def pause(self, *, clear_cache: bool = True) -> None:
        def stop() -> None:
            self._paused = True
            self._batch.stale = self._batch.stale or (clear_cache and bool(self._batch.rows))

        await self._on_thread("pause", stop)

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """Load weights; requires a paused engine.

        After a report with errors the old weights may still be served, under their old label.
        """
        await self.check_load(manifest)

        def load() -> LoadReport:
            report = self._loader.load(manifest)
            if report.intact:
                self.version = report.version
            return replace(report, paused=self._paused_requests())

        return await self._on_thread("load weights", load)

    async def resume(self) -> None:
        def go() -> None:
            self._paused = False

        await self._on_thread("resume", go)

    async def health(self) -> None:
        await self._on_thread("answer a health check", lambda: None)

    @property
    def running(self) -> int:
        return len(self._batch.rows) + len(self._waiting)

    async def close(self) -> None:
        """Stop the thread; requests in progress fail.  May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self.settings.call_timeout_s)
        self._loader.close()

    # ------------------------------------------------------------ calls from event loops

    def _row(self, job: BatchJob, index: int, choices: Sequence[int]) -> BatchRow:
        from rft.engine.rowbatch import BatchRow
        from rft.engine.sampling import RowState

        sampling = job.request.sampling
        seed = (
            sampling.seed + index
            if sampling.seed is not None
            else int(self._seeds.integers(1 << 62))
        )
        limit = min(
            1 if choices else sampling.max_tokens, self.settings.max_model_len - len(job.prompt)
        )
        return BatchRow(
            job, index, RowState(sampling, seed, job.prompt, self._ends, choices=choices), limit
        )

    async def _on_thread(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on the engine's thread between two steps; return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            self._check_alive()
            self._commands.append(_Command(call, loop, future))
            self._wake.notify()
        return await self._within(what, future, self.settings.call_timeout_s)

    async def _within(self, what: str, future: asyncio.Future[T], limit: float) -> T:
        try:
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.settings.name}: the engine did not {what} within {limit:.0f} s"
            ) from None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise _failure(self.settings.name, self._dead)
        if self._closing:
            raise EngineFailed(f"{self.settings.name} is closed")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        import torch

        if self._batch.device.type == "cpu":
            torch.set_num_threads(self.settings.cpu_threads)
        error: BaseException = EngineFailed(f"{self.settings.name} is closed")
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as e:  # passed to all waiting callers
            log.exception("%s stopped", self.settings.name)
            error = e
        with self._wake:
            self._dead = error
            rows = [*self._batch.rows, *self._new, *self._waiting]
            self._batch.rows = []
            self._new = []
            self._waiting.clear()
            commands, self._commands = self._commands, deque()
        failure = _failure(self.settings.name, error)
        for row in rows:
            _answer(row.job.loop, row.job.future, error=failure)
        for command in commands:
            command.fail(failure)

    def _turn(self) -> bool:
        """Run one command, or else admit new rows and generate one token for every row; False = the
        engine is closed.
        """
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._closing
                    or self._commands
                    or (not self._paused and (self._batch.rows or self._waiting))
                )
            )
            if self._closing:
                return False
            command = self._commands.popleft() if self._commands else None
        if command is not None:
            command.run()
            return True
        self._drop_abandoned()
        if self._batch.stale:
            self._batch.recompute()
        self._admit()
        if rows := list(self._batch.rows):
            began = time.monotonic()
            self._write(self._batch.decode(), rows)
            self._step_s = time.monotonic() - began
        return True

    def _paused_requests(self) -> PausedRequests:
        running = len(self._batch.rows)
        return PausedRequests(
            requests=running + len(self._waiting),
            recomputed_tokens=self._batch.stale_tokens,
            tokens_per_s=running / self._step_s if self._step_s else 0.0,
        )

    def _admit(self) -> None:
        """Prefill as many waiting rows as fit, each prompt once."""
        with self._wake:
            while self._waiting and self._batch.fits([*self._new, self._waiting[0]]):
                self._new.append(self._waiting.popleft())
        while self._new:
            prompts = self._batch.first_prompts(self._new)
            chosen = [row for row in self._new if row.prompt in prompts]
            self._write(self._batch.prefill(chosen, prompts), chosen)
            self._new = [row for row in self._new if row not in chosen]

    def _write(self, logits: torch.Tensor, rows: list[BatchRow]) -> None:
        """Draw a token for each of `rows` and remove completed rows."""
        from rft.engine.sampling import draw

        assert self.version is not None
        tokens, logps = draw(logits, [row.state for row in rows])
        self._counted["generated_tokens"] += len(tokens)
        ended: list[tuple[BatchRow, FinishReason]] = []
        for row, token, logp in zip(rows, tokens, logps, strict=True):
            row.write(token, logp, self.version)
            if (reason := self._end(row, token)) is not None:
                ended.append((row, reason))
        self._batch.remove([row for row, _ in ended])
        for row, reason in ended:
            try:
                self._finish(row, reason)
            except Exception as e:  # an unreadable answer fails only its own request
                failure = (
                    e
                    if isinstance(e, RequestFailed)
                    else RequestFailed(f"{self.settings.name}: {type(e).__name__}: {e}")
                )
                _answer(row.job.loop, row.job.future, error=failure)

    def _end(self, row: BatchRow, token: int) -> FinishReason | None:
        sampling = row.state.sampling
        written = row.state.written
        if token in self._ends and not sampling.ignore_eos:
            return "stop"
        if sampling.stop and len(written) > sampling.min_tokens:
            window = written[-STOP_WINDOW * (1 + max(map(len, sampling.stop))) :]
            text = self._chat.decode(window)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(written) >= row.limit else None

    def _finish(self, row: BatchRow, reason: FinishReason) -> None:
        job = row.job
        job.done[row.index] = self.completion(
            job.request,
            job.prompt,
            row.state.written,
            row.logprobs,
            reason=reason,
            spans=row.spans,
            experts=row.experts,
            places=job.places,
        )
        if len(job.done) == job.request.n:
            _answer(job.loop, job.future, [job.done[i] for i in range(job.request.n)])

    def _drop_abandoned(self) -> None:
        """Drop the rows of requests that were cancelled or failed."""
        self._batch.remove([row for row in self._batch.rows if row.job.future.done()])
        with self._wake:
            if any(row.job.future.done() for row in self._waiting):
                self._waiting = deque(row for row in self._waiting if not row.job.future.done())


def _load_model(settings: EngineSettings) -> Any:
    import torch
    from transformers import AutoConfig

    from rft.engine import forwards

    how: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    how |= rotary.applied_to(settings.model_path, settings.extra_engine_args)
    try:
        config = AutoConfig.from_pretrained(settings.model_path, **how)
        loaded = auto_class(config).from_pretrained(
            settings.model_path,
            output_loading_info=True,
            dtype=getattr(torch, settings.dtype),
            **how,
        )
    except (OSError, ValueError, TypeError) as e:
        raise SetupError(
            f"{settings.name}: no model could be loaded from {settings.model_path}: {e}"
        ) from e
    model = checked_model(settings.name, settings.model_path, loaded)
    # config.json decides on tying, as in trainer and vLLM, even if the files hold a separate output
    # layer
    model.tie_weights()
    model = model.to(settings.device).eval().requires_grad_(False)
    forwards.prove(model, settings.name)
    return model


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens as vLLM does: of generation_config.json, or else config.json, and the
    tokenizer's.
    """
    ids: set[int] = set()
    for configured in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        ids |= (
            set(configured)
            if isinstance(configured, list | tuple)
            else {configured}
            if configured is not None
            else set()
        )
    return tuple(sorted(ids))


def _answer(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    result: T | None = None,
    *,
    error: BaseException | None = None,
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
            f"{name} ran out of memory.  Lower explorer.rollout_model.max_num_seqs or "
            f"model.max_model_len, or give the machine more "
            f"({type(error).__name__}: {error})"
        )
    return EngineFailed(f"{name}: {type(error).__name__}: {error}")
