"""One word of a command line, `key=value`, read the way Hydra's override grammar reads it.

Depends on no key.  Invariant: what Hydra would refuse or run as a sweep raises ConfigError;
interpolations `${…}` stay text. Where Hydra differs from how people write scripts, the script's
sense is taken: `None` and a lone `~` are null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rft.errors import ConfigError

_KEY = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.\-/@:\[\]]*)(?:(=)|$)")
_INT = re.compile(r"[+-]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][+-]?[0-9]+)?|[0-9][0-9_]*\.?(?:[eE][+-]?[0-9]+)?)"
)
_INFINITE = re.compile(r"[+-]?(?:inf|nan)", re.IGNORECASE)
_ZEROS = re.compile(r"[+-]?0[0-9_]+")  # 010 is a text
_CALL = re.compile(r"([A-Za-z_]\w*)\(")
_CASTS = {"int", "float", "str", "bool", "json_str"}
_SWEEPS = {"choice", "range", "interval", "glob", "sort", "shuffle", "tag", "extend_list"}


def split(word: str) -> tuple[str, str, str | None] | None:
    """("+", "a.b", "1") of "+a.b=1"; the value is None for a deletion `~a.b`; None if the word is
    no override.
    """
    match = _KEY.match(word)
    if not match or (not match[3] and match[1] != "~"):
        return None
    return match[1] or "", match[2], word[match.end() :] if match[3] else None


def value(text: str) -> Any:
    """None, bool, int, float, str, list or dict.  Raises ConfigError saying what cannot be read."""
    if not text.strip():
        return ""
    reader = _ValueReader(text)
    result = reader.element("")
    if reader.pos < len(text):
        if text[reader.pos] == ",":
            raise ConfigError(
                f"{text!r} is a sweep over values; a list is written [{text}], a text with commas "
                f"'\"{text}\"'"
            )
        raise ConfigError(
            f"cannot read {text!r}: unexpected {text[reader.pos]!r} at character {reader.pos + 1}"
        )
    return result


def scalar(text: str) -> Any:
    """An unquoted text as null, boolean, number or itself."""
    low = text.lower()
    if low in ("null", "none", "~"):
        return None
    if low in ("true", "false"):
        return low == "true"
    try:
        if _INT.fullmatch(text) and len(text) < 4000:
            return int(text)
        if (_FLOAT.fullmatch(text) and not _ZEROS.fullmatch(text)) or _INFINITE.fullmatch(text):
            return float(text)
    except ValueError:  # 1_ and 1__0 look like numbers
        return text
    return text


class _ValueReader:
    """`pos` is the next character to read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0

    def peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def blanks(self) -> None:
        while self.peek() and self.peek() in " \t\n":
            self.pos += 1

    def element(self, stops: str) -> Any:
        self.blanks()
        sign = self.peek()
        result: Any
        if sign == "[":
            result = self.list_()
        elif sign == "{":
            result = self.dict_()
        elif sign and sign in "'\"" and (quoted := self.quoted_to(stops)) is not None:
            result = quoted
        elif (call := _CALL.match(self.text, self.pos)) and call[1] in _CASTS | _SWEEPS:
            result = self.call(call[1], call.end())
        else:
            result = self.plain(stops)
        self.blanks()
        return result

    def quoted_to(self, stops: str) -> str | None:
        """A quoted text that is the whole element; None if more text follows, as in 'a'b."""
        begin = self.pos
        mark = self.peek()
        text = ""
        self.pos += 1
        while (sign := self.peek()) != mark:
            if not sign:
                raise ConfigError(
                    f"cannot read {self.text!r}: the quote {mark} at character {begin + 1} is "
                    f"never closed"
                )
            if sign == "\\" and self.text[self.pos + 1 : self.pos + 2] in (mark, "\\"):
                self.pos += 1
                sign = self.peek()
            text += sign
            self.pos += 1
        self.pos += 1
        end = self.pos
        self.blanks()
        if self.peek() and self.peek() not in stops + ",":
            raise ConfigError(
                f"cannot read {self.text!r}: unexpected {self.peek()!r} after the quoted text, "
                f"character {end + 1}"
            )
        return text

    def list_(self) -> list[Any]:
        items = list[Any]()
        for _ in self.entries("]"):
            items.append(self.element(",]"))
        return items

    def dict_(self) -> dict[str, Any]:
        entries = dict[str, Any]()
        for _ in self.entries("}"):
            key = self.element(":}")
            if self.peek() != ":":
                raise ConfigError(
                    f"cannot read {self.text!r}: a key without ':' at character {self.pos + 1}"
                )
            if isinstance(key, list | dict):
                raise ConfigError(f"cannot read {self.text!r}: {key!r} cannot be a key")
            self.pos += 1
            entries[key if isinstance(key, str) else str(key)] = self.element(",}")
        return entries

    def entries(self, close: str) -> Iterator[None]:
        """Once for each entry of what the bracket here opens, which is read in between; then past
        `close`.
        """
        begin = self.pos
        self.pos = self.pos + 1
        self.blanks()
        while self.peek() != close:
            yield
            if self.peek() == ",":
                self.pos += 1
                self.blanks()
            elif self.peek() != close:
                what = (
                    f"unexpected {self.peek()!r} at character {self.pos + 1}"
                    if self.peek()
                    else "it ends too early"
                )
                raise ConfigError(
                    f"cannot read {self.text!r}: the bracket at character {begin + 1} has no "
                    f"{close!r}; {what}"
                )
        self.pos += 1

    def call(self, name: str, start: int) -> Any:
        if name in _SWEEPS:
            raise ConfigError(
                f"{self.text!r} is one of Hydra's sweeps; a configuration has one value"
            )
        self.pos = start
        inner = self.element(")")
        if self.peek() != ")":
            raise ConfigError(f"cannot read {self.text!r}: {name}( has no ')'")
        self.pos += 1
        try:
            match name:
                case "int":
                    return int(inner)
                case "float":
                    return float(inner)
                case "bool":
                    return _boolean(inner)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{self.text!r}: {inner!r} is no {name}") from None
        return str(inner)

    def plain(self, stops: str) -> Any:
        """Unquoted text up to one of `stops` or a comma; `${…}` is taken whole, a backslash takes
        the next character as it is.
        """
        begin = self.pos
        pieces = list[str]()
        escaped = False
        stops += ","
        while (sign := self.peek()) and sign not in stops:
            if self.text.startswith("${", self.pos):
                pieces.append(self.interpolation())
                continue
            if sign in "[]{}()'\"" and not (sign in "()" and ")" not in stops):
                raise ConfigError(
                    f"cannot read {self.text!r}: unexpected {sign!r} at character {self.pos + 1}; "
                    f"quote the text"
                )
            if sign == "\\" and self.text[self.pos + 1 : self.pos + 2] in tuple("\\()[]{}:=, \t"):
                self.pos += 1
                sign = self.peek()
                escaped = True
            pieces.append(sign)
            self.pos += 1
        text = "".join(pieces).strip()
        if not text and not escaped:
            raise ConfigError(
                f"cannot read {self.text!r}: a value is missing at character {begin + 1}"
            )
        return text if escaped else scalar(text)

    def interpolation(self) -> str:
        level = 0
        begin = self.pos
        for mark in re.compile(r"\$\{|[{}]").finditer(self.text, begin):
            level += -1 if mark[0] == "}" else 1
            if level == 0:
                self.pos = mark.end()
                return self.text[begin : self.pos]
        raise ConfigError(
            f"cannot read {self.text!r}: the interpolation at character {begin + 1} has no '}}'"
        )


def _boolean(inner: Any) -> bool:
    if isinstance(inner, str):
        if inner.lower() not in ("true", "false"):
            raise ValueError
        return inner.lower() == "true"
    return bool(inner)
