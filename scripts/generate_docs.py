"""Writes what is made from the code, below docs/reference: algorithms.md, cli.md, configuration.md
and config.schema.json.

python scripts/generate_docs.py            writes them
python scripts/generate_docs.py --check    exit code 1 if they differ from what is there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import algorithm_pages
import typer.main
from configuration_page import json_schema, markdown

from rft.cli.commands import all_commands
from rft.cli.main import EXIT_CODES
from rft.cli.main import make as program

ROOT = Path(__file__).resolve().parents[1]


def cli_page() -> str:
    """docs/reference/cli.md: every command with its arguments and options, from what `--help` is made
    of.
    """
    whole: Any = typer.main.get_command(program(""))
    parts = [
        "# Command line",
        "<!-- made by scripts/generate_docs.py from rft/cli; edit the commands instead -->",
        f"{whole.help}  {EXIT_CODES}",
        "\n".join(f"- [`rft {name}`](#rft-{name}): {c.help}" for name, c in all_commands().items()),
        "For every command: `--help`, `-h`; `--debug` shows the traceback of an error.  `rft "
        "--version` prints the version.",
    ]
    for name in all_commands():
        group: Any = typer.main.get_command(program(name))
        parts += _command(f"rft {name}", group.commands[name], "##")
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any, level: str) -> list[str]:
    if hasattr(command, "commands"):
        below = [
            part
            for inner_name, inner in command.commands.items()
            for part in _command(f"{name} {inner_name}", inner, level + "#")
        ]
        return [f"{level} {name}", command.help, *below]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(
        [name, *(["[OPTIONS]"] if options else []), *(_argument(p) for p in arguments)]
    )
    rows = [f"| `{_argument(p)}` | {p.help} | |" for p in arguments]
    rows += [f"| `{_option(p)}` | {p.help} | {_default(p)} |" for p in options]
    table = ["| | | Default |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    return [f"{level} {name}", command.help, f"```text\n{usage}\n```", *table]


def _argument(p: Any) -> str:
    text = p.name.upper() + ("..." if p.nargs == -1 else "")
    return text if p.required else f"[{text}]"


def _option(p: Any) -> str:
    value = "" if p.is_flag else f" {p.name.upper()}"
    return ", ".join([*p.opts, *p.secondary_opts]) + value


def _default(p: Any) -> str:
    if p.required:
        return "*required*"
    if p.is_flag:
        return f"`{p.opts[0]}`" if p.default is True and p.secondary_opts else "off"
    return f"`{p.default}`" if p.show_default and p.default is not None else ""


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/configuration.md": markdown,
    "docs/reference/config.schema.json": lambda: (
        json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    ),
    "docs/reference/cli.md": cli_page,
    "docs/reference/algorithms.md": algorithm_pages.page,
}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        path = ROOT / name
        text = make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"{name} {'differs; run python scripts/generate_docs.py' if '--check' in arguments else 'written'}"
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
