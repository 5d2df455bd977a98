"""A server on loopback that speaks OpenAI's protocol, for agents that know nothing of us.

    async with serve(ctx, task) as session:
        ...  an agent talks to session.base_url with session.api_key
    return ctx.transcript(layout="chains")

One server serves all runs of the process that are open at a time; each run has a session of its own: an address with the run's id and a
random key.  What goes through a run's session is recorded in its context, with the engine's own tokens and log-probs.

Knows engines by their port alone.  Invariants: a key opens one session, and none after its run; a request touches no other run.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError, SetupError
from rft.reward.base import checked
from rft.types.completion import Completion, Score
from rft.types.ports import ChatModel, GenerateRequest
from rft.types.task import SamplingArgs, Task
from rft.workflow import endpoint_wire as wire
from rft.workflow.base import RunContext
from rft.workflow.endpoint_wire import ApiError, ApiRequest

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
T = TypeVar("T")
Rule = Literal["taskset", "request"]
"""Whose sampling arguments a call has: the taskset's (training stays on-policy), or the request's where it names some."""
HARMLESS = frozenset({"max_tokens", "stop", "seed"})  # of a request, applied also where the taskset's arguments win
HEAD_S = 15.0  # for the head of a request, and for a connection between two of them
BODY_S = 15.0
_TEXT = "{{ messages[0]['content'] }}"  # a chat template that is the text itself
_CLOSE_S = 1.0  # for answers that are being written when the server closes


class Session:
    """What one key opens: a model, and the calls under way.  `name` is the model's name in /v1/models."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = f"rft-{secrets.token_hex(24)}"
        self.id = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:80] + "-" + secrets.token_hex(4)
        self.open = True
        self._calls: set[asyncio.Future[Any]] = set()

    async def complete(self, asked: ApiRequest) -> list[Completion]:
        raise NotImplementedError

    def ignored(self, asked: ApiRequest) -> list[str]:
        """Sampling fields of the request that are not applied."""
        return []

    def reward(self, body: Any) -> bool:
        """Takes a reward; False for one that does not count."""
        raise ApiError(404, "this is not the session of a run: there is nothing to reward")

    async def call(self, work: Awaitable[T]) -> T:
        """The result of `work`, which ends with the session and with whoever waits for it."""
        job = asyncio.ensure_future(work)
        self._calls.add(job)
        try:
            await asyncio.wait({job})
            if job.cancelled() and not self.open:
                raise ApiError(401, "the run is over", code="run_over")
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

    def __init__(self, model: ChatModel, name: str, sampling: SamplingArgs | None = None) -> None:
        super().__init__(name)
        self._model, self._sampling = model, sampling or SamplingArgs(max_tokens=1024)
        self._asked = 0

    async def complete(self, asked: ApiRequest) -> list[Completion]:
        sampling = msgspec.structs.replace(self._sampling, **asked.sampling)
        if asked.messages:
            more: Sequence[dict[str, Any]] = [{"messages": asked.messages, "tools": asked.tools or ()}]
        else:
            more = [_prompt(p) for p in asked.prompts]
        requests = []
        for given in more:
            self._asked += 1
            requests.append(
                GenerateRequest(
                    **given,
                    chat_template_args=asked.chat_template_args,
                    strict_template_args=tuple(asked.chat_template_args),
                    sampling=sampling,
                    n=asked.n,
                    request_id=f"api-{self.id}-{self._asked}",
                )
            )
        found = await asyncio.gather(*(self._model.generate(r) for r in requests))
        return [c for some in found for c in some]


class RunSession(Session):
    """The policy, for one run: calls are recorded, rewards are taken.

    `failure`: an error of the engine that no agent can do anything about; `score`: what was posted for the whole run; `unused`: a reward
    that was posted and does not count, because the taskset has one and `agent_reward` does not say otherwise.
    """

    def __init__(self, ctx: RunContext, task: Task, rule: Rule, agent_reward: bool) -> None:
        super().__init__(ctx.request_id)
        self._ctx, self._task, self._rule = ctx, task, rule
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
        overrides = {k: v for k, v in asked.sampling.items() if self._rule == "request" or k in HARMLESS}
        if self._rule == "taskset" and "max_tokens" in overrides:
            overrides["max_tokens"] = min(overrides["max_tokens"], self._task.sampling.max_tokens)
        if "max_tokens" in overrides:
            least = overrides.get("min_tokens", self._task.sampling.min_tokens)
            overrides["min_tokens"] = min(least, overrides["max_tokens"])
        more: dict[str, Any] = {
            "n": asked.n,
            "chat_template_args": asked.chat_template_args,
            "strict_template_args": tuple(asked.chat_template_args),
            **overrides,
        }
        try:
            if asked.messages:
                return await self._ctx.sample(asked.messages, tools=asked.tools, **more)
            found = []
            for prompt in asked.prompts:
                found += await self._ctx.sample(**_prompt(prompt), tools=(), **more)
            return found
        except RftError as e:
            if not self.failure.done():
                self.failure.set_exception(e)
            raise

    def reward(self, body: Any) -> bool:
        """{"reward": number} or {"reward": {part: number}}, with "target": "run" (default) or "step" (the last call), and "info"."""
        if not isinstance(body, dict) or (unknown := sorted(body.keys() - {"reward", "target", "info"})):
            raise ApiError(400, f"send {{reward, target, info}}{f'; unknown: {unknown}' if isinstance(body, dict) else ''}")
        target, info = body.get("target", "run"), body.get("info") or {}
        if target not in ("run", "step") or not isinstance(info, dict) or (info and target == "run"):
            raise ApiError(400, 'target must be "run" or "step"; info is an object, of a step alone', param="target")
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
        return self._counts

    async def watch(self, work: Awaitable[T]) -> T:
        """The result of `work`; an error that the engine had for one of its calls ends it and is raised instead."""
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


def _prompt(prompt: str | tuple[int, ...]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"messages": ({"role": "user", "content": prompt},), "chat_template": _TEXT}
    return {"prompt_tokens": prompt}


# ---------------------------------------------------------------- the server


class Endpoint:
    """The server.  `address` is http://127.0.0.1:PORT once it is started."""

    def __init__(self) -> None:
        self.address = ""
        self._sessions: dict[str, Session] = {}  # by id
        self._keys: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises SetupError where the port cannot be had."""
        from aiohttp import web

        app = web.Application(middlewares=[_in_openais_form()], client_max_size=wire.MAX_BYTES)
        for prefix in ("", "/run/{run}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._completions)
            app.router.add_post(f"{prefix}/v1/reward", self._reward)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/health", self._health)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=_CLOSE_S,
            handler_cancellation=True,
            keepalive_timeout=HEAD_S,  # closes a connection without a whole head, however often a byte comes
            lingering_time=BODY_S,  # a client that is still sending gets to read why its body was refused
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as e:
            await self._runner.cleanup()
            raise SetupError(f"the OpenAI-compatible endpoint cannot listen on {host}:{port}: {e}") from e
        self.address = f"http://{host}:{self._runner.addresses[0][1]}"

    def add(self, session: Session) -> str:
        """Opens `session`; its base URL for OpenAI clients."""
        self._sessions[session.id] = self._keys[session.key] = session
        return f"{self.address}/run/{session.id}/v1"

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._keys.pop(session.key, None)
        session.close()

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            self.remove(session)
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------ handlers

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        run = request.match_info.get("run")
        session = self._keys.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None or (run is not None and not hmac.compare_digest(session.id.encode(), run.encode())):
            raise ApiError(
                401,
                "wrong key: send `Authorization: Bearer KEY` with the run's key, which ends with the run",
                code="invalid_api_key",
            )
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        from aiohttp import web

        session = self._session(request)
        asked = wire.read(await _json(request), chat=chat)
        completions = await session.call(_understood(session.complete(asked)))
        if any(c.finish_reason == "abort" for c in completions):
            raise ApiError(503, "the engine aborted this call")
        headers = {"x-rft-ignored": ", ".join(ignored)} if (ignored := session.ignored(asked)) else {}
        if not asked.stream:
            make = wire.chat_body if chat else wire.text_body
            return web.json_response(make(asked, completions), headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
        await response.prepare(request)
        for chunk in (wire.chat_chunks if chat else wire.text_chunks)(asked, completions):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._session(request)
        if session.reward(await _json(request)):
            return web.json_response({"object": "reward", "status": "ok"})
        why = "the taskset has a reward, which scores this run; workflow_args.agent_reward: true lets the agent's count"
        return web.json_response({"object": "reward", "status": "ignored", "reason": why})

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._session(request)
        name = "policy" if isinstance(session, RunSession) else session.name
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rft"}]})

    async def _health(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"status": "ok"})


async def _json(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    return wire.parse(body)


async def _understood(work: Awaitable[list[Completion]]) -> list[Completion]:
    """Errors of engines as answers in OpenAI's form."""
    try:
        return await work
    except PromptTooLong as e:
        raise ApiError(400, str(e), param="messages", code="context_length_exceeded") from e
    except ValueError as e:
        raise ApiError(400, str(e)) from e


def _in_openais_form() -> Callable[..., Awaitable[web.StreamResponse]]:
    from aiohttp import web

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            answered: web.StreamResponse = await handler(request)
            return answered
        except ApiError as e:
            error = e
        except web.HTTPException as e:  # no such page, a body that is too large
            error = ApiError(e.status, f"{request.method} {request.path}: {e.reason}")
        except RftError as e:
            error = ApiError(500, f"the engine failed: {e}")
        except Exception as e:
            log.warning("a call of %s failed", request.path, exc_info=True)
            error = ApiError(500, f"{type(e).__name__}: {e}")
        return web.json_response(error.body, status=error.status)

    return middleware


# ---------------------------------------------------------------- one server for all


class _Shared:
    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.ready = asyncio.ensure_future(self.endpoint.start())
        self.users = 0

    async def shut(self) -> None:
        await asyncio.wait({self.ready})
        if not self.ready.cancelled():
            self.ready.exception()
        await self.endpoint.close()


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()
_CLOSING: set[asyncio.Task[None]] = set()


@asynccontextmanager
async def shared() -> AsyncIterator[Endpoint]:
    """The server of this event loop.  It is there while somebody uses it."""
    loop = asyncio.get_running_loop()
    if (mine := _SHARED.get(loop)) is None:
        mine = _SHARED[loop] = _Shared()
    mine.users += 1
    try:
        await asyncio.shield(mine.ready)
        yield mine.endpoint
    finally:
        mine.users -= 1
        if mine.users == 0:
            if _SHARED.get(loop) is mine:
                del _SHARED[loop]
            closing = asyncio.ensure_future(mine.shut())
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
            await asyncio.shield(closing)


@asynccontextmanager
async def serve(
    ctx: RunContext, task: Task, *, sampling: Rule = "taskset", agent_reward: bool = False
) -> AsyncIterator[RunSession]:
    """A session for one run; it is shut, and its open calls end, when the block is left.

    `agent_reward`: a posted reward counts also where the taskset has one.
    """
    async with shared() as endpoint:
        session = RunSession(ctx, task, sampling, agent_reward)
        session.base_url = endpoint.add(session)
        try:
            yield session
        finally:
            endpoint.remove(session)


@asynccontextmanager
async def serve_models(models: Mapping[str, ChatModel]) -> AsyncIterator[dict[str, tuple[str, str]]]:
    """Unrecorded sessions to other models: (base URL, key) by name."""
    async with shared() as endpoint:
        sessions = {name: ModelSession(model, name) for name, model in models.items()}
        try:
            yield {name: (endpoint.add(session), session.key) for name, session in sessions.items()}
        finally:
            for session in sessions.values():
                endpoint.remove(session)


@asynccontextmanager
async def public(model: ChatModel, name: str, *, port: int | None, key: str | None) -> AsyncIterator[dict[str, str]]:
    """A server of its own for observers; {base_url, api_key} for OpenAI clients.  `key` None: a random one.  Nothing is recorded.

    Raises SetupError where the port is taken.
    """
    endpoint = Endpoint()
    await endpoint.start(port=port or 0)
    session = ModelSession(model, name)
    session.key = key or session.key
    try:
        endpoint.add(session)
        yield {"base_url": f"{endpoint.address}/v1", "api_key": session.key}
    finally:
        await endpoint.close()
