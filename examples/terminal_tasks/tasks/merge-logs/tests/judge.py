"""What the checks of these tasks have in common: files that an agent left, and its programs,
which run as another user where there is one."""

import os
import subprocess
from pathlib import Path

NOBODY = 65534


def text(name):
    path = Path("/app", name)
    assert path.is_file() and not path.is_symlink(), f"{name} is no file"
    return path.read_text()


def run(*command, stdin=""):
    with open("/proc/self/uid_map") as users:
        ranges = [list(map(int, line.split())) for line in users]
    other = os.geteuid() == 0 and any(a <= NOBODY < a + n for a, _, n in ranges)
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if other else {}
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=20,
        cwd="/app",
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        **user,
    )
    assert done.returncode == 0, (command, done.returncode, done.stderr[-500:])
    return done.stdout


def python(code):
    return run("python3", "-B", "-c", code)
