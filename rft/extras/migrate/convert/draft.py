"""The configuration while it is being made from a launch, and what became of each argument.

Depends on paths and veRL's defaults, not on what any key means.  Invariant: a path is written once,
with the reason, and every argument has exactly one outcome when `rows` is read.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from rft.config.schema.source import Loc, dotted, leaves, undotted
from rft.config.schema.walk import field_at, fields_at
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys import verl_keys as table

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument, Launch

Profile = Literal["exact", "guide"]
Kind = Literal["refused", "mapped", "equal", "derived", "ignored"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LABELS = {**{kind: str(kind) for kind in KINDS}, "equal": "equal to our default"}
TRAIN = "buffer.explorer_input.tasksets"
EVAL = "buffer.explorer_input.eval_tasksets"


@dataclass(frozen=True)
class ArgumentOutcome:
    """What became of an argument: where its value went, or why it went nowhere."""

    kind: Kind
    reason: str = ""
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArgumentRow:
    argument: Argument
    outcome: ArgumentOutcome


@dataclass(frozen=True)
class WrittenValue:
    """One value of the result and where it comes from."""

    key: str
    value: Any
    why: str


@dataclass
class Draft:
    launch: Launch
    profile: Profile = "exact"
    engine_num: int | None = None
    overridden: tuple[str, ...] = ()  # keys that --set replaces in the result
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    # stated, and our default: not written, and not to be filled either
    settled: set[str] = field(default_factory=set)
    interval: int = 1  # platform steps of one veRL iteration
    update: int = 1  # of one call of its trainer: the same, but in the asynchronous recipe
    trains: int = 0  # training tasksets
    evals: int = 0
    trainer_ranks: int = 1  # known once the GPUs are split
    colocate: bool = False  # --set mode=colocate
    # defaults of this program that are not those of veRL's trainer
    own: dict[str, Any] = field(default_factory=dict)
    release: str = ""  # of veRL, whose defaults are among `own`; "": today's
    given: dict[str, Argument] = field(init=False)

    def __post_init__(self) -> None:
        # the last statement of a key holds, as in Hydra
        self.given = {a.key: a for a in self.launch.arguments}

    @property
    def exact(self) -> bool:
        return self.profile == "exact"

    @property
    def terse(self) -> bool:
        """A resolved YAML states every default; those that are ours too are not written."""
        return self.launch.program == "yaml"

    # ------------------------------------------------------------ what the launch says

    def stated(self, key: str) -> bool:
        return (
            key in self.given
            and self.given[key].value not in (None, "")
            and self.given[key].prefix != "~"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The stated value, else veRL's default, else `default`."""
        if self.stated(key):
            return self.given[key].value
        known = self.default(key)
        return known if known is not None else default

    def default(self, key: str) -> Any:
        """veRL's default of a key; None if it has none."""
        return self.own.get(key, table.default(key))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def whole(self, key: str, default: int = 0) -> int:
        value = self.get(key, default)
        number = 0 if value is False else _number(value)  # veRL compares with 0: False is never
        if number is None or number != int(number):
            raise self.wrong(key, value, "a whole number")
        return int(number)

    def number(self, key: str, default: float = 0.0) -> float:
        value = self.get(key, default)
        number = _number(value)
        if number is None:
            raise self.wrong(key, value, "a number")
        return number

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key, default)
        return default if value is None else str(value)

    def wrong(self, key: str, value: Any, allowed: str) -> ConfigError:
        line = f" (line {self.given[key].line})" if key in self.given else ""
        return ConfigError(f"given {value!r}{line}; must be {allowed}", key=key, given=value)

    # ------------------------------------------------------------ what the result says

    def put(self, path: str, value: Any, reason: str) -> None:
        """Write `value`; `tasksets[i]` and `eval_tasksets[i]` mean all of them, another [i] the
        first.
        """
        for real in self.expand(path):
            self._set(real, value, reason)

    def fill(self, path: str, value: Any, reason: str) -> None:
        """Write `value` where nothing is written yet."""
        for real in self.expand(path):
            if not self.has(real) and real not in self.settled:
                self._set(real, value, reason)

    def expand(self, path: str) -> list[str]:
        if f"{TRAIN}[i]" in path:
            return [path.replace("[i]", f"[{i}]") for i in range(self.trains)]
        if f"{EVAL}[i]" in path:
            return [path.replace("[i]", f"[{i}]") for i in range(self.evals)]
        return [path.replace("[i]", "[0]")]

    def has(self, path: str) -> bool:
        return self.read(path, _NOTHING) is not _NOTHING

    def read(self, path: str, default: Any = None) -> Any:
        place: Any = self.values
        for step in undotted(path):
            try:
                place = place[step]
            except (KeyError, IndexError, TypeError):
                return default
        return place

    def _set(self, path: str, value: Any, reason: str) -> None:
        steps = undotted(path)
        place: Any = self.values
        for step, following in itertools.pairwise(steps):
            empty: Any = [] if isinstance(following, int) else {}
            if isinstance(step, int):
                while len(place) <= step:
                    place.append({})
                place = place[step]
            else:
                place = place.setdefault(step, empty)
            if not isinstance(place, dict | list):
                raise ConfigError(
                    "is given as a value and as a group of keys; give one of them",
                    key=path,
                    given=place,
                )
        place[steps[-1]] = value
        self.why[path] = reason

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def written(self) -> list[WrittenValue]:
        """Every leaf of the result, in its order, with its reason."""
        return [
            WrittenValue(dotted(loc), value, self._why(loc))
            for loc, value in leaves(self.values, lists=False)
        ]

    def _why(self, loc: Loc) -> str:
        """The reason that stands beside a key, or beside what it is a part of."""
        return next(
            (
                self.why[key]
                for end in range(len(loc), 0, -1)
                if (key := dotted(loc[:end])) in self.why
            ),
            "",
        )


_NOTHING = object()


def ordered(value: Any, loc: Loc = ()) -> Any:
    """The same values, keys in the schema's order; keys it does not know come last, as they are."""
    if isinstance(value, list):
        return [ordered(v, (*loc, i)) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    order = {name: i for i, name in enumerate(fields_at(loc))}
    keys = sorted(value, key=lambda k: order.get(k, len(order)))
    return {k: ordered(value[k], (*loc, k)) for k in keys}


def our_default(path: str) -> Any:
    """The schema's default of a key; a value equal to nothing where the key has none or is an
    argument of a plugin.
    """
    field = field_at(undotted(path.replace("[i]", "[0]")))
    if field is None or field.is_required():
        return _NOTHING
    return field.get_default(call_default_factory=True)


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1 and takes a list for a tuple."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
