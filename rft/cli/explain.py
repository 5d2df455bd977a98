"""`rft explain`: one configuration key in words.  Exit code 2 for a key that nobody knows."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def explain(
    key: Annotated[
        str, typer.Argument(help="a key, e.g. trainer.grad_clip; veRL's and Trinity-RFT's names too", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON array, one object for each key it became")] = False,
) -> None:
    """Say what a key means, its unit and default, who reads it, and its names in veRL and Trinity-RFT."""
    from rft.config.describe import describe, values

    found = describe(key)
    if as_json:
        print(json.dumps([values(d) for d in found], indent=1, ensure_ascii=False))
        return
    for d in found:
        rows = [
            ("", d.meaning),
            ("asked for", f"{d.asked}{f' ({d.note})' if d.note else ''}" if d.asked else ""),
            ("type", d.type),
            ("unit", d.unit),
            ("default", d.default),
            ("allowed", ", ".join(d.allowed)),
            ("read by", d.used_by),
            ("active", d.active if d.type else ""),
            ("on resume", d.on_resume),
            ("also written", ", ".join(d.also)),
            ("veRL", ", ".join(d.verl) or "none"),
            ("Trinity-RFT", d.trinity),
            ("keys below", ", ".join(d.below)),
        ]
        print(d.key)
        for name, text in rows:
            if text:
                print(f"  {name:13}{text}" if name else f"  {text}")
