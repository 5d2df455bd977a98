"""Projects of several files: task folders that reach for other files, answers that fake their
tests, images that are options.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.extras.sandbox.code_sandbox import Sandbox, SandboxUnavailable
from rft.extras.sandbox.container import ContainerSandbox
from rft.extras.sandbox.processes import ProgramLimits
from rft.extras.sandbox.project import passes_inside, run_project
from rft.plugins import load_all
from rft.taskset.task_folders import MOST_BYTES, task_folders
from rft.testing import run_workflow_async
from tests.attacks.table import attack
from tests.extras.sandbox import containers

ROW = {
    "prompt": "Repair it.",
    "files": {
        "counted.py": "def count(items):\n    return 0\n",
        "shop/__init__.py": "",
        "shop/till.py": "TAX = 1\n",
    },
    "tests": {
        "test_counted.py": "import unittest\nfrom counted import count\nfrom shop import "
        "till\nfrom helping import ITEMS\n"
        "class Counted(unittest.TestCase):\n    def test_it(self):\n        "
        "self.assertEqual(count(ITEMS), {'a': 2, 'b': 1})\n"
        "        self.assertRaises(TypeError, count, None)\n        self.assertEqual(till.TAX, "
        "1)\n",
        "helping.py": "ITEMS = ['a', 'b', 'a']\n",
    },
    "image": "",
}
RIGHT = (
    "import collections\ndef count(items):\n    return dict(collections.Counter(items)) if "
    "items else items + 0\n"
)
FAKES = {
    "exits": "import sys\nsys.exit(0)\n",
    "exits at once": "import os\nos._exit(0)\n",
    "exits in a call": "import os\ndef count(items):\n    os._exit(0)\n",
    "exits when it ends": "import atexit, os\natexit.register(os._exit, 0)\ndef count(items):\n    "
    "return 0\n",
    "changes unittest": "import unittest\nfor n in dir(unittest.TestCase):\n    if "
    "n.startswith('assert'):\n"
    "        setattr(unittest.TestCase, n, lambda *a, **k: None)\ndef count(items):\n    return "
    "0\n",
    "changes the runner": "import unittest\nunittest.TestSuite.run = lambda self, result, "
    "debug=False: result\n"
    "unittest.TestResult.wasSuccessful = lambda self: True\ndef count(items):\n    return 0\n",
    "equals everything": "class A(dict):\n    def __eq__(self, other):\n        return True\n    "
    "__hash__ = None\n"
    "def count(items):\n    return A()\n",
    "looks for the tests": "import gc\nFOUND = [o for o in gc.get_objects() if isinstance(o, dict) "
    "and 'test_counted.py' in o]\n"
    "def count(items):\n    return {'a': 2, 'b': 1} if FOUND or items is None else 0\n",
    "skips": "import unittest\nraise unittest.SkipTest('later')\n",
    "is the tests": "import sys\nsys.modules['test_counted'] = sys.modules[__name__]\ndef "
    "count(items):\n    return 0\n",
    "replaces a standard module": "import sys\nsys.modules['unittest'] = "
    "sys.modules[__name__]\ndef count(items):\n    return 0\n",
    "is empty": "",
}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()


@pytest.fixture(scope="module")
def sandboxed() -> None:
    sandbox = Sandbox()
    try:
        sandbox.level()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    finally:
        sandbox.close()


async def _scored(answer: str) -> Any:
    engine = ScriptedEngine(f"```counted.py\n{answer}```")
    return await run_workflow_async(
        "repair_workflow", ROW, engine, workflow_args={"timeout_s": 60.0}, timeout_s=120.0
    )


@attack(
    "–", "an answer that ends the tests, changes them, or their library, or what is equal", "wrong"
)
@pytest.mark.usefixtures("sandboxed")
@pytest.mark.parametrize("name", FAKES)
async def test_a_project_that_fakes_its_tests_is_wrong(name: str) -> None:
    found = await _scored(FAKES[name])
    assert found.rewards == [0.0], found


@attack("–", "a right answer to the same", "right")
@pytest.mark.usefixtures("sandboxed")
async def test_a_right_project_is_right() -> None:
    assert (await _scored(RIGHT)).rewards == [1.0]


@attack(
    "–",
    "files that an answer writes beside those it was shown, or in their place by another name",
    "not taken",
)
@pytest.mark.parametrize(
    "path",
    [
        "test_counted.py",
        "/tmp/x.py",
        "../x.py",
        "shop/../counted.py",
        "sitecustomize.py",
        ".",
        "unittest.py",
    ],
)
async def test_other_files_are_not_taken(path: str) -> None:
    engine = ScriptedEngine(f"```{path}\n{RIGHT}```")
    assert (await run_workflow_async("repair_workflow", ROW, engine, timeout_s=120.0)).rewards == [
        0.0
    ]


@attack("–", "in a container: an answer that ends its process before the tests are done", "wrong")
@pytest.mark.e2e
async def test_in_a_container_ending_well_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = ContainerSandbox(containers.image(containers.command(monkeypatch), tmp_path))
    limits = ProgramLimits(timeout_s=60.0)
    found = {}
    try:
        for name, text in {
            "right": RIGHT,
            **{n: FAKES[n] for n in ("exits", "exits at once", "exits in a call", "skips")},
        }.items():
            ran = await passes_inside(
                sandbox, {**ROW["files"], "counted.py": text}, ROW["tests"], limits
            )
            found[name] = not ran.reason
    finally:
        sandbox.close()
    assert found == {
        "right": True,
        "exits": False,
        "exits at once": False,
        "exits in a call": False,
        "skips": False,
    }


@attack(
    "–",
    "a row that names an option of the container engine as its image",
    "refused before anything is started",
)
@pytest.mark.parametrize(
    "image",
    [
        "--privileged",
        "-v/:/host",
        "--volume=/:/host",
        "",
        " python",
        "python 3",
        "$(id)",
        "a\nb",
        "-",
        "x" * 300,
    ],
)
def test_an_image_is_no_option(image: str) -> None:
    with pytest.raises(ValueError, match="no name of an image"):
        ContainerSandbox(image, command=["false"])


@attack("–", "a row that names an image of a registry", "never pulled: it has to be on the machine")
def test_an_image_is_never_pulled() -> None:
    line = ContainerSandbox("registry.example.org/evil:1", command=["podman"])._line(
        "n", ProgramLimits()
    )
    assert line[line.index("--pull") + 1] == "never" and line[line.index("--network") + 1] == "none"


def _link(name: str) -> Callable[[Path, Path], Any]:
    def make(task: Path, secret: Path) -> None:
        (task / name).unlink(missing_ok=True)
        (task / name).symlink_to(secret)

    return make


FOLDERS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "a file that is a link": (_link("environment/key.txt"), "is a link"),
    "a test that is a link": (_link("tests/key.py"), "is a link"),
    "an instruction that is a link": (_link("instruction.md"), "is a link"),
    "settings that are a link": (_link("task.toml"), "is a link"),
    "a folder that is a link": (
        lambda t, s: (t / "environment/deeper").symlink_to(s.parent),
        "is a link",
    ),
    "a link to itself": (
        lambda t, s: (t / "environment/loop").symlink_to(t / "environment/loop"),
        "is a link",
    ),
    "a task that is a link": (lambda t, s: (t.parent / "b").symlink_to(t), "is a link"),
    "a pipe as instruction": (
        lambda t, s: ((t / "instruction.md").unlink(), os.mkfifo(t / "instruction.md")),
        "is no task",
    ),
    "a pipe as settings": (lambda t, s: os.mkfifo(t / "task.toml"), "is a pipe"),
    "settings of a wrong form": (
        lambda t, s: (t / "task.toml").write_text("metadata = [1]"),
        "cannot be read",
    ),
    "settings that are no TOML": (
        lambda t, s: (t / "task.toml").write_text("[["),
        "cannot be read",
    ),
    "settings that are deep": (
        lambda t, s: (t / "task.toml").write_text("a = " + "[" * 100_000),
        "cannot be read",
    ),
    "an image that is a list": (
        lambda t, s: (t / "task.toml").write_text("[environment]\ndocker_image = ['x']"),
        "are texts",
    ),
    "a large file": (
        lambda t, s: (t / "environment/big").write_bytes(bytes(MOST_BYTES + 1)),
        "too large",
    ),
    "a large instruction": (
        lambda t, s: (t / "instruction.md").write_bytes(b"x" * (MOST_BYTES + 1)),
        "too large",
    ),
    "many files": (
        lambda t, s: [(t / f"tests/{i}").write_text("") for i in range(1001)],
        "too large",
    ),
    "no text": (lambda t, s: (t / "environment/x.bin").write_bytes(b"\xff\xfe"), "no UTF-8"),
}


@attack(
    "–",
    "task folders with links to files of elsewhere, pipes, files without end, settings of a wrong "
    "form",
    "refused with the file",
)
@pytest.mark.parametrize("name", FOLDERS)
def test_task_folders(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "home" / "id_ed25519"
    secret.parent.mkdir()
    secret.write_text("a key")
    task = tmp_path / "tasks" / "a"
    for path, text in {
        "instruction.md": "do",
        "environment/a.py": "",
        "tests/test_a.py": "",
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    make, says = FOLDERS[name]
    make(task, secret)
    with pytest.raises((ValueError, OSError), match=says):
        task_folders(split="train", folder=str(task.parent))


@attack("–", "paths of a project that leave its folder", "refused")
@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
async def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(ValueError, match="no path inside the project"):
        await run_project(None, {path: ""}, ["x.py"], ProgramLimits())  # type: ignore[arg-type]
