"""The service's addresses: the policy's in three dialects, and what tells it which answers were
good.

    POST   /v1/chat/completions, /v1/completions    with a session's key; with a client's key each call is a session by itself
    POST   /v1/responses, /v1/messages              the same
    GET    /v1/models  /health  /metrics
    POST   /v1/sessions                             {task_id, metadata, ttl} -> {id, api_key, base_url}
    GET    /v1/sessions/{id}                        its state
    POST   /v1/sessions/{id}/reward                 {reward, message, final}
    DELETE /v1/sessions/{id}                        it is never trained
    POST   /feedback  /commit                       as Trinity-RFT's client sends them

Depends on no batches.  Invariants: nothing but /health without a key; a session sees only itself, a
client only its own sessions; what is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rft.explorer.service_settings import ServeRuntime
from rft.extras.serve import bodies
from rft.extras.serve.access import Quota, TooMuch
from rft.extras.serve.book import SessionBook, over
from rft.extras.serve.live_session import LiveSession
from rft.types.completion import Score
from rft.types.metrics import reduce
from rft.types.ports import ChatModel, Measured
from rft.types.sessions import StoredSession
from rft.workflow.endpoint import WRONG_KEY, Endpoint, json_response, key_of, read_json
from rft.workflow.endpoint_answers import ApiAnswer, usage
from rft.workflow.endpoint_sessions import ModelSession, Session
from rft.workflow.endpoint_wire import ApiError, ApiRequest, checked

if TYPE_CHECKING:
    from aiohttp import web


class Gateway(Endpoint):
    """`clients`: names by the hashes of their keys."""

    def __init__(
        self, settings: ServeRuntime, clients: Mapping[str, str], model: ChatModel
    ) -> None:
        super().__init__()
        self._settings = settings
        self._clients = dict(clients)
        self._model = model
        self.quotas = {name: Quota(settings.config) for name in clients.values()}
        self._of_sessions: dict[str, Quota] = {}  # by id
        self._book: SessionBook | None = None
        self.listening = asyncio.Event()
        self.counts: Counter[str] = Counter()

    async def serve(self, book: SessionBook) -> None:
        """Listens.  Raises SetupError where the port is taken."""
        self._book = book
        await self.start(host=self._settings.host, port=self._settings.port)
        self.listening.set()

    @property
    def book(self) -> SessionBook:
        assert self._book is not None, "set before it listens"
        return self._book

    def routes(self, router: web.UrlDispatcher) -> None:
        super().routes(router)
        router.add_post("/v1/sessions", _to_its_end(self._open))
        router.add_get("/v1/sessions/{id}", self._show)
        router.add_post("/v1/sessions/{id}/reward", _to_its_end(self._reward_session))
        router.add_delete("/v1/sessions/{id}", _to_its_end(self._withdraw))
        router.add_post("/feedback", _to_its_end(self._feedback))
        router.add_post("/commit", self._commit)
        router.add_get("/metrics", self._metrics)

    def add(self, session: Session) -> str:
        assert isinstance(session, LiveSession), "this server has no other ones"
        self._of_sessions[session.id] = Quota(self._settings.config)
        session.on_answer = partial(self._count, session)
        return super().add(session)

    def remove(self, session: Session) -> None:
        super().remove(session)
        self._of_sessions.pop(session.id, None)

    # ------------------------------------------------------------ who asks

    def authenticate(self, request: web.Request) -> None:
        if "run" in request.match_info or key_of(request) not in self._clients:
            self._session(request)

    def _client(self, request: web.Request) -> str:
        """Name of the client whose key this is."""
        if (name := self._clients.get(key_of(request))) is None:
            text = (
                "wrong key: send `Authorization: Bearer KEY` with the key of a client, which is in "
                "RFT_SERVE_KEY, or in explorer.serve.clients_file as a hash"
            )
            raise ApiError(401, text, code="invalid_api_key")
        return name

    async def respond(
        self, request: web.Request, api_request: ApiRequest, retry_key: str
    ) -> tuple[Session, ApiAnswer]:
        name = None if "run" in request.match_info else self._clients.get(key_of(request))
        if name is not None:
            # before there is a session: what is refused leaves none behind
            with self._limited([self.quotas[name]]):
                session = self.book.alone(name, retry_key)
                try:
                    answer = await session.answer(api_request, retry_key)
                except BaseException:
                    await self.book.abandon(session)
                    raise
            return session, answer
        open_session = self._session(request)
        with self._limited(self._quotas(open_session)):
            return open_session, await open_session.answer(api_request, retry_key)

    async def count_tokens(self, request: web.Request, api_request: ApiRequest) -> int:
        name = self._clients.get(key_of(request))
        session = ModelSession(self._model, name) if name else self._session(request)
        with self._limited([self.quotas[name]] if name else self._quotas(session)):
            return await session.count_tokens(api_request)

    def _quotas(self, session: Session) -> list[Quota]:
        """What a call of this session counts for; its client may have been removed."""
        assert isinstance(session, LiveSession), "this server opens no other kind"
        both = self._of_sessions.get(session.id), self.quotas.get(session.stored.client)
        return [quota for quota in both if quota is not None]

    def _count(self, session: LiveSession, answer: ApiAnswer, n: int) -> None:
        used = usage(answer.completions, n)
        self.counts.update(
            calls=1,
            prompt_tokens=used["prompt_tokens"],
            completion_tokens=used["completion_tokens"],
        )
        for quota in self._quotas(session):
            quota.spend(used["total_tokens"])

    @contextmanager
    def _limited(self, quotas: Sequence[Quota]) -> Iterator[None]:
        """While a request is under way that counts for all of them.  Raises ApiError 429, which has
        taken nothing.
        """
        try:
            for quota in quotas:
                quota.check()
        except TooMuch as e:
            self.counts["limited"] += 1
            raise ApiError(429, str(e), code="rate_limit_exceeded", retry_s=e.retry_s) from None
        with ExitStack() as stack:
            for quota in quotas:
                stack.enter_context(quota.request())
            yield

    async def _authorised_session(self, request: web.Request) -> LiveSession | StoredSession:
        """The session of the address, for its own key or its client's.  Others learn nothing, not
        even whether it is there.
        """
        key = key_of(request)
        id = request.match_info["id"]
        session = await self.book.find(id) if key else None
        if session is not None:
            stored = _stored(session)
            theirs = stored.key_hash and hmac.compare_digest(stored.key_hash, key)
            if theirs or self._clients.get(key) == stored.client:
                return session
        if key in self._clients:
            raise ApiError(404, "this client has no session of this id", code="unknown_session")
        raise ApiError(401, WRONG_KEY, code="invalid_api_key")

    # ------------------------------------------------------------ sessions

    async def _open(self, request: web.Request) -> web.Response:
        client = self._client(request)
        body = checked(bodies.OpenSession, await read_json(request))
        self._check_task(body.task_id)
        session = await self.book.open(client, body.task_id, body.metadata, body.ttl)
        # of a proxy that speaks TLS
        scheme = request.headers.get("X-Forwarded-Proto", request.scheme)
        # the address that this client knows
        base_url = f"{scheme}://{request.host}/run/{session.id}/v1"
        return json_response(
            {**_shown(session.stored), "api_key": session.key, "base_url": base_url}, status=201
        )

    def _check_task(self, task_id: str) -> None:
        if self._settings.num_runs > 1 and not task_id:
            reason = (
                "task_id is required, when a session is opened or in /feedback: runs of one task "
                "are compared with each other here"
            )
            raise ApiError(400, reason, param="task_id", code="task_id_required")

    async def _show(self, request: web.Request) -> web.Response:
        session = await self._authorised_session(request)
        return json_response(_shown(_stored(session)))

    def _check_may_reward(self, request: web.Request) -> None:
        """Raises ApiError for a session's key: what plays a run does not decide what it was worth,
        nor that it does not count.
        """
        if key_of(request) not in self._clients and not self._settings.config.session_may_reward:
            reason = (
                "this takes the key of a client; a session's takes it with "
                "explorer.serve.session_may_reward: true"
            )
            raise ApiError(403, reason, code="session_may_not_reward")

    def _check_range(self, score: Score) -> None:
        if (bounds := self._settings.config.reward_range) is None or score.value is None:
            return
        low, high = bounds
        if not low <= score.value <= high:
            reason = (
                f"the reward is {score.value:g}; explorer.serve.reward_range takes {low:g} to "
                f"{high:g}"
            )
            raise ApiError(400, reason, param="reward", code="reward_out_of_range")

    async def _reward_session(self, request: web.Request) -> web.Response:
        session = await self._authorised_session(request)
        self._check_may_reward(request)
        body = checked(bodies.RewardBody, await read_json(request))
        self._check_task(_stored(session).task_id)
        call = None if body.message is None else bodies.call_of(body.message)
        return await self._rewarded(session, body.score, call, body.final)

    async def _rewarded(
        self, session: LiveSession | StoredSession, score: Score, call: str | None, final: bool
    ) -> web.Response:
        self._check_range(score)
        if isinstance(session, LiveSession):
            status = await self.book.reward(session, score, call, final)
        elif session.state == "accepted" and call is None and session.score == score:
            status = "duplicate"
        else:
            raise over(session.state, session.reason or "it is rows of a group, whose rewards hold")
        return json_response({"object": "reward", "status": status})

    async def _withdraw(self, request: web.Request) -> web.Response:
        session = await self._authorised_session(request)
        self._check_may_reward(request)
        if isinstance(session, LiveSession):
            if not await self.book.explain([session.id], "withdrawn"):
                raise over("accepted", "it is rows of a group")
        elif (session.state, session.reason) != ("explained", "withdrawn"):
            raise over(session.state, session.reason or "it is rows of a group")
        return json_response({"object": "session.deleted", "id": session.id, "deleted": True})

    # ------------------------------------------------------------ Trinity's

    async def _feedback(self, request: web.Request) -> web.Response:
        client = self._client(request)
        body = checked(bodies.Feedback, await read_json(request))
        task_id = body.task_id or ""
        sessions = dict[str, LiveSession | StoredSession]()
        for message in body.msg_ids:
            session = await self.book.find(bodies.call_of(message))
            if session is None or _stored(session).client != client:
                raise ApiError(
                    404,
                    f"message {message!r} is none of this client's",
                    param="msg_ids",
                    code="unknown_message",
                )
            stored = _stored(session)
            sessions[stored.id], task_id = session, task_id or stored.task_id
        self._check_task(task_id)
        first = next(iter(sessions.values()))
        waiting = [
            s for s in sessions.values() if isinstance(s, LiveSession) and s.stored.state == "open"
        ]
        if len(sessions) > 1 and (
            len(waiting) < len(sessions) or any(s.stored.key_hash for s in waiting[1:])
        ):
            raise ApiError(
                409,
                "some of these messages belong to other runs",
                param="msg_ids",
                code="session_over",
            )
        self._check_range(Score(value=body.reward))  # before anything is joined
        if waiting and (waiting[1:] or waiting[0].stored.task_id != task_id):
            await self.book.join(waiting[0], waiting[1:], task_id)
        return await self._rewarded(first, Score(value=body.reward), None, False)

    async def _commit(self, request: web.Request) -> web.Response:
        client = self._client(request)
        groups = self.book.groups
        closed = groups.commit(client)
        self.book.changed.set()
        return json_response(
            {"status": "ok", "closed_groups": closed, "waiting_sessions": groups.waiting(client)}
        )

    # ------------------------------------------------------------ what it does

    def values(self) -> dict[str, float]:
        """Counts since it began, and the sessions that wait."""
        names = ("calls", "prompt_tokens", "completion_tokens", "limited")
        values = {f"serve/{name}": float(self.counts[name]) for name in names}
        values |= {f"serve/sessions/{name}": float(n) for name, n in self.book.counts.items()}
        values["serve/sessions/waiting"] = float(len(self.book.sessions))
        return values

    async def _metrics(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._client(request)
        values = self.values()
        values["serve/groups/closed"] = float(len(self.book.groups.closed))
        if isinstance(self._model, Measured):
            values |= reduce(await self._model.metrics())  # of several engines
        lines = [
            f"rft_{re.sub('[^A-Za-z0-9]', '_', name)} {value:.15g}"
            for name, value in sorted(values.items())
        ]
        return web.Response(
            text="\n".join(lines) + "\n", content_type="text/plain", charset="utf-8"
        )


def _to_its_end(
    handler: Callable[[web.Request], Awaitable[web.Response]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Also where the client has gone: a session is here as it is in the store."""

    async def handled(request: web.Request) -> web.Response:
        return await asyncio.shield(handler(request))

    return handled


def _stored(session: LiveSession | StoredSession) -> StoredSession:
    return session.stored if isinstance(session, LiveSession) else session


def _shown(s: StoredSession) -> dict[str, Any]:
    shown = {
        "object": "session",
        "id": s.id,
        "task_id": s.task_id,
        "state": s.state,
        "expires": s.expires,
    }
    return (
        shown
        | ({"reason": s.reason} if s.reason else {})
        | ({"reward": s.score.value} if s.score is not None else {})
    )
