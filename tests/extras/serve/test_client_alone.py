"""The client's file, copied into a product that has httpx and no rft."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rft.extras.serve import client

PRODUCT = """
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

sys.modules["rft"] = None  # importing it fails
import client


class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(self.path)  # before the client has its answer and the program ends
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = b'{"id": "s1", "base_url": "http://x/v1", "api_key": "k", "status": "scored"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


asked = []
service = HTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=service.serve_forever, daemon=True).start()
with client.Client(f"http://127.0.0.1:{service.server_port}", "key") as rft:
    rft.reward(rft.session(task_id="t"), 1.0)
print(*asked)
"""


def test_a_copied_client_posts_a_reward_without_rft(tmp_path: Path) -> None:
    shutil.copy(client.__file__, tmp_path / "client.py")
    (tmp_path / "product.py").write_text(PRODUCT)
    done = subprocess.run(
        [sys.executable, tmp_path / "product.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin"},
    )
    assert done.stdout.split() == ["/v1/sessions", "/v1/sessions/s1/reward"], done.stderr
