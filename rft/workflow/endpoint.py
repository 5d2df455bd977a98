"""A server on loopback that speaks OpenAI's protocol, for agents that know nothing of us.

    async with serve(ctx, task) as session:
        ...  an agent talks to session.base_url with session.api_key
    return ctx.transcript(layout="chains")

One server serves all runs of the process that are open at a time; each run has a session of its
own: an address with the run's id and a random key.  What goes through a run's session is recorded
in its context, with the engine's own tokens and log-probs.

Knows engines by their port alone.  Invariants: a key opens one session, and none after its run; a
request touches no other run.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rft.errors import DiskFull, EngineFailed, RftError, RunFailed, SetupError
from rft.secrets import http_log
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow import endpoint_wire as wire
from rft.workflow.base import RunContext
from rft.workflow.endpoint_sessions import ModelSession, Rule, RunSession, Session, hashed, stopping
from rft.workflow.endpoint_wire import ApiError

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
HEAD_S = 15.0  # for the head of a request, and for a connection between two of them
BODY_S = 15.0
# after which a stream begins although its answer is not there, and between two signs of life
KEEP_ALIVE_S = 15.0
_FULL_DISK_S = 10.0  # after which a client may try again
_RUN_FAILED_S = 2.0
MAX_RETRY_KEY = 200
WRONG_KEY = (
    "wrong key: send `Authorization: Bearer KEY` with the run's key, which ends with the run"
)
_CLOSE_S = 1.0  # for answers that are being written when the server closes


# ---------------------------------------------------------------- the server


def listening(host: str, port: int) -> socket.socket:
    """Raises SetupError where the port cannot be had."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as e:
        where = f"{host}:{port} (explorer.proxy_port; of a model that observers ask: its base_port)"
        raise SetupError(f"the OpenAI-compatible endpoint cannot listen on {where}: {e}") from e


class Endpoint:
    """The server.  `address` is http://127.0.0.1:PORT once it is started."""

    def __init__(self) -> None:
        self.address = ""
        self._sessions: dict[str, Session] = {}  # by id
        self._keys: dict[str, Session] = {}  # by hash
        self._runner: web.AppRunner | None = None
        self._closing = False

    async def start(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises SetupError where the port cannot be had."""
        from aiohttp import web

        listener = listening(host, port)
        app = web.Application(middlewares=[_in_openais_form()], client_max_size=wire.MAX_BYTES)
        self.routes(app.router)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=http_log("rft.endpoint.http"),
            shutdown_timeout=_CLOSE_S,
            handler_cancellation=True,
            # closes a connection without a whole head, however often a byte comes
            keepalive_timeout=HEAD_S,
            # a client that is still sending gets to read why its body was refused
            lingering_time=BODY_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def routes(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", "/run/{run}"):
            router.add_post(f"{prefix}/v1/chat/completions", partial(self._answer, chat=True))
            router.add_post(f"{prefix}/v1/completions", partial(self._answer, chat=False))
            router.add_post(f"{prefix}/v1/reward", self._reward)
            router.add_get(f"{prefix}/v1/models", self._models)
            router.add_get(f"{prefix}/health", self._health)

    def add(self, session: Session) -> str:
        """Opens `session`; its base URL for OpenAI clients."""
        self._sessions[session.id] = self._keys[session.key_hash] = session
        return f"{self.address}/run/{session.id}/v1"

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._keys.pop(session.key_hash, None)
        session.close()

    async def close(self) -> None:
        self._closing = True
        for session in list(self._sessions.values()):
            session.stopped = True
            self.remove(session)
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------ handlers

    def authenticate(self, request: web.Request) -> None:
        """Raises ApiError where the request shows no key that counts."""
        self._session(request)

    async def respond(
        self, request: web.Request, asked: wire.ApiRequest, retry_key: str
    ) -> tuple[Session, wire.ApiAnswer]:
        """Whose call it is, and its answer.  Raises ApiError where there is nobody, or it asks too
        much.
        """
        session = self._session(request)
        return session, await session.answer(asked, retry_key)

    def _session(self, request: web.Request) -> Session:
        run = request.match_info.get("run")
        session = self._keys.get(key_of(request))
        if session is None and self._closing:
            raise stopping()
        if session is None or (
            run is not None and not hmac.compare_digest(session.id.encode(), run.encode())
        ):
            raise ApiError(401, WRONG_KEY, code="invalid_api_key")
        return session

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        from aiohttp import web

        self.authenticate(request)  # before its body is read
        asked = wire.read(await read_json(request), chat=chat)
        answering = asyncio.ensure_future(self.respond(request, asked, _retry_key(request)))
        try:
            if asked.stream and not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
                return await _late_stream(request, asked, answering, chat=chat)
            session, answer = await answering
        finally:
            answering.cancel()
        headers = (
            {"x-rft-ignored": ", ".join(ignored)} if (ignored := session.ignored(asked)) else {}
        )
        if asked.stream:
            return web.Response(
                body=_events(asked, answer, chat=chat), headers={**_STREAM, **headers}
            )
        return json_response(
            (wire.chat_body if chat else wire.text_body)(asked, answer), headers=headers
        )

    async def _reward(self, request: web.Request) -> web.Response:
        return json_response(await self._session(request).reward(await read_json(request)))

    async def _models(self, request: web.Request) -> web.Response:
        self.authenticate(request)
        session = self._keys.get(key_of(request))
        name = session.name if isinstance(session, ModelSession) else "policy"
        return json_response(
            {
                "object": "list",
                "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rft"}],
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})


def json_response(body: Any, **more: Any) -> web.Response:
    from aiohttp import web

    return web.json_response(body, **more)


_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def _events(asked: wire.ApiRequest, answer: wire.ApiAnswer, *, chat: bool) -> bytes:
    """A whole answer as a stream."""
    chunks = (wire.chat_chunks if chat else wire.text_chunks)(asked, answer)
    return (
        "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
    )


async def _late_stream(
    request: web.Request,
    asked: wire.ApiRequest,
    answering: asyncio.Future[tuple[Session, wire.ApiAnswer]],
    *,
    chat: bool,
) -> web.StreamResponse:
    """A stream that begins before its answer, so that nobody on the way takes it for dead; its
    failure is an event.
    """
    from aiohttp import web

    response = web.StreamResponse(headers=_STREAM)
    await response.prepare(request)
    await response.write(b": the answer is being written\n\n")
    while not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
        await response.write(b": still\n\n")
    try:
        _, answer = answering.result()
        await response.write(_events(asked, answer, chat=chat))
    except Exception as e:
        await response.write(f"data: {json.dumps(_told(e, request.path).body)}\n\n".encode())
    await response.write_eof()
    return response


def key_of(request: web.Request) -> str:
    """Hash of the key that a request shows; empty: it shows none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return hashed(key.strip()) if scheme.lower() == "bearer" else ""


def _retry_key(request: web.Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    # bytes that are no text are read as halves of characters
    if len(key) > MAX_RETRY_KEY or not key.isprintable():
        why = (
            f"Idempotency-Key has {len(key)} characters; at most {MAX_RETRY_KEY} are taken, all "
            f"of them printable"
        )
        raise ApiError(400, why, param="Idempotency-Key")
    return key


async def read_json(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    return wire.parse(body)


def _in_openais_form() -> Callable[..., Awaitable[web.StreamResponse]]:
    from aiohttp import web

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            answered: web.StreamResponse = await handler(request)
            return answered
        except web.HTTPException as e:  # no such page, a body that is too large
            served = (
                "; of OpenAI's API this serves /v1/chat/completions and /v1/completions"
                if e.status == 404
                else ""
            )
            error = ApiError(e.status, f"{request.method} {request.path}: {e.reason}{served}")
        except Exception as e:
            error = _told(e, request.path)
        return web.json_response(error.body, status=error.status, headers=error.headers)

    return middleware


def _told(error: Exception, path: str) -> ApiError:
    """What a client hears of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DiskFull):
        why = f"nothing can be stored now, so nothing is answered: {error}"
        return ApiError(503, why, code="disk_full", retry_s=_FULL_DISK_S)
    if isinstance(error, EngineFailed):
        return ApiError(503, f"the engine failed: {error}", code="engine_failed", retry_s=1.0)
    if isinstance(error, RunFailed):
        log.warning("a call of %s failed: %s", path, error)
        why = (
            "a part of the run has failed; send this again: it counts once, and is answered when "
            "the run was started again"
        )
        return ApiError(503, why, code="run_failed", retry_s=_RUN_FAILED_S)
    if isinstance(error, RftError):
        return ApiError(500, f"the run failed: {error}")
    log.warning("a call of %s failed", path, exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}")


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
async def serve_models(
    models: Mapping[str, ChatModel],
) -> AsyncIterator[dict[str, tuple[str, str]]]:
    """Unrecorded sessions to other models: (base URL, key) by name."""
    async with shared() as endpoint:
        sessions = {name: ModelSession(model, name) for name, model in models.items()}
        try:
            yield {name: (endpoint.add(session), session.key) for name, session in sessions.items()}
        finally:
            for session in sessions.values():
                endpoint.remove(session)


@asynccontextmanager
async def public(
    model: ChatModel, name: str, *, port: int | None, key: str | None
) -> AsyncIterator[dict[str, str]]:
    """A server of its own for observers; {base_url, api_key} for OpenAI clients.  `key` None: a
    random one.  Nothing is recorded.

    Raises SetupError where the port is taken.
    """
    endpoint = Endpoint()
    await endpoint.start(port=port or 0)
    session = ModelSession(model, name, key=key or "")
    try:
        endpoint.add(session)
        yield {"base_url": f"{endpoint.address}/v1", "api_key": session.key}
    finally:
        await endpoint.close()
