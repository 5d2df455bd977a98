"""Run projects of several files in either kind of sandbox, or judge them by hidden tests.

Depends on no container and no kernel.
Invariant: files written by one run are invisible to other runs; with tests and project in two
processes (`served` and `judging`), the tests get only the results of the project's functions.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from rft.extras.sandbox.jobs import Ran
from rft.extras.sandbox.processes import ProgramLimits

FOLDER = "/tmp/project"
_BOOT = f"""
import json, os, runpy, sys
order = json.load(sys.stdin)
for path, text in order["files"].items():
    path = os.path.join({FOLDER!r}, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
os.chdir({FOLDER!r})
sys.path.insert(0, {FOLDER!r})
first, *rest = order["arguments"]
if first == "-m":
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = [first, *rest]
    runpy.run_path(first, run_name="__main__")
"""


_MODULES = """
import importlib.abc, importlib.util, os, sys
class _Files(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, files):
        self.files = files
    def path(self, name):
        at = name.replace(".", "/")
        return next((p for p in (at + ".py", at + "/__init__.py") if p in self.files), None)
    def find_spec(self, name, path=None, target=None):
        if self.path(name) is not None:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))
        if any(p.startswith(name.replace(".", "/") + "/") for p in self.files):
            return importlib.util.spec_from_loader(name, None, is_package=True)
    def is_package(self, name):
        return self.path(name).endswith("__init__.py")
    def get_source(self, name):
        return self.files[self.path(name)]
"""
_TESTED = """
import io, unittest
def _tested(names):
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(n)) for n in names)
    found = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    told = [text.strip().splitlines()[-1] for _, text in found.failures + found.errors]
    told += ["unexpected success"] * len(found.unexpectedSuccesses)
    assert found.testsRun > len(found.skipped), "no test was run"
    assert not told, told[0]
"""
_SERVED = """
import importlib
try:
    os.makedirs({folder!r}, exist_ok=True)
    os.chdir({folder!r})
    for path, text in _files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
except OSError:
    pass  # a sandbox without a disk: modules are read from memory
sys.meta_path.insert(0, _Files(_files))
project_module = importlib.import_module
"""
_JUDGING = """
import importlib
class _Standing(importlib.abc.Loader):  # gives modules of the project as stand-ins
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        def standing(name, of=project_module(module.__name__)):
            if name.startswith("__") or _projects.find_spec(module.__name__ + "." + name) is not None:
                raise AttributeError(name)  # a module of its own
            try:
                return getattr(of, name)
            except AttributeError as e:  # "cannot import name" would be the tests' own mistake
                raise RuntimeError(str(e)) from None
        module.__getattr__ = standing
class _Projects(_Files):
    def find_spec(self, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Standing()
        return found
_projects = _Projects(_files)
sys.meta_path[:0] = [_Files(_tests), _projects]
"""


class ProgramRunner(Protocol):
    """A sandbox: `rft.extras.sandbox.code_sandbox.Sandbox` (local) or
    `rft.extras.sandbox.container.ContainerSandbox`.
    """

    async def run(self, program: str, limits: ProgramLimits, stdin: bytes = b"") -> Ran:
        """Return a Python program's output, and the reason of a failure.  Raises SandboxError or
        SandboxUnavailable.
        """
        ...

    def close(self) -> None: ...


async def run_project(
    runner: ProgramRunner, files: Mapping[str, str], arguments: Sequence[str], limits: ProgramLimits
) -> Ran:
    """Run `python ARGUMENTS` (a file with arguments, or -m and a module) in a folder of `files`,
    texts by relative path.

    Raises ValueError for a path outside the folder.
    """
    _inside(files)
    order = json.dumps({"files": dict(files), "arguments": list(arguments)}).encode()
    return await runner.run(_BOOT, limits, order)


def served(files: Mapping[str, str]) -> str:
    """Return a program with the project's modules, to be judged by `judging`.  Raises ValueError
    for a path outside the folder.
    """
    _inside(files)
    return f"{_MODULES}_files = {dict(files)!r}\n{_SERVED.format(folder=FOLDER)}"


def judging(files: Mapping[str, str], tests: Mapping[str, str]) -> str:
    """Return a test that passes if all unittests in `tests` do.

    It runs in a separate process, where modules of the project are stand-ins: their functions are
    called in the project's process and exchange plain data.
    """
    _inside(tests)
    names = dict.fromkeys((p for p in files if p not in tests), "")
    definitions = f"_files, _tests = {names!r}, {dict(tests)!r}\n"
    return f"{_MODULES}{definitions}{_JUDGING}{_TESTED}_tested({_test_modules(tests)!r})\n"


async def passes_inside(
    runner: ProgramRunner, files: Mapping[str, str], tests: Mapping[str, str], limits: ProgramLimits
) -> Ran:
    """Run all unittests in `tests` in one process with the project.

    A clean exit is not sufficient to pass, but a project that finds and changes the tests is
    undetected.
    """
    key = secrets.token_hex(16)
    runs = f"import importlib\n{_TESTED}_tested({_test_modules(tests)!r})\nprint({key!r})\n"
    main = f"run_{key}.py"
    ran = await run_project(runner, {**files, **tests, main: runs}, [main], limits)
    if not ran.reason and not ran.output.rstrip().endswith(key.encode()):
        return Ran("exit", "it ended before its tests did", b"")
    return ran


def _test_modules(tests: Mapping[str, str]) -> list[str]:
    """Return the modules that `python -m unittest` would load."""
    return [
        p[:-3].replace("/", ".")
        for p in tests
        if p.rpartition("/")[2].startswith("test") and p.endswith(".py")
    ]


def _inside(files: Mapping[str, str]) -> None:
    for path in files:
        if path.startswith("/") or ".." in path.split("/") or not path or "\0" in path:
            raise ValueError(f"{path!r} is no path inside the project")
