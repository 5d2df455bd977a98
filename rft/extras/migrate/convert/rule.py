"""What a rule is, and the usual kinds of rule: to a key, ignored with a reason, refused unless
harmless.

Depends on no veRL key.  Invariant: a rule names all the keys it can write in `targets`, so that a
test can hold them against the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft.extras.migrate.compat.keys import verl_keys as table
from rft.extras.migrate.convert.draft import EVAL, TRAIN, ArgumentOutcome, Draft, our_default, same

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument

Act = Callable[[Draft, "Argument"], ArgumentOutcome]


@dataclass(frozen=True)
class Rule:
    """`act` writes what the argument means and says what became of it."""

    act: Act
    targets: tuple[str, ...] = ()


def rule(*targets: str) -> Callable[[Act], Rule]:
    """Marks a function as the rule that writes `targets`."""
    return lambda act: Rule(act, targets)


def to(*targets: str, by: Callable[[Any], Any] | None = None, reason: str = "") -> Rule:
    """Write the value to `targets`, changed by `by`."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        return write(d, a, targets, by(a.value) if by else a.value, reason)

    return Rule(act, targets)


def each_set(key: str) -> Rule:
    """The value goes to a key of every taskset."""
    return to(*(f"{sets}[i].{key}" for sets in (TRAIN, EVAL)))


def below(*sections: str, after: str = "") -> Rule:
    """The value goes below `sections`, under the name that stands after `after` in veRL's key, or
    under its last name.
    """

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        name = a.key.removeprefix(f"{after}.") if after else a.key.rpartition(".")[2]
        return write(d, a, tuple(f"{section}.{name}" for section in sections), a.value)

    return Rule(act, sections)


def choice(target: str, names: Mapping[str, Any], otherwise: str) -> Rule:
    """What a choice is called here; a name that is not listed is refused for the reason
    `otherwise`.
    """

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        name = str(a.value).lower()
        return (
            write(d, a, (target,), names[name])
            if name in names
            else ArgumentOutcome("refused", otherwise.format(a.value))
        )

    return Rule(act, (target,))


def scaled(target: str, *, never: Any = None, updates: bool = False) -> Rule:
    """Counts of veRL iterations, or `updates` of its trainer: times their steps in the exact
    profile.  Zero and less become `never`.
    """

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if a.value == "after_each_epoch":
            return ArgumentOutcome(
                "refused", "is a number of steps here; write how many an epoch has"
            )
        count = d.whole(a.key)
        if count <= 0 and never is not None:
            return write(
                d,
                a,
                (target,),
                never,
                f"{count}: never" if never == 0 else f"{count}: the ratio holds",
            )
        if not d.exact:
            return write(
                d,
                a,
                (target,),
                count,
                "copied as the guide does; it counts iterations there and steps here",
            )
        steps = d.update if updates else d.interval
        reason = f"{count} iterations x {steps} steps" if steps > 1 and count > 0 else ""
        return write(d, a, (target,), count * steps if count > 0 else count, reason)

    return Rule(act, (target,))


def ignored(reason: str) -> Rule:
    """Harmless: nothing of the result depends on it."""
    return Rule(lambda d, a: ArgumentOutcome("ignored", reason))


def refused(reason: str, *fine: Any) -> Rule:
    """Would change results, except for veRL's default, empty values and `fine`."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if any(same(a.value, v) for v in (None, False, "", [], {}, *fine)) or same(
            a.value, table.default(a.key)
        ):
            return ArgumentOutcome("ignored", "switched off, which changes nothing")
        return ArgumentOutcome("refused", reason)

    return Rule(act)


def always(reason: str) -> Rule:
    """What it asks for holds here anyway."""
    return Rule(lambda d, a: ArgumentOutcome("equal", reason))


def among(values: Collection[Any], rule: Rule, otherwise: str) -> Rule:
    """`rule` for these values; others are refused for the reason `otherwise`."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if any(same(a.value, v) for v in values):
            return rule.act(d, a)
        return ArgumentOutcome("refused", otherwise.format(a.value))

    return Rule(act, rule.targets)


def derived(reason: str, *targets: str) -> Rule:
    """Other values of the result are computed from it elsewhere."""
    return Rule(lambda d, a: ArgumentOutcome("derived", reason, expand(d, targets)), targets)


def via(
    reason: str, *targets: str, otherwise: str = "has no effect with the other arguments"
) -> Rule:
    """Written together with others of its group; mapped to those of `targets` that the result has."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        present = tuple(t for t in expand(d, targets) if d.has(t))
        return (
            ArgumentOutcome("mapped", reason, present)
            if present
            else ArgumentOutcome("ignored", otherwise)
        )

    return Rule(act, targets)


def only_if(
    condition: Callable[[Draft], bool], reason: str | Callable[[Draft], str], rule: Rule
) -> Rule:
    """`rule` where the condition holds; else ignored for `reason`."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if condition(d):
            return rule.act(d, a)
        return ArgumentOutcome("ignored", reason if isinstance(reason, str) else reason(d))

    return Rule(act, rule.targets)


def switch(on: str, reason: str, rule: Rule) -> Rule:
    """`rule` where the switch `on` of veRL is on; else ignored for `reason`."""
    return only_if(lambda d: d.flag(on), reason, rule)


def account(d: Draft, a: Argument, rule: Rule | None, keys: Collection[str]) -> ArgumentOutcome:
    """What becomes of an argument with this rule; `known` are all keys of its program."""
    if a.unknown:
        return ArgumentOutcome("refused", a.unknown)
    empty = a.value is None or a.value in ("", {}) or (a.value == [] and d.terse)
    if rule is None:
        if empty and d.terse:
            return ArgumentOutcome("ignored", "not set")
        near = table.nearest(a.key, keys)
        return ArgumentOutcome(
            "refused", "unknown argument" + (f"; did you mean {near}?" if near else "")
        )
    if empty:
        return ArgumentOutcome("ignored", "not set: veRL's own default")
    if not isinstance(a.value, dict) and any(k.startswith(f"{a.key}.") for k in keys):
        return ArgumentOutcome(
            "refused", f"is a group of keys; give a mapping, or {a.key}.NAME=VALUE"
        )
    return rule.act(d, a)


def write(
    d: Draft, a: Argument, targets: tuple[str, ...], value: Any, reason: str = ""
) -> ArgumentOutcome:
    """Writes and tells whether that is our default anyway.  A resolved YAML states everything: what
    equals ours is left out.
    """
    real = expand(d, targets)
    equal = bool(targets) and all(same(value, our_default(t)) for t in targets)
    if equal and d.terse:
        d.settled.update(real)
    else:
        for target in targets:
            d.put(target, value, a.key)
    return ArgumentOutcome("equal" if equal else "mapped", reason, real)


def expand(d: Draft, targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(real for t in targets for real in d.expand(t))
