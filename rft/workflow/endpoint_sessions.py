"""What a key of the endpoint opens: a session with a model, recorded (a run's) or not (observers,
judges behind an OpenAI client).

Knows no HTTP.  Invariant: what a session has answered is recorded in its context, or it was not
answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError
from rft.reward.base import checked
from rft.types.completion import Completion, Score, Turn
from rft.types.ports import ChatModel, GenerateRequest
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, seed_for
from rft.workflow.endpoint_wire import ApiAnswer, ApiError, ApiRequest

T = TypeVar("T")
Rule = Literal["taskset", "request"]
"""Whose sampling arguments a call has: the taskset's (training stays on-policy), or the request's
where it names some.
"""
# of a request, applied also where the taskset's arguments win
HARMLESS = frozenset({"max_tokens", "stop", "seed"})
_TEXT = "{{ messages[0]['content'] }}"  # a chat template that is the text itself
_CLOSE_S = 1.0  # for what is still under way when a session closes


def new_key() -> str:
    """192 random bits."""
    return f"rft-{secrets.token_hex(24)}"


def hashed(key: str) -> str:
    """SHA-256, as hex: enough for random keys, which nobody guesses."""
    # a header may hold any bytes
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


async def understood(work: Awaitable[T]) -> T:
    """Errors of engines as answers in OpenAI's form."""
    try:
        return await work
    except PromptTooLong as e:
        raise ApiError(400, str(e), param="messages", code="context_length_exceeded") from e
    except ValueError as e:
        raise ApiError(400, str(e)) from e


def stopping() -> ApiError:
    """What a client hears whose server stops, which may be started again."""
    return ApiError(
        503, "the service stops; send this again: it counts once", code="stopping", retry_s=2.0
    )


class Session:
    """What one key opens: a model, and the calls under way.  `name` is the model's name in
    /v1/models.
    """

    def __init__(self, name: str, *, id: str = "", key: str = "", key_hash: str = "") -> None:
        """`key_hash`: of a key that is not known here."""
        self.name = name
        self.key = key or ("" if key_hash else new_key())
        self.key_hash = key_hash or hashed(self.key)
        self.id = id or re.sub(r"[^A-Za-z0-9._-]", "-", name)[:80] + "-" + secrets.token_hex(4)
        self.open = True  # `stopped`: not the session is over, but its server
        self.stopped = False
        self._calls: set[asyncio.Future[Any]] = set()

    async def complete(self, asked: ApiRequest) -> list[Completion]:
        raise NotImplementedError

    async def answer(self, asked: ApiRequest, retry_key: str) -> ApiAnswer:
        """What is sent back.  `retry_key`: the request's Idempotency-Key; a session without a
        memory generates anew.
        """
        completions = await self.call(understood(self.complete(asked)))
        if any(c.finish_reason == "abort" for c in completions):
            raise ApiError(503, "the engine aborted this call")
        return ApiAnswer(completions=completions)

    def ignored(self, asked: ApiRequest) -> list[str]:
        """Sampling fields of the request that are not applied."""
        return []

    async def reward(self, body: Any) -> dict[str, Any]:
        """Takes a reward; what is answered."""
        raise ApiError(404, "this is not the session of a run: there is nothing to reward")

    async def call(self, work: Awaitable[T]) -> T:
        """The result of `work`, which ends with the session and with whoever waits for it."""
        job = asyncio.ensure_future(work)
        self._calls.add(job)
        try:
            await asyncio.wait({job})
            if job.cancelled() and not self.open:
                raise (
                    stopping()
                    if self.stopped
                    else ApiError(401, "the run is over", code="run_over")
                )
            return job.result()
        finally:
            self._calls.discard(job)
            job.cancel()

    def close(self) -> None:
        self.open = False
        for job in list(self._calls):
            job.cancel()


class ModelSession(Session):
    """Any model, unrecorded: judges behind an OpenAI client, and the policy for observers."""

    def __init__(
        self, model: ChatModel, name: str, sampling: SamplingArgs | None = None, *, key: str = ""
    ) -> None:
        super().__init__(name, key=key)
        self._model = model
        self._sampling = sampling or SamplingArgs(max_tokens=1024)
        self._asked = 0

    async def complete(self, asked: ApiRequest) -> list[Completion]:
        sampling = msgspec.structs.replace(self._sampling, **asked.sampling)
        requests = []
        for given in _prompts(asked, asked.tools or ()):
            self._asked += 1
            requests.append(
                GenerateRequest(
                    **given, sampling=sampling, request_id=f"api-{self.id}-{self._asked}"
                )
            )
        found = await asyncio.gather(*(self._model.generate(r) for r in requests))
        return [c for some in found for c in some]


class RunSession(Session):
    """The policy, for one run: calls are recorded, rewards are taken.

    `failure`: an error of the engine that no agent can do anything about; `score`: what was posted
    for the whole run; `unused`: a reward that was posted and does not count, because the taskset
    has one and `agent_reward` does not say otherwise.
    """

    def __init__(
        self, ctx: RunContext, task: Task, rule: Rule, agent_reward: bool, **of_key: str
    ) -> None:
        super().__init__(ctx.request_id, **of_key)
        self._ctx = ctx
        self._task = task
        self._rule = rule
        self._counts = agent_reward or task.reward is None
        self.unused: float | None = None
        self.base_url = ""
        self.score: Score | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def api_key(self) -> str:
        return self.key

    def ignored(self, asked: ApiRequest) -> list[str]:
        return sorted(asked.sampling.keys() - HARMLESS) if self._rule == "taskset" else []

    async def complete(self, asked: ApiRequest) -> list[Completion]:
        try:
            turns = await self.generate(asked)
        except RftError as e:
            if not self.failure.done():
                self.failure.set_exception(e)
            raise
        for turn in turns:
            self._ctx.record(turn)
        return [t.completion for t in turns]

    async def generate(self, asked: ApiRequest) -> list[Turn]:
        """One turn for each answer, not recorded yet."""
        overrides = {
            k: v for k, v in asked.sampling.items() if self._rule == "request" or k in HARMLESS
        }
        if self._rule == "taskset":  # an answer may end earlier than there, not later
            rule = self._task.sampling
            overrides["max_tokens"] = min(
                overrides.get("max_tokens", rule.max_tokens), rule.max_tokens
            )
            overrides["stop"] = (*rule.stop, *overrides.get("stop", ()))
        # with the run's own: runs of a task that are alike have nothing to be compared by
        if "seed" in overrides:
            own = self.id if self._ctx.seed is None else self._ctx.seed(0)
            overrides["seed"] = seed_for(overrides["seed"], own)(0)
        turns: list[Turn] = []
        for given in _prompts(asked, asked.tools):
            request = self._ctx.request(**given, **overrides)
            done = await self._ctx.policy.generate(request)
            turns += [
                Turn(messages=request.messages, tools=request.tools, completion=c) for c in done
            ]
        if any(t.completion.finish_reason == "abort" for t in turns):
            raise ApiError(
                503,
                "the engine aborted this call; send it again",
                code="engine_failed",
                retry_s=1.0,
            )
        return turns

    async def reward(self, body: Any) -> dict[str, Any]:
        """{"reward": number} or {"reward": {part: number}}, with "target": "run" (default) or
        "step" (the last call), and "info".
        """
        if not isinstance(body, dict) or (
            unknown := sorted(body.keys() - {"reward", "target", "info"})
        ):
            raise ApiError(
                400,
                f"send {{reward, target, "
                f"info}}{f'; unknown: {unknown}' if isinstance(body, dict) else ''}",
            )
        target = body.get("target", "run")
        info = body.get("info") or {}
        if (
            target not in ("run", "step")
            or not isinstance(info, dict)
            or (info and target == "run")
        ):
            raise ApiError(
                400,
                'target must be "run" or "step"; info is an object, of a step alone',
                param="target",
            )
        try:
            score = checked(body.get("reward"))  # type: ignore[arg-type]
            if not self._counts:
                self.unused = score.value
            elif target == "run":
                self.score = score
            else:
                self._ctx.score_step(score.value, parts=score.parts, **info)
        except (ValueError, TypeError) as e:
            raise ApiError(400, str(e), param="reward") from None
        if self._counts:
            return {"object": "reward", "status": "ok"}
        why = (
            "the taskset has a reward, which scores this run; workflow_args.agent_reward: true "
            "lets the agent's count"
        )
        return {"object": "reward", "status": "ignored", "reason": why}

    async def watch(self, work: Awaitable[T]) -> T:
        """The result of `work`; an error that the engine had for one of its calls ends it and is
        raised instead.
        """
        job = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {job, self.failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()
            return job.result()
        finally:
            if not job.done():
                job.cancel()
                await asyncio.wait({job}, timeout=_CLOSE_S)
            if job.done() and not job.cancelled():
                job.exception()

    def close(self) -> None:
        super().close()
        if self.failure.done():
            self.failure.exception()
        else:
            self.failure.cancel()


def _prompts(asked: ApiRequest, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """For each prompt what an engine is asked, but for sampling."""
    args = asked.chat_template_args
    more = {"n": asked.n, "chat_template_args": args, "strict_template_args": tuple(args)}
    if asked.messages:
        return [{"messages": asked.messages, "tools": tools, **more}]
    found: list[dict[str, Any]] = []
    for p in asked.prompts:
        text = {"messages": ({"role": "user", "content": p},), "chat_template": _TEXT}
        found.append(
            {**(text if isinstance(p, str) else {"prompt_tokens": p}), "tools": (), **more}
        )
    return found
