"""vLLM as an engine: `AsyncLLM` in the process that hosts it, weights through our worker extension.

Depends on vLLM's public engine interface, not on Ray, trainer or buffer.  Invariant: no
token is generated before the first load (except with `fixed_weights`), and every token carries the
version label that was set while the engine was paused.

    start → load → resume → generate … → pause → [sleep →] load → resume → generate …
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
from collections.abc import Awaitable, Sequence
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import psutil

from rft.engine.base import RequestFailed, ScoresOnly, engine, worst
from rft.engine.chat import Chat, load_images
from rft.engine.local_engine import LocalEngine
from rft.engine.settings import EngineSettings
from rft.engine.vllm_args import check_installed, engine_args, sampling_params, tells_experts
from rft.engine.vllm_host import core_from_child
from rft.engine.vllm_images import engine_input
from rft.engine.vllm_sockets import SOCKETS
from rft.engine.vllm_stats import Stats, without_prometheus
from rft.engine.watch import Usage, Watch, usage
from rft.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineStalled,
    OutOfMemory,
    RftError,
    SetupError,
)
from rft.images.processor import Sight
from rft.types.completion import Completion, TokenScores, VersionSpan, top_tokens
from rft.types.ids import FIXED, Version
from rft.types.images import ImagePlace
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, LoadReport, PausedRequests, ScoreRow, WeightManifest

log = logging.getLogger(__name__)
T = TypeVar("T")

# less than the time that the launcher waits for `close` before it kills the processes
CLOSE_TIMEOUT_S = 6.0


class _VllmCalls(LocalEngine):
    """Calls of vLLM: each has a deadline, and all end once vLLM hangs."""

    _llm: Any  # vLLM's AsyncLLM; None once it is closed

    def __init__(
        self, settings: EngineSettings, chat: Chat, stats: Stats, processes: Sequence[int]
    ) -> None:
        super().__init__(settings, chat)
        self._stats = stats
        self._processes = processes
        self._requests = 0  # requests in progress in vLLM; they wait while it is paused
        # broadcasts that its workers take part in; they wait for the trainer and other engines
        self._broadcasts = 0
        self._deadlines: set[asyncio.Timeout] = set()  # of all calls in progress
        self._stalled = ""  # why vLLM counts as hung; never reset
        self._watching = asyncio.ensure_future(self._watch())

    async def _call(self, what: str, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """Await vLLM with a deadline; its errors become the errors of `rft.errors`."""
        limit = self.settings.call_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(0 if self._stalled else limit) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await call
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if self._stalled:
                raise EngineStalled(f"{self.settings.name}: vLLM hangs: {self._stalled}") from None
            raise DeadlineExceeded(
                f"{self.settings.name}: vLLM did not {what} within {limit:.0f} s"
            ) from None
        except MemoryError as e:
            raise OutOfMemory(
                f"{self.settings.name}: out of memory; lower max_num_seqs, max_model_len or "
                f"kv_cache_bytes"
            ) from e
        except (RftError, RequestFailed, ValueError):
            raise
        except Exception as e:  # vLLM's engine errors share no base class with a meaning
            raise EngineFailed(
                f"{self.settings.name}: vLLM could not {what}: {type(e).__name__}: {e}"
            ) from e

    async def _watch(self) -> None:
        """End all calls, later ones too, once vLLM hangs.  Requests of a paused engine are no work."""
        s = self.settings
        if s.stall_timeout_s is None and s.step_timeout_s is None:
            return
        watch = Watch(s.stall_timeout_s, s.step_timeout_s, self._usage)
        steps = self._stats.steps
        while not self._stalled:
            await asyncio.sleep(watch.interval_s)
            waiting = self._requests if self._paused else 0
            if len(self._deadlines) == waiting or self._stats.steps != steps:
                steps = self._stats.steps
                watch.progress()
            else:
                waits = self._broadcasts > 0 and len(self._deadlines) == waiting + self._broadcasts
                self._stalled = await asyncio.to_thread(watch.look, waits=waits)
        log.error("%s: vLLM hangs: %s", s.name, self._stalled)
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    async def _answer(self, what: str, stream: Any) -> Any:
        """Return the last output of a request; it waits while the engine is paused."""
        self._requests += 1
        try:
            return await self._call(what, self._last(stream), self.settings.request_timeout_s)
        finally:
            self._requests -= 1

    async def _last(self, stream: Any) -> Any:
        final = None
        try:
            async for output in stream:
                final = output
        except (MemoryError, ValueError):
            raise
        except Exception as e:
            if self._llm is None or self._llm.errored:
                raise
            raise RequestFailed(
                f"{self.settings.name}: vLLM could not take this request: {type(e).__name__}: {e}"
            ) from e
        if final is None:
            raise EngineFailed("vLLM ended a request without an answer")
        return final

    def _usage(self) -> Usage:
        return usage(self._processes)


@engine("vllm")
class VllmEngine(_VllmCalls):
    """One vLLM engine; made by `start`.  All methods belong to the event loop that started it."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start vLLM's processes.  Blocks the event loop; must be called inside a running loop."""
        from vllm.v1.engine.async_llm import AsyncLLM

        stats = Stats()
        images = load_images(settings)
        before = {p.pid for p in psutil.Process().children()}
        with core_from_child() as core:
            self._llm = AsyncLLM.from_engine_args(
                engine_args(settings, images=images is not None),
                stat_loggers=[lambda config, index: stats],
            )
        processes = [p.pid for p in psutil.Process().children() if p.pid not in before - {core}]
        without_prometheus(self._llm.logger_manager)
        super().__init__(
            settings,
            Chat(
                settings,
                self._llm.renderer.get_tokenizer(),
                self._llm.model_config.get_vocab_size(),
                images,
            ),
            stats,
            processes,
        )
        self._adapter = _adapter_request() if settings.lora_rank is not None else None
        self._ids = itertools.count()
        self._expert_layers: list[int] = []  # numbers of the layers whose experts are reported
        # vLLM's requests in progress at the pause -> their tokens in the cache
        self._paused_requests: dict[str, int] = {}
        self._asleep: set[str] = set()  # parts to wake: weights, kv_cache
        self._clears = False  # whether the pause drops the cache

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Check vLLM's version, start its processes, load the model.  Raises SetupError."""
        check_installed()
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(settings.start_timeout_s)))
        SOCKETS.open()
        try:
            with SOCKETS.temporary():
                self = cls._started(settings)
        except BaseException:
            SOCKETS.close()
            raise
        if settings.device == "cpu" and settings.task == "generate":
            await self._call("take seeds", self._llm.collective_rpc("rft_take_seeds"))
        if settings.router_replay:
            (self._expert_layers, *_) = await self._call(
                "name its layers with experts", self._llm.collective_rpc("rft_expert_layers")
            )
            if not tells_experts(settings):
                await self._call("record experts", self._llm.collective_rpc("rft_record_experts"))
        if settings.fixed_weights and settings.task == "generate":
            await self._call("label the fixed weights", self._llm.update_weight_version(str(FIXED)))
        if settings.fixed_weights:
            self.version = FIXED
        return self

    @classmethod
    def _started(cls, settings: EngineSettings) -> Self:
        try:
            return cls(settings)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{settings.name}: vLLM did not start within {settings.start_timeout_s:.0f} s"
            ) from None
        except (RuntimeError, ValueError, OSError) as e:
            raise SetupError(
                f"{settings.name}: vLLM did not start with {settings.model_path}: {e}"
            ) from e

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if request.written is not None:
            return await self.as_answer(request, request.written)
        prompt = await self.prompt(request)
        places = self._chat.places(request, prompt)
        sight = self._chat.sight(prompt, places, request.images)
        room = self.settings.max_model_len - len(prompt)
        # vLLM refuses n > 1 when greedy: send n requests
        asks, n = (request.n, 1) if request.sampling.temperature == 0 else (1, request.n)
        params = sampling_params(request.sampling, n, room)
        if request.choices:
            params.max_tokens = 1
            params.allowed_token_ids = self._chat.choices(request)
        with self.admission.counted(request):
            finals = await asyncio.gather(
                *(self._ask(request, prompt, params, places, sight) for _ in range(asks))
            )
        self._counted["prefilled_tokens"] += sum(
            len(prompt) - (f.num_cached_tokens or 0) for f in finals
        )
        named = [
            (final.request_id, out)
            for final in finals
            for out in sorted(final.outputs, key=lambda o: o.index)
        ]
        experts = await self._experts(
            [name if n == 1 else f"{out.index}_{name}" for name, out in named],
            [out for _, out in named],
        )
        return self._completions(request, prompt, [out for _, out in named], experts, places)

    async def _experts(self, names: list[str], outputs: list[Any]) -> list[np.ndarray | None]:
        """Experts of the tokens of each answer; `names`: of vLLM's requests."""
        if not self.settings.router_replay:
            return [None] * len(outputs)
        if tells_experts(self.settings):
            return [out.routed_experts[:, self._expert_layers] for out in outputs]
        taken, *_ = await self._call(
            "tell its experts", self._llm.collective_rpc("rft_take_experts", args=(names,))
        )
        return [np.frombuffer(data, kind).reshape(shape) for kind, shape, data in taken]

    async def score_own(self, row: ScoreRow) -> TokenScores:
        """Score at temperature 1 only: vLLM's prompt log-probs are those of the model itself."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # vLLM needs room for one token
        row, tokens = await self.row(row, longest=self.settings.max_model_len - 1)
        first = row.prompt_length
        if row.temperature != 1:
            raise ValueError(
                f"{self.settings.name}: vLLM scores given tokens at temperature 1 only, not "
                f"{row.temperature:g}"
            )
        if self._adapter is not None:  # its prompt log-probs end the engine
            raise ValueError(
                f"{self.settings.name}: vLLM's LoRA layers cannot score given tokens; use "
                f"enforce_eager: true"
            )
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            prompt_logprobs=row.top,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        sight = self._chat.sight(tokens, row.places, row.images)
        final, version = await self._under_one_version(tokens, params, row.places, sight)
        found = final.prompt_logprobs[first:]
        scored = zip(found, tokens[first:], strict=True)
        logprobs = np.array([at[token].logprob for at, token in scored], np.float32)
        if not row.top:
            return TokenScores(logprobs=logprobs, version=version)
        known = len(self._chat.tokenizer)
        top_ids, top_logprobs = _top(found, row.top, known, self.settings.name)
        return TokenScores(
            logprobs=logprobs, version=version, top_ids=top_ids, top_logprobs=top_logprobs
        )

    async def _under_one_version(
        self, tokens: list[int], params: Any, places: Sequence[ImagePlace], sight: Sight
    ) -> tuple[Any, Version]:
        """Ask again where weights were loaded while the tokens were computed."""
        while True:
            version = self.version
            final = await self._ask(
                GenerateRequest(request_id="score"), tokens, params, places, sight
            )
            if version is not None and version == self.version:
                return final, version

    async def pause(self, *, clear_cache: bool = True) -> None:
        await self._call("pause", self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
        again = self._paused
        self._paused = True
        self._clears = clear_cache
        self._paused_requests = self._under_way()
        self._counted["recomputed_tokens"] += (
            sum(self._paused_requests.values()) if clear_cache and not again else 0
        )
        if self.settings.log_stats:
            await self._call("log its statistics", self._llm.do_log_stats())

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """Load weights while paused; after a report with errors the old weights stay valid."""
        await self.check_load(manifest)
        await self._wake("weights")
        frame = msgspec.msgpack.encode(manifest)
        sent = int(manifest.broadcast is not None)
        self._broadcasts += sent
        try:
            answers = await self._call(
                "load weights", self._llm.collective_rpc("rft_load", args=(frame,))
            )
        finally:
            self._broadcasts -= sent
        report = worst(
            [msgspec.msgpack.decode(a, type=LoadReport) for a in answers], manifest.version
        )
        if report.intact:
            await self._call(
                "label the weights", self._llm.update_weight_version(str(report.version))
            )
            self.version = report.version
        return msgspec.structs.replace(report, paused=self._cost())

    async def sleep(self) -> None:
        """Free GPU memory.  At level 2 the weights are dropped: only a load brings them back."""
        if self.settings.sleep_level and not self._asleep:
            await self._call("sleep", self._llm.sleep(self.settings.sleep_level, mode="keep"))
            self._asleep = {"weights", "kv_cache"}
            log.info("%s sleeps at level %d", self.settings.name, self.settings.sleep_level)

    async def _wake(self, what: str) -> None:
        if what in self._asleep:
            await self._call(f"wake its {what}", self._llm.wake_up([what]))
            self._asleep.discard(what)
            log.info("%s has its %s again", self.settings.name, what)

    async def resume(self) -> None:
        if "weights" in self._asleep and self.settings.sleep_level > 1:
            raise EngineFailed(
                f"{self.settings.name}: it slept at level 2 and no weights were loaded since"
            )
        await self._wake("weights")
        await self._wake("kv_cache")
        await self._call("resume", self._llm.resume_generation())
        self._paused = False
        self._stats.resumed()

    async def health(self) -> None:
        if self._stalled:
            raise EngineStalled(f"{self.settings.name}: vLLM hangs: {self._stalled}")
        await self._call("answer a health check", self._llm.check_health())

    async def metrics(self) -> list[Metric]:
        return [*await super().metrics(), *self._stats.metrics()]

    async def close(self) -> None:
        """Stop vLLM's processes.  May be called twice."""
        llm = self._llm
        self._llm = None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it reports the stopping processes as an error
                await asyncio.wait([llm.output_handler])
            self._watching.cancel()
            await asyncio.to_thread(llm.shutdown, CLOSE_TIMEOUT_S)
            SOCKETS.close()
            del llm
            # AsyncLLM sits in reference cycles and its __del__ fails when it first runs at
            # interpreter exit
            gc.collect()

    def _under_way(self) -> dict[str, int]:
        """Return vLLM's requests (one per completion) -> tokens with keys and values in the cache."""
        states = self._llm.output_processor.request_states
        return {
            name: 0
            if s.is_prefilling or s.detokenizer is None
            else s.prompt_len + s.detokenizer.num_output_tokens() - 1
            for name, s in states.items()
        }

    def _cost(self) -> PausedRequests:
        remaining = self._llm.output_processor.request_states
        return PausedRequests(
            requests=len(self._paused_requests),
            aborted=sum(name not in remaining for name in self._paused_requests),
            recomputed_tokens=sum(self._paused_requests.values()) if self._clears else 0,
            tokens_per_s=self._stats.tokens_per_s if self._paused_requests else 0.0,
        )

    async def _ask(
        self,
        request: GenerateRequest,
        prompt: list[int],
        params: Any,
        places: Sequence[ImagePlace],
        sight: Sight,
    ) -> Any:
        name = f"{request.request_id or 'request'}-{next(self._ids)}"
        stream = self._llm.generate(
            engine_input(prompt, places, sight), params, name, lora_request=self._adapter
        )
        return await self._answer("answer a request", stream)

    def _completions(
        self,
        request: GenerateRequest,
        prompt: list[int],
        outputs: list[Any],
        experts: Sequence[np.ndarray | None],
        places: tuple[ImagePlace, ...],
    ) -> list[Completion]:
        self._counted["requests"] += request.n
        self._counted["prompt_tokens"] += len(prompt)
        completions = [
            self._completion(request, prompt, out, routed, places)
            for out, routed in zip(outputs, experts, strict=True)
        ]
        if len(completions) != request.n:
            raise EngineFailed(
                f"{self.settings.name}: vLLM answered with {len(completions)} completions, {request.n} "
                f"were asked for"
            )
        return completions

    def _completion(
        self,
        request: GenerateRequest,
        prompt: list[int],
        out: Any,
        experts: np.ndarray | None,
        places: tuple[ImagePlace, ...],
    ) -> Completion:
        if out.finish_reason not in ("stop", "length", "abort"):
            raise EngineFailed(
                f"{self.settings.name}: vLLM ended a request with {out.finish_reason!r}"
            )
        tokens = np.array(out.token_ids, np.int32)
        spans = tuple(
            VersionSpan(Version.parse(s.version), s.start, min(s.end, len(tokens)))
            for s in out.weight_versions or ()
        )
        if len(tokens) and (not spans or spans[0].start != 0 or spans[-1].end != len(tokens)):
            raise EngineFailed(
                f"{self.settings.name}: version spans {spans} do not cover {len(tokens)} tokens"
            )
        self._counted["generated_tokens"] += len(tokens)
        logprobs = _sampled_logprobs(out.logprobs, len(tokens))
        computed = len(prompt) + len(tokens) - 1
        if experts is not None and len(experts) < computed:
            raise EngineFailed(
                f"{self.settings.name}: vLLM returned routed experts for {len(experts)} of "
                f"{computed} tokens"
            )
        reason = out.finish_reason
        routed = None if experts is None else experts[:computed]
        return self.completion(
            request,
            prompt,
            tokens,
            logprobs,
            reason=reason,
            spans=spans,
            experts=routed,
            places=places,
        )


class VllmClassifier(ScoresOnly, VllmEngine):
    """vLLM's pooling runner with a classification head: raw scores of conversations."""

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        from vllm import PoolingParams, TokensPrompt

        prompt = self._chat.encode_conversation(messages)
        name = f"score-{next(self._ids)}"
        stream = self._llm.encode(
            TokensPrompt(prompt_token_ids=prompt),
            PoolingParams(task="classify", use_activation=False),
            name,
        )
        with self.admission.counted(GenerateRequest(request_id=name)):
            final = await self._answer("score a chat", stream)
        self._counted["requests"] += 1
        self._counted["prompt_tokens"] += len(prompt)
        return [float(x) for x in final.outputs.data]


def _adapter_request() -> Any:
    """Return the request for the one adapter, replaced in place by `rft.engine.vllm_adapter`; its
    path is never read.
    """
    from vllm.lora.request import LoRARequest

    from rft.engine.vllm_adapter import ADAPTER_ID, ADAPTER_NAME

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME)


def _top(found: Sequence[Any], top: int, known: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens of each position.  Raises ValueError for one without a text, of a
    padded vocabulary.
    """
    likeliest = [
        sorted(at.items(), key=lambda item: item[1].logprob, reverse=True)[:top] for at in found
    ]
    ids = np.array([[token for token, _ in at] for at in likeliest], np.int32)
    if ids.size and (last := int(ids.max())) >= known:
        raise ValueError(
            f"{name}: token {last} is among the {top} most likely, and the tokenizer has {known} "
            f"tokens; ask for fewer"
        )
    values = np.array([[x.logprob for _, x in at] for at in likeliest], np.float32)
    return top_tokens(ids.reshape(-1, top), values.reshape(-1, top))


def _sampled_logprobs(flat: Any, count: int) -> np.ndarray:
    """Return float32 [R] from vLLM's flat log-probs, the sampled token first at each position."""
    starts: Sequence[int] = flat.start_indices
    if len(starts) < count:
        raise EngineFailed(f"vLLM gave log-probs for {len(starts)} of {count} tokens")
    return np.array([flat.logprobs[i] for i in starts[:count]], np.float32)
