"""scripts/house.py: what it counts, on small packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "house.py"


@pytest.fixture(scope="module")
def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["house"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["house"]


def package(house: Any, root: Path, **files: str) -> Any:
    for name, text in files.items():
        path = root / "pkg" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.House(root / "pkg")


def test_cycles_count_lazy_and_type_only_imports(house: Any, tmp_path: Path) -> None:
    lazy = "def f():\n    from pkg.b import x\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.a\n"
    assert package(house, tmp_path, a=lazy, b=typed, c="import pkg.a\n").cycles() == ["pkg/a.py, pkg/b.py"]


def test_folders_that_import_each_other(house: Any, tmp_path: Path) -> None:
    found = package(
        house, tmp_path, one__a="import pkg.two.b\n", one__c="", two__b="from pkg.one import c\n", three__d="import pkg.one.a\n"
    )
    assert found.pairs() == ["pkg/one <-> pkg/two"] and found.cycles() == []


def test_names_defaults_and_reads_of_attributes(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        schema__s="class Section:\n    lr: float = key(0.1, 'rate')\n    steps: int\n",
        one__a="class RunSettings:\n    lr: float = 0.1\n    steps: int\n    other: int = 1\n",
        two__a="class Section: ...\ngetattr(x, 'hook', None)\ngetattr(x, name)\nhasattr(x, 'sqlstate')\n",
    )
    assert found.second_defaults() == ["pkg/one/a.py:2 RunSettings.lr"]
    assert [row.split(":")[0] for row in found.class_names()] == ["Section"]
    assert found.file_names() == ["pkg/one/a.py, pkg/two/a.py"]
    assert found.duck_typed() == ["pkg/two/a.py:2 getattr(x, 'hook', None)"]


@pytest.mark.e2e
def test_the_table_of_this_package_and_its_reading_order(
    house: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert all(path.is_file() for path in house.reading_order())
    monkeypatch.setattr(sys, "argv", ["house.py", "--check"])
    assert house.main() == 0 and "cycles of files" in capsys.readouterr().out
