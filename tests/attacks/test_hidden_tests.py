"""Agents in runtimes that go for the tests of their task: before they end, and with what they leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.extras.sandbox.harbor_tasks import read_task
from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.extras.sandbox.terminal_workflow import Attempt, TerminalArgs, pool
from rft.types.runtimes import AgentRuntime, Executed, RuntimeFailed, RuntimeSpec
from tests.attacks.table import attack
from tests.extras.sandbox import containers
from tests.helpers import runs

LIMIT_S = 60.0
MENDED = """def count(items, size):
    return -(-len(items) // size)


def page(items, size, number):
    return items[(number - 1) * size : number * size]
"""
BEFORE = {
    "looks for them": "find / -xdev -name 'check.py*' -o -name judge.py -o -name solve.sh 2>/dev/null; "
    "cat /tests/* /solution/*",
    "makes its own": "mkdir -p /tests /logs/verifier; for f in /tests/test.sh /tests/check.py; do "
    "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > $f; chmod 755 $f; done",
    "makes the folder a link": "mkdir -p /app/t; rm -rf /tests; ln -s /app/t /tests; "
    "ln -sfn /app/t /logs/verifier",
    "writes the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "waits for them": "(setsid sh -c 'while :; do [ -e /tests/check.py ] && echo > /tests/check.py; "
    "echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
    "puts programs first in PATH": "for d in /app /usr/local/bin /usr/local/sbin /usr/bin; do for p in "
    "python3 sh kill; do printf '#!/bin/sh\\nexit 0\\n' > $d/$p; chmod 755 $d/$p; done; done; "
    "echo 'export PATH=/app' | tee /root/.profile /root/.bashrc /etc/profile",
    "preloads a library": "echo /app/evil.so > /etc/ld.so.preload; cp /bin/true /app/evil.so",
    "leaves modules": "for m in sitecustomize usercustomize conftest judge subprocess os pathlib json; "
    "do echo 'import os; os._exit(0)' > /app/$m.py; done; mkdir -p /root/.local/lib; "
    "printf '[pytest]\\naddopts = --co\\n' > /app/pytest.ini",
    "deletes everything": "rm -rf /app /etc /home /logs /opt /root /run /tmp /var",
    "is a link in place of the folder": "cd /; rm -rf /app; ln -s /tests /app",
}
DURING = {
    "writes the reward": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "writes it again and again": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 9)\n    while True:\n"
    "        try:\n            open('/logs/verifier/reward.txt', 'w').write('1')\n"
    "        except OSError:\n            pass",
    "puts a link in its place": "import os\nopen('/app/one', 'w').write('1')\n"
    "os.symlink('/app/one', '/logs/verifier/reward.txt')",
    "changes the tests": "for name in ('check.py', 'judge.py', 'test.sh'):\n"
    "    open('/tests/' + name, 'w').write('')",
    "reads what is expected": "import re, sys\ntext = open('/tests/check.py').read()\n"
    "print(re.search(r'== \"(.*)\\\\n\"', text)[1])\nsys.stdout.flush()\nimport os\nos._exit(0)",
    "ends the tests": "import os, signal\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
    "looks into the tests' memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b').read(1)",
}
LINKS = {
    "absolute": "ln -s /tests/expected out",
    "relative": "ln -s ../tests/expected out",
    "through the root": "ln -s / root; ln -s root/tests/expected out",
    "through a folder that may be linked": "ln -s /usr usr; ln -s usr/../tests/expected out",
    "through /proc": "ln -s /proc/self/root/tests/expected out",
    "from below": "ln -s /usr/../tests/expected out",
    "a folder of links": "mkdir d; ln -s ../../tests d/t; ln -s d/t/expected out",
}
FLOODS = {
    "prints without end": "yes",
    "forks without end": "f() { f | f & }; f; sleep 60",
    "never ends": "trap '' TERM INT HUP; while :; do sleep 1; done",
    "fills the disk": "cat /dev/zero > large; cat /dev/zero > /tmp/large; true",
    "makes files without end": "i=0; while :; do i=$((i+1)); : > $i; done",
    "takes memory without end": "python3 -c 'x = [bytes(1 << 20) for _ in range(100000)]'",
    "leaves pipes and deep folders": "mkfifo out a b; i=0; while [ $i -lt 300 ]; do i=$((i+1)); mkdir d; "
    "cd d || break; done",
}
COMPARES = "#!/bin/sh\ncmp -s out /tests/expected\necho $((!$?)) > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module", params=["local", pytest.param("container", marks=pytest.mark.slow)])
def args(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TerminalArgs]:
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    made = TerminalArgs(command=["true"], sandbox=request.param)
    if made.sandbox == "local":
        yield made
        return
    with pytest.MonkeyPatch.context() as patch:
        engine = containers.command(patch)
        with containers.built_images(engine, tmp_path_factory.mktemp("image")):
            yield made


async def _played(folder: Path, script: str, args: TerminalArgs) -> tuple[float, str]:
    """The reward of an agent that runs a script, and what it printed."""
    task = read_task(folder)
    limit_s = task.table.agent.timeout_sec or LIMIT_S

    def play(runtime: AgentRuntime) -> Executed:
        return runtime.exec(["sh", "-c", script], timeout_s=min(limit_s, LIMIT_S))

    attempt = Attempt(task, args, play)
    score = await pool(args).use(attempt.judged)
    assert score.value is not None
    return score.value, attempt.info["agent_output"]


def _writes(module: str) -> str:
    return f"cat > /app/pages.py <<'END'\n{module}\nEND\n"


@pytest.mark.e2e
@attack(
    "–", "an agent that reads, makes, links, replaces or waits for its hidden tests", "reward 0"
)
@pytest.mark.parametrize("name", BEFORE)
async def test_an_agent_goes_for_its_tests(name: str, args: TerminalArgs) -> None:
    folder = runs.ROOT / "examples/terminal_tasks/tasks/off-by-one"
    reward, output = await _played(folder, BEFORE[name], args)
    assert reward == 0.0
    assert "judge" not in output and "#!/bin/sh" not in output


@pytest.mark.e2e
@attack(
    "–", "the same, and a right answer", "reward 1: what it did beside has no effect on the tests"
)
@pytest.mark.parametrize("name", ["makes its own", "waits for them", "preloads a library"])
async def test_a_right_answer_is_right_all_the_same(name: str, args: TerminalArgs) -> None:
    folder = runs.ROOT / "examples/terminal_tasks/tasks/off-by-one"
    reward, _ = await _played(folder, _writes(MENDED) + BEFORE[name], args)
    assert reward == 1.0


@pytest.mark.e2e
@attack(
    "–",
    "an agent's module that, run by the tests, reads, changes or ends them, or writes the reward",
    "reward 0, or a failed run where rft has no second user",
)
@pytest.mark.parametrize("name", DURING)
async def test_a_module_goes_for_the_tests_that_run_it(name: str, args: TerminalArgs) -> None:
    if name == "reads what is expected" and os.geteuid() != 0:
        pytest.skip("tests and program are of one user here")
    folder = runs.ROOT / "examples/terminal_tasks/tasks/off-by-one"
    try:
        reward, _ = await _played(folder, _writes(DURING[name]), args)
    except RuntimeFailed as e:
        assert os.geteuid() != 0, e
    else:
        assert reward == 0.0


@pytest.mark.e2e
@attack(
    "–", "a link from the work folder to the expected output of the tests", "not carried: reward 0"
)
@pytest.mark.parametrize("name", LINKS)
async def test_a_link_does_not_lead_to_the_tests(
    name: str, tmp_path: Path, args: TerminalArgs
) -> None:
    _compares(tmp_path)
    assert (await _played(tmp_path, "echo 42 > answer; ln -s answer out", args))[0] == 1.0
    assert (await _played(tmp_path, LINKS[name], args))[0] == 0.0


@attack(
    "–",
    "an agent that prints, forks, writes, takes memory or runs without end",
    "ended at its limits and judged: reward 0, and 1 where it had answered before",
)
@pytest.mark.e2e
@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_at_its_limits(name: str, tmp_path: Path, args: TerminalArgs) -> None:
    _compares(
        tmp_path, "[agent]\ntimeout_sec = 1.5\n[environment]\nmemory_mb = 256\nstorage_mb = 32\n"
    )
    assert (await _played(tmp_path, FLOODS[name], args))[0] == 0.0
    assert (await _played(tmp_path, f"echo 42 > out; mkdir x; cd x; {FLOODS[name]}", args))[
        0
    ] == 1.0


def _compares(folder: Path, table: str = "") -> None:
    """Make a task whose tests compare `out` with what they expect."""
    for path, text in {
        "instruction.md": "Write the answer into out.",
        "task.toml": table,
        "environment/Dockerfile": f"FROM {containers.NAME}\nWORKDIR /app\n",
        "tests/test.sh": COMPARES,
        "tests/expected": "42\n",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
