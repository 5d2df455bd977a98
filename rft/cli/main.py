"""The program `rft`: finds the verb, imports its file alone, turns errors into messages and exit
codes.

Knows no verb's inside.  The one invariant: people's mistakes and failed runs end with a message and
their exit code, never with a traceback; everything else is a bug and ends with one (exit code 4).
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rft import __version__
from rft.cli.verbs import all_verbs
from rft.errors import DiskFull, Interrupted, PluginStopped, RayFailed, RftError, RunFailed, is_ours
from rft.files.disk import full, is_full
from rft.plugins import load_entry
from rft.secrets import learn_environment, redact
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    asked = (
        os.environ["COMP_WORDS"].split()[1:]
        if "_RFT_COMPLETE" in os.environ and "COMP_WORDS" in os.environ
        else given
    )
    _open_streams()
    # bars of other libraries are for people; one whose reader has gone waits for ever
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        Path.cwd()
    except OSError as e:
        _tell(
            f"ConfigError: the current folder cannot be used: {e.strerror}; change into one that "
            f"is there"
        )
        sys.exit(2)
    over = name_what_blocks(
        lambda text: print(f"rft: {text}", file=sys.stderr, flush=True), _end_check
    )
    try:
        make(next((a for a in asked if not a.startswith("-")), ""))(args=given, prog_name="rft")
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
        _tell(f"{type(e).__name__}: {e}")
        if isinstance(e, Interrupted | RayFailed):
            # All of ours is closed by now; the exit handlers of Ray would wait for one that does
            # not answer.
            sys.stdout.flush()
            os._exit(e.exit_code)
        sys.exit(e.exit_code)
    except PluginStopped as e:
        _tell(f"RunFailed: {e}; a plugin must not end the program")
        sys.exit(4)
    except BrokenPipeError:
        _drop_output()  # its reader (head, less) has gone
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as e:
        if is_full(e):
            _drop_output()
            _tell(f"DiskFull: {full(e, 'the output')}")
            sys.exit(DiskFull.exit_code)
        if isinstance(e, MemoryError) and not debug:
            _tell(
                "SetupError: there is not enough memory, or a limit (`ulimit -v`) does not allow "
                "more; --debug shows where"
            )
            sys.exit(3)
        if (
            isinstance(e, OSError)
            and e.filename is not None
            and e.errno in _OF_THE_MACHINE
            and not debug
        ):
            _tell(
                f"SetupError: {os.fspath(e.filename)!r}: {e.strerror}; --debug shows where it was "
                f"needed"
            )
            sys.exit(3)
        first = (
            ""
            if (frame := _of_a_plugin(e)) is None
            else f"Look at {frame} first, which is no part of rft.  "
        )
        _tell(
            f"{traceback.format_exc()}{first}This is a bug in rft, or in a plugin; please report "
            f"it with the lines above."
        )
        sys.exit(4)
    finally:
        over.set()


def _end_check(why: str) -> None:
    _tell(f"RunFailed: the check of the configuration hangs: {why}")
    sys.stderr.flush()
    os._exit(RunFailed.exit_code)


def _open_streams() -> None:
    """Standard streams that were closed lead nowhere, instead of to the next file that is opened."""
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


def _drop_output() -> None:
    """The interpreter must not complain when it flushes what nobody takes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_a_plugin(error: BaseException) -> str | None:
    """Where an error was raised by code that is neither ours nor a library's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}," if frames else None


def _tell(text: str) -> None:
    learn_environment()
    print(redact(text), file=sys.stderr)


def make(verb: str) -> typer.Typer:
    """The whole program, of which only `verb` can do something: importing the others would make
    every command slow.
    """
    app = typer.Typer(
        name="rft",
        help="Reinforcement fine-tuning of language models.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, entry in all_verbs().items():
        if name != verb:
            app.command(name, help=entry.help)(_elsewhere)
            continue
        example = f"Example: {entry.example}"
        command = load_entry(entry.entry)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=entry.help, epilog=example)
        else:
            app.command(name, epilog=example)(command)
    return app


def _version(asked: bool) -> None:
    if asked:
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
        bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")
    ] = False,
) -> None:
    """Only for the help: `main` has read both already, or ends here."""


def _elsewhere() -> None:
    raise AssertionError("a verb other than the requested one was called")


if __name__ == "__main__":
    main()
