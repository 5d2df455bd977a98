"""What a check says of the layout of rows, and which keys choose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.plan import Facts
from rft.preflight.check import check
from rft.preflight.check_report import Report
from rft.testing import tiny

GOOD = Path(__file__).parent / "data" / "good"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("models") / "tiny")


def run(model: Path, config: dict[str, Any], *overrides: str) -> Report:
    """The check of a run whose model says `config` besides what it says."""
    page = model / "config.json"
    before = page.read_text()
    page.write_text(json.dumps({**json.loads(before), **config}))
    try:
        rows = f"buffer.explorer_input.taskset.path={GOOD.parent / 'rows.jsonl'}"
        return check(
            GOOD / "short.yaml",
            [f"model.model_path={model}", rows, *overrides],
            facts=Facts(cpus=2, gpus=0),
        )
    finally:
        page.write_text(before)


def layout(report: Report) -> str:
    assert report.plan is not None and report.ok, report.errors
    return report.plan.learner.row_layout


def test_layers_that_are_not_shared_are_packed_or_padded_with_a_notice(model: Path) -> None:
    plain = run(model, {})
    assert layout(plain) == "auto" and plain.model["row_layout"] == "shared"
    assert plain.model["row_layout_why"] == "every layer is full_attention"
    hybrid = run(model, {"layer_types": ["linear_attention", "full_attention"]})
    assert layout(hybrid) == "auto" and hybrid.model["row_layout"] == "packed"
    (note,) = [n for n in hybrid.notes if "row_layout" in n]
    assert note.endswith("linear_attention carries state, so it computes packed rows one by one")
    indexed = run(model, {"layer_types": ["indexed_attention", "full_attention"]})
    assert layout(indexed) == "padded" == indexed.model["row_layout"]
    assert indexed.plan is not None and indexed.plan.learner.critic.row_layout == "padded"


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        (
            {"layer_types": ["mystery"]},
            (),
            "trainer.row_layout: the model has layers of type mystery",
        ),
        (
            {"layer_types": ["conv"]},
            ("trainer.row_layout=shared",),
            "trainer.row_layout: conv carries state",
        ),
        (
            {},
            ("trainer.row_layout=shared", "trainer.attn_implementation=eager"),
            "shared rows need trainer.attn_implementation: auto",
        ),
        *(
            (
                {},
                (f"trainer.attn_implementation={kernel}",),
                f"trainer.attn_implementation: {kernel} computes bfloat16 and float16 on GPUs, not "
                f"float32 on cpu",
            )
            for kernel in ("flash_attention_2", "varlen")
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 8},
            (),
            "longrope rotary embeddings change",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(
    model: Path, config: dict[str, Any], overrides: tuple[str, ...], said: str
) -> None:
    report = run(model, config, *overrides)
    assert any(said in str(e) for e in report.errors), report.errors


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (("trainer.row_layout=packed",), "packed"),
        (("trainer.attn_implementation=eager",), "padded"),
        (("trainer.row_layout=padded",), "padded"),
    ],
)
def test_the_asked_layout_is_chosen(model: Path, overrides: tuple[str, ...], chosen: str) -> None:
    assert layout(run(model, {}, *overrides)) == chosen


def test_an_unknown_layer_type_is_trained_with_padded_rows_when_asked(model: Path) -> None:
    assert layout(run(model, {"layer_types": ["mystery"]}, "trainer.row_layout=padded")) == "padded"
