"""Programs that try to get out, to stay, or to be called right: each is a scored failure with its
reason, and nothing is left of it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.extras.sandbox import jobs, wire
from rft.extras.sandbox.code_sandbox import open_server
from rft.extras.sandbox.jobs import ProgramVerdict
from rft.extras.sandbox.processes import LEVELS, ForkServer, ProgramLimits, SandboxUnavailable
from tests.attacks.table import attack

pytestmark = pytest.mark.e2e

LIMITS = ProgramLimits(timeout_s=0.4, memory_mb=256, output_kb=64, file_mb=4)
BUSY_S = 10.0  # for setting up sandboxes on a machine that does much else
TESTS = [
    "def check(candidate):\n    assert candidate(3) == 10\n    assert candidate([1, 2]) == {'a': "
    "(1, 2)}"
]
WRONG = {"wrong_answer"}
ENDED = {"exit", "error", "killed", "crash"}

ATTACKS: dict[str, tuple[str, set[str]]] = {
    "infinite loop": ("while True: pass", {"timeout"}),
    "loop in the function": ("def f(x):\n    while True: pass", {"timeout"}),
    "loop that no signal ends": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    "
        "except (OSError, ValueError): pass\n"
        "def f(x):\n    return 10 ** 10 ** 10",
        {"timeout"},
    ),
    "sleep": ("import time\ntime.sleep(1000)", {"timeout"}),
    "fork bomb": ("import os\nwhile True: os.fork()", {"error"}),
    "daemon": (
        "import os, time\n"
        "try:\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1); open(MARK, 'w').write('x')\n        os._exit(0)\nexcept "
        "OSError: pass\n"
        "def f(x): return 'daemon'",
        WRONG,
    ),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
        "args=(99,)).start()",
        {"error", "memory", "timeout"},
    ),
    "100 GB": ("x = bytearray(100 << 30)", {"memory"}),
    "100 GB, little by little": (
        "def f(x):\n    a = []\n    while True: a.append(bytes(1 << 20))",
        {"memory"},
    ),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 5).send(b'hello')",
        {"error"},
    ),
    "datagram": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
        "('127.0.0.1', PORT))",
        {"error"},
    ),
    "network by a pair of sockets": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, "
        "socket.SOCK_DGRAM)\na.sendto(b'x', '/dev/log')",
        {"error"},
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
        "import fcntl, os, socket\na, b = socket.socketpair()\nfcntl.fcntl(a, fcntl.F_SETOWN, "
        "CALLER)",
        {"error"},
    ),
    "print a verdict": (
        "import json\nv = json.dumps({'passed': 1, 'total': 1, 'reason': 'passed', 'detail': "
        "''})\nprint(v, 'reward=1.0 PASSED OK')\n"
        "def f(x):\n    print(v)\n    return v",
        WRONG,
    ),
    "write a verdict to every descriptor": (
        "import json, os\nv = json.dumps({'passed': 1, 'total': 1, 'reason': 'passed', 'detail': "
        "''}).encode()\n"
        "def f(x):\n    for fd in range(200):\n        try: os.write(fd, len(v).to_bytes(4, 'big') "
        "+ v)\n        except OSError: pass\n"
        "    return 1",
        WRONG | ENDED,
    ),
    "claim to be loaded": (
        'import os\nfor m in (b\'{"loaded": true}\', b\'{"passed": 1, "total": 1, "reason": '
        '"passed", "detail": ""}\'):\n'
        "    os.write(3, len(m).to_bytes(4, 'big') + m)\nos._exit(0)",
        ENDED,
    ),
    "a byte now and then": (
        "import os, time\nos.write(3, bytes([0, 0, 1, 0]))\nfor _ in range(50):\n    os.write(3, "
        "b' ')\n    time.sleep(0.2)",
        {"timeout"},
    ),
    "an error of half a character": ("raise Exception('\\ud800')", {"error"}),
    "sys.exit(0)": ("import sys\nsys.exit(0)", {"error", "wrong_answer"}),
    "os._exit(0)": ("import os\nos._exit(0)", {"exit", "wrong_answer"}),
    "os._exit(0) in the function": ("import os\ndef f(x): os._exit(0)", {"exit"}),
    "SystemExit in the function": ("def f(x): raise SystemExit(0)", {"error"}),
    "patched builtins": (
        "import builtins, unittest, operator\nbuiltins.AssertionError = "
        "Exception\nbuiltins.compile = builtins.exec = lambda *a: None\n"
        "unittest.TestCase.assertEqual = lambda *a: None\noperator.eq = lambda a, b: True\ndef "
        "f(x): return None",
        WRONG,
    ),
    "agrees with everything": (
        "class Yes(int):\n    __eq__ = __ne__ = __lt__ = __bool__ = lambda self, other=None: "
        "True\n    __hash__ = int.__hash__\n"
        "class Any:\n    __eq__ = lambda self, other: True\ndef f(x): return Any() if x == 3 else "
        "Yes(3)",
        WRONG,
    ),
    "patched harness": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if "
        "name.startswith('rft'):\n"
        "        for n in list(vars(module)):\n            if not n.startswith('__'): "
        "setattr(module, n, lambda *a, **k: {'passed': 1})\n"
        "def f(x): return 10",
        WRONG | ENDED | {"timeout"},
    ),
    "overwritten test files": (
        "import os\nfor root, _, files in os.walk('/'):\n    for n in files:\n        if 'test' in "
        "n or 'runner' in n:\n"
        "            try: open(os.path.join(root, n), 'w').write('')\n            except OSError: "
        "pass\n        if len(root) > 60: break\n"
        "    if root.count('/') > 3: break\ndef f(x): return 1",
        WRONG,
    ),
    "search memory for the result": (
        "import gc, sys\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) "
        "and o.get('a') == (1, 2): return o\n"
        "    g = sys._getframe()\n    while g:\n        for v in list(g.f_locals.values()) + "
        "list(g.f_globals.values()):\n"
        "            if type(v) is str and 'candidate(3)' in v: return 10\n        g = g.f_back\n  "
        "  return 0",
        WRONG,
    ),
    "memory of another process": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b').read(1)",
        {"error"},
    ),
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
    "raised limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        {"error"},
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", {"crash"}),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return f(x)",
        {"crash", "error", "memory", "timeout"},
    ),
    "shared memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(name='rft-escape', "
        "create=True, size=10)",
        {"error"},
    ),
    "flood": ("import sys\nwhile True: sys.stdout.write('x' * 65536)", {"output", "timeout"}),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 65536)", {"timeout"}),
    "big file": (
        "f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
        {"error"},
    ),
    "endless answer": ("def f(x):\n    while True: yield 1", {"error", "timeout", "memory"}),
    "huge answer": ("def f(x): return 'x' * (9 << 20)", {"error"}),
    "answer without bottom": ("def f(x):\n    a = []\n    a.append(a)\n    return a", {"error"}),
}


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[int, socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
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
    values = {
        "MARK": str(place / "mark"),
        "SECRET": str(place / "secret"),
        "PORT": port,
        "CALLER": os.getpid(),
    }
    values["HOME"] = str(Path.home())
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


WAYS = [("tests", name) for name in ATTACKS] + [
    ("pairs", name)
    for name in (
        "infinite loop",
        "print a verdict",
        "sys.exit(0)",
        "flood",
        "flood of errors",
        "read a secret",
        "kill everybody",
    )
]


SAME = {  # at every level the same code stands against them
    "100 GB",
    "100 GB, little by little",
    "print a verdict",
    "claim to be loaded",
    "sys.exit(0)",
    "os._exit(0)",
    "SystemExit in the function",
    "patched builtins",
    "agrees with everything",
    "search memory for the result",
    "crash",
    "deep recursion",
    "flood",
    "flood of errors",
    "endless answer",
    "huge answer",
    "answer without bottom",
    "sleep",
    "loop in the function",
    "raised limits",
    "another program",
}


@pytest.mark.e2e
@attack(
    "H1, H2, M1",
    "a program that does not end, takes memory, gets out, reads, kills, or claims to be right",
    "a scored failure with its reason at every level; nothing is left of it",
)
@pytest.mark.timeout(120)  # most of them never end by themselves
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_attack(
    name: str, way: str, server: ForkServer, strongest: str, listener: Any, place: Path
) -> None:
    if server.level != strongest and (way == "pairs" or name in SAME):
        pytest.skip("the same at every level")
    port, tcp, udp = listener
    body, reasons = ATTACKS[name]
    program = _names(place, port) + body
    limits = LIMITS if "timeout" in reasons else replace(LIMITS, timeout_s=BUSY_S)
    verdict: ProgramVerdict
    if way == "tests":
        verdict = jobs.judge_tests(server, program, TESTS, limits, entry_point="f")
    else:
        program += (
            "\nif 'f' in globals():\n    r = f(3)\n    print(r if not hasattr(r, "
            "'__next__') else list(r))"
        )
        verdict = jobs.judge_pairs(server, program, [("3", "s3cret-10")], limits)
        reasons = reasons | {"wrong_answer"} | ({"output", "exit"} if "answer" in name else set())
    assert (verdict.passed, verdict.right) == (0, False)
    assert verdict.reason in reasons, verdict
    assert verdict.detail and "s3cret" not in verdict.detail.replace("s3cret-10", "")
    assert (
        not (place / "mark").exists()
        and not Path("/rft-escape").exists()
        and not Path("/dev/shm/rft-escape").exists()
    )
    for sock in (tcp, udp):
        with pytest.raises(BlockingIOError):
            sock.accept() if sock is tcp else sock.recv(10)
    assert _left(server) == []


RAW = (
    "import json, os, time\nfrom fractions import Fraction\n"
    "def send(reply):\n    data = reply if isinstance(reply, bytes) else "
    "json.dumps(reply).encode()\n"
    "    os.write(4, len(data).to_bytes(4, 'big'))\n    while data: data = data[os.write(4, "
    "data):]\n"
)
REPLIES: dict[str, tuple[str, set[str]]] = {
    "a number without end": (
        "def f(x): send({'value': ['F', '1e12000000', '1']}); time.sleep(99)",
        ENDED | WRONG,
    ),
    "a fraction of texts": (
        "def f(x): send({'value': ['F', '10', '1']}); time.sleep(99)",
        ENDED | WRONG,
    ),
    "digits without end": (
        "def f(x): send(b'{\"value\": ' + b'9' * 4_000_000 + b'}'); time.sleep(99)",
        ENDED | WRONG,
    ),
    "a scalar of the wrong kind": (
        "def f(x): send({'value': ['b', [1]]}); time.sleep(99)",
        ENDED | WRONG,
    ),
    "keys of one hash": (
        "def f(x): return {i * (2 ** 61 - 1) for i in range(4000)} | {10}",
        WRONG | {"timeout"},
    ),
    "many keys of one hash": (
        "def f(x): send({'value': ['s', [i * (2 ** 61 - 1) for i in range(300000)]]}); "
        "time.sleep(99)",
        {"timeout", "memory"},
    ),
    "empty lists": (
        "def f(x): send(b'{\"value\": [\"l\", [' + b'[\"l\",[]],' * 700_000 + b'1]]}'); "
        "time.sleep(99)",
        {"memory", "wrong_answer", "timeout", "killed"},
    ),
    "nested lists": ("def f(x): send(b'[' * 900_000); time.sleep(99)", ENDED | WRONG),
    "a byte now and then": (
        "def f(x):\n    os.write(4, bytes([0, 0, 1, 0]))\n    for _ in range(50):\n        "
        "os.write(4, b' ')\n        time.sleep(0.2)",
        {"timeout"},
    ),
    "a message without end": (
        "def f(x):\n    os.write(4, bytes([0, 0, 1, 0]) + b'{')\n    time.sleep(99)",
        {"timeout"},
    ),
    "a handle of nothing": ("def f(x): send({'value': ['h', 99, 'int']}); time.sleep(99)", WRONG),
    "an error of another shape": (
        "def f(x): send({'raised': {'a': 1}, 'message': ['x']}); time.sleep(99)",
        {"error"},
    ),
    "no reply but a verdict": (
        "def f(x): send({'reason': '', 'detail': ''}); time.sleep(99)",
        WRONG | ENDED,
    ),
    "half a character": ("def f(x): return '\\ud800'", WRONG),
    "a number of 100000 digits": ("def f(x): return 10 ** 100000", {"error"}),
}


@attack(
    "H2, H3, M1",
    "a function that answers with numbers without end, lists without bottom, a byte now and then",
    "decoded beside the program within its deadline; never in the judge's process",
)
@pytest.mark.parametrize("name", REPLIES)
def test_what_a_function_sends_is_its_own_affair(
    name: str, server: ForkServer, strongest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded beside the program, within its deadline: this process, with all its threads,
    never reads it.
    """
    if server.level != strongest:
        pytest.skip("the same at every level")

    def decode(_: Any) -> Any:
        raise AssertionError("a value of the program is decoded in this process")

    monkeypatch.setattr(wire, "decode", decode)
    largest: list[int] = []
    parse = wire.parse
    monkeypatch.setattr(wire, "parse", lambda data: largest.append(len(data)) or parse(data))
    body, reasons = REPLIES[name]
    limits = replace(LIMITS, timeout_s=2 if "timeout" in reasons else BUSY_S)
    verdict = jobs.judge_calls(server, RAW + body, "f", [([3], 10)], limits)
    assert not verdict.right and verdict.reason in reasons, verdict
    verdict.detail.encode()
    assert max(largest) <= wire.LARGEST_REPLY
    assert _left(server) == []


def _left(server: ForkServer) -> list[psutil.Process]:
    """What lives below the server; supervisors that have said their last word may be about to end."""
    assert server.pid is not None
    children = psutil.Process(server.pid).children(recursive=True)
    return psutil.wait_procs(children, timeout=5)[1]


@attack("M7", "a program starts daemons", "they die with its namespace")
def test_a_daemon_dies_with_its_space() -> None:
    """Where processes are allowed, those that left their parents are killed too."""
    try:
        server = open_server(LEVELS[:1], sys.executable)
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    daemons = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        "
        "if os.fork() == 0: time.sleep(1000)\n"
        "        os._exit(0)\nprint('started')\nwhile True:\n    try:\n        if os.fork() == 0: "
        "time.sleep(1000)\n"
        "    except OSError: break\n"
    )
    limits = ProgramLimits(timeout_s=120, processes=16)  # an ordinary account may start 512
    assert jobs.judge_pairs(server, daemons, [("", "started")], limits).right
    assert _left(server) == []
    server.close()


@attack("M7", "kill -9 of the process that judges", "the program and its supervisors end as well")
def test_a_box_dies_with_its_caller(tmp_path: Path) -> None:
    """kill -9 of the process that judges: the program, which would run on, ends as well."""
    read, write = os.pipe()
    caller = (
        "import sys\nfrom rft.extras.sandbox import jobs\nfrom rft.extras.sandbox.processes import "
        "ProgramLimits\n"
        "from rft.extras.sandbox.code_sandbox import open_server, LEVELS\n"
        "s = open_server(LEVELS, sys.executable)\nprint('up', flush=True)\n"
        "jobs.run(s, 'import time; time.sleep(1000)', b'', ProgramLimits(timeout_s=1000))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=write, env=environment
    ) as process:
        os.close(write)
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            pytest.skip(os.read(read, 9999).decode())
        process.kill()
    while os.read(read, 9999):  # until the last holder of `write` is gone: server and supervisors
        pass
    os.close(read)
