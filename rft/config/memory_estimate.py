"""How much memory each role of a plan will take at its peak, term by term; docs/concepts/memory.md
explains and measures them.

Knows the plan and the model's sizes; needs no GPU, no torch and no Ray.  Invariant: every number
follows from the plan, the model's sizes and the constants below, which are the same for every
model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rft.algorithm.needs import needs
from rft.config.model_folder import ModelShape
from rft.config.plan import Plan
from rft.config.plan_serve import ENDLESS
from rft.config.roles import explores
from rft.engine.settings import EngineSettings
from rft.trainer.settings import LearnerSettings

MIB = 1 << 20
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Processes with all they import, before any model, measured on CPU (docs/concepts/memory.md).
TRAINER_PROCESS = 540 * MIB
VLLM_CORE = 730 * MIB
VLLM_KERNELS = 300 * MIB  # that oneDNN keeps when an engine has seen many numbers of rows
VLLM_FRONT = 700 * MIB  # the process that hosts it, and vLLM's resource tracker
TRANSFORMERS_PROCESS = 600 * MIB
TOKENIZER_ENTRY = 1400  # bytes of one vocabulary entry in a tokenizer
PART_PROCESS = 150 * MIB  # explorer, buffer, coordinator
RAY_AND_LAUNCHER = 1300 * MIB
# On a GPU: what the driver and the libraries take before the first tensor.  Usual values, not
# measured here.
CUDA_CONTEXT = 600 * MIB
NCCL = 400 * MIB

# As rft.trainer.logprobs cuts: logits of a tile, its least width, float32 sums of a token, logits
# that are kept.
CPU_TILE = 1 << 20
GPU_TILE = 1 << 26
LEAST_WIDTH = 512
SUMS = 8
KEPT_BYTES = 160 << 20

PREFILL_TOKENS = 4096  # of one forward of the transformers engine
_NAMES = {"adamw": "AdamW", "nadam": "NAdam", "radam": "RAdam", "adagrad": "Adagrad", "sgd": "SGD"}
_COUNTS = ("none", "one", "two")
SLOTS = 2  # versions that a memory transport keeps


@dataclass(frozen=True)
class Term:
    """One part of a role's peak.  `shared` bytes stand in another role too and count once for the
    machine.
    """

    name: str
    nbytes: int
    how: str
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Peak of one role: all processes of one engine, one trainer rank, or what the rest of the run
    takes together.
    """

    role: str
    # cpu: resident bytes of its processes; cuda: bytes of each of its GPUs; disk: bytes of files
    device: str
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.terms)

    @property
    def own(self) -> int:
        return sum(t.nbytes for t in self.terms if not t.shared)


@dataclass(frozen=True, kw_only=True)
class RowsAtOnce:
    """The largest micro-batch that the settings allow: every run writes all the tokens it may.

    `positions` are computed; `rooted` of them belong to rows that begin a prompt, and `keys` are
    gathered for the other rows, which share a prompt with one of those.  `trained` have log-probs.
    `alone`: a rank's step has no other micro-batch.
    """

    alone: bool
    rows: int
    positions: int
    rooted: int
    keys: int
    trained: int


def estimate(
    plan: Plan,
    shape: ModelShape,
    *,
    critic: ModelShape | None = None,
    trained: int | None = None,
    auxiliary: Mapping[str, ModelShape] | None = None,
    prompt_tokens: int | None = None,
    gpu_memory: int | None = None,
) -> tuple[RoleMemory, ...]:
    """Peak memory of every role.  `prompt_tokens`: the longest prompt there is, where the tasks
    were looked at; else the longest allowed.

    `critic`: its sizes, where they are not the policy's.  `trained`: parameters of the adapter that
    is trained; None: the whole model. `auxiliary`: sizes of the models beside it, by name, as far
    as they are known. `gpu_memory`: bytes of each GPU; without it a GPU engine's share of the
    device stays open.
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
    ranks = tuple(
        trainer(plan, rank, shape, prompt, critic, trained)
        for rank in range(plan.learner.world_size)
        if plan.trains
    )
    beside = tuple(
        _beside(plan, e, known, gpu_memory)
        for m in plan.auxiliary
        if explores(plan.mode)
        and not plan.trainer.alone
        and (known := (auxiliary or {}).get(m.name)) is not None
        for e in m.engines
    )
    sent = shape.parameters * BYTES[plan.learner.dtype]
    rest = [
        Term(
            "explorer, buffer, coordinator",
            3 * PART_PROCESS,
            f"3 processes of {PART_PROCESS // MIB} MiB",
        ),
        Term("Ray and rft run", RAY_AND_LAUNCHER, "constant"),
    ]
    if plan.trainer.alone:
        rest[0] = Term("coordinator", PART_PROCESS, f"a process of {PART_PROCESS // MIB} MiB")
    elif plan.sync.method in ("memory", "nccl"):
        rest.append(
            Term(
                "published weights",
                SLOTS * sent,
                f"{SLOTS} versions x {_size(sent)}, in separate memory",
            )
        )
    if not plan.trainer.alone and plan.sync.method == "nccl":
        workers = sum(plan.sync.workers)
        rest.append(
            Term(
                "received weights",
                workers * sent,
                f"a copy of {_size(sent)} in each of {workers} engine workers, at least while it "
                f"loads",
            )
        )
    others = RoleMemory(role="others", device="cpu", terms=tuple(rest))
    kept = (checkpoints(plan, shape, critic or shape, trained),) if plan.trains else ()
    return (*engines, *beside, *ranks, others, *kept)


def checkpoints(
    plan: Plan, shape: ModelShape, critic: ModelShape, trained: int | None
) -> RoleMemory:
    """The checkpoints that are on disk together at the most: those that are kept, and one that is
    written before the oldest goes.
    """
    s = plan.learner
    t = plan.trainer
    moments = _moments(s)
    own = 4 * (shape.parameters if trained is None else trained)
    values = 4 * critic.parameters if needs(s.algorithm).critic else 0
    every = values + (own if "model" in s.save_contents else 0)
    every += moments * own + 2 * values if "optimizer" in s.save_contents else 0
    steps = None if plan.total_steps == ENDLESS else plan.total_steps
    # of which one is evaluated, one served
    beside = (t.best_metric is not None) + 2 * str(t.best_metric).startswith("eval/")
    keep = t.max_checkpoints_to_keep and t.max_checkpoints_to_keep + 1 + beside
    interval = t.save_interval or int(t.save_after_s > 0)  # by their age all may be
    saved = 1 if not interval else keep or 1 if steps is None else math.ceil(steps / interval)
    number = min(saved, keep or saved)
    how = "the number of steps is not known" if steps is None else f"{saved} are written"
    exported = (
        {"never": 0, "last": 1, "always": number}[t.save_hf_checkpoint]
        * shape.parameters
        * BYTES[s.dtype]
    )
    terms = (
        Term(f"{number} x weights, {_NAMES[s.optim.optimizer_type]} moments", number * every, how),
        Term("exported models", exported, f"save_hf_checkpoint: {t.save_hf_checkpoint}"),
    )
    return RoleMemory(role="checkpoints", device="disk", terms=tuple(t for t in terms if t.nbytes))


def _moments(s: LearnerSettings) -> int:
    """Numbers that the optimizer keeps for each weight."""
    return {"sgd": int(s.optim.momentum > 0), "adagrad": 1}.get(s.optim.optimizer_type, 2)


# ---------------------------------------------------------------- engines


def engine(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> RoleMemory:
    """One rollout engine."""
    kind = (
        _gpu_engine if e.device == "cuda" else _vllm if e.engine_type == "vllm" else _transformers
    )
    terms = kind(plan, e, shape, prompt, gpu_memory)
    return RoleMemory(role=e.name, device=e.device, terms=tuple(t for t in terms if t.nbytes))


def _beside(plan: Plan, e: EngineSettings, shape: ModelShape, gpu_memory: int | None) -> RoleMemory:
    """One engine of an auxiliary model: as one of the policy's, but nothing is ever published to
    it.
    """
    if e.task == "score" and e.engine_type == "transformers" and e.device == "cpu":
        return RoleMemory(role=e.name, device="cpu", terms=_classifier(e, shape))
    terms = engine(plan, e, shape, e.max_prompt_tokens or e.max_model_len, gpu_memory).terms
    kept = (
        replace(t, name="decoding", nbytes=max(0, t.nbytes - shape.parameters * BYTES[e.dtype]))
        if "second copy" in t.name
        else t
        for t in terms
        if not t.shared
    )
    return RoleMemory(role=e.name, device=e.device, terms=tuple(t for t in kept if t.nbytes))


def _classifier(e: EngineSettings, shape: ModelShape) -> tuple[Term, ...]:
    from rft.engine.classifier import BATCH_TOKENS

    item = BYTES[e.dtype]
    tokens = max(BATCH_TOKENS, e.max_model_len)
    weights = max(0, shape.parameters - (0 if shape.tied else shape.embedding)) * item
    return (
        Term("process", TRANSFORMERS_PROCESS, "constant"),
        Term(
            "tokenizer",
            shape.vocab * TOKENIZER_ENTRY,
            f"{shape.vocab} entries x {TOKENIZER_ENTRY} bytes",
        ),
        Term("weights", weights, f"{_size(weights)}, without an output layer"),
        Term("forward", tokens * (3 * shape.mlp + 4 * shape.hidden) * item, f"{tokens} tokens"),
    )


def _vllm(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """vLLM on CPU.  Layers multiply with packed weights whose originals go, except that of the
    output layer.

    A new version is packed beside the one in use, from a mapping of the published weights; the
    allocator keeps what that took, and decoding uses it again.
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
            f"{_size(VLLM_FRONT)} + {tp} x {_size(VLLM_CORE)}",
        ),
        Term("kernels", tp * VLLM_KERNELS, f"{tp} x {_size(VLLM_KERNELS)}, in time"),
        Term(
            "tokenizer",
            shape.vocab * TOKENIZER_ENTRY,
            f"{shape.vocab} entries x {TOKENIZER_ENTRY} bytes",
        ),
        Term("weights", weights, _count(shape.parameters, item)),
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
            f"larger of {_size(weights)} and {_size(decode)}",
        ),
        Term(
            "the published version, mapped", weights, "while it loads; also in others", shared=True
        ),
    ]


def _transformers(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """Our own engine on CPU: parameters, and in float32 a packed copy of every linear layer."""
    from rft.engine.rowbatch import KV_CACHE_BYTES

    item = BYTES[e.dtype]
    rows = _concurrent(plan, e)
    weights = shape.parameters * item
    capacity = min(prompt + _response(plan), e.max_model_len)
    packed = (shape.parameters - (0 if shape.tied else shape.embedding)) * item if item == 4 else 0
    cache = min(e.kv_cache_bytes or KV_CACHE_BYTES, rows * capacity * shape.cached * item)
    tokens = min(PREFILL_TOKENS, rows * prompt)
    prefill = tokens * (shape.cached + 3 * shape.mlp + 4 * shape.hidden) * item
    return [
        Term("process", TRANSFORMERS_PROCESS, "constant"),
        Term(
            "tokenizer",
            shape.vocab * TOKENIZER_ENTRY,
            f"{shape.vocab} entries x {TOKENIZER_ENTRY} bytes",
        ),
        Term("weights", weights, _count(shape.parameters, item)),
        Term("packed linear layers", packed, "a copy of every linear layer and the output layer"),
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
        Term(
            "the published version, mapped", weights, "while it loads; also in others", shared=True
        ),
    ]


def _gpu_engine(
    plan: Plan, e: EngineSettings, shape: ModelShape, prompt: int, gpu_memory: int | None
) -> list[Term]:
    """One GPU of an engine.  vLLM takes gpu_memory_utilization of the device: what is left beside
    the rest becomes the cache.
    """
    item = BYTES[e.dtype]
    tp = e.tensor_parallel_size * e.pipeline_parallel_size
    tokens = e.max_num_batched_tokens or max(2048, e.max_model_len)
    work = tokens * (3 * shape.mlp // tp + 4 * shape.hidden) * item + _sampling(plan, e, shape)
    per_token = shape.cached * item // min(tp, shape.kv_heads)
    wanted = e.max_num_seqs * e.max_model_len * per_token
    terms = [
        Term("CUDA context", CUDA_CONTEXT + (NCCL if tp > 1 else 0), "constant"),
        Term(
            "weights",
            shape.parameters * item // tp,
            f"{_count(shape.parameters, item)} / {tp} GPUs",
        ),
        Term("forward and sampling", work, f"{tokens} tokens, {_concurrent(plan, e)} texts"),
    ]
    cache = wanted
    how = f"{e.max_num_seqs} texts x {e.max_model_len} tokens x {per_token} bytes, all it could use"
    if e.kv_cache_bytes is not None:
        cache = e.kv_cache_bytes
        how = "explorer.rollout_model.kv_cache_bytes"
    elif gpu_memory is not None:
        cache = max(0, int(e.gpu_memory_utilization * gpu_memory) - sum(t.nbytes for t in terms))
        how = (
            f"the rest of {e.gpu_memory_utilization:g} x {_size(gpu_memory)}: "
            f"{cache // per_token:,} tokens"
        )
    return [*terms, Term("key/value cache", cache, how)]


def _sampling(plan: Plan, e: EngineSettings, shape: ModelShape) -> int:
    """Logits, their float32 copy, log-probs and probabilities of one token of every text."""
    return 4 * _concurrent(plan, e) * shape.vocab * 4


def _concurrent(plan: Plan, e: EngineSettings) -> int:
    """Texts that one engine writes at the same time."""
    return max(
        1,
        min(
            e.max_num_seqs,
            -(-plan.explorer.max_concurrent_runs // len(plan.engines)),
            plan.runs_per_step,
        ),
    )


def _response(plan: Plan) -> int:
    return max(
        (t.sampling.max_tokens for t in plan.explorer.tasksets),
        default=plan.learner.max_response_tokens,
    )


# ---------------------------------------------------------------- trainer


def trainer(
    plan: Plan,
    rank: int,
    shape: ModelShape,
    prompt: int,
    critic: ModelShape | None = None,
    trained: int | None = None,
) -> RoleMemory:
    """One rank: float32 weights, gradients and AdamW moments in W shards, and what one micro-batch
    needs.

    Policy and critic are trained one after the other; what stays of the critic meanwhile are its
    weights and moments. With an adapter of `trained` parameters the weights have neither gradients
    nor moments, and are the reference model too.
    """
    s = plan.learner
    critic = critic or shape
    world = s.world_size
    item = BYTES[s.dtype]
    sharded = s.sharded
    shards = _shards(s)
    share = 0 if s.offload_policy else shape.fullest(shape.parameters * 4, shards)
    # what is trained
    own = share if trained is None else 0 if s.offload_policy else trained * 4 // shards
    moments = _moments(s)
    needed = needs(s.algorithm)
    micro = micro_batch(plan, prompt)
    forward, backward = logits(shape, s, micro, entropy=needed.entropy, reference=needed.reference)
    saved = activations(shape, s, micro)
    head = shape.embedding * (item if sharded else 4) if trained is None else 0
    # What the backward pass adds to weights and moments falls from the activations' share and rises
    # to the gradients': the peak is at one of its ends.  A tied embedding has two gradients of its
    # size before they are added.  From the second micro-batch on the gradients are there all the
    # time.
    begins = saved + max(forward, backward + head) + (0 if micro.alone else own)
    ends = own + (head if shape.tied or sharded else 0)
    valued = _critic_step(plan, critic, prompt) if needed.critic else 0
    # without the output layer
    values = (critic.parameters - (0 if critic.tied else critic.embedding)) * 4 // shards
    values = 0 if s.critic.offload_policy else values
    terms = [
        Term("CUDA context", CUDA_CONTEXT + (NCCL if world > 1 else 0), "constant")
        if s.device == "cuda"
        else Term("process", TRAINER_PROCESS, "constant"),
        Term(
            "weights",
            share,
            f"{_count(shape.parameters, 4)} / {min(shards, shape.experts or shards)} rank(s)",
        ),
        Term(
            "adapter",
            own if trained is not None else 0,
            f"{_count(trained or 0, 4)} / {shards} rank(s)",
        ),
        Term(
            f"{_NAMES[s.optim.optimizer_type]} moments",
            moments * own,
            f"{_COUNTS[moments]} for every weight that is trained",
        ),
        Term(
            "reference model",
            _reference(s, share, own) if needed.reference else 0,
            "frozen float32 weights",
        ),
        Term(
            "critic",
            3 * values if needed.critic else 0,
            "weights and AdamW moments of a second model",
        ),
        Term(
            "weights of the window's start",
            own if s.algorithm.proximal_window and s.device == "cpu" else 0,
            "a copy",
        ),
        Term(
            "a checkpoint while it is written",
            _written(plan, share, own, moments, values if needed.critic else 0),
            "a copy on the host",
        ),
        Term(
            "gathered layers",
            _gathered(shape, s, item) if sharded else 0,
            "FSDP2: embeddings and two layers whole",
        ),
        Term(
            "micro-batch, or gradients",
            max(begins, ends, valued),
            (f"the critic's {_size(valued)}, more than the " if valued > max(begins, ends) else "")
            + f"larger of {_size(begins)} ({micro.rows} rows, {micro.positions} positions: layers "
            f"{_size(saved)}, logits "
            f"{_size(max(forward, backward))}{'' if micro.alone else f', gradients {_size(own)}'}) "
            f"and {_size(ends)}",
        ),
    ]
    return RoleMemory(
        role=f"trainer-{rank}", device=s.device, terms=tuple(t for t in terms if t.nbytes)
    )


def _reference(s: LearnerSettings, share: int, own: int) -> int:
    """Another model; with an adapter the same one, and where that came from a folder a copy of it."""
    if s.lora is not None:
        return own if s.lora.path is not None else 0
    return 0 if s.ref_offload else share


def _written(plan: Plan, share: int, own: int, moments: int, values: int) -> int:
    """What is copied so that steps may go on meanwhile; in a GPU's role nothing, for it lies on the
    host.  `values`: a critic's weights.
    """
    s = plan.learner
    t = plan.trainer
    later = (
        t.async_save
        and (t.save_after_s > 0 or 0 < t.save_interval < t.total_steps)
        and t.save_hf_checkpoint != "always"
    )
    if not later or s.device != "cpu":
        return 0
    weights = (share if s.lora is None else own) + values if "model" in s.save_contents else 0
    return weights + (moments * own + 2 * values if "optimizer" in s.save_contents else 0)


def _shards(s: LearnerSettings) -> int:
    return s.world_size if s.fsdp_size == -1 else s.fsdp_size


def _critic_step(plan: Plan, shape: ModelShape, prompt: int) -> int:
    """What a micro-batch of the critic adds to its weights and moments; its output is one number
    for each token.
    """
    c = plan.learner.critic
    s = replace(
        plan.learner,
        max_token_len_per_gpu=c.max_token_len_per_gpu,
        use_dynamic_bsz=c.use_dynamic_bsz,
        micro_batch_size=c.micro_batch_size,
        gradient_checkpointing=c.gradient_checkpointing,
    )
    micro = micro_batch(replace(plan, learner=s), prompt)
    gradients = 0 if c.offload_policy else shape.parameters * 4 // _shards(s)
    return max(activations(shape, s, micro) + (0 if micro.alone else gradients), gradients)


def micro_batch(plan: Plan, prompt: int) -> RowsAtOnce:
    """The largest micro-batch of one rank, cut as `rft.trainer.pack` cuts, if every prompt is
    `prompt` tokens long.
    """
    s = plan.learner
    response = _response(plan)
    runs = max(1, plan.num_runs)
    length = min(prompt + response, plan.engines[0].max_model_len)
    prompt = length - response if length > response else 1
    groups = plan.trainer.batch_groups or -(-(plan.trainer.batch_rows or runs) // runs)
    mine = -(-groups * runs // s.world_size)
    if not s.use_dynamic_bsz:
        rows = min(s.micro_batch_size or 1, mine)
        together = runs
    elif s.row_layout in ("auto", "shared"):
        together = -(-runs // -(-s.world_size // groups))  # fewer groups than ranks: each is cut
        while together > 1 and prompt + together * response > s.max_token_len_per_gpu:
            together = -(-together // 2)
        rows = together * max(
            1, min(s.max_token_len_per_gpu // (prompt + together * response), -(-mine // together))
        )
    else:
        rows = max(1, min(s.max_token_len_per_gpu // length, mine))
        together = 1
    if s.row_layout == "packed":
        together = 1
    if s.row_layout == "padded":
        size = rows * length
        return RowsAtOnce(
            alone=rows >= mine,
            rows=rows,
            positions=size,
            rooted=size,
            keys=0,
            trained=rows * response,
        )
    roots = -(-rows // together)
    return RowsAtOnce(
        alone=rows >= mine,
        rows=rows,
        positions=roots * prompt + rows * response,
        rooted=roots * length,
        keys=(rows - roots) * length,
        trained=rows * response,
    )


def activations(shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce) -> int:
    """Bytes that the layers keep for the backward pass: counted from a Llama layer of transformers,
    everything each operation saves.

    Two norms keep their float32 input and their product; linear layers their inputs; the MLP gate,
    its activation, up and their product (of a layer that `rft.trainer.recompute` knows two norms
    their input, the MLP gate and up); attention queries, keys, values and its result, keys and
    values once more for every query head at the root of a prompt. With gradient checkpointing:
    every layer's input, and one layer whole while it is computed again.
    """
    item = BYTES[s.dtype]
    lean = shape.lean and not (s.compile or s.use_liger)
    wide = 4 if shape.gated and not lean else 2
    norms = 4 * shape.hidden * item + (0 if lean else 2 * shape.hidden * 4)
    if s.row_layout != "padded":
        own = micro.positions - micro.rooted
        attention = (
            shape.queries * (micro.positions + 3 * micro.rooted + 2 * own)
            + 2 * shape.keys * micro.keys
        )
        attention += shape.hidden * micro.positions  # results come back in the order of the tokens
    else:
        attention = 2 * (shape.queries + shape.keys) * micro.positions
    layer = micro.positions * (norms + wide * shape.mlp * item) + attention * item
    if s.gradient_checkpointing:
        return shape.layers * micro.positions * shape.hidden * item + layer
    return shape.layers * layer


def logits(
    shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce, *, entropy: bool, reference: bool
) -> tuple[int, int]:
    """(most in the forward pass, most in the backward pass) of log-probs by tiles
    (rft.trainer.logprobs), weight gradients apart.
    """
    item = BYTES[s.dtype]
    tokens = max(1, min(s.logprob_chunk_tokens, micro.trained))
    size = CPU_TILE if s.device == "cpu" else GPU_TILE
    everything = micro.trained * shape.vocab
    tile = (
        tokens * min(shape.vocab, max(LEAST_WIDTH, size // tokens))
        if s.entropy_chunking or not entropy
        else everything
    )
    # logits, and in the type they are computed in; with entropies their exponentials too
    tiles = tile * (4 * (2 if entropy else 1) + (item if item < 4 else 0))
    sums = (SUMS + (1 if reference else 0)) * 4 * micro.trained
    hidden = micro.trained * shape.hidden * item
    sums += (
        min(KEPT_BYTES, 4 * everything)
        if s.entropy_checkpointing or not entropy
        else 4 * everything
    )
    return tiles + sums + 2 * hidden, tiles + sums + 2 * hidden + micro.trained * shape.hidden * 4


def _gathered(shape: ModelShape, s: LearnerSettings, item: int) -> int:
    """FSDP2's whole copies: what belongs to no layer, two layers (or all), and the float32
    gradients being reduced.
    """
    root = shape.parameters - shape.layers * shape.block
    blocks = min(2, shape.layers) if s.reshard_after_forward else shape.layers
    # ranks without experts count as if they had some
    block = shape.fullest(shape.block, _shards(s)) * _shards(s)
    return (root + blocks * block) * item + block * (item + 4)


# ---------------------------------------------------------------- the machine


def too_much(
    roles: tuple[RoleMemory, ...],
    plan: Plan,
    *,
    ram: int | None,
    gpu_memory: int | None,
    disk: int | None = None,
) -> list[str]:
    """What does not fit, in words: CPU roles together into this machine's memory, each GPU role
    into one GPU, files on the disk.
    """
    found = [
        f"disk: the checkpoints that are kept take about {_size(r.nbytes)}, and {plan.run_dir} has "
        f"{_size(disk)} free.  Lower "
        "trainer.max_checkpoints_to_keep, raise trainer.save_interval, or move checkpoint_root_dir"
        for r in roles
        if r.device == "disk" and disk is not None and r.nbytes > disk
    ]
    on_cpu = [r for r in roles if r.device == "cpu"]
    wanted = sum(r.own for r in on_cpu)
    if (
        ram is not None
        and plan.cluster.ray_address is None
        and plan.cluster.node_num == 1
        and wanted > ram
    ):
        parts = ", ".join(f"{r.role} {_size(r.own)}" for r in on_cpu)
        found.append(
            f"memory: about {_size(wanted)} are needed at the peak, and this machine has "
            f"{_size(ram)} ({parts}).  Lower "
            "trainer.max_token_len_per_gpu or explorer.rollout_model.kv_cache_bytes, set "
            "trainer.enable_gradient_checkpointing: true, "
            "or use a smaller model"
        )
    seen = set()
    for role in roles:
        kind = role.role.split("-")[0]
        if (
            role.device == "cuda"
            and gpu_memory is not None
            and role.nbytes > gpu_memory
            and kind not in seen
        ):
            seen.add(kind)
            found.append(
                f"memory: {role.role} needs about {_size(role.nbytes)} on each of its GPUs, which "
                f"have {_size(gpu_memory)}.  "
                + (
                    "Lower trainer.max_token_len_per_gpu, set "
                    "trainer.enable_gradient_checkpointing: true, or use more ranks"
                    if kind == "trainer"
                    else "Lower explorer.rollout_model.gpu_memory_utilization, set "
                    "trainer.param_offload: true, "
                    "or give both sides GPUs of their own with mode: both"
                    if kind.startswith("shared")
                    else "Raise explorer.rollout_model.tensor_parallel_size or lower "
                    "max_num_batched_tokens"
                )
            )
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def _count(parameters: int, item: int) -> str:
    return f"{parameters:,} x {item} bytes"
