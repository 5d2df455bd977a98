"""veRL's evaluation script (main_eval) → the command line that scores stored answers here.

It makes no run configuration.  Invariant: every argument becomes an option, or is told to be none.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rft.compat.keys import verl_keys as table
from rft.convert.draft import ArgumentOutcome, Draft

if TYPE_CHECKING:
    from rft.convert.launch import Argument

SECTION = frozenset({17})
OPTIONS = {
    "data.path": "--input",
    "data.prompt_key": "--prompt-key",
    "data.response_key": "--response-key",
    "data.data_source_key": "--group-key",
    "data.reward_model_key": "--truth-key",
    "custom_reward_function.path": "--reward-fn",
}


def command(d: Draft) -> str:
    """The line to type.  Columns that are not stated have veRL's names."""
    words = ["rft", "bench"]
    for key, option in OPTIONS.items():
        value = d.get(key, table.default(key, SECTION)) if d.stated(key) or key != "data.path" else None
        if key == "data.response_key" and not d.stated(key):
            value = "responses"
        if value is None:
            continue
        if key == "custom_reward_function.path":
            value = f"{value}:{d.text('custom_reward_function.name', 'compute_score')}"
        words += [option, shlex.quote(str(value)) if "$" not in str(value) else f'"{value}"']
    d.note("main_eval scores stored answers; it trains nothing, so there is no run configuration and no YAML is written")
    return " ".join(words)


def outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    if a.value is None:
        return ArgumentOutcome("ignored", "not set: veRL's own default")
    if a.key in OPTIONS:
        return ArgumentOutcome("mapped", "", (f"rft bench {OPTIONS[a.key]}",))
    if a.key == "custom_reward_function.name":
        return ArgumentOutcome("derived", "second half of file.py:function", ("rft bench --reward-fn",))
    if a.key.startswith("evaluation."):
        return ArgumentOutcome("ignored", "not a veRL key")
    if a.key.startswith(("--", "ray_init.", "ray_kwargs.", "hydra.")):
        return ArgumentOutcome("ignored", "nothing is started through Ray or Hydra")
    near = table.nearest(a.key, [*OPTIONS, "custom_reward_function.name"])
    return ArgumentOutcome("refused", "unknown argument" + (f"; did you mean {near}?" if near else ""))
