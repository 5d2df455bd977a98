"""A server on loopback with the APIs of OpenAI and Anthropic, for agents of any program.

    async with serve(ctx, task) as session:
        ...  an agent talks to session.base_url with session.api_key
    return ctx.transcript(layout="chains")

One server serves all open runs of the process.  Each run has a session: an address with the run's
id, and a random key.  The calls of a session are recorded in the run's context, with the engine's
tokens and log-probs.

Depends on engines by their port alone.  Invariants: a key opens one session, and none after its
run; a request touches no other run.
"""

from __future__ import annotations

import asyncio
import hmac
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
from rft.workflow import endpoint_answers as answers
from rft.workflow import endpoint_wire as wire
from rft.workflow.base import RunContext
from rft.workflow.dialect_messages import COUNT, MESSAGES
from rft.workflow.dialect_responses import RESPONSES
from rft.workflow.endpoint_answers import Dialect
from rft.workflow.endpoint_sessions import ModelSession, Rule, RunSession, Session, hashed, stopping
from rft.workflow.endpoint_wire import ApiError, ApiRequest

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
HEAD_S = 15.0  # for the head of a request, and for a connection between two of them
BODY_S = 15.0
# after which a stream begins without its answer, and between two comments in it
KEEP_ALIVE_S = 15.0
_FULL_DISK_S = 10.0  # after which a client may try again
_RUN_FAILED_S = 2.0
MAX_RETRY_KEY = 200
WRONG_KEY = (
    "wrong key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`, with the run's key, which "
    "ends with the run"
)
_CLOSE_S = 1.0  # for answers that are being written when the server closes
DIALECTS = {
    "/v1/chat/completions": answers.CHAT,
    "/v1/completions": answers.TEXT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
_COUNT_PAGE = "/v1/messages/count_tokens"


# ---------------------------------------------------------------- the server


def listening(host: str, port: int) -> socket.socket:
    """Open a listening socket.  Raises SetupError where the port is not free."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as e:
        where = f"{host}:{port} (explorer.proxy_port, or base_port of a model for observers)"
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
        """Listen.  Raises SetupError where the port is not free."""
        from aiohttp import web

        listener = listening(host, port)
        app = web.Application(middlewares=[_in_its_form()], client_max_size=wire.MAX_BYTES)
        self.routes(app.router)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=http_log("rft.endpoint.http"),
            shutdown_timeout=_CLOSE_S,
            handler_cancellation=True,
            # closes a connection without a complete head, however slowly it sends
            keepalive_timeout=HEAD_S,
            # so that a client that is still sending can read the refusal
            lingering_time=BODY_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    @asynccontextmanager
    async def also_at(self, listener: socket.socket) -> AsyncIterator[None]:
        """Listen at another socket, too."""
        from aiohttp import web

        assert self._runner is not None
        site = web.SockSite(self._runner, listener.dup())
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    def routes(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", "/run/{run}"):
            for page, dialect in DIALECTS.items():
                router.add_post(prefix + page, partial(self._answer, dialect=dialect))
            router.add_post(prefix + _COUNT_PAGE, self._count_tokens)
            router.add_post(f"{prefix}/v1/reward", self._reward)
            router.add_get(f"{prefix}/v1/models", self._models)
            router.add_get(f"{prefix}/health", self._health)

    def add(self, session: Session) -> str:
        """Open `session` and return its base URL for OpenAI clients."""
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
        """Raises ApiError 401 for a request without a valid key."""
        self._session(request)

    async def respond(
        self, request: web.Request, api_request: ApiRequest, retry_key: str
    ) -> tuple[Session, answers.ApiAnswer]:
        """Return the session of a request, and the answer.  Raises ApiError: 401 unknown key, 429
        limits.
        """
        session = self._session(request)
        return session, await session.answer(api_request, retry_key)

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

    async def _answer(self, request: web.Request, *, dialect: Dialect) -> web.StreamResponse:
        from aiohttp import web

        self.authenticate(request)  # before its body is read
        api_request = dialect.read(await read_json(request))
        answering = asyncio.ensure_future(self.respond(request, api_request, _retry_key(request)))
        try:
            if (
                api_request.stream
                and not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]
            ):
                return await _late_stream(request, api_request, answering, dialect)
            session, answer = await answering
        finally:
            answering.cancel()
        ignored = session.ignored(api_request)
        headers = {"x-rft-ignored": ", ".join(ignored)} if ignored else {}
        if api_request.stream:
            events = dialect.stream(api_request, answer)
            return web.Response(body=events, headers={**_STREAM, **headers})
        return json_response(dialect.body(api_request, answer), headers=headers)

    async def count_tokens(self, request: web.Request, api_request: ApiRequest) -> int:
        """Return the number of tokens of a prompt.  Raises ApiError as `respond` does."""
        return await self._session(request).count_tokens(api_request)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        self.authenticate(request)
        api_request = COUNT.read(await read_json(request))
        return json_response({"input_tokens": await self.count_tokens(request, api_request)})

    async def _reward(self, request: web.Request) -> web.Response:
        return json_response(await self._session(request).reward(await read_json(request)))

    async def _models(self, request: web.Request) -> web.Response:
        self.authenticate(request)
        session = self._keys.get(key_of(request))
        name = session.name if isinstance(session, ModelSession) else "policy"
        model = {"id": name, "object": "model", "created": 0, "owned_by": "rft"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        page = {"first_id": name, "last_id": name, "has_more": False}
        return json_response({"object": "list", "data": [model], **page})

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})


def json_response(body: Any, **more: Any) -> web.Response:
    from aiohttp import web

    return web.json_response(body, **more)


_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def _late_stream(
    request: web.Request,
    api_request: ApiRequest,
    answering: asyncio.Future[tuple[Session, answers.ApiAnswer]],
    dialect: Dialect,
) -> web.StreamResponse:
    """Stream comments until the answer, so that no proxy closes the connection; an error is an
    event.
    """
    from aiohttp import web

    response = web.StreamResponse(headers=_STREAM)
    await response.prepare(request)
    await response.write(b": the answer is being written\n\n")
    while not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
        await response.write(b": still\n\n")
    try:
        _, answer = answering.result()
        await response.write(dialect.stream(api_request, answer))
    except Exception as e:
        error = dialect.error_event(_api_error(e, request.path))
        await response.write(answers.server_sent(error))
    await response.write_eof()
    return response


def key_of(request: web.Request) -> str:
    """Return the hash of the key of a request; empty without a key."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")
    return hashed(key.strip()) if key else ""


def _retry_key(request: web.Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    # bytes that are no text are read as surrogates
    if len(key) > MAX_RETRY_KEY or not key.isprintable():
        text = (
            f"Idempotency-Key has {len(key)} characters; at most {MAX_RETRY_KEY} are taken, all "
            f"of them printable"
        )
        raise ApiError(400, text, param="Idempotency-Key")
    return key


async def read_json(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    return wire.parse(body)


def _in_its_form() -> Callable[..., Awaitable[web.StreamResponse]]:
    from aiohttp import web

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            answered: web.StreamResponse = await handler(request)
            return answered
        except web.HTTPException as e:  # no such page, a body that is too large
            served = f"; this serves {', '.join(DIALECTS)}" if e.status == 404 else ""
            error = ApiError(e.status, f"{request.method} {request.path}: {e.reason}{served}")
        except Exception as e:
            error = _api_error(e, request.path)
        dialect = _dialect_of(request)
        status = dialect.statuses.get(error.status, error.status)
        return web.json_response(dialect.error(error), status=status, headers=error.headers)

    return middleware


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of an address, for its errors."""
    if "anthropic-version" in request.headers:
        return MESSAGES
    page = "/v1" + request.path.rpartition("/v1")[2]
    return MESSAGES if page == _COUNT_PAGE else DIALECTS.get(page, answers.CHAT)


def _api_error(error: Exception, path: str) -> ApiError:
    """Return the answer to a client for an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DiskFull):
        text = f"nothing can be stored now, so nothing is answered: {error}"
        return ApiError(503, text, code="disk_full", retry_s=_FULL_DISK_S)
    if isinstance(error, EngineFailed):
        return ApiError(503, f"the engine failed: {error}", code="engine_failed", retry_s=1.0)
    if isinstance(error, RunFailed):
        log.warning("a call of %s failed: %s", path, error)
        text = (
            "a part of the run has failed; send this again: it counts once, and is answered when "
            "the run was started again"
        )
        return ApiError(503, text, code="run_failed", retry_s=_RUN_FAILED_S)
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
    """The server of this event loop, open while there are users."""
    loop = asyncio.get_running_loop()
    server = _SHARED.get(loop)
    if server is None:
        server = _SHARED[loop] = _Shared()
    server.users += 1
    try:
        await asyncio.shield(server.ready)
        yield server.endpoint
    finally:
        server.users -= 1
        if server.users == 0:
            if _SHARED.get(loop) is server:
                del _SHARED[loop]
            closing = asyncio.ensure_future(server.shut())
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
            await asyncio.shield(closing)


@asynccontextmanager
async def serve(
    ctx: RunContext, task: Task, *, sampling: Rule = "taskset", agent_reward: bool = False
) -> AsyncIterator[RunSession]:
    """Open a session for one run; leaving the block closes it and ends its calls.

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
async def also_at(listener: socket.socket) -> AsyncIterator[None]:
    """Serve the open sessions of this event loop at a further listening socket, which is left open."""
    async with shared() as endpoint, endpoint.also_at(listener):
        yield


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
    """Serve one model to observers, unrecorded; yields {base_url, api_key} for OpenAI clients.

    `port`, `key` None: random ones.  Raises SetupError where the port is not free.
    """
    endpoint = Endpoint()
    await endpoint.start(port=port or 0)
    session = ModelSession(model, name, key=key or "")
    try:
        endpoint.add(session)
        yield {"base_url": f"{endpoint.address}/v1", "api_key": session.key}
    finally:
        await endpoint.close()
