"""Releases of veRL: every key of each is known by name, and a script of an early one gets the defaults
of then.

The keys are the leaves of veRL's ppo_trainer.yaml at each tag, from 0.1 to 0.9.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.verl_keys import ALIASES
from rft.extras.migrate.convert import releases
from rft.extras.migrate.convert.launch import Argument, launch_of, read_launch
from rft.extras.migrate.convert.rules import rule_of
from rft.extras.migrate.convert.verl import Conversion, _renamed, convert

A = "actor_rollout_ref.actor"
OLD = f"{A}.fsdp_config.grad_offload=False"  # of veRL up to 0.2
PLUS = "+trainer.val_before_train=False"  # a key from 0.4.0 on
NEW = "actor_rollout_ref.rollout.mode=async"
WORDS = (
    "python -m verl.trainer.main_ppo data.train_files=t.parquet data.val_files=v.parquet "
    f"data.train_batch_size=64 {A}.ppo_mini_batch_size=64"
).split()


def made(*more: str, release: str = "") -> Conversion:
    return convert(launch_of([*WORDS, *more]), release=release)


def at(c: Conversion, key: str) -> Any:
    return {w.key: w.value for w in c.written}.get(key)


def test_every_key_of_every_release_is_known() -> None:
    def known(name: str) -> bool:
        (renamed,) = _renamed("main_ppo", [Argument(name, 1, "1", 1)])
        return rule_of(ALIASES.get(renamed.key, renamed.key)) is not None

    assert len(releases.spans()) == 899
    assert [name for name in releases.spans() if not known(name)] == []


@pytest.mark.parametrize(
    ("release", "entropy", "dual_clip", "penalty", "filtered", "shuffled"),
    [
        ("0.1", 0.001, 1e9, "k1", True, True),
        ("v0.2.0.post2", 0.001, 1e9, "k1", True, None),
        ("0.3.0.post1", 0.001, 1e9, "k1", False, None),
        ("0.4.0", 0, 3.0, "none", False, None),
        ("0.9", 0, 3.0, "none", False, None),
    ],
)
def test_a_named_release_sets_its_defaults(
    release: str, entropy: float, dual_clip: float, penalty: str, filtered: bool, shuffled: Any
) -> None:
    c = made(release=release)
    assert not c.questions and not c.errors
    assert at(c, "algorithm.entropy_loss_fn_args.entropy_coef") == entropy
    assert at(c, "algorithm.policy_loss_fn_args.clip_ratio_c") == dual_clip
    assert at(c, "algorithm.kl_penalty_fn") == penalty
    sets = "buffer.explorer_input.tasksets[0]"
    assert at(c, f"{sets}.filter_overlong_prompts") is filtered


@pytest.mark.parametrize("release", ["0.10", "1.0", "0.2.1", "main", ""])
def test_an_unknown_release_is_refused_with_the_known_ones(release: str) -> None:
    with pytest.raises(ConfigError, match=r"known releases: 0\.1, 0\.2"):
        releases.read(release)


@pytest.mark.parametrize(
    ("arguments", "release"),
    [
        ((OLD,), "0.2"),
        ((PLUS,), "0.3.0"),
        (("trainer.val_generations_to_log_to_wandb=1",), "0.3.0"),
        ((OLD, PLUS), "0.2"),
        ((OLD, NEW), ""),
        ((PLUS, "algorithm.use_kl_in_reward=False"), ""),
        ((f"+{OLD}",), ""),
        ((NEW,), ""),
        ((), ""),
    ],
)
def test_arguments_tell_the_release(arguments: tuple[str, ...], release: str) -> None:
    assert releases.decide(launch_of([*WORDS, *arguments]))[0] == release


def test_a_told_release_is_one_question_with_its_defaults() -> None:
    (asked,) = made(OLD).questions
    assert "grad_offload is of veRL up to 0.2; its defaults are taken" in asked
    assert "filter_overlong_prompts=True" in asked and "entropy_coeff=0.001" in asked


def test_arguments_of_two_ages_are_one_question() -> None:
    c = made(OLD, NEW)
    (asked,) = c.questions
    assert "of veRL up to 0.2" in asked and "from 0.4.0 on" in asked
    assert at(c, "algorithm.entropy_loss_fn_args.entropy_coef") == 0
    assert at(made(OLD, NEW, release="0.2"), "algorithm.entropy_loss_fn_args.entropy_coef") == 0.001


def test_what_an_early_script_writes_itself_is_not_asked() -> None:
    written = (f"{A}.entropy_coeff=0", "algorithm.kl_ctrl.kl_coef=0", f"+{A}.clip_ratio_c=3")
    assert not made(PLUS, *written).questions


def test_an_early_clip_ratio_holds_for_both_sides() -> None:
    """Before 0.4.0 there was one key; from then on the file's 0.2 of each side wins over it."""
    early = made(f"{A}.clip_ratio=0.3", release="0.3.0")
    assert at(early, "algorithm.policy_loss_fn_args.clip_range_high") == 0.3
    assert not [w for w in early.warnings if "clip_ratio" in w]
    assert [w for w in made(f"{A}.clip_ratio=0.3").warnings if "clip_ratio" in w]


def test_an_engine_of_early_scripts_is_asked_about(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    words = " ".join([*WORDS, "data.val_batch_size=1312"])
    script.write_text(f"export VLLM_ATTENTION_BACKEND=XFORMERS\n{words}\n")
    (asked,) = convert(read_launch(script)).questions
    assert "VLLM_ATTENTION_BACKEND=XFORMERS" in asked and "--verl-version 0.3.0" in asked
