"""What is no launch, or cannot be read as one: ConfigError with file, line, and what to do; never
another exception.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.errors import ConfigError, ConfigErrors
from rft.extras.migrate.convert import recording
from rft.extras.migrate.convert.launch import Launch, read_launch

RUN = "python3 -m verl.trainer.main_ppo "


def read(tmp_path: Path, text: str, name: str = "run.sh") -> Launch:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_launch(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "X=1\n" + RUN + "\\\n  a='b \\\n  c=1\n",
            "run.sh, line 3: bash starts no launch and says: unexpected EOF while looking for",
        ),
        (
            RUN + 'a="b',
            "run.sh, line 1: bash starts no launch and says: unexpected EOF while looking for "
            "matching `\"'",
        ),
        ("while x; do\n" + RUN + "\n", "syntax error: unexpected end of file"),
        (
            "echo a\nfi\n",
            "line 2: bash starts no launch and says: syntax error near unexpected token `fi'",
        ),
        ("a=1\ncat <<EOF\nx\n", "here-document at line 2 delimited by end-of-file"),
        (RUN + "a=1 \\\n  foo b=2", "line 2: 'foo' is no key=value"),
        (
            RUN + "a=1 --frobnicate",
            "'--frobnicate' is neither key=value nor one of Hydra's options",
        ),
        (RUN + "a=1 --config-name", "--config-name has no value"),
        (
            RUN + "a=${data.max_length}",
            "says: a=${data.max_length}: bad substitution (what Hydra shall read stands in single "
            "quotes",
        ),
        (RUN + "a=$((1 / 0))", "line 1: bash starts no launch and says: 1 / 0: division by 0"),
        (
            "echo hello\npython3 train.py --lr 1\n",
            "line 2: 'python3 train.py --lr 1' is no veRL launch",
        ),
        ("echo hello\n", "line 1: the script ends without starting a veRL program"),
        ("", "line 1: the script ends without starting a veRL program"),
        (
            "\n\npython3 -m recipe.prime.main_prime a=1\n",
            "line 3: recipe.prime.main_prime has no counterpart here",
        ),
        (
            "python -m my_agents.trainer.main_ppo a=1\n",
            "my_agents.trainer.main_ppo has no counterpart here; where it is veRL's trainer",
        ),
        (
            "if false; then\n" + RUN + "a=1\nfi\n",
            "line 2: a veRL program is named here but never started",
        ),
        ("a=\ue000b\n", "line 1: holds the character U+E000"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.sh, line ")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("a=1,2", "'1,2' is a sweep over values; a list is written [1,2]"),
        ("'a=choice(1,2)'", "one of Hydra's sweeps"),
        ("a=[1,2", "has no ']'"),
    ],
)
def test_a_value_that_hydra_does_not_read_is_decided_by_a_person(
    tmp_path: Path, word: str, reason: str
) -> None:
    """The launch is read to its end; the argument has no value, and the reason is in the account."""
    (argument,) = read(tmp_path, f"{RUN}{word}\n").arguments
    assert argument.value is None and reason in argument.unknown and not argument.machine


def test_all_bad_words_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, RUN + "a=1 \\\n b \\\n c=1 d")
    assert [str(e).split(":")[0] for e in caught.value.errors] == [
        "run.sh, line 2",
        "run.sh, line 3",
    ]


def test_a_backslash_before_a_blank_does_not_end_the_launch(tmp_path: Path) -> None:
    """As veRL's own scripts have it: a comment behind the backslash, a doubled one."""
    launch = read(tmp_path, RUN + 'a.b=1 \\  # ["x"]\n    a.c=2 \\\\\n    +a.d=3 \\\n    a.e=4\n')
    assert [(a.key, a.value) for a in launch.arguments] == [
        ("a.b", 1),
        ("a.c", 2),
        ("a.d", 3),
        ("a.e", 4),
    ]
    assert sum("no backslash ends the line before" in n for n in launch.notes) == 2


def test_files_that_are_no_scripts(tmp_path: Path) -> None:
    binary = tmp_path / "a.sh"
    binary.write_bytes(b"echo\n\x7fELF\x00\x01")
    with pytest.raises(ConfigError, match=r"a\.sh, line 2: holds a zero byte"):
        read_launch(binary)
    binary.write_bytes(b"echo\n\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"line 3: not UTF-8"):
        read_launch(binary)
    binary.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="at most 1,048,576"):
        read_launch(binary)
    with pytest.raises(ConfigError, match="cannot read"):
        read_launch(tmp_path / "missing.sh")
    with pytest.raises(ConfigError, match="cannot read"):
        read_launch(tmp_path)


MONSTERS = {
    "doubling": "x=a\nfor i in {1..60}; do x=$x$x; done\n" + RUN + "a=$x",
    "endless loop": "while true; do :; done\n" + RUN + "a=1",
    "endless waiting": "while true; do sleep 5; done\n" + RUN + "a=1",
    "endless launches": f"while true; do {RUN} a=1; done\n",
    "endless jobs": f"f() {{ f & f; }}\nf\n{RUN} a=1\n",
    "braces": RUN + "a=" + "{1,2}" * 30,
    "lists": RUN + "a=" + "[" * 5_000,
    "eval": "x='eval $x'\neval $x\n",
    "files": "for i in {1..20}; do yes > f$i & done\n" + RUN + "a=1",
    "long word": RUN + "a=" + "x" * 100_000,
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", MONSTERS)
def test_monsters_are_read_or_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RUN_S", 2.0)
    try:
        read(tmp_path, MONSTERS[name])
    except ConfigError as e:
        assert "run.sh" in str(e)
