"""Runs tests that are code, in a sandbox, against functions that live in another.

The tests see stand-ins for the program's functions; what comes back from a call is plain data,
decoded here, so an `==` that always agrees, a patched `assert` helper or `exit(0)` stay with the
program.  Invariant: no line of the program is run in this process, and the verdict goes over
`channel`, which the program does not have.  What the program sent is decoded here and nowhere else.
"""

from __future__ import annotations

import ast
import builtins
import os
import socket
import traceback
from collections.abc import Iterator
from typing import Any

from rft.extras.sandbox import wire
from rft.worker.framing import BadMessage

NAME = "<tests>"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_DEFINITIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
)


class ProgramRaised(Exception):
    """The program's function raised; subclasses are also the exception of that name."""


class ProgramGone(ProgramRaised):
    """The program's process ended, or what it sent cannot be read."""


class Link:
    """The way to the program.  Once it is `gone` nothing passes, whatever the tests caught."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.gone = ""

    def ask(self, message: Any) -> dict[str, Any]:
        """The program's reply.  Raises ProgramRaised."""
        try:
            wire.send(self._sock, message, largest=wire.LARGEST_ORDER)
            reply = wire.receive(self._sock)
        except OSError:
            raise self.end("the program ended during the tests") from None
        except (BadMessage, MemoryError) as e:
            raise self.end(f"the program's answer cannot be read: {e or 'MemoryError'}") from None
        if not isinstance(reply, dict):
            raise self.end("the program's answer cannot be read")
        if "raised" in reply:
            raise _exception(reply["raised"], str(reply.get("message"))[:500])
        return reply

    def take(self, message: Any) -> Any:
        """The value in a reply."""
        try:
            value = wire.decode(message)
        except (BadMessage, MemoryError) as e:
            raise self.end(f"the program's answer cannot be read: {e or 'MemoryError'}") from None
        return Stand(self, value.id, value.kind) if isinstance(value, wire.Handle) else value

    def end(self, why: str) -> ProgramGone:
        self.gone = self.gone or why
        return ProgramGone(why)


class Stand:
    """Stands for a function or object of the program.  It can be called and asked for attributes;
    it equals only itself.
    """

    def __init__(self, link: Link, target: str | int, kind: str = "function") -> None:
        self.__dict__.update(_link=link, _target=target, _kind=kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = [
            "call",
            self._target,
            [_give(a) for a in args],
            {k: _give(v) for k, v in kwargs.items()},
        ]
        reply = self._link.ask(message)
        changed = reply.get("args")
        for mine, theirs in zip(args, changed if isinstance(changed, list) else (), strict=False):
            if theirs is not None:
                _update(mine, self._link.take(theirs))
        return self._link.take(reply.get("value"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.take(self._link.ask(["attr", self._target, name]).get("value"))

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"


def run_tests(order: dict[str, Any], channel: socket.socket, link: socket.socket) -> None:
    """Judges and sends {passed, total, reason, detail} or {broken: why the tests themselves cannot
    be run}: does not return.

    `suspect`: an error that wrong tests have, and that a program can cause with what it returns.
    """
    try:
        verdict = _judge(order, Link(link))
    except Exception as e:
        verdict = {"broken": _line(e)}
    wire.send(channel, verdict)
    os._exit(0)


def compare(order: dict[str, Any], channel: socket.socket, link: socket.socket) -> None:
    """Calls `function` with each case that comes, until `channel` closes, and sends {reason,
    detail} of it: does not return.

    A case is {args, wanted}; `reason` is empty where the function gave what was wanted.
    """
    through = Link(link)
    function = order["function"]
    target = None
    while True:
        try:
            case = wire.receive(channel, largest=wire.LARGEST_ORDER)
        except OSError:
            os._exit(0)
        try:
            target = target or _callable(through, function)
            got = target(*map(wire.decode, case["args"]))
            wanted = wire.decode(case["wanted"])
            right = wire.same(got, wanted) or (
                isinstance(wanted, list) and len(wanted) == 1 and wire.same(got, wanted[0])
            )
            said = {
                "reason": "" if right else "wrong_answer",
                "detail": "" if right else f"{function} gave {wire.short(got)}",
            }
        except ProgramRaised as e:
            said = {"reason": "gone" if through.gone else "error", "detail": str(e)}
        except Exception as e:  # made of what the program sent: nothing else is run here
            said = {"reason": "error", "detail": f"its result cannot be compared: {_line(e)}"}
        wire.send(channel, said)


def _callable(link: Link, function: str) -> Any:
    """The function, or that method of a `Solution`."""
    try:
        solution = Stand(link, "Solution")()
    except ProgramGone:
        raise
    except ProgramRaised:
        return Stand(link, function)
    method = getattr(solution, function) if isinstance(solution, Stand) else None
    return method if isinstance(method, Stand) else Stand(link, function)


def _judge(order: dict[str, Any], link: Link) -> dict[str, Any]:
    tests = order["tests"]
    entry = order["entry_point"]
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    _run_prompt(order["prompt"], names)
    for name in unknown(tests, names) | unknown([entry], {}):
        names[name] = Stand(link, name)
    if entry:
        names[entry] = names["candidate"] = Stand(link, entry)
    passed = 0
    first = {"reason": "passed", "detail": ""}
    for test in tests:
        failure = _one(test, names, entry)
        if failure is None and link.gone:
            failure = {"reason": "gone", "detail": link.gone}
        if failure is None:
            passed += 1
        elif "broken" in failure:
            return failure
        elif first["reason"] == "passed":
            first = failure
        if failure is not None and not order["all"]:
            break
    if (
        passed == len(tests)
        and not (entry and any("check" in test for test in tests))
        and _only_define(tests)
    ):
        return {
            "broken": "they only define functions or classes; write asserts, or `check` and an "
            "entry_point"
        }
    return {"passed": passed, "total": len(tests), **first}


def _run_prompt(prompt: str, names: dict[str, Any]) -> None:
    """Helpers that stand in the question are the question's, whatever the program makes of them."""
    try:
        code = compile(prompt, "<prompt>", "exec")
    except SyntaxError:
        return  # a question in words
    exec(code, names)  # noqa: S102


def _one(test: str, names: dict[str, Any], entry: str) -> dict[str, Any] | None:
    """None if the test passed."""
    had = names.pop("check", None)
    try:
        code = compile(test, NAME, "exec")
    except SyntaxError as e:
        return {"broken": _line(e)}
    try:
        exec(code, names)  # noqa: S102
        if entry and callable(names.get("check")):
            exec(f"check({entry})", names)  # noqa: S102  also of Solution().name
    except ProgramRaised as e:
        return {"reason": "gone" if isinstance(e, ProgramGone) else "error", "detail": _line(e)}
    except BaseException as e:
        where = _where(e, test)
        # which no program can cause
        if isinstance(e, ImportError) and where.startswith(("import ", "from ")):
            return {"broken": _line(e)}
        failure = {"reason": "wrong_answer", "detail": f"{where}: {_line(e)}"[:500]}
        return failure | (
            {"suspect": _line(e)} if isinstance(e, NameError | ImportError | SyntaxError) else {}
        )
    finally:
        if had is not None:
            names.setdefault("check", had)
    return None


def _only_define(tests: list[str]) -> bool:
    """Whether nothing is run that a program could fail at."""
    nodes = [n for test in tests for n in ast.parse(test).body]
    idle = [
        isinstance(n, _DEFINITIONS)
        or isinstance(n.value if isinstance(n, ast.Expr) else n, ast.Constant | ast.Name)
        for n in nodes
    ]
    return all(i or "Name(id='__name__'" in ast.dump(n) for i, n in zip(idle, nodes, strict=True))


def unknown(tests: list[str], names: dict[str, Any]) -> set[str]:
    """Names that the tests read before they bind them, and that neither Python nor the question
    has.
    """
    read: set[str] = set()
    for test in tests:
        try:
            tree = ast.parse(test)
        except SyntaxError:
            continue  # said when it is run
        bound: set[str] = set()
        for name, binds in _names(tree):
            if binds:
                bound.add(name)
            elif name not in bound:
                read.add(name)
    return read - set(names) - set(dir(builtins))


def _names(node: ast.AST, inner: bool = False) -> Iterator[tuple[str, bool]]:
    """Names in the order in which they are evaluated, and whether each is bound there; bindings of
    inner scopes are none.
    """
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Store) and not inner
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.For):
        children.sort(
            key=lambda child: child is not (node.iter if isinstance(node, ast.For) else node.value)
        )
    for child in children:
        yield from _names(child, inner or isinstance(node, _SCOPES))


def _exception(mro: Any, message: str) -> ProgramRaised:
    """Of the nearest of Python's own exceptions, so that tests may expect a ValueError."""
    for name in mro if isinstance(mro, list) else ():
        own = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(own, type) and issubclass(own, Exception) and own is not Exception:
            try:
                return type(own.__name__, (ProgramRaised, own), {"__str__": lambda _: message})()  # type: ignore[no-any-return]
            except TypeError:
                break  # one that wants arguments
    return ProgramRaised(message)


def _give(value: Any) -> Any:
    return wire.encode(value, _refer)


def _refer(value: Any) -> Any:
    if isinstance(value, Stand):
        known = isinstance(value._target, int)
        return (
            ["h", value._target, "object"]
            if known
            else value._link.ask(["get", value._target]).get("value")
        )
    if isinstance(value, wire.Handle):
        return ["h", value.id, value.kind]
    raise NameError(f"tests can hand over plain data only, not {type(value).__name__}")


def _update(mine: Any, changed: Any) -> None:
    """A function may change the list, mapping or set that it is given."""
    if type(changed) is type(mine) and changed != mine and isinstance(mine, list | dict | set):
        mine.clear()
        mine.extend(changed) if isinstance(mine, list) else mine.update(changed)


def _where(e: BaseException, test: str) -> str:
    lines = test.splitlines()
    numbers = [f.lineno or 0 for f in traceback.extract_tb(e.__traceback__) if f.filename == NAME]
    return (
        lines[numbers[-1] - 1].strip()[:200]
        if numbers and 0 < numbers[-1] <= len(lines)
        else "the tests"
    )


def _line(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"[:500]
