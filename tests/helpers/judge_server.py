"""A `FakeJudge` behind an OpenAI-compatible server on loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rft.testing.judge import FakeJudge


class JudgeServer:
    """An OpenAI-compatible server on loopback, for as long as it is open, in which `judge` answers:
    `with JudgeServer(FakeJudge(7)) as s`.

    `url` is its address; `asked` are the bodies of all requests.  `usage`: what it says of tokens
    (prompt, answer).
    """

    def __init__(self, judge: FakeJudge, *, usage: tuple[int, int] = (200, 20)) -> None:
        self.judge = judge
        self.usage = usage
        self.asked: list[dict[str, Any]] = []

    def __enter__(self) -> JudgeServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body)
                message = {"role": "assistant", "content": outer.judge.reply(body["messages"])}
                usage = dict(zip(("prompt_tokens", "completion_tokens"), outer.usage, strict=True))
                answer = json.dumps(
                    {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
                ).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, daemon=True, name="judge-server"
        )
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
