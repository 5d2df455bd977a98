"""scripts/model_table.py: a line is written anew, and the rest of the page stays."""

from __future__ import annotations

import model_table
import pytest

from rft.launch.model_check import ModelLine


def test_a_line_is_written_and_the_rest_stays() -> None:
    page = model_table.PAGE.read_text(encoding="utf-8")
    page = model_table.written(page, "llama", ["1e-06", "2e-06"], True)
    page = model_table.written(page, "llama", ["", "4e-06"], True)
    page = model_table.written(page, "qwen2", ["a", "b", "c", "d"], False)
    layouts, _, engines = page.partition("## With engines")
    assert "| llama | 1e-06 | 4e-06 |" in engines, "a cell that was not computed stays"
    assert "| qwen2 | a | b | c | d |" in layouts and layouts.count("| llama |") == layouts.count("| gpt2 |") == 1
    assert "qwen2 | a" not in engines and page.count("# Models") == 1 and page.count("## With engines") == 1


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("Rejected: engine 0: load: ValueError: experts are padded", "refused: experts are padded"),
        ("SetupError: vllm: X cannot write texts.  Use vllm", "refused: X cannot write texts"),
        ("EngineFailed: dead <- RuntimeError: head_dim=8 is unknown", "refused: head_dim=8 is unknown"),
    ],
)
def test_a_refusal_is_told_by_its_reason(given: str, shown: str) -> None:
    assert model_table._cell(ModelLine(what="vllm engine", refused=given)) == shown
