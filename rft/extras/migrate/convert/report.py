"""What a conversion writes: the configuration as YAML that people like to read, and its account as
JSON, Markdown or a comment on top.

Depends on no veRL key, and the schema for the order of keys alone.  Invariant: every argument is
told once, with its line, its outcome and its reason; reading the YAML gives the same values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import yaml

from rft.config import yamlfile
from rft.errors import ConfigError
from rft.extras.migrate.convert.draft import KINDS, LABELS, ArgumentRow, ordered
from rft.extras.migrate.convert.verl import Conversion


def to_json(c: Conversion) -> dict[str, Any]:
    """Plain values."""
    return {
        "program": c.program,
        "source": c.source,
        "profile": c.profile,
        "counts": {LABELS[k]: n for k, n in c.counts.items()},
        "arguments": [
            {f: getattr(r.argument, f) for f in ("key", "value", "text", "line")}
            | {
                "outcome": LABELS[r.outcome.kind],
                "targets": list(r.outcome.targets),
                "reason": r.outcome.reason,
            }
            for r in c.rows
        ],
        "written": [asdict(w) for w in c.written],
        "notes": list(c.notes),
        "warnings": list(c.warnings),
        "questions": list(c.questions),
        "gpu": asdict(c.gpus) if c.gpus is not None else None,
        "command": c.command or None,
        "check": {"errors": list(c.errors)},
    }


def account(done: Conversion, *, as_json: bool) -> str:
    """The full report of a conversion, as JSON or Markdown."""
    return json.dumps(to_json(done), indent=2, ensure_ascii=False) if as_json else markdown(done)


def refusal(source: str, error: ConfigError, *, as_json: bool) -> str:
    """The account of a file that cannot be converted at all."""
    errors = [{"key": e.key, "message": str(e)} for e in error.errors]
    if as_json:
        return json.dumps(
            {"program": None, "source": source, "errors": errors}, indent=2, ensure_ascii=False
        )
    lines = [
        f"# {source}: veRL, not converted",
        "",
        *(f"- {_one_line(e['message'])}" for e in errors),
    ]
    return "\n".join(lines)


def summary(c: Conversion) -> str:
    parts = [f"{c.counts[k]} {LABELS[k]}" for k in KINDS if c.counts[k]]
    return f"{sum(c.counts.values())} arguments: {', '.join(parts) or 'none'}"


def head(c: Conversion) -> list[str]:
    """Comment lines for the YAML: what it was made from, and what was refused."""
    lines = [
        f"Converted from {c.source} (veRL, {c.program}) by `rft convert verl`, profile "
        f"{c.profile}.",
        f"{summary(c)}.  The whole account: rft convert verl ... --report report.md",
    ]
    if c.questions:
        lines += ["", "To be decided:", *(f"  {_one_line(q)}" for q in c.questions)]
    if c.refused:
        lines += ["", "Refused, and therefore not in this file (--allow):"]
        for a, outcome in ((r.argument, r.outcome) for r in c.refused):
            lines.append(f"  line {a.line}: {_one_line(f'{a.key}={a.text}')}: {outcome.reason}")
    return lines


_PLACES = {  # veRL's group -> our section
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.rollout": "explorer",
    "actor_rollout_ref": "trainer",
    "algorithm": "algorithm",
    "critic": "trainer",
    "trainer": "trainer",
}


def draft(c: Conversion) -> str:
    """The YAML file with each open argument, and each key that is not valid, as a comment in its
    section.
    """
    within: dict[str, list[str]] = {}
    for a, outcome in ((r.argument, r.outcome) for r in c.refused):
        place = next((p for g, p in _PLACES.items() if f"{a.key}.".startswith(f"{g}.")), "buffer")
        text = _one_line(f"line {a.line}: {a.key}={a.text}: {outcome.reason}")
        within.setdefault(place, []).append(f"to decide: {text}")
    for error in c.errors:
        within.setdefault(error.partition(".")[0], []).append(f"rft check: {_one_line(error)}")
    rest = [line for place in within if place not in c.values for line in within[place]]
    lines = [*head(dataclasses.replace(c, rows=())), *rest]
    return yaml_text(c.values, lines, within)


def markdown(c: Conversion) -> str:
    lines = [
        f"# {c.source}: veRL {c.program} converted, profile {c.profile}",
        "",
        f"{summary(c)}.",
        "",
    ]
    if c.command:
        lines += ["```", c.command, "```", ""]
    for kind in KINDS:
        rows = [r for r in c.rows if r.outcome.kind == kind]
        if rows:
            header = ("| Line | Argument | Value | Here | Reason |", "|---|---|---|---|---|")
            lines += [f"## {LABELS[kind].capitalize()}", "", *header, *map(_table_row, rows), ""]
    if c.written:
        lines += ["## Written", "", "| Key | Value | From |", "|---|---|---|"]
        lines += [
            f"| `{w.key}` | {_code(json.dumps(w.value, ensure_ascii=False))} | {_cell(w.why)} |"
            for w in c.written
        ] + [""]
    if c.gpus is not None:
        g = c.gpus
        rollout = "shared" if g.shared else f"{g.rollout} rollout"
        lines += [
            "## GPUs",
            "",
            "| | here | veRL |",
            "|---|---|---|",
            f"| GPUs | {g.total} = {rollout} + {g.auxiliary} auxiliary + {g.trainer} trainer | "
            f"{g.verl['gpus']}, all shared |",
            f"| rows of a step on one rank | "
            f"{_or(g.local_mini_batch, f'{g.rows} / {g.data_parallel} is not whole')} | "
            f"{_or(g.verl['local_mini_batch'], 'not whole')} |",
            f"| actor accumulation steps | {_or(g.actor_accumulation)} | "
            f"{_or(g.verl['actor_accumulation'])} |",
            f"| critic accumulation steps | {_or(g.critic_accumulation)} | "
            f"{_or(g.verl['critic_accumulation'])} |",
            "",
        ]
    sections = (
        ("To be decided", c.questions),
        ("Warnings", c.warnings),
        ("Notes", c.notes),
        ("`rft check` refuses", c.errors),
    )
    for title, texts in sections:
        if texts:
            lines += [f"## {title}", "", *(f"- {_one_line(t)}" for t in texts), ""]
    return "\n".join(lines)


def _table_row(r: ArgumentRow) -> str:
    here = "<br>".join(f"`{t}`" for t in r.outcome.targets)
    a = r.argument
    return (
        f"| {a.line} | `{a.prefix}{a.key}` | {_code(a.text)} | {here} | {_cell(r.outcome.reason)} |"
    )


def _or(number: int | None, other: str = "by tokens") -> str:
    return other if number is None else str(number)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text.strip() else ""


# -- the YAML file


class _ConfigDumper(yamlfile.Dumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:  # other readers of YAML take 1e-06 for a text
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    short = not any(isinstance(v, dict | list) for v in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


_ConfigDumper.add_representer(float, _float)
_ConfigDumper.add_representer(list, _list)


def yaml_text(
    values: dict[str, Any],
    comments: Sequence[str] = (),
    within: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """The whole file: comments, then the sections in the schema's order with an empty line between
    them; `within`: comments at the head of a section.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    parts: list[str] = []
    for key, value in ordered(values).items():
        dumped = yaml.dump(
            {key: value}, Dumper=_ConfigDumper, sort_keys=False, width=10_000, allow_unicode=True
        )
        if notes := within.get(key):
            first, _, rest = dumped.partition("\n")
            dumped = "\n".join([first, *(f"  # {note}" for note in notes), rest])
        apart = isinstance(value, dict) or not parts
        parts.append(("\n" if apart and (parts or head) else "") + dumped)
    return head + "".join(parts)
