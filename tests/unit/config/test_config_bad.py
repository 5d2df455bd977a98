"""Every file in data/bad says in `# expect:` lines what must be answered; nothing is started, torch
is not needed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config.plan import Facts
from rft.preflight.check import check
from tests.helpers.counted import Counted

BAD = sorted((Path(__file__).parent / "data" / "bad").glob("*.yaml"))
HERE = Facts(cpus=2, gpus=0)


def test_there_are_many() -> None:
    assert len(BAD) >= 25


@pytest.mark.extra
@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_bad_file_is_refused_with_its_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_TEST_NOT_SET", raising=False)
    expected = [
        line.removeprefix("# expect: ")
        for line in path.read_text().splitlines()
        if line.startswith("# expect: ")
    ]
    assert expected, "the file must say what it expects"
    with Counted() as counted:
        report = check(path, schema_only=True, facts=HERE)
    assert counted.lines < 2_000_000, "it takes less than a second"
    said = "\n".join(str(e) for e in report.errors)
    assert not report.ok
    for text in expected:
        assert text in said, said
    if len(expected) == 1 and path.stem != "several":
        assert len(report.errors) == 1, said


def test_several_errors_come_together() -> None:
    report = check(
        Path(__file__).parent / "data" / "bad" / "several.yaml", schema_only=True, facts=HERE
    )
    assert [e.key for e in report.errors] == ["seed", "buffer.batch_size", "trainer.save_intervall"]


def test_errors_say_the_line() -> None:
    report = check(
        Path(__file__).parent / "data" / "bad" / "unknown_key.yaml", schema_only=True, facts=HERE
    )
    assert "(line 4)" in str(report.errors[0])


def test_missing_file_is_named(tmp_path: Path) -> None:
    (error,) = check(tmp_path / "no.yaml").errors
    assert "no.yaml" in str(error) and "No such file" in str(error)


def test_large_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("a: " + "x" * (1 << 20))
    with Counted() as counted:
        (error,) = check(path).errors
    assert "at most 1,048,576" in str(error)
    assert counted.lines < 10_000, "it is not parsed, which takes twenty lines for each character"


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"a: \xff\xfe")
    assert "is not UTF-8 text (byte 3)" in str(check(path).errors[0])


def test_merge_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a: &a {k: v}"]
    lines += [
        f"{c}: &{c} {{<<: [{', '.join('*' + p for _ in range(9))}]}}"
        for p, c in zip("abcdefghi", "bcdefghij", strict=True)
    ]
    path = tmp_path / "merge.yaml"
    path.write_text("\n".join(lines))
    assert "unfold to more than" in str(check(path).errors[0])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        *(
            (text, "line 1: nested too deeply")
            for text in ("a: " + "[" * 400_000, "a: " + "{a: " * 200_000, "- " * 400_000)
        ),
        ("a:\n" + "- x\n" * 200_000 + "}", "line 19999: more than 20,000 values"),
    ],
    ids=["brackets", "braces", "dashes", "long list"],
)
def test_monsters_are_refused_where_they_become_too_large(
    text: str, where: str, tmp_path: Path
) -> None:
    """What follows, which is no YAML, is not read."""
    path = tmp_path / "monster.yaml"
    path.write_text(text)
    (error,) = check(path).errors
    assert f"monster.yaml, {where}" in str(error)


def test_chain_of_aliases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1500)))
    assert "nest too deeply" in str(check(path).errors[0])
