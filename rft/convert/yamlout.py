"""A configuration as YAML text that people like to read: our order of keys, a comment on top, short lists on one line.

Knows the schema for the order alone.  Invariant: reading the text gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rft.config.messages import fields_at
from rft.config.source import Loc


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:  # other readers of YAML take 1e-06 for a text
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    short = not any(isinstance(v, dict | list) for v in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(list, _list)


def text(values: dict[str, Any], comments: Sequence[str] = ()) -> str:
    """The whole file: comments, then the sections in the schema's order with an empty line between them."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    parts: list[str] = []
    for key, value in ordered(values).items():
        dumped = yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
        apart = isinstance(value, dict) or not parts
        parts.append(("\n" if apart and (parts or head) else "") + dumped)
    return head + "".join(parts)


def ordered(value: Any, loc: Loc = ()) -> Any:
    """The same values, keys in the schema's order; keys it does not know come last, as they are."""
    if isinstance(value, list):
        return [ordered(v, (*loc, i)) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    order = {name: i for i, name in enumerate(fields_at(loc))}
    keys = sorted(value, key=lambda k: order.get(k, len(order)))
    return {k: ordered(value[k], (*loc, k)) for k in keys}
