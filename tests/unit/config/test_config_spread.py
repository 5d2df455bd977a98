"""How the learner is spread, offloaded, loaded and saved: what reaches the Plan, and what is
refused with its key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
KEPT = "trainer.checkpoint"
ON_GPUS = ("cluster.gpu_per_node=4", "trainer.world_size=2")


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


def told(p: Plan) -> dict[str, Any]:
    return {d.key: d.value for d in p.derived}


def test_offload_has_no_effect_on_cpu() -> None:
    assert plan(*ON_GPUS, "trainer.offload_policy=true").learner.offload_policy
    on_cpu = plan("trainer.offload_policy=true")
    assert not on_cpu.learner.offload_policy and any(
        "no effect on CPU" in w for w in on_cpu.warnings
    )


def test_spread_over_ranks_reaches_the_learner() -> None:
    found = plan(
        *ON_GPUS,
        "trainer.fsdp_size=1",
        "trainer.ulysses_sequence_parallel_size=2",
        "trainer.forward_prefetch=true",
        "trainer.reduce_dtype=bfloat16",
        "trainer.ref.param_offload=true",
        "trainer.critic.offload_policy=true",
        "trainer.enable_gradient_checkpointing=true",
        "trainer.enable_activation_offload=true",
        "trainer.profiler.steps=[2]",
        "trainer.profiler.all_ranks=true",
    ).learner
    assert (
        found.fsdp_size,
        found.sequence_parallel,
        found.forward_prefetch,
        found.reduce_dtype,
    ) == (1, 2, True, "bfloat16")
    assert found.ref_offload and found.critic.offload_policy and found.activation_offload
    assert (found.profiler.steps, found.profiler.ranks) == (
        (2,),
        (0, 1),
    ) and found.profile_folder.name == "profile"


def test_traced_steps_beyond_the_run_are_told() -> None:
    given = ("trainer.profiler.steps=[2, 9, 12]", "buffer.total_steps=9")
    assert (
        "trainer.profiler.steps [12] are not traced: the run has 9 train steps"
        in plan(*given).warnings
    )
    assert not any("profiler" in w for w in plan(given[0], "buffer.total_steps=12").warnings)


def test_saving_reaches_the_trainer() -> None:
    assert (
        told(plan())["trainer.checkpoint.async_save"] is False and plan(*ON_GPUS).trainer.async_save
    )
    found = plan(
        "trainer.checkpoint.save_contents=[model, hf_model]",
        "trainer.checkpoint.load_contents=[hf_model]",
    )
    assert (found.trainer.save_hf_checkpoint, found.learner.save_contents) == (
        "always",
        ("model", "hf_model"),
    )
    assert found.learner.load_contents == ("model",)
    best = plan(
        "trainer.checkpoint.best_metric=eval/x/mean@4", "trainer.checkpoint.best_mode=min"
    ).trainer
    assert (best.best_metric, best.best_mode) == ("eval/x/mean@4", "min")


def test_overrides_of_the_model_hold_for_engines_too() -> None:
    override = "model.override_config={attention_bias: true}"
    assert plan(override).learner.override_config == {"attention_bias": True}
    kinds = {
        "vllm": {"hf_overrides": {"attention_bias": True}},
        "transformers": {"attention_bias": True},
    }
    for kind, expected in kinds.items():
        assert (
            plan(override, f"explorer.rollout_model.engine_type={kind}")
            .engines[0]
            .extra_engine_args
            == expected
        )
    own = "explorer.rollout_model.extra_engine_args={hf_overrides: {rope_theta: 5.0}}"
    assert plan(override, own).engines[0].extra_engine_args == {
        "hf_overrides": {"attention_bias": True, "rope_theta": 5.0}
    }


def test_rotary_embeddings_hold_for_trainer_and_engines() -> None:
    given = ("model.rope_scaling={rope_type: yarn, factor: 4.0}", "model.rope_theta=50000")
    wanted = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 50000.0}
    found = plan(*given)
    assert found.learner.override_config == wanted
    assert found.engines[0].extra_engine_args == {"hf_overrides": wanted}
    assert (
        plan(*given, "explorer.rollout_model.engine_type=transformers").engines[0].extra_engine_args
        == wanted
    )
    for wrong, said in (
        (
            ("model.rope_scaling={factor: 4.0}",),
            r"model\.rope_scaling: needs rope_type: linear, dynamic",
        ),
        (
            (given[1], "model.override_config={rope_theta: 1.0}"),
            r"model\.rope_theta: model\.override_config has rope_theta too",
        ),
        (
            (given[0], "model.override_config={rope_parameters: {}}"),
            r"model\.rope_scaling: model\.override_config has rope_parameters",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            plan(*wrong)


def test_fused_kernels_are_for_gpus() -> None:
    triton = "trainer.fused_kernel_backend=triton"
    assert plan(triton, *ON_GPUS).learner.fused_logprobs
    assert not plan(*ON_GPUS).learner.fused_logprobs
    with pytest.raises(
        ConfigError, match=r"trainer\.fused_kernel_backend: Triton's kernels run on GPUs"
    ):
        plan(triton)


def test_forward_passes_have_their_own_micro_batches() -> None:
    from rft.trainer.settings import ForwardSettings

    budget = plan().learner.max_token_len_per_gpu
    assert (plan().learner.log_prob, plan().learner.ref) == (None, None)
    wide = plan("trainer.log_prob_max_token_len_per_gpu=40000").learner
    assert wide.log_prob == wide.ref == ForwardSettings(max_token_len_per_gpu=40000)
    other = plan("trainer.ref.max_token_len_per_gpu=40000").learner
    assert (other.log_prob, other.ref) == (None, ForwardSettings(max_token_len_per_gpu=40000))
    rows = ("trainer.use_dynamic_bsz=false", "trainer.micro_batch_size_per_gpu=1")
    assert (plan(*rows).learner.log_prob, plan(*rows).learner.ref) == (None, None)
    fixed = plan(
        *rows,
        "trainer.log_prob_micro_batch_size_per_gpu=16",
        "trainer.ref.log_prob_micro_batch_size_per_gpu=8",
    ).learner
    assert fixed.log_prob == ForwardSettings(max_token_len_per_gpu=budget, micro_batch_size=16)
    assert fixed.ref == ForwardSettings(max_token_len_per_gpu=budget, micro_batch_size=8)
    tokens = plan(*rows, "trainer.ref.use_dynamic_bsz=true").learner
    assert tokens.ref == ForwardSettings(max_token_len_per_gpu=budget)
    for key in ("trainer.log_prob_max_token_len_per_gpu", "trainer.ref.max_token_len_per_gpu"):
        assert any(
            f"{key} is 5 tokens and the longest experience may have" in n
            for n in plan(f"{key}=5").notes
        )
    with pytest.raises(
        ConfigError, match=r"trainer\.ref\.log_prob_micro_batch_size_per_gpu: is required"
    ):
        plan("trainer.ref.use_dynamic_bsz=false")
    for key in (
        "trainer.log_prob_micro_batch_size_per_gpu",
        "trainer.ref.log_prob_micro_batch_size_per_gpu",
    ):
        assert any(w.startswith(f"{key} has no effect") for w in plan(f"{key}=4").warnings)


def test_a_library_is_said_aloud() -> None:
    assert any(
        "my.module will be imported" in w for w in plan("model.external_lib=my.module").warnings
    )
    assert plan().learner.external_lib is None


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("trainer.fsdp_size=2",), "trainer.fsdp_size"),
        (("trainer.fsdp_size=0",), "trainer.fsdp_size"),
        (("trainer.ulysses_sequence_parallel_size=2",), "trainer.ulysses_sequence_parallel_size"),
        (
            (*ON_GPUS, "trainer.ulysses_sequence_parallel_size=2", "trainer.row_layout=padded"),
            "trainer.ulysses_sequence_parallel_size",
        ),
        (
            (
                "trainer.enable_activation_offload=true",
                "trainer.enable_gradient_checkpointing=false",
            ),
            "trainer.enable_activation_offload",
        ),
        (("trainer.checkpoint.save_contents=[optimizer]",), "trainer.checkpoint.save_contents"),
        (
            (f"{KEPT}.save_contents=[model]", f"{KEPT}.load_contents=[model, optimizer]"),
            f"{KEPT}.load_contents",
        ),
        (("trainer.checkpoint.load_contents=[optimizer]",), "trainer.checkpoint.load_contents"),
        (
            (f"{KEPT}.save_contents=[model, hf_model]", "trainer.save_hf_checkpoint=never"),
            f"{KEPT}.save_contents",
        ),
        (("trainer.profiler.ranks=[1]",), "trainer.profiler.ranks"),
        (("model.external_lib=os; import x",), "model.external_lib"),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert [e.key for e in getattr(caught.value, "errors", [caught.value])] == [key]
