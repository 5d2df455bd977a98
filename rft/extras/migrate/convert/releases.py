"""Which releases of veRL take the arguments of a launch, and what those of then had as defaults.

Invariant: the defaults of a release are taken where it is named, or where an argument is none of
later ones; where arguments are of no one release, or may be of an early one, it is asked once.
"""

from __future__ import annotations

import csv
import importlib.resources
import re
from functools import cache
from typing import Any

from rft.errors import ConfigError
from rft.extras.migrate.convert.launch import Argument, Launch
from rft.extras.migrate.convert.names import ACTOR, MODEL, ROLLOUT

RELEASES = tuple("0.1 0.2 0.3.0 0.4.0 0.4.1 0.5.0 0.6.0 0.6.1 0.7.0 0.7.1 0.8.0 0.9.0".split())
EARLY = "0.3.0"
_KL = "algorithm.use_kl_in_reward"
_COEF = "algorithm.kl_ctrl.kl_coef"
_NO_DUAL_CLIP = 1e9  # a ratio is at most exp(20)
# (the last release that has it, key, default that is not today's), of what changes results
_OLDER: tuple[tuple[str, str, Any], ...] = (
    ("0.1", f"{ACTOR}.shuffle", True),
    ("0.1", "trainer.test_freq", 2),
    ("0.1", f"{MODEL}.enable_gradient_checkpointing", False),
    ("0.1", "critic.model.enable_gradient_checkpointing", False),
    ("0.2", "data.filter_overlong_prompts", True),
    (EARLY, _KL, True),
    (EARLY, f"{ACTOR}.entropy_coeff", 0.001),
    (EARLY, f"{ACTOR}.clip_ratio_c", _NO_DUAL_CLIP),
    ("0.6.1", f"{ROLLOUT}.mode", "sync"),
)


def up_to(release: str, last: str) -> bool:
    """Whether a release is named and is `last` or an earlier one."""
    return release != "" and RELEASES.index(release) <= RELEASES.index(last)


def read(text: str) -> str:
    """The release that a person names, as 0.3.0 for v0.3.0.post1.  Raises ConfigError."""
    number = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:\.?(?:post|rc|dev)\d*)?", text.strip())
    found = [r for r in RELEASES if number and _parts(r) == _parts(number[1])]
    if not found:
        raise ConfigError(
            f"given {text}; known releases: {', '.join(RELEASES)}",
            key="--verl-version",
            given=text,
        )
    return found[0]


def _parts(release: str) -> list[int]:
    return [*map(int, release.split(".")), 0, 0][:3]


def defaults(release: str, launch: Launch) -> dict[str, Any]:
    """What that release takes where nothing is written, where it is not what today's takes."""
    values = {a.key: a.value for a in launch.arguments}
    no_penalty = values.get(f"{ACTOR}.use_kl_loss") is True or values.get(_COEF) == 0
    return {
        key: value
        for last, key, value in _OLDER
        if up_to(release, last) and not (key == _KL and no_penalty)
    }


@cache
def spans() -> dict[str, tuple[int, int]]:
    """The first and the last release whose ppo_trainer.yaml has a key; indexes into RELEASES."""
    table = importlib.resources.files("rft.extras.migrate.compat.keys")
    lines = table.joinpath("data/verl_releases.tsv").read_text(encoding="utf-8").splitlines()
    return {
        row["name"]: (RELEASES.index(row["first"]), RELEASES.index(row["last"]))
        for row in csv.DictReader(lines, delimiter="\t")
    }


def _taken(a: Argument) -> tuple[int, int]:
    """The first and the last release that take an argument: with + a key has to be new."""
    first, last = spans().get(a.key, (0, len(RELEASES) - 1))
    if a.prefix == "+" and first > 0:
        return 0, first - 1
    return (0, len(RELEASES) - 1) if a.prefix else (first, last)


def decide(launch: Launch, named: str = "") -> tuple[str, list[str]]:
    """(the release whose defaults hold, "" for today's; a question about it, if there is one)."""
    if named:
        return read(named), []
    if launch.program != "main_ppo" or not launch.arguments:
        return "", []
    taken = [(a, *_taken(a)) for a in launch.arguments]
    newest, _, last = min(taken, key=lambda row: row[2])
    latest, first, _ = max(taken, key=lambda row: row[1])
    early = RELEASES.index(EARLY)
    release = RELEASES[min(last, early)]
    silent = {a.key for a in launch.arguments} | {f"{ROLLOUT}.mode"}
    held = [f"{k}={v}" for k, v in defaults(release, launch).items() if k not in silent]
    doubt = _doubt(launch)
    if not held or (last > early and (not doubt or first > early)):
        return "", []
    then = f"{', '.join(held)} where nothing is written"
    if last > early:
        return "", [
            f"{doubt}: in veRL up to {EARLY} (TinyZero's, Search-R1's) {then} held; today's has "
            f"none of it.  Is the script of then?  Then add --verl-version {EARLY}"
        ]
    old = f"line {newest.line}: {newest.prefix}{newest.key} is of veRL up to {RELEASES[last]}"
    if first <= last:
        return release, [
            f"{old}; its defaults are taken, {then}.  Is it another?  Then add --verl-version"
        ]
    return "", [
        f"{old}, and line {latest.line}: {latest.key} of veRL from {RELEASES[first]} on; today's "
        f"defaults are taken.  In {release} {then} held: --verl-version {release} takes them"
    ]


def _doubt(launch: Launch) -> str:
    """What an early script has, and a later one may have."""
    values = {a.key: a.value for a in launch.arguments}
    if values.get(_COEF) and _KL not in values:
        return f"{_COEF} is given without {_KL}"
    xformers = "VLLM_ATTENTION_BACKEND=XFORMERS"
    if values.get("data.val_batch_size") and any(xformers in n for n in launch.notes):
        return f"data.val_batch_size is given with {xformers}"
    return ""
