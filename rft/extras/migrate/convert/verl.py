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
from rft.extras.migrate.convert import defaults, key_groups, verl_eval, verl_generation, verl_sft
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
) -> Conversion:
    """Raises ConfigError(s) for sizes that do not fit and for overrides that are no keys."""
    if engine_num is not None and engine_num < 1:
        raise ConfigError(
            f"given {engine_num}; must be at least 1", key="--engine-num", given=engine_num
        )
    overridden = tuple(o.partition("=")[0].strip() for o in overrides)
    own = _own(launch)
    read = _renamed(launch.program, _opened(launch.arguments, own))
    arguments, questions = _parameters(read, own)
    d = Draft(
        dataclasses.replace(launch, arguments=arguments),
        profile,
        engine_num,
        overridden,
        questions=questions,
        own=own,
    )
    d.colocate = any(o.replace(" ", "") == "mode=colocate" for o in overrides)
    command = verl_eval.command(d) if launch.program == "main_eval" else ""
    prepare, outcome, finish = _FAMILIES.get(launch.program, (_prepare, _outcome, _finish))
    gpus = prepare(d)
    pairs = [*((a, a) for a in launch.options), *zip(launch.arguments, arguments, strict=False)]
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
    arguments: Sequence[Argument], own: dict[str, Any]
) -> tuple[tuple[Argument, ...], list[str]]:
    """Numbers and switches that only the environment or the machine tells get veRL's default, and a
    question; texts stay as they are.
    """
    done = []
    questions = []
    for a in arguments:
        default = own.get(a.key, table.default(a.key, ASYNC))
        value = str(a.value)
        empty = a.value is not None and not value.strip() and default not in (None, "")
        if empty or (
            isinstance(default, bool | int | float) and ("${oc.env:" in value or a.machine)
        ):
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


def _opened(arguments: Sequence[Argument], own: dict[str, Any]) -> tuple[Argument, ...]:
    """Without older names and references; a group given as a mapping counts as its leaves, beside
    itself.
    """
    named = [dataclasses.replace(a, key=table.ALIASES.get(a.key, a.key)) for a in arguments]
    plain = opened(named, {key: table.default(key, ASYNC) for key in table.by_name(ASYNC)} | own)
    # without do_sample
    alone = [
        a
        for a in arguments
        if a.key == f"{ROLLOUT}.val_temperature" and a.value not in (None, "", 0)
    ]
    sampled = [
        dataclasses.replace(a, key=f"{ROLLOUT}.val_kwargs.do_sample", value=True) for a in alone
    ]
    return (*plain, *(leaf for a in plain for leaf in _inside(a)), *sampled)


def _inside(a: Argument) -> list[Argument]:
    if not isinstance(a.value, dict) or not any(k.startswith(f"{a.key}.") for k in KNOWN):
        return []
    found = []
    for key, value in a.value.items():
        name = f"{a.key}.{key}"
        one = dataclasses.replace(a, key=table.ALIASES.get(name, name), value=value)
        found += _inside(one) or [one]
    return found


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
    **{f"reward.{name}": f"{RM}.{name}" for name in ("reward_kwargs", "sandbox_fusion")},
}


def _renamed(program: str, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments under the names that rules have for them."""
    own: Any = {"sft_trainer": verl_sft, "generation": verl_generation}.get(program)
    names, sections = (own.RENAMED, own.SECTIONS) if own is not None else (_NEWER, _NEWER_SECTIONS)

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


_ENV = re.compile(r"\$\{oc\.(env|decode)[^}]*\}")


def _checked(d: Draft, overridden: tuple[str, ...]) -> tuple[str, ...]:
    """What stage 1 of `rft check` says to the result, on a machine where the variables are set."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return _ENV.sub("env", value) if isinstance(value, str) else value

    try:
        plan = resolve(from_dict(plain(d.values)), Facts(gpus=0))
    except ConfigError as e:
        found = e.errors
        if mine := [
            x
            for x in found
            if x.key and any(x.key.startswith(o) or o.startswith(x.key) for o in overridden)
        ]:
            raise ConfigErrors(mine) from None
        return tuple(str(x) for x in found)
    for text in plan.warnings:
        d.warn(f"rft check: {text}")
    return ()
