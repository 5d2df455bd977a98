"""Walks a script's commands as the shell would, keeping variables, and collects the veRL programs that it would start.

Nothing is executed; commands other than the shell's own count as succeeding.  Where the way cannot be told, one rule decides:
a condition is *assumed* when it holds because a variable that the script does not set counts as empty, and *open* when only running
could tell (files, other programs).  An assumed answer is followed, an open one counts as no (the `else` or `*)` branch is read); a branch
that only ends the script is not followed on either.  If no launch is found that way, the branch of an undecided condition that holds one
is read instead.  Every such choice is in the notes with its line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rft.convert import conditions, programs
from rft.convert.builtin import BUILTINS, Exit, Leave, Return, Unknowable
from rft.convert.conditions import OPEN, YES, Answer, Operand
from rft.convert.expand import Expander, Scope
from rft.convert.shell import parse
from rft.convert.syntax import (
    AndOr,
    ArithCommand,
    Assign,
    Case,
    Command,
    CommandSub,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Lit,
    Pipeline,
    Simple,
    Test,
    While,
    Word,
)
from rft.convert.values import PASSED, Array, Marks, Text, assumed_empty, env, marked, shown
from rft.errors import ConfigError
from rft.logs import is_secret_name

MAX_STEPS = 20_000
MAX_TURNS = 500
MAX_CALLS = 12


@dataclass(frozen=True)
class Started:
    """A program that the script starts: its arguments are still marked."""

    found: programs.Found
    words: tuple[Text, ...]
    line: int
    launcher: tuple[str, ...]  # the words before it: torchrun --nproc_per_node=8 -m


class Interpreter:
    """`started` and `notes` are the result of `script`."""

    def __init__(self, path: str, name: str, *, prefer_launch: bool = False) -> None:
        self.name = name
        self.marks = Marks(name)
        self.scope = Scope(path)
        self.expander = Expander(self.scope, self.marks, self.note, self.capture)
        self.prefer_launch = prefer_launch
        self.functions: dict[str, Command] = {}
        self.started: list[Started] = []
        self.others: list[Started] = []
        self.notes: dict[tuple[int, str], None] = {}
        self.locals: list[dict[str, Text | Array | None]] = []
        self.output: list[str] | None = None
        self.folder: str = env("PWD")
        self.steps = self.nesting = 0

    def script(self, commands: Sequence[Command]) -> None:
        try:
            self.all(commands)
        except (Exit, Return, Leave):
            return

    def note(self, line: int, text: str) -> None:
        self.notes.setdefault((line, text))

    # -- commands

    def all(self, commands: Sequence[Command]) -> Answer:
        answer = YES
        for command in commands:
            answer = self.one(command)
        return answer

    def one(self, command: Command) -> Answer:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ConfigError(
                f"{self.name}, line {command.line}: more than {MAX_STEPS:,} commands; write the launch without long loops"
            )
        return self._one(command)

    def _one(self, command: Command) -> Answer:
        match command:
            case Simple():
                return self.simple(command)
            case AndOr():
                return self.and_or(command)
            case Pipeline():
                return self.pipeline(command)
            case If():
                return self.if_(command)
            case Case():
                return self.case(command)
            case For():
                return self.for_(command)
            case CountingFor():
                return self.counting(command)
            case While():
                return self.while_(command)
            case Group():
                return self.apart(lambda: self.all(command.body)) if command.subshell else self.all(command.body)
            case Function():
                self.functions[command.name] = command.body
                return YES
            case Test():
                return conditions.decide([self.operand(i) if isinstance(i, Word) else i for i in command.items])
        return self.arithmetic(command)

    def operand(self, word: Word) -> Operand:
        return Operand(self.expander.string(word), self.expander.pattern(word))

    def arithmetic(self, command: ArithCommand) -> Answer:
        value = self.expander.arithmetic(command.body, command.line)
        return OPEN if marked(value) else Answer(value != "0")

    def apart(self, action: Callable[[], Answer]) -> Answer:
        """In a shell of its own: what it sets is gone afterwards."""
        kept = dict(self.scope.variables), list(self.scope.positional), self.scope.shifted, self.folder
        self.marks.work(20 * len(kept[0]), 0)
        self.scope.variables = {
            n: Array(dict(v.entries), v.named) if isinstance(v, Array) else v for n, v in self.scope.variables.items()
        }
        try:
            return action()
        except (Exit, Return, Leave):
            return YES
        finally:
            self.scope.variables, self.scope.positional, self.scope.shifted, self.folder = kept

    def pipeline(self, command: Pipeline) -> Answer:
        if self.output is not None and len(command.commands) > 1:
            raise Unknowable
        if len(command.commands) == 1:
            answer = self.one(command.commands[0])
        else:
            answers = [self.apart(lambda c=c: self.one(c)) for c in command.commands]  # type: ignore[misc]
            answer = answers[-1]
        return answer.negated() if command.negated else answer

    def and_or(self, command: AndOr) -> Answer:
        answer = self.one(command.first)
        for op, right in command.rest:
            take = (answer.value is True) == (op == "&&")
            if not (answer.assumed or answer.value is None):
                answer = self.one(right) if take else answer
                continue
            if take and self.ends([right]):
                answer = YES
                continue
            if not take and self.prefer_launch and self.launches([right]):
                take = True
            said = "is read" if take else "is left out"
            self.note(right.line, f"{_why(answer)}; what follows `{op}` {said}")
            answer = self.one(right) if take else YES
        return answer

    # -- branches

    def if_(self, command: If) -> Answer:
        undecided: list[tuple[int, Sequence[Command]]] = []
        reason = ""
        for number, (condition, body) in enumerate(command.clauses, 1):
            answer = self.all(condition)
            unsure = answer.assumed or answer.value is None
            reason = reason or (_why(answer) if unsure else "")
            if unsure:
                undecided.append((number, body))
            if answer.value and not (unsure and self.ends(body)):
                return self.branch(command, number, body, reason, undecided)
        return self.branch(command, 0, command.otherwise or (), reason, undecided)

    def branch(
        self, command: If, number: int, body: Sequence[Command], reason: str, undecided: list[tuple[int, Sequence[Command]]]
    ) -> Answer:
        if self.prefer_launch and not self.launches(body):
            number, body = next(((n, b) for n, b in undecided if self.launches(b)), (number, body))
        which = (
            f"branch {number} of {len(command.clauses)}" if number else "`else`" if command.otherwise else "none of its branches"
        )
        skipped_exit = not number and not command.otherwise and all(self.ends(b) for _, b in command.clauses)
        if not skipped_exit:
            self.note(command.line, f"{reason or 'decided by the values in the script'}; of this `if`, {which} is read")
        return self.all(body)

    def case(self, command: Case) -> Answer:
        text = self.expander.string(command.subject)
        plain = assumed_empty(text)
        unsure = plain is None or plain[1]
        chosen = None
        for number, (patterns, body) in enumerate(command.clauses, 1):
            default = any(p.literal() == "*" for p in patterns)
            if default or (not unsure and any(fnmatch.fnmatchcase(text, self.expander.pattern(p)) for p in patterns)):
                chosen = number, body
                break
        if unsure and chosen and self.ends(chosen[1]):
            chosen = None
        if unsure and self.prefer_launch and not (chosen and self.launches(chosen[1])):
            chosen = next(((n, b) for n, (_, b) in enumerate(command.clauses, 1) if self.launches(b)), chosen)
        which = f"branch {chosen[0]} of {len(command.clauses)}" if chosen else "none of its branches"
        reason = f"{shown(text, self.marks)!r} is not known" if unsure else f"it is {text!r}"
        self.note(command.line, f"{reason}; of this `case`, {which} is read")
        return self.all(chosen[1]) if chosen else YES

    def ends(self, commands: Sequence[Command], depth: int = 0) -> bool:
        """Whether these commands only end the script or function."""
        for command in commands:
            if isinstance(command, Group) and self.ends(command.body, depth):
                return True
            if isinstance(command, Simple) and command.words and isinstance(command.words[0], Word):
                name = command.words[0].literal()
                if name in ("exit", "return"):
                    return True
                if name in self.functions and depth < 3 and self.ends([self.functions[name]], depth + 1):
                    return True
        return False

    def launches(self, node: Any, depth: int = 0) -> bool:
        """Whether a program to convert is named in these commands or in a function that they call."""
        for text in _literals(node):
            if programs.mentions(text):
                return True
            if text in self.functions and depth < 3 and self.launches(self.functions[text], depth + 1):
                return True
        return False

    # -- loops

    def for_(self, command: For) -> Answer:
        words = (
            [f for w in command.words for f in self.expander.fields(w)] if command.words is not None else self.scope.positional
        )
        known = [w for w in words if w.text != PASSED]
        if any(self.marks.of(w.text) or re.search(r"[*?]", w.text) for w in known):
            if not self.prefer_launch:
                self.note(command.line, "what this loop goes over is not known; it is left out")
                return YES
            self.note(command.line, "what this loop goes over is not known; one turn is read")
            known = [Text(self.marks.new(f"${command.name}", "it is set by a loop", command.line), command.line)]
        return self.turns(command.line, command.body, (lambda w=w: self.set_turn(command, w) for w in known))  # type: ignore[misc]

    def set_turn(self, command: For, word: Text) -> bool:
        self.expander.set(command.name, word.text, command.line)
        return True

    def counting(self, command: CountingFor) -> Answer:
        self.expander.arithmetic(command.start, command.line)

        def goes_on() -> Iterator[Callable[[], bool]]:
            first = True
            while True:
                yield (lambda first=first: self.counts(command, first))  # type: ignore[misc]
                first = False

        return self.turns(command.line, command.body, goes_on())

    def counts(self, command: CountingFor, first: bool) -> bool:
        if not first:
            self.expander.arithmetic(command.update, command.line)
        value = self.expander.arithmetic(command.condition, command.line)
        return not marked(value) and value != "0"

    def while_(self, command: While) -> Answer:
        def test() -> bool:
            answer = self.all(command.condition)
            answer = answer.negated() if command.until else answer
            if answer.value is None or answer.assumed:
                if self.prefer_launch and self.launches(command.body):
                    self.note(command.line, f"{_why(answer)}; one turn of this loop is read")
                    return True
                if answer.value is None or answer.value:
                    self.note(command.line, f"{_why(answer)}; this loop is left out")
                return False
            return bool(answer.value)

        def forever() -> Iterator[Callable[[], bool]]:
            while True:
                yield test

        return self.turns(command.line, command.body, forever())

    def turns(self, line: int, body: Sequence[Command], tests: Iterator[Callable[[], bool]]) -> Answer:
        """Turns of a loop, until it starts a program: the later ones would start others."""
        before = len(self.started)
        for count, test in enumerate(tests):
            if count >= MAX_TURNS:
                self.note(line, f"this loop is read for {MAX_TURNS} turns only")
                break
            if len(self.started) > before:
                self.note(line, "this loop starts a run in each turn; the first turn is read")
                break
            if not test():
                break
            try:
                self.all(body)
            except Leave as leave:
                if leave.levels > 1:
                    leave.levels -= 1
                    raise
                if not leave.again:
                    break
        return YES

    # -- simple commands

    def simple(self, command: Simple) -> Answer:
        if not command.words:
            for assign in command.assigns:
                self.assign(assign)
            return YES
        first = command.words[0]
        if isinstance(first, Word) and first.literal() in ("export", "local", "declare", "typeset", "readonly"):
            return self.declare(command, str(first.literal()))
        words = [f for w in command.words if isinstance(w, Word) for f in self.expander.fields(w)]
        while len(words) > 1 and words[0].text in ("time", "command", "builtin", "nohup"):
            words = words[1:]
        if not words:
            for assign in command.assigns:
                self.assign(assign)
            return YES
        name = words[0].text
        if name in self.functions:
            return self.call(name, words[1:], command)
        builtin = BUILTINS.get(name)
        if builtin is not None:
            kept = [(a.name, self.expander.get(a.name)) for a in command.assigns]
            for assign in command.assigns:
                self.assign(assign)
            kept_output = self.output
            if any(r.op in (">", ">>", ">|", ">&", "&>", "&>>") for r in command.redirects):
                self.output = None  # goes to a file or to standard error
            answer = builtin(self, words[1:], command.line)
            self.output = kept_output
            for variable, value in kept:
                self.restore(variable, value)
            return answer
        return self.external(command, words)

    def restore(self, name: str, value: Text | Array | None) -> None:
        if value is None:
            self.scope.variables.pop(name, None)
        else:
            self.scope.variables[name] = value

    def assign(self, assign: Assign) -> None:
        expander, old = self.expander, self.expander.get(assign.name)
        if isinstance(assign.value, Word):
            key = expander.key(old if isinstance(old, Array) else None, assign.index) if assign.index else None
            text = expander.string(assign.value)
            if key is not None and (marked(key) or not (key.isdecimal() or (isinstance(old, Array) and old.named))):
                return self.lose(assign.name, assign.line)
            if assign.append:
                entries = old.entries if isinstance(old, Array) else {"0": old} if old else {}
                before = entries.get(key or "0")
                unset = env(assign.name) if old is None and key is None else ""
                text = (before.text if before else unset) + text
            expander.set(assign.name, text, assign.line, key)
            return None
        array = Array(named=isinstance(old, Array) and old.named)
        if assign.append and old is not None:
            array = old if isinstance(old, Array) else Array({"0": old})
        for element in assign.value:
            if element.key is not None:
                key = expander.key(array, element.key)
                if marked(key) or not (array.named or key.isdecimal()):
                    return self.lose(assign.name, assign.line)
                array.entries[key] = Text(expander.string(element.value), element.value.line)
                continue
            start = len(array.entries) if array.named else int(array.next_key())
            for at, one in enumerate(expander.fields(element.value), start):
                array.entries[str(at)] = one
            self.marks.work(10 * len(array.entries), assign.line)
        self.scope.variables[assign.name] = array
        return None

    def lose(self, name: str, line: int) -> None:
        """The variable is set to something that cannot be told."""
        self.scope.variables[name] = Text(
            self.marks.new(f"${name}", f"line {line} sets it to what only running tells", line), line
        )

    def declare(self, command: Simple, kind: str) -> Answer:
        flags = "".join(t for w in command.words[1:] if isinstance(w, Word) and (t := w.literal() or "").startswith("-"))
        for item in command.words[1:]:
            name = item.name if isinstance(item, Assign) else item.literal() or ""
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                continue
            if (kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)) and self.locals:
                self.locals[-1].setdefault(name, self.expander.get(name))
            if "A" in flags:
                self.scope.variables[name] = Array(named=True)
            elif kind == "local" and not isinstance(item, Assign):
                self.scope.variables[name] = Text("", command.line)
            if isinstance(item, Assign):
                self.assign(item)
            if kind == "export" or "x" in flags:
                self.exported(name, item.line)
        return YES

    def exported(self, name: str, line: int) -> None:
        value = self.expander.get(name)
        if isinstance(value, Text):
            self.note(
                line, f"sets {_environment(name, shown(value.text, self.marks))} for the run; a configuration does not carry it"
            )

    def call(self, name: str, words: list[Text], command: Simple) -> Answer:
        self.nesting += 1
        if self.nesting > MAX_CALLS:
            raise ConfigError(f"{self.name}, line {command.line}: {name} calls itself more than {MAX_CALLS} levels deep")
        kept = self.scope.positional, self.scope.shifted
        shifted = kept[1] if any(w.text == PASSED for w in words) else 0
        for assign in command.assigns:
            self.assign(assign)
        self.scope.positional, self.scope.shifted = words, shifted
        self.locals.append({})
        try:
            return self.one(self.functions[name])
        except Return:
            return OPEN
        finally:
            for variable, value in self.locals.pop().items():
                self.restore(variable, value)
            self.scope.positional, self.scope.shifted = kept
            self.nesting -= 1

    def inner_script(self, text: str, line: int, positional: list[Text] | None = None) -> Answer:
        """A script inside a word: eval, bash -c, ssh."""
        self.nesting += 1
        if self.nesting > MAX_CALLS:
            raise ConfigError(f"{self.name}, line {line}: scripts inside scripts, more than {MAX_CALLS} levels deep")
        self.marks.work(10 * len(text), line)
        commands = parse(text, self.name, line=line, depth=self.nesting, marked=True)
        try:
            if positional is None:
                return self.all(commands)

            def run() -> Answer:
                self.scope.positional = positional
                return self.all(commands)

            return self.apart(run)
        finally:
            self.nesting -= 1

    def external(self, command: Simple, words: list[Text]) -> Answer:
        texts = [w.text for w in words]
        if found := programs.find(texts):
            self.begin(command, found, words)
            return YES
        if self.output is not None:
            raise Unknowable
        base = texts[0].rsplit("/", 1)[-1]
        if base in programs.QUIET:
            return OPEN if base in ("grep", "pgrep", "which", "type", "ls", "test") else YES
        for i, text in enumerate(texts[1:], 1):
            after_c = re.fullmatch(r"-[a-z]*c", texts[i - 1]) and any(
                t.rsplit("/", 1)[-1] in programs.SHELLS for t in texts[: i - 1]
            )
            if after_c or (programs.mentions(text) and re.search(r"\s", text)):
                self.environment(command)
                return self.inner_script(text, words[i].line, words[i + 2 :] if after_c else [Text(PASSED, 0)])
        body = next((r.body for r in command.redirects if r.body is not None), None)
        if body is not None and (base in {*programs.SHELLS, "sbatch", "srun", "ssh"} or texts[-1] in ("bash", "sh", "-s")):
            return self.inner_script(self.expander.string(body), body.line, [])
        if re.fullmatch(r"(python[\d.]*|bash|sh)", base) and len(texts) > 1:
            rest = next((t for t in texts[1:] if not t.startswith("-")), texts[-1])
            self.note(words[0].line, f"`{base} … {shown(rest, self.marks)[:60]}` is another program; it is not read")
        return OPEN

    def environment(self, command: Simple) -> None:
        for assign in command.assigns:
            if isinstance(assign.value, Word):
                value = shown(self.expander.string(assign.value), self.marks)
                self.note(assign.line, f"sets {_environment(assign.name, value)} for the run; a configuration does not carry it")

    def begin(self, command: Simple, found: programs.Found, words: list[Text]) -> None:
        started = Started(found, tuple(words[found.start :]), words[0].line, tuple(w.text for w in words[: found.start]))
        self.marks.work(20 * len(words), command.line)
        if found.program is None:
            self.others.append(started)
            return
        if not self.started:
            self.environment(command)
            for word in words[: found.start]:
                if name := re.match(r"([A-Za-z_]\w*)=(.*)", word.text, re.DOTALL):
                    value = shown(name[2], self.marks)
                    self.note(word.line, f"sets {_environment(name[1], value)} for the run; a configuration does not carry it")
        self.started.append(started)

    # -- $(…)

    def capture(self, sub: CommandSub) -> str:
        """What a command prints, where that can be told; a mark otherwise."""
        kept, self.output = self.output, []
        try:
            self.nesting += 1
            if self.nesting > MAX_CALLS:
                raise ConfigError(f"{self.name}, line {sub.line}: commands inside commands, more than {MAX_CALLS} levels deep")
            self.apart(lambda: self.all(sub.body))
            return "".join(self.output).rstrip("\n")
        except Unknowable:
            return self.marks.new(sub.text, "only running it tells", sub.line)
        finally:
            self.output = kept
            self.nesting -= 1


def _why(answer: Answer) -> str:
    if answer.value is None:
        return "the condition cannot be told without running the script"
    return "the variable that the condition asks for is not set by the script and counts as empty"


def _environment(name: str, value: str) -> str:
    return f"{name}=<hidden>" if is_secret_name(name) and value else f"{name}={value[:80]}"


def _literals(node: Any) -> Iterator[str]:
    if isinstance(node, Lit):
        yield node.text
    elif isinstance(node, tuple | list):
        for one in node:
            yield from _literals(one)
    elif is_dataclass(node):
        for field in fields(node):
            yield from _literals(getattr(node, field.name))
