"""`rft convert verl`: a veRL launch script or YAML file → our configuration, and an account of
every argument.  `rft convert trinity`: a YAML file of Trinity-RFT → our configuration.

Exit code 0, or 2: for a file that cannot be converted, and without --allow for refused arguments
and for a result that `rft check` refuses.  Invariant: a file that no conversion wrote is never
replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rft.cli.options import option
from rft.errors import ConfigError

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Launch
    from rft.extras.migrate.convert.programs import Program
    from rft.extras.migrate.convert.verl import Conversion

convert = typer.Typer(no_args_is_help=True, callback=lambda: None)
# how the files begin that are written here
_OURS = re.compile(rb'# Converted from |# .*: veRL .* converted|\{\s*"program": |\Z')


class ProgramName(StrEnum):
    main_ppo = "main_ppo"
    sft = "sft"
    sft_trainer = "sft_trainer"
    one_step_off = "one_step_off"
    fully_async = "fully_async"


class ProfileName(StrEnum):
    exact = "exact"
    guide = "guide"


@convert.command()
def verl(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT",
            help="launch script (.sh) with its arguments, resolved veRL configuration (.yaml), or "
            "behind -- a launch written out",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, option("--out", "-o", help="the YAML file to write; default: print it")
    ] = None,
    report: Annotated[
        Path | None, option(help="write the full report to this .md or .json file")
    ] = None,
    profile: Annotated[
        ProfileName,
        typer.Option(help="exact: what veRL computes; guide: the values of the alignment guide"),
    ] = ProfileName.exact,
    engine_num: Annotated[
        int | None, option(help="rollout engines; default: a quarter of the GPUs")
    ] = None,
    set_: Annotated[
        list[str] | None, option("--set", help="key=value on the result; repeatable")
    ] = None,
    env: Annotated[
        list[str] | None, option(help="NAME=VALUE, a variable that the script reads; repeatable")
    ] = None,
    verl_version: Annotated[
        str | None,
        option(help="release whose defaults hold, as 0.3.0; default: what the arguments tell"),
    ] = None,
    allow: Annotated[
        bool,
        typer.Option("--allow", help="write the YAML although arguments or values are refused"),
    ] = False,
    draft: Annotated[
        bool,
        typer.Option(
            "--draft",
            help="write what can be said, what is open as comments in its section; the exit code "
            "stays 2",
        ),
    ] = False,
    as_: Annotated[
        ProgramName | None,
        typer.Option("--as", help="the program of veRL that a module of your own stands for"),
    ] = None,
) -> None:
    """Convert a veRL launch.  Bash runs a script in a sandbox, without network and files, where
    other commands do nothing.
    """
    _check_outputs(out, report)
    options = {
        "profile": profile.value,
        "engine_num": engine_num,
        "overrides": set_ or (),
        "release": verl_version or "",
    }
    done = _converted((source, env or (), as_), options, draft, report)
    is_open = bool(done.refused or done.errors) and not allow
    _deliver(done, out, report, is_open, draft)
    if is_open:
        raise typer.Exit(2)


def _converted(
    launch: Sequence[Any], options: dict[str, Any], draft: bool, report: Path | None
) -> Conversion:
    """The conversion of a launch, whose account goes to `report`, the refusal of one too."""
    from rft.extras.migrate.convert import report as reports
    from rft.extras.migrate.convert import verl as verls

    try:
        done = (verls.draft if draft else verls.convert)(_launch(*launch), **options)
    except ConfigError as e:
        if report is not None:
            name = Path(launch[0][0]).name
            _write(report, reports.refusal(name, e, as_json=report.suffix == ".json"))
        raise
    if report is not None:
        _write(report, reports.account(done, as_json=report.suffix == ".json"))
    return done


def _deliver(
    done: Conversion, out: Path | None, report: Path | None, is_open: bool, draft: bool
) -> None:
    """Write or print the YAML, unless it is open and no draft, and show the account."""
    from rft.extras.migrate.convert import report as reports

    stopped = is_open and not draft
    text = ""
    if done.values and not stopped:
        head = reports.head(done)
        text = reports.draft(done) if is_open else reports.yaml_text(done.values, head)
    if text and out is not None:
        _write(out, text)
    _show(done, out, report, stopped)
    if text and out is None:
        print(text, end="")


def _check_outputs(out: Path | None, report: Path | None) -> None:
    if report is not None and report.suffix not in (".md", ".json"):
        raise ConfigError(
            f"given {report.name}; must end with .md or .json", key="--report", given=str(report)
        )
    for name, path in (("-o", out), ("--report", report)):
        _replaceable(name, path)
    if out is not None and report is not None and out.absolute() == report.absolute():
        raise ConfigError(
            f"given {out}, as for -o; the account needs its own file",
            key="--report",
            given=str(report),
        )


@convert.command()
def trinity(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file of Trinity-RFT", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="the YAML file to write; default: print it", show_default=False
        ),
    ] = None,
) -> None:
    """Convert a YAML file of Trinity-RFT: keys without a meaning here are dropped, with the reason."""
    from rich.markup import escape

    from rft.extras.migrate.convert.report import yaml_text
    from rft.extras.migrate.convert.trinity import convert_file

    _replaceable("-o", out)
    file = convert_file(source)
    console = _console(sys.stdout if out is not None else sys.stderr)
    for title, changes in (
        ("renamed", file.renamed),
        ("added", file.added),
        ("dropped", file.dropped),
    ):
        if changes:
            console.print(f"[bold]{title}[/] ({len(changes)})")
            _table(console, [(str(c.line or ""), c.key, c.text) for c in changes])
    text = yaml_text(file.values, [f"Converted from {source.name} by `rft convert trinity`."])
    if out is None:
        print(text, end="")
        return
    _write(out, text)
    console.print(escape(f"{out} is written.  Next: rft check --config {out}"))


def _launch(source: Sequence[str], env: Sequence[str], as_: ProgramName | None) -> Launch:
    from rft.extras.migrate.convert import programs
    from rft.extras.migrate.convert.launch import launch_of, read_launch
    from rft.extras.migrate.convert.recording import Inputs

    script = Path(source[0])
    arguments = tuple(source[1:])
    variables = dict(v.partition("=")[::2] for v in env)
    if wrong := next((v for v in env if not re.fullmatch(r"[A-Za-z_]\w*=.*", v, re.DOTALL)), None):
        raise ConfigError(f"given {wrong}; must be NAME=VALUE", key="--env", given=wrong)
    other = cast("Program | None", as_ and as_.value)
    if programs.find(source, other) is not None and not script.is_file():
        return launch_of(source, other)
    return read_launch(script, Inputs(variables, arguments, other=other))


def _replaceable(option: str, path: Path | None) -> None:
    """What an earlier conversion wrote, and an empty file, may be replaced; the script and other
    people's files may not.
    """
    if path is None or not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begin = file.read(1000)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", key=f"{option} {path}") from None
    if not _OURS.match(begin):
        raise ConfigError(
            "exists and was not written by a conversion; move it away or give another name",
            key=f"{option} {path}",
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot be written: {e.strerror}", key=str(path)) from None


def _show(done: Conversion, out: Path | None, report: Path | None, stopped: bool) -> None:
    """One short table per outcome, then what to know and what to do.  On stderr where the YAML
    itself goes to stdout.
    """
    from rich.markup import escape

    from rft.extras.migrate.convert.draft import KINDS, LABELS
    from rft.extras.migrate.convert.report import summary

    stream = sys.stdout if out is not None or stopped or not done.values else sys.stderr
    console = _console(stream)
    for kind in KINDS:
        rows = [r for r in done.rows if r.outcome.kind == kind]
        if rows:
            console.print(f"[bold]{LABELS[kind]}[/] ({len(rows)})")
            _table(
                console,
                [
                    (str(r.argument.line), f"{r.argument.key}={_short(r.argument.text)}", *_told(r))
                    for r in rows
                ],
            )
    for name, style, texts in (
        ("note", "dim", done.notes),
        ("warning", "yellow", done.warnings),
        ("question", "magenta", done.questions),
        ("error", "red", tuple(f"rft check: {e}" for e in done.errors)),
    ):
        for text in texts:
            console.print(f"[{style}]{name:8}[/] {escape(text)}")
    console.print(f"[bold]{escape(done.source)}[/]: {summary(done)}, profile {done.profile}")
    if report is not None:
        console.print(f"The whole account is in {escape(str(report))}.")
    for line in _next(done, out, stopped):
        console.print(escape(line))


def _console(stream: Any) -> Any:
    from rich.console import Console

    width = None if stream.isatty() else 140
    return Console(file=stream, highlight=False, soft_wrap=True, width=width)


def _next(done: Conversion, out: Path | None, stopped: bool) -> list[str]:
    if stopped and done.refused:
        return [
            f"Nothing was written: {len(done.refused)} argument(s) would be lost.  Change the "
            f"script, add --draft to write the rest with these as comments, or --allow without them."
        ]
    if stopped:
        return [
            "Nothing was written: `rft check` refuses the result.  Change the script or "
            "--engine-num, correct the key with "
            "--set KEY=VALUE, or add --allow to write it as it is."
        ]
    if done.command:
        lines = [f"The same here: {done.command}"]
        return lines + (
            [f"{out} was not written: there is no run configuration for it."]
            if out is not None
            else []
        )
    if out is None:
        return ["The configuration follows; -o FILE writes it."]
    return [f"{out} is written.  Next: rft check --config {out}"]


def _told(row: Any) -> tuple[str, str]:
    targets = row.outcome.targets
    here = ", ".join(targets[:2]) + (f" and {len(targets) - 2} more" if len(targets) > 2 else "")
    return here, row.outcome.reason


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _table(console: Any, rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", no_wrap=True, style="dim")
    for _ in rows[0][1:]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(escape(c) for c in row))
    console.print(table)
