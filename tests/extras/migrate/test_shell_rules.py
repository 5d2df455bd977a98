"""The documented rules where a script's way cannot be told: what is followed, what is left out, and
that it is said.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.extras.migrate.convert.launch import Launch, read_launch

RUN = "python3 -m verl.trainer.main_ppo "


def read(tmp_path: Path, text: str) -> Launch:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return read_launch(path)


@pytest.mark.parametrize(
    ("before", "value", "note"),
    [
        (
            "if [ -f x ]; then A=yes; else A=no; fi",
            "no",
            "line 1: the condition cannot be told without running the script",
        ),
        ("A=no\nif [ -d x ]; then A=yes; fi", "no", "none of its branches is read"),
        (
            'if [ -z "$X" ]; then A=yes; else A=no; fi',
            "yes",
            "not set by the script and counts as empty",
        ),
        ('if [ -n "${X}" ]; then A=yes; else A=no; fi', "no", "counts as empty"),
        ('A=a\nif [ "$X" != on ]; then exit 1; fi', "a", ""),
        ("usage() { echo usage; exit 2; }\nA=a\n[ $# -ge 1 ] || usage", "a", ""),
        ("A=a\n[ -e x ] || { echo missing; exit 1; }", "a", ""),
        (
            'if [ -n "$HOME" ]; then A=yes; else A=no; fi',
            "yes",
            "decided by the values in the script",
        ),
        ('if [ "$HOME" = /root ]; then A=yes; else A=no; fi', "no", "cannot be told"),
        ("B=5\nif [ $B -gt 3 -a $B -lt 9 ]; then A=yes; else A=no; fi", "yes", "decided"),
        ("B=v1.5\nif [[ $B =~ ^v[0-9]+ ]]; then A=yes; else A=no; fi", "yes", "decided"),
        ("if [[ ( 1 -eq 2 || a < b ) && ! -z x ]]; then A=yes; else A=no; fi", "yes", "decided"),
        ("if python -c 'import vllm'; then A=yes; else A=no; fi", "no", "cannot be told"),
        ("if grep -q x y; then A=yes; elif true; then A=elif; fi", "elif", "cannot be told"),
        ("A=no\n[ -f x ] && A=yes", "no", "what follows `&&` is left out"),
        ("[ -f x ] || A=made", "made", "what follows `||` is read"),
        ("A=no\nif [ -f x ] && [ a = a ]; then A=yes; fi", "no", "none of its branches is read"),
        ('if [ -n "$X" ] && [ a = a ]; then A=yes; else A=no; fi', "no", "counts as empty"),
        ('if [ -z "$X" ] && [ a = b ]; then A=yes; else A=no; fi', "no", "decided"),
        ("if [ -f x ] || [ a = b ]; then A=yes; else A=no; fi", "no", "`else` is read"),
        ("if [ -f x ] || [ a = a ]; then A=yes; else A=no; fi", "yes", "decided"),
        ('A=a\nD=$(uname)\nif [ "$D" = Darwin ] && [ a = a ]; then exit 1; fi', "a", ""),
        (
            "A=no\nfor f in *.parquet; do A=$f; done",
            "no",
            "what this loop goes over is not known; it is left out",
        ),
        ("A=no\nwhile read -r line; do A=$line; done < file", "no", "this loop is left out"),
        ('A=no\nfor a in "$@"; do A=$a; done', "no", ""),
        (
            "source env.sh\nA=${B:-b}",
            "b",
            "line 1: `source env.sh` is not read; what it sets counts as not set",
        ),
        ("B=$1; A=${B:-fallback}", "fallback", "its default 'fallback' is taken"),
        ("unset A; A=${A:-again}", "again", ""),
        ("A=x; (A=y); { A+=z; }", "xz", ""),
        ("set -- one two; shift; A=$1", "two", ""),
        ("f() { set -- p q; A=$2; }; f", "q", ""),
        ('A=$(dirname "$0")', None, ""),
        (
            "select_model() { case $1 in a) echo one;; *) echo other;; esac; }; A=$(select_model "
            "a)",
            "one",
            "",
        ),
        ("A=`seq 1 3 | tail -1 2>/dev/null` ; A=${#A}; A=lost", "lost", ""),
    ],
)
def test_rule(tmp_path: Path, before: str, value: str | None, note: str) -> None:
    launch = read(tmp_path, f"{before}\n{RUN}trainer.a=$A\n")
    (argument,) = launch.arguments
    assert argument.value == (str(tmp_path) if value is None else value)
    assert note in "\n".join(launch.notes)


def test_the_branch_with_the_launch_is_read_when_no_other_has_one(tmp_path: Path) -> None:
    launch = read(tmp_path, f"if [ -f x ]; then {RUN} a=1; else echo nothing; fi\n")
    assert [a.value for a in launch.arguments] == [1]
    launch = read(tmp_path, f"if [ -f x ]; then {RUN} a=1; else {RUN} a=2; fi\n")
    assert [a.value for a in launch.arguments] == [2]
    launch = read(tmp_path, f"case $1 in\n train) {RUN} a=3;;\n *) exit 1;;\nesac\n")
    assert [a.value for a in launch.arguments] == [3]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('X=${X:-}\nif [ -z "$X" ]; then\n  echo "X is not set"\n  exit 1\nfi\n', ""),
        ('TRAIN=${TRAIN:-0}\nif [[ "$TRAIN" == 1 ]]; then\n', "else\n  echo off\nfi\n"),
    ],
)
def test_defaults_that_start_nothing_are_passed_by(tmp_path: Path, before: str, after: str) -> None:
    launch = read(tmp_path, f"{before}{RUN}trainer.a=1\n{after}")
    assert launch.arguments[0].value == 1
    assert "line 2: nothing is started where the values of the script lead" in "\n".join(
        launch.notes
    )


def test_an_argument_that_only_the_caller_knows_is_named_after_its_place(tmp_path: Path) -> None:
    launch = read(tmp_path, f"a=$1\nshift 2\nb=$1\n{RUN} x.a=$a x.b=$b/c\n")
    assert [(a.value, a.variables) for a in launch.arguments] == [
        ("${oc.env:ARG1}", ("ARG1",)),
        ("${oc.env:ARG3}/c", ("ARG3",)),
    ]


def test_nothing_is_executed(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    read(
        tmp_path,
        f"touch {touched}; $(touch {touched}); `touch {touched}`; eval 'touch {touched}'\n{RUN} "
        f"a=1 > {touched}\n",
    )
    assert not touched.exists()


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    launch = read(tmp_path, f"export WANDB_API_KEY=abc123def\nOPENAI_API_KEY=sk-zzz {RUN} a=1\n")
    assert "abc123def" not in str(launch.notes)
    assert "sk-zzz" not in str(launch.notes)
    assert sum("<hidden>" in n for n in launch.notes) == 2


def test_a_key_written_twice_stays_twice(tmp_path: Path) -> None:
    launch = read(tmp_path, f"{RUN} a=1 b=2 \\\n a=3\n")
    assert [(a.key, a.value) for a in launch.arguments] == [("a", 1), ("b", 2), ("a", 3)]
    assert "line 1: a=1 is replaced by a=3 on line 2" in launch.notes
