"""The pages fit the code: keys, messages, columns and links are those that are there; the
quickstart's commands run.
"""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from sqlalchemy import create_engine

from rft.buffer import schema
from rft.buffer.schema import experiences, metadata
from rft.config.schema.walk import all_keys
from tests.helpers import howto
from tests.helpers.rows import for_each

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def table(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table after `heading`, without head and rule."""
    text = (DOCS / page).read_text(encoding="utf-8").split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None, f"{page} has no table after {heading!r}"
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def code(text: str) -> list[str]:
    """What stands in code marks, outside fenced blocks."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    )


def strings(folder: Path) -> str:
    """Every text in the code, the fixed parts of f-strings one after the other."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": (\S+\.md)$", config, re.MULTILINE))
    there = {str(p.relative_to(DOCS)) for p in PAGES if "measured" not in p.parts}
    assert there <= listed, f"not in mkdocs.yml: {sorted(there - listed)}"


def test_no_list_of_the_navigation_is_long() -> None:
    """N24: one flat list of 27 how-tos."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    howtos = config.split("  - How to:\n")[1].split("  - Algorithms:\n")[0]
    groups = re.split(r"^      - [^:\n]+:$", howtos, flags=re.MULTILINE)[1:]
    assert len(groups) >= 4 and all(group.count(".md") <= 8 for group in groups)


def test_the_copy_button_covers_no_command() -> None:
    """N24: the end of the first command was under it."""
    css = (DOCS / "assets" / "tables.css").read_text(encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "content.code.copy" in config and "extra_css: [assets/tables.css]" in config
    assert re.search(r"^\.md-typeset pre > code \{ padding-right: \d+rem; \}$", css, re.MULTILINE)


@for_each("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text(encoding="utf-8")
    ):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {
                re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", t.replace("`", "").lower()).strip())
                for t in titles
            }
            assert anchor[1:] in slugs, f"{page.name} links to {target}{anchor}"


def test_decisions_are_short_and_complete() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    numbers = [p.name[:4] for p in pages]
    assert numbers == sorted(set(numbers)) and all(n.isdigit() for n in numbers)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40, page.name
        assert all(f"**{part}.**" in text for part in ("Context", "Choice", "Price")), page.name


def test_keys_on_the_right_of_the_other_tools_are_keys() -> None:
    keys = {re.sub(r"\[\]", "", k) for k in all_keys()} | {"kl_coef"}
    for _, cell in table("howto/from-verl.md", "## From TRL"):
        for text in code(cell):
            name = text.split(":")[0]
            if "." in name:
                assert name in keys or name.rsplit(".", 1)[0] in keys, text


def test_extras_are_named_where_they_are_installed() -> None:
    page = (
        (DOCS / "install-cpu.md")
        .read_text(encoding="utf-8")
        .split("## Extras")[1]
        .split("\n## ")[0]
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(extras) - {"dev", "docs", "flash-attn", "quickstart"} == set(code(page)) & set(
        extras
    )
    pinned = (ROOT / "requirements-cpu.txt").read_text(encoding="utf-8")
    for name in set(code(page)) & set(extras) - {"vllm"}:
        package = re.split(r"[<>=\[]", extras[name][0])[0]
        brought = page.index(f"`{name}`") < page.index("the others are")
        assert brought == (re.search(rf"^{package}==", pinned, re.MULTILINE) is not None), name


def test_every_option_is_explained() -> None:
    assert "| None |" not in (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.e2e
def test_messages_are_those_of_the_code() -> None:
    known = re.sub(r"\s+", " ", strings(ROOT / "rft")) + "unknown workflow"  # its kind is filled in
    text = (
        (DOCS / "troubleshooting.md")
        .read_text(encoding="utf-8")
        .split("## It runs, and does not learn")[0]
    )
    rows = re.findall(r"^\| (.+?) \| .+\|$", text, re.MULTILINE)
    messages = [
        m
        for row in rows
        for m in code(row)
        if re.search(r" ", m) and not m.startswith(("actor/", "rollout/"))
    ]
    assert len(messages) > 40
    missing = [
        (message, part)
        for message in messages
        for part in (p.strip(" '`.:,;") for p in re.split("…", re.sub(r"^[\w.]+: ", "", message)))
        if len(part) > 8 and re.sub(r"\s+", " ", part) not in known
    ]
    assert not missing, missing


def test_settings_named_in_the_pages_are_keys() -> None:
    """`section.key` in code marks, wherever it stands."""
    sections = {k.split(".")[0] for k in all_keys() if "." in k}
    keys = {k.replace("[]", "") for k in all_keys()}
    prefixes = {k.rsplit(".", n)[0] for k in keys for n in range(1, k.count(".") + 1)}
    wrong = []
    for page in PAGES:
        if page.name in (
            "configuration.md",
            "from-verl.md",
            "cli.md",
            "architecture.md",
        ) or page.name.startswith("install"):
            continue
        for text in code(page.read_text(encoding="utf-8")):
            name = re.sub(r"(\.\d+|\[\d+\])", "", re.split(r"[:=\s]", text)[0])
            is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) and name.split(".")[0] in sections
            below_args = any(name.startswith(f"{k}.") for k in keys if k.endswith("_args"))
            if (
                is_key
                and not name.endswith((".py", ".db", ".md", ".safetensors"))
                and name not in keys | prefixes
                and not below_args
            ):
                wrong.append(f"{page.name}: {name}")
    assert not wrong, wrong


def test_every_table_and_column_of_the_ledger_is_named() -> None:
    text = (DOCS / "howto" / "buffer.md").read_text(encoding="utf-8")
    named = set(code(text))
    assert {t.name for t in metadata.tables.values()} <= named
    assert {c.name for c in experiences.columns} <= named
    engine = create_engine("sqlite://")
    with engine.begin() as tx:
        metadata.create_all(tx)
        schema.create_views(tx)
        answers = [tx.exec_driver_sql(f"SELECT * FROM {view}") for view in schema.VIEWS]
        columns = {name for answer in answers for name in [*answer.keys()]}
    assert columns <= named, columns - named


@pytest.mark.e2e
def test_quickstart(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    howto.play(DOCS / "quickstart.md", tmp_path, tiny_model)


def test_the_drawing_is_well_formed_and_fits_light_and_dark() -> None:
    from xml.etree import ElementTree

    text = (DOCS / "assets" / "architecture.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    colours = {
        c.lower() for c in re.findall(r"#[0-9a-fA-F]{3,6}\b", text) if c not in ("#b", "#w", "#g")
    }
    assert colours <= {"#3987e5", "#d9772b", "#858585"}


def test_mkdocs_reads_its_file() -> None:
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["docs_dir"] == "docs"
