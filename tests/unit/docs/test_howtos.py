"""The documents do what they say: every block of every how-to is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import howto
from tests.helpers.command import forget_plugins

PAGES = sorted((howto.ROOT / "docs" / "howto").glob("*.md"))


@pytest.mark.e2e
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_howto(
    page: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")  # what is printed is compared line by line
    monkeypatch.chdir(tmp_path)
    try:
        howto.play(page, tmp_path, tiny_model)
    finally:  # what the page has marked is not there for other tests
        forget_plugins(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_page_can_be_found(page: Path) -> None:
    """From the start page or one that it links to, and in the site's menu."""
    docs = howto.ROOT / "docs"
    menu = (howto.ROOT / "mkdocs.yml").read_text()
    start = (docs / "index.md").read_text()
    linked = [docs / to for to in re.findall(r"\]\(([\w/.-]+\.md)", start)]
    assert f"howto/{page.name}" in menu, "not in mkdocs.yml"
    assert page in linked or any(
        f"({page.name}" in p.read_text() or f"howto/{page.name}" in p.read_text() for p in linked
    )


def test_authors_have_their_pages() -> None:
    start = (howto.ROOT / "docs" / "index.md").read_text()
    for name in ("workflow", "reward", "judge", "agent", "environment", "debug"):
        assert f"(howto/{name}.md)" in start, name


def test_the_runner_notices_what_is_wrong(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    for body, why in [
        ("```console\n$ rft --version\nrft 99…\n```\n", "did not print"),
        ("```console\n$ rft check --config missing.yaml\n```\n", "ended with 2, expected 0"),
        ("```console\n$ rm -rf x\n```\n", "may use rft"),
        ("```python\nassert False, 'no'\n```\n", "no"),
        ("```yaml\nmodel: {tempreature: 1}\n```\n", "tempreature"),
    ]:
        page.write_text(body)
        with pytest.raises(Exception, match=why):
            howto.play(page, tmp_path, tiny_model)
