"""docs/algorithms and docs/reference/algorithms.md: every algorithm and part has its place, every
example is accepted, every named test exists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import algorithm_pages
import pytest
import yaml

from rft.algorithm.catalog import algorithm_defaults, algorithms, shipped
from rft.preflight.check import check
from tests.helpers.rows import for_each

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "algorithms"
REFERENCE = (ROOT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
EXAMPLES = [
    (page, i, m)
    for page, text in TEXTS.items()
    for i, m in enumerate(re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S))
]


@for_each("name", algorithms())
def test_every_algorithm_has_a_section(name: str) -> None:
    _, text = algorithm_pages.families()[name]
    assert f"(../reference/algorithms.md#{name})" in text
    examples = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    types = [yaml.safe_load(body)["algorithm"]["algorithm_type"] for body in examples]
    assert types == [name]
    assert f"\n### {name}\n" in REFERENCE


@pytest.mark.parametrize(
    ("page", "i", "body"), EXAMPLES, ids=[f"{page}-{i}" for page, i, _ in EXAMPLES]
)
def test_example(
    page: str, i: int, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rft check --schema-only` accepts it; a part of a configuration is put into the first page's."""
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(body)
    if "model" not in given:
        given = next(yaml.safe_load(b) for p, _, b in EXAMPLES if p == "index") | given
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    report = check(path, schema_only=True)
    assert not report.errors and not report.warnings


@pytest.mark.e2e
def test_named_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXTS["index"])
    assert named
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        there = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in there, f"{file}::{function}"


def test_every_part_is_described_once() -> None:
    titles = re.findall(r"^##+ (Advantage|Policy loss) (\w+)$", REFERENCE, re.MULTILINE)
    kinds = {"advantage_fn": "Advantage", "policy_loss_fn": "Policy loss"}
    assert sorted(titles) == sorted(
        (kinds[kind], part) for kind, part in shipped() if kind in kinds and part != "none"
    )


def test_papers_are_those_that_the_code_names() -> None:
    code = "\n".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "rft" / "algorithm").glob("*.py")
    )
    known = set(re.findall(r"arXiv:(\d{4}\.\d{5})", code))
    for page, text in {**TEXTS, "reference": REFERENCE}.items():
        assert set(re.findall(r"\d{4}\.\d{5}", text)) <= known, page


def test_defaults_come_from_the_models() -> None:
    model = shipped()["policy_loss_fn", algorithm_defaults("gspo").policy_loss_fn]
    text = algorithm_pages._arguments("policy_loss_fn", "gspo")
    assert all(f"| `{name}` |" in text for name in model.model_fields) and "| `0.0003` |" in text


def test_docstrings_become_markdown() -> None:
    text = algorithm_pages.prose("""With *stars*, _lines_ and a_b (arXiv:1707.06347):

    loss = x * y
      more

Then `*this*`.""")
    assert text == (
        "With \\*stars\\*, \\_lines_ and a_b "
        "([arXiv:1707.06347](https://arxiv.org/abs/1707.06347)):\n\n"
        "```text\nloss = x * y\n  more\n```\n\nThen `*this*`."
    )


def test_every_part_has_a_docstring_with_its_formula() -> None:
    algorithm_pages.REGISTRY.scan_package("rft.algorithm")
    for kind, part in shipped():
        if kind in ("advantage_fn", "policy_loss_fn"):
            assert len(algorithm_pages._docstring(kind, part)) > 40, (kind, part)
