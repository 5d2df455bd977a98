"""The memory estimate on models small enough to count by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.preflight import memory_trainer
from rft.preflight.check import check
from rft.preflight.check_report import Report, step
from rft.preflight.memory_estimate import checkpoints, estimate, too_much
from rft.preflight.memory_terms import GIB, MIB, RoleMemory
from rft.preflight.memory_trainer import (
    kept_by_layer,
    logits,
    micro_batch,
    trainer,
    work_of_layer,
)
from rft.preflight.model_folder import ModelShape, shape
from tests.helpers.model_sizes import MODELS

GOOD = Path(__file__).parent / "data" / "good"
CPU = Facts(cpus=2, gpus=0)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
# one layer: queries and output 8 x 8 each, keys and values 8 x 4 each, three 8 x 16 matrices, two
# norms of 8
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 16


def plan(*overrides: str, facts: Facts = CPU) -> Plan:
    return resolve(load(GOOD / "short.yaml", [*overrides]), facts)


def term(role: RoleMemory, name: str) -> int:
    return next(t.nbytes for t in role.terms if t.name == name)


# ---------------------------------------------------------------- sizes


def test_sizes_of_a_llama() -> None:
    found = shape(LLAMA)
    assert found.parameters == 3 * LAYER + 8 + 800
    assert (found.embedding, found.block, found.queries, found.keys, found.cached) == (
        800,
        LAYER + 2,
        8,
        4,
        24,
    )  # + 8 / 3 of the norm
    assert shape({**LLAMA, "tie_word_embeddings": False}).parameters == found.parameters + 800


def test_tensors_are_counted_where_they_are_known() -> None:
    tensors = {
        "model.embed_tokens.weight": ("F32", (100, 8)),
        "lm_head.weight": ("F32", (100, 8)),
        "model.x": ("F32", (5,)),
    }
    assert shape(LLAMA, tensors).parameters == 805
    assert shape({**LLAMA, "tie_word_embeddings": False}, tensors).parameters == 1605


def test_other_families() -> None:
    gpt2 = shape({"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 4, "vocab_size": 100})
    assert (gpt2.mlp, gpt2.gated, gpt2.kv_heads, gpt2.tied) == (32, False, 4, True)
    experts = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    assert (
        shape(experts).parameters == 3 * (LAYER - 3 * 128 + 4 * 3 * 8 * 6) + 8 + 800
        and shape(experts).mlp == 12
    )
    assert shape({"model_type": "vlm", "text_config": LLAMA}).layers == 3
    assert shape({**LLAMA, "intermediate_size": [6, 9, 6]}).mlp == 9, (
        "Gemma 3n has one for each layer"
    )
    with pytest.raises(ValueError, match="hidden_size, vocab_size"):
        shape({k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")})


@pytest.mark.parametrize("name", ["tiny_model", "tiny_untied"])
def test_formula_and_header_agree(name: str, request: pytest.FixtureRequest) -> None:
    from rft.preflight.model_folder import look

    files = look(str(request.getfixturevalue(name)))
    assert shape(files.config).parameters == shape(files.config, files.tensors).parameters


# ---------------------------------------------------------------- micro-batches: 4 groups of 8
# runs, prompts of 10, answers of 6 tokens

STEP = (
    "model.max_prompt_tokens=10",
    "model.max_response_tokens=6",
    "buffer.batch_size=4",
    "algorithm.repeat_times=8",
)


def test_micro_batch_of_whole_groups() -> None:
    whole = micro_batch(plan(*STEP), 10)  # a group: 10 + 8 x 6 = 58 positions
    assert (whole.alone, whole.rows, whole.positions, whole.trained) == (True, 32, 4 * 58, 32 * 6)
    assert (whole.rooted, whole.keys) == (4 * 16, 28 * 16)
    two = micro_batch(plan(*STEP, "trainer.max_token_len_per_gpu=120"), 10)
    assert (two.alone, two.rows, two.positions) == (False, 16, 116)
    half = micro_batch(plan(*STEP, "trainer.max_token_len_per_gpu=40"), 10)  # 4 runs: 10 + 24
    assert (half.rows, half.positions, half.rooted) == (4, 34, 16)


def test_micro_batch_of_padded_rows() -> None:
    apart = micro_batch(
        plan(*STEP, "trainer.row_layout=padded", "trainer.max_token_len_per_gpu=100"), 10
    )
    assert (apart.alone, apart.rows, apart.positions, apart.trained, apart.keys) == (
        False,
        6,
        96,
        36,
        0,
    )
    fixed = (
        "trainer.row_layout=padded",
        "trainer.use_dynamic_bsz=false",
        "trainer.micro_batch_size_per_gpu=2",
    )
    assert micro_batch(plan(*STEP, *fixed), 10).positions == 32


@pytest.mark.parametrize(("ranks", "fullest"), [(2, 4), (4, 2), (8, 1), (16, 1), (3, 3)])
def test_experts_are_not_cut_so_more_ranks_than_experts_need_no_less(
    ranks: int, fullest: int
) -> None:
    """FSDP2 cuts the first dimension, which is that of the experts."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size

    made = plan(*STEP, "trainer.world_size=1")
    many = replace(made, learner=replace(made.learner, world_size=ranks))
    eight = shape({**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6})
    assert _get_dim0_padded_size(torch.Size([8, 12, 8]), ranks)[0] == fullest * ranks
    found = trainer(many, 0, eight, 10)
    assert term(found, "weights") == eight.parameters * 4 * fullest // 8
    assert term(found, "AdamW moments") == 2 * term(found, "weights")


def test_short_prompts_take_less() -> None:
    assert micro_batch(plan(*STEP), 5).positions == 4 * 53


# ---------------------------------------------------------------- the trainer


def test_trainer_that_gradients_decide() -> None:
    # the gradients of the tied embedding are the most there is
    sizes = shape({**LLAMA, "vocab_size": 10_000_000})
    rank = trainer(plan(*STEP), 0, sizes, 10)
    weights = sizes.parameters * 4
    head = 10_000_000 * 8 * 4
    assert term(rank, "weights") == weights and term(rank, "AdamW moments") == 2 * weights
    step = term(rank, "gradients") + term(rank, "work")
    assert step == pytest.approx(weights + head, rel=1e-3)
    assert rank.nbytes == sum(t.nbytes for t in rank.terms)


@pytest.mark.parametrize(
    ("tokens", "tile"), [(192, 192 * (2**20 // 192)), (64, 2**20), (8192, 192 * (2**20 // 192))]
)
def test_logits_take_a_tile(tokens: int, tile: int) -> None:
    s = replace(plan(*STEP).learner, logprob_chunk_tokens=tokens)
    sizes = shape({**LLAMA, "vocab_size": 1_000_000})
    micro = micro_batch(plan(*STEP), 10)
    assert micro.trained == 192
    forward, backward = logits(sizes, s, micro, entropy=False, reference=False)
    assert (forward - 4 * tile - memory_trainer.KEPT_BYTES, backward - forward) == (
        192 * (8 * 4 + 2 * 8 * 4),
        192 * 8 * 4,
    )
    more, _ = logits(sizes, s, micro, entropy=True, reference=True)
    assert more - forward == 4 * tile + 4 * 192


def test_the_estimate_cuts_as_log_probs_are_cut() -> None:
    from rft.trainer.model import logprobs

    assert (
        memory_trainer.CPU_TILE,
        memory_trainer.GPU_TILE,
        memory_trainer.LEAST_WIDTH,
        memory_trainer.KEPT_BYTES,
    ) == (
        logprobs.CPU_TILE,
        logprobs.GPU_TILE,
        logprobs.LEAST_WIDTH,
        logprobs.KEPT_BYTES,
    )


def test_activations_by_hand() -> None:
    s = plan(*STEP, "trainer.row_layout=padded").learner
    # 2 rows of 16
    micro = micro_batch(
        plan(*STEP, "trainer.row_layout=padded", "trainer.max_token_len_per_gpu=32"), 10
    )
    assert micro.positions == 32
    # per position and layer: norms 4 x 8, MLP 2 x 16, attention 2 x (8 + 4)
    layer = 32 * 4 * (32 + 32 + 24)
    assert kept_by_layer(shape(LLAMA), s, micro) == layer
    # where norms and MLP are as transformers has them: norms 2 x 8 float32 more, MLP 4 x 16
    compiled = 32 * 4 * (16 + 32 + 64 + 24)
    assert kept_by_layer(shape(LLAMA), replace(s, compile=True), micro) == compiled
    gemma = shape({**LLAMA, "model_type": "gemma"})
    assert kept_by_layer(gemma, s, micro) == compiled
    # norms of Qwen3 over 8 queries and 4 keys: what they read
    qwen3 = shape({**LLAMA, "model_type": "qwen3"})
    assert kept_by_layer(qwen3, s, micro) == layer + 32 * 4 * 12
    # two gradients of hidden states, and three of the MLP's width
    assert work_of_layer(shape(LLAMA), s, micro) == 32 * 4 * (2 * 8 + 3 * 16)


def test_checkpointing_keeps_the_input_of_every_layer() -> None:
    cut = (
        *STEP,
        "trainer.row_layout=padded",
        "trainer.max_token_len_per_gpu=32",
        "trainer.enable_gradient_checkpointing=true",
    )
    rank = trainer(plan(*cut), 0, shape({**LLAMA, "vocab_size": 10}), 10)
    # three layers' and the output layer's inputs, and what else the layer stores that is computed again
    assert term(rank, "activations") == 3 * 32 * 8 * 4 + 32 * 4 * (32 + 32 + 24)


def test_reference_model_and_ranks() -> None:
    sizes = shape(LLAMA)
    assert (
        term(trainer(plan(*STEP, "algorithm.kl_loss_fn=k2"), 0, sizes, 10), "reference model")
        == sizes.parameters * 4
    )
    two = trainer(plan(*STEP, "trainer.world_size=2"), 1, sizes, 10)
    assert two.role == "trainer-1" and term(two, "weights") == sizes.parameters * 2
    # at the log-probs: what belongs to no layer, and the last layer
    assert term(two, "gathered layers") == (802 + sizes.block) * 4


def test_the_copy_of_a_checkpoint_that_is_written_aside() -> None:
    sizes = shape(LLAMA)
    name = "a checkpoint while it is written"
    on = ("trainer.checkpoint.async_save=true", "trainer.save_interval=2", "buffer.total_steps=10")

    def found(*overrides: str) -> int:
        return sum(
            t.nbytes
            for t in trainer(plan(*STEP, *on, *overrides), 0, sizes, 10).terms
            if t.name == name
        )

    assert found() == 3 * sizes.parameters * 4  # weights and two moments
    assert found("trainer.world_size=2") == 3 * sizes.parameters * 2
    assert found("trainer.checkpoint.save_contents=[model]") == sizes.parameters * 4
    assert found("algorithm.algorithm_type=ppo", "algorithm.repeat_times=8") > found()
    off = (
        "trainer.checkpoint.async_save=false",
        "trainer.save_interval=0",
        "trainer.save_hf_checkpoint=always",
        "trainer.total_steps=2",
    )
    assert [found(o) for o in off] == [0] * 4


# ---------------------------------------------------------------- engines

GPU = Facts(cpus=16, gpus=8)
GPUS = (
    "cluster.gpu_per_node=8",
    "explorer.rollout_model.engine_num=2",
    "explorer.rollout_model.tensor_parallel_size=2",
)


def test_engines_on_cpu() -> None:
    sizes = shape(LLAMA)
    roles = estimate(
        plan(
            *STEP, "explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.engine_num=2"
        ),
        sizes,
    )
    first, second, _, others, _ = roles
    assert (first.role, second.role, others.role) == (
        "engine-0",
        "engine-1",
        "other processes",
    ) and first.nbytes == second.nbytes
    assert term(first, "key/value cache") == GIB and term(first, "packed output layer") == 800 * 4
    # the mapped version stands in "others" too
    assert first.nbytes - first.own == sizes.parameters * 4
    small = "explorer.rollout_model.kv_cache_bytes=2097152"
    assert (
        term(
            estimate(plan(*STEP, "explorer.rollout_model.engine_type=vllm", small), sizes)[0],
            "key/value cache",
        )
        == 2 * MIB
    )
    given = (
        *STEP,
        "explorer.rollout_model.engine_type=transformers",
        "explorer.rollout_model.max_num_seqs=3",
    )
    own = estimate(plan(*given), sizes, prompt_tokens=4)[0]
    assert term(own, "key/value cache") == 3 * 10 * 24 * 4


def test_engine_on_gpus_takes_its_share() -> None:
    sizes = shape(
        {
            **LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "num_hidden_layers": 32,
        }
    )
    roles = estimate(plan(*STEP, *GPUS, facts=GPU), sizes, gpu_memory=80 * GIB)
    assert roles[0].device == "cuda" and roles[0].nbytes == int(0.9 * 80 * GIB)
    assert term(roles[0], "weights") == sizes.parameters  # 2 bytes on 2 GPUs
    open_end = estimate(plan(*STEP, *GPUS, facts=GPU), sizes)[0]
    assert term(open_end, "key/value cache") == 256 * 16 * sizes.cached * 2 // 2


# ---------------------------------------------------------------- what does not fit


def test_more_than_there_is() -> None:
    made = plan(*STEP)
    roles = estimate(made, shape(LLAMA))
    assert too_much(roles, made, ram=64 * GIB, gpu_memory=None) == []
    (text,) = too_much(roles, made, ram=1 * GIB, gpu_memory=None)
    assert "this machine has 1.0 GiB" in text.message and "trainer-0" in text.message
    big = ModelShape(
        parameters=7 * 10**9,
        vocab=32000,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        mlp=11008,
    )
    gpus = plan(*STEP, *GPUS, facts=GPU)
    found = too_much(estimate(gpus, big, gpu_memory=8 * GIB), gpus, ram=None, gpu_memory=8 * GIB)
    assert len(found) == 1 and found[0].message.startswith("memory: trainer-0 needs about")
    assert (
        too_much(estimate(gpus, big, gpu_memory=80 * GIB), gpus, ram=None, gpu_memory=80 * GIB)
        == []
    )


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ((), 1),  # the last one alone
        # three are kept, and one is written before the oldest goes
        (("trainer.save_interval=1",), 4),
        (("trainer.save_interval=4",), 3),
        (("trainer.save_after=600",), 4),
        (("trainer.save_interval=1", "trainer.max_checkpoints_to_keep=0"), 9),
        (
            (
                "trainer.save_interval=1",
                "trainer.max_checkpoints_to_keep=1",
                "trainer.checkpoint.best_metric=reward/mean",
            ),
            3,
        ),
        (
            (
                "trainer.save_interval=1",
                "trainer.max_checkpoints_to_keep=1",
                "trainer.checkpoint.best_metric=eval/x/mean@1",
            ),
            5,
        ),
    ],
)
def test_checkpoints_on_disk(given: tuple[str, ...], number: int) -> None:
    made = plan(*STEP, "buffer.total_steps=9", "trainer.total_steps=9", *given)
    sizes = shape(LLAMA)
    roles = estimate(made, sizes)
    (files,) = [r for r in roles if r.device == "disk"]
    assert term(files, f"{number} x weights, AdamW moments") == number * 12 * sizes.parameters
    assert term(files, "exported models") == 4 * sizes.parameters
    assert too_much(roles, made, ram=None, gpu_memory=None, disk=files.nbytes) == []
    (excess,) = too_much(roles, made, ram=None, gpu_memory=None, disk=files.nbytes - 1)
    assert (
        excess.message.startswith("disk: the checkpoints that are kept take about")
        and "max_checkpoints_to_keep" in excess.message
    )


def test_check_reports_it(tiny_model: Path) -> None:
    rows = GOOD.parent / "rows.jsonl"
    given = [f"model.model_path={tiny_model}", f"buffer.explorer_input.taskset.path={rows}"]

    def run(*, ram: int | None = None) -> Report:
        return check(GOOD / "short.yaml", given, facts=Facts(cpus=2, gpus=0, memory=ram))

    assert [r.role for r in run().memory] == [
        "engine-0",
        "trainer-0",
        "other processes",
        "checkpoints",
    ]
    assert not any("memory" in w for w in run().warnings)
    assert any(w.startswith("memory: about") for w in run(ram=100 * MIB).warnings)
    found = json.loads(json.dumps(run().to_json()))
    assert found["memory"][0]["bytes"] == sum(t["nbytes"] for t in found["memory"][0]["terms"])


@pytest.mark.parametrize(
    ("gpu_memory", "overrides", "checkpointing"),
    [
        (80, (), True),
        (None, (), True),
        (192, (), False),
        (192, ("trainer.enable_gradient_checkpointing=true",), True),
        (192, ("trainer.enable_activation_offload=true",), True),
    ],
)
def test_gpu_memory_decides_on_gradient_checkpointing(
    tmp_path: Path, gpu_memory: int | None, overrides: tuple[str, ...], checkpointing: bool
) -> None:
    """U4: a default run of an 8B model on 8 GPUs fits."""
    report = _eight_gpus(tmp_path, gpu_memory, *overrides)
    assert report.ok and report.plan is not None
    assert report.plan.learner.gradient_checkpointing is checkpointing
    assert not [w for w in report.warnings if "memory" in w]


def test_gpus_of_this_machine_judge_no_run_of_another(tmp_path: Path) -> None:
    remote = ("cluster.ray_address=192.0.2.1:6379", "trainer.enable_gradient_checkpointing=false")
    assert not _eight_gpus(tmp_path, 80, remote[1]).ok
    report = _eight_gpus(tmp_path, 80, *remote)
    assert report.ok and not [w for w in report.warnings if "memory" in w]


def test_what_never_fits_a_gpu_is_refused(tmp_path: Path) -> None:
    report = _eight_gpus(tmp_path, 80, "trainer.enable_gradient_checkpointing=false")
    (error,) = report.errors
    assert error.key == "trainer" and "enable_gradient_checkpointing: true" in error.message
    (error, *_) = _eight_gpus(tmp_path, 24).errors
    assert "enable_gradient_checkpointing" not in error.message  # it is on


def _eight_gpus(tmp_path: Path, gpu_memory: int | None, *overrides: str) -> Report:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    given = [
        f"model.model_path={tmp_path}",
        "cluster.gpu_per_node=8",
        "model.max_prompt_tokens=1024",
        "model.max_response_tokens=8192",
        "buffer.batch_size=64",
        "algorithm.repeat_times=8",
    ]
    facts = Facts(cpus=16, gpus=8, memory=None, gpu_memory=gpu_memory and gpu_memory * GIB)
    return check(GOOD / "short.yaml", [*given, *overrides], facts=facts, schema_only=True)


def test_schema_only_needs_config_json_alone(tmp_path: Path) -> None:
    given = [
        f"model.model_path={tmp_path}",
        "buffer.explorer_input.taskset.path=/nowhere/rows.jsonl",
    ]
    assert check(GOOD / "short.yaml", given, facts=CPU, schema_only=True).memory == ()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert check(GOOD / "short.yaml", given, facts=CPU, schema_only=True).memory
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    report = check(GOOD / "short.yaml", given, facts=CPU, schema_only=True)
    assert report.ok and any("config.json does not give hidden_size" in n for n in report.notes)


def test_groups_that_clients_or_another_process_bring_count_as_they_are() -> None:
    """They counted as single runs: a step of a service had 0 experiences, and a checkpoint of each
    of 1,000,000,000 steps.
    """
    endless = [
        "trainer.total_steps=null",
        "trainer.save_interval=10",
        "trainer.max_checkpoints_to_keep=0",
    ]
    service = resolve(
        load(GOOD.parents[3].parent / "examples" / "serve" / "config.yaml", endless), CPU
    )
    assert service.runs_per_step == 64 * 8 and micro_batch(service, 63).rows >= 8
    told = step(service)
    assert (told["experiences"], told["max_generated_tokens"], told["train_steps"]) == (
        512,
        512,
        None,
    )
    (weights, _) = checkpoints(service, shape(LLAMA), shape(LLAMA), None).terms
    assert weights.name.startswith("1 x") and weights.how == "the number of steps is not known"
    apart = (
        "mode=train",
        "cluster.ray_address=auto",
        "buffer.explorer_input.taskset=null",
        "algorithm.repeat_times=4",
    )
    assert plan(*apart, "trainer.total_steps=3").runs_per_step == 4 * plan().explorer.batch_size


def test_what_lives_on_the_host_takes_no_memory_of_a_gpu() -> None:
    gpus = ("cluster.gpu_per_node=4", "trainer.world_size=2")
    sizes = shape(LLAMA)

    def names(*overrides: str) -> dict[str, int]:
        return {t.name: t.nbytes for t in trainer(plan(*overrides), 0, sizes, 10).terms}

    offloaded = names(*gpus, "trainer.offload_policy=true", "algorithm.kl_loss_fn=k2")
    assert not {"weights", "AdamW moments", "reference model"} & set(offloaded)
    alone = ("cluster.gpu_per_node=2", "trainer.param_dtype=float32")
    assert "gathered layers" not in names(*alone) and "gathered layers" in names(
        *alone, "trainer.offload_policy=true"
    )
    assert names(*gpus, "trainer.fsdp_size=1")["weights"] == 2 * names(*gpus)["weights"]
    assert "SGD moments" not in names("algorithm.optimizer.optimizer_type=sgd")


def test_a_teachers_likely_tokens_and_a_moving_average_are_counted() -> None:
    ema = "{name: e, model_path: '${model.model_path}', engine_type: transformers, "
    made = plan(
        "algorithm.algorithm_type=opd_topk",
        "algorithm.policy_loss_fn_args.k=5",
        f"explorer.auxiliary_models=[{ema}moving_average: 0.9}}]",
    )
    bare = plan("algorithm.algorithm_type=opd_topk", "algorithm.policy_loss_fn_args.k=5")
    sizes = shape(LLAMA)
    found = {r.role: r for r in estimate(made, sizes)}
    tokens = made.runs_per_step * max(t.sampling.max_tokens for t in made.explorer.tasksets)
    # five ids of 4 bytes, six log-probs of 2
    assert term(found["other processes"], "teacher's likely tokens") == 3 * tokens * 32
    assert made.total_steps is not None
    on_disk = made.total_steps * tokens * 32
    assert term(found["rows"], "teacher's likely tokens") == on_disk
    (excess,) = too_much((found["rows"],), made, ram=None, gpu_memory=None, disk=on_disk - 1)
    assert "the teacher's likely tokens in all rows take" in excess.message
    assert term(found["trainer-0"], "moving average") == 4 * sizes.parameters
    assert term(found["other processes"], "published moving average") == 8 * sizes.parameters
    saved, plain = (checkpoints(p, sizes, sizes, None).terms[0].nbytes for p in (made, bare))
    assert saved * 3 == plain * 4, "weights and two moments, and the average"
