"""`rft plugins`: what a configuration can name, and where each thing comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PACKAGES = ("rft.algorithm", "rft.buffer.operators", "rft.buffer.storage", "rft.monitor", "rft.taskset")


def plugins(
    kind: Annotated[
        str | None, typer.Argument(help="workflow, reward, policy_loss_fn ...; default: all", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON array")] = False,
    plugin_dir: Annotated[list[str] | None, typer.Option(help="folder with your plugins; repeatable", show_default=False)] = None,
) -> None:
    """List what a configuration can name."""
    rows = listed(plugin_dir or [], kind)
    if as_json:
        import json

        print(json.dumps(rows, indent=1))
        return
    width = max(len(str(r["name"])) for r in rows)
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["kind"] != row["kind"]:
            print(f"{row['kind']}")
        print(f"  {row['name']:{width}}  {row['about']}" + (f"  [{row['source']}]" if not row["built_in"] else ""))


def listed(plugin_dirs: list[str], kind: str | None) -> list[dict[str, str | bool | list[str]]]:
    """One row per plugin: kind, name, what it is (first line of its docstring), arguments, source.  Raises ConfigError, PluginError."""
    from rft import plugins as registry
    from rft.engine.base import BUILT_IN
    from rft.errors import ConfigError

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
    known = {(r["kind"], r["name"]) for r in rows}
    rows += [
        {"kind": "engine", "name": n, "about": "", "args": [], "source": where.partition(":")[0], "built_in": True}
        for n, where in BUILT_IN.items()
        if ("engine", n) not in known
    ]
    rows.sort(key=lambda r: (r["kind"], r["name"]))
    kinds = sorted({str(r["kind"]) for r in rows})
    if kind is not None and kind not in kinds:
        raise ConfigError(f"unknown kind {kind!r}; known: {', '.join(kinds)}", key="KIND", given=kind)
    return [r for r in rows if kind in (None, r["kind"])]
