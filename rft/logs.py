"""Logging set-up: one line per event, secrets redacted at the sink.

The one invariant: nothing reaches a log file or the console before `redact` has seen it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

_SECRET_NAME = re.compile(r"(api_?key|secret|token|passw(or)?d|credential|private_?key)s?$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"(max|min|num|total|pad|eos|bos|response|prompt|new)_?tokens?$|tokenizer", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<head>[a-z][a-z0-9+.-]*://[^/\s:@]*:)(?P<secret>[^@\s/]+)(?=@)", re.IGNORECASE)
_KNOWN_FORM = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
REDACTED = "***"
_values: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a configuration key or environment variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def learn_secrets(values: Iterable[str]) -> None:
    """Remember secret values, so that `redact` removes them wherever they show up."""
    _values.update(v for v in values if len(v) >= 6)


def url_passwords(text: str) -> list[str]:
    """The passwords of the URLs in `text`."""
    return [m["secret"] for m in _URL_PASSWORD.finditer(text)]


def learnt_secrets() -> tuple[str, ...]:
    """What `learn_secrets` has been told in this process, for the processes that it starts."""
    return tuple(_values)


def learn_environment() -> None:
    """Remember the values of all environment variables whose name says secret."""
    learn_secrets(v for k, v in os.environ.items() if is_secret_name(k))


def redact(text: str) -> str:
    """`text` with learnt secrets, URL passwords and tokens of a known form replaced by ***."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _URL_PASSWORD.sub(lambda m: m["head"] + REDACTED, text)
    return _KNOWN_FORM.sub(REDACTED, text)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def node_folder(logs: Path, by_node: bool) -> Path:
    """Where the files of this machine's processes go: `logs` itself, or its folder of the machine's name."""
    return logs / os.uname().nodename if by_node else logs


def to_file(path: Path, level: str = "INFO") -> logging.Handler:
    """Send the log of this process to `path`; returns the handler (close it with `logging.shutdown`)."""
    learn_environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Redacting("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request of a judge
    return handler
