"""The parts of docs/algorithms/*.md that are made from the code: papers, formulas, arguments, what
each algorithm is made of.

A page is written by hand but for what stands between `<!-- from the code: WHAT -->` and `<!-- end
-->`, which `filled` makes anew:

    type NAME           the algorithm's one line with its papers, and the table of its parts
    formulas NAME       docstrings of its advantage and policy loss; a part that has another home is linked
    arguments NAME      their arguments with defaults
    part KIND NAME      docstring and arguments of one part
    others              the same for every part that no algorithm type names
    strategies          every sample strategy that takes arguments, those that come later too
    doc MODULE[:NAME]   a docstring
    args MODULE:NAME    a table of one model's arguments
    table               all algorithms, with the first sentence of each page's "What it is for"

Knows nothing of how parts work.  Invariant: it reads docstrings and models alone, so a page cannot
say what the code does not.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rft.algorithm.args import Args
from rft.algorithm.base import AlgorithmDefaults
from rft.algorithm.catalog import algorithm_defaults, algorithms, shipped
from rft.config.describe import default_text, type_text
from rft.config.schema.walk import extra
from rft.plugins import REGISTRY

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "algorithms"
TITLES = {
    "advantage_fn": "Advantage",
    "policy_loss_fn": "Policy loss",
    "kl_loss_fn": "KL loss",
    "kl_penalty_fn": "KL penalty",
    "entropy_loss_fn": "Entropy loss",
    "sample_strategy": "Sample strategy",
}
COMPUTED = {
    "old": "log-probs of the policy before the step",
    "ref": "log-probs of the reference model",
    "entropy": "entropies",
    "sum_squares": "sums of squared probabilities",
    "discriminator_mean": "means of the entropy score over the vocabulary",
    "values": "a critic's values",
}
_REGION = re.compile(r"(<!-- from the code: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> dict[str, Callable[[], str]]:
    """Path below the repository of every page that has such places, and what makes it anew."""
    return {
        f"docs/algorithms/{path.name}": partial(filled, path)
        for path in sorted(FOLDER.glob("*.md"))
    }


def filled(page: Path) -> str:
    """The text of `page` with its made parts as the code says today."""
    REGISTRY.scan_package("rft.algorithm")
    return _REGION.sub(
        lambda m: f"{m[1]}\n{_made(m[2]).strip()}\n\n{m[3]}", page.read_text(encoding="utf-8")
    )


def _made(what: str) -> str:
    word, *rest = what.split()
    makers: dict[str, Callable[..., str]] = {
        "type": _type,
        "formulas": lambda name: _both(name, lambda kind, part: prose(_docstring(kind, part))),
        "arguments": lambda name: _both(name, _arguments),
        "part": lambda kind, name: f"{prose(_docstring(kind, name))}\n\n{_arguments(kind, name)}",
        "others": _others,
        "strategies": _strategies,
        "doc": lambda where: prose(inspect.getdoc(_at(where)) or ""),
        "args": lambda where: _table(_at(where)),
        "table": _index,
    }
    return makers[word](*rest)


# ---------------------------------------------------------------- one algorithm


def _type(name: str) -> str:
    d = algorithm_defaults(name)
    parts = (
        "advantage_fn",
        "policy_loss_fn",
        "kl_loss_fn",
        "kl_penalty_fn",
        "entropy_loss_fn",
        "sample_strategy",
    )
    rows = [
        f"| `{kind}` | {_link(kind, getattr(d, kind), name)}{_own_args(d, kind)} |"
        for kind in parts
    ]
    rows += [
        f"| `loss_agg_mode` | [`{d.loss_agg_mode}`](aggregation.md) |",
        f"| `repeat_times` | `{d.repeat_times}` |",
    ]
    table = "\n".join(["| Key of `algorithm` | Default |", "|---|---|", *rows])
    return "\n\n".join([_linked(d.doc), table, *_needs(d)])


def _own_args(d: AlgorithmDefaults, kind: str) -> str:
    given: dict[str, Any] = dict(getattr(d, f"{kind}_args", {}))
    return "".join(f", `{name}: {str(value).lower()}`" for name, value in given.items())


def _needs(d: AlgorithmDefaults) -> list[str]:
    said = []
    for kind in ("advantage_fn", "policy_loss_fn"):
        if issubclass(model := shipped()[kind, getattr(d, kind)], Args):
            if model.before:
                said.append(
                    "Computed before the step: "
                    + ", ".join(COMPUTED[c] for c in COMPUTED if c in model.before)
                    + "."
                )
            if model.reads:
                said.append(f"Reads {model.reads}; the workflow has to write it.")
            if model.reference:
                said.append("Computed in the step: log-probs of the reference model.")
            if model.pairs:
                said.append("Rows come in pairs, which are never split.")
            if model.samples == "own":
                said.append("An expert's rows need no log-probs of a sampler.")
            if model.samples == "none":
                said.append("Rows need no log-probs of a sampler.")
    return [" ".join(said)] if said else []


def _both(name: str, say: Callable[[str, str], str]) -> str:
    d = algorithm_defaults(name)
    said = []
    for kind in ("advantage_fn", "policy_loss_fn"):
        part = getattr(d, kind)
        if part == "none":
            continue
        if home(kind, part) == name:
            text = say(kind, part)
            said.append(f"### {TITLES[kind]} {part}\n\n{text}" if say is not _arguments else text)
        else:
            there = (
                f"[`{part}`]({home(kind, part)}.md#arguments)"
                if say is _arguments
                else _link(kind, part, name)
            )
            said.append(
                f"{f'`algorithm.{kind}_args`: those of' if say is _arguments else f'{TITLES[kind]}:'} {there}."
            )
    return "\n\n".join(said)


def home(kind: str, part: str) -> str:
    """The page that describes a part: of the algorithm of its name, else of the first one that is
    made with it, else parts.
    """
    users = [n for n in algorithms() if getattr(algorithm_defaults(n), kind) == part]
    return part if part in users else users[0] if users and part != "none" else "parts"


def _link(kind: str, part: str, here: str) -> str:
    if part == "none":
        return "`none`"
    shared = {
        "kl_loss_fn": "kl",
        "kl_penalty_fn": "kl",
        "entropy_loss_fn": "entropy",
        "sample_strategy": "sampling",
    }
    if kind in shared:
        return f"[`{part}`]({shared[kind]}.md)"
    page = home(kind, part)
    return f"[`{part}`]({'' if page == here else f'{page}.md'}#{TITLES[kind].lower().replace(' ', '-')}-{part})"


# ---------------------------------------------------------------- parts


def _others() -> str:
    said = []
    for kind, part in shipped():
        if (
            kind in ("advantage_fn", "policy_loss_fn")
            and part != "none"
            and home(kind, part) == "parts"
        ):
            said.append(
                f"## {TITLES[kind]} "
                f"{part}\n\n{prose(_docstring(kind, part))}\n\n{_arguments(kind, part)}"
            )
    return "\n\n".join(said)


def _strategies() -> str:
    said = []
    for (kind, name), model in shipped().items():
        if kind == "sample_strategy" and model.model_fields:
            text = (
                _docstring(kind, name)
                if name in REGISTRY.names(kind)
                else inspect.getdoc(model) or ""
            )
            said.append(f"## {name}\n\n{prose(text)}\n\n{_arguments(kind, name)}")
    return "\n\n".join(said)


def _docstring(kind: str, part: str) -> str:
    found = inspect.getdoc(REGISTRY.get(kind, part).obj)
    if not found:
        raise ValueError(f"{kind} {part!r} has no docstring")
    if kind == "policy_loss_fn" and part in REGISTRY.names("policy_extra"):
        found += (
            f"\n\nBefore the step, over all of its "
            f"rows:\n\n{inspect.getdoc(REGISTRY.get('policy_extra', part).obj)}"
        )
    return found


def _arguments(kind: str, part: str) -> str:
    model = shipped()[kind, part]
    key = f"`algorithm.{kind}_args` of `{part}`"
    if not model.model_fields:
        return f"{key}: none."
    return f"{key}:\n\n{_table(model)}"


def _table(model: type[BaseModel]) -> str:
    rows = ["| Argument | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = str(field.description)
        if why := extra(field, "moot"):
            meaning += f"  *No meaning here: {why}*"
        rows.append(
            f"| `{name}` | {type_text(field)} | {default_text(field)} | {_linked(meaning)} |"
        )
    return "\n".join(rows)


def _index() -> str:
    rows = [
        "| Algorithm | For | Advantage | Policy loss | Runs of a task |",
        "|---|---|---|---|---|",
    ]
    for name in algorithms():
        d = algorithm_defaults(name)
        text = (
            (FOLDER / f"{name}.md")
            .read_text(encoding="utf-8")
            .split("\n## What it is for\n", 1)[1]
            .split("\n## ")[0]
        )
        (first,) = re.findall(r"\A\s*(.+?[.])(?:\s|\Z)", text, re.DOTALL)
        rows.append(
            f"| [{name}]({name}.md) | {' '.join(first.split())} | "
            f"{_link('advantage_fn', d.advantage_fn, '')} | "
            f"{_link('policy_loss_fn', d.policy_loss_fn, '')} | {d.repeat_times} |"
        )
    return "\n".join(rows)


def _at(where: str) -> Any:
    module, _, name = where.partition(":")
    return (
        reduce(getattr, name.split("."), importlib.import_module(module))
        if name
        else importlib.import_module(module)
    )


# ---------------------------------------------------------------- docstrings as Markdown


def prose(docstring: str) -> str:
    """Paragraphs as they are; lines that are set in, which are formulas and tables, as a block of
    plain text.
    """
    parts: list[tuple[bool, list[str]]] = []
    for line in docstring.splitlines():
        inset = line.startswith("    ") if line else bool(parts) and parts[-1][0]
        if not parts or parts[-1][0] != inset:
            parts.append((inset, []))
        parts[-1][1].append(line)
    said = []
    for inset, lines in parts:
        text = "\n".join(lines).strip("\n")
        if inset:
            said.append(f"```text\n{textwrap.dedent(text)}\n```")
        elif text:
            said.append(_escaped(_linked(text)))
    return "\n\n".join(said)


def _escaped(text: str) -> str:
    """What Markdown would take for emphasis, outside code marks."""
    pieces = re.split(r"(`[^`]*`|\]\([^)]*\))", text)
    return "".join(
        p if i % 2 else re.sub(r"\*|(?<!\w)_(?=\w)|(?<=\W)_(?=\W)", r"\\\g<0>", p)
        for i, p in enumerate(pieces)
    )


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
