"""The shape of the code in figures: cycles, sizes, names, defaults, reading order.

`python scripts/house.py` prints the table; `--list` also names what counts against a goal; `--check` ends with 1 where a figure that has
reached its goal has left it again, or the package has more lines than MOST_LINES.
Imports count wherever they stand: at the top, inside functions, under TYPE_CHECKING.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent
SHARED_NAMES = {"__init__.py", "base.py", "settings.py"}  # one in each room, by convention
# Attributes of objects of other libraries, which have them or not depending on version, model or database.
FOREIGN = set(
    """
    __code__ __doc__ __file__ __len__ __module__ __name__ __qualname__ __dict__
    orig sqlstate sqlite_errorcode sched_getaffinity inotify_init1 tolist item ndim text
    _linear_pointwise _reorder_linear_weight attention_dropout head_dim layer_types num_key_value_heads
    hf_to_vllm_mapper shard_id packed_modules_mapping weight bias quant_method input_size shard_indices cpu_linear
    __path__ tool_schema execute create release
    env_response is_completed metrics rubric score_rollout system_prompt setup_state workerinput workeroutput
    """.split()
)


LINES = "lines of rft/"
MOST_LINES = 81_500
NO_VALUE = ("None", "()", "{}", "''", "False", "SEED")  # nothing, empty, off, and the name of a constant
SAME_NAME_ONLY = {"BufferSettings.max_retry_times", "TaskPipelineSettings.top_k"}  # another key has this name and value by chance


@dataclass(frozen=True)
class Figure:
    """One line of the table.  `held`: the goal was reached, and `--check` keeps it."""

    name: str
    goal: str
    limit: float
    value: float
    found: tuple[str, ...] = ()
    held: bool = False
    why: str = ""  # where the goal is not reached

    @property
    def good(self) -> bool:
        return self.value <= self.limit


class House:
    """The parsed package."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.trees = {p: ast.parse(p.read_text()) for p in sorted(package.rglob("*.py"))}
        self.lengths = {p: len(p.read_text().splitlines()) for p in self.trees}

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.package.parent))

    @cached_property
    def modules(self) -> dict[str, Path]:
        parts = {p: p.relative_to(self.package.parent).with_suffix("").parts for p in self.trees}
        return {".".join(x[:-1] if x[-1] == "__init__" else x): p for p, x in parts.items()}

    @cached_property
    def imports(self) -> networkx.DiGraph[Path]:
        graph: networkx.DiGraph[Path] = networkx.DiGraph()
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                for module in _imported(node):
                    if (target := self.modules.get(module)) not in (None, path):
                        graph.add_edge(path, target)
        return graph

    def cycles(self) -> list[str]:
        """Groups of files that import each other, directly or through others."""
        groups = [g for g in networkx.strongly_connected_components(self.imports) if len(g) > 1]
        return [", ".join(sorted(map(self.name, g))) for g in sorted(groups, key=len, reverse=True)]

    def pairs(self) -> list[str]:
        """Folders that import each other directly.  The package's own top files are no folder."""
        edges = {(a.parent, b.parent) for a, b in self.imports.edges if a.parent != b.parent}
        return sorted(
            f"{self.name(a)} <-> {self.name(b)}" for a, b in edges if (b, a) in edges and a < b and self.package not in (a, b)
        )

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
        for path, tree in self.trees.items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))

    def sizes(self, *kinds: type[ast.AST]) -> list[tuple[int, str]]:
        """Lines of each definition, decorators not counted, the longest first."""
        found = []
        for path, node in self.nodes(*kinds):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.end_lineno is not None
            found.append((node.end_lineno - node.lineno + 1, f"{self.name(path)}:{node.lineno} {node.name}"))
        return sorted(found, reverse=True)

    def class_names(self) -> list[str]:
        homes = defaultdict(set)
        for path, node in self.nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            homes[node.name].add(f"{self.name(path)}:{node.lineno}")
        return [f"{name}: {', '.join(sorted(at))}" for name, at in sorted(homes.items()) if len(at) > 1]

    def file_names(self) -> list[str]:
        homes = defaultdict(list)
        for path in self.trees:
            if path.name not in SHARED_NAMES:
                homes[path.name].append(self.name(path))
        return [", ".join(at) for _, at in sorted(homes.items()) if len(at) > 1]

    def duck_typed(self) -> list[str]:
        """Reads of an attribute by its written name, with getattr or hasattr, where the object is not another library's."""
        found = []
        for path, node in self.nodes(ast.Call):
            assert isinstance(node, ast.Call)
            if path.name == "adapters.py":  # to other libraries' environments
                continue
            match node:
                case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]) if name not in FOREIGN:
                    found.append(f"{self.name(path)}:{node.lineno} {ast.unparse(node)}")
        return found

    def second_defaults(self) -> list[str]:
        """Keys of the schema whose default a Settings class writes again: the same name and the same value."""
        schema = defaultdict(set)
        for path, node in self.nodes(ast.ClassDef):
            for name, _, default in _fields(node) if "schema" in path.parts else ():
                match default:
                    case ast.Call(args=[ast.expr() as first, *_]):
                        schema[name].add(ast.unparse(first))
        return [
            f"{self.name(path)}:{line} {node.name}.{name}"
            for path, node in self.nodes(ast.ClassDef)
            if isinstance(node, ast.ClassDef) and node.name.endswith("Settings") and "schema" not in path.parts
            for name, line, default in _fields(node)
            if default is not None
            and (text := ast.unparse(default)) in schema[name]
            and text not in NO_VALUE
            and f"{node.name}.{name}" not in SAME_NAME_ONLY
        ]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield f"{node.module}.{alias.name}"
        yield node.module


def _fields(node: ast.AST) -> Iterator[tuple[str, int, ast.expr | None]]:
    """(name, line, default) of the annotated fields of a class."""
    assert isinstance(node, ast.ClassDef)
    for x in node.body:
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
            yield x.target.id, x.lineno, x.value


def reading_order() -> list[Path]:
    """The files that CONTRIBUTING names under "Where to start reading"."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where to start reading")[1].split("\n## ")[0]
    return [ROOT / name for name in dict.fromkeys(re.findall(r"`((?:rft|workflows)/[\w/]+\.py)`", text))]


def figures() -> list[Figure]:
    house = House(ROOT / "rft")
    functions, classes = house.sizes(ast.FunctionDef, ast.AsyncFunctionDef), house.sizes(ast.ClassDef)
    long_files = [f"{house.name(p)} {n}" for p, n in house.lengths.items() if n > 500]
    reading = reading_order()

    def over(sizes: list[tuple[int, str]], limit: int) -> tuple[str, ...]:
        return tuple(f"{where} {n}" for n, where in sizes if n > limit)

    def count(name: str, found: Callable[[], list[str]] | tuple[str, ...], *, held: bool = True, why: str = "") -> Figure:
        rows = found if isinstance(found, tuple) else tuple(found())
        return Figure(name, "0", 0, len(rows), rows, held, why)

    lines = sum(len(p.read_text().splitlines()) for p in reading)
    return [
        count("folders that import each other", house.pairs),
        count("cycles of files", house.cycles),
        count("functions over 60 lines", over(functions, 60)),
        count("classes over 300 lines", over(classes, 300)),
        count("files over 500 lines", tuple(long_files)),
        count("attributes of plugins read by getattr", house.duck_typed),
        count("defaults written a second time", house.second_defaults),
        count("class names that occur twice", house.class_names),
        count("file names that occur twice", house.file_names),
        Figure("lines of the reading order", "<= 1800", 1800, lines, tuple(f"{p.relative_to(ROOT)}" for p in reading), True),
        Figure(
            LINES,
            "<= 54000",
            54_000,
            sum(house.lengths.values()),
            why="only features are left to remove (docs/decisions/0022-size.md)",
        ),
        Figure("median lines of a function", "<= 8", 8, statistics.median(n for n, _ in functions), held=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also name what counts against a goal")
    parser.add_argument("--check", action="store_true", help="end with 1 where a figure that reached its goal has left it")
    wanted = parser.parse_args()
    table = figures()
    for f in table:
        state = "reached" if f.good else f"not yet{': ' + f.why if f.why else ''}"
        print(f"{f.name:40} {f.value:>8g}   goal {f.goal:>9}   {state}")
        if wanted.list and not f.good:
            print(*(f"    {row}" for row in f.found), sep="\n")
    lost = [f"{f.name} ({f.value:g}, goal {f.goal})" for f in table if f.held and not f.good]
    lost += [f"{f.name} ({f.value:g}, at most {MOST_LINES})" for f in table if f.name == LINES and f.value > MOST_LINES]
    if wanted.check and lost:
        print(f"these figures got worse: {', '.join(lost)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
