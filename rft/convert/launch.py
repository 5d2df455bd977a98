"""A veRL launch script or YAML file → the program it starts and the arguments it passes.

Knows no target key.  Invariant: nothing is executed, and every word of the launch's argument list is in exactly one of
`arguments`, `options` and `notes` (or is "$@").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Program = Literal["main_ppo", "sft", "main_eval", "fully_async", "yaml"]


@dataclass(frozen=True)
class Argument:
    """One `key=value` of the argument list, e.g. `+data.seed=1` as key "data.seed", value 1, text "1", prefix "+"."""

    key: str  # dotted veRL key, without + ++ ~
    value: Any  # None, bool, int, float, str, list or dict, read the way Hydra reads it
    text: str  # the value as written, after shell expansion
    line: int  # in the file, from 1
    prefix: str = ""  # "", "+", "++" or "~"
    variables: tuple[str, ...] = ()  # environment variables that stay in it as ${oc.env:NAME}


@dataclass(frozen=True)
class Launch:
    """What a script starts.  `options` are Hydra's own dash options, with the option as key: "--config-name"."""

    program: Program
    arguments: tuple[Argument, ...]
    passed_through: bool  # "$@" is handed on
    notes: tuple[str, ...] = ()
    path: str = ""
    options: tuple[Argument, ...] = ()


def read_launch(path: Path) -> Launch:
    """The launch of a shell script, or of a veRL YAML file.  Raises ConfigError(s) naming file and line."""
    raise NotImplementedError(path)
