"""A small client of `rft serve`: opens sessions and posts rewards.  What is asked in between goes
through any OpenAI client.

    with Client("http://127.0.0.1:8010", key) as rft:
        session = rft.session(task_id="sum-17")
        answer = openai.OpenAI(base_url=session.base_url,
        api_key=session.api_key).chat.completions.create(...) rft.reward(session, 1.0)

`AsyncClient` has the same methods, to be awaited.  A call that finds the service away or busy is
sent again until `patience_s` is over; each may be sent twice without counting twice.  Depends on no
engine and no run; needs httpx alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx

_AGAIN = (429, 502, 503, 504)
# nothing of these is a wrong address
_AWAY = (httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError, httpx.ProxyError)
_PAUSE_S = 1.0  # where the service does not say for how long
_Call = Generator[httpx.Request | float, httpx.Response | None, Any]
"""Yields what is to be sent, or seconds to wait; is given the response, None where none came."""


class ServeError(Exception):
    """The service refused; `code` is its short reason, `status` the HTTP status."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code or ''}: {message}")
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ClientSession:
    """What an OpenAI client needs to play one run."""

    id: str
    base_url: str
    api_key: str


class _Calls:
    """The calls, without sending: one implementation for both clients."""

    def __init__(self, address: str, key: str, patience_s: float) -> None:
        self._address = address.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._headers = {"Authorization": f"Bearer {key}"}

    def _call(self, method: str, path: str, body: Any = None) -> _Call:
        deadline = time.monotonic() + self._patience_s
        while True:
            request = httpx.Request(method, self._address + path, json=body, headers=self._headers)
            response = yield request
            late = time.monotonic() >= deadline
            busy = response is not None and (
                response.status_code in _AGAIN or "Retry-After" in response.headers
            )
            if response is not None and (not busy or late):
                break
            if late:
                raise ServeError(
                    0, "unreachable", f"{self._address} did not answer for {self._patience_s:g} s"
                )
            yield min(_pause_s(response), max(0.0, deadline - time.monotonic()))
        if response.is_error:
            try:
                error = response.json()["error"]
            except (ValueError, KeyError, TypeError):
                error = {"message": response.text[:500]}
            raise ServeError(response.status_code, error.get("code"), error.get("message", ""))
        return response.json()

    def _open(self, task_id: str, metadata: dict[str, Any] | None, ttl_s: float | None) -> _Call:
        body = {"task_id": task_id, "metadata": metadata or {}, "ttl": ttl_s}
        session = yield from self._call("POST", "/v1/sessions", body)
        return ClientSession(
            session["id"], f"{self._address}/run/{session['id']}/v1", session["api_key"]
        )

    def _reward(
        self,
        session: ClientSession,
        reward: float | dict[str, float],
        message: str | None,
        final: bool,
    ) -> _Call:
        body = {"reward": reward, "message": message, "final": final}
        reply = yield from self._call("POST", f"/v1/sessions/{session.id}/reward", body)
        return reply["status"]


def _pause_s(response: httpx.Response | None) -> float:
    """How long to wait before a call is sent again."""
    try:
        return _PAUSE_S if response is None else max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # it names a date, or nothing
        return _PAUSE_S


class Client(_Calls, contextlib.AbstractContextManager["Client"]):
    """`key`: the client's.  Raises ServeError for what the service refuses."""

    def __init__(
        self, address: str, key: str, *, patience_s: float = 60.0, timeout_s: float = 60.0
    ) -> None:
        super().__init__(address, key, patience_s)
        self._http = httpx.Client(timeout=timeout_s)

    def session(
        self, task_id: str = "", metadata: dict[str, Any] | None = None, ttl_s: float | None = None
    ) -> ClientSession:
        opened: ClientSession = self._do(self._open(task_id, metadata, ttl_s))
        return opened

    def reward(
        self,
        session: ClientSession,
        reward: float | dict[str, float],
        *,
        message: str | None = None,
        final: bool = False,
    ) -> str:
        """ok | replaced | duplicate.  `message`: of that answer alone; `final`: no reward of the
        whole session follows.
        """
        return str(self._do(self._reward(session, reward, message, final)))

    def withdraw(self, session: ClientSession) -> None:
        """It is never trained."""
        self._do(self._call("DELETE", f"/v1/sessions/{session.id}"))

    def commit(self) -> int:
        """Closes the groups that can be trained already; how many."""
        return int(self._do(self._call("POST", "/commit"))["closed_groups"])

    def state(self, session: ClientSession) -> dict[str, Any]:
        return dict(self._do(self._call("GET", f"/v1/sessions/{session.id}")))

    def _do(self, call: _Call) -> Any:
        response: httpx.Response | None = None
        try:
            while True:
                step = call.send(response)
                response = None
                if isinstance(step, httpx.Request):
                    with contextlib.suppress(*_AWAY):
                        response = self._http.send(step)
                else:
                    threading.Event().wait(step)
        except StopIteration as done:
            return done.value

    def close(self) -> None:
        self._http.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(_Calls, contextlib.AbstractAsyncContextManager["AsyncClient"]):
    """As `Client`; every method is awaited."""

    def __init__(
        self, address: str, key: str, *, patience_s: float = 60.0, timeout_s: float = 60.0
    ) -> None:
        super().__init__(address, key, patience_s)
        self._http = httpx.AsyncClient(timeout=timeout_s)

    async def session(
        self, task_id: str = "", metadata: dict[str, Any] | None = None, ttl_s: float | None = None
    ) -> ClientSession:
        opened: ClientSession = await self._do(self._open(task_id, metadata, ttl_s))
        return opened

    async def reward(
        self,
        session: ClientSession,
        reward: float | dict[str, float],
        *,
        message: str | None = None,
        final: bool = False,
    ) -> str:
        return str(await self._do(self._reward(session, reward, message, final)))

    async def withdraw(self, session: ClientSession) -> None:
        await self._do(self._call("DELETE", f"/v1/sessions/{session.id}"))

    async def commit(self) -> int:
        return int((await self._do(self._call("POST", "/commit")))["closed_groups"])

    async def state(self, session: ClientSession) -> dict[str, Any]:
        return dict(await self._do(self._call("GET", f"/v1/sessions/{session.id}")))

    async def _do(self, call: _Call) -> Any:
        response: httpx.Response | None = None
        try:
            while True:
                step = call.send(response)
                response = None
                if isinstance(step, httpx.Request):
                    with contextlib.suppress(*_AWAY):
                        response = await self._http.send(step)
                else:
                    await asyncio.sleep(step)
        except StopIteration as done:
            return done.value

    async def close(self) -> None:
        await self._http.aclose()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
