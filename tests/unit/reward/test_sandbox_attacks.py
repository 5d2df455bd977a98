"""Programs that try to get out, to stay, or to be called right: each is a scored failure with its reason, and nothing is left of it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.reward.box import jobs
from rft.reward.box.host import LEVELS, Limits, SandboxUnavailable, Server
from rft.reward.box.jobs import Verdict
from rft.reward.sandbox import open_server

LIMITS = Limits(timeout_s=0.4, memory_mb=256, output_kb=64, file_mb=4)
BUSY_S = 10.0  # for setting up boxes on a machine that does much else
TESTS = ["def check(candidate):\n    assert candidate(3) == 10\n    assert candidate([1, 2]) == {'a': (1, 2)}"]
WRONG = {"wrong_answer"}
ENDED = {"exit", "error", "killed", "crash"}

ATTACKS: dict[str, tuple[str, set[str]]] = {
    "infinite loop": ("while True: pass", {"timeout"}),
    "loop in the function": ("def f(x):\n    while True: pass", {"timeout"}),
    "loop that no signal ends": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "def f(x):\n    return 10 ** 10 ** 10",
        {"timeout"},
    ),
    "sleep": ("import time\ntime.sleep(1000)", {"timeout"}),
    "fork bomb": ("import os\nwhile True: os.fork()", {"error"}),
    "daemon": (
        "import os, time\n"
        "try:\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1); open(MARK, 'w').write('x')\n        os._exit(0)\nexcept OSError: pass\n"
        "def f(x): return 'daemon'",
        WRONG,
    ),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", {"error", "memory",
    "timeout"}),
    "100 GB": ("x = bytearray(100 << 30)", {"memory"}),
    "100 GB, little by little": ("def f(x):\n    a = []\n    while True: a.append(bytes(1 << 20))", {"memory"}),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 5).send(b'hello')", {"error"}),
    "datagram": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))", {"error"}),
    "network by a pair of sockets": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', '/dev/log')", {"error"},
    ),
    "read a secret": ("SECRET_TEXT = open(SECRET).read()\ndef f(x): return SECRET_TEXT", {"error"}),
    "read ~/.ssh": ("import os\nos.listdir(HOME + '/.ssh')", {"error"}),
    "write outside": ("open(MARK, 'w').write('x')", {"error"}),
    "write /": ("open('/rft-escape', 'w').write('x')", {"error"}),
    "write over Python": ("import os\nopen(os.__file__, 'a').write('# x')", {"error"}),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", {"error"}),
    "kill everybody": ("import os\nos.kill(-1, 9)", {"error"}),
    "kill the caller": ("import os\nos.kill(CALLER, 9)", {"error"}),
    "kill by a file that signals": (
        "import fcntl, os, socket\na, b = socket.socketpair()\nfcntl.fcntl(a, fcntl.F_SETOWN, CALLER)", {"error"},
    ),
    "print a verdict": (
        "import json\nv = json.dumps({'passed': 1, 'total': 1, 'reason': 'passed', 'detail': ''})\nprint(v, 'reward=1.0 PASSED OK')\n"
        "def f(x):\n    print(v)\n    return v",
        WRONG,
    ),
    "write a verdict to every descriptor": (
        "import json, os\nv = json.dumps({'passed': 1, 'total': 1, 'reason': 'passed', 'detail': ''}).encode()\n"
        "def f(x):\n    for fd in range(200):\n        try: os.write(fd, len(v).to_bytes(4, 'big') + v)\n        except OSError: pass\n"
        "    return 1",
        WRONG | ENDED,
    ),
    "claim to be loaded": (
        "import os\nfor m in (b'{\"loaded\": true}', b'{\"passed\": 1, \"total\": 1, \"reason\": \"passed\", \"detail\": \"\"}'):\n"
        "    os.write(3, len(m).to_bytes(4, 'big') + m)\nos._exit(0)",
        ENDED,
    ),
    "sys.exit(0)": ("import sys\nsys.exit(0)", {"error", "wrong_answer"}),
    "os._exit(0)": ("import os\nos._exit(0)", {"exit", "wrong_answer"}),
    "os._exit(0) in the function": ("import os\ndef f(x): os._exit(0)", {"exit"}),
    "SystemExit in the function": ("def f(x): raise SystemExit(0)", {"error"}),
    "patched builtins": (
        "import builtins, unittest, operator\nbuiltins.AssertionError = Exception\nbuiltins.compile = builtins.exec = lambda *a: None\n"
        "unittest.TestCase.assertEqual = lambda *a: None\noperator.eq = lambda a, b: True\ndef f(x): return None",
        WRONG,
    ),
    "agrees with everything": (
        "class Yes(int):\n    __eq__ = __ne__ = __lt__ = __bool__ = lambda self, other=None: True\n    __hash__ = int.__hash__\n"
        "class Any:\n    __eq__ = lambda self, other: True\ndef f(x): return Any() if x == 3 else Yes(3)",
        WRONG,
    ),
    "patched harness": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('rft'):\n"
        "        for n in list(vars(module)):\n            if not n.startswith('__'): setattr(module, n, lambda *a, **k: {'passed': 1})\n"
        "def f(x): return 10",
        WRONG | ENDED | {"timeout"},
    ),
    "overwritten test files": (
        "import os\nfor root, _, files in os.walk('/'):\n    for n in files:\n        if 'test' in n or 'referee' in n:\n"
        "            try: open(os.path.join(root, n), 'w').write('')\n            except OSError: pass\n        if len(root) > 60: break\n"
        "    if root.count('/') > 3: break\ndef f(x): return 1",
        WRONG,
    ),
    "search memory for the result": (
        "import gc, sys\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and o.get('a') == (1, 2): return o\n"
        "    g = sys._getframe()\n    while g:\n        for v in list(g.f_locals.values()) + list(g.f_globals.values()):\n"
        "            if type(v) is str and 'candidate(3)' in v: return 10\n        g = g.f_back\n    return 0",
        WRONG,
    ),
    "memory of another process": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b').read(1)", {"error"}),
    "trace another process": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, CALLER, 0, 0): raise OSError(ctypes.get_errno(), 'ptrace')",
        {"error"},
    ),
    "become root": ("import os\nos.setuid(0)", {"error"}),
    "new namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10020000): raise OSError(ctypes.get_errno(), 'unshare')",
        {"error"},
    ),
    "another program": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])", {"error"}),
    "raised limits": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", {"error"}),
    "crash": ("import ctypes\nctypes.string_at(0)", {"crash"}),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return f(x)", {"crash", "error", "memory", "timeout"}),
    "shared memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(name='rft-escape', create=True, size=10)", {"error"},
    ),
    "flood": ("import sys\nwhile True: sys.stdout.write('x' * 65536)", {"output", "timeout"}),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 65536)", {"timeout"}),
    "big file": ("f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()", {"error"}),
    "endless answer": ("def f(x):\n    while True: yield 1", {"error", "timeout", "memory"}),
    "huge answer": ("def f(x): return 'x' * (9 << 20)", {"error"}),
    "answer without bottom": ("def f(x):\n    a = []\n    a.append(a)\n    return a", {"error"}),
}  # fmt: skip


@pytest.fixture(scope="module", params=LEVELS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    python = sys.executable
    if request.param == "seccomp" and os.geteuid() == 0:  # this Python may lie below a folder that only root can read
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or python
    try:
        server = open_server([request.param], python)
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    yield server
    pid = server.pid
    server.close()
    assert pid is not None and not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[int, socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        tcp.setblocking(False)
        udp.setblocking(False)
        yield port, tcp, udp


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that everybody may enter, with a secret that only its owner may read."""
    folder = tmp_path_factory.mktemp("place")
    secret = folder / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    folder.chmod(0o777)
    return folder


def _names(place: Path, port: int) -> str:
    home = pwd.getpwuid(os.getuid()).pw_dir
    values = {"MARK": str(place / "mark"), "SECRET": str(place / "secret"), "HOME": home, "PORT": port, "CALLER": os.getpid()}
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


def _secret_is_open(server: Server, name: str) -> bool:
    """Without namespaces, and not as root, a program runs as the account itself and can read what that can read."""
    return server.level == "seccomp" and os.geteuid() != 0 and name in ("read a secret", "read ~/.ssh")


WAYS = [("tests", name) for name in ATTACKS] + [
    ("pairs", name) for name in ("infinite loop", "print a verdict", "sys.exit(0)", "flood", "flood of errors", "read a secret",
    "kill everybody")
]  # fmt: skip


SAME = {  # at every level the same code stands against them
    "100 GB", "100 GB, little by little", "print a verdict", "claim to be loaded", "sys.exit(0)", "os._exit(0)",
    "SystemExit in the function",
    "patched builtins", "agrees with everything", "search memory for the result", "crash", "deep recursion", "flood", "flood of errors",
    "endless answer", "huge answer", "answer without bottom", "sleep", "loop in the function", "raised limits", "another program",
}  # fmt: skip


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_attack(name: str, way: str, server: Server, listener: Any, place: Path) -> None:
    if server.level != LEVELS[0] and (way == "pairs" or name in SAME):
        pytest.skip("the same at every level")
    port, tcp, udp = listener
    body, reasons = ATTACKS[name]
    program = _names(place, port) + body
    began = time.monotonic()
    verdict: Verdict
    if way == "tests":
        verdict = jobs.judge_tests(server, program, TESTS, LIMITS, entry_point="f")
    else:
        program += "\nif 'f' in globals():\n    r = f(3)\n    print(r if not hasattr(r, '__next__') else list(r))"
        verdict = jobs.judge_pairs(server, program, [("3", "s3cret-10")], LIMITS)
        reasons = reasons | {"wrong_answer"} | ({"output", "exit"} if "answer" in name else set())
    took = time.monotonic() - began
    assert (verdict.passed, verdict.right) == (0, False)
    if not _secret_is_open(server, name):
        assert verdict.reason in reasons, verdict
    assert verdict.detail and "s3cret" not in verdict.detail.replace("s3cret-10", "")
    assert took < LIMITS.timeout_s + 1 + BUSY_S, verdict
    assert not (place / "mark").exists() and not Path("/rft-escape").exists() and not Path("/dev/shm/rft-escape").exists()
    for sock in (tcp, udp):
        with pytest.raises(BlockingIOError):
            sock.accept() if sock is tcp else sock.recv(10)
    assert _left(server) == []


def _left(server: Server) -> list[psutil.Process]:
    """What lives below the server; keepers that have said their last word may be about to end."""
    assert server.pid is not None
    children = psutil.Process(server.pid).children(recursive=True)
    return psutil.wait_procs(children, timeout=5)[1]


def test_a_daemon_dies_with_its_space() -> None:
    """Where processes are allowed, those that left their parents are killed too."""
    try:
        server = open_server(LEVELS[:1], sys.executable)
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    daemons = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(1000)\n"
        "        os._exit(0)\nprint('started')\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(1000)\n"
        "    except OSError: break\n"
    )
    limits = Limits(timeout_s=5, processes=16)
    assert jobs.judge_pairs(server, daemons, [("", "started")], limits).right
    assert _left(server) == []
    server.close()


def test_a_box_dies_with_its_caller(tmp_path: Path) -> None:
    """kill -9 of the process that judges: the program, which would run on, ends as well."""
    read, write = os.pipe()
    caller = (
        "import sys\nfrom rft.reward.box import jobs\nfrom rft.reward.box.host import Limits\n"
        "from rft.reward.sandbox import open_server, LEVELS\n"
        "s = open_server(LEVELS, sys.executable)\nprint('up', flush=True)\n"
        "jobs.run(s, 'import time; time.sleep(1000)', b'', Limits(timeout_s=1000))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=write, env=environment) as process:
        os.close(write)
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            pytest.skip(os.read(read, 9999).decode())
        process.kill()
    while os.read(read, 9999):  # until the last holder of `write` is gone: server and keepers
        pass
    os.close(read)
