"""Rate-limited, cached client for one judge model, shared by all judges that use it.

    question answered before? ─> in progress? ─> budget left? ─> room ─> rate ─> the model

Depends on no prompt and no verdict.
Invariant: the cost of all calls, including other processes with the same ledger, never exceeds
`max_cost_usd`: a call's maximum cost is counted before the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rft.errors import ConfigError, RftError
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_cache import Cache
from rft.reward.judge_costs import CostLedger
from rft.reward.judge_metrics import JudgeMetrics
from rft.reward.run_folder import run_folder
from rft.types.completion import Completion
from rft.types.images import described
from rft.types.ports import ChatModel, GenerateRequest, Identified
from rft.types.throttled import RateLimiter, calling
from rft.worker.threads import CLOCK, Clock, guarded, in_time

T = TypeVar("T")
FILE = "judge_cache.db"
TEMPLATE_TOKENS = 64  # maximum tokens that a chat template adds to each message
IMAGE_TOKENS = 16_384  # the most that a family of models makes of an image
ASK_AGAIN_S = 0.5  # interval of checks whether other processes have freed some of the budget


class JudgeClient:
    """One auxiliary model with the limits in `args`."""

    def __init__(self, model: ChatModel, identity: str, args: JudgeArgs) -> None:
        self.identity = identity
        self.limits = args.limits
        self._model = model
        self._args = args
        path = _path(args.cache)
        self.cache = None if path is None else Cache(path)
        self._room = asyncio.Semaphore(args.max_concurrent)
        self._requests = RateLimiter(args.requests_per_minute)
        self._tokens = RateLimiter(args.tokens_per_minute)
        self.ledger = CostLedger(_ledger(args))
        self._settled = asyncio.Event()
        self._under_way: dict[bytes, tuple[asyncio.Future[Any], list[int]]] = {}
        self._jobs: set[asyncio.Future[Any]] = set()  # includes jobs being cancelled
        self.users = 0

    async def once(
        self, key: bytes, answer: Callable[[], Awaitable[T]], metrics: JudgeMetrics
    ) -> T:
        """Return the result of `answer()`, shared by concurrent calls with the same key.

        The work is cancelled when the last caller gives up.
        """
        if key in self._under_way:
            metrics.shared += 1
        else:
            job: asyncio.Future[Any] = asyncio.ensure_future(guarded(answer(), "the judge"))
            self._under_way[key] = (job, [0])
            self._jobs.add(job)
            job.add_done_callback(lambda done: self._over(key, done))
        job, waiting = self._under_way[key]
        waiting[0] += 1
        try:
            result: T = await asyncio.shield(job)
            return result
        finally:
            waiting[0] -= 1
            if not waiting[0] and not job.done():
                self._over(key, job)
                job.cancel()

    def _over(self, key: bytes, job: asyncio.Future[Any]) -> None:
        if job.done():
            self._jobs.discard(job)
        if key in self._under_way and self._under_way[key][0] is job:
            del self._under_way[key]

    async def generate(
        self, request: GenerateRequest, timeout_s: float, metrics: JudgeMetrics
    ) -> tuple[Completion, tuple[int, int]]:
        """Call the model once; return the completion and its (prompt, answer) tokens.

        The deadline counts from sending.  Raises BudgetUsedUp, TimeoutError, and the model's
        errors.
        """
        size = sum(len(described(m["content"]).encode()) for m in request.messages)
        size += IMAGE_TOKENS * len(request.images)
        most = self._cost(
            size + TEMPLATE_TOKENS * (1 + len(request.messages)), request.sampling.max_tokens
        )
        guess = size // 4 + request.sampling.max_tokens
        reserved = [await self._reserve(most)]
        cost = 0.0  # cost 0: not called yet; owed: whether the last sending costs
        owed = True

        async def resent() -> None:
            reserved.append(await self._reserve(most))

        def unpaid() -> None:
            nonlocal owed
            owed = False

        try:
            # waiting does not count towards the run's deadline
            async with CLOCK.get().turn(self._room):
                with CLOCK.get().stopped():
                    await self._requests.acquire(1)
                    await self._tokens.acquire(guess)
                clock = Clock()  # deadline of the call itself
                cost = most
                metrics.calls += 1
                try:
                    with calling(clock, resent, unpaid):
                        (completion,) = await in_time(
                            self._model.generate(request), timeout_s, "the judge", clock
                        )
                except ValueError:
                    cost = 0.0  # the model refused the request
                    raise
                except asyncio.CancelledError:
                    cost = most if clock.runs else 0.0
                    raise
                except RftError:
                    cost = most if owed else 0.0  # an aborted request may have been processed
                    raise
                finally:
                    metrics.seconds += clock.seconds
            tokens = completion.usage or (len(completion.prompt_tokens), len(completion.tokens))
            if any(tokens):
                cost = self._cost(*tokens)
            else:  # the server reports no tokens: use an upper estimate
                tokens = (size // 3, len(completion.text.encode("utf-8", "replace")) // 3 + 1)
            metrics.prompt_tokens += tokens[0]
            metrics.completion_tokens += tokens[1]
            self._tokens.correct(sum(tokens) - guess)
            return completion, tokens
        finally:
            # sendings without an answer may have been processed
            costs = [cost] + [most] * (len(reserved) - 1)
            metrics.cost_usd += sum(costs)
            for call, paid in zip(reserved, costs, strict=True):
                if call is not None:
                    self.ledger.settle(call, paid)
            self._settled.set()

    async def _reserve(self, most: float) -> int | None:
        """Reserve the cost in the ledger; return the call's number, or None if it costs nothing.

        Waits while calls in progress may still leave enough budget.
        """
        if not most:
            return None
        while (call := self.ledger.reserve(self.identity, most, self._args.max_cost_usd)) is None:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), ASK_AGAIN_S)
        return call

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        a = self._args
        return (
            prompt_tokens * a.price_per_1k_prompt_tokens
            + completion_tokens * a.price_per_1k_completion_tokens
        ) / 1000

    async def close(self) -> None:
        """Cancel calls in progress; record their costs before the cache is closed."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        try:
            await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            self.ledger.close()
            if self.cache is not None:
                self.cache.close()


_CLIENTS: dict[int, tuple[ChatModel, JudgeClient]] = {}
# by id of the model: a configured model and the first judge's arguments
_CHECKED: dict[int, tuple[object, JudgeArgs]] = {}


def check_limits(model: object, name: str, args: JudgeArgs) -> None:
    """Check limits like `open_client`, for a model that is not started."""
    _same(name, _CHECKED.setdefault(id(model), (model, args))[1].limits, args.limits)


def _same(name: str, first: Mapping[str, object], limits: Mapping[str, object]) -> None:
    if differ := [n for n, limit in first.items() if limit != limits[n]]:
        both = ", ".join(f"{n} ({first[n]} and {limits[n]})" for n in differ)
        raise ConfigError(
            f"two judges ask {name} with different limits: {both}; write the same",
            key="reward_fn_args",
        )


def open_client(model: ChatModel, name: str, args: JudgeArgs) -> JudgeClient:
    """Return the client of `model`, shared by all its judges.  Raises ConfigError for different
    limits.
    """
    entry = _CLIENTS.get(id(model))
    if entry is None:
        identity = model.identity if isinstance(model, Identified) else ""
        entry = _CLIENTS[id(model)] = (model, JudgeClient(model, identity or name, args))
    client = entry[1]
    _same(name, client.limits, args.limits)
    client.users += 1
    return client


async def close_client(client: JudgeClient) -> None:
    client.users -= 1
    if not client.users:
        for key, (_, other) in list(_CLIENTS.items()):
            if other is client:
                del _CLIENTS[key]
        await client.close()


def _path(cache: str) -> Path | None:
    if cache == "off":
        return None
    if cache != "run":
        return Path(cache).expanduser()
    folder = run_folder.get()
    return None if folder is None else folder / FILE


def _ledger(args: JudgeArgs) -> Path | None:
    if args.cost_ledger is not None:
        return Path(args.cost_ledger).expanduser()
    return _path("run" if args.cache == "off" else args.cache)
