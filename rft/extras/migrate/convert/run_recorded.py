"""Runs inside a sandbox, as a program of its own: one bash script, whose commands are recorded by recorded.bash.

stdin, as JSON: {"folder", "root", "files", "directories", "command", "environment", "seconds", "most_records"}; `root` is a text that
stands for a new folder below `folder`, there and in the answer.  stdout: {"records", "errors", "ended"}.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = (
    "awk basename bash bc cat chmod column comm cp cut dirname egrep expr false fgrep find fold grep head join jq ln ls md5sum mkdir "
    "mktemp mv nl od paste printf readlink realpath rev rm rmdir sed seq sha256sum sort split stat tac tail tee touch tr true uname "
    "uniq wc xargs"
)
ERRORS_KEPT = 20_000


def main() -> None:
    text = sys.stdin.read()
    root = f"{json.loads(text)['folder']}/run-{os.getpid()}-{time.monotonic_ns()}"
    stand_in = json.dumps(json.loads(text)["root"]).strip('"')
    order = json.loads(text.replace(stand_in, root))
    _prepare(root, order)
    index = Path(root, "records", "index")
    ended = _run(order, Path(root, "errors"), index)
    names = index.read_text().split()[: order["most_records"]]
    answer = {
        "records": [index.with_name(n).read_bytes().decode(errors="replace") for n in names],
        "errors": Path(root, "errors").read_bytes()[-ERRORS_KEPT:].decode(errors="replace"),
        "ended": ended,
    }
    print(json.dumps(answer).replace(root, stand_in))


def _prepare(root: str, order: dict[str, Any]) -> None:
    for folder in (f"{root}/records", f"{root}/bin", *order["directories"]):
        Path(folder).mkdir(parents=True)
    for name, text in order["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    Path(root, "records", "index").touch()
    for tool in TOOLS.split():
        if where := _where(tool):
            Path(root, "bin", tool).symlink_to(where)


def _where(tool: str) -> Path | None:
    return next(
        (path for path in (Path("/usr/bin", tool), Path("/bin", tool)) if path.exists()), None
    )


def _run(order: dict[str, Any], errors: Path, index: Path) -> bool:
    """Whether bash, and all that it started, ended in time."""
    ended, running = os.pipe()  # closed by the last of them
    os.set_inheritable(running, True)
    os.chdir(order["directories"][0])
    streams = [
        (0, "/dev/null", os.O_RDONLY),
        (1, "/dev/null", os.O_WRONLY),
        (2, str(errors), os.O_WRONLY | os.O_CREAT),
    ]
    actions = [(os.POSIX_SPAWN_OPEN, fd, name, flags, 0o600) for fd, name, flags in streams]
    os.posix_spawn(
        _where("bash") or "bash", order["command"], order["environment"], file_actions=actions
    )
    os.close(running)
    deadline = time.monotonic() + order["seconds"]
    while time.monotonic() < deadline:
        if select.select([ended], [], [], 0.05)[0]:
            return True
        if index.read_text().count("\n") >= order["most_records"]:
            return True
    return False


if __name__ == "__main__":
    main()
