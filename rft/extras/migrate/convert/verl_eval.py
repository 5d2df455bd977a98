"""veRL's evaluation script (main_eval) → the command line that scores stored answers here.

It makes no run configuration.  Invariant: every argument becomes an option, or is told to be none.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rft.extras.migrate.compat.keys import verl_keys as table
from rft.extras.migrate.convert.draft import ArgumentOutcome, Draft
from rft.extras.migrate.convert.rule import Rule, account, derived, ignored

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument

SECTION = frozenset({17})
REWARD = "custom_reward_function.path"
NAME = "custom_reward_function.name"
OPTIONS = {
    "data.path": "--input",
    "data.prompt_key": "--prompt-key",
    "data.response_key": "--response-key",
    "data.data_source_key": "--group-key",
    "data.reward_model_key": "--truth-key",
    REWARD: "--reward-fn",
}


def _option(name: str) -> Rule:
    return Rule(lambda d, a: ArgumentOutcome("mapped", "", (f"rft bench {name}",)))


RULES = {
    **{key: _option(option) for key, option in OPTIONS.items()},
    NAME: derived("second half of file.py:function", f"rft bench {OPTIONS[REWARD]}"),
}
BEGINNINGS = {
    "evaluation.": ignored("not a veRL key"),
    **dict.fromkeys(
        ("--", "ray_init.", "ray_kwargs.", "hydra."),
        ignored("nothing is started through Ray or Hydra"),
    ),
}


def command(d: Draft) -> str:
    """The line to type.  Columns that are not stated have veRL's names."""
    words = ["rft", "bench"]
    for key, option in OPTIONS.items():
        value = (
            d.get(key, table.default(key, SECTION)) if d.stated(key) or key != "data.path" else None
        )
        if value is None:
            continue
        if key == REWARD:
            value = f"{value}:{d.text(NAME, 'compute_score')}"
        words += [option, shlex.quote(str(value)) if "$" not in str(value) else f'"{value}"']
    d.note(
        "main_eval scores stored answers; it trains nothing, so there is no run configuration and "
        "no YAML is written"
    )
    return " ".join(words)


def outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    other = next((rule for begin, rule in BEGINNINGS.items() if a.key.startswith(begin)), None)
    return account(d, a, other or RULES.get(a.key), RULES)
