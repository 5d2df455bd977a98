"""docs/reference/algorithms.md: papers, formulas, defaults and arguments of every algorithm and
part, made from docstrings and models.

Independent of how parts work.  Invariant: it reads docstrings and models alone, so the page cannot
say what the code does not.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rft.algorithm.args import Args
from rft.algorithm.base import AlgorithmDefaults
from rft.algorithm.catalog import algorithm_defaults, algorithms, shipped
from rft.config.describe import default_text, type_text
from rft.plugins import REGISTRY

FAMILIES = Path(__file__).resolve().parents[1] / "docs" / "algorithms"
TITLES = {
    "advantage_fn": "Advantage",
    "policy_loss_fn": "Policy loss",
    "kl_loss_fn": "KL loss",
    "kl_penalty_fn": "KL penalty",
    "entropy_loss_fn": "Entropy loss",
    "sample_strategy": "Sample strategy",
}
DESCRIBED = ("advantage_fn", "policy_loss_fn", "entropy_loss_fn", "sample_strategy")
COMPUTED = {
    "old": "log-probs of the policy before the step",
    "ref": "log-probs of the reference model",
    "entropy": "entropies",
    "sum_squares": "sums of squared probabilities",
    "discriminator_mean": "means of the entropy score over the vocabulary",
    "values": "a critic's values",
}
NOTATION = """A advantage · R reward of a row · r_t reward of a token · V a critic's value · logprob, old, ref
log-probs in nats of a token under the trained policy, the old policy and the reference model ·
ratio = exp(logprob - old) · p = exp(logprob) · sg(y) y without gradient · clip(y, a, b) y between
a and b · mean and std over the group of a task, unless stated otherwise.

A row is one experience with L trained tokens; a step has S rows and N trained tokens. The rows of
a run share one reward and one advantage. "Whitened": minus the mean, divided by the standard
deviation, over all trained tokens of the step. "Those of `ratio_metrics`": ppo_kl, ratio,
ratio_abs_dev and ratio_max. Losses are per token, then
[aggregated](../algorithms/parts.md#aggregation), and minimised."""
SHARED = (
    ("Aggregation", "rft.algorithm.aggregate", None),
    ("KL estimators", "rft.algorithm.kl", "rft.algorithm.kl:KlArgs"),
    ("KL in the reward", "rft.algorithm.penalty:penalised", None),
    ("Adaptive KL factor", "rft.algorithm.controller:KlController.update", None),
    (
        "Off-policy correction",
        "rft.algorithm.correction:correct",
        "rft.algorithm.settings:CorrectionConfig",
    ),
    ("Mismatch metrics", "rft.algorithm.correction:diagnostics", None),
    ("Value loss of the critic", "rft.algorithm.value:value_loss", None),
    ("Schedule of mix_chord", "rft.algorithm.expert_mix:mu_at", None),
)


def page() -> str:
    """The page as the code says today."""
    REGISTRY.scan_package("rft.algorithm")
    blocks = [
        "# Algorithms: formulas and arguments",
        "<!-- made by scripts/generate_docs.py from rft/algorithm; edit the docstrings instead -->",
        "What every algorithm is made of, the formula and the arguments of every part. Which one to "
        "choose: [algorithms](../algorithms/index.md).",
        "## Which algorithm for what",
        _index(),
        "## Notation",
        NOTATION,
        "## Algorithm types",
    ]
    for name in algorithms():
        blocks += [f"### {name}", *_type(name)]
    for kind in DESCRIBED:
        blocks.append(f"## {TITLES[kind]}: formulas and arguments")
        for part in _described(kind):
            title = f"### {TITLES[kind]} {part}"
            blocks += [title, prose(_docstring(kind, part)), _arguments(kind, part)]
    blocks.append("## Shared rules")
    for title, source, args in SHARED:
        blocks += [f"### {title}", prose(inspect.getdoc(_at(source)) or "")]
        if args:
            blocks.append(_table(_at(args)))
    return "\n\n".join(blocks) + "\n"


def families() -> dict[str, tuple[str, str]]:
    """Page and text of the section of every algorithm."""
    return {
        name: (path.name, text)
        for path in sorted(FAMILIES.glob("*.md"))
        for name, text in re.findall(
            r"^## (\w+)\n(.*?)(?=^## |\Z)", path.read_text(encoding="utf-8"), re.M | re.S
        )
        if name in algorithms()
    }


# ---------------------------------------------------------------- algorithms


def _type(name: str) -> list[str]:
    d = algorithm_defaults(name)
    parts = [f"`{kind}`: {_link(kind, getattr(d, kind))}{_own_args(d, kind)}" for kind in TITLES]
    parts += [f"`loss_agg_mode`: `{d.loss_agg_mode}`", f"`repeat_times`: `{d.repeat_times}`"]
    (file, _) = families()[name]
    when = f"When to use it: [{name}](../algorithms/{file}#{name})."
    return [f"{_linked(d.doc)}  {when}", " · ".join(parts), *_needs(d)]


def _own_args(d: AlgorithmDefaults, kind: str) -> str:
    args: dict[str, Any] = dict(getattr(d, f"{kind}_args", {}))
    return "".join(f", `{name}: {str(value).lower()}`" for name, value in args.items())


def _needs(d: AlgorithmDefaults) -> list[str]:
    notes = []
    for kind in ("advantage_fn", "policy_loss_fn"):
        if issubclass(model := shipped()[kind, getattr(d, kind)], Args):
            if model.before:
                notes.append(
                    "Computed before the step: "
                    + ", ".join(COMPUTED[c] for c in COMPUTED if c in model.before)
                    + "."
                )
            if model.reads:
                notes.append(f"Reads {model.reads}; the workflow has to write it.")
            if model.reference:
                notes.append("Computed in the step: log-probs of the reference model.")
            if model.pairs:
                notes.append("Rows come in pairs, which are never split.")
            if model.samples == "own":
                notes.append("An expert's rows need no log-probs of a sampler.")
            if model.samples == "none":
                notes.append("Rows need no log-probs of a sampler.")
    return [" ".join(notes)] if notes else []


def _link(kind: str, part: str) -> str:
    if kind not in DESCRIBED or part not in _described(kind):
        return f"`{part}`"
    return f"[`{part}`](#{TITLES[kind].lower().replace(' ', '-')}-{part})"


def _index() -> str:
    rows = [
        "| Algorithm | For | Advantage | Policy loss | Runs of a task |",
        "|---|---|---|---|---|",
    ]
    for name, (file, text) in sorted(families().items()):
        d = algorithm_defaults(name)
        (first,) = re.findall(r"\A\s*(.+?[.])(?:\s|\Z)", text, re.DOTALL)
        rows.append(
            f"| [{name}](../algorithms/{file}#{name}) | {' '.join(first.split())} | "
            f"{_link('advantage_fn', d.advantage_fn)} | "
            f"{_link('policy_loss_fn', d.policy_loss_fn)} | {d.repeat_times} |"
        )
    return "\n".join(rows)


# ---------------------------------------------------------------- parts


def _described(kind: str) -> list[str]:
    """Parts of a kind with a section: those that do something or take arguments."""
    return [
        part
        for (k, part), model in shipped().items()
        if k == kind and part != "none" and (k != "sample_strategy" or model.model_fields)
    ]


def _docstring(kind: str, part: str) -> str:
    registered = part in REGISTRY.names(kind)
    text = inspect.getdoc(REGISTRY.get(kind, part).obj if registered else shipped()[kind, part])
    if not text:
        raise ValueError(f"{kind} {part!r} has no docstring")
    if kind == "policy_loss_fn" and part in REGISTRY.names("policy_extra"):
        extra_text = inspect.getdoc(REGISTRY.get("policy_extra", part).obj)
        text += f"\n\nBefore the step, over all of its rows:\n\n{extra_text}"
    return text


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
        rows.append(
            f"| `{name}` | {type_text(field)} | {default_text(field)} | {_linked(meaning)} |"
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
    """Convert a docstring to Markdown: indented lines, formulas and tables, become a block of text."""
    parts: list[tuple[bool, list[str]]] = []
    for line in docstring.splitlines():
        inset = line.startswith("    ") if line else bool(parts) and parts[-1][0]
        if not parts or parts[-1][0] != inset:
            parts.append((inset, []))
        parts[-1][1].append(line)
    blocks = []
    for inset, lines in parts:
        text = "\n".join(lines).strip("\n")
        if inset:
            blocks.append(f"```text\n{textwrap.dedent(text)}\n```")
        elif text:
            blocks.append(_escaped(_linked(text)))
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    """What Markdown would take for emphasis, outside code marks."""
    pieces = re.split(r"(`[^`]*`|\]\([^)]*\))", text)
    return "".join(
        p if i % 2 else re.sub(r"\*|(?<!\w)_(?=\w)|(?<=\W)_(?=\W)", r"\\\g<0>", p)
        for i, p in enumerate(pieces)
    )


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
