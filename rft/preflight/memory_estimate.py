"""Estimate the peak memory of each role of a plan, term by term; docs/concepts/memory.md explains
and measures the terms.

Depends on the plan and the model's sizes; needs no GPU, torch or Ray.  Invariant: every number
follows from the plan, the model's sizes and the constants below, which are equal for all models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rft.algorithm.needs import needs
from rft.config.plan import Plan
from rft.config.plan_serve import ENDLESS
from rft.config.roles import explores
from rft.engine.settings import EngineSettings
from rft.preflight.memory_terms import (
    BYTES,
    CUDA_CONTEXT,
    MIB,
    NCCL,
    PART_PROCESS,
    RAY_AND_LAUNCHER,
    TOKENIZER_ENTRY,
    TRANSFORMERS_PROCESS,
    VLLM_CORE,
    VLLM_FRONT,
    VLLM_KERNELS,
    RoleMemory,
    Term,
    count_text,
    size_text,
)
from rft.preflight.memory_trainer import OPTIMIZERS, longest_response, moments_of, trainer
from rft.preflight.model_folder import ModelShape

PREFILL_TOKENS = 4096  # of one forward pass of the transformers engine
SLOTS = 2  # versions that a memory transport keeps


def estimate(
    plan: Plan,
    shape: ModelShape,
    *,
    critic: ModelShape | None = None,
    trained: int | None = None,
    auxiliary: Mapping[str, ModelShape] | None = None,
    prompt_tokens: int | None = None,
    image_tokens: int | None = None,
    gpu_memory: int | None = None,
) -> tuple[RoleMemory, ...]:
    """Return the peak memory of every role.

    `prompt_tokens`: the longest prompt if the tasks were read; else the longest allowed.
    `image_tokens`: the most in a prompt that are of images, likewise. `critic`:
    its sizes if they differ from the policy's.  `trained`: parameters of the trained adapter; None:
    full fine-tuning. `auxiliary`: known sizes of auxiliary models, by name. `gpu_memory`: bytes of
    each GPU; without it a GPU engine's share of the device stays open.
    """
    prompt = min(
        prompt_tokens or plan.engines[0].max_model_len,
        plan.engines[0].max_prompt_tokens or plan.engines[0].max_model_len,
    )
    engines = tuple(
        engine(plan, settings, shape, prompt, gpu_memory)
        for settings in plan.engines
        if explores(plan.mode)
    )
    data = plan.trainer.offline_data
    rows_shown = [*plan.explorer.tasksets, *([] if data is None else [data.rows])]
    shows = any(t.format.image_key for t in rows_shown)
    shown = (prompt if image_tokens is None else image_tokens) if shows else 0
    ranks = tuple(
        trainer(plan, rank, shape, prompt, critic, trained, shown)
        for rank in range(plan.learner.world_size)
        if plan.trains
    )
    auxiliary_engines = tuple(
        _auxiliary_engine(plan, e, sizes, gpu_memory)
        for m in plan.auxiliary
        if explores(plan.mode)
        and not plan.trainer.alone
        and (sizes := (auxiliary or {}).get(m.name)) is not None
        for e in m.engines
    )
    rest = RoleMemory(
        role="other processes", device="cpu", terms=tuple(_rest_of_the_run(plan, shape))
    )
    disk = (checkpoints(plan, shape, critic or shape, trained),) if plan.trains else ()
    return (*engines, *auxiliary_engines, *ranks, rest, *disk, *rows(plan))


def _rest_of_the_run(plan: Plan, shape: ModelShape) -> list[Term]:
    """Return the terms of processes without a model, and of published copies of the weights."""
    if plan.trainer.alone:
        return [
            Term("coordinator", PART_PROCESS, f"a process of {PART_PROCESS // MIB} MiB"),
            Term("Ray and rft run", RAY_AND_LAUNCHER, "constant"),
        ]
    terms = [
        Term(
            "explorer, buffer, coordinator",
            3 * PART_PROCESS,
            f"3 processes of {PART_PROCESS // MIB} MiB",
        ),
        Term("Ray and rft run", RAY_AND_LAUNCHER, "constant"),
    ]
    if per_token := top_bytes(plan):
        tokens = plan.runs_per_step * longest_response(plan)
        how = f"of a step in 3 processes, {tokens} tokens x {per_token} bytes"
        terms.append(Term("teacher's likely tokens", 3 * tokens * per_token, how))
    weights = shape.parameters * BYTES[plan.learner.dtype]
    if plan.averaged is not None:
        how = f"{SLOTS} versions x {size_text(weights)}, in separate memory"
        terms.append(Term("published moving average", SLOTS * weights, how))
    if plan.sync.sync_method in ("memory", "nccl"):
        how = f"{SLOTS} versions x {size_text(weights)}, in separate memory"
        terms.append(Term("published weights", SLOTS * weights, how))
    if plan.sync.sync_method == "nccl":
        workers = sum(plan.sync_runtime.workers)
        how = (
            f"a copy of {size_text(weights)} in each of {workers} engine workers, at least while "
            "it loads"
        )
        terms.append(Term("received weights", workers * weights, how))
    return terms


def checkpoints(
    plan: Plan, shape: ModelShape, critic: ModelShape, trained: int | None
) -> RoleMemory:
    """Return the disk space of the most checkpoints at one time: the retained ones, and one written
    before the oldest is removed.
    """
    s = plan.learner
    t = plan.trainer
    moments = moments_of(s)
    trained_weights = 4 * (shape.parameters if trained is None else trained)
    values = 4 * critic.parameters if needs(s.algorithm).critic else 0
    every = values + (trained_weights if "model" in s.save_contents else 0)
    every += trained_weights if s.average_decay is not None else 0
    every += moments * trained_weights + 2 * values if "optimizer" in s.save_contents else 0
    steps = None if plan.total_steps == ENDLESS else plan.total_steps
    # one may be under evaluation, one served
    best = (t.best_metric is not None) + 2 * str(t.best_metric).startswith("eval/")
    keep = t.max_checkpoints_to_keep and t.max_checkpoints_to_keep + 1 + best
    interval = t.save_interval or int(t.save_after_s > 0)  # by age every step may be saved
    saved = 1 if not interval else keep or 1 if steps is None else math.ceil(steps / interval)
    number = min(saved, keep or saved)
    how = "the number of steps is not known" if steps is None else f"{saved} are written"
    exported = (
        {"never": 0, "last": 1, "always": number}[t.save_hf_checkpoint]
        * shape.parameters
        * BYTES[s.dtype]
    )
    terms = (
        Term(
            f"{number} x weights, {OPTIMIZERS[s.optim.optimizer_type]} moments", number * every, how
        ),
        Term("exported models", exported, f"save_hf_checkpoint: {t.save_hf_checkpoint}"),
    )
    return RoleMemory(role="checkpoints", device="disk", terms=tuple(t for t in terms if t.nbytes))


def top_bytes(plan: Plan) -> int:
    """Return bytes of the teacher's k most likely tokens at one token: int32 ids, and float16
    log-probs of these and of all others together.
    """
    k = needs(plan.learner.algorithm).teacher_top
    return 6 * k + 2 if k else 0


def rows(plan: Plan) -> tuple[RoleMemory, ...]:
    """Return the disk space of what the rows of all steps hold of a teacher's likely tokens, which
    is most of such a row; none if they hold nothing.
    """
    if not (per_token := top_bytes(plan)) or not plan.total_steps or plan.trainer.alone:
        return ()
    steps = 1 if plan.total_steps == ENDLESS else plan.total_steps
    tokens = steps * plan.runs_per_step * longest_response(plan)
    how = f"{tokens} tokens x {per_token} bytes, before compression"
    term = Term("teacher's likely tokens", tokens * per_token, how)
    return (RoleMemory(role="rows", device="disk", terms=(term,)),)


# ---------------------------------------------------------------- engines


def engine(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> RoleMemory:
    """Return the memory of one rollout engine."""
    kind = (
        _gpu_engine if e.device == "cuda" else _vllm if e.engine_type == "vllm" else _transformers
    )
    terms = kind(plan, e, shape, prompt, gpu_memory)
    return RoleMemory(role=e.name, device=e.device, terms=tuple(t for t in terms if t.nbytes))


def _auxiliary_engine(
    plan: Plan, e: EngineSettings, shape: ModelShape, gpu_memory: int | None
) -> RoleMemory:
    """Return the memory of one auxiliary engine; one with fixed weights never loads any."""
    if not e.fixed_weights:
        return engine(plan, e, shape, e.max_prompt_tokens or e.max_model_len, gpu_memory)
    if e.task == "score" and e.engine_type == "transformers" and e.device == "cpu":
        return RoleMemory(role=e.name, device="cpu", terms=_classifier(e, shape))
    terms = engine(plan, e, shape, e.max_prompt_tokens or e.max_model_len, gpu_memory).terms
    terms = tuple(
        replace(t, name="decoding", nbytes=max(0, t.nbytes - shape.parameters * BYTES[e.dtype]))
        if "second copy" in t.name
        else t
        for t in terms
        if not t.shared
    )
    return RoleMemory(role=e.name, device=e.device, terms=tuple(t for t in terms if t.nbytes))


def _classifier(e: EngineSettings, shape: ModelShape) -> tuple[Term, ...]:
    from rft.engine.classifier import BATCH_TOKENS

    item = BYTES[e.dtype]
    tokens = max(BATCH_TOKENS, e.max_model_len)
    weights = max(0, shape.parameters - (0 if shape.tied else shape.embedding)) * item
    return (
        Term("process", TRANSFORMERS_PROCESS, "constant"),
        _tokenizer(shape),
        Term("weights", weights, f"{size_text(weights)}, without an output layer"),
        Term("forward", tokens * (3 * shape.mlp + 4 * shape.hidden) * item, f"{tokens} tokens"),
    )


def _vllm(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """Return the terms of vLLM on CPU.

    Layers multiply with packed weights, whose originals are freed except for the output layer. A
    new version is packed next to the one in use, from a mapping of the published weights; the
    allocator keeps that memory, and decoding reuses it.
    """
    from rft.engine.vllm_args import CPU_KV_CACHE_BYTES

    item = BYTES[e.dtype]
    tp = e.tensor_parallel_size
    weights = shape.parameters * item
    head = shape.embedding * item
    tokens = min(
        e.max_num_batched_tokens or max(2048, e.max_model_len), _concurrent(plan, e) * prompt
    )
    decode = tokens * (3 * shape.mlp // tp + 4 * shape.hidden) * item + _sampling(plan, e, shape)
    return [
        Term(
            "processes",
            VLLM_FRONT + tp * VLLM_CORE,
            f"{size_text(VLLM_FRONT)} + {tp} x {size_text(VLLM_CORE)}",
        ),
        Term("kernels", tp * VLLM_KERNELS, f"{tp} x {size_text(VLLM_KERNELS)}, in time"),
        _tokenizer(shape),
        Term("weights", weights, count_text(shape.parameters, item)),
        Term(
            "packed output layer",
            head,
            f"vocabulary {shape.vocab} x hidden {shape.hidden} x {item} bytes",
        ),
        Term(
            "key/value cache",
            tp * (e.kv_cache_bytes or CPU_KV_CACHE_BYTES),
            "explorer.rollout_model.kv_cache_bytes, all used in time",
        ),
        Term(
            "second copy while a version loads, or decoding",
            max(weights, decode),
            f"larger of {size_text(weights)} and {size_text(decode)}",
        ),
        _published(weights),
    ]


def _tokenizer(shape: ModelShape) -> Term:
    text = f"{shape.vocab} entries x {TOKENIZER_ENTRY} bytes"
    return Term("tokenizer", shape.vocab * TOKENIZER_ENTRY, text)


def _published(weights: int) -> Term:
    text = "while it loads; also in others"
    return Term("published weights (memory-mapped)", weights, text, shared=True)


def _transformers(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """Return the terms of the transformers engine on CPU."""
    from rft.engine.rowbatch import KV_CACHE_BYTES

    item = BYTES[e.dtype]
    rows = _concurrent(plan, e)
    weights = shape.parameters * item
    capacity = min(prompt + longest_response(plan), e.max_model_len)
    cache = min(e.kv_cache_bytes or KV_CACHE_BYTES, rows * capacity * shape.cached * item)
    tokens = min(PREFILL_TOKENS, rows * prompt)
    prefill = tokens * (shape.cached + 3 * shape.mlp + 4 * shape.hidden) * item
    return [
        Term("process", TRANSFORMERS_PROCESS, "constant"),
        _tokenizer(shape),
        Term("weights", weights, count_text(shape.parameters, item)),
        Term(
            "key/value cache",
            cache,
            f"{rows} texts x {capacity} tokens x {shape.cached * item} bytes",
        ),
        Term(
            "prefill and sampling",
            prefill + _sampling(plan, e, shape),
            f"{tokens} tokens, {rows} texts",
        ),
        _published(weights),
    ]


def _gpu_engine(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """Return the terms of one GPU of an engine.

    vLLM takes gpu_memory_utilization of the device; the cache gets the rest.
    """
    item = BYTES[e.dtype]
    tp = e.tensor_parallel_size * e.pipeline_parallel_size
    tokens = e.max_num_batched_tokens or max(2048, e.max_model_len)
    work = tokens * (3 * shape.mlp // tp + 4 * shape.hidden) * item + _sampling(plan, e, shape)
    per_token = shape.cached * item // min(tp, shape.kv_heads)
    terms = [
        Term("CUDA context", CUDA_CONTEXT + (NCCL if tp > 1 else 0), "constant"),
        Term(
            "weights",
            shape.parameters * item // tp,
            f"{count_text(shape.parameters, item)} / {tp} GPUs",
        ),
        Term("forward and sampling", work, f"{tokens} tokens, {_concurrent(plan, e)} texts"),
    ]
    cache = e.max_num_seqs * e.max_model_len * per_token
    how = f"{e.max_num_seqs} texts x {e.max_model_len} tokens x {per_token} bytes, all it could use"
    if e.kv_cache_bytes is not None:
        cache = e.kv_cache_bytes
        how = "explorer.rollout_model.kv_cache_bytes"
    elif gpu_memory is not None:
        cache = max(0, int(e.gpu_memory_utilization * gpu_memory) - sum(t.nbytes for t in terms))
        how = (
            f"the rest of {e.gpu_memory_utilization:g} x {size_text(gpu_memory)}: "
            f"{cache // per_token:,} tokens"
        )
    return [*terms, Term("key/value cache", cache, how)]


def _sampling(plan: Plan, e: EngineSettings, shape: ModelShape) -> int:
    """Return bytes of logits, their float32 copy, log-probs and probabilities of one token of every
    text.
    """
    return 4 * _concurrent(plan, e) * shape.vocab * 4


def _concurrent(plan: Plan, e: EngineSettings) -> int:
    """Return how many texts one engine generates at the same time."""
    return max(
        1,
        min(
            e.max_num_seqs,
            -(-plan.explorer.max_concurrent_runs // len(plan.engines)),
            plan.runs_per_step,
        ),
    )


# ---------------------------------------------------------------- the machine


# Limit of a GPU estimate relative to the role's real allocations
# (tests/unit/config/test_memory_counted.py).
MOST_OVER = 1.15


_ON_DISK = {  # by role: key, content, remedy
    "checkpoints": (
        "trainer.checkpoint",
        "the checkpoints that are kept",
        "Lower trainer.max_checkpoints_to_keep, raise trainer.save_interval",
    ),
    "rows": (
        "algorithm.policy_loss_fn_args",
        "the teacher's likely tokens in all rows",
        "Lower k",
    ),
}


@dataclass(frozen=True)
class Excess:
    """Memory that a role lacks.  `certain`: even for an estimate too high by `MOST_OVER`."""

    key: str  # section of the config that requires it
    message: str
    certain: bool = False


def too_much(
    roles: tuple[RoleMemory, ...],
    plan: Plan,
    *,
    ram: int | None,
    gpu_memory: int | None,
    disk: int | None = None,
) -> list[Excess]:
    """Return what does not fit: CPU roles together into this machine's memory, each GPU role into
    one GPU, files on the disk.
    """
    excesses = [
        Excess(
            key,
            f"disk: {what} take about {size_text(r.nbytes)}, and {plan.run_dir} has "
            f"{size_text(disk)} free.  {remedy}, or move checkpoint_root_dir",
        )
        for r in roles
        if r.device == "disk" and disk is not None and r.nbytes > disk
        for key, what, remedy in (_ON_DISK[r.role],)
    ]
    on_cpu = [r for r in roles if r.device == "cpu"]
    needed = sum(r.own for r in on_cpu)
    one_machine = plan.cluster.ray_address is None and plan.cluster.node_num == 1
    if ram is not None and one_machine and needed > ram:
        parts = ", ".join(f"{r.role} {size_text(r.own)}" for r in on_cpu)
        excesses.append(
            Excess(
                "trainer",
                f"memory: about {size_text(needed)} are needed at the peak, and this machine has "
                f"{size_text(ram)} ({parts}).  Lower trainer.max_token_len_per_gpu or "
                "explorer.rollout_model.kv_cache_bytes, set trainer.enable_gradient_checkpointing: "
                "true, or use a smaller model",
            )
        )
    if gpu_memory is not None:
        largest = {r.role.split("-")[0]: r for r in reversed(roles) if r.device == "cuda"}
        excesses += [
            _gpu_excess(kind, role, gpu_memory, plan.learner.gradient_checkpointing)
            for kind, role in reversed(largest.items())
            if role.nbytes > gpu_memory
        ]
    return excesses


def _gpu_excess(kind: str, role: RoleMemory, gpu_memory: int, checkpointing: bool) -> Excess:
    key = "trainer" if kind == "trainer" else "explorer.rollout_model"
    if kind == "trainer":
        recompute = "" if checkpointing else "set trainer.enable_gradient_checkpointing: true, "
        remedy = f"Lower trainer.max_token_len_per_gpu, {recompute}or use more ranks"
    elif kind.startswith("shared"):
        remedy = (
            "Lower explorer.rollout_model.gpu_memory_utilization, set trainer.offload_policy: true, "
            "or give both sides GPUs of their own with mode: both"
        )
    else:
        remedy = "Raise explorer.rollout_model.tensor_parallel_size or lower max_num_batched_tokens"
    return Excess(
        key,
        f"memory: {role.role} needs about {size_text(role.nbytes)} on each of its GPUs, which have "
        f"{size_text(gpu_memory)}.  {remedy}",
        certain=role.nbytes > MOST_OVER * gpu_memory,
    )
