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
    assert package(house, tmp_path, a=lazy, b=typed, c="import pkg.a\n").cycles() == [
        "pkg/a.py, pkg/b.py"
    ]


def test_folders_that_import_each_other(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        one__a="import pkg.two.b\n",
        one__c="",
        two__b="from pkg.one import c\n",
        three__d="import pkg.one.a\n",
    )
    assert found.pairs() == ["pkg/one <-> pkg/two"] and found.cycles() == []


def test_names_defaults_and_reads_of_attributes(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        schema__s="class Section:\n    lr: float = key(0.1, 'rate')\n    steps: int\n",
        one__a="class RunSettings:\n    lr: float = 0.1\n    steps: int\n    other: int = 1\n",
        two__a="class Section: ...\ngetattr(x, 'hook', None)\ngetattr(x, name)\nhasattr(x, "
        "'sqlstate')\n",
    )
    assert found.second_defaults() == ["pkg/one/a.py:2 RunSettings.lr"]
    assert [row.split(":")[0] for row in found.class_names()] == ["Section"]
    assert found.file_names() == ["pkg/one/a.py, pkg/two/a.py"]
    assert found.duck_typed() == ["pkg/two/a.py:2 getattr(x, 'hook', None)"]


def test_size_counts_tokens_without_comments_and_layout(house: Any) -> None:
    assert house.count_tokens("# a comment\n\nif x:  # why\n    y = 1\n") == 6  # if x : y = 1
    assert house.count_tokens("y = (\n    1\n)\n") == house.count_tokens("y = (1)\n") == 5


def test_texts_that_name_modules_are_imports(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        a="import_module('pkg.b')\n",
        b="ENTRY = 'pkg.a:main'\n",
        c="'see pkg.a for more'\n",
    )
    assert found.cycles() == ["pkg/a.py, pkg/b.py"]


def test_the_core_imports_no_extra(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        core__a="from pkg.extras.view import page\nKINDS = ('pkg.extras',)\n",
        extras__view__page="import pkg.core.a\n",
        extras__base="",
    )
    assert found.extra_edges() == ["pkg/core/a.py -> pkg/extras/view/page.py"]
    assert found.loose_modules() == []


def test_names_that_name_nothing(house: Any, tmp_path: Path) -> None:
    found = package(
        house,
        tmp_path,
        a="def told(given, rows):\n    _found = rows\n    self.own = kept_rows = 1\n",
    )
    assert [row.split()[1] for row in found.lazy_names()] == ["told", "given", "_found", "own"]


def test_a_figure_may_not_leave_its_goal_nor_get_worse(house: Any) -> None:
    table = [house.Figure("a", 10, 11), house.Figure("b", 10, 200.5), house.Figure("c", 10, 202)]
    ceilings = {"b": 200, "c": 200}
    assert house.worse(table, ceilings) == ["a: 11, at most 10", "c: 202, at most 201"]


@pytest.mark.e2e
def test_the_table_of_this_package_and_its_reading_order(
    house: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert 1000 < house.reading_order() <= 1800
    monkeypatch.setattr(sys, "argv", ["house.py", "--check"])
    assert house.main() == 0 and "tokens of the core" in capsys.readouterr().out
