"""The account of a conversion: as JSON, as Markdown, and as the comment on top of the YAML.

Knows no veRL key.  Invariant: every argument is told once, with its line, its outcome and its reason.
"""

from __future__ import annotations

import json
from typing import Any

from rft.convert.draft import LABELS, Kind, Row
from rft.convert.verl import Conversion

ORDER: tuple[Kind, ...] = ("refused", "mapped", "equal", "derived", "ignored")


def to_json(c: Conversion) -> dict[str, Any]:
    """Plain values."""
    return {
        "program": c.program,
        "source": c.source,
        "profile": c.profile,
        "counts": {LABELS[k]: n for k, n in c.counts.items()},
        "arguments": [
            {
                "key": r.argument.key,
                "value": r.argument.value,
                "text": r.argument.text,
                "line": r.argument.line,
                "outcome": LABELS[r.outcome.kind],
                "targets": list(r.outcome.targets),
                "reason": r.outcome.reason,
            }
            for r in c.rows
        ],
        "written": [{"key": w.key, "value": w.value, "why": w.why} for w in c.written],
        "notes": list(c.notes),
        "warnings": list(c.warnings),
        "gpu": c.gpus.to_json() if c.gpus is not None else None,
        "command": c.command or None,
        "check": {"errors": list(c.errors), "not_active": list(c.not_active)},
    }


def summary(c: Conversion) -> str:
    parts = [f"{c.counts[k]} {LABELS[k]}" for k in ORDER if c.counts[k]]
    return f"{len(c.rows)} arguments: {', '.join(parts) or 'none'}"


def head(c: Conversion) -> list[str]:
    """Comment lines for the YAML: what it was made from, and what was refused."""
    lines = [
        f"Converted from {c.source} (veRL, {c.program}) by `rft convert verl`, profile {c.profile}.",
        f"{summary(c)}.  The whole account: rft convert verl ... --report report.md",
    ]
    if c.refused:
        lines += ["", "Refused, and therefore not in this file (--allow):"]
        lines += [
            f"  line {r.argument.line}: {_one_line(f'{r.argument.key}={r.argument.text}')}: {r.outcome.reason}" for r in c.refused
        ]
    return lines


def markdown(c: Conversion) -> str:
    lines = [f"# {c.source}: veRL {c.program} converted, profile {c.profile}", "", f"{summary(c)}.", ""]
    if c.command:
        lines += ["```", c.command, "```", ""]
    for kind in ORDER:
        rows = [r for r in c.rows if r.outcome.kind == kind]
        if rows:
            lines += [
                f"## {LABELS[kind].capitalize()}",
                "",
                "| Line | Argument | Value | Here | Reason |",
                "|---|---|---|---|---|",
            ]
            lines += [_table_row(r) for r in rows] + [""]
    if c.written:
        lines += ["## Written", "", "| Key | Value | From |", "|---|---|---|"]
        lines += [f"| `{w.key}` | {_code(json.dumps(w.value, ensure_ascii=False))} | {_cell(w.why)} |" for w in c.written] + [""]
    if c.gpus is not None:
        g = c.gpus
        lines += [
            "## GPUs", "",
            "| | here | veRL |", "|---|---|---|",
            f"| GPUs | {g.total} = {g.rollout} rollout + {g.auxiliary} auxiliary + {g.trainer} trainer | {g.verl['gpus']}, all shared |",
            f"| rows of a step on one rank | {_or(g.local_mini_batch, f'{g.rows} / {g.data_parallel} is not whole')} | "
            f"{_or(g.verl['local_mini_batch'], 'not whole')} |",
            f"| actor accumulation steps | {_or(g.actor_accumulation)} | {_or(g.verl['actor_accumulation'])} |",
            f"| critic accumulation steps | {_or(g.critic_accumulation)} | {_or(g.verl['critic_accumulation'])} |",
            "",
        ]  # fmt: skip
    sections = (("Warnings", c.warnings), ("Notes", c.notes), ("`rft check` refuses", c.errors), ("Not active yet", c.not_active))
    for title, texts in sections:
        if texts:
            lines += [f"## {title}", "", *(f"- {_one_line(t)}" for t in texts), ""]
    return "\n".join(lines)


def _table_row(r: Row) -> str:
    here = "<br>".join(f"`{t}`" for t in r.outcome.targets)
    a = r.argument
    return f"| {a.line} | `{a.prefix}{a.key}` | {_code(a.text)} | {here} | {_cell(r.outcome.reason)} |"


def _or(number: int | None, other: str = "by tokens") -> str:
    return other if number is None else str(number)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text.strip() else ""
