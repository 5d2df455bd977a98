"""Every key that a version of Trinity-RFT accepts is read, moved, or left out with one line; what
asks for nothing is never an error.
"""

from __future__ import annotations

from typing import Any

import pytest

from rft.config.foreign import advice
from rft.config.load import from_dict
from rft.config.resolve import resolve
from rft.config.schema.source import dotted, undotted
from rft.config.schema.walk import all_keys
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.trinity_spellings import IGNORED, MOVED

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
        .replace(".*.", ".x.")
    )


@pytest.mark.parametrize("pattern", IGNORED)
def test_a_key_without_meaning_is_one_warning(pattern: str) -> None:
    key = example(pattern)
    given = nested(key, {"a": 1} if key == "trainer.megatron" else 3)
    above = undotted(key)[:-1]
    if above and above[-1] in (0, "x"):  # what an entry of a list or mapping has to have
        entry: Any = given
        for step in above:
            entry = entry[step]
        entry |= {"model_path": "m"} if above[0] == "explorer" else {"path": "e.jsonl"}
    source = from_dict(merged(given)).source
    (warning,) = source.warnings
    assert warning.startswith(f"{key} has no effect: ")
    assert key not in all_keys() and advice(key).startswith("has no effect")


@pytest.mark.parametrize(
    ("key", "off"),
    [
        ("model.tinker", None),
        ("explorer.rollout_model.enable_expert_parallel", False),
        ("explorer.rollout_model.enable_multimodal", False),
        ("buffer.explorer_input.taskset.format.image_key", None),
        ("trainer.trainer_config_path", ""),
    ],
)
def test_what_is_not_offered_and_asks_for_nothing_is_one_warning(key: str, off: Any) -> None:
    (warning,) = from_dict(merged(nested(key, off))).source.warnings
    assert warning == f"{key} has no effect: it is off here too"


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
    config = from_dict(
        merged(
            {
                "algorithm": {
                    "enable_router_replay": True,
                    "policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"},
                }
            }
        )
    )
    assert (
        config.explorer.rollout_model.router_replay
        and config.algorithm.loss_agg_mode == "seq-mean-token-sum"
    )
    assert config.algorithm.policy_loss_fn_args == {} and len(config.source.warnings) == 2
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.policy_loss_fn_args\.loss_agg_mode: .*two spellings of one key",
    ):
        from_dict(
            merged(
                {
                    "algorithm": {
                        "loss_agg_mode": "token-mean",
                        "policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"},
                    }
                }
            )
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
    assert plan(algorithm=algorithm).explorer.drawn == (algorithm["algorithm_type"] == "grpo"), (
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
