"""`rft new`: write a plugin and its test from the files in `skeletons`, with NAME and CLASS replaced.

Invariant: no existing file is overwritten; the generated test passes without a model.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from rft.errors import ConfigError

KINDS = {
    "workflow": "what happens in one run of a task",
    "reward": "how good an answer is",
    "judge": "a model that scores answers",
    "env": "an environment: observations, actions, a reward for each step",
    "operator": "changes or drops scored runs before they are stored",
    "agent": "a program that speaks OpenAI's protocol to the model",
}
# kinds that are plugins of another kind
_REGISTERED = {"judge": "reward", "env": "workflow", "agent": "workflow"}
_NAME = re.compile(r"[a-z][a-z0-9_]{1,49}")
_SKELETONS = Path(__file__).with_name("skeletons")
_SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="config, workflow, reward, judge, env, operator or agent", show_default=False
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(help="its name in configurations, e.g. guess_number", show_default=False),
    ],
    folder: Annotated[
        Path, typer.Option("--dir", help="folder of your plugins; created if missing")
    ] = Path("plugins"),
    model: Annotated[
        str, typer.Option(help="of a config: folder of the model")
    ] = "runs/tiny-model",
) -> None:
    """Write DIR/NAME.py and DIR/tests/test_NAME.py, or NAME.yaml with NAME.jsonl; existing files
    are left alone.
    """
    if kind == "config":
        _config(name, model)
        return
    if kind not in KINDS:
        kinds = "; ".join(f"{k} ({about})" for k, about in KINDS.items())
        raise ConfigError(
            f"write one of: {kinds}; config (a configuration and its tasks)", key="KIND", given=kind
        )
    _check_plugin_name(kind, name)
    plugin = folder / f"{name}.py"
    test = folder / "tests" / f"test_{name}.py"
    _write(
        {plugin: skeleton(kind, "plugin.py.txt", name), test: skeleton(kind, "test.py.txt", name)}
    )
    print(
        f"{plugin}\n{test}\n\ntest it:  pytest {test}\nuse it:   rft run --config FILE "
        f"--plugin-dir {folder}\n"
    )
    print("in FILE, which `rft new config ...` writes:\n")
    print(skeleton(kind, "use.yaml", name), end="")


def skeleton(kind: str, file: str, name: str) -> str:
    """Return a skeleton file with its names filled in."""
    text = (_SKELETONS / kind / file).read_text(encoding="utf-8")
    return text.replace("CLASS", "".join(part.capitalize() for part in name.split("_"))).replace(
        "NAME", name
    )


def _config(name: str, model: str) -> None:
    """Write NAME.yaml and sums as its questions, of which every fifth is held out."""
    import importlib.util
    import json

    _check_name(name)
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    rows = [
        json.dumps(
            {"prompt": f"What is {a} + {b}? Reply with the number only.", "response": str(a + b)}
        )
        for a, b in _SUMS
    ]
    files = {
        Path(f"{name}.yaml"): skeleton("config", "config.yaml", name)
        .replace("MODEL", model)
        .replace("ENGINE", engine),
        Path(f"{name}.jsonl"): "".join(f"{row}\n" for i, row in enumerate(rows) if i % 5),
        Path(f"{name}_eval.jsonl"): "".join(f"{row}\n" for i, row in enumerate(rows) if i % 5 == 0),
    }
    _write(files)
    print(*files, sep="\n")
    if not Path(model).is_dir():
        tiny = Path(model).name == "tiny-model"
        remedy = f"python -m rft.testing.tiny {model}" if tiny else "see --model"
        print(f"\nthere is no {model} yet:  {remedy}")
    print(f"\nlook:   rft check --config {name}.yaml\ntrain:  rft run --config {name}.yaml")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            "must be 2 to 50 lower-case letters, digits and underscores, begin with a letter, and "
            "not be a Python keyword",
            key="NAME",
            given=name,
        )


def _check_plugin_name(kind: str, name: str) -> None:
    import rft.plugins as plugins

    _check_name(name)
    plugins.load_all()
    registered = _REGISTERED.get(kind, kind)
    if name in plugins.REGISTRY.names(registered):
        raise ConfigError(
            f"a {registered} that comes with rft has this name; choose another",
            key="NAME",
            given=name,
        )


def _write(files: dict[Path, str]) -> None:
    """Write all files, or none if one exists."""
    for path in files:
        if path.exists():
            raise ConfigError(
                "already exists; choose another name, or delete it", key="NAME", given=str(path)
            )
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
