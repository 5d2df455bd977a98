"""The program `rft`: import the file of the requested command, turn errors into messages and exit
codes.

Invariant: user errors and failed runs end with a message and their exit code, without a traceback;
any other error is a bug and ends with a traceback (exit code 4).
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rft import __version__
from rft.cli.commands import all_commands
from rft.errors import (
    ConfigError,
    DiskFull,
    Interrupted,
    PluginStopped,
    RayFailed,
    RftError,
    RunFailed,
    is_ours,
)
from rft.files.disk import full, is_full
from rft.plugins import load_entry
from rft.secrets import learn_environment, redact, safe
from rft.worker.blocked import name_what_blocks

_OF_THE_MACHINE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}
EXIT_CODES = "Exit codes: 0 done, 2 configuration, 3 environment, 4 run failed, 130 interrupted."


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    words = arguments
    if "_RFT_COMPLETE" in os.environ and "COMP_WORDS" in os.environ:
        words = os.environ["COMP_WORDS"].split()[1:]
    _prepare_process()
    over = name_what_blocks(
        lambda text: print(f"rft: {text}", file=sys.stderr, flush=True), _end_check
    )
    try:
        command = next((w for w in words if not w.startswith("-")), "")
        make(command)(args=arguments, prog_name="rft")
    except SystemExit as e:
        if (frame := _of_a_plugin(e)) is not None:
            _tell(
                f"RunFailed: {frame} called sys.exit({e.code!r}); a plugin must not end the program"
            )
            sys.exit(4)
        raise
    except RftError as e:
        if debug:
            traceback.print_exc()
        errors = e.errors if isinstance(e, ConfigError) else ()
        lines = [f"error    {error}" for error in errors] or [f"{type(e).__name__}: {e}"]
        _tell("\n".join(lines))
        if isinstance(e, Interrupted | RayFailed):
            # parts are closed by now; Ray's exit handlers would wait for an answer of Ray
            sys.stdout.flush()
            os._exit(e.exit_code)
        sys.exit(e.exit_code)
    except PluginStopped as e:
        _tell(f"RunFailed: {e}; a plugin must not end the program")
        sys.exit(4)
    except BrokenPipeError:
        _drop_output()  # its reader (head, less) has ended
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as e:
        sys.exit(_report_unexpected(e, debug))
    finally:
        over.set()


def _prepare_process() -> None:
    _open_streams()
    _refuse_exits_of_plugins()
    # progress bars are for people; a bar blocks forever if its reader has ended
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        Path.cwd()
    except OSError as e:
        _tell(
            f"error    the current folder cannot be used: {e.strerror}; change into one that "
            f"is there"
        )
        sys.exit(2)


def _report_unexpected(error: BaseException, debug: bool) -> int:
    """Print an error that is not an RftError, and return the exit code."""
    if is_full(error):
        _drop_output()
        _tell(f"DiskFull: {full(error, 'the output')}")
        return DiskFull.exit_code
    if isinstance(error, MemoryError) and not debug:
        _tell(
            "SetupError: there is not enough memory, or a limit (`ulimit -v`) does not allow more; "
            "--debug shows where"
        )
        return 3
    if (
        isinstance(error, OSError)
        and error.errno in _OF_THE_MACHINE
        and error.filename is not None
        and not debug
    ):
        _tell(
            f"SetupError: {os.fspath(error.filename)!r}: {error.strerror}; --debug shows where it "
            f"was needed"
        )
        return 3
    frame = _of_a_plugin(error)
    first = "" if frame is None else f"Look at {frame} first, which is no part of rft.  "
    _tell(
        f"{traceback.format_exc()}{first}This is a bug in rft, or in a plugin; please report it "
        f"with the lines above."
    )
    return 4


def _refuse_exits_of_plugins() -> None:
    """End this process with code 4 and a message where a plugin calls `os._exit`, which no `finally`
    sees: 0 means that the program has finished.
    """
    leave = os._exit
    process = os.getpid()

    def exit_of(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        if os.getpid() == process and not is_ours(file):
            _tell(
                f"RunFailed: {file}, line {caller.f_lineno}, called os._exit({status}); a plugin "
                f"must not end the program"
            )
            sys.stderr.flush()
            status = RunFailed.exit_code
        leave(status)

    os._exit = exit_of


def _end_check(reason: str) -> None:
    _tell(f"RunFailed: the check of the configuration hangs: {reason}")
    sys.stderr.flush()
    os._exit(RunFailed.exit_code)


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, so that no other file gets their descriptors; write
    half a character to stdout as its escape.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(opened := os.open(os.devnull, os.O_RDWR), fd)
            if opened != fd:
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(fd, mode, closefd=False, encoding="utf-8", errors="backslashreplace"),
            )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Redirect stdout to /dev/null, so that the interpreter can flush it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_a_plugin(error: BaseException) -> str | None:
    """Return the location of an error in code that belongs neither to rft nor to a library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    if frames:
        return f"{frames[-1].filename}, line {frames[-1].lineno},"
    return None


def _tell(text: str) -> None:
    learn_environment()
    print(safe(redact(text), lines=True), file=sys.stderr)


def make(command: str) -> typer.Typer:
    """Make the program with `command` alone implemented, because importing all commands is slow."""
    app = typer.Typer(
        name="rft",
        help="Reinforcement fine-tuning of language models.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, entry in all_commands().items():
        if name != command:
            app.command(name, help=entry.help)(_elsewhere)
            continue
        example = f"Example: {entry.example}"
        implementation = load_entry(entry.entry)
        if isinstance(implementation, typer.Typer):
            app.add_typer(implementation, name=name, help=entry.help, epilog=example)
        else:
            app.command(name, epilog=example)(implementation)
    return app


def _version(value: bool) -> None:
    if value:
        print(f"rft {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; may follow any command."),
    ] = False,
) -> None:
    """Show options in the help; `main` reads them."""


def _elsewhere() -> None:
    raise AssertionError("a command other than the requested one was called")


if __name__ == "__main__":
    main()
