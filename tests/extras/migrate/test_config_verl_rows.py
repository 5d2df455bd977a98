"""Every row of veRL's table is accounted for: its target exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rft.cli.commands import all_commands
from rft.config.schema.walk import all_keys
from rft.extras.migrate.compat.key_names import describe
from rft.extras.migrate.compat.keys.verl_keys import Row, by_path, by_target, rows
from tests.helpers.rows import for_each

METRICS = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(
    encoding="utf-8"
)
COUNTS = {  # section: native, derived, n/a or refused
    1: (17, 3, 4),
    2: (8, 1, 6),
    3: (20, 1, 2),
    4: (8, 1, 0),
    5: (5, 4, 6),
    6: (5, 2, 3),
    7: (6, 0, 0),
    8: (6, 5, 4),
    9: (16, 7, 2),
    10: (11, 3, 6),
    11: (15, 5, 3),
    12: (5, 4, 15),
    13: (1, 1, 0),
    14: (14, 1, 0),
    15: (21, 4, 11),
    16: (2, 0, 0),
    17: (6, 1, 3),
    18: (15, 1, 1),
    19: (13, 5, 0),
    20: (14, 4, 2),
    21: (9, 0, 0),
    22: (12, 13, 181),
    23: (10, 8, 13),
}
TARGETS = sorted({t for row in rows() for t in row.targets})


def test_counts() -> None:
    found = Counter((r.section, "n/a" if r.kind == "refused" else r.kind) for r in rows())
    assert {s: (found[s, "native"], found[s, "derived"], found[s, "n/a"]) for s in COUNTS} == COUNTS
    total = Counter(r.kind for r in rows() if r.section < 22)
    assert (total.total(), total["native"], total["derived"], total["n/a"], total["refused"]) == (
        338,
        217,
        53,
        57,
        11,
    )


def test_names_are_unique() -> None:
    assert max(Counter(r.name for r in rows()).values()) == 1
    assert by_path()["actor_rollout_ref.actor.optim.lr"].section == 4, "the FSDP form comes first"


@for_each("row", rows(), ids=lambda r: r.name)
def test_native_rows_have_a_target_and_others_a_reason(row: Row) -> None:
    assert row.targets if row.kind == "native" else (row.note or row.targets)
    assert row.kind not in ("n/a", "refused") or (not row.targets and row.note)


def is_key(target: str) -> bool:
    """A key of the schema, or an argument below one that is a mapping of arguments."""
    key = re.sub(r"\[\w*\]", "[]", target)
    above, _, _ = key.rpartition(".")
    return key in all_keys() or (above in all_keys() and above.endswith("_args"))


def is_metric(target: str) -> bool:
    return f"`{target}`" in METRICS


def is_option(target: str) -> bool:
    return target.startswith("rft ") and target.split()[1] in all_commands()


@for_each("target", TARGETS)
def test_every_target_exists(target: str) -> None:
    exists = is_key(target) or is_metric(target) or is_option(target)
    assert exists, target


@pytest.mark.parametrize("target", [t for t in TARGETS if re.search(r"_args\.\w+$", t)])
def test_arguments_are_taken_by_a_part_or_listed(target: str) -> None:
    """Arguments of algorithm parts have a model; those of rewards and workflows are a plugin's own,
    unless they come later.
    """
    (said,) = [
        d
        for row in by_target()[re.sub(r"\[\w*\]", "[]", target)]
        for d in describe(row.path)
        if d.key == said_key(target)
    ][:1]
    assert said.meaning
    if target.startswith("algorithm."):
        assert said.type != "command-line option", f"no part takes {target}"


def said_key(target: str) -> str:
    return re.sub(r"\[\w*\]", "[]", target)


def test_metrics_that_exist_are_found() -> None:
    names = {t for row in rows() if row.section == 21 for t in row.targets}
    assert {"actor/ppo_kl", "actor/pg_clipfrac"} <= {t for t in names if is_metric(t)}
