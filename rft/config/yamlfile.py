"""YAML text → plain values with line numbers, refusing everything a configuration has no use for.

Knows no schema.  Invariant: only mappings with unique text keys, lists and scalars come out, and
never more than the file's size lets one expect (no tags, no cycles, no alias bombs).
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
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _Lines(node, name).of
        return _own(loader.construct_document(node)), lines
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


def is_number(text: str) -> bool:
    return bool(_INT.match(text) or _FLOAT.match(text))


def scalar(text: str, name: str = "value") -> Any:
    """One value written on a command line, read as YAML."""
    return parse(text, name)[0]


def _own(value: Any) -> Any:
    """Every place gets its own value: an override of one place must not change what an alias puts
    elsewhere.
    """
    if isinstance(value, dict):
        return {k: _own(v) for k, v in value.items()}
    return [_own(v) for v in value] if isinstance(value, list) else value


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


class _Lines:
    """Line of every leaf below `root`, aliases unfolded; collects duplicate keys, keys that are no
    text, and tags as errors.

    Refuses trees that aliases make large, deep or endless.
    """

    def __init__(self, root: yaml.Node, name: str) -> None:
        self._name = name
        self._count = 0  # nodes that were visited
        self._above = set[int]()  # nodes around the present one
        self._errors: list[ConfigError] = []
        self.of: dict[Loc, int] = {}
        self._visit(root, ())
        raise_all(self._errors)

    def _wrong(self, line: int, why: str, loc: Loc) -> None:
        self._errors.append(ConfigError(f"{self._name}, line {line}: {why}", key=dotted(loc)))

    def _visit(self, node: yaml.Node, loc: Loc) -> None:
        self._count = self._count + 1
        line = node.start_mark.line + 1
        where = f"{self._name}, line {line}"
        if id(node) in self._above:
            raise ConfigError(f"{where}: an alias refers to the value it stands in")
        if self._count > MAX_VALUES:
            raise ConfigError(
                f"{where}: its aliases unfold to more than {MAX_VALUES:,} values; write fewer "
                f"aliases"
            )
        if len(self._above) == MAX_DEPTH:
            raise ConfigError(
                f"{where}: its aliases nest too deeply; at most {MAX_DEPTH} levels are allowed"
            )
        self._above.add(id(node))
        if node.tag not in _KINDS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._wrong(line, f"the tag {tag} is not allowed; write plain values", loc)
        elif isinstance(node, yaml.MappingNode):
            self._mapping(node, loc)
        elif isinstance(node, yaml.SequenceNode):
            for i, child in enumerate(node.value):
                self._visit(child, (*loc, i))
        elif problem := _unusable(node):
            self._wrong(line, problem, loc)
        if not (isinstance(node.value, list) and node.value):
            self.of[loc] = line
        self._above.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> None:
        seen: dict[str, int] = {}
        for k, v in node.value:
            self._count = self._count + 1
            line = k.start_mark.line + 1
            if k.tag == "tag:yaml.org,2002:merge":
                for merged in v.value if isinstance(v, yaml.SequenceNode) else [v]:
                    self._visit(merged, loc)
                continue
            if not isinstance(k, yaml.ScalarNode) or k.tag not in _KINDS:
                self._wrong(line, "a key must be a text", loc)
                continue
            if problem := _unusable(k):
                self._wrong(line, f"a key {problem}", loc)
                continue
            if k.value in seen:
                where = (
                    f"on line {line}"
                    if seen[k.value] == line
                    else f"on lines {seen[k.value]} and {line}"
                )
                self._errors.append(
                    ConfigError(
                        f"written twice in {self._name}, {where}; remove one",
                        key=dotted((*loc, k.value)),
                    )
                )
            seen[k.value] = line
            k.tag = "tag:yaml.org,2002:str"
            self._visit(v, (*loc, k.value))


def _unusable(node: yaml.ScalarNode) -> str:
    """What is wrong with a single value, whatever its key; "" for nothing."""
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        return f"a number of {len(node.value):,} characters; at most {MAX_DIGITS} are allowed"
    if found := _UNUSABLE.search(node.value):
        what = (
            "a null character"
            if found[0] == "\0"
            else f"half of a character (\\u{ord(found[0]):04x})"
        )
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
