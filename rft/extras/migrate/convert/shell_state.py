"""What a shell holds while a script is walked, and its own commands, which change that: cd, echo,
shift, `[`, basename, date …

Runs nothing.  Invariant: a command changes the state exactly as the shell's would; a variable whose
value cannot be told holds a mark.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rft.errors import ConfigError
from rft.extras.migrate.convert import conditions
from rft.extras.migrate.convert.conditions import NO, OPEN, YES, Decision
from rft.extras.migrate.convert.expand import Expander, Scope
from rft.extras.migrate.convert.shell_arithmetic import ArithmeticProblem, evaluate
from rft.extras.migrate.convert.syntax import Assign, Command, CommandSub, SimpleCommand, Word
from rft.extras.migrate.convert.values import PASSED, Array, Marks, Text, env, marked, shown
from rft.secrets import is_secret_name

MAX_CALLS = 12


class Exit(Exception):
    """`exit`."""


class Return(Exception):
    """`return`."""


class Leave(Exception):
    """`break` and `continue`: `levels` loops, `again` to go on with the next turn."""

    def __init__(self, levels: int, again: bool) -> None:
        super().__init__()
        self.levels = levels
        self.again = again


class Unknowable(Exception):
    """A command whose output only running it could tell."""


class ShellState:
    """`capture` gives the text of `$(…)`."""

    def __init__(self, path: str, name: str, capture: Callable[[CommandSub], str]) -> None:
        self.name = name
        self.marks = Marks(name)
        self.scope = Scope(path)
        self.expander = Expander(self.scope, self.marks, self.note, capture)
        self.functions: dict[str, Command] = {}
        self.notes: dict[tuple[int, str], None] = {}
        self.locals: list[dict[str, Array | None]] = []
        self.output: list[str] | None = None
        self.folder: str = env("PWD")
        self.nesting = 0

    @contextmanager
    def nested(self, line: int, what: str) -> Iterator[None]:
        self.nesting += 1
        try:
            if self.nesting > MAX_CALLS:
                raise ConfigError(
                    f"{self.name}, line {line}: {what} more than {MAX_CALLS} levels deep"
                )
            yield
        finally:
            self.nesting -= 1

    def note(self, line: int, text: str) -> None:
        self.notes.setdefault((line, text))

    def note_environment(self, name: str, value: str, line: int) -> None:
        """Tell that the script gives the run an environment variable."""
        value = shown(value, self.marks)
        value = "<hidden>" if is_secret_name(name) and value else value[:80]
        self.note(line, f"sets {name}={value} for the run; a configuration does not carry it")

    def environment(self, command: SimpleCommand, words: list[Text]) -> None:
        """Tell what stands as NAME=value before a program, and among the words of its launcher."""
        for assign in command.assigns:
            if isinstance(assign.value, Word):
                self.note_environment(assign.name, self.expander.string(assign.value), assign.line)
        for word in words:
            if name := re.match(r"([A-Za-z_]\w*)=(.*)", word.text, re.DOTALL):
                self.note_environment(name[1], name[2], word.line)

    def apart(self, action: Callable[[], Decision]) -> Decision:
        """In a shell of its own: what it sets is gone afterwards."""
        kept = (
            dict(self.scope.variables),
            list(self.scope.positional),
            self.scope.shifted,
            self.folder,
        )
        self.marks.work(20 * len(kept[0]), 0)
        try:
            return action()
        except (Exit, Return, Leave):
            return YES
        finally:
            self.scope.variables, self.scope.positional, self.scope.shifted, self.folder = kept

    # -- variables

    def assign_all(self, command: SimpleCommand) -> Decision:
        for assign in command.assigns:
            self.assign(assign)
        return YES

    def assign(self, assign: Assign) -> None:
        old = self.expander.get(assign.name)
        if not isinstance(assign.value, Word):
            return self.assign_array(assign, assign.value, old)
        key = self.expander.key(old, assign.index) if assign.index else "0"
        text = self.expander.string(assign.value)
        if assign.index and not self.usable(key, old):
            return self.lose(assign.name, assign.line)
        if assign.append:
            before = old.entries.get(key) if old else None
            unset = env(assign.name) if old is None and not assign.index else ""
            text = (before.text if before else unset) + text
        return self.expander.set(assign.name, text, assign.line, key)

    def assign_array(self, assign: Assign, elements: tuple[Assign, ...], old: Array | None) -> None:
        entries = dict(old.entries) if assign.append and old else {}
        array = Array(entries, named=old is not None and old.named)
        for element in elements:
            assert isinstance(element.value, Word)
            if element.index is not None:
                key = self.expander.key(array, element.index)
                if not self.usable(key, array):
                    return self.lose(assign.name, assign.line)
                entries[key] = Text(self.expander.string(element.value), element.value.line)
                continue
            start = len(entries) if array.named else int(array.next_key())
            for at, one in enumerate(self.expander.fields(element.value), start):
                entries[str(at)] = one
            self.marks.work(10 * len(entries), assign.line)
        self.scope.variables[assign.name] = array
        return None

    @staticmethod
    def usable(key: str, array: Array | None) -> bool:
        return not marked(key) and (key.isdecimal() or (array is not None and array.named))

    def restore(self, name: str, value: Array | None) -> None:
        if value is None:
            self.scope.variables.pop(name, None)
        else:
            self.scope.variables[name] = value

    def lose(self, name: str, line: int) -> None:
        """The variable is set to something that cannot be told."""
        self.renew(
            name,
            self.marks.new(f"${name}", f"line {line} sets it to what only running tells", line),
            line,
        )

    def renew(self, name: str, text: str, line: int) -> None:
        """The variable is this text, whatever it was before."""
        self.scope.variables[name] = Array({"0": Text(text, line)})

    def declare(self, command: SimpleCommand, kind: str) -> Decision:
        flags = "".join(
            t
            for w in command.words[1:]
            if isinstance(w, Word) and (t := w.literal() or "").startswith("-")
        )
        for item in command.words[1:]:
            name = item.name if isinstance(item, Assign) else item.literal() or ""
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                continue
            if (
                kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
            ) and self.locals:
                self.locals[-1].setdefault(name, self.expander.get(name))
            if "A" in flags:
                self.scope.variables[name] = Array(named=True)
            elif kind == "local" and not isinstance(item, Assign):
                self.renew(name, "", command.line)
            if isinstance(item, Assign):
                self.assign(item)
            if kind == "export" or "x" in flags:
                value = self.expander.get(name)
                if value and [*value.entries] == ["0"]:
                    self.note_environment(name, value.first.text, item.line)
        return YES


# -- the shell's own commands, and what a few others print: (state, words after the name, line) ->
# answer


Builtin = Callable[[ShellState, list[Text], int], Decision]


def _shift(self: ShellState, words: list[Text], line: int) -> Decision:
    count = int(words[0].text) if words and re.fullmatch(r"\d{1,4}", words[0].text) else 1
    known = sum(t.text != PASSED for t in self.scope.positional)
    self.scope.positional = self.scope.positional[min(count, known) :]
    if count > known and self.scope.positional:
        self.scope.shifted += count - known
    return YES


def _set(self: ShellState, words: list[Text], line: int) -> Decision:
    marks = [i for i, w in enumerate(words) if w.text == "--"]
    if marks:
        self.scope.positional = words[marks[0] + 1 :]
    return YES


def _unset(self: ShellState, words: list[Text], line: int) -> Decision:
    for word in words:
        if re.fullmatch(r"[A-Za-z_]\w*", word.text):
            self.renew(word.text, "", line)
    return YES


def _lose(self: ShellState, words: list[Text], line: int) -> Decision:
    for word in words:
        if re.fullmatch(r"[A-Za-z_]\w*", word.text):
            self.lose(word.text, line)
    return OPEN


def _let(self: ShellState, words: list[Text], line: int) -> Decision:
    values = [self.expander.compute(w.text, line) for w in words]
    return Decision(values[-1] != "0") if values and not marked(values[-1]) else OPEN


def _source(self: ShellState, words: list[Text], line: int) -> Decision:
    what = shown(words[0].text, self.marks) if words else ""
    self.note(line, f"`source {what}` is not read; what it sets counts as not set")
    return OPEN


def _exit(self: ShellState, words: list[Text], line: int) -> Decision:
    raise Exit


def _return(self: ShellState, words: list[Text], line: int) -> Decision:
    raise Return


def _leave(again: bool) -> Builtin:
    def leave(self: ShellState, words: list[Text], line: int) -> Decision:
        levels = int(words[0].text) if words and re.fullmatch(r"[1-9]", words[0].text) else 1
        raise Leave(levels, again)

    return leave


def _bracket(self: ShellState, words: list[Text], line: int) -> Decision:
    texts = [w.text for w in words]
    return conditions.bracket(texts[:-1] if texts[-1:] == ["]"] else texts)


def _print(self: ShellState, text: str) -> Decision:
    if self.output is not None:
        self.output.append(text)
    return YES


def _echo(self: ShellState, words: list[Text], line: int) -> Decision:
    if self.output is None:
        return YES
    texts = [w.text for w in words]
    end = "\n"
    while texts and re.fullmatch(r"-[neE]+", texts[0]):
        end = "" if "n" in texts[0] else end
        texts = texts[1:]
    return _print(self, " ".join(texts) + end)


def _printf(self: ShellState, words: list[Text], line: int) -> Decision:
    texts = [w.text for w in words]
    if texts[:1] == ["-v"]:
        return _lose(self, words[1:2], line)
    if self.output is None:
        return YES
    form = texts[0] if texts else ""
    if (
        len(re.findall(r"%", form)) != len(re.findall(r"%[sd]", form))
        or form.count("%") != len(texts) - 1
    ):
        raise Unknowable
    rest = iter(texts[1:])
    return _print(self, re.sub(r"%[sd]", lambda m: next(rest), form.replace("\\n", "\n")))


def _cd(self: ShellState, words: list[Text], line: int) -> Decision:
    target = next((w.text for w in words if not w.text.startswith("-")), env("HOME"))
    self.folder = _joined(self.folder, target)
    return YES


def _joined(folder: str, path: str) -> str:
    full = path if path.startswith(("/", "\ue000", "\ue002")) else f"{folder}/{path}"
    return os.path.normpath(full) if full.startswith("/") else re.sub(r"(/\.)+(?=/|$)", "", full)


def _prints(text: Callable[[ShellState, list[str]], str | None]) -> Builtin:
    def command(self: ShellState, words: list[Text], line: int) -> Decision:
        if self.output is None:
            return YES
        found = text(self, [w.text for w in words if not w.text.startswith("-")])
        if found is None:
            raise Unknowable
        return _print(self, found + "\n")

    return command


def _dirname(self: ShellState, words: list[str]) -> str | None:
    if len(words) != 1 or (marked(words[0]) and "/" not in words[0]):
        return None
    folder, slash, _ = words[0].rstrip("/").rpartition("/")
    return folder or slash or "."


def _basename(self: ShellState, words: list[str]) -> str | None:
    name = words[0].rstrip("/").rsplit("/", 1)[-1] if words else ""
    if not words or len(words) > 2 or marked(name):
        return None
    return name.removesuffix(words[1]) if len(words) == 2 else name


def _realpath(self: ShellState, words: list[str]) -> str | None:
    if len(words) != 1 or ".." in words[0]:
        return None
    return _joined(self.folder, words[0])


def _date(self: ShellState, words: list[Text], line: int) -> Decision:
    if self.output is not None:
        self.note(
            line,
            "`$(date …)` becomes the text 'date': a configuration is the same for each run; set "
            "`name` to tell runs apart",
        )
    return _print(self, "date\n")


def _expr(self: ShellState, words: list[str]) -> str | None:
    try:
        return (
            None
            if marked(" ".join(words))
            else str(evaluate(" ".join(words), lambda name: 0, lambda name, value: None))
        )
    except ArithmeticProblem:
        return None


def _seq(self: ShellState, words: list[str]) -> str | None:
    if not 1 <= len(words) <= 2 or not all(re.fullmatch(r"-?\d{1,6}", w) for w in words):
        return None
    low, high = (1, int(words[0])) if len(words) == 1 else (int(words[0]), int(words[1]))
    return "\n".join(str(i) for i in range(low, min(high, low + 1000) + 1))


BUILTINS: dict[str, Builtin] = {
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "read": _lose,
    "mapfile": _lose,
    "readarray": _lose,
    "getopts": _lose,
    "let": _let,
    "source": _source,
    ".": _source,
    "exit": _exit,
    "return": _return,
    "break": _leave(False),
    "continue": _leave(True),
    "[": _bracket,
    "test": _bracket,
    "true": lambda self, words, line: YES,
    ":": lambda self, words, line: YES,
    "false": lambda self, words, line: NO,
    "echo": _echo,
    "printf": _printf,
    "cd": _cd,
    "pwd": _prints(lambda self, words: self.folder),
    "dirname": _prints(_dirname),
    "basename": _prints(_basename),
    "realpath": _prints(_realpath),
    "readlink": _prints(_realpath),
    "date": _date,
    "expr": _prints(_expr),
    "hostname": _prints(lambda self, words: env("HOSTNAME")),
    "whoami": _prints(lambda self, words: env("USER")),
    "seq": _prints(_seq),
}
