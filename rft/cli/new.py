"""`rft new`: the skeleton of a plugin and its test, which passes at once.

Invariant: nothing that is there is written over.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

_NAME = re.compile(r"[a-z][a-z0-9_]{1,49}")
_REGISTERED = {"judge": "reward", "env": "workflow", "agent": "workflow"}  # kinds that are plugins of another kind


def new(
    kind: Annotated[str, typer.Argument(help="workflow, reward, judge, env, operator or agent", show_default=False)],
    name: Annotated[str, typer.Argument(help="what configurations will call it, e.g. guess_number", show_default=False)],
    folder: Annotated[Path, typer.Option("--dir", help="folder of your plugins; made if it is not there")] = Path("plugins"),
) -> None:
    """Write DIR/NAME.py and DIR/tests/test_NAME.py; existing files are left alone."""
    from rft.cli.skeletons import SKELETONS
    from rft.errors import ConfigError

    if kind not in SKELETONS:
        known = "; ".join(f"{k} ({s.about})" for k, s in SKELETONS.items())
        raise ConfigError(f"write one of: {known}", key="KIND", given=kind)
    _check_name(kind, name)
    plugin, test = folder / f"{name}.py", folder / "tests" / f"test_{name}.py"
    for path in (plugin, test):
        if path.exists():
            raise ConfigError("is there already; choose another name, or delete it", key="NAME", given=str(path))
    skeleton = SKELETONS[kind]
    test.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((plugin, skeleton.plugin), (test, skeleton.test)):
        with path.open("x", encoding="utf-8") as file:
            file.write(_filled(text, name))
    print(f"{plugin}\n{test}\n\ntest it:  pytest {test}\nuse it:   rft run --config run.yaml --plugin-dir {folder}\n")
    print(_filled(skeleton.use, name), end="")


def _check_name(kind: str, name: str) -> None:
    from rft import plugins
    from rft.errors import ConfigError

    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            "must be 2 to 50 small letters, digits and underscores, begin with a letter, and be no word of Python's",
            key="NAME",
            given=name,
        )
    plugins.load_all()
    registered = _REGISTERED.get(kind, kind)
    if name in plugins.REGISTRY.names(registered):
        raise ConfigError(f"a {registered} that comes with rft has this name; choose another", key="NAME", given=name)


def _filled(text: str, name: str) -> str:
    return text.replace("CLASS", "".join(part.capitalize() for part in name.split("_"))).replace("NAME", name)
