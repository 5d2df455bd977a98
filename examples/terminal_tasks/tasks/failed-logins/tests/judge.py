"""What the checks of these tasks have in common: files that an agent left, and its programs,
which run as another user where there is one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

NOBODY = 65534


def text(name):
    path = Path("/app", name)
    assert path.is_file() and not path.is_symlink(), f"{name} is no file"
    return path.read_text()


def has_nobody():
    with open("/proc/self/uid_map") as users:
        ranges = [list(map(int, line.split())) for line in users]
    return os.geteuid() == 0 and any(a <= NOBODY < a + n for a, _, n in ranges)


def run(*command, stdin=""):
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if has_nobody() else {}
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


def end_programs():
    """End what programs have left running; 1 where only test.sh can."""
    if not has_nobody():
        return 1
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(end_programs())
