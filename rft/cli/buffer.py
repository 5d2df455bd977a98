"""`rft buffer`: a look into a run's experience buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look into a run's experience buffer.")


@app.callback()
def buffer() -> None:
    """Look into a run's experience buffer."""


@app.command()
def audit(
    run_dir: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    payload: Annotated[bool, typer.Option("--payload/--no-payload", help="also read every available experience back")] = True,
) -> None:
    """Check by files alone that nothing was lost and nothing trained twice.  Exit code 4 if something was."""
    import json

    import msgspec

    from rft.buffer.audit import audit_run

    found = audit_run(run_dir, payload=payload)
    if as_json:
        print(json.dumps({**msgspec.to_builtins(found), "balanced": found.balanced, "ok": found.ok}, indent=1))
    else:
        explained = ", ".join(f"{n} {reason}" for reason, n in sorted(found.explained.items())) or "none"
        print(f"acknowledged {found.acked} = used {found.used} + leased {found.leased} + available {found.available} + explained")
        print(f"explained    {explained}")
        print(f"balanced     {'yes' if found.balanced else 'NO'}")
        print(f"used twice   {found.used_twice}")
        print(f"checkpoint   {found.version or 'none'} ({found.manifests} manifests compared)")
        for problem in found.problems:
            print(f"problem      {problem}")
    if not found.ok:
        raise typer.Exit(4)
