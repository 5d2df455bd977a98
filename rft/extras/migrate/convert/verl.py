"""A veRL launch → our configuration and an account of every argument.

Reads no file and starts nothing.  Invariant: each argument of the launch has exactly one row, in
the order of the launch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.config.load import assign, from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.config.schema.source import dotted
from rft.errors import ConfigError, ConfigErrors
from rft.extras.migrate.compat.keys import verl_keys as table
from rft.extras.migrate.convert import (
    defaults,
    key_groups,
    releases,
    verl_eval,
    verl_generation,
    verl_sft,
)
from rft.extras.migrate.convert.draft import (
    KINDS,
    ArgumentOutcome,
    ArgumentRow,
    Draft,
    Kind,
    Profile,
    WrittenValue,
    ordered,
)
from rft.extras.migrate.convert.launch import Argument, Launch, opened
from rft.extras.migrate.convert.names import RM, ROLLOUT
from rft.extras.migrate.convert.rule import account
from rft.extras.migrate.convert.rules import ASYNC, KNOWN, rule_of
from rft.extras.migrate.convert.sizes import Gpus

Judge = Callable[[Draft, Argument], ArgumentOutcome]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result.  `values` is empty where the program has no run configuration (main_eval): then
    `command` says what to start.
    """

    program: str
    source: str  # name of the file
    profile: Profile
    values: dict[str, Any]
    rows: tuple[ArgumentRow, ...]
    written: tuple[WrittenValue, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    # what a person has to decide; the result holds the answer that was assumed
    questions: tuple[str, ...] = ()
    gpus: Gpus | None = None
    command: str = ""
    errors: tuple[str, ...] = ()  # what `rft check` would refuse in the result
    counts: dict[Kind, int] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[ArgumentRow, ...]:
        return tuple(r for r in self.rows if r.outcome.kind == "refused")


def convert(
    launch: Launch,
    *,
    profile: Profile = "exact",
    engine_num: int | None = None,
    overrides: Sequence[str] = (),
    release: str = "",
) -> Conversion:
    """Convert a launch, with the defaults of a `release` of veRL; "": of the one that its arguments
    tell.

    Raises ConfigError(s) for sizes that do not fit and for overrides that are no keys.
    """
    if engine_num is not None and engine_num < 1:
        raise ConfigError(
            f"given {engine_num}; must be at least 1", key="--engine-num", given=engine_num
        )
    overridden = tuple(o.partition("=")[0].strip() for o in overrides)
    d = _read(launch, release)
    d.profile, d.engine_num, d.overridden = profile, engine_num, overridden
    d.colocate = any(o.replace(" ", "") == "mode=colocate" for o in overrides)
    command = verl_eval.command(d) if launch.program == "main_eval" else ""
    prepare, outcome, finish = _FAMILIES.get(launch.program, (_prepare, _outcome, _finish))
    gpus = prepare(d)
    read = zip(launch.arguments, d.launch.arguments, strict=False)
    pairs = [*((a, a) for a in launch.options), *read]
    rows = tuple(ArgumentRow(a, _account(d, b, outcome)) for a, b in pairs)
    finish(d)
    for text in launch.notes:
        d.note(text)
    if launch.passed_through:
        d.note('"$@" hands further arguments on; give them as --set key=value')
    for override in overrides:
        _override(d, override)
    d.values = ordered(d.values)
    errors = _checked(d, overridden) if d.values else ()
    kinds = [r.outcome.kind for r in rows]
    return Conversion(
        program=launch.program if launch.program != "yaml" else "yaml (main_ppo)",
        source=Path(launch.path).name,
        profile=profile,
        values=d.values,
        rows=rows,
        written=tuple(d.written()) if d.values else (),
        notes=tuple(d.notes),
        warnings=tuple(d.warnings),
        questions=tuple(d.questions),
        gpus=gpus,
        command=command,
        errors=errors,
        counts={k: kinds.count(k) for k in KINDS},
    )


def draft(launch: Launch, **options: Any) -> Conversion:
    """Convert a launch as `convert` does; an argument that has no place beside the others counts as
    not written, and is refused for that reason.
    """
    while True:
        try:
            return convert(launch, **options)
        except ConfigError as e:
            reasons = {
                a.key: x.message
                for x in e.errors
                for a in launch.arguments
                if not a.unknown and (a.key == x.key or a.key in x.message)
            }
            if not reasons:
                raise
        arguments = (
            dataclasses.replace(a, value=None, unknown=reasons[a.key]) if a.key in reasons else a
            for a in launch.arguments
        )
        launch = dataclasses.replace(launch, arguments=tuple(arguments))


def _read(launch: Launch, release: str) -> Draft:
    """An empty draft of the launch, whose arguments have today's names and no references."""
    release, asked = releases.decide(launch, release)
    own = releases.defaults(release, launch) | _own(launch)
    arguments, questions = _parameters(
        _renamed(launch.program, _opened(launch.arguments, own)), own
    )
    launch = dataclasses.replace(launch, arguments=arguments)
    return Draft(launch, questions=[*asked, *questions], own=own, release=release)


def _own(launch: Launch) -> dict[str, Any]:
    """Defaults of the program that are not those of veRL's ordinary trainer."""
    if launch.program in ("sft", "sft_trainer"):
        return verl_sft.OWN if launch.program == "sft" else verl_sft.NEWER
    if launch.program == "generation":
        return verl_generation.own(launch.arguments)
    if launch.program == "fully_async" or any(
        a.key.startswith("async_training.") for a in launch.arguments
    ):
        names = (
            key for key in table.by_name(ASYNC) if key.startswith(("async_training.", "rollout."))
        )
        return {key: table.default(key, ASYNC) for key in names} | {
            "algorithm.rollout_correction.bypass_mode": True
        }
    return {}


def _prepare(d: Draft) -> Gpus:
    """What is written whatever the arguments of a trainer are."""
    k = key_groups
    for group in (k.batch, k.tasksets, k.evaluation, k.algorithm, k.names, k.reward):
        group(d)
    return k.gpus(d)


def _finish(d: Draft) -> None:
    defaults.write(d)
    key_groups.explain(d)


def _nothing(d: Draft) -> None:
    """An evaluation of stored answers has no configuration."""


def _parameters(
    arguments: Sequence[Argument], program_defaults: dict[str, Any]
) -> tuple[tuple[Argument, ...], list[str]]:
    """Numbers and switches that only the environment or the machine tells get veRL's default, and a
    question; texts stay as they are, and what nothing else is computed from.
    """
    done = []
    questions = []
    for a in arguments:
        default = program_defaults.get(a.key, table.default(a.key, ASYNC))
        value = str(a.value)
        alone = _ALONE.fullmatch(a.key) and _ENV.fullmatch(value)
        empty = a.value is not None and not value.strip() and default not in (None, "")
        told = "${oc.env:" not in value and not a.machine
        if empty or not (told or alone or not isinstance(default, bool | int | float)):
            names = ", ".join(f"${v}" for v in a.variables)
            whence = f"left to {names}, which the script does not set" if names else "empty"
            if a.machine:
                whence = f"written as {a.text}, and {a.unknown}"
            questions.append(
                f"line {a.line}: {a.key} is {whence}; veRL's default, {default}, is taken.  Is "
                f"that meant?  Else write the value into the "
                "script, or give the variable with --env NAME=VALUE"
            )
            a = dataclasses.replace(a, value=default, unknown="")
        done.append(a)
    return tuple(done), questions


def _opened(
    arguments: Sequence[Argument], program_defaults: dict[str, Any]
) -> tuple[Argument, ...]:
    """Without older names and references; a group given as a mapping counts as its leaves, beside
    itself.
    """
    named = [dataclasses.replace(a, key=table.ALIASES.get(a.key, a.key)) for a in arguments]
    arguments_opened = opened(
        named, {key: table.default(key, ASYNC) for key in table.by_name(ASYNC)} | program_defaults
    )
    # without do_sample
    alone = [
        a
        for a in arguments
        if a.key == f"{ROLLOUT}.val_temperature" and a.value not in (None, "", 0)
    ]
    sampled = [
        dataclasses.replace(a, key=f"{ROLLOUT}.val_kwargs.do_sample", value=True) for a in alone
    ]
    return (*arguments_opened, *(leaf for a in arguments_opened for leaf in _inside(a)), *sampled)


def _inside(a: Argument) -> list[Argument]:
    if not isinstance(a.value, dict) or not any(k.startswith(f"{a.key}.") for k in KNOWN):
        return []
    leaves = []
    for key, value in a.value.items():
        name = f"{a.key}.{key}"
        leaf = dataclasses.replace(a, key=table.ALIASES.get(name, name), value=value)
        leaves += _inside(leaf) or [leaf]
    return leaves


# Newer versions of veRL have all of rewards in one section, and read the older names as well; the
# critic has its engine's group at once.
_NEWER = {
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "reward.reward_manager.name": f"{RM}.reward_manager",
    "reward.reward_model.model_path": f"{RM}.model.path",
    "reward.num_workers": f"{RM}.num_workers",
}
_NEWER_SECTIONS = {
    "critic.fsdp": "critic.model.fsdp_config",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_model": RM,
    "sandbox_fusion": f"{RM}.sandbox_fusion",
    **{f"reward.{name}": f"{RM}.{name}" for name in ("reward_kwargs", "sandbox_fusion")},
}


def _renamed(program: str, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments under the names that rules have for them."""
    module: Any = {"sft_trainer": verl_sft, "generation": verl_generation}.get(program)
    names, sections = (
        (module.RENAMED, module.SECTIONS) if module is not None else (_NEWER, _NEWER_SECTIONS)
    )

    def name(key: str) -> str:
        begin = next((s for s in sections if key.startswith(f"{s}.")), None)
        return names.get(key) or (
            key if begin is None else f"{sections[begin]}{key.removeprefix(begin)}"
        )

    return tuple(dataclasses.replace(a, key=name(a.key)) for a in arguments)


_FAMILIES: dict[str, tuple[Callable[[Draft], Gpus | None], Judge, Callable[[Draft], None]]] = {
    "main_eval": (_nothing, verl_eval.outcome, _nothing),
    **dict.fromkeys(("sft", "sft_trainer"), (verl_sft.prepare, verl_sft.outcome, verl_sft.finish)),
    "generation": (verl_generation.prepare, verl_generation.outcome, verl_generation.finish),
}


def _account(d: Draft, a: Argument, outcome: Judge) -> ArgumentOutcome:
    wins = d.given.get(a.key, a)
    if wins is not a:
        return ArgumentOutcome("ignored", f"given again on line {wins.line}, which wins")
    if a.prefix == "~":
        return ArgumentOutcome(
            "ignored", "taken out of veRL's configuration; nothing is left to convert"
        )
    if leaves := _inside(a):
        return _together([(b.key, outcome(d, b)) for b in leaves])
    return outcome(d, a)


def _together(parts: list[tuple[str, ArgumentOutcome]]) -> ArgumentOutcome:
    worst = next(
        k
        for k in ("refused", "mapped", "derived", "equal", "ignored")
        if any(o.kind == k for _, o in parts)
    )
    reason = "; ".join(
        f"{key.rsplit('.', 1)[-1]}: {o.reason}" for key, o in parts if o.reason and o.kind == worst
    )
    targets = tuple(dict.fromkeys(t for _, o in parts for t in o.targets))
    return ArgumentOutcome(worst, reason, targets)  # type: ignore[arg-type]


def _outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    return account(d, a, rule_of(a.key), KNOWN)


def _override(d: Draft, override: str) -> None:
    loc, (_, value) = assign(d.values, override)
    key = dotted(loc)
    for old in [k for k in d.why if k.startswith((f"{key}.", f"{key}["))]:
        del d.why[old]
    d.why[key] = "--set"
    if value is None:
        d.note(f"--set {key}=null: our default holds")


_ALONE = re.compile(r".*\.optim\.(lr|weight_decay)")
_ENV = re.compile(r"\$\{oc\.(env|decode)[^}]*\}")


def _checked(d: Draft, overridden: tuple[str, ...]) -> tuple[str, ...]:
    """What stage 1 of `rft check` says to the result, on a machine where the variables are set."""

    def resolved(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {k: resolved(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [resolved(v) for v in value]
        if name in ("lr", "weight_decay") and isinstance(value, str) and _ENV.fullmatch(value):
            return 0.1
        return _ENV.sub("env", value) if isinstance(value, str) else value

    try:
        plan = resolve(from_dict(resolved(d.values)), Facts(gpus=0))
    except ConfigError as e:
        problems = e.errors
        if overridden_errors := [
            x
            for x in problems
            if x.key and any(x.key.startswith(o) or o.startswith(x.key) for o in overridden)
        ]:
            raise ConfigErrors(overridden_errors) from None
        return tuple(str(x) for x in problems)
    for text in plan.warnings:
        d.warn(f"rft check: {text}")
    return ()
