"""The shape of the code in figures: sizes, imports, names, defaults, docs, reading order.

`python scripts/house.py` prints the table; `--list` also names what counts against a goal;
`--check` ends with 1 where a figure that reached its goal has left it, or one on its way is worse
than its last committed value in scripts/house.json by over 0.5 %; `--write` lowers those values to
today's.
Size is measured in Python's own tokens, without comments, blank lines and layout.
Imports count wherever they stand: at the top, inside functions, under TYPE_CHECKING, and as text
that names a module of the package.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent
# Why a figure is above its goal; a figure without a reason here has to reach it.
REASONS = {
    "tokens of the core": (
        "the goal was set before two wire dialects, the algorithms of 2026, reward parts, distillation "
        "with top-k and images; what could leave has left (docs/decisions/0022-size.md)"
    ),
    "tokens of the extras": "the doctor's report, and the keys and defaults of veRL's releases",
    "tokens per line": "signatures with many typed parameters",
}
CEILINGS = Path(__file__).with_name("house.json")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Words that name nothing: as identifiers they have to be looked up each time.
LAZY = set(
    """
    told said says given found own why made mine asked wanted left kept taught drawn plain whole one
    others stands of beside there here_ gone held seen known meant its
    """.split()
)
# Written by scripts, or evidence that a claim rests on: not what a reader has to read.
NOT_PROSE = ("docs/reference/", "docs/measured/")
# one in each room, by convention
SHARED_NAMES = {"__init__.py", "base.py", "extra.py", "settings.py"}
# Attributes of objects of other libraries, which have them or not depending on version, model or
# database.
FOREIGN = set(
    """
    __code__ __doc__ __file__ __len__ __module__ __name__ __qualname__ __dict__
    orig sqlstate sqlite_errorcode sched_getaffinity inotify_init1 tolist item ndim text image
    _linear_pointwise _reorder_linear_weight attention_dropout head_dim layer_types num_key_value_heads
    hf_to_vllm_mapper shard_id packed_modules_mapping weight bias quant_method input_size shard_indices cpu_linear
    vision_config get_image_features get_rope_index deepstack_features
    __path__ tool_schema execute create release
    env_response is_completed metrics rubric score_rollout system_prompt setup_state workerinput workeroutput
    """.split()
)


# nothing, empty, off, and the name of a constant
NO_VALUE = ("None", "()", "{}", "''", "False", "SEED")
# another key has this name and value by chance
SAME_NAME_ONLY = {"BufferSettings.max_retry_times", "TaskPipelineSettings.top_k"}


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    goal: float  # at most
    value: float
    rows: tuple[str, ...] = ()  # what counts against the goal

    @property
    def reached(self) -> bool:
        return self.value <= self.goal


class House:
    """The parsed package."""

    def __init__(self, package: Path) -> None:
        self.package = package
        texts = {p: p.read_text() for p in sorted(package.rglob("*.py"))}
        self.trees = {p: ast.parse(text) for p, text in texts.items()}
        self.lengths = {p: len(text.splitlines()) for p, text in texts.items()}
        self.tokens = {p: count_tokens(text) for p, text in texts.items()}

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
                for module in (*_imported(node), *self._named(node)):
                    if (target := self.modules.get(module)) not in (None, path):
                        graph.add_edge(path, target)
        return graph

    def _named(self, node: ast.AST) -> Iterator[str]:
        """The module of this package that a text names: "pkg.room.file" or "pkg.room.file:Name"."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.split(":")[0]
            if name.startswith(f"{self.package.name}."):
                yield name if name in self.modules else name.rpartition(".")[0]

    def is_extra(self, path: Path) -> bool:
        return self.package / "extras" in path.parents

    def extra_edges(self) -> list[str]:
        """Imports of an extra by the core."""
        return sorted(
            f"{self.name(a)} -> {self.name(b)}"
            for a, b in self.imports.edges
            if self.is_extra(b) and not self.is_extra(a) and b.parent.name != "extras"
        )

    def loose_modules(self) -> list[str]:
        """Modules that lie beside the packages."""
        return [
            p.name for p in self.trees if p.parent == self.package and not p.stem.startswith("__")
        ]

    def lazy_names(self) -> list[str]:
        """Names bound anywhere that are, but for underscores, a word that names nothing."""
        rows = []
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                name = _bound(node)
                if name.strip("_") in LAZY:
                    rows.append(f"{self.name(path)}:{getattr(node, 'lineno', 0)} {name}")
        return rows

    def cycles(self) -> list[str]:
        """Groups of files that import each other, directly or through others."""
        groups = [g for g in networkx.strongly_connected_components(self.imports) if len(g) > 1]
        return [", ".join(sorted(map(self.name, g))) for g in sorted(groups, key=len, reverse=True)]

    def pairs(self) -> list[str]:
        """Folders that import each other directly.  The package's own top files are no folder."""
        edges = {(a.parent, b.parent) for a, b in self.imports.edges if a.parent != b.parent}
        return sorted(
            f"{self.name(a)} <-> {self.name(b)}"
            for a, b in edges
            if (b, a) in edges and a < b and self.package not in (a, b)
        )

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
        for path, tree in self.trees.items():
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))

    def sizes(self, *kinds: type[ast.AST]) -> list[tuple[int, str]]:
        """Lines of each definition, decorators not counted, the longest first."""
        found = []
        for path, node in self.nodes(*kinds):
            assert (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.end_lineno is not None
            )
            found.append(
                (node.end_lineno - node.lineno + 1, f"{self.name(path)}:{node.lineno} {node.name}")
            )
        return sorted(found, reverse=True)

    def class_names(self) -> list[str]:
        homes = defaultdict(set)
        for path, node in self.nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            homes[node.name].add(f"{self.name(path)}:{node.lineno}")
        return [
            f"{name}: {', '.join(sorted(at))}" for name, at in sorted(homes.items()) if len(at) > 1
        ]

    def file_names(self) -> list[str]:
        homes = defaultdict(list)
        for path in self.trees:
            if path.name not in SHARED_NAMES:
                homes[path.name].append(self.name(path))
        return [", ".join(at) for _, at in sorted(homes.items()) if len(at) > 1]

    def duck_typed(self) -> list[str]:
        """Reads of an attribute by its written name, with getattr or hasattr, where the object is
        not another library's.
        """
        found = []
        for path, node in self.nodes(ast.Call):
            assert isinstance(node, ast.Call)
            if path.name == "adapters.py":  # to other libraries' environments
                continue
            match node:
                case ast.Call(
                    func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]
                ) if name not in FOREIGN:
                    found.append(f"{self.name(path)}:{node.lineno} {ast.unparse(node)}")
        return found

    def second_defaults(self) -> list[str]:
        """Keys of the schema whose default a Settings class writes again: the same name and the
        same value.
        """
        schema = defaultdict(set)
        for path, node in self.nodes(ast.ClassDef):
            for name, _, default in _fields(node) if "schema" in path.parts else ():
                match default:
                    case ast.Call(args=[ast.expr() as first, *_]):
                        schema[name].add(ast.unparse(first))
        return [
            f"{self.name(path)}:{line} {node.name}.{name}"
            for path, node in self.nodes(ast.ClassDef)
            if isinstance(node, ast.ClassDef)
            and node.name.endswith("Settings")
            and "schema" not in path.parts
            for name, line, default in _fields(node)
            if default is not None
            and (text := ast.unparse(default)) in schema[name]
            and text not in NO_VALUE
            and f"{node.name}.{name}" not in SAME_NAME_ONLY
        ]


def count_tokens(text: str) -> int:
    """Python tokens of a module without comments, blank lines and layout."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT for token in tokens)


def _bound(node: ast.AST) -> str:
    """The name that a node binds, or an empty text."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return ""


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


def reading_order() -> int:
    """Lines of the files, or of the classes and functions named beside them, in docs/reading.md."""
    rows = re.findall(
        r"^\| \d+ \| `((?:rft|workflows)/[\w/]+\.py)`(.*?) \|",
        (ROOT / "docs" / "reading.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return sum(_named_lines(ROOT / path, re.findall(r"`([\w.]+)`", names)) for path, names in rows)


def _named_lines(path: Path, names: list[str]) -> int:
    """Lines of the named definitions of a file, of the whole file where none is named."""
    text = path.read_text(encoding="utf-8")
    if not names:
        return len(text.splitlines())
    lines = 0
    for name in names:
        node: ast.AST = ast.parse(text)
        for part in name.split("."):
            inside = {getattr(n, "name", ""): n for n in ast.iter_child_nodes(node)}
            if part not in inside:
                raise SystemExit(f"docs/reading.md: {path.relative_to(ROOT)} has no {name}")
            node = inside[part]
        lines += node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
    return lines


def count_words(paths: list[Path]) -> int:
    return sum(len(p.read_text().split()) for p in paths)


def figures() -> list[Figure]:
    house = House(ROOT / "rft")
    functions = house.sizes(ast.FunctionDef, ast.AsyncFunctionDef)
    classes = house.sizes(ast.ClassDef)
    files = [(n, house.name(p)) for p, n in house.lengths.items()]
    pages = sorted((ROOT / "docs").rglob("*.md"))
    prose = [p for p in pages if not str(p.relative_to(ROOT)).startswith(NOT_PROSE)]
    extras = sum(n for p, n in house.tokens.items() if house.is_extra(p))
    tokens = sum(house.tokens.values())

    def count(name: str, find: Callable[[], list[str]], goal: int = 0) -> Figure:
        rows = tuple(find())
        return Figure(name, goal, len(rows), rows)

    def count_over(name: str, sizes: list[tuple[int, str]], limit: int) -> Figure:
        return count(
            f"{name} over {limit} lines", lambda: [f"{at} {n}" for n, at in sizes if n > limit]
        )

    def count_lines(paths: list[Path]) -> int:
        return sum(len(p.read_text().splitlines()) for p in paths)

    return [
        Figure("tokens of the core", 370_000, tokens - extras),
        Figure("tokens of the extras", 150_000, extras),
        Figure("tokens per line", 6.0, round(tokens / sum(house.lengths.values()), 2)),
        count("cycles of files", house.cycles),
        count("folders that import each other", house.pairs),
        count("imports of extras by the core", house.extra_edges),
        count("modules beside the packages", house.loose_modules, 4),
        count("identifiers that name nothing", house.lazy_names, 100),
        count_over("functions", functions, 69),
        count_over("classes", classes, 345),
        count_over("files", files, 575),
        Figure("median lines of a function", 9, statistics.median(n for n, _ in functions)),
        count("attributes of plugins read by getattr", house.duck_typed),
        count("defaults written a second time", house.second_defaults),
        count("class names that occur twice", house.class_names),
        count("file names that occur twice", house.file_names),
        Figure("lines of the reading order", 1800, reading_order()),
        Figure("words of the docs", 60_000, count_words(prose)),
        Figure("lines of the CHANGELOG", 60, count_lines([ROOT / "CHANGELOG.md"])),
    ]


def worse(table: list[Figure], ceilings: dict[str, float]) -> list[str]:
    """The figures above their goal and, by more than 0.5 %, above their last committed value."""
    most = {f.name: max(f.goal, ceilings.get(f.name, 0) * 1.005) for f in table}
    return [
        f"{f.name}: {f.value:g}, at most {most[f.name]:g}" for f in table if f.value > most[f.name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name what counts against a goal")
    parser.add_argument("--check", action="store_true", help="end with 1 where a figure got worse")
    parser.add_argument(
        "--write", action="store_true", help="lower the committed values to today's"
    )
    options = parser.parse_args()
    table = figures()
    ceilings: dict[str, float] = json.loads(CEILINGS.read_text())
    for f in table:
        print(
            f"{f.name:40} {f.value:>9g}   goal {f.goal:>8g}   "
            f"{'reached' if f.reached else f'not yet: {REASONS.get(f.name)}'}"
        )
        if options.list and not f.reached:
            print(*(f"    {row}" for row in f.rows), sep="\n")
    rows = worse(table, ceilings)
    if options.write:
        values = {
            f.name: min(f.value, ceilings.get(f.name, f.value)) for f in table if not f.reached
        }
        CEILINGS.write_text(json.dumps(values, indent=2) + "\n")
    if options.check and rows:
        print("these figures got worse:", *rows, sep="\n    ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
