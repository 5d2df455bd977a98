"""What is no launch, or cannot be read as one: ConfigError with file, line, and what to do; never
another exception, never long.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rft.errors import ConfigError, ConfigErrors
from rft.extras.migrate.convert.launch import Launch, read_launch

RUN = "python3 -m verl.trainer.main_ppo "


def read(tmp_path: Path, text: str, name: str = "run.sh") -> Launch:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_launch(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("X=1\n" + RUN + "\\\n  a='b \\\n  c=1\n", 'run.sh, line 3, column 5: unbalanced "\'"'),
        (RUN + 'a="b', "run.sh, line 1, column 36: unbalanced '\"'"),
        ("x=1\ny=`date", "line 2, column 3: unbalanced '`'"),
        ("y=$(date", "line 1, column 3: unbalanced '('"),
        ("A=(1\n2\n" + RUN, "line 1, column 3: unbalanced '('"),
        (RUN + "a=$'x", 'unbalanced "$\'"'),
        (RUN + "a=${X", "unbalanced '${'"),
        (RUN + "a=1\n\nif [ a ]; then\n  b\n", "line 3: `if` on this line has no `fi`"),
        ("while x; do\ny\n", "line 1: `while` on this line has no `done`"),
        ("case x in\n a) b;;\n", "line 1: `case` on this line has no `esac`"),
        ("f() {\n", "line 1: `{` on this line has no `}`"),
        ("echo a\nfi\n", "line 2: 'fi' without its beginning"),
        ("a=1\ncat <<EOF\nx\n", "line 2: the here-document <<EOF has no closing line"),
        ("[[ a == b\n", "line 1: `[[` on this line has no `]]`"),
        ("a | \n", "the script ends in the middle of a command"),
        (RUN + "a=1 \\\n  foo b=2", "line 2: 'foo' is no key=value"),
        (
            RUN + "a=1 --frobnicate",
            "'--frobnicate' is neither key=value nor one of Hydra's options",
        ),
        (RUN + "a=1 --config-name", "--config-name has no value"),
        (RUN + "a=${data.max_length}", "'${data.max_length}' is no shell variable"),
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
        ("exit 0\n" + RUN + "a=1\n", "line 2: a veRL program is named here but never started"),
        ("f() { f; }\nf\n", "line 1: f calls itself more than"),
        ("a=\ue000b\n", "line 1: holds the character U+E000"),
    ],
)
def test_said_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("run.sh, line ")


UNTOLD = (
    (
        "\nX=$((NODES * 8))\n" + RUN + "trainer.n=$X",
        "its value comes from '$((NODES * 8))' on line 2: NODES is not set",
    ),
    (
        RUN + "a=$(nvidia-smi -L | wc -l)",
        "its value comes from '$(nvidia-smi -L | wc -l)' on line 1: only running it tells",
    ),
    (RUN + "a=$((1 / 0))", "division by zero"),
    (RUN + "a=$((1.5 * 2))", "whole numbers only"),
    (RUN + "a=$((2 ** 63))", "larger than 64 bits"),
    (RUN + "a=x_$RANDOM", "it differs from run to run"),
    (RUN + "a=1,2", "'1,2' is a sweep over values; a list is written [1,2]"),
    (RUN + "'a=choice(1,2)'", "one of Hydra's sweeps"),
    (RUN + "a=[1,2", "has no ']'"),
    (RUN + "a=$#", "only the caller of the script knows"),
    ("a=$@7\n" + RUN + "trainer.nnodes=$((a + 1))", "it holds the script's arguments"),
)


@pytest.mark.parametrize(("text", "said"), UNTOLD)
def test_a_value_that_the_script_does_not_tell_is_decided_by_a_person(
    tmp_path: Path, text: str, said: str
) -> None:
    """The launch is read to its end; the argument has no value, and the reason is in the account."""
    (argument,) = read(tmp_path, text + "\n").arguments
    assert argument.value is None and said in argument.unknown


def test_all_bad_words_are_told_together(tmp_path: Path) -> None:
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
    "nested loops": "for i in {1..400}; do for j in {1..400}; do k=$((k + 1)); done; done\n"
    + RUN
    + "a=1",
    "patterns": "x="
    + "a" * 100
    + "\nfor ((i = 0; i < 500; i++)); do y=${x//*a*b*c/d}; done\n"
    + RUN
    + "a=1",
    "trimming": "x="
    + "a" * 1000
    + "\nfor ((i = 0; i < 500; i++)); do y=${x%%*a*b*c}; done\n"
    + RUN
    + "a=1",
    "brackets": "(" * 20_000,
    "substitutions": "$(" * 20_000,
    "defaults": "x=${a:-" * 20_000,
    "arithmetic": "x=$((" + "(" * 20_000,
    "minus": RUN + "a=$((" + "- " * 5_000 + "1))",
    "quotes": '`"' * 20_000,
    "braces": RUN + "a=" + "{1,2}" * 30,
    "lists": RUN + "a=" + "[" * 5_000,
    "tests": "[[ " + "( " * 5_000 + "a" + " )" * 5_000 + " ]]\n",
    "eval": "x='eval $x'\neval $x\n",
    "capture": "f() { echo $(f); }\n" + RUN + "a=$(f)",
    "array": 'A=(a)\nfor i in {1..40}; do A+=("${A[@]}"); done\n' + RUN + '"${A[@]}"',
    "names": "a=b b=a\n" + RUN + "x=$((a))",
    "long": ('x=1 # "comment\n' * 60_000) + RUN + "a=1",
    "long word": RUN + "a=" + "x" * 1_000_000,
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", MONSTERS)
def test_monsters_end_soon(tmp_path: Path, name: str) -> None:
    start = time.process_time()
    try:
        read(tmp_path, MONSTERS[name])
    except ConfigError as e:
        assert "run.sh" in str(e)
    assert time.process_time() - start < 10
