"""Quoting, expansion and Hydra's values: round trips in random styles, and mutated scripts."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft.errors import ConfigError
from rft.extras.migrate.convert import hydra
from rft.extras.migrate.convert.launch import Launch, read_launch

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.sh"))
# each starts bash
RUNS = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read(text: str) -> Launch:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sh"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return read_launch(path)


# -- values, as Hydra reads them


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("None", None),
        ("~", None),
        ("TRUE", True),
        ("false", False),
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("010", "010"),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("0.", 0.0),
        ("1e3", 1000.0),
        ("1_", "1_"),
        ("1e", "1e"),
        ("-", "-"),
        ("a b  c", "a b  c"),
        ("'1'", "1"),
        ('"a\\"b"', 'a"b'),
        ("'a\\'b'", "a'b"),
        ("a\\,b", "a,b"),
        ("[]", []),
        ("{}", {}),
        ("[1,[2,'x']]", [1, [2, "x"]]),
        ("{a: 1, 'b c': {d: null}, 3: x}", {"a": 1, "b c": {"d": None}, "3": "x"}),
        ("[ a , b ]", ["a", "b"]),
        ("hdfs://a/b:c", "hdfs://a/b:c"),
        ("${a.b}/c", "${a.b}/c"),
        ("[${a:x,y},1]", ["${a:x,y}", 1]),
        ("int(3.9)", 3),
        ("str(1)", "1"),
        ("float(2)", 2.0),
        ("bool(true)", True),
        ("f(x)", "f(x)"),
        ("", ""),
        ("  ", ""),
        ("~/a", "~/a"),
        ("a=b", "a=b"),
    ],
)
def test_value(text: str, value: Any) -> None:
    assert repr(hydra.value(text)) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        "1,2",
        "[1",
        "[1,2]]",
        "{a}",
        "{a:1",
        "'x",
        "'a'b",
        "range(1,3)",
        "int(x)",
        "bool(x)",
        "[,]",
        "{[1]:2}",
        "${a",
    ],
)
def test_value_that_hydra_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        hydra.value(text)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("a.b=1", ("", "a.b", "1")),
        ("+a=b=c", ("+", "a", "b=c")),
        ("++a.b-c=", ("++", "a.b-c", "")),
        ("~a.b", ("~", "a.b", None)),
        ("~a=1", ("~", "a", "1")),
        ("data/x@y=z", ("", "data/x@y", "z")),
        ("a.b", None),
        ("=1", None),
        ("a b=1", None),
        ("1=2", None),
    ],
)
def test_split(word: str, parts: tuple[str, str, str | None] | None) -> None:
    assert hydra.split(word) == parts


# -- round trips

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Co", "Cc"], include_characters="\n\t"),
    max_size=20,
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | TEXTS
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"\A[a-z_]{1,6}(\.[a-z_][a-z0-9_]{0,6}){0,3}\Z")


def written(value: Any) -> str:
    """The value in Hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        case list():
            return "[" + ",".join(map(written, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{written(k)}: {written(v)}" for k, v in value.items()) + "}"
    return repr(value)


def double(text: str) -> str:
    return '"' + "".join("\\" + c if c in '"\\$`' else c for c in text) + '"'


def ansi(text: str) -> str:
    return (
        "$'"
        + "".join({"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}.get(c, c) for c in text)
        + "'"
    )


def backslashes(text: str) -> str:
    return "".join(c if c.isalnum() else "'\n'" if c == "\n" else "\\" + c for c in text)


@st.composite
def launches(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """A script, and the arguments that it passes."""
    pairs = draw(
        st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=6, unique_by=lambda p: p[0])
    )
    before = []
    words = []
    for i, (key, value) in enumerate(pairs):
        word = f"{key}={written(value)}"
        cut = draw(st.integers(0, len(word)))
        quote = draw(st.sampled_from([shlex.quote, double, ansi, backslashes]))
        other = draw(st.sampled_from([shlex.quote, double, ansi, backslashes]))
        quoted = quote(word[:cut]) + other(word[cut:])
        match draw(
            st.sampled_from(
                ["plain", "variable", "array", "tail", "default", "printed", "function"]
            )
        ):
            case "variable":
                before.append(f"V{i}={quoted}")
                words.append(f'"$V{i}"')
            case "array":
                before.append(f"A{i}=( # an array\n{quoted}\n)")
                words.append(f'"${{A{i}[@]}}"')
            case "tail":
                before.append(f"export T{i}={quote(written(value))}")
                words.append(f'{key}="${{T{i}}}"')
            case "default":
                words.append(f"${{UNSET_{i}:-{quoted}}}" if "}" not in quoted else quoted)
            case "printed" if not word.endswith("\n"):
                words.append(f'"$(echo {quoted})"')
            case "function":
                before.append(f"f{i}() {{ local w=$1; W{i}=$w; }}\nf{i} {quoted}")
                words.append(f'"$W{i}"')
            case _:
                words.append(quoted)
    between = draw(st.sampled_from([" ", " \\\n  ", "\t"]))
    return "\n".join(
        [*before, "python3 -m verl.trainer.main_ppo " + between.join(words)]
    ) + "\n", pairs


@pytest.mark.e2e
@RUNS
@given(launches())
def test_round_trip(case: tuple[str, list[tuple[str, Any]]]) -> None:
    script, pairs = case
    launch = read(script)
    assert [(a.key, repr(a.value)) for a in launch.arguments] == [(k, repr(v)) for k, v in pairs]


# -- mutated scripts

BITS = [
    *"' \" ` $( ${ $(( ) } (( \\ ;; <<EOF | && = [ ] $@ # \r \x00 é 🦙 {1..9} A+=( ${x##* $' "
    "\ue000".split(" "),
    "\n",
    "if ",
    "fi\n",
    "do\n",
    "done\n",
    "case x in",
    "[[ ",
    " ]]",
    "exit\n",
    "eval ",
    "f() {",
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(SCRIPTS)).read_text()
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(text)))
        size = draw(st.integers(0, 40))
        new = draw(st.sampled_from(["", text[at : at + size] * 2, *BITS]))
        text = text[:at] + new + text[at + (size if draw(st.booleans()) else 0) :]
    return text


@pytest.mark.e2e
@RUNS
@given(mutated())
def test_mutated_scripts_are_read_or_refused(text: str) -> None:
    try:
        launch = read(text)
    except ConfigError as e:
        assert "run.sh" in str(e)
    else:
        assert all(a.key and a.line >= 1 for a in launch.arguments)
        assert not any(mark in f"{launch}" for mark in "\ue000\ue001\ue002\ue003\ue004")


PIECES = (
    *"ab=1 \n;|&()[]{}<>$`'\"\\#~*",
    "if ",
    "then ",
    "for ",
    "in ",
    "do ",
    "done ",
    "case ",
    "python3 -m verl.trainer.main_ppo ",
)


@pytest.mark.e2e
@RUNS
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_text_is_read_or_refused(pieces: list[str]) -> None:
    try:
        read("".join(pieces))
    except ConfigError as e:
        assert str(e).startswith("run.sh")
