"""A server on loopback that speaks OpenAI's protocol, for agents that know nothing of us.

    async with serve(ctx, task) as door:
        ...  an agent talks to door.base_url with door.api_key
    return ctx.transcript(layout="chains")

One server serves all runs of the process that are open at a time; each run has a door of its own: an address with the run's id and a
random key.  What goes through a run's door is recorded in its context, with the engine's own tokens and log-probs.

Knows engines by their port alone.  Invariants: a key opens one door, and none after its run; a request touches no other run.
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
from rft.workflow.endpoint_wire import ApiError, Asked

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
T = TypeVar("T")
Rule = Literal["taskset", "request"]
"""Whose sampling arguments a call has: the taskset's (training stays on-policy), or the request's where it names some."""
HARMLESS = frozenset({"max_tokens", "stop", "seed"})  # of a request, applied also where the taskset's arguments win
MAX_BODY = 64 << 20
_TEXT = "{{ messages[0]['content'] }}"  # a chat template that is the text itself
_CLOSE_S = 1.0  # for answers that are being written when the server closes


class Door:
    """What one key opens: a model, and the calls under way.  `name` is the model's name in /v1/models."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = f"rft-{secrets.token_hex(24)}"
        self.id = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:80] + "-" + secrets.token_hex(4)
        self.open = True
        self._calls: set[asyncio.Future[Any]] = set()

    async def answers(self, asked: Asked) -> list[Completion]:
        raise NotImplementedError

    def ignored(self, asked: Asked) -> list[str]:
        """Sampling fields of the request that are not applied."""
        return []

    def reward(self, body: Any) -> None:
        raise ApiError(404, "this is not the door of a run: there is nothing to reward")

    async def call(self, work: Awaitable[T]) -> T:
        """The result of `work`, which ends with the door and with whoever waits for it."""
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


class ModelDoor(Door):
    """Any model, unrecorded: judges behind an OpenAI client, and the policy for onlookers."""

    def __init__(self, model: ChatModel, name: str, sampling: SamplingArgs | None = None) -> None:
        super().__init__(name)
        self._model, self._sampling = model, sampling or SamplingArgs(max_tokens=1024)
        self._asked = 0

    async def answers(self, asked: Asked) -> list[Completion]:
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
                    sampling=sampling,
                    n=asked.n,
                    request_id=f"api-{self.id}-{self._asked}",
                )
            )
        found = await asyncio.gather(*(self._model.generate(r) for r in requests))
        return [c for some in found for c in some]


class RunDoor(Door):
    """The policy, for one run: calls are recorded, rewards are taken.

    `failure`: an error of the engine that no agent can do anything about; `score`: what was posted for the whole run.
    """

    def __init__(self, ctx: RunContext, task: Task, rule: Rule) -> None:
        super().__init__(ctx.request_id)
        self._ctx, self._task, self._rule = ctx, task, rule
        self.base_url = ""
        self.score: Score | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def api_key(self) -> str:
        return self.key

    def ignored(self, asked: Asked) -> list[str]:
        return sorted(asked.sampling.keys() - HARMLESS) if self._rule == "taskset" else []

    async def answers(self, asked: Asked) -> list[Completion]:
        overrides = {k: v for k, v in asked.sampling.items() if self._rule == "request" or k in HARMLESS}
        if self._rule == "taskset" and "max_tokens" in overrides:
            overrides["max_tokens"] = min(overrides["max_tokens"], self._task.sampling.max_tokens)
        if "max_tokens" in overrides:
            least = overrides.get("min_tokens", self._task.sampling.min_tokens)
            overrides["min_tokens"] = min(least, overrides["max_tokens"])
        more: dict[str, Any] = {"n": asked.n, "chat_template_args": asked.chat_template_args, **overrides}
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

    def reward(self, body: Any) -> None:
        """{"reward": number} or {"reward": {part: number}}, with "target": "run" (default) or "step" (the last call), and "info"."""
        if not isinstance(body, dict) or (unknown := sorted(body.keys() - {"reward", "target", "info"})):
            raise ApiError(400, f"send {{reward, target, info}}{f'; unknown: {unknown}' if isinstance(body, dict) else ''}")
        target, info = body.get("target", "run"), body.get("info") or {}
        if target not in ("run", "step") or not isinstance(info, dict) or (info and target == "run"):
            raise ApiError(400, 'target must be "run" or "step"; info is an object, of a step alone', param="target")
        try:
            score = checked(body.get("reward"))  # type: ignore[arg-type]
            if target == "run":
                self.score = score
            else:
                self._ctx.score_step(score.value, parts=score.parts, **info)
        except (ValueError, TypeError) as e:
            raise ApiError(400, str(e), param="reward") from None

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
        self._doors: dict[str, Door] = {}  # by id
        self._keys: dict[str, Door] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises SetupError where the port cannot be had."""
        from aiohttp import web

        app = web.Application(middlewares=[_in_openais_form()], client_max_size=MAX_BODY)
        for prefix in ("", "/run/{run}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._completions)
            app.router.add_post(f"{prefix}/v1/reward", self._reward)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as e:
            await self._runner.cleanup()
            raise SetupError(f"the OpenAI-compatible endpoint cannot listen on {host}:{port}: {e}") from e
        self.address = f"http://{host}:{self._runner.addresses[0][1]}"

    def add(self, door: Door) -> str:
        """Opens `door`; its base URL for OpenAI clients."""
        self._doors[door.id] = self._keys[door.key] = door
        return f"{self.address}/run/{door.id}/v1"

    def remove(self, door: Door) -> None:
        self._doors.pop(door.id, None)
        self._keys.pop(door.key, None)
        door.close()

    async def close(self) -> None:
        for door in list(self._doors.values()):
            self.remove(door)
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------ handlers

    def _door(self, request: web.Request) -> Door:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        run = request.match_info.get("run")
        door = self._keys.get(key.strip()) if scheme.lower() == "bearer" else None
        if door is None or (run is not None and not hmac.compare_digest(door.id.encode(), run.encode())):
            raise ApiError(
                401,
                "wrong key: send `Authorization: Bearer KEY` with the run's key, which ends with the run",
                code="invalid_api_key",
            )
        return door

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        from aiohttp import web

        door = self._door(request)
        asked = wire.read(await _json(request), chat=chat)
        completions = await door.call(_understood(door.answers(asked)))
        if any(c.finish_reason == "abort" for c in completions):
            raise ApiError(503, "the engine aborted this call")
        headers = {"x-rft-ignored": ", ".join(ignored)} if (ignored := door.ignored(asked)) else {}
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

        door = self._door(request)
        door.reward(await _json(request))
        return web.json_response({"object": "reward", "status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        door = self._door(request)
        name = "policy" if isinstance(door, RunDoor) else door.name
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rft"}]})

    async def _health(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"status": "ok"})


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None


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
async def serve(ctx: RunContext, task: Task, *, sampling: Rule = "taskset") -> AsyncIterator[RunDoor]:
    """A door for one run; it is shut, and its open calls end, when the block is left."""
    async with shared() as endpoint:
        door = RunDoor(ctx, task, sampling)
        door.base_url = endpoint.add(door)
        try:
            yield door
        finally:
            endpoint.remove(door)


@asynccontextmanager
async def serve_models(models: Mapping[str, ChatModel]) -> AsyncIterator[dict[str, tuple[str, str]]]:
    """Unrecorded doors to other models: (base URL, key) by name."""
    async with shared() as endpoint:
        doors = {name: ModelDoor(model, name) for name, model in models.items()}
        try:
            yield {name: (endpoint.add(door), door.key) for name, door in doors.items()}
        finally:
            for door in doors.values():
                endpoint.remove(door)


@asynccontextmanager
async def public(model: ChatModel, name: str, *, port: int | None, key: str | None) -> AsyncIterator[dict[str, str]]:
    """A server of its own for onlookers; {base_url, api_key} for OpenAI clients.  `key` None: a random one.  Nothing is recorded.

    Raises SetupError where the port is taken.
    """
    endpoint = Endpoint()
    await endpoint.start(port=port or 0)
    door = ModelDoor(model, name)
    door.key = key or door.key
    try:
        endpoint.add(door)
        yield {"base_url": f"{endpoint.address}/v1", "api_key": door.key}
    finally:
        await endpoint.close()
