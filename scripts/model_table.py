"""Writes docs/models.md: families of models x layouts of rows, against plain rows of transformers in float32.

    python scripts/model_table.py [FAMILY ...] [--write]

Each tiny random model is compared as `rft doctor --model` compares one: log-probs, and the gradients of one GRPO step, of SFT and of an
adapter of all linear layers in its first GRPO step.  "refused" says why a layout is not used.
Exit code 1 if a layout that is used is more than 1e-5 off.
`--write` replaces the lines of the families that were computed, and keeps the others.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import tempfile
import textwrap
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rft.launch.model_check import EXACT, ModelLine, Objective, compare  # noqa: E402
from rft.trainer.loading import no_progress  # noqa: E402
from rft.types.row_layout import RowLayout  # noqa: E402
from tests.helpers import families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

Tiny random models of each family, computed by the trainer in each layout of rows (`trainer.row_layout`), against transformers row by row
in float32 on a CPU. The four numbers are the largest difference of log-probs in nats, and the relative differences of the gradients of one
GRPO step, of SFT, and of a LoRA adapter in its first GRPO step; the right side itself is compared with float64 in the second column. `auto`
takes the layout in bold. A fourth number that is refused: peft does not adapt all linear layers of this family (name others), or the rank
of 4 is more than a layer has.
Made by `python scripts/model_table.py --write` on {machine}. `rft doctor --model PATH` makes the same comparison,
and one with the engines, for a model of your own.

When a model is loaded, the trainer compares its rows with plain rows again: differences up to 1e-5 nats in float32 are exact. Where they
are larger, and in bfloat16, they have to be within a multiple of the model's own rounding noise, and the layout has to be exact (1e-5) in
float64 on a copy of the model's first layers, one of every kind, with random weights. Where that copy needs over half of the free memory,
or cannot be computed, the log says so; then the layer types of the configuration and the comparison in the model's own type decide.

| Family | float64 | shared | packed | padded |
|---|---|---|---|---|
"""


def line(name: str) -> tuple[str, bool]:
    """A line of the table, and whether every layout that is used is exact."""
    with tempfile.TemporaryDirectory() as made, no_progress():
        report = compare(families.make(name, Path(made) / name), "cpu", objectives=get_args(Objective))
    double, *layouts = report.lines
    exact = report.error is None and all(cell.refused or replace(cell, limit=EXACT).exact for cell in layouts)
    assert [cell.what for cell in layouts] == list(get_args(RowLayout))
    return f"| {name} | {' | '.join(_cell(cell) for cell in (double, *layouts))} |", exact


def _cell(cell: ModelLine) -> str:
    if cell.refused:
        return "refused: " + textwrap.shorten(re.sub(r"^.* cannot be computed: |\.  .*$", "", cell.refused), 90)
    numbers = {"": cell.logprobs or 0.0, **cell.gradients}
    there = [o for o in ("", *get_args(Objective)) if o in numbers or o in cell.without]
    shown = " / ".join(f"{numbers[o]:.0e}" if o in numbers else "refused" for o in there)
    return f"**{shown}**" if cell.chosen else shown


def machine() -> str:
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    return f"{os.cpu_count()} {platform.machine()} cores, {datetime.now(UTC):%Y-%m-%d}, {versions}"


def main() -> int:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    asked = [a for a in sys.argv[1:] if a != "--write"] or list(families.FAMILIES)
    wrong = []
    for name in asked:
        text, exact = line(name)
        print(text, flush=True)
        if "--write" in sys.argv:
            _write(name, text)
        if not exact:
            wrong.append(name)
    if wrong:
        print(f"not exact: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


def _write(name: str, text: str) -> None:
    """Put the line of `name` into the page, below its head of today."""
    there = {n: whole for whole, n in re.findall(r"^(\| (\w+) \|.*)$", PAGE.read_text(encoding="utf-8"), re.M)}
    there[name] = text
    lines = [there[n] for n in families.FAMILIES if n in there]
    PAGE.write_text(HEAD.format(machine=machine()) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
