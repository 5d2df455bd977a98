"""Runs inside a sandbox, as a program of its own: one bash script, whose commands are recorded by
recorded.bash.

stdin: {"folder", "root", "files", "command", "environment", "directories", "seconds",
"most_records"} as JSON; `root` is a text that stands in them for a new folder below `folder`, and
in the answer.  stdout: {"records", "errors", "ended"}.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = (
    "awk basename bash bc cat chmod column comm cp cut dirname egrep expr false fgrep find fold "
    "grep head join jq ln ls md5sum mkdir "
    "mktemp mv nl od paste printf readlink realpath rev rm rmdir sed seq sha256sum sort split stat "
    "tac tail tee touch tr true uname "
    "uniq wc xargs"
).split()
SYSTEM = "/usr/bin:/bin"
ERRORS_KEPT = 20_000


def main() -> None:
    text = sys.stdin.read()
    stand_in = json.dumps(json.loads(text)["root"]).strip('"')
    root = tempfile.mkdtemp(dir=json.loads(text)["folder"])
    order = json.loads(text.replace(stand_in, root))
    for folder in (*order["directories"], f"{root}/records", f"{root}/bin"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in order["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    for tool in TOOLS:
        if where := shutil.which(tool, path=SYSTEM):
            Path(root, "bin", tool).symlink_to(where)
    index = Path(root, "records", "index")
    index.touch()
    alive, held = os.pipe()  # open until bash, and all that it has started, have ended
    with Path(root, "errors").open("wb") as errors:
        subprocess.Popen(
            order["command"],
            executable=shutil.which("bash", path=SYSTEM),
            env=order["environment"],
            cwd=order["directories"][0],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(held,),
        )
    os.close(held)
    end = time.monotonic() + order["seconds"]
    while (
        not select.select([alive], [], [], 0.05)[0]
        and time.monotonic() < end
        and len(_names(index)) < order["most_records"]
    ):
        pass
    answer = {
        "records": [
            Path(root, "records", n).read_bytes().decode(errors="replace")
            for n in _names(index)[: order["most_records"]]
        ],
        "errors": Path(root, "errors").read_bytes()[-ERRORS_KEPT:].decode(errors="replace"),
        "ended": time.monotonic() < end,
    }
    print(json.dumps(answer).replace(root, stand_in))


def _names(index: Path) -> list[str]:
    return index.read_text().split("\n")[:-1]


if __name__ == "__main__":
    main()
