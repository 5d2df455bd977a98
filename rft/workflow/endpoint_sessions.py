"""Sessions with a model, one for each key of the endpoint: recorded (a run's) or not (observers,
judges behind an OpenAI client).

Depends on no HTTP.  Invariant: every answer of a run's session is recorded in its context.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError
from rft.reward.base import checked
from rft.types.completion import Completion, Score, Turn, without_reasoning
from rft.types.ports import ChatModel, GenerateRequest
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, seed_for, turn_of
from rft.workflow.endpoint_answers import ApiAnswer, usage
from rft.workflow.endpoint_wire import ApiError, ApiRequest, in_call_order

T = TypeVar("T")
Rule = Literal["taskset", "request"]
"""The sampling arguments of a call: the taskset's (training stays on-policy), or the request's where
it sets some.
"""
# of a request, applied also with the rule "taskset"
HARMLESS = frozenset({"max_tokens", "stop", "seed"})
_TEXT = "{{ messages[0]['content'] }}"  # a chat template that adds nothing
_CLOSE_S = 1.0  # for what is still under way when a session closes


def new_key() -> str:
    """192 random bits."""
    return f"rft-{secrets.token_hex(24)}"


def hashed(key: str) -> str:
    """SHA-256, as hex: enough for random keys."""
    # a header may hold any bytes
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


async def understood(work: Awaitable[T]) -> T:
    """Await a call; an engine's errors become ApiError."""
    try:
        return await work
    except PromptTooLong as e:
        raise ApiError(400, str(e), param="messages", code="context_length_exceeded") from e
    except ValueError as e:
        raise ApiError(400, str(e)) from e


def stopping() -> ApiError:
    """The answer of a server that stops and may be started again."""
    return ApiError(
        503, "the service stops; send this again: it counts once", code="stopping", retry_s=2.0
    )


class Session:
    """A model behind one key, and the calls under way.  `name`: the model's in /v1/models."""

    def __init__(self, name: str, *, id: str = "", key: str = "", key_hash: str = "") -> None:
        """`key_hash`: of a key that is stored elsewhere."""
        self.name = name
        self.key = key or ("" if key_hash else new_key())
        self.key_hash = key_hash or hashed(self.key)
        self.id = id or re.sub(r"[^A-Za-z0-9._-]", "-", name)[:80] + "-" + secrets.token_hex(4)
        self.open = True
        self.stopped = False  # its server was closed, not the session
        self._calls: set[asyncio.Future[Any]] = set()
        self.answered: dict[str, Turn] = {}  # of recorded calls: the last answer by its id

    async def answer(self, request: ApiRequest, retry_key: str) -> ApiAnswer:
        """Answer a request.  `retry_key`: its Idempotency-Key; only sessions that store answers use
        it.
        """
        raise NotImplementedError

    async def count_tokens(self, request: ApiRequest) -> int:
        """Return the number of tokens of a prompt, by an unrecorded answer of one token."""
        short = replace(self.continued(request), sampling={"max_tokens": 1})
        try:
            return usage(await self.call(understood(self.probe(short))), 1)["prompt_tokens"]
        except ApiError as e:
            if isinstance(e.__cause__, PromptTooLong):
                return e.__cause__.tokens
            raise

    async def probe(self, request: ApiRequest) -> list[Completion]:
        """Return unrecorded answers."""
        raise NotImplementedError

    def continued(self, request: ApiRequest) -> ApiRequest:
        """Return a request with the conversation up to its `previous` answer.  Raises ApiError 400
        for an answer that is not this session's.
        """
        if not request.previous:
            return request
        if (turn := self.answered.get(request.previous)) is None:
            text = f"previous_response_id: this session has no answer {request.previous[:80]!r}"
            raise ApiError(
                400, text, param="previous_response_id", code="previous_response_not_found"
            )
        earlier = turn.messages[1 if request.without_instructions else 0 :]
        answer = without_reasoning([turn.completion.message])
        system = [{"role": "system", "content": request.instructions}]
        messages = (
            *(system if request.instructions else ()),
            *earlier,
            *answer,
            *request.messages,
        )
        return replace(request, messages=in_call_order(messages), previous="")

    def ignored(self, request: ApiRequest) -> list[str]:
        """Fields of the request that are not applied."""
        return sorted(request.ignored)

    async def reward(self, body: Any) -> dict[str, Any]:
        """Take a posted reward and return the answer."""
        raise ApiError(404, "this is not the session of a run: there is nothing to reward")

    async def call(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which is cancelled with the session and with the caller."""
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
        self._calls_made = 0

    async def answer(self, request: ApiRequest, retry_key: str) -> ApiAnswer:
        completions = await self.call(understood(self.probe(self.continued(request))))
        if any(c.finish_reason == "abort" for c in completions):
            raise ApiError(503, "the engine aborted this call")
        return ApiAnswer(completions=completions)

    async def probe(self, request: ApiRequest) -> list[Completion]:
        sampling = msgspec.structs.replace(self._sampling, **request.sampling)
        requests = []
        for prompt in _prompts(request, request.tools or ()):
            self._calls_made += 1
            requests.append(
                GenerateRequest(
                    **prompt, sampling=sampling, request_id=f"api-{self.id}-{self._calls_made}"
                )
            )
        answers = await asyncio.gather(*(self._model.generate(r) for r in requests))
        return [completion for answer in answers for completion in answer]


class RunSession(Session):
    """The policy, for one run: calls are recorded, rewards are taken.

    `failure`: an error of the engine; `refusal`: the reason of the last failed call; `score`: posted
    for the whole run; `unused`: a posted reward that does not count, because the taskset has a
    reward and `agent_reward` is not set.
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
        self.refusal = ""
        self.score: Score | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def api_key(self) -> str:
        return self.key

    def ignored(self, request: ApiRequest) -> list[str]:
        sampling = request.sampling.keys() - HARMLESS if self._rule == "taskset" else ()
        return sorted({*request.ignored, *sampling})

    async def answer(self, request: ApiRequest, retry_key: str) -> ApiAnswer:
        turns = await self.call(understood(self._recorded(request)))
        answer = ApiAnswer(completions=[t.completion for t in turns])
        self.answered[answer.id] = turns[-1]
        return answer

    async def _recorded(self, request: ApiRequest) -> list[Turn]:
        try:
            turns = await self.generate(request)
        except Exception as e:
            self.refusal = str(e)
            if isinstance(e, RftError) and not self.failure.done():
                self.failure.set_exception(e)
            raise
        for turn in turns:
            self._ctx.record(turn)
        return turns

    async def probe(self, request: ApiRequest) -> list[Completion]:
        return [t.completion for t in await self.generate(request, numbered=False)]

    async def generate(self, request: ApiRequest, *, numbered: bool = True) -> list[Turn]:
        """Return one turn for each answer, unrecorded; `numbered`: it is a call of the run."""
        request = self.continued(request)
        overrides = {
            k: v for k, v in request.sampling.items() if self._rule == "request" or k in HARMLESS
        }
        if self._rule == "taskset":  # an answer may be shorter, not longer
            rule = self._task.sampling
            overrides["max_tokens"] = min(
                overrides.get("max_tokens", rule.max_tokens), rule.max_tokens
            )
            overrides["stop"] = (*rule.stop, *overrides.get("stop", ()))
        # mixed with a seed of the run, so that the runs of a task differ
        if "seed" in overrides:
            run_seed = self.id if self._ctx.seed is None else self._ctx.seed(0)
            overrides["seed"] = seed_for(overrides["seed"], run_seed)(0)
        turns: list[Turn] = []
        for prompt in _prompts(request, request.tools):
            call = self._ctx.request(**prompt, numbered=numbered, **overrides)
            completions = await self._ctx.policy.generate(call)
            turns += [turn_of(call, c) for c in completions]
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
        reason = (
            "the taskset has a reward, which scores this run; workflow_args.agent_reward: true "
            "lets the agent's count"
        )
        return {"object": "reward", "status": "ignored", "reason": reason}

    async def watch(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; an engine's error in one of its calls cancels it and is
        raised.
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


def _prompts(request: ApiRequest, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the arguments of `RunContext.request` for each prompt, without sampling."""
    args = request.chat_template_args
    common = {"n": request.n, "chat_template_args": args, "strict_template_args": tuple(args)}
    if request.messages:
        shown = {"messages": request.messages, "images": request.images}
        return [{**shown, "tools": tools, **common}]
    prompts: list[dict[str, Any]] = []
    for p in request.prompts:
        prompt: dict[str, Any] = {"prompt_tokens": p}
        if isinstance(p, str):
            prompt = {"messages": ({"role": "user", "content": p},), "chat_template": _TEXT}
        prompts.append({**prompt, "tools": (), **common})
    return prompts
