"""Single experiences for people: what was asked and answered, what it earned, which weights wrote it and which steps trained it.

It does not know terminals.  The one invariant: what it says of lineage is the ledger's view v_lineage.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rft.buffer.query import Questions
from rft.errors import ConfigError, PayloadDamaged
from rft.types.experience import Experience
from rft.types.ids import Version


class Use(msgspec.Struct, frozen=True):
    """One optimizer step that trained an experience."""

    version: Version  # lineage and step
    counts: bool  # False: the run went on from a checkpoint before it, no weights rest on this use any more
    checkpoint: str | None  # folder of the first checkpoint that rests on it; None: none does yet
    there: bool  # whether that folder is still there


class Shown(msgspec.Struct, frozen=True):
    """One experience: its row of v_experiences, its payload (None where it is gone, `gone` says why) and its uses."""

    row: dict[str, Any]
    payload: Experience | None
    gone: str
    uses: tuple[Use, ...]


def look(questions: Questions, *, num: int = 3, id: str | None = None, where: str = "") -> list[Shown]:
    """The experience `id`, or `num` that fulfil `where`, drawn at random.  Raises ConfigError where there is no such id."""
    rows = questions.draw(where, num) if id is None else questions.row(id)
    if id is not None and not rows:
        raise ConfigError(
            f'{id!r} is not in {questions.where}; `rft buffer query RUN "SELECT id FROM v_experiences LIMIT 5"` shows some ids',
            key="--id",
            given=id,
        )
    return [Shown(row, *_payload(questions, row["id"]), _uses(questions, row["id"])) for row in rows]


def _payload(questions: Questions, id: str) -> tuple[Experience | None, str]:
    if not questions.storage.durable:
        return None, "kept in memory only (path: none)"
    try:
        return questions.payload([id])[id], ""
    except PayloadDamaged as e:
        return None, str(e)


def _uses(questions: Questions, id: str) -> tuple[Use, ...]:
    found = []
    for row in questions.lineage(id):
        name = None if row["checkpoint_step"] is None else f"global_step_{row['checkpoint_step']}"
        there = name is not None and (questions.run_dir / "checkpoints" / name / "manifest.json").is_file()
        found.append(Use(Version(row["train_lineage"], row["train_step"]), bool(row["counts"]), name, there))
    return tuple(found)
