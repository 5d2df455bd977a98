"""The child that waits in an engine's process becomes vLLM's core; vLLM itself is not needed for
that.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rft.engine import vllm_host

HOST = "from rft.engine import vllm_host; vllm_host.main(())"
SCRIPT = """
import os, subprocess, sys
from rft.engine import vllm_host

waiting = vllm_host._waiting[0].pid
os.environ["ADDED"] = "yes"
os.environ.pop("TAKEN")
os.chdir("/")
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
told = "import os; print(os.getppid(), os.getcwd(), os.environ.get('ADDED'), os.environ.get('TAKEN'))"
core = vllm_host._Context().Process(target=subprocess.run, args=([sys.executable, "-c", told],), name="core")
core.start()
core.join(60)
assert core.pid == waiting and core.exitcode == 0 and not core.is_alive(), core
print("after it:", core.pid, vllm_host._waiting)
"""


def host(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script)
    command = [sys.executable, "-P", "-c", HOST, str(file), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TAKEN": "no"},
        check=False,
    )


def test_the_child_has_the_hosts_environment_folder_and_output(tmp_path: Path) -> None:
    done = host(SCRIPT, tmp_path, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    told, after = (tmp_path / "out").read_text().splitlines()
    pid, *rest = told.split()
    assert rest == ["/", "yes", "None"] and after == f"after it: {pid} []"


def test_its_exit_code_is_known(tmp_path: Path) -> None:
    script = (
        "import sys; from rft.engine.vllm_host import _Context\nc = "
        "_Context().Process(target=sys.exit, args=(7,))\n"
    )
    done = host(script + "c.start(); c.join(60); sys.exit(c.exitcode)", tmp_path)
    assert done.returncode == 7, done.stderr


def test_it_ends_with_a_host_that_starts_no_engine(tmp_path: Path) -> None:
    done = host(
        "from rft.engine.vllm_host import _waiting; print(_waiting[0].pid)", tmp_path
    )  # returns when all have closed stdout
    assert done.returncode == 0, done.stderr
    with suppress(ProcessLookupError):  # its new parent has taken note of its end
        process = os.pidfd_open(int(done.stdout))
        assert select.select([process], [], [], 60)[0], "it goes on"
        os.close(process)


def test_other_processes_have_no_child() -> None:
    with vllm_host.core_from_child() as core:
        assert core is None


def test_its_interpreter_is_not_taken_down(tmp_path: Path) -> None:
    """vLLM's has objects to free for seconds, and nothing waits for that."""
    script = "import atexit, os, sys; from rft.engine.vllm_host import _Context\n"
    script += (
        "c = _Context().Process(target=atexit.register, args=(os._exit, 9))\nc.start(); "
        "c.join(60); sys.exit(c.exitcode)"
    )
    done = host(script, tmp_path)
    assert done.returncode == 0, done.stderr
