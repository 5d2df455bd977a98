"""Walks a script's commands as the shell would, keeping variables, and collects the veRL programs
that it would start.

Nothing is executed; commands other than the shell's own count as succeeding.  Where the way cannot
be told, one rule decides: a condition is *assumed* when it holds because a variable that the script
does not set counts as empty, and *open* when only running could tell (files, other programs).  An
assumed answer is followed, an open one counts as no (the `else` or `*)` branch is read); a branch
that only ends the script is not followed on either.  If no launch is found that way, the branch of
an undecided condition that holds one is read instead.  Every such choice is in the notes with its
line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from rft.errors import ConfigError
from rft.extras.migrate.convert import conditions, programs, syntax
from rft.extras.migrate.convert.conditions import OPEN, YES, Decision, Operand
from rft.extras.migrate.convert.shell import DECLARING, parse
from rft.extras.migrate.convert.shell_state import (
    BUILTINS,
    Exit,
    Leave,
    Return,
    ShellState,
    Unknowable,
)
from rft.extras.migrate.convert.syntax import Command, Lit, SimpleCommand, Word
from rft.extras.migrate.convert.values import PASSED, Text, assumed_empty, shown

_DOTTED = re.compile(r"\+{0,2}[a-z_]+(\.\w+)+=")  # key=value, as only a launch has it
MAX_STEPS = 20_000
MAX_TURNS = 500
MAX_LOOK = 3  # how deep functions are followed to see what they would do


@dataclass(frozen=True)
class StartedProgram:
    """A program that the script starts: its arguments are still marked."""

    found: programs.ProgramMatch
    words: tuple[Text, ...]
    line: int
    launcher: tuple[str, ...]  # the words before it: torchrun --nproc_per_node=8 -m


class Interpreter(ShellState):
    """`started`, `others` and `notes` are the result of `script`; `prefer_launch` walks the
    undecided branch that starts a program.
    """

    def __init__(self, path: str, name: str, *, prefer_launch: bool = False) -> None:
        super().__init__(path, name, self.capture)
        self.prefer_launch = prefer_launch
        self.started: list[StartedProgram] = []
        self.others: list[StartedProgram] = []
        self.steps = 0

    def script(self, commands: Sequence[Command]) -> None:
        try:
            self.all(commands)
        except (Exit, Return, Leave):
            return

    def all(self, commands: Sequence[Command]) -> Decision:
        answer = YES
        for command in commands:
            answer = self.one(command)
        return answer

    def one(self, command: Command) -> Decision:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ConfigError(
                f"{self.name}, line {command.line}: more than {MAX_STEPS:,} commands; write it "
                f"without long loops"
            )
        match command:
            case SimpleCommand():
                return self.simple(command)
            case syntax.AndOr():
                return self.and_or(command)
            case syntax.Pipeline():
                return self.pipeline(command)
            case syntax.IfCommand():
                return self.if_(command)
            case syntax.CaseCommand():
                return self.case(command)
            case syntax.ForCommand():
                return self.for_(command)
            case syntax.WhileCommand():
                return self.while_(command)
            case syntax.GroupCommand():
                return (
                    self.apart(lambda: self.all(command.body))
                    if command.subshell
                    else self.all(command.body)
                )
            case syntax.FunctionCommand():
                self.functions[command.name] = command.body
                return YES
            case syntax.TestCommand():
                return conditions.decide(
                    [self.operand(i) if isinstance(i, Word) else i for i in command.items]
                )

    def operand(self, word: Word) -> Operand:
        return Operand(self.expander.string(word), self.expander.pattern(word))

    # -- which way

    def pipeline(self, command: syntax.Pipeline) -> Decision:
        if len(command.commands) == 1:
            answer = self.one(command.commands[0])
        elif self.output is not None:
            raise Unknowable
        else:
            for part in command.commands:
                answer = self.apart(lambda part=part: self.one(part))  # type: ignore[misc]
        return answer.negated() if command.negated else answer

    def and_or(self, command: syntax.AndOr) -> Decision:
        answer = self.one(command.first)
        for op, right in command.rest:
            take = (answer.value is True) == (op == "&&")
            if not answer.unsure:
                answer = self.one(right) if take else answer
                continue
            if take and _ends([right], self.functions):
                answer = YES
                continue
            take = take or (self.prefer_launch and _launches([right], self.functions))
            said = "is read" if take else "is left out"
            self.note(right.line, f"{answer.why}; what follows `{op}` {said}")
            if take:
                answer = (conditions.both if op == "&&" else conditions.either)(
                    answer, self.one(right)
                )
        return answer

    def if_(self, command: syntax.IfCommand) -> Decision:
        reason = ""
        undecided = list[tuple[int, Sequence[Command]]]()
        chosen: tuple[int, Sequence[Command]] = 0, command.otherwise
        for number, (condition, body) in enumerate(command.clauses, 1):
            answer = self.all(condition)
            # the way that the values take starts nothing
            unsure = answer.unsure or self.prefer_launch
            if unsure:
                reason = reason or (
                    answer.why
                    if answer.unsure
                    else "nothing is started where the values of the script lead"
                )
                undecided.append((number, body))
            if answer.value and not (unsure and _ends(body, self.functions)):
                chosen = number, body
                break
        number, commands = self.preferred(chosen, undecided)
        which = "`else`" if command.otherwise else "none of its branches"
        if number:
            which = f"branch {number} of {len(command.clauses)}"
        if (
            number
            or command.otherwise
            or self.prefer_launch
            or not all(_ends(b, self.functions) for _, b in command.clauses)
        ):
            self.note(
                command.line,
                f"{reason or 'decided by the values in the script'}; of this `if`, {which} is read",
            )
        return self.all(commands)

    def preferred(
        self,
        chosen: tuple[int, Sequence[Command]],
        undecided: Sequence[tuple[int, Sequence[Command]]],
    ) -> tuple[int, Sequence[Command]]:
        """(number, commands) of the branch that is read: `chosen`, or one of `undecided` that
        starts a program.
        """
        if not self.prefer_launch or _launches(chosen[1], self.functions):
            return chosen
        return next(
            (branch for branch in undecided if _launches(branch[1], self.functions)), chosen
        )

    def case(self, command: syntax.CaseCommand) -> Decision:
        text = self.expander.string(command.subject)
        plain = assumed_empty(text)
        unsure = plain is None or plain[1]
        branches: list[tuple[int, Sequence[Command]]] = []
        chosen: tuple[int, Sequence[Command]] = 0, ()
        for number, (patterns, body) in enumerate(command.clauses, 1):
            branches.append((number, body))
            default = any(p.literal() == "*" for p in patterns)
            fits = default or (
                not unsure
                and any(fnmatch.fnmatchcase(text, self.expander.pattern(p)) for p in patterns)
            )
            if fits and not chosen[0]:
                chosen = number, body
        if unsure:
            chosen = self.preferred(
                (0, ()) if _ends(chosen[1], self.functions) else chosen, branches
            )
        which = (
            f"branch {chosen[0]} of {len(command.clauses)}" if chosen[0] else "none of its branches"
        )
        reason = f"{shown(text, self.marks)!r} is not known" if unsure else f"it is {text!r}"
        self.note(command.line, f"{reason}; of this `case`, {which} is read")
        return self.all(chosen[1])

    # -- loops

    def for_(self, command: syntax.ForCommand) -> Decision:
        words = self.scope.positional
        if command.words is not None:
            words = [f for w in command.words for f in self.expander.fields(w)]
        known = [w for w in words if w.text != PASSED]
        if any(self.marks.of(w.text) or re.search(r"[*?]", w.text) for w in known):
            if not self.prefer_launch:
                self.note(command.line, "what this loop goes over is not known; it is left out")
                return YES
            self.note(command.line, "what this loop goes over is not known; one turn is read")
            known = [
                Text(
                    self.marks.new(f"${command.name}", "it is set by a loop", command.line),
                    command.line,
                )
            ]

        def set_turn(number: int) -> bool:
            self.expander.set(command.name, known[number].text, command.line)
            return True

        return self.turns(command, set_turn, len(known))

    def while_(self, command: syntax.WhileCommand) -> Decision:
        def holds(number: int) -> bool:
            if number:
                self.all(command.update)
            answer = self.all(command.condition)
            answer = answer.negated() if command.until else answer
            if answer.unsure and self.prefer_launch and _launches(command.body, self.functions):
                self.note(command.line, f"{answer.why}; one turn of this loop is read")
                return True
            if answer.unsure and answer.value is not False:
                self.note(command.line, f"{answer.why}; this loop is left out")
            return answer.value is True and not answer.unsure

        return self.turns(command, holds)

    def turns(
        self,
        command: syntax.ForCommand | syntax.WhileCommand,
        goes_on: Callable[[int], bool],
        most: int = MAX_TURNS + 1,
    ) -> Decision:
        """Turns of a loop, until it starts a program: the later ones would start others."""
        before = len(self.started)
        for number in range(most):
            if number >= MAX_TURNS:
                self.note(command.line, f"this loop is read for {MAX_TURNS} turns only")
                break
            if len(self.started) > before:
                self.note(
                    command.line, "this loop starts a run in each turn; the first turn is read"
                )
                break
            if not goes_on(number):
                break
            try:
                self.all(command.body)
            except Leave as leave:
                if leave.levels > 1:
                    leave.levels -= 1
                    raise
                if not leave.again:
                    break
        return YES

    # -- simple commands

    def simple(self, command: SimpleCommand) -> Decision:
        if (
            command.words
            and isinstance(first := command.words[0], Word)
            and (kind := first.literal()) in DECLARING
        ):
            return self.declare(command, str(kind))
        words = [f for w in command.words if isinstance(w, Word) for f in self.expander.fields(w)]
        while len(words) > 1 and words[0].text in ("time", "command", "builtin", "nohup"):
            words = words[1:]
        if not words:
            return self.assign_all(command)
        name = words[0].text
        if name in self.functions:
            return self.call(name, words[1:], command)
        if name != "eval" and name not in BUILTINS:
            return self.external(command, words)
        kept = [(a.name, self.expander.get(a.name)) for a in command.assigns]
        kept_output = self.output
        self.assign_all(command)
        if any(r.op in (">", ">>", ">|", ">&", "&>", "&>>") for r in command.redirects):
            self.output = None  # goes to a file or to standard error
        if name == "eval":
            answer = self.inner_script(
                " ".join(w.text for w in words[1:]), words[1].line if words[1:] else command.line
            )
        else:
            answer = BUILTINS[name](self, words[1:], command.line)
        self.output = kept_output
        for variable, value in kept:
            self.restore(variable, value)
        return answer

    def call(self, name: str, words: list[Text], command: SimpleCommand) -> Decision:
        kept = self.scope.positional, self.scope.shifted
        shifted = kept[1] if any(w.text == PASSED for w in words) else 0
        with self.nested(command.line, f"{name} calls itself"):
            self.assign_all(command)
            self.scope.positional = words
            self.scope.shifted = shifted
            self.locals.append({})
            try:
                return self.one(self.functions[name])
            except Return:
                return OPEN
            finally:
                for variable, value in self.locals.pop().items():
                    self.restore(variable, value)
                self.scope.positional, self.scope.shifted = kept

    def inner_script(self, text: str, line: int, positional: list[Text] | None = None) -> Decision:
        """A script that is the text of a word: eval; with `positional`, in a shell of its own: bash
        -c, ssh.
        """

        def run() -> Decision:
            self.scope.positional = positional or []
            return self.all(commands)

        with self.nested(line, "scripts inside scripts,"):
            self.marks.work(10 * len(text), line)
            commands = parse(text, self.name, line=line, marked=True)
            return self.all(commands) if positional is None else self.apart(run)

    def external(self, command: SimpleCommand, words: list[Text]) -> Decision:
        texts = [w.text for w in words]
        if found := programs.find(texts):
            self.begin(command, found, words)
            return YES
        if self.started and _DOTTED.match(texts[0]):
            self.go_on(words)
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
                self.environment(command, [])
                return self.inner_script(
                    text, words[i].line, words[i + 2 :] if after_c else [Text(PASSED, 0)]
                )
        body = next((r.body for r in command.redirects if r.body is not None), None)
        if body is not None and (
            base in {*programs.SHELLS, "sbatch", "srun", "ssh"} or texts[-1] in ("bash", "sh", "-s")
        ):
            return self.inner_script(self.expander.string(body), body.line, [])
        if re.fullmatch(r"(python[\d.]*|bash|sh)", base) and len(texts) > 1:
            rest = next((t for t in texts[1:] if not t.startswith("-")), texts[-1])
            self.note(
                words[0].line,
                f"`{base} … {shown(rest, self.marks)[:60]}` is another program; it is not read",
            )
        return OPEN

    def begin(
        self, command: SimpleCommand, found: programs.ProgramMatch, words: list[Text]
    ) -> None:
        before = words[: found.start]
        after = words[found.start :]
        self.marks.work(20 * len(words), command.line)
        if found.program is not None and not self.started:
            self.environment(command, before)
        into = self.others if found.program is None else self.started
        into.append(
            StartedProgram(found, tuple(after), words[0].line, tuple(w.text for w in before))
        )

    def go_on(self, words: list[Text]) -> None:
        """Arguments that became a command because the backslash before them does not end its line."""
        last = self.started[-1]
        self.note(
            words[0].line,
            "no backslash ends the line before; what follows is read as arguments of the launch "
            "anyway",
        )
        self.started[-1] = replace(last, words=(*last.words, *words))

    def capture(self, sub: syntax.CommandSub) -> str:
        """What `$(…)` prints, where that can be told; a mark otherwise."""
        kept = self.output
        self.output = []
        try:
            with self.nested(sub.line, "commands inside commands,"):
                self.apart(lambda: self.all(sub.body))
            return "".join(self.output).rstrip("\n")
        except Unknowable:
            return self.marks.new(sub.text, "only running it tells", sub.line)
        finally:
            self.output = kept


# -- what commands would do if they were walked


def _ends(commands: Sequence[Command], functions: Mapping[str, Command], depth: int = 0) -> bool:
    """Whether these commands only end the script or function."""
    for command in commands:
        if isinstance(command, syntax.GroupCommand) and _ends(command.body, functions, depth):
            return True
        if (
            isinstance(command, SimpleCommand)
            and command.words
            and isinstance(command.words[0], Word)
        ):
            name = command.words[0].literal()
            if name in ("exit", "return"):
                return True
            if (
                name
                and name in functions
                and depth < MAX_LOOK
                and _ends([functions[name]], functions, depth + 1)
            ):
                return True
    return False


def _launches(node: Any, functions: Mapping[str, Command], depth: int = 0) -> bool:
    """Whether a program to convert is named in these commands or in a function that they call."""
    for text in _literals(node):
        if programs.mentions(text):
            return True
        if (
            text in functions
            and depth < MAX_LOOK
            and _launches(functions[text], functions, depth + 1)
        ):
            return True
    return False


def _literals(node: Any) -> Iterator[str]:
    if isinstance(node, Lit):
        yield node.text
    elif isinstance(node, tuple | list):
        for one in node:
            yield from _literals(one)
    elif is_dataclass(node):
        for field in fields(node):
            yield from _literals(getattr(node, field.name))
