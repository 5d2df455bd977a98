"""`rft buffer`: read a run's experience buffer during or after the run.

Every command takes the run's folder, or with --config the file that started the run.
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rft.cli.options import Json, JsonArray, one_of
from rft.errors import BufferFailed, ConfigError, ConfigErrors

if TYPE_CHECKING:
    from rft.buffer.base import Audit
    from rft.buffer.query import Order, Questions

buffer = typer.Typer(no_args_is_help=True, help="Query, sample or audit the experiences of a run.")
Run = Annotated[Path | None, typer.Argument(help="folder of the run", show_default=False)]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="the run's YAML file, instead of its folder", show_default=False
    ),
]
Where = Annotated[
    str, typer.Option(help="SQL condition on the columns of v_experiences", show_default=False)
]


def _opened(run: Path | None, config: Path | None) -> AbstractContextManager[Questions]:
    from rft.buffer.query import open_run

    return open_run(*_place(run, config))


def _place(run: Path | None, config: Path | None) -> tuple[Path, str | None]:
    """Return the run's folder and the ledger's address of the configuration, if any."""
    if config is None:
        if run is None:
            raise ConfigError(
                "give the folder of a run, or --config with the file that it was started with",
                key="RUN",
            )
        if not run.is_dir():
            raise ConfigError(
                f"{run} is no folder; give the folder of a run", key="RUN", given=str(run)
            )
        return run, None
    from rft.config.load import stage_names
    from rft.preflight.check import check

    if (stages := stage_names(config, ())) and run is None:
        raise ConfigError(
            f"{config} has the stages {', '.join(stages)}, a run each; give the folder of one",
            key="--config",
        )
    report = check(config, schema_only=True, stage=stages[0] if stages else "")
    if report.plan is None or report.errors:
        raise ConfigErrors(list(report.errors))
    return run or report.plan.run_dir, report.plan.buffer.ledger_url


@buffer.command()
def stats(run: Run = None, config: Config = None, as_json: Json = False) -> None:
    """How many experiences there are: by state, reason, taskset and weight version; bytes, what
    waits, edits.
    """
    from rft.buffer.inspect import collect
    from rft.cli import show

    with _opened(run, config) as questions:
        facts = collect(questions)
    for line in [show.as_json(facts)] if as_json else show.stats(facts):
        print(line)


@buffer.command()
def query(
    run: Annotated[str | None, typer.Argument(help="folder of the run", show_default=False)] = None,
    sql: Annotated[
        str | None,
        typer.Argument(
            metavar="SQL",
            help="one SELECT; without it: the views and their columns",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    output: Annotated[str, typer.Option("--format", "-f", help="table, csv or json")] = "table",
    limit: Annotated[int, typer.Option(min=0, help="print at most this many rows; 0: all")] = 1000,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds after which the query is cancelled")
    ] = 60.0,
) -> None:
    """Ask one SQL question; nothing can be changed, and the run is not held up."""
    from rft.cli import show

    one_of(output, show.FORMATS, "--format")
    if config is not None and sql is None:
        run, sql = None, run
    with _opened(None if run is None else Path(run), config) as questions:
        if sql is None:
            for line in show.views(questions):
                print(line)
            return
        with questions.ask(sql, timeout_s=timeout) as answer:
            if show.print_rows(answer, output, limit):
                print(f"the first {limit} rows; --limit 0 prints all", file=sys.stderr)
            elif "used_step" not in sql and re.search(
                r"\bstep\s*(=|>|<|BETWEEN|IN\b)", sql, re.IGNORECASE
            ):
                print(
                    "`step` counts the rows of one run; the train step that used a row is "
                    "used_step",
                    file=sys.stderr,
                )


@buffer.command()
def export(
    run: Run = None,
    to: Annotated[
        Path, typer.Option(help="new file, .parquet or .jsonl", show_default=False)
    ] = ...,  # type: ignore[assignment]
    where: Where = "",
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="also tokens, masks, log-probs, version spans, messages"),
    ] = False,
    config: Config = None,
) -> None:
    """Write experiences to a new Parquet or JSON lines file."""
    from rft.buffer.experience_export import export as write
    from rft.cli.show import human, progress

    tell = progress()
    with _opened(run, config) as questions:
        count = write(
            questions,
            to,
            where=where,
            tokens=tokens,
            on_progress=lambda n: tell(f"{n} experiences"),
        )
    print(f"{to}  {count} experiences, {human(to.stat().st_size)}")


@buffer.command()
def sample(
    run: Run = None,
    num: Annotated[
        int, typer.Option("-n", "--n", min=1, max=1000, help="how many, drawn at random")
    ] = 3,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="only those that this train step used", show_default=False),
    ] = None,
    best: Annotated[
        int, typer.Option(min=0, max=1000, help="instead so many of the highest reward")
    ] = 0,
    worst: Annotated[int, typer.Option(min=0, max=1000, help="and so many of the lowest")] = 0,
    id: Annotated[
        str | None, typer.Option("--id", help="this experience", show_default=False)
    ] = None,
    where: Where = "",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="also every token: trained ones with their log-prob")
    ] = False,
    config: Config = None,
    as_json: JsonArray = False,
) -> None:
    """Show experiences whole: turns, reward and its parts, its group, the weights that wrote it and
    the steps that trained it.
    """
    from rft.buffer.inspect import look
    from rft.buffer.token_texts import TokenTexts
    from rft.cli import show

    if id is not None and (where or step or best or worst):
        raise ConfigError(
            "--where, --step, --best and --worst cannot be combined with --id", key="--id"
        )
    counts: dict[Order, int] = {"best": best, "worst": worst} if best or worst else {"random": num}
    with _opened(run, config) as questions:
        experiences = [
            x
            for order, n in counts.items()
            if n
            for x in look(questions, num=n, id=id, where=where, step=step, order=order)
        ]
        if as_json:
            print(show.as_json([show.to_json(x, tokens=tokens) for x in experiences]))
            return
        words = TokenTexts(questions.run_dir) if tokens else None
        for x in experiences:
            for line in show.experience(x, words, colour=show.in_colour()):
                print(line)
    if not experiences:
        print("no experience matches the condition", file=sys.stderr)


@buffer.command()
def audit(
    run: Run = None,
    as_json: Json = False,
    payload: Annotated[
        bool,
        typer.Option("--payload/--no-payload", help="also read back every available experience"),
    ] = True,
    config: Config = None,
) -> None:
    """Check by files alone that nothing was lost and nothing trained twice.

    Exit code 4 if something was.
    """
    from rft.buffer import audit as audits
    from rft.buffer.query import locate

    run_dir, url = _place(run, config)
    locate(run_dir, url)  # a wrong path is no failed audit
    try:
        account = audits.audit_run(run_dir, payload=payload, ledger_url=url)
    except BufferFailed as e:  # there is nothing to count
        raise ConfigError(str(e), key="RUN") from e
    if as_json:
        print(audits.as_json(account))
    else:
        _print_account(account)
    if not account.ok:
        raise typer.Exit(4)


def _print_account(account: Audit) -> None:
    reasons = sorted(account.discarded.items())
    waiting = f" + waiting {account.waiting}" if account.waiting else ""
    print(
        f"acknowledged {account.acked} = used {account.used} + leased {account.leased} + available "
        f"{account.available}{waiting} + explained"
    )
    print(f"explained    {', '.join(f'{n} {reason}' for reason, n in reasons) or 'none'}")
    print(f"balanced     {'yes' if account.balanced else 'NO'}")
    print(f"used twice   {account.used_twice}")
    print(f"checkpoint   {account.checkpoint or 'none'} ({account.manifests} manifests compared)")
    after = account.after_restart
    if after and after["used"] != account.used:
        orphaned = f", {after['orphaned']} set aside" if after["orphaned"] else ""
        print(
            f"restart      a restart now would go back to step "
            f"{account.checkpoint.partition(':')[2] or 0}: {after['used']} used, "
            f"{after['available']} available{orphaned}"
        )
    for problem in account.problems:
        print(f"problem      {problem}")
