"""What `import rft` offers: every name is there, has one home, and costs no library until it is
used.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rft

HEAVY = (
    "torch",
    "numpy",
    "pydantic",
    "msgspec",
    "datasets",
    "ray",
    "vllm",
    "transformers",
    "sqlalchemy",
    "pyarrow",
    "aiohttp",
)


def test_every_name_can_be_imported_and_is_listed_once() -> None:
    homes = [name for names in rft._HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == sorted(rft.__all__) and len(set(homes)) == len(homes)
    for name in rft.__all__:
        assert getattr(rft, name) is not None
    assert dir(rft) == rft.__all__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rft.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        n.module: tuple(a.name for a in n.names)
        for n in block.body
        if isinstance(n, ast.ImportFrom)
    }
    assert seen == rft._HOMES


def test_no_name_is_also_a_folder_or_file_of_the_package() -> None:
    """`from rft import NAME` would give the module once something else has imported it."""
    inside = {p.stem for p in Path(rft.__file__).parent.iterdir()}
    assert not inside & set(rft.__all__)


def _loaded(code: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name.partition(".")[0] for name in found.stdout.split()}


def test_importing_the_package_loads_no_library() -> None:
    assert not _loaded("import rft") & set(HEAVY)


def test_what_authors_import_loads_no_torch() -> None:
    names = ", ".join(n for n in rft.__all__ if n != "__version__")
    assert not _loaded(f"from rft import {names}") & {
        "torch",
        "ray",
        "vllm",
        "transformers",
        "datasets",
    }


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Workflo'; it offers .*Workflow"):
        rft.Workflo  # noqa: B018
