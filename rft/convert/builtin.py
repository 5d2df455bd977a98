"""The shell's own commands, and what a few others print: cd, echo, shift, `[`, basename, date …

Runs nothing.  Invariant: a command here changes the interpreter exactly as the shell's would change, or leaves a mark where that
cannot be told.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rft.convert import conditions
from rft.convert.arithmetic import ArithmeticProblem, evaluate
from rft.convert.conditions import NO, OPEN, YES, Answer
from rft.convert.values import PASSED, Text, env, marked, shown

if TYPE_CHECKING:
    from rft.convert.interpret import Interpreter


class Exit(Exception):
    """`exit`."""


class Return(Exception):
    """`return`."""


class Leave(Exception):
    """`break` and `continue`: `levels` loops, `again` to go on with the next turn."""

    def __init__(self, levels: int, again: bool) -> None:
        super().__init__()
        self.levels, self.again = levels, again


class Unknowable(Exception):
    """A command whose output only running it could tell."""


# (interpreter, words after the name, line) -> answer


def _shift(self: Interpreter, words: list[Text], line: int) -> Answer:
    count = int(words[0].text) if words and re.fullmatch(r"\d{1,4}", words[0].text) else 1
    known = sum(t.text != PASSED for t in self.scope.positional)
    self.scope.positional = self.scope.positional[min(count, known) :]
    if count > known and self.scope.positional:
        self.scope.shifted += count - known
    return YES


def _set(self: Interpreter, words: list[Text], line: int) -> Answer:
    marks = [i for i, w in enumerate(words) if w.text == "--"]
    if marks:
        self.scope.positional = words[marks[0] + 1 :]
    return YES


def _unset(self: Interpreter, words: list[Text], line: int) -> Answer:
    for word in words:
        if re.fullmatch(r"[A-Za-z_]\w*", word.text):
            self.scope.variables[word.text] = Text("", line)
    return YES


def _lose(self: Interpreter, words: list[Text], line: int) -> Answer:
    for word in words:
        if re.fullmatch(r"[A-Za-z_]\w*", word.text):
            self.lose(word.text, line)
    return OPEN


def _let(self: Interpreter, words: list[Text], line: int) -> Answer:
    values = [self.expander.compute(w.text, line) for w in words]
    return Answer(values[-1] != "0") if values and not marked(values[-1]) else OPEN


def _source(self: Interpreter, words: list[Text], line: int) -> Answer:
    what = shown(words[0].text, self.marks) if words else ""
    self.note(line, f"`source {what}` is not read; what it sets counts as not set")
    return OPEN


def _exit(self: Interpreter, words: list[Text], line: int) -> Answer:
    raise Exit


def _return(self: Interpreter, words: list[Text], line: int) -> Answer:
    raise Return


def _leave(again: bool) -> Callable[[Interpreter, list[Text], int], Answer]:
    def leave(self: Interpreter, words: list[Text], line: int) -> Answer:
        levels = int(words[0].text) if words and re.fullmatch(r"[1-9]", words[0].text) else 1
        raise Leave(levels, again)

    return leave


def _bracket(self: Interpreter, words: list[Text], line: int) -> Answer:
    texts = [w.text for w in words]
    return conditions.bracket(texts[:-1] if texts[-1:] == ["]"] else texts)


def _eval(self: Interpreter, words: list[Text], line: int) -> Answer:
    return self.inner_script(" ".join(w.text for w in words), words[0].line if words else line)


def _print(self: Interpreter, text: str) -> Answer:
    if self.output is not None:
        self.output.append(text)
    return YES


def _echo(self: Interpreter, words: list[Text], line: int) -> Answer:
    if self.output is None:
        return YES
    texts = [w.text for w in words]
    end = "\n"
    while texts and re.fullmatch(r"-[neE]+", texts[0]):
        end = "" if "n" in texts[0] else end
        texts = texts[1:]
    return _print(self, " ".join(texts) + end)


def _printf(self: Interpreter, words: list[Text], line: int) -> Answer:
    texts = [w.text for w in words]
    if texts[:1] == ["-v"]:
        return _lose(self, words[1:2], line)
    if self.output is None:
        return YES
    form = texts[0] if texts else ""
    if len(re.findall(r"%", form)) != len(re.findall(r"%[sd]", form)) or form.count("%") != len(texts) - 1:
        raise Unknowable
    rest = iter(texts[1:])
    return _print(self, re.sub(r"%[sd]", lambda m: next(rest), form.replace("\\n", "\n")))


def _cd(self: Interpreter, words: list[Text], line: int) -> Answer:
    target = next((w.text for w in words if not w.text.startswith("-")), env("HOME"))
    self.folder = _joined(self.folder, target)
    return YES


def _joined(folder: str, path: str) -> str:
    full = path if path.startswith(("/", "\ue000", "\ue002")) else f"{folder}/{path}"
    return os.path.normpath(full) if full.startswith("/") else re.sub(r"(/\.)+(?=/|$)", "", full)


def _prints(text: Callable[[Interpreter, list[str]], str | None]) -> Callable[[Interpreter, list[Text], int], Answer]:
    def command(self: Interpreter, words: list[Text], line: int) -> Answer:
        if self.output is None:
            return YES
        found = text(self, [w.text for w in words if not w.text.startswith("-")])
        if found is None:
            raise Unknowable
        return _print(self, found + "\n")

    return command


def _dirname(self: Interpreter, words: list[str]) -> str | None:
    if len(words) != 1 or (marked(words[0]) and "/" not in words[0]):
        return None
    folder, slash, _ = words[0].rstrip("/").rpartition("/")
    return folder or slash or "."


def _basename(self: Interpreter, words: list[str]) -> str | None:
    name = words[0].rstrip("/").rsplit("/", 1)[-1] if words else ""
    if not words or len(words) > 2 or marked(name):
        return None
    return name.removesuffix(words[1]) if len(words) == 2 else name


def _realpath(self: Interpreter, words: list[str]) -> str | None:
    if len(words) != 1 or ".." in words[0]:
        return None
    return _joined(self.folder, words[0])


def _date(self: Interpreter, words: list[Text], line: int) -> Answer:
    if self.output is not None:
        self.note(
            line, "`$(date …)` becomes the text 'date': a configuration is the same for each run; set `name` to tell runs apart"
        )
    return _print(self, "date\n")


def _expr(self: Interpreter, words: list[str]) -> str | None:
    try:
        return None if marked(" ".join(words)) else str(evaluate(" ".join(words), lambda name: 0, lambda name, value: None))
    except ArithmeticProblem:
        return None


def _seq(self: Interpreter, words: list[str]) -> str | None:
    if not 1 <= len(words) <= 2 or not all(re.fullmatch(r"-?\d{1,6}", w) for w in words):
        return None
    low, high = (1, int(words[0])) if len(words) == 1 else (int(words[0]), int(words[1]))
    return "\n".join(str(i) for i in range(low, min(high, low + 1000) + 1))


BUILTINS: dict[str, Callable[[Interpreter, list[Text], int], Answer]] = {
    "shift": _shift, "set": _set, "unset": _unset, "read": _lose, "mapfile": _lose, "readarray": _lose, "getopts": _lose,
    "let": _let, "source": _source, ".": _source, "exit": _exit, "return": _return, "break": _leave(False),
    "continue": _leave(True), "[": _bracket, "test": _bracket, "true": lambda self, words, line: YES,
    ":": lambda self, words, line: YES, "false": lambda self, words, line: NO, "eval": _eval, "echo": _echo, "printf": _printf,
    "cd": _cd, "pwd": _prints(lambda self, words: self.folder), "dirname": _prints(_dirname), "basename": _prints(_basename),
    "realpath": _prints(_realpath), "readlink": _prints(_realpath), "date": _date, "expr": _prints(_expr),
    "hostname": _prints(lambda self, words: env("HOSTNAME")), "whoami": _prints(lambda self, words: env("USER")),
    "seq": _prints(_seq),
}  # fmt: skip
