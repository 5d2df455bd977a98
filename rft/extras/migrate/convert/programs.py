"""Which of the commands of a script start veRL, and what they are called there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Program = Literal[
    "main_ppo",
    "sft",
    "sft_trainer",
    "main_eval",
    "generation",
    "one_step_off",
    "fully_async",
    "yaml",
]

_DAPO = "it is main_ppo with data.gen_batch_size and algorithm.filter_groups"
_QUEUE = "it is main_ppo; how rows travel between its processes changes nothing"
_ONE_STEP = "it is main_ppo that samples one iteration ahead: sync_offset is sync_interval"
PROGRAMS: dict[str, tuple[Program, str]] = {  # module -> (program, a remark on it)
    "verl.trainer.main_ppo": ("main_ppo", ""),
    "recipe.dapo.main_dapo": ("main_ppo", _DAPO),
    "recipe.dapo.src.main_dapo": ("main_ppo", _DAPO),
    "recipe.entropy.main_entropy": ("main_ppo", _DAPO),
    "verl.experimental.transfer_queue.main_ppo": ("main_ppo", _QUEUE),
    "recipe.transfer_queue.main_ppo": ("main_ppo", _QUEUE),
    "examples.split_placement.main_ppo_split": ("main_ppo", ""),
    "verl.trainer.main_generation": ("generation", ""),
    "verl.trainer.main_generation_server": ("generation", ""),
    "verl.experimental.one_step_off_policy.main_ppo": ("one_step_off", _ONE_STEP),
    "recipe.one_step_off_policy.main_ppo": ("one_step_off", _ONE_STEP),
    "verl.trainer.fsdp_sft_trainer": ("sft", "newer veRL calls it verl.trainer.sft_trainer"),
    "verl.trainer.sft_trainer": ("sft_trainer", ""),
    "verl.trainer.sft_trainer_ray": ("sft_trainer", ""),
    "verl.trainer.main_eval": ("main_eval", ""),
    "recipe.fully_async_policy.fully_async_main": ("fully_async", ""),
    "verl.recipe.fully_async_policy.fully_async_main": ("fully_async", ""),
    "verl.experimental.fully_async_policy.fully_async_main": ("fully_async", ""),
}
MODULES: dict[str, Program] = {module: program for module, (program, _) in PROGRAMS.items()}
FILES: dict[str, Program] = {m.rsplit(".", 1)[1]: p for m, p in reversed(MODULES.items())}
KNOWN = ", ".join(m for m in MODULES if m.startswith("verl.trainer."))
# Commands that name a program without starting it.
QUIET = frozenset("code diff git less rsync scp source vi vim".split())
# Hydra's own options: whether a value follows as the next word.
HYDRA_OPTIONS = {
    "--config-path": True,
    "-cp": True,
    "--config-name": True,
    "-cn": True,
    "--config-dir": True,
    "-cd": True,
    "--cfg": True,
    "-c": True,
    "--package": True,
    "-p": True,
    "--info": False,
    "--resolve": False,
    "--help": False,
    "--hydra-help": False,
    "--run": False,
    "-r": False,
    "--multirun": False,
    "-m": False,
}
LONG_FORM = {
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-c": "--cfg",
    "-p": "--package",
    "-r": "--run",
    "-m": "--multirun",
}


@dataclass(frozen=True)
class ProgramMatch:
    """A program among the words of a command; its arguments begin at `start`.  `program` is None
    for one without a counterpart.
    """

    program: Program | None
    entry: str
    start: int


_SETTING = re.compile(r"[+~]{0,2}[a-z_]+(\.\w+)+=")


def find(words: Sequence[str], other: Program | None = None) -> ProgramMatch | None:
    """The first veRL program that these words start, whatever stands before it (ray job submit,
    torchrun, nohup …).  `other`: what a module that veRL does not have, but takes settings, is.
    """
    match = _of_verl(words)
    if other is None or (match is not None and match.program is not None):
        return match
    settings = [i for i, word in enumerate(words) if _SETTING.match(word)]
    started = (
        ProgramMatch(other, word, i + 1)
        for i, word in enumerate(words)
        if word.endswith(".py") or words[i - 1 : i] in (("-m",), ("--module",))
        if settings and i < settings[0]
    )
    return next(started, match)


def _of_verl(words: Sequence[str]) -> ProgramMatch | None:
    if not words or words[0].rsplit("/", 1)[-1] in QUIET:
        return None
    for i, word in enumerate(words):
        if word in ("-m", "--module") and i + 1 < len(words):
            module = words[i + 1]
        elif word.startswith("-m") and word[2:6] in ("verl", "reci"):
            module = word[2:]
        elif word.endswith(".py") and (file := _file(word, i + 1)):
            return file
        else:
            continue
        if module in MODULES or _ours(module):
            return ProgramMatch(MODULES.get(module), module, i + 1 + (word in ("-m", "--module")))
    return None


def _ours(module: str) -> bool:
    return "." in module and (
        module.split(".")[0] in ("verl", "recipe") or module.rsplit(".", 1)[1] in FILES
    )


def _file(word: str, start: int) -> ProgramMatch | None:
    name = word.rsplit("/", 1)[-1][:-3]
    module = ".".join(word[:-3].strip("./").split("/"))
    if "recipe." in module:
        module = module[module.index("recipe.") :]
        return ProgramMatch(MODULES.get(module), word, start)
    if name in FILES:
        return ProgramMatch(FILES[name], word, start)
    return ProgramMatch(None, word, start) if "verl/trainer/" in word else None


def mentions(text: str) -> bool:
    """Whether a text names a program that can be converted."""
    return any(name in text for name in FILES)
