"""What a rule is, and the usual kinds of rule: to a key, ignored with a reason, refused unless harmless.

Knows no veRL key.  Invariant: a rule names all the keys it can write in `targets`, so that a test can hold them against the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft.convert import table
from rft.convert.draft import Draft, Outcome, our_default, same

if TYPE_CHECKING:
    from rft.convert.launch import Argument

Act = Callable[[Draft, "Argument"], Outcome]


@dataclass(frozen=True)
class Rule:
    """`act` writes what the argument means and says what became of it."""

    act: Act
    targets: tuple[str, ...] = ()
    native: bool = False  # whether the argument has a key of its own here


def to(*targets: str, by: Callable[[Any], Any] | None = None, reason: str = "", guide: str = "") -> Rule:
    """The value goes to `targets`, changed by `by`; in the guide's profile to `guide` where that is given."""

    def act(d: Draft, a: Argument) -> Outcome:
        into = (guide,) if guide and not d.exact else targets
        return write(d, a, into, by(a.value) if by else a.value, reason)

    return Rule(act, targets, native=True)


def scaled(target: str, *, never: Any = None) -> Rule:
    """Counts of veRL iterations: times B / m in the exact profile, copied in the guide's.  Zero and less become `never`, if given."""

    def act(d: Draft, a: Argument) -> Outcome:
        count = d.whole(a.key)
        if count <= 0 and never is not None:
            return write(d, a, (target,), never, f"{count}: never" if never == 0 else f"{count}: the ratio holds")
        if not d.exact:
            return write(d, a, (target,), count, "copied as the guide does; it counts iterations there and steps here")
        reason = f"{count} iterations x {d.interval} steps" if d.interval > 1 and count > 0 else ""
        return write(d, a, (target,), count * d.interval if count > 0 else count, reason)

    return Rule(act, (target,), native=True)


def ignored(reason: str) -> Rule:
    """Harmless: nothing of the result depends on it."""
    return Rule(lambda d, a: Outcome("ignored", reason))


def refused(reason: str, *fine: Any) -> Rule:
    """Would change results, except for veRL's default, empty values and `fine`."""

    def act(d: Draft, a: Argument) -> Outcome:
        if any(same(a.value, v) for v in (None, False, "", [], {}, *fine)) or same(a.value, table.default(a.key)):
            return Outcome("ignored", "switched off, which changes nothing")
        return Outcome("refused", reason)

    return Rule(act)


def always(reason: str, *values: Any, otherwise: str = "") -> Rule:
    """What it asks for holds here anyway; with `values`, other values are refused for the reason `otherwise`."""

    def act(d: Draft, a: Argument) -> Outcome:
        if values and not any(same(a.value, v) for v in values):
            return Outcome("refused", otherwise)
        return Outcome("equal", reason)

    return Rule(act)


def derived(reason: str, *targets: str) -> Rule:
    """Other values of the result are computed from it elsewhere."""
    return Rule(lambda d, a: Outcome("derived", reason, expand(d, targets)), targets)


def via(reason: str, *targets: str) -> Rule:
    """Written together with others of its group; mapped to those of `targets` that the result has."""

    def act(d: Draft, a: Argument) -> Outcome:
        there = tuple(t for t in expand(d, targets) if d.has(t))
        return Outcome("mapped", reason, there) if there else Outcome("ignored", "has no effect with the other arguments")

    return Rule(act, targets, native=True)


def only_if(condition: Callable[[Draft], bool], reason: str, rule: Rule) -> Rule:
    """`rule` where the condition holds; else ignored for `reason`."""
    return Rule(lambda d, a: rule.act(d, a) if condition(d) else Outcome("ignored", reason), rule.targets, rule.native)


def write(d: Draft, a: Argument, targets: tuple[str, ...], value: Any, reason: str = "") -> Outcome:
    """Writes and tells whether that is our default anyway.  A resolved YAML states everything: what equals ours is left out."""
    real = expand(d, targets)
    equal = bool(targets) and all(same(value, our_default(t)) for t in targets)
    if equal and d.terse:
        d.settled.update(real)
    else:
        for target in targets:
            d.put(target, value, a.key)
    return Outcome("equal" if equal else "mapped", reason, real)


def expand(d: Draft, targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(real for t in targets for real in d.expand(t))
