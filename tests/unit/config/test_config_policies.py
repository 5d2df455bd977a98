"""Keys of old and proximal policies, corrections, KL in the reward, passes and the critic: what
they become, what they refuse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.algorithm.needs import controllers, needs
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError
from rft.preflight import check
from rft.preflight.memory_estimate import estimate
from rft.preflight.model_folder import ModelShape

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
PPO = "algorithm.algorithm_type=ppo"
RC = "algorithm.rollout_correction"
MIX = "algorithm.sample_strategy=mix"
DAPO = "algorithm.algorithm_type=dapo"
LOSS_ARGS = "algorithm.policy_loss_fn_args"
OPTIMIZER = "algorithm.optimizer.optimizer_type"
CURVE = "algorithm.optimizer.lr_scheduler_type"
REC = "algorithm.algorithm_type=rec"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


@pytest.mark.parametrize(
    ("overrides", "bypass", "window"),
    [
        ((), True, False),
        (("algorithm.bypass_old_logprobs=false",), False, False),
        (("algorithm.bypass_old_logprobs=false", "synchronizer.sync_interval=3"), False, False),
        ((f"{RC}.rollout_is=token",), False, False),
        ((f"{RC}.rollout_is=token", "synchronizer.sync_interval=3"), False, True),
        ((f"{RC}.bypass_mode=true",), True, False),
        ((f"{RC}.bypass_mode=true", "synchronizer.sync_interval=3"), True, False),
        (("algorithm.compute_prox_logprobs=true",), False, False),
        (("algorithm.compute_prox_logprobs=true", "synchronizer.sync_interval=2"), False, True),
    ],
)
def test_which_policy_is_the_old_one(
    overrides: tuple[str, ...], bypass: bool, window: bool
) -> None:
    a = plan(*overrides).learner.algorithm
    assert (a.bypass_old_logprobs, a.proximal_window) == (bypass, window)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("algorithm.bypass_old_logprobs=true", f"{RC}.rollout_is=token"),
            "bypass_old_logprobs: is true, but .*means false",
        ),
        (
            ("algorithm.bypass_old_logprobs=false", f"{RC}.bypass_mode=true"),
            "is false, but .*bypass_mode: true means true",
        ),
        (
            ("algorithm.bypass_old_logprobs=true", "algorithm.compute_prox_logprobs=true"),
            "is true, but algorithm.compute_prox",
        ),
        (
            ("algorithm.compute_prox_logprobs=true", f"{RC}.bypass_mode=true"),
            "compute_prox_logprobs: takes old log-probs from",
        ),
        (
            (f"{RC}.rollout_rs=token_k1",),
            "rollout_correction.rollout_rs_threshold: rollout_rs token_k1 needs",
        ),
        (
            (f"{RC}.loss_type=reinforce",),
            "rollout_correction: loss_type reinforce is for bypass_mode",
        ),
        (
            (f"{RC}.loss_type=reinforce", f"{RC}.bypass_mode=true", "trainer.ppo_epochs=2"),
            "loss_type: reinforce weighs rows",
        ),
        (
            (
                f"{RC}.loss_type=reinforce",
                f"{RC}.bypass_mode=true",
                "algorithm.policy_loss_fn=gspo",
            ),
            "policy_loss_fn: is gspo, but .*loss_type means reinforce",
        ),
        (
            (MIX, "algorithm.policy_loss_fn=gspo"),
            "gspo reads log-probs of the policy that sampled, .* use mix, mix_chord",
        ),
        ((MIX, "algorithm.algorithm_type=grpo"), "policy_loss_fn: ppo reads log-probs"),
        (
            (
                "mode=serve",
                "buffer.total_steps=null",
                "algorithm.optimizer.lr_warmup_steps_ratio=0.1",
            ),
            "lr_warmup_steps_ratio: follows from the number of train steps, and the service has no "
            "end",
        ),
        (
            (
                "mode=serve",
                "buffer.total_steps=null",
                "algorithm.optimizer.lr_scheduler_type=cosine",
            ),
            "lr_scheduler_type: follows from",
        ),
        (
            ("algorithm.optimizer.momentum=0.9",),
            "optimizer.momentum: belongs to optimizer_type sgd; optimizer_type is adamw: remove it",
        ),
        (
            (f"{OPTIMIZER}=sgd", "algorithm.optimizer.betas=[0.8, 0.9]"),
            "optimizer.betas: belongs to optimizer_type adamw and nadam and radam; optimizer_type "
            "is sgd",
        ),
        (
            ("trainer.critic_warmup=3",),
            "trainer.critic_warmup: is 3, but advantage grpo has no critic",
        ),
        (
            ("trainer.critic.use_dynamic_bsz=false", PPO),
            "trainer.critic.micro_batch_size_per_gpu: is required",
        ),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*overrides)


def test_reinforce_is_the_loss_of_a_bypass_correction() -> None:
    found = plan(f"{RC}.rollout_is=sequence", f"{RC}.bypass_mode=true", f"{RC}.loss_type=reinforce")
    a = found.learner.algorithm
    assert (a.policy_loss_fn, a.bypass_old_logprobs, needs(a).before) == (
        "reinforce",
        True,
        {"old"},
    )
    assert a.rollout_correction is not None and a.rollout_correction.rollout_is == "sequence"
    told = plan(f"{RC}.rollout_is=token", f"{RC}.bypass_mode=true").warnings
    assert any("rollout_is has no effect with bypass_mode" in w for w in told)
    for given, says in (
        ((f"{RC}.rollout_rs_threshold=2",), "rollout_rs_threshold has no effect"),
        (
            ("algorithm.loss_scale_factor=9",),
            "loss_scale_factor has no effect: loss_agg_mode is token-mean",
        ),
        (
            (PPO, "trainer.critic_warmup=2"),
            "critic_warmup 2 is as long as the run (2 train steps): no policy is trained",
        ),
        (
            (DAPO, f"{LOSS_ARGS}={{clip_range: 0.1}}"),
            "clip_range has no effect: clip_range_low is 0.2 and clip_range_high 0.28",
        ),
        (
            ("algorithm.policy_loss_fn=kl_cov", "algorithm.bypass_old_logprobs=false"),
            "kl_cov holds nothing back",
        ),
        (
            ("algorithm.optimizer.min_lr_ratio=0.1",),
            "min_lr_ratio has no effect: lr_scheduler_type is constant",
        ),
        (
            (f"{CURVE}=linear", "algorithm.optimizer.num_cycles=2"),
            "num_cycles has no effect: lr_scheduler_type is linear",
        ),
        (
            ("algorithm.optimizer.lr_warmup_from_zero=true",),
            "lr_warmup_from_zero has no effect: there is no warm-up",
        ),
        (
            (f"{RC}.rollout_is_threshold=3",),
            "rollout_is_threshold has no effect: no rollout_is is written",
        ),
        (
            ("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={target_kl: 0.2}"),
            "target_kl has no effect: adaptive is false",
        ),
        (
            ("algorithm.entropy_loss_fn_args={target_entropy: 0.5, entropy_coef: 0.1}",),
            "target_entropy has no effect: adaptive is false",
        ),
        (
            (REC, f"{LOSS_ARGS}={{regularizer_coef: 0.1}}"),
            "regularizer_coef has no effect: regularizer is none",
        ),
        (
            ("algorithm.algorithm_type=raft", "algorithm.compute_prox_logprobs=true"),
            "compute_prox_logprobs has no effect: sft",
        ),
        (
            ("model.prompt_truncation_side=left",),
            "prompt_truncation_side has no effect: enable_prompt_truncation is true",
        ),
    ):
        assert any(says in w for w in plan(*given).warnings), says
    dr_grpo = ("algorithm.algorithm_type=dr_grpo", "algorithm.loss_scale_factor=9")
    fine = (
        dr_grpo,
        (PPO, "trainer.critic_warmup=1"),
        (f"{LOSS_ARGS}={{clip_range: 0.1, clip_range_low: 0.2}}",),
    )
    fine += (
        (f"{OPTIMIZER}=sgd", "algorithm.optimizer.momentum=0.9"),
        ("algorithm.policy_loss_fn=kl_cov",),
    )
    fine += (
        (
            f"{CURVE}=wsd",
            "algorithm.optimizer.min_lr_ratio=0.1",
            "algorithm.optimizer.num_cycles=2",
        ),
    )
    fine += (
        ("algorithm.optimizer.lr_warmup_from_zero=true", "algorithm.optimizer.lr_warmup_steps=2"),
    )
    fine += (
        ("algorithm.kl_loss_fn=k2", "algorithm.kl_loss_fn_args={adaptive: true, target_kl: 0.2}"),
    )
    fine += ((REC, f"{LOSS_ARGS}={{regularizer_coef: 0.1, regularizer: k2}}"),)
    fine += (
        ("algorithm.compute_prox_logprobs=true",),
        (f"{RC}.rollout_is=token", f"{RC}.rollout_is_threshold=3"),
    )
    assert not any(
        "has no effect" in w or "kl_cov" in w for given in fine for w in plan(*given).warnings
    )


def test_an_adaptive_bonus_needs_entropies_from_the_start() -> None:
    a = plan("algorithm.entropy_loss_fn_args={adaptive: true}").learner.algorithm
    assert needs(a).entropy and needs(plan().learner.algorithm).entropy is False
    assert controllers(a)["entropy_loss"].factor == 0.0


def test_kl_terms_and_their_controllers() -> None:
    a = plan(
        "algorithm.kl_penalty_fn=kl",
        "algorithm.kl_penalty_fn_args={kl_coef: 0.1, adaptive: true, target_kl: 0.2, horizon: 50}",
        "algorithm.kl_loss_fn=k2",
    ).learner.algorithm
    made: Any = controllers(a)
    assert a.kl_penalty_fn == "k1" and needs(a).reference and "ref" in needs(a).before
    assert (made["kl_penalty"].coef, made["kl_penalty"].target, made["kl_penalty"].horizon) == (
        0.1,
        0.2,
        50,
    )
    assert (made["kl_loss"].coef, made["kl_loss"].target) == (0.001, None)
    assert controllers(plan().learner.algorithm) == {}
    ppo = (
        "algorithm.kl_penalty_fn=k1",
        PPO,
        "algorithm.repeat_times=4",
        "buffer.batch_size=3",
        "buffer.train_batch_size=6",
    )
    assert plan(*ppo).trainer.batch_rows == 6, "nothing is compared in groups"


@pytest.mark.parametrize(
    "name", ["raft", "on_policy_distill", "jsd", "gigpo", "multi_step_grpo", "grpo"]
)
def test_a_kl_in_rewards_that_nothing_reads_is_told(name: str) -> None:
    told = plan(f"algorithm.algorithm_type={name}", "algorithm.kl_penalty_fn=k1").warnings
    assert any("kl_penalty_fn has no effect" in w for w in told) == (name != "grpo")


def test_a_kl_in_the_reward_takes_whole_groups() -> None:
    found = plan(
        "algorithm.kl_penalty_fn=k1",
        "buffer.batch_size=3",
        "algorithm.repeat_times=4",
        "buffer.train_batch_size=6",
    )
    assert (found.trainer.batch_groups, found.trainer.batch_rows) == (3, None)
    assert any(
        "counts rows, and the advantages of this algorithm need all rows" in w
        for w in found.warnings
    )
    assert found.schedule.batch_units == found.schedule.step_units, (
        "a step trains one explore batch, so batch e waits for version e"
    )
    written = (
        "buffer.batch_size=3",
        "algorithm.repeat_times=4",
        "buffer.train_batch_size=6",
        "algorithm.kl_penalty_fn=k1",
    )
    assert plan(*written, "trainer.use_dynamic_bsz=false", "trainer.micro_batch_size_per_gpu=4"), (
        "of the 12 rows of a step"
    )


@pytest.mark.parametrize("key", ["max_token_len_per_gpu", "forward_max_token_len_per_gpu"])
def test_longer_rows_are_micro_batches_alone(key: str) -> None:
    assert any(
        f"trainer.critic.{key} is 10 tokens and the longest" in n
        for n in plan(PPO, f"trainer.critic.{key}=10").notes
    )


def test_the_critic_takes_from_the_policy_what_is_not_written() -> None:
    own = plan(
        PPO, "trainer.max_token_len_per_gpu=5000", "trainer.grad_clip=0.3", "trainer.ppo_epochs=3"
    ).learner
    c = own.critic
    assert needs(own.algorithm).critic and c.model_path == own.model_path
    assert (
        c.max_token_len_per_gpu,
        c.forward_max_token_len_per_gpu,
        c.grad_clip,
        c.ppo_epochs,
    ) == (5000, 5000, 0.3, 3)
    assert (c.optim.lr, c.cliprange_value, c.warmup, c.use_dynamic_bsz) == (1e-5, 0.5, 0, True)
    other: Any = plan(
        PPO,
        *(
            f"trainer.critic.{k}"
            for k in (
                "grad_clip=2",
                "ppo_epochs=1",
                "max_token_len_per_gpu=6000",
                "cliprange_value=0.2",
            )
        ),
        *(
            "trainer.critic.optimizer.lr=3e-5",
            "trainer.critic.optimizer.lr_scheduler_type=cosine",
            "trainer.critic_warmup=4",
        ),
        *(
            "trainer.critic.use_dynamic_bsz=false",
            "trainer.critic.micro_batch_size_per_gpu=2",
            "trainer.ppo_epochs=3",
        ),
        *(
            "model.critic_model_path=/models/other",
            "trainer.critic.enable_gradient_checkpointing=true",
        ),
    ).learner.critic
    assert (
        other.grad_clip,
        other.ppo_epochs,
        other.max_token_len_per_gpu,
        other.cliprange_value,
    ) == (2, 1, 6000, 0.2)
    assert (other.optim.lr, other.optim.lr_scheduler_type, other.warmup, other.model_path) == (
        3e-5,
        "cosine",
        4,
        "/models/other",
    )
    assert (other.use_dynamic_bsz, other.micro_batch_size, other.forward_micro_batch_size) == (
        False,
        2,
        2,
    )
    assert other.gradient_checkpointing and not own.gradient_checkpointing
    assert any(
        "have no effect: advantage grpo has no critic" in n
        for n in plan("trainer.critic.grad_clip=2").notes
    )


def test_the_seed_of_the_order() -> None:
    assert (
        plan("seed=7").learner.data_seed == 7
        and plan("seed=7", "trainer.data_seed=0").learner.data_seed == 0
    )


SHAPE = ModelShape(
    parameters=1000 * 1024,
    vocab=1024,
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=16,
    mlp=128,
    tied=True,
)


def terms(*overrides: str, critic: ModelShape | None = None) -> dict[str, int]:
    roles = estimate(plan(*overrides), SHAPE, critic=critic)
    (trainer,) = [r for r in roles if r.role == "trainer-0"]
    return {t.name: t.nbytes for t in trainer.terms}


def step(terms: dict[str, int]) -> int:
    """Bytes of the peak moment of a micro-batch."""
    return sum(terms.get(name, 0) for name in ("activations", "work", "gradients"))


def test_memory_of_the_critic_and_of_the_window() -> None:
    plain = terms("algorithm.repeat_times=8")
    ppo = terms(PPO, "algorithm.repeat_times=8")
    assert "critic" not in plain and ppo["critic"] == 3 * 4 * SHAPE.parameters
    assert step(ppo) >= step(plain)
    big = ModelShape(**{**SHAPE.__dict__, "parameters": 8 * SHAPE.parameters, "tied": False})
    other = terms(
        PPO, "algorithm.repeat_times=8", "trainer.critic.max_token_len_per_gpu=200000", critic=big
    )
    assert other["critic"] == 3 * 4 * (big.parameters - big.embedding)
    assert step(other) >= 4 * big.parameters > step(ppo)
    window = terms("algorithm.compute_prox_logprobs=true", "synchronizer.sync_interval=2")
    assert window["weights of the window's start"] == 4 * SHAPE.parameters


@pytest.mark.e2e
def test_check_looks_at_the_critics_model(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def errors(path: Path, *more: str) -> list[str]:
        given = (f"model.model_path={tiny_model}", f"model.critic_model_path={path}", PPO, *more)
        root = Path(__file__).parents[3]
        return [
            str(e) for e in check.check(root / "examples" / "tiny" / "config.yaml", given).errors
        ]

    assert errors(tiny_model) == []
    (missing,) = errors(tmp_path / "nowhere")
    assert missing.startswith("model.critic_model_path: ")
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / file).write_bytes((tiny_model / file).read_bytes())
    found = errors(tmp_path / "other")
    assert any("model.critic_model_path" in e for e in found), found
