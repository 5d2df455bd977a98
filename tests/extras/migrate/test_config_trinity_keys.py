"""Every key that a version of Trinity-RFT accepts is read, renamed, or dropped with its reason; what
asks for nothing is never an error.
"""

from __future__ import annotations

from typing import Any

import pytest

from rft.config.load import from_dict
from rft.config.resolve import resolve
from rft.config.schema.source import dotted, undotted
from rft.config.schema.walk import all_keys
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.not_offered import key_hint
from rft.extras.migrate.compat.keys.trinity_keys import DROPPED, MOVED
from rft.extras.migrate.convert.trinity import convert

BASE: dict[str, Any] = {
    "model": {"model_path": "m", "max_prompt_tokens": 64, "max_response_tokens": 64},
    "buffer": {
        "batch_size": 4,
        "total_steps": 2,
        "explorer_input": {
            "taskset": {"name": "a", "path": "a.jsonl"},
            "default_workflow_type": "math_workflow",
        },
    },
}


def merged(over: dict[str, Any], base: dict[str, Any] = BASE) -> dict[str, Any]:
    found = dict(base)
    for k, v in over.items():
        found[k] = (
            merged(v, base[k]) if isinstance(v, dict) and isinstance(base.get(k), dict) else v
        )
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": [{"c": value}]}} for a.b[0].c"""
    made = value
    for step in reversed(undotted(key)):
        made = [made] if isinstance(step, int) else {step: made}
    return made


def example(pattern: str) -> str:
    """A key that a pattern of the table matches."""
    return (
        pattern.replace("[[]*]", "[0]")
        .replace("input.*tasksets", "input.eval_tasksets")
        .replace("explorer.*", "explorer.rollout_model")
        .replace("output.[!p]*", "output.name")
        .replace("buffers.*", "buffers.x")
        .replace(".*.", ".x.")
    )


@pytest.mark.parametrize("pattern", DROPPED)
def test_a_key_without_meaning_is_one_warning(pattern: str) -> None:
    key = example(pattern)
    given = nested(key, {"a": 1} if key == "trainer.megatron" else 3)
    entry: Any = given
    for step in undotted(key)[:-1]:
        entry = entry[step]
        if step in (0, "x", "output"):  # what such an entry has to have
            entry |= {"model_path": "m"} if key.startswith("explorer") else {"path": "e.jsonl"}
    file = convert(merged(given), {})
    from_dict(file.values)
    assert [(c.key, c.text) for c in file.dropped] == [(key, DROPPED[pattern])]
    assert key not in all_keys() and key_hint(key).startswith("has no meaning here: ")


@pytest.mark.parametrize(
    ("key", "off"),
    [
        ("model.tinker", None),
        ("explorer.rollout_model.enable_expert_parallel", False),
        ("buffer.explorer_input.taskset.format.video_key", ""),
        ("trainer.trainer_config_path", ""),
    ],
)
def test_what_is_not_offered_and_asks_for_nothing_is_one_warning(key: str, off: Any) -> None:
    (change,) = convert(merged(nested(key, off)), {}).dropped
    assert (change.key, change.text) == (key, "it is off here too")


def test_interval_of_the_deciding_side_is_sync_interval() -> None:
    def read(**keys: Any) -> Any:
        return from_dict(convert(merged({"synchronizer": keys}), {}).values)

    assert read(explorer_sync_interval=4, trainer_sync_interval=4).synchronizer.sync_interval == 4
    with pytest.raises(ConfigError, match="two spellings of one"):
        read(explorer_sync_interval=2, trainer_sync_interval=1)
    free = read(sync_style="dynamic_by_trainer", explorer_sync_interval=2)
    assert free.synchronizer.sync_interval == 1
    demand = read(sync_style="explorer_driven", explorer_sync_interval=2)
    assert demand.synchronizer.sync_interval == 2


def test_warmup_style_is_lr_scheduler_type() -> None:
    def optimizer(**keys: str) -> Any:
        file = convert(merged({"algorithm": {"optimizer": keys}}), {})
        return from_dict(file.values).algorithm.optimizer

    assert optimizer(warmup_style="cosine").lr_scheduler_type == "cosine"
    with pytest.raises(ConfigError, match=r"warmup_style: .*two spellings of one key"):
        optimizer(warmup_style="cosine", lr_scheduler_type="wsd")


def test_typos_stay_errors() -> None:
    for key in (
        "buffer.explorer_input.taskset.totl_epochs",
        "cluster.gpus",
        "trainer.balance_batches",
        "log.dir",
    ):
        with pytest.raises(ConfigError, match="unknown key"):
            from_dict(merged(nested(key, 1)))


def test_moved_keys_keep_their_value() -> None:
    assert set(MOVED.values()) <= set(all_keys())
    file = convert(
        merged(
            {
                "algorithm": {
                    "enable_router_replay": True,
                    "policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"},
                }
            }
        ),
        {},
    )
    config = from_dict(file.values)
    assert (
        config.explorer.rollout_model.router_replay
        and config.algorithm.loss_agg_mode == "seq-mean-token-sum"
    )
    assert config.algorithm.policy_loss_fn_args == {} and len(file.renamed) == 2
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.policy_loss_fn_args\.loss_agg_mode: .*two spellings of one key",
    ):
        convert(
            merged(
                {
                    "algorithm": {
                        "loss_agg_mode": "token-mean",
                        "policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"},
                    }
                }
            ),
            {},
        )


def plan(**over: Any) -> Any:
    return resolve(from_dict(merged(over)))


def test_a_kl_coefficient_alone_means_trinitys_estimator() -> None:
    found = plan(algorithm={"kl_loss_fn_args": {"kl_coef": 0.01}})
    assert found.learner.algorithm.kl_loss_fn == "k2" and any(
        "is written without kl_loss_fn, so k2 is taken" in w for w in found.warnings
    )
    for written in (
        {"kl_loss_fn_args": {"kl_coef": 0.0}},
        {"kl_loss_fn": "none", "kl_loss_fn_args": {"kl_coef": 0.01}},
    ):
        found = plan(algorithm=written)
        assert (
            found.learner.algorithm.kl_loss_fn == "none"
            and found.learner.algorithm.kl_loss_fn_args == {}
        )
        assert any("kl_coef has no effect: kl_loss_fn is none" in w for w in found.warnings)


def test_an_evaluation_of_the_same_name_is_renamed() -> None:
    found = plan(buffer={"explorer_input": {"eval_tasksets": [{"name": "a", "path": "b.jsonl"}]}})
    assert [t.name for t in found.explorer.eval_tasksets] == ["a_eval"]
    assert any("this one is called a_eval" in w for w in found.warnings)
    with pytest.raises(ConfigError, match="names must differ"):
        plan(
            buffer={
                "explorer_input": {
                    "eval_tasksets": [
                        {"name": "a", "path": "b.jsonl"},
                        {"name": "a", "path": "c.jsonl"},
                    ]
                }
            }
        )


SHARP = {
    "buffer": {
        "explorer_input": {
            "taskset": {"name": "a", "path": "a.jsonl", "rollout_args": {"top_p": 0.9, "top_k": 20}}
        }
    }
}


@pytest.mark.parametrize(
    ("algorithm", "taken"),
    [
        ({"algorithm_type": "raft"}, True),
        ({"algorithm_type": "grpo"}, False),
        (
            {
                "algorithm_type": "grpo",
                "rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            },
            True,
        ),
        ({"algorithm_type": "grpo", "rollout_correction": {"rollout_is": "token"}}, False),
    ],
)
def test_who_may_sample_a_part_of_the_distribution(algorithm: dict[str, Any], taken: bool) -> None:
    assert plan(algorithm=algorithm).explorer.reproducible != taken, (
        "a workflow's own calls are held to the same"
    )
    assert plan(algorithm=algorithm).explorer.sampled == (algorithm["algorithm_type"] == "grpo"), (
        "which reads log-probs"
    )
    if taken:
        assert plan(algorithm=algorithm, **SHARP).explorer.tasksets[0].sampling.top_p == 0.9
        return
    with pytest.raises(ConfigError) as caught:
        plan(algorithm=algorithm, **SHARP)
    assert [dotted(undotted(e.key)).rpartition(".")[2] for e in caught.value.errors] == [
        "top_p",
        "top_k",
    ]
    assert "rollout_correction with rollout_rs" in caught.value.message


ACTOR = "${trainer.trainer_config.actor_rollout_ref.actor.ulysses_sequence_parallel_size}"
REF = "${trainer.trainer_config.actor_rollout_ref.ref.ulysses_sequence_parallel_size}"


@pytest.mark.parametrize(
    ("actor", "ref", "message"),
    [
        (2, ACTOR, ""),
        (REF, 2, ""),
        (2, 4, "two spellings of one key"),
        (ACTOR, ACTOR, ""),  # it refers to itself
    ],
)
def test_a_reference_between_two_spellings_is_its_value(actor: Any, ref: Any, message: str) -> None:
    sizes = {
        part: {"ulysses_sequence_parallel_size": size}
        for part, size in (("actor", actor), ("ref", ref))
    }
    values = merged({"trainer": {"trainer_config": {"actor_rollout_ref": sizes}}})
    if message:
        with pytest.raises(ConfigError, match=message):
            convert(values, {})
        return
    convert(values, {})
    written = values["trainer"]["ulysses_sequence_parallel_size"]
    assert written == 2 or actor == ref
