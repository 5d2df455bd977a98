"""What a program can reach of the process that judges it: nothing, at every level, as root and as
an ordinary account.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rft.extras.sandbox.processes import LEVELS
from tests.attacks.table import attack

ROOT = Path(__file__).parents[2]
ACCOUNT = 1234

JUDGE = """
import asyncio, ctypes, json, os, sys
from pathlib import Path
from rft.extras.sandbox.code_sandbox import ProgramLimits, Pairs, Sandbox, SandboxUnavailable
from rft.sync.transport.memory import memory_is_readable

level, python, folder, attacks = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
key = Path(folder, "key")
key.touch(mode=0o600)
key.write_text("key-of-the-account")
readable = memory_is_readable()
sandbox = Sandbox(level=level, python=python)
try:
    sandbox.level()
except SandboxUnavailable as e:
    print(json.dumps({"unavailable": str(e)}))
    sys.exit()
wanted = "wanted-" + os.urandom(12).hex()  # nowhere but in this process's memory
found = {}
for name, body in attacks.items():
    head = f"JUDGE, PARENT, KEY = {os.getpid()}, {os.getppid()}, {str(key)!r}\\n"
    verdict = asyncio.run(sandbox.judge(head + body, Pairs([("", wanted)]), ProgramLimits(timeout_s=20, memory_mb=512)))
    found[name] = [verdict.right, verdict.reason, verdict.detail]
sandbox.close()
print(json.dumps({"found": found, "readable": [readable, memory_is_readable()], "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)}))
"""

SCAN = """
import re
def scan(pid):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            span, rights = line.split()[:2]
            first, last = (int(x, 16) for x in span.split("-"))
            if not rights.startswith("rw") or last - first > 64 << 20:
                continue
            mem.seek(first)
            try:
                data = mem.read(last - first)
            except OSError:
                continue
            if found := re.search(rb"wanted-[0-9a-f]{24}", data):
                return found.group().decode()
print(scan(JUDGE))
"""
LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
OPENED = {
    "the judge's memory": SCAN,
    "the judge's environment": "print(open(f'/proc/{JUDGE}/environ').read())",
    "the environment of its parent": "print(open(f'/proc/{PARENT}/environ').read())",
    "its own parent": "import os\nprint(open(f'/proc/{os.getppid()}/maps').read())",
    "the judge's descriptors": "import os\nprint(os.listdir(f'/proc/{JUDGE}/fd'))",
    "the judge's files": "import os\nprint(os.readlink(f'/proc/{JUDGE}/exe'), "
    "open(f'/proc/{JUDGE}/cmdline').read())",
    "the key": "print(open(KEY).read())",
    "the key's folder": "import os\nprint(os.listdir(os.path.dirname(KEY)))",
    "the home folder": "import os, pwd\nprint(os.listdir(pwd.getpwuid(os.getuid()).pw_dir))",
    "the accounts": "print(open('/etc/passwd').read())",
    "a file beside its own": "import os\nopen(os.path.dirname(KEY) + '/mark', 'w').write('x')",
    "the key by another name": "import os\nos.symlink(KEY, '/tmp/k')\nprint(open('/tmp/k').read())",
    "the key by a hard link": "import os\nos.link(KEY, '/tmp/k')\nprint(open('/tmp/k').read())",
    "the key by openat2": LIBC
    + "how = (ctypes.c_uint64 * 3)()\nfd = libc.syscall(437, -100, KEY.encode(), how, 24)\n"
    "assert fd >= 0, ctypes.get_errno()",
    "the key by io_uring": LIBC
    + "assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0, ctypes.get_errno()",
    "the key by its handle": LIBC
    + "assert libc.syscall(304, -100, ctypes.create_string_buffer(140), 0) >= 0, "
    "ctypes.get_errno()",
    "the key by mapping a device": "open('/dev/mem', 'rb').read(1)",
    "ptrace": LIBC + "assert libc.ptrace(16, JUDGE, 0, 0) == 0, ctypes.get_errno()",
    "process_vm_readv": LIBC
    + "b = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
    "assert libc.process_vm_readv(JUDGE, v, 1, v, 1, 0) >= 0, ctypes.get_errno()",
    "process_vm_writev": LIBC
    + "b = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
    "assert libc.process_vm_writev(JUDGE, v, 1, v, 1, 0) >= 0, ctypes.get_errno()",
    "pidfd_open": "import os\nos.pidfd_open(JUDGE)",
    "pidfd_getfd": LIBC + "assert libc.syscall(438, 3, 0, 0) >= 0, ctypes.get_errno()",
    "kcmp": LIBC + "assert libc.syscall(312, JUDGE, JUDGE, 0, 0, 0) >= 0, ctypes.get_errno()",
    "kill": "import os\nos.kill(JUDGE, 9)",
    "a signal by pidfd": LIBC + "assert libc.syscall(424, 3, 9, 0, 0) >= 0, ctypes.get_errno()",
    "a signal by sigqueue": LIBC + "assert libc.sigqueue(JUDGE, 9, 0) == 0, ctypes.get_errno()",
    "priorities": "import os\nos.setpriority(os.PRIO_PROCESS, JUDGE, 19)",
    "limits": LIBC
    + "assert libc.prlimit(JUDGE, 7, 0, ctypes.create_string_buffer(16)) == 0, ctypes.get_errno()",
    "its own memory protection": "open('/proc/self/mem', 'r+b')",
    "dumpable again": LIBC + "assert libc.prctl(4, 1, 0, 0, 0) == 0, ctypes.get_errno()",
    "an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0rft')",
    "another root": "import os\nos.chroot('/tmp')",
    "another program": "import os\nos.execv('/bin/cat', ['cat', KEY])",
}


@pytest.fixture(scope="module", params=["root", "account"])
def user(request: pytest.FixtureRequest) -> int | None:
    """The user id to change to; None: this one."""
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("not root")
    return ACCOUNT if request.param == "account" and os.geteuid() == 0 else None


@pytest.fixture
def folder(user: int | None) -> Path:
    return _folder(user)


def _folder(user: int | None) -> Path:
    """Of that user; not below pytest's own folder, which another pytest that starts closes to
    others.
    """
    made = Path(tempfile.mkdtemp(prefix="place-", dir=os.environ["RFT_TESTS_TMP"]))
    made.chmod(0o755)
    if user is not None:
        os.chown(made, user, user)
    return made


def _as_account(
    program: str, user: int | None, python: str, folder: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    paths = [
        str(ROOT),
        *(p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")),
    ]
    return subprocess.run(
        [python, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
        user=user,
        group=user,
        extra_groups=[] if user else None,
        env={
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "API_KEY": "key-of-the-environment",
        },
    )


SWITCHED_OFF = """
import ctypes, os, sys
from pathlib import Path
user, group = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    print('{"unavailable": "no user namespace in which to switch them off"}')
    sys.exit()
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def _nothing_is_in_reach(
    level: str, user: int | None, python: str, folder: Path, *, spaces: bool
) -> dict[str, Any]:
    """What the judge said; of a machine that lacks the level, why.  `spaces`: user namespaces may
    be made.
    """
    given = (level, python, str(folder), json.dumps(OPENED))
    program = (JUDGE, *given) if spaces else (SWITCHED_OFF, JUDGE, *given)
    done = _as_account(program[0], user, python, folder, *program[1:])
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, (right, reason, detail) in said.get("found", {}).items():
        assert not right and reason == "error", (name, reason, detail)
        assert "key-of" not in detail and "wanted-" not in detail, name
    assert not (folder / "mark").exists()
    return said


@pytest.mark.e2e
@attack(
    "H1",
    f"a program looks for the expected result, keys and files of the judge: {len(OPENED)} ways, as "
    f"root and as an ordinary account",
    "none of them leads anywhere, at every level",
)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_the_judge_is_in_reach(
    level: str, user: int | None, anybodys_python: str, folder: Path
) -> None:
    """As an ordinary account too, whose programs run under the same user id as the judge, with its
    key and its answers.
    """
    said = _nothing_is_in_reach(level, user, anybodys_python, folder, spaces=True)
    if "unavailable" in said:
        pytest.skip(said["unavailable"])
    assert said["dumpable"] == (1 if level == "namespaces" else 0)
    assert said["readable"][0], "before the sandbox was opened"
    root_reads = user is None and os.geteuid() == 0
    # weights then go through files
    assert said["readable"][1] is (level == "namespaces" or root_reads)


@attack(
    "H1",
    "the same of an ordinary account where user namespaces are switched off",
    "`namespaces` is refused with what to switch on; the other levels hide the same",
)
@pytest.mark.e2e
@pytest.mark.parametrize("level", LEVELS)
def test_without_user_namespaces(level: str, anybodys_python: str) -> None:
    user = ACCOUNT if os.geteuid() == 0 else None
    said = _nothing_is_in_reach(level, user, anybodys_python, _folder(user), spaces=False)
    if level == "namespaces":
        assert "unavailable" in said
    elif "unavailable" in said:
        pytest.skip(said["unavailable"])


PUBLISHER = """
import subprocess, sys
from pathlib import Path
import torch
from rft.extras.sandbox import kernel
from rft.sync.transport.memory import MemoryTransport
from rft.types.ids import Version

transport = MemoryTransport(Path(sys.argv[1]))
for step in range(6):
    if step == 3:
        kernel.hide_memory()
        transport.release(Version(1, 0))  # a slot from before
    manifest = transport.stage(Version(1, step), [("w", torch.full((1000,), float(step)))], {})
    spec = manifest.tensors[0]
    read = subprocess.run(["tail", "-c", f"+{spec.offset + 1}", manifest.path], capture_output=True)
    assert torch.frombuffer(bytearray(read.stdout), dtype=torch.float32, count=1000).eq(step).all(), (step, manifest.path, read.stderr)
print(transport.place)
transport.close()
"""


@pytest.mark.e2e
@attack(
    "H1",
    "a judge that hides its memory still has to hand weights on",
    "by files where others cannot open its memory",
)
def test_weights_reach_others_from_a_process_that_hides(
    user: int | None, anybodys_python: str, folder: Path
) -> None:
    """Slots that another process cannot open any more are not used again: root still can, an
    ordinary account gets files.
    """
    done = _as_account(PUBLISHER, user, anybodys_python, folder, str(folder))
    assert done.returncode == 0, done.stderr
    place = done.stdout.splitlines()[-1]
    assert (place == "memory") is (user is None and os.geteuid() == 0), place
