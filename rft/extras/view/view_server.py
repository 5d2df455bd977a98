"""The server of the pages: loopback only, one token in every address, reading only.

Depends on aiohttp and who may ask, not on what pages show.  Invariants: an address without the
token is answered with 403 and nothing else; only GET and HEAD are answered; a page may load nothing
from elsewhere and runs no script but ours.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rft.errors import RftError, SetupError
from rft.secrets import http_log

if TYPE_CHECKING:
    from rft.extras.view.view_pages import ViewPages

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
PORT = 7373
_MORE_PORTS = 20
# in the Host header: another name is one that was made to lead here
_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """Answers while it is open."""

    def __init__(self, pages: ViewPages, *, port: int = PORT, token: str | None = None) -> None:
        self.pages = pages
        self.token = token or secrets.token_urlsafe(24)
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """Where the first page is."""
        return f"http://{HOST}:{self._port}/{self.token}/"

    async def start(self) -> None:
        """Listens at the port, or at one of the next.  Raises SetupError where all are in use."""
        app = web.Application(middlewares=[self._guarded], client_max_size=1 << 16)
        app.on_response_prepare.append(_with_headers)
        self.pages.routes(app.router, f"/{self.token}")
        self._runner = web.AppRunner(
            app, access_log=None, logger=http_log("rft.view.http"), shutdown_timeout=1.0
        )
        await self._runner.setup()
        first_port = self._port
        for port in range(first_port, first_port + _MORE_PORTS) if first_port else (0,):
            site = web.TCPSite(self._runner, HOST, port)
            try:
                await site.start()
            except OSError as e:
                if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            self._port = self._runner.addresses[0][1]
            return
        await self.close()
        raise SetupError(
            f"the ports {first_port} to {first_port + _MORE_PORTS - 1} are in use; choose another one with "
            f"--port"
        )

    async def close(self) -> None:
        if self._runner is not None:
            self.pages.closing.set()
            await self._runner.cleanup()
            self._runner = None
        await self.pages.close()

    # ------------------------------------------------------------ every request

    @property
    def _guarded(self) -> Any:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (refused := self._refused(request)) is not None:
                return refused
            try:
                return await handler(request)
            except web.HTTPNotFound:
                return self.pages.problem("There is no such page.", 404)
            except web.HTTPException as e:
                return web.Response(status=e.status, text=e.reason)
            except RftError as e:
                return self.pages.problem(str(e), 422)
            except ConnectionResetError:
                raise  # the reader has gone
            except Exception:
                log.exception("%s could not be shown", request.path.removeprefix(f"/{self.token}"))
                return self.pages.problem(
                    "This page could not be made; this is a bug in rft. The terminal of `rft view` "
                    "says more.",
                    500,
                )

        return guarded

    def _refused(self, request: web.Request) -> web.Response | None:
        host = request.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.lower() not in _NAMES:
            return web.Response(
                status=403, text="this server answers to 127.0.0.1 and localhost alone"
            )
        token = request.path.removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return web.Response(
                status=403,
                text="the address lacks its token; open the one that `rft view` has printed",
            )
        if request.method not in ("GET", "HEAD"):
            return web.Response(
                status=405, text="nothing can be changed here", headers={"Allow": "GET, HEAD"}
            )
        return None


async def _with_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
