"""YAML text → plain values with line numbers, refusing everything a configuration has no use for.

Depends on no schema.  Invariant: only mappings with unique text keys, lists and scalars come out,
and never more than the file's size lets one expect (no tags, no cycles, no alias bombs).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rft.config.schema.source import Loc, dotted
from rft.errors import ConfigError, raise_all
from rft.secrets import is_free_map, is_harmless, is_secret_name

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 64
MAX_DIGITS = 64
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")  # no file name, no UTF-8, no JSON can hold them
_KINDS = {
    f"tag:yaml.org,2002:{k}"
    for k in ("null", "bool", "int", "float", "str", "seq", "map", "merge", "value")
}


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-6 as a number and neither dates, octals (010) nor sexagesimals
    (1:30), and gives up on monsters early.
    """

    depth = count = 0
    name = "value"

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth = self.depth + 1
        self.count = self.count + 1
        line = self.peek_event().start_mark.line + 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(
                f"{self.name}, line {line}: nested too deeply; at most {MAX_DEPTH} levels are "
                f"allowed"
            )
        if self.count > MAX_VALUES:
            raise ConfigError(
                f"{self.name}, line {line}: more than {MAX_VALUES:,} values; data belongs in its "
                f"own file"
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, rx) for tag, rx in rules if tag.rsplit(":", 1)[1] not in ("timestamp", "int", "float")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# 1_000 is a number; 1_5 and 0.5_2 are texts, e.g. two bounds
_DIGITS = r"(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)"
_INT = re.compile(rf"^[-+]?(?:0|(?!0){_DIGITS}|0x[0-9a-fA-F_]*[0-9a-fA-F])$")
_FLOAT = re.compile(
    rf"^[-+]?(?:(?:{_DIGITS}\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would read as something else."""


Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(value: Any) -> str:
    """YAML text that `parse` reads as `value` again."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def parse(text: str, name: str) -> tuple[Any, dict[Loc, int]]:
    """The value of a YAML text and the line (from 1) of each leaf.  Raises ConfigError(s) naming
    `name` and the line.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ConfigError(
            f"{name} has {size:,} bytes; a configuration may have at most {MAX_BYTES:,} (data "
            f"belongs in its own file)"
        )
    try:
        loader = _Loader(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(e).split())}") from None
    loader.name = name
    reader = _Reader(loader)
    try:
        node = loader.get_single_node()
        value = None if node is None else reader.read(node, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        more = f" ({e.context})" if e.context else ""
        problem = e.problem or "unreadable"
        remedy = next(
            (f"; {text}" for beginning, text in _REMEDIES.items() if problem.startswith(beginning)),
            "",
        )
        raise ConfigError(f"{name}{where}: not valid YAML: {problem}{more}{remedy}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{name}: not valid YAML: {e}") from None
    finally:
        loader.dispose()
    raise_all(reader.errors)
    return value, reader.lines


def is_number(text: str) -> bool:
    return bool(_INT.match(text) or _FLOAT.match(text))


def scalar(text: str, name: str = "value") -> Any:
    """One value written on a command line, read as YAML."""
    return parse(text, name)[0]


_REMEDIES = {  # beginning of what PyYAML says
    "found character '\\t'": "YAML allows only spaces; replace each tab by two spaces",
    "found character '": "put the text in quotes",
    "mapping values are not allowed": "keys of one section begin in the same column, `key: value` "
    "has a space after its colon, and a text "
    "that holds one needs quotes",
    "expected <block end>": "keys of one section, and dashes of one list, begin in the same column",
    "could not find expected ':'": "write `key: value`, with a space after the colon",
    "expected ',' or": "inside {...} and [...] write ${...}, and texts that hold brackets or "
    "commas, in quotes",
}


class _Reader:
    """Values of a tree of nodes, aliases unfolded, and the line of each leaf.

    Collects duplicate keys, keys that are no text, and tags as errors; refuses trees that aliases
    make large, deep or endless.
    """

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._count = 0  # nodes that were visited
        self._above: list[yaml.Node] = []
        self.errors: list[ConfigError] = []
        self.lines: dict[Loc, int] = {}

    def read(self, node: yaml.Node, loc: Loc) -> Any:
        self._count = self._count + 1
        line = node.start_mark.line + 1
        problem = ""
        if node in self._above:
            problem = "an alias refers to the value it stands in"
        elif self._count > MAX_VALUES:
            problem = f"its aliases unfold to more than {MAX_VALUES:,} values; write fewer aliases"
        elif len(self._above) == MAX_DEPTH:
            problem = f"its aliases nest too deeply; at most {MAX_DEPTH} levels are allowed"
        if problem:
            raise ConfigError(f"{self._loader.name}, line {line}: {problem}")
        self._above.append(node)
        value: Any = None
        if node.tag not in _KINDS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(line, f"the tag {tag} is not allowed; write plain values", loc)
        elif isinstance(node, yaml.MappingNode):
            value = self._mapping(node, loc)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.read(child, (*loc, i)) for i, child in enumerate(node.value)]
        elif problem := _unusable(node):
            self._refuse(line, problem, loc)
        else:
            value = self._loader.construct_object(node)
        if not (isinstance(node.value, list) and node.value):
            self.lines[loc] = line
        self._above.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        written: dict[str, int] = {}
        for k, v in node.value:
            if k.tag == "tag:yaml.org,2002:merge":
                for base in v.value if isinstance(v, yaml.SequenceNode) else [v]:
                    merged = self.read(base, loc)
                    if not isinstance(merged, dict):
                        line = base.start_mark.line + 1
                        self._refuse(line, "<< merges mappings only", loc)
                        continue
                    values = merged | values
        for k, v in node.value:
            line = k.start_mark.line + 1
            if k.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(k, yaml.ScalarNode) or k.tag not in _KINDS:
                self._refuse(line, "a key must be a text", loc)
            elif problem := _unusable(k):
                self._refuse(line, f"a key {problem}", loc)
            else:
                if k.value in written:
                    where = f"lines {written[k.value]} and {line}"
                    text = f"written twice in {self._loader.name}, on {where}; remove one"
                    self.errors.append(ConfigError(text, key=dotted((*loc, k.value))))
                written[k.value] = line
                values[k.value] = self.read(v, (*loc, k.value))
        return values

    def _refuse(self, line: int, problem: str, loc: Loc) -> None:
        text = f"{self._loader.name}, line {line}: {problem}"
        self.errors.append(ConfigError(text, key=dotted(loc)))


def _unusable(node: yaml.ScalarNode) -> str:
    """What is wrong with a single value, whatever its key; "" for nothing."""
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        return f"a number of {len(node.value):,} characters; at most {MAX_DIGITS} are allowed"
    if match := _UNUSABLE.search(node.value):
        half = f"half of a character (\\u{ord(match[0]):04x})"
        what = "a null character" if match[0] == "\0" else half
        return f"holds {what}; write the text without it"
    return ""


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Where in a valid YAML text the scalar values of secret keys stand: [start, end) in
    characters.
    """
    loader = _Loader(text)
    spans: dict[int, int] = {}

    def visit(node: yaml.Node, secret: bool, free: bool = False) -> None:
        if isinstance(node, yaml.MappingNode):
            for k, v in node.value:
                name = k.value if isinstance(k, yaml.ScalarNode) else ""
                unknown = free and isinstance(v, yaml.ScalarNode) and not is_harmless(name, v.value)
                if not name.endswith("_envs"):
                    visit(v, secret or is_secret_name(name) or unknown, free or is_free_map(name))
        elif isinstance(node, yaml.SequenceNode):
            for child in node.value:
                visit(child, secret, free)
        elif secret and "int" not in node.tag and "null" not in node.tag and "${" not in node.value:
            spans[node.start_mark.index] = node.end_mark.index

    root = loader.get_single_node()
    loader.dispose()
    if root is not None:
        visit(root, False)
    return list(spans.items())
