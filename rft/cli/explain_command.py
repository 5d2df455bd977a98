"""`rft explain`: describe a configuration key; `rft plugins`: list what a configuration can name.

Exit code 2 for an unknown key or kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rft.cli.options import JsonArray, PluginDirs
from rft.errors import ConfigError

_PACKAGES = (
    "rft.algorithm",
    "rft.buffer.operators",
    "rft.buffer.storage",
    "rft.monitor",
    "rft.taskset",
)


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="a key of rft, veRL or Trinity-RFT, e.g. trainer.grad_clip",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="print a JSON array with one object per key of rft")
    ] = False,
) -> None:
    """Show a key's meaning, unit, default, who reads it, and its names in veRL and Trinity-RFT."""
    from rft.config.describe import describe
    from rft.plugins import extra_entries, load_entry

    entry = extra_entries("explain").get("names")  # with the names of other tools
    descriptions = (load_entry(entry) if entry else describe)(key)
    if as_json:
        print(json.dumps([d.to_json() for d in descriptions], indent=1, ensure_ascii=False))
        return
    for d in descriptions:
        rows = [
            ("", d.meaning),
            ("asked for", f"{d.asked}{f' ({d.note})' if d.note else ''}" if d.asked else ""),
            ("type", d.type),
            ("unit", d.unit),
            ("default", d.default),
            ("allowed", ", ".join(d.allowed)),
            ("belongs to", d.belongs_to),
            ("read by", d.used_by),
            ("on resume", d.on_resume),
            ("veRL", ", ".join(d.verl) or "none"),
            ("Trinity-RFT", d.trinity),
            ("keys below", ", ".join(d.below)),
        ]
        print(d.key)
        for name, text in rows:
            if text:
                print(f"  {name:13}{text}" if name else f"  {text}")


def plugins(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="workflow, reward, policy_loss_fn ...; default: all", show_default=False
        ),
    ] = None,
    as_json: JsonArray = False,
    plugin_dir: PluginDirs = None,
) -> None:
    """List workflows, rewards, losses and other plugins by name."""
    rows = listed(plugin_dir or [], kind)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(str(r["name"])) for r in rows)
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["kind"] != row["kind"]:
            print(f"{row['kind']}")
        print(
            f"  {row['name']:{width}}  {row['about']}"
            + (f"  [{row['source']}]" if not row["built_in"] else "")
        )


def listed(plugin_dirs: list[str], kind: str | None) -> list[dict[str, str | bool | list[str]]]:
    """Return one row per plugin: kind, name, first line of its docstring, arguments, source.

    Raises ConfigError, PluginError.
    """
    import rft.plugins as registry
    from rft.engine.built_in import BUILT_IN

    registry.load_all(plugin_dirs)
    for package in _PACKAGES:
        registry.REGISTRY.scan_package(package)
    home = str(Path(registry.__file__).parent)
    shipped = (home, str(registry.shipped_workflows().resolve()))
    rows: list[dict[str, str | bool | list[str]]] = [
        {
            "kind": p.kind,
            "name": p.name,
            "about": (getattr(p.obj, "__doc__", None) or "").strip().partition("\n")[0],
            "args": list(p.args.model_fields) if p.args is not None else [],  # type: ignore[attr-defined]
            "source": p.source,
            "built_in": p.source.startswith(shipped),
        }
        for p in registry.REGISTRY.all()
    ]
    registered = {(r["kind"], r["name"]) for r in rows}
    rows += [
        {
            "kind": "engine",
            "name": n,
            "about": "",
            "args": [],
            "source": where.partition(":")[0],
            "built_in": True,
        }
        for n, where in BUILT_IN.items()
        if ("engine", n) not in registered
    ]
    rows.sort(key=lambda r: (r["kind"], r["name"]))
    kinds = sorted({str(r["kind"]) for r in rows})
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f"unknown kind {kind!r}; known: {', '.join(kinds)}", key="KIND", given=kind
        )
    return [r for r in rows if kind in (None, r["kind"])]
