"""scripts/model_table.py: a line is written anew, and the rest of the page stays."""

from __future__ import annotations

import re

import model_table
import pytest

from rft.extras.doctor.model_check import ModelLine


def test_a_line_is_written_and_the_rest_stays() -> None:
    page = model_table.PAGE.read_text(encoding="utf-8")
    page = model_table.written(page, "llama", ["1e-06", "2e-06"], True)
    page = model_table.written(page, "llama", ["", "4e-06"], True)
    page = model_table.written(page, "qwen2", ["a", "b", "c", "d"], False)
    layouts, _, engines = page.partition("## With engines")
    assert "| llama | 1e-06 | 4e-06 |" in engines, "a cell that was not computed stays"
    assert (
        "| qwen2 | a | b | c | d |" in layouts
        and layouts.count("| llama |") == layouts.count("| gpt2 |") == 1
    )
    assert (
        "qwen2 | a" not in engines
        and page.count("# Models") == 1
        and page.count("## With engines") == 1
    )


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\de-\d\d", cell)]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # what transformers says of kernels that are not installed
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "mistral", "qwen3_5_text"])
def test_a_small_form_of_the_table(family: str) -> None:
    """Log-probs and the gradients of GRPO, SFT and LoRA in every layout; the page has the same
    verdicts.
    """
    found, exact = model_table.cells(family, ())
    assert exact and len(found) == 4
    line = next(
        x for x in model_table.PAGE.read_text("utf-8").splitlines() if x.startswith(f"| {family} |")
    )
    for cell, written in zip(found, line.strip("| ").split(" | ")[1:], strict=True):
        assert len(_numbers(cell)) == len(_numbers(written)) and cell.startswith(
            "**"
        ) == written.startswith("**")
        assert cell.startswith("refused") == written.startswith("refused") and all(
            n <= 1e-5 for n in _numbers(cell)
        )


def test_the_page_has_nothing_in_between() -> None:
    """Exact, or refused with a reason."""
    layouts, _, engines = model_table.PAGE.read_text("utf-8").partition("## With engines")
    tables = [
        re.findall(r"^\| (?!Family|---)(\w+) \| (.*) \|$", part, re.M)
        for part in (layouts, engines)
    ]
    for (family, rest), limit in [
        *((row, 1e-5) for row in tables[0]),
        *((row, 1e-4) for row in tables[1]),
    ]:
        for cell in filter(None, rest.split(" | ")):
            assert cell.startswith("refused: ") or (
                _numbers(cell) and max(_numbers(cell)) <= limit
            ), f"{family}: {cell}"
    assert (
        len(tables[0]) >= 25
        and sum(bool(_numbers(rest.split(" | ")[1])) for _, rest in tables[1]) >= 10
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("Rejected: engine 0: load: ValueError: experts are padded", "refused: experts are padded"),
        ("SetupError: vllm: X cannot write texts.  Use vllm", "refused: X cannot write texts"),
        (
            "EngineFailed: dead <- RuntimeError: head_dim=8 is unknown",
            "refused: head_dim=8 is unknown",
        ),
    ],
)
def test_a_refusal_is_told_by_its_reason(given: str, shown: str) -> None:
    assert model_table._cell(ModelLine(what="vllm engine", refused=given)) == shown
