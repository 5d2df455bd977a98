"""scripts/pages.py: the part between two marks is written anew, and the rest of the page stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import put


def test_a_part_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- a -->\nold\n<!-- end -->\nbetween\n<!-- b -->\n<!-- end -->\nafter\n"
    )
    for text in ("first", "second\n"):
        put(page, "<!-- a -->", "<!-- end -->", text)
    put(page, "<!-- b -->", "<!-- end -->", "third")
    assert page.read_text() == (
        "before\n<!-- a -->\n\nsecond\n\n<!-- end -->\nbetween\n<!-- b -->\n\nthird\n\n<!-- end "
        "-->\nafter\n"
    )
    whole = page.read_text()
    for marks in (("<!-- c -->", "<!-- end -->"), ("<!-- a -->", "<!-- over -->")):
        with pytest.raises(ValueError, match=r"lacks <!-- (c|over) -->"):
            put(page, *marks, "lost")
    assert page.read_text() == whole
