"""The program `rft`: finds the verb, imports its file alone, turns errors into messages and exit codes.

Knows no verb's inside.  The one invariant: people's mistakes and failed runs end with a message and their exit code, never with a
traceback; everything else is a bug and ends with one (exit code 4).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from rft import __version__
from rft.blocked import is_ours, name_what_blocks
from rft.errors import Interrupted, PluginStopped, RftError
from rft.logs import learn_environment, redact

VERBS = {
    "run": "Train: explore, judge, learn, synchronise; resumes where it was stopped.",
    "serve": "Answer OpenAI requests and learn from the rewards that are posted.",
    "check": "Show what a configuration will do, and everything that is wrong with it.",
    "explain": "Explain a configuration key, with its names in veRL and Trinity-RFT.",
    "quickstart": "A real pretrained model learns single-digit sums on this machine.",
    "doctor": "Show what this machine has, and what is missing.",
    "status": "Show what a run is doing or how it ended, read from its files.",
    "timeline": "Draw when each part of a run worked and when it waited.",
    "convert": "Turn a veRL launch script or YAML file into a configuration.",
    "bench": "Score stored answers with a taskset's reward, split by source.",
    "debug": "Play one task, or score one answer, and show what happens.",
    "new": "Write the skeleton of a workflow, reward, judge ... and its test.",
    "judge": "Measure how reliable a judge is.",
    "export": "Copy the verified Hugging Face model of a checkpoint.",
    "log": "Show a run's logs, merged by time.",
    "plugins": "List what a configuration can name.",
    "buffer": "Look into a run's experience buffer.",
}
_FILES = {
    "timeline": "status",
    "log": "status",
    "plugins": "explain",
    "bench": "judge",
}  # of verbs without a file named like them
EXIT_CODES = "Exit codes: 0 done, 2 configuration, 3 environment, 4 run failed, 130 interrupted."


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    over = name_what_blocks(lambda text: print(f"rft: {text}", file=sys.stderr, flush=True))
    try:
        make(next((a for a in given if not a.startswith("-")), ""))(args=given, prog_name="rft")
    except SystemExit as e:
        if (frame := _of_a_plugin(e)) is not None:
            _tell(f"RunFailed: {frame} called sys.exit({e.code!r}); a plugin must not end the program")
            sys.exit(4)
        raise
    except RftError as e:
        if debug:
            traceback.print_exc()
        _tell(f"{type(e).__name__}: {e}")
        if isinstance(e, Interrupted):
            # All of ours is closed by now; the exit handlers of a Ray that was stopped half-way would wait a minute for it.
            sys.stdout.flush()
            os._exit(e.exit_code)
        sys.exit(e.exit_code)
    except PluginStopped as e:
        _tell(f"RunFailed: {e}; a plugin must not end the program")
        sys.exit(4)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException:
        _tell(f"{traceback.format_exc()}This is a bug in rft, or in a plugin; please report it with the lines above.")
        sys.exit(4)
    finally:
        over.set()


def _of_a_plugin(error: SystemExit) -> str | None:
    """Where an error was raised by code that is neither ours nor a library's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}," if frames else None


def _tell(text: str) -> None:
    learn_environment()
    print(redact(text), file=sys.stderr)


def make(verb: str) -> typer.Typer:
    """The whole program, of which only `verb` can do something: importing the others would make every command slow."""
    app = typer.Typer(
        name="rft",
        help="Reinforcement fine-tuning of language models.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, says in VERBS.items():
        if name != verb:
            app.command(name, help=says)(_elsewhere)
            continue
        found = getattr(importlib.import_module(f"rft.cli.{_FILES.get(name, name)}_command"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, help=says)
        else:
            app.command(name)(found)
    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"rft {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
) -> None:
    """Only for the help: `main` has read both already, or ends here."""


def _elsewhere() -> None:
    raise AssertionError("a verb other than the requested one was called")


if __name__ == "__main__":
    main()
