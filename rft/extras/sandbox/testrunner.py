"""Run tests in code in one sandbox against functions in another sandbox.

The tests see stand-ins for the program's functions.  Results are plain data decoded here, so an
always-true `==`, a patched `assert` helper or `exit(0)` affect only the program's process.
Invariant: no line of the program runs in this process, and the verdict is sent on `channel`, which
the program does not have.  The program's data is decoded only here.
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
    """The program's function raised; subclasses also derive from the exception of that name."""


class ProgramGone(ProgramRaised):
    """The program's process ended, or its message cannot be read."""


class Link:
    """The connection to the program.  After `closed_reason` is set, no test can pass, whatever the
    tests catch.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.closed_reason = ""

    def ask(self, message: Any) -> dict[str, Any]:
        """Return the program's reply.  Raises ProgramRaised."""
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
        """Return the value in a reply."""
        try:
            value = wire.decode(message)
        except (BadMessage, MemoryError) as e:
            raise self.end(f"the program's answer cannot be read: {e or 'MemoryError'}") from None
        return Stand(self, value.id, value.kind) if isinstance(value, wire.Handle) else value

    def end(self, reason: str) -> ProgramGone:
        self.closed_reason = self.closed_reason or reason
        return ProgramGone(reason)


class Stand:
    """Stand-in for a function or object of the program.  It supports calls and attributes; it
    equals only itself.
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
        for argument, theirs in zip(
            args, changed if isinstance(changed, list) else (), strict=False
        ):
            if theirs is not None:
                _update(argument, self._link.take(theirs))
        return self._link.take(reply.get("value"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.take(self._link.ask(["attr", self._target, name]).get("value"))

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"


def run_tests(order: dict[str, Any], channel: socket.socket, link: socket.socket) -> None:
    """Judge and send {passed, total, reason, detail}, or {broken: reason why the tests cannot run};
    does not return.

    `suspect`: an error typical of wrong tests that a program can also cause by its results.
    """
    try:
        verdict = _judge(order, Link(link))
    except Exception as e:
        verdict = {"broken": _line(e)}
    wire.send(channel, verdict)
    os._exit(0)


def compare(order: dict[str, Any], channel: socket.socket, link: socket.socket) -> None:
    """Call `function` for each received case until `channel` closes, and send {reason, detail};
    does not return.

    A case is {args, wanted}; empty `reason`: the result equals `wanted`.
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
            expected = wire.decode(case["wanted"])
            right = wire.same(got, expected) or (
                isinstance(expected, list) and len(expected) == 1 and wire.same(got, expected[0])
            )
            verdict = {
                "reason": "" if right else "wrong_answer",
                "detail": "" if right else f"{function} gave {wire.short(got)}",
            }
        except ProgramRaised as e:
            verdict = {"reason": "gone" if through.closed_reason else "error", "detail": str(e)}
        except Exception as e:  # caused by the program's data: nothing else runs here
            verdict = {"reason": "error", "detail": f"its result cannot be compared: {_line(e)}"}
        wire.send(channel, verdict)


def _callable(link: Link, function: str) -> Any:
    """Return the stand-in of the function, or of that method of a `Solution`."""
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
        failure = _run_test(test, names, entry)
        if failure is None and link.closed_reason:
            failure = {"reason": "gone", "detail": link.closed_reason}
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
    """Run the prompt's code, so that tests use its helpers rather than the program's versions."""
    try:
        code = compile(prompt, "<prompt>", "exec")
    except SyntaxError:
        return  # the question is not code
    exec(code, names)  # noqa: S102


def _run_test(test: str, names: dict[str, Any], entry: str) -> dict[str, Any] | None:
    """Run one test; None if it passed."""
    had = names.pop("check", None)
    try:
        code = compile(test, NAME, "exec")
    except SyntaxError as e:
        return {"broken": _line(e)}
    try:
        exec(code, names)  # noqa: S102
        if entry and callable(names.get("check")):
            exec(f"check({entry})", names)  # noqa: S102  # also for Solution().name
    except ProgramRaised as e:
        return {"reason": "gone" if isinstance(e, ProgramGone) else "error", "detail": _line(e)}
    except BaseException as e:
        where = _where(e, test)
        # no program can cause this error
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
    """Return whether the tests run nothing that a program could fail."""
    nodes = [n for test in tests for n in ast.parse(test).body]
    idle = [
        isinstance(n, _DEFINITIONS)
        or isinstance(n.value if isinstance(n, ast.Expr) else n, ast.Constant | ast.Name)
        for n in nodes
    ]
    return all(i or "Name(id='__name__'" in ast.dump(n) for i, n in zip(idle, nodes, strict=True))


def unknown(tests: list[str], names: dict[str, Any]) -> set[str]:
    """Return names that the tests read before binding them, and that neither Python nor the
    question defines.
    """
    read: set[str] = set()
    for test in tests:
        try:
            tree = ast.parse(test)
        except SyntaxError:
            continue  # reported when the test runs
        bound: set[str] = set()
        for name, binds in _names(tree):
            if binds:
                bound.add(name)
            elif name not in bound:
                read.add(name)
    return read - set(names) - set(dir(builtins))


def _names(node: ast.AST, inner: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield names in evaluation order, and whether each is bound there; bindings of inner scopes do
    not count.
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
    """Return an exception derived from the nearest built-in one, so that tests may expect a
    ValueError.
    """
    for name in mro if isinstance(mro, list) else ():
        base = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(base, type) and issubclass(base, Exception) and base is not Exception:
            try:
                return type(base.__name__, (ProgramRaised, base), {"__str__": lambda _: message})()  # type: ignore[no-any-return]
            except TypeError:
                break  # the base requires arguments
    return ProgramRaised(message)


def _give(value: Any) -> Any:
    return wire.encode(value, _refer)


def _refer(value: Any) -> Any:
    if isinstance(value, Stand):
        is_reference = isinstance(value._target, int)
        return (
            ["h", value._target, "object"]
            if is_reference
            else value._link.ask(["get", value._target]).get("value")
        )
    if isinstance(value, wire.Handle):
        return ["h", value.id, value.kind]
    raise NameError(f"tests can hand over plain data only, not {type(value).__name__}")


def _update(original: Any, changed: Any) -> None:
    """Apply the program's change of a list, mapping or set argument."""
    if (
        type(changed) is type(original)
        and changed != original
        and isinstance(original, list | dict | set)
    ):
        original.clear()
        original.extend(changed) if isinstance(original, list) else original.update(changed)


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
