"""The generated pages are up to date and complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from configuration_page import json_schema, markdown

from rft.config.schema.walk import all_keys, extra, field_at

ROOT = Path(__file__).parents[3]


@pytest.mark.extra
def test_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_is_documented() -> None:
    page = markdown()
    for key in all_keys():
        field = field_at(tuple(re.sub(r"\[\]", "", key).split(".")))
        assert field is not None and field.description, key
        listed = key.replace("explorer_input.taskset.", "explorer_input.tasksets[].").replace(
            "eval_tasksets[]", "tasksets[]"
        )
        listed = listed.replace("task_pipeline.output.", "tasksets[].").replace(
            "auxiliary_buffers.*.", "experience_buffer."
        )
        listed = listed.replace("data_processor.tasksets[]", "buffer.explorer_input.tasksets[]")
        has_below = any(k.startswith((f"{key}.", f"{key}[].")) for k in all_keys())
        assert has_below or f"`{listed}`" in page, key


def test_numbers_have_a_unit_or_a_reason() -> None:
    """A key that ends in a unit-like word, or counts something, says what it counts."""
    for key in all_keys():
        field = field_at(tuple(re.sub(r"\[\]", "", key).split(".")))
        assert field is not None
        is_number = "int" in str(field.annotation) or "float" in str(field.annotation)
        if is_number and re.search(
            r"(timeout|_tokens|_len|_steps|_interval|_times|_bytes|_num|_size|_rows|_threads)$", key
        ):
            assert extra(field, "unit"), key


def test_json_schema_accepts_the_examples() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (ROOT / "examples").glob("*/config.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()))), path
    assert list(validator.iter_errors({"trainer": {"total_step": 3}}))
    assert not list(validator.iter_errors({"trainer": {"total_steps": "${oc.env:STEPS}"}}))


def test_json_schema_knows_what_is_read_before_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    good = {
        "extends": ["base.yaml", "${oc.env:OTHER}"],
        "stages": [
            {"stage_name": "one"},
            {"stage_name": "two", "trainer": {"total_steps": 3}, "mode": "both"},
        ],
    }
    assert not list(validator.iter_errors(good))
    for bad in (
        {"extends": 3},
        {"stages": [{}]},
        {"stages": [{"stage_name": "a", "model": {}}]},
        {"stages": {"a": {}}},
    ):
        assert list(validator.iter_errors(bad)), bad
    assert list(
        validator.iter_errors({"stages": [{"stage_name": "a", "trainer": {"total_step": 3}}]})
    )
