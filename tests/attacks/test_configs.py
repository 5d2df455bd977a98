"""Configuration files that hang, crash or grow without end: each is refused in one line, and
nothing is started.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rft.config.context import Context
from rft.config.plan import Plan
from rft.preflight import second_stage as verify_module
from rft.preflight.check import check as verify
from tests.attacks.refused import CONFIG, assert_refused, check
from tests.attacks.table import attack

WRITTEN = ("name", "project", "seed")  # given by the attempts themselves
BASE = "".join(
    line for line in CONFIG.read_text().splitlines(keepends=True) if not line.startswith(WRITTEN)
)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """What reads without end fails soon, and not by the machine's memory."""
    had = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), had[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, had)


def _loop(path: Path) -> None:
    path.symlink_to(path)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to itself": (_loop, "Too many levels of symbolic links"),
    "a pipe": (os.mkfifo, "is a pipe, not a plain file"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a plain file"),
    "a terminal": (lambda path: path.symlink_to("/dev/tty"), "cannot read configuration"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "memory": (lambda path: path.symlink_to("/proc/self/mem"), "cannot read configuration"),
    "a large file": (
        lambda path: path.write_bytes(b"a: " + b"x" * (2 << 20)),
        "at most 1,048,576 bytes",
    ),
    "a file of holes": (
        lambda path: os.truncate(os.open(path, os.O_WRONLY | os.O_CREAT), 1 << 40),
        "at most 1,048,576 bytes",
    ),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
}


@attack(
    "L",
    "what is no file is given as the configuration",
    "refused with what it is; nothing waits for it or reads it to its end",
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_plain_file(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    make, says = KINDS[kind]
    make(tmp_path / "bad.yaml")
    assert_refused(check(tmp_path / "bad.yaml", tiny_model), "bad.yaml", says)


@attack(
    "L",
    "the same as a base that a configuration extends",
    "refused with the chain of files that leads to it",
)
@pytest.mark.parametrize("kind", ["a link to itself", "a pipe", "/dev/zero", "a folder"])
def test_no_plain_file_is_extended(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    make, says = KINDS[kind]
    make(tmp_path / "bad.yaml")
    own = tmp_path / "own.yaml"
    own.write_text("extends: bad.yaml\n" + BASE)
    assert_refused(check(own, tiny_model), "extends: own.yaml → bad.yaml", says)


VALUES = {
    "a number of 5,000 digits": (
        "seed: " + "9" * 5000,
        "line 26: a number of 5,000 characters; at most 64",
    ),
    "a number of 5,000 digits, hexadecimal": (
        "seed: 0x" + "f" * 5000,
        "a number of 5,002 characters",
    ),
    "a number without digits": ("seed: 0x_", "must be a whole number"),
    "half a character": ('name: "\\ud800"', "line 26: holds half of a character (\\ud800)"),
    "half a character in a key": ('"\\ud800": 1', "line 26: a key holds half of a character"),
    "a null character": ('name: "a\\0b"', "holds a null character"),
    "text that runs backwards": ('name: "run\\u202egnp"', "no invisible character"),
    "text without width": ('project: "a\\u200bb"', "no invisible character"),
    "an escape sequence": ('project: "a\\e[2J"', "no invisible character"),
    "a folder above": ("name: ../../etc", "must begin with a letter or digit"),
    "an object": (
        "name: !!python/object/apply:os.system [id]",
        "is not allowed; write plain values",
    ),
    "infinity": ("algorithm: {optimizer: {lr: 1e999}}", "must be a finite number"),
    "a reference to itself": ("name: ${project}\nproject: ${name}", "Recursive interpolation"),
    "a reference to the whole": ("name: ${.}", "cannot be read"),
}


@attack("L", "single values that break readers", "refused with key, line and what is allowed")
@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, tmp_path: Path, tiny_model: Path) -> None:
    written, says = VALUES[name]
    path = tmp_path / "bad.yaml"
    path.write_text(
        (BASE if not written.startswith("algorithm") else BASE.split("algorithm:")[0])
        + written
        + "\n"
    )
    done = check(path, tiny_model)
    if "Recursive" in says:  # both keys are named
        assert done.code == 2 and done.output.count(says) == 2
        return
    assert_refused(done, says)


@attack("L", "the same as an override of the command line", "refused with the key")
@pytest.mark.parametrize(
    "override",
    [
        "seed=" + "9" * 5000,
        "seed=0x" + "f" * 50_000,
        'name="\\ud800"',
        "name=\udcff",
        'name="a\\u202eb"',
    ],
)
def test_overrides(override: str, tiny_model: Path) -> None:
    assert_refused(check(CONFIG, tiny_model, override), override.partition("=")[0])


def _chain(width: int, depth: int, leaf: str = "0123456789") -> str:
    return f"name: ${{project}}\nproject: p\nx0: {leaf}\n" + "".join(
        f'x{i}: "{f"${{x{i - 1}}}" * width}"\n' for i in range(1, depth)
    )


BOMBS = {
    "10 references in each of 14 lines": (
        _chain(10, 14),
        "unfold to more than 1,048,576 characters",
    ),
    "2 references in each of 60 lines": (_chain(2, 60), "unfold to more than 1,048,576 characters"),
    "a long text, referred to often": (_chain(90, 3, "x" * 4000), "1,048,576 characters"),
    "whole sections": (
        "s0: {a: 1, b: 2, c: 3, d: 4}\n"
        + "".join(f"s{i}: {{a: '${{s{i - 1}}}', b: '${{s{i - 1}}}'}}\n" for i in range(1, 20)),
        "unfold to more than",
    ),
    "by oc.select": (
        "x0: x\n" + "".join(f'x{i}: "{f"${{oc.select:x{i - 1}}}" * 10}"\n' for i in range(1, 14)),
        "unfold to more than",
    ),
    "aliases": (
        "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
        "aliases unfold",
    ),
    "merged aliases": (
        "a0: &a0 {k: v}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)),
        "aliases unfold",
    ),
    "nested lists": ("a: " + "[" * 100_000, "nested too deeply"),
    "nested mappings": ("a: " + "{a: " * 100_000, "nested too deeply"),
    "nested aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1500)),
        "nest too deeply",
    ),
    "100,000 values": ("a:\n" + "- x\n" * 100_000, "more than 20,000 values"),
    "nested braces": ('name: "' + "${a." * 200 + "}" * 200 + '"', "cannot be read"),
}


@pytest.mark.e2e
@attack(
    "L",
    "a few lines that unfold to much",
    "refused in bytes, depth and nodes; each reference is resolved once",
)
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, tmp_path: Path) -> None:
    written, says = BOMBS[name]
    path = tmp_path / "bomb.yaml"
    path.write_text(written)
    assert_refused(check(path, "model"), says)


@attack("–", "files that extend each other ten times over", "at most 64 files are read")
def test_a_tree_of_files(tmp_path: Path) -> None:
    for i in range(8):
        base = f"extends: [{', '.join([f'{i + 1}.yaml'] * 10)}]\n" if i < 7 else "seed: 1\n"
        (tmp_path / f"{i}.yaml").write_text(base)
    assert_refused(check(tmp_path / "0.yaml", "model"), "more than 64 files are read")


@attack("–", "references as people use them", "unfold as before")
def test_honest_references(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ROOT", "/data")
    path = tmp_path / "good.yaml"
    path.write_text(BASE + "name: ${project}_${group}\nproject: ${oc.env:NOT_SET,abc}\n")
    report = verify(
        path,
        [f"model.model_path={tiny_model}", "checkpoint_root_dir=${oc.env:RFT_ROOT}/${name}"],
        schema_only=True,
    )
    assert report.config is not None and report.config.checkpoint_root_dir == "/data/abc_group"


@attack(
    "L",
    "an error that only the first of two looks finds",
    "reported all the same: a check without errors has a plan",
)
def test_no_error_is_lost(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = verify_module.build

    def build(ctx: Context) -> Plan:
        plan = built(ctx)
        if not ctx.facts.plugins_loaded:
            ctx.error("seed", "is wrong")
        return plan

    monkeypatch.setattr(verify_module, "build", build)
    assert_refused(check(CONFIG, tiny_model), "seed: is wrong")
