"""`rft explain`."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from rft.cli.main import make
from rft.config.schema.walk import all_keys
from rft.errors import ConfigError
from rft.extras.migrate.compat.key_names import describe, trinity
from rft.extras.migrate.compat.keys.not_offered import key_hint
from rft.extras.migrate.compat.keys.verl_keys import rows

BEFORE_THE_SCHEMA = {"stages"}


def run(*arguments: str) -> str:
    done = CliRunner().invoke(make("explain"), ["explain", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_key() -> None:
    (d,) = describe("trainer.grad_clip")
    assert d.type == "number > 0" and d.default == "1.0" and d.unit == "gradient norm"
    assert (
        d.used_by == "trainer" and d.on_resume == "may not be changed" and d.trinity == "the same"
    )
    assert "actor_rollout_ref.actor.grad_clip" in d.verl and not d.asked


def test_a_last_part_shows_the_key_of_the_policy_first() -> None:
    assert describe("lr")[0].key == "algorithm.optimizer.lr"
    assert describe("temperature")[0].key == "model.temperature"
    assert describe("nnodes")[0].key == "cluster.node_num"


def test_a_choice_with_values_that_come_later() -> None:
    (d,) = describe("synchronizer.sync_method")
    assert (
        d.type == "choice" and {"memory", "checkpoint"} <= set(d.allowed) and d.default in d.allowed
    )


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.max_token_len_per_gpu"),
        ("trainer.trainer_config.actor.grad_clip", "trainer.grad_clip"),
        ("actor.grad_clip", "trainer.grad_clip"),
        ("critic.optim.lr", "trainer.critic.optimizer.lr"),
        ("algorithm.gamma", "algorithm.advantage_fn_args.gamma"),
        ("data.train_batch_size", "synchronizer.sync_interval"),
        (
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            "buffer.explorer_input.eval_tasksets[].rollout_args.temperature",
        ),
        (
            "buffer.explorer_input.tasksets[0].task_selector",
            "buffer.explorer_input.tasksets[].data_selector",
        ),
        ("buffer.tokenizer_path", "model.tokenizer_path"),
        (
            "reward_model.sandbox_fusion.url",
            "buffer.explorer_input.tasksets[].reward_fn_args.sandbox_url",
        ),
        ("data.path", "rft bench --input"),
        ("fully_async/partial/partial_ratio", "buffer/partial_ratio"),
        ("data.return_raw_chat", "none"),
        ("data.use_shm", "none"),
    ],
)
def test_other_names(asked: str, key: str) -> None:
    found = describe(asked)
    assert found[0].key == key and found[0].asked == asked


def test_a_name_that_became_several() -> None:
    assert [d.key for d in describe("data.filter_overlong_prompts")] == [
        "buffer.explorer_input.tasksets[].filter_overlong_prompts",
        "model.enable_prompt_truncation",
    ]


def test_every_key_is_explained() -> None:
    for key in all_keys():
        (d,) = describe(key)
        assert d.key == key and d.meaning and d.type and d.used_by, key


def test_every_row_is_explained() -> None:
    for row in rows():
        if "*" not in row.path:
            assert describe(row.path), row


def test_trinitys_keys_are_known() -> None:
    """Each is a key here, is read before the schema, or has its advice."""
    assert len(trinity()) > 230
    for theirs in trinity():
        name = re.sub(r"\[\]", "[0]", theirs)
        if theirs in BEFORE_THE_SCHEMA or key_hint(name):
            continue
        if theirs.startswith("service") or theirs == "model.tinker":
            continue
        assert describe(theirs), theirs


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("trainer.gradclip", "Did you mean trainer.grad_clip?"),
        ("optimizer.lrr", "unknown key"),
        ("trainer.megatron", "has no meaning here: the one trainer is FSDP2"),
        ("buffer.explorer_input.taskset.format.video_key", "videos are not offered"),
        ("nonsense", "unknown key.  Known at the top: mode, "),
        ("learning_rate", "mean something like it: algorithm.optimizer, algorithm.optimizer.lr, "),
        ("num_epochs", "like it: buffer.total_steps, trainer.ppo_epochs, buffer.total_epochs"),
        ("trainer.grad_clip.x", "unknown key"),
    ],
)
def test_unknown(key: str, message: str) -> None:
    """N20: `learning_rate` led nowhere."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        describe(key)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("last", "keys"),
    [
        ("lr", {"algorithm.optimizer.lr", "trainer.critic.optimizer.lr"}),
        ("ppo_mini_batch_size", {"buffer.batch_size"}),  # veRL's
        ("sync_interval", {"synchronizer.sync_interval"}),
    ],
)
def test_a_last_part_means_every_key_of_that_name(last: str, keys: set[str]) -> None:
    found = [said.key for said in describe(last)]
    assert keys <= set(found) and len(found) == len(set(found))


def test_program() -> None:
    text = run("algorithm.policy_loss_fn_args.clip_range")
    assert "both clip bounds" in text and "actor_rollout_ref.actor.clip_ratio" in text
    (found,) = json.loads(run("trainer.critic.optimizer.lr", "--json"))
    assert (
        found["key"] == "trainer.critic.optimizer.lr"
        and found["verl"] == ["critic.optim.lr"]
        and found["trinity"] == "none"
    )
