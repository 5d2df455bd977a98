"""Code inside a sandbox: a program that reads stdin and writes stdout, or whose functions are
called over a socket.

The program may control this process completely: its messages are values of its functions, never a
verdict, and no expected result is ever sent here.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import socket
import sys
import threading
import traceback
import types
from typing import Any

from rft.extras.sandbox import wire

NAME = "<program>"


def run(program: str) -> None:
    """Run the text like `python program`; does not return."""
    module = _module("__main__")
    status = 0
    try:
        exec(compile(program, NAME, "exec"), module.__dict__)  # noqa: S102  # a sandbox's purpose
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if status == 1 and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc(limit=-3)
        status = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status & 0xFF)


def serve(program: str, channel: socket.socket, link: socket.socket) -> None:
    """Load the program, report on `channel`, then answer calls on `link` until it closes; does not
    return.
    """
    module = _module("solution")
    try:
        exec(compile(program, NAME, "exec"), module.__dict__)  # noqa: S102
    except BaseException as e:
        wire.send(channel, {"error": _error_text(e)})
        os._exit(0)
    wire.send(channel, {"loaded": True})
    objects: list[Any] = []
    while True:
        try:
            order = wire.receive(link, largest=wire.LARGEST_ORDER)
        except OSError:
            os._exit(0)
        _answer(link, order, module.__dict__, objects)


def _answer(link: socket.socket, order: Any, names: dict[str, Any], objects: list[Any]) -> None:
    def hold(value: Any) -> Any:
        objects.append(value)
        return ["h", len(objects) - 1, type(value).__name__]

    def decoded(message: Any) -> Any:
        value = wire.decode(message)
        return objects[value.id] if isinstance(value, wire.Handle) else value

    try:
        verb = order[0]
        target = order[1]
        if isinstance(target, str) and target not in names:
            raise NameError(f"name {target!r} is not defined")
        thing = names[target] if isinstance(target, str) else objects[target]
        if verb == "get":
            reply = {"value": wire.encode(thing, hold)}
        elif verb == "attr":
            reply = {"value": wire.encode(getattr(thing, order[2]), hold)}
        else:
            args = [decoded(a) for a in order[2]]
            value = wire.encode(thing(*args, **{k: decoded(v) for k, v in order[3].items()}), hold)
            reply = {
                "value": value,
                "args": [
                    wire.encode(a, hold) if isinstance(a, list | dict | set) else None for a in args
                ],
            }
        wire.send(link, reply)
    except OSError:
        os._exit(0)
    except BaseException as e:
        wire.send(
            link, {"raised": [c.__name__ for c in type(e).__mro__], "message": _error_text(e)}
        )


def _error_text(e: BaseException) -> str:
    try:
        return f"{type(e).__name__}: {e}"[:500]
    except Exception:  # the error's own __str__ fails
        return type(e).__name__


def _module(name: str) -> types.ModuleType:
    # defined by Python's module site, which the sandbox skips
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.argv, sys.modules[name] = [name], types.ModuleType(name)
    return sys.modules[name]
