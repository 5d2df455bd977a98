"""The table of veRL's keys as data: what each name became here.

Knows how to read `data/verl_keys.tsv`, not what to do with it.  Invariant: a Row says what its line says, nothing is added.
"""

from __future__ import annotations

import csv
import importlib.resources
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

Kind = Literal["native", "derived", "n/a"]


@dataclass(frozen=True)
class Row:
    """One name of veRL's documents.

    Example: section 3, name "actor_rollout_ref.actor.grad_clip", kind "native", default "1.0", targets ("trainer.grad_clip",).
    """

    section: int  # of the table, 1 to 21
    name: str  # with a remark where a name occurs twice: "data.prompt_key (evaluation)"
    kind: Kind
    default: str  # veRL's, as its documents write it
    targets: tuple[str, ...]  # schema keys, command-line options (`rft bench --input`) or metrics (section 21)
    note: str

    @property
    def path(self) -> str:
        """The name without its remark."""
        return self.name.partition(" (")[0]


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the table."""
    text = importlib.resources.files("rft.config").joinpath("data/verl_keys.tsv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(
        Row(
            section=int(line["section"]),
            name=line["name"],
            kind=cast(Kind, line["kind"]),
            default=line["default"],
            targets=tuple(t.strip() for t in (line["targets"] or "").split(";") if t.strip()),
            note=line["note"] or "",
        )
        for line in lines
    )


@cache
def by_path() -> dict[str, Row]:
    """Path → row.  Where a name occurs twice the first one holds: the FSDP form before the Megatron form."""
    found: dict[str, Row] = {}
    for row in rows():
        found.setdefault(row.path, row)
    return found


@cache
def by_target() -> dict[str, tuple[Row, ...]]:
    """Schema key, option or metric → the rows that became it, list indexes written []."""
    found: dict[str, list[Row]] = {}
    for row in rows():
        for target in row.targets:
            found.setdefault(re.sub(r"\[\w*\]", "[]", target), []).append(row)
    return {target: tuple(of) for target, of in found.items()}
