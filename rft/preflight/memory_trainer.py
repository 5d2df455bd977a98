"""Estimate the peak memory of a trainer rank; docs/concepts/memory.md explains every term.

Besides weights and optimizer state a rank needs most at one of a few moments of a micro-batch: in
the backward pass of the log-probs, in that of the last layer or of the first, which gradients of
all others precede, or when the gradients of embedding and output layer are reduced over ranks.
Depends on the allocations of `rft.trainer`, by formula.
Invariant: on GPUs an estimate is at least what torch's operators allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rft.algorithm.needs import needs
from rft.config.plan import Plan
from rft.preflight.memory_images import ImageBytes, image_bytes
from rft.preflight.memory_terms import (
    BYTES,
    CUDA_CONTEXT,
    NCCL,
    TRAINER_PROCESS,
    Moment,
    RoleMemory,
    Term,
    count_text,
)
from rft.preflight.model_folder import ModelShape
from rft.trainer.rows.prefix import MAX_MASK
from rft.trainer.settings import LearnerSettings

# Constants of rft.trainer.model.logprobs: logits of a tile, its least width, float32 sums of a
# token, stored logits.
CPU_TILE = 1 << 20
GPU_TILE = 1 << 26
LEAST_WIDTH = 512
SUMS = 8
KEPT_BYTES = 160 << 20
TOP_BYTES = 48  # of a token and a likely token of the teacher
CANARY_PROMPT = 8  # tokens of one of the canary's prompts, see rft.launch.start
FRAGMENTS = 0.04  # share of a step's GPU allocations lost between blocks
OPTIMIZERS = {
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adagrad": "Adagrad",
    "sgd": "SGD",
}
_COUNTS = ("none", "one", "two")


@dataclass(frozen=True, kw_only=True)
class RowsAtOnce:
    """The largest micro-batch that the settings allow, if every run is as long as allowed.

    `positions` are computed; `rooted` of them belong to rows that begin a prompt, and `keys` are
    gathered for the other rows, which share a prompt with one of those and see it through `masked`
    entries of masks.  `pairs`: pairs of a position and a position that it may attend to.  `trained`
    have log-probs.  `alone`: a rank's step has no other micro-batch.
    """

    alone: bool
    rows: int
    positions: int
    rooted: int
    keys: int
    masked: int
    pairs: int
    trained: int
    roots: int = 1  # rows that begin a prompt
    patches: int = 0  # of images


def trainer(
    plan: Plan,
    rank: int,
    shape: ModelShape,
    prompt: int,
    critic: ModelShape | None = None,
    trained: int | None = None,
    image_tokens: int = 0,
) -> RoleMemory:
    """Estimate one rank: float32 weights, gradients and AdamW moments in W shards, and the needs of
    one micro-batch.

    Policy and critic are trained in turn; the critic's weights and moments stay in memory. With an
    adapter of `trained` parameters the base weights have neither gradients nor moments, and also
    serve as the reference model.  `image_tokens`: those of a prompt's images.
    """
    s = plan.learner
    critic = critic or shape
    shards = _shards(s)
    share = 0 if s.offload_policy else shape.fullest(shape.parameters * 4, shards)
    if trained is None:
        trained_share = share
        if shape.tower is not None and not s.train_vision and not s.offload_policy:
            trained_share -= shape.tower.parameters * 4 // shards
    else:
        trained_share = 0 if s.offload_policy else trained * 4 // shards
    needed = needs(s.algorithm)
    micro = _micro_with_images(plan, prompt, shape, image_tokens)
    moments = _moments(shape, s, micro, trained_share, needed.entropy, needed.reference)
    peak = max(moments, key=lambda m: m.nbytes)
    if needed.critic:
        peak = max(peak, _critic_step(plan, critic, prompt), key=lambda m: m.nbytes)
    step = f"{peak.name}: {micro.rows} rows, {micro.positions} positions"
    terms = [
        Term("CUDA context", CUDA_CONTEXT + (NCCL if s.world_size > 1 else 0), "constant")
        if s.device == "cuda"
        else Term("process", TRAINER_PROCESS, "constant"),
        Term(
            "weights",
            share,
            f"{count_text(shape.parameters, 4)} / {min(shards, shape.experts or shards)} rank(s)",
        ),
        Term(
            "adapter",
            trained_share if trained is not None else 0,
            f"{count_text(trained or 0, 4)} / {shards} rank(s)",
        ),
        *_optimizer_and_frozen(plan, critic, share, trained_share),
        Term(
            "gathered layers",
            peak.gathered,
            "FSDP2: whole parameters, and gradients that are not yet in shards",
        ),
        Term("activations", peak.activations, f"{step}, kept for the backward pass"),
        Term("images", peak.images, f"{micro.patches} patches"),
        Term("work", peak.work, peak.name),
        Term("gradients", peak.gradients, "of what is trained"),
        Term(
            "fragments",
            int(FRAGMENTS * peak.nbytes) if s.device == "cuda" else 0,
            f"{FRAGMENTS:.0%} of what a step allocates",
        ),
    ]
    return RoleMemory(
        role=f"trainer-{rank}", device=s.device, terms=tuple(t for t in terms if t.nbytes)
    )


def _micro_with_images(plan: Plan, prompt: int, shape: ModelShape, tokens: int) -> RowsAtOnce:
    """Return the `micro_batch`, with `tokens` of each prompt's images, each computed once."""
    if (tower := shape.tower) is None or not tokens:
        return micro_batch(plan, prompt)
    layout = "padded" if shape.float_norms else plan.learner.row_layout  # Gemma's see each other
    micro = micro_batch(replace(plan, learner=replace(plan.learner, row_layout=layout)), prompt)
    groups = plan.trainer.batch_groups or micro.rows
    shown = min(micro.rows, groups) if layout == "padded" else micro.roots
    return replace(micro, patches=shown * tokens * tower.patches)


def _optimizer_and_frozen(
    plan: Plan, critic: ModelShape, share: int, trained_share: int
) -> tuple[Term, ...]:
    """Return the terms of moments, the reference model, the critic at rest and copies of weights.

    `share`, `trained_share`: bytes of this rank's weights, and of its trained weights.
    """
    s = plan.learner
    needed = needs(s.algorithm)
    averages = moments_of(s)
    without_head = critic.parameters - (0 if critic.tied else critic.embedding)
    values = 0 if s.critic.offload_policy else without_head * 4 // _shards(s)
    return (
        Term(
            f"{OPTIMIZERS[s.optim.optimizer_type]} moments",
            averages * trained_share,
            f"{_COUNTS[averages]} for every weight that is trained",
        ),
        Term(
            "reference model",
            _reference(s, share, trained_share) if needed.reference else 0,
            "frozen float32 weights",
        ),
        Term(
            "critic",
            3 * values if needed.critic else 0,
            "weights and AdamW moments of a second model",
        ),
        Term(
            "weights of the window's start",
            trained_share if s.algorithm.proximal_window and s.device == "cpu" else 0,
            "a copy",
        ),
        Term(
            "moving average",
            trained_share if s.average_decay is not None else 0,
            "float32, for every weight that is trained",
        ),
        Term(
            "a checkpoint while it is written",
            _written(plan, share, trained_share, averages, values if needed.critic else 0),
            "a copy on the host",
        ),
    )


def _reference(s: LearnerSettings, share: int, trained_share: int) -> int:
    """Return bytes of the reference model.

    With an adapter the policy itself is the reference; an adapter loaded from a folder is copied.
    """
    if s.lora is not None:
        return trained_share if s.lora.path is not None else 0
    return 0 if s.ref_offload else share


def _written(plan: Plan, share: int, trained_share: int, moments: int, values: int) -> int:
    """Return bytes copied for a checkpoint that is written during steps; 0 on a GPU, because the
    copy is on the host.

    `values`: bytes of the critic's weights.
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
    weights = (
        (share if s.lora is None else trained_share) + values if "model" in s.save_contents else 0
    )
    weights += trained_share if s.average_decay is not None else 0
    return weights + (moments * trained_share + 2 * values if "optimizer" in s.save_contents else 0)


def moments_of(s: LearnerSettings) -> int:
    """Return how many numbers the optimizer stores per weight."""
    return {"sgd": int(s.optim.momentum > 0), "adagrad": 1}.get(s.optim.optimizer_type, 2)


def _shards(s: LearnerSettings) -> int:
    return s.world_size if s.fsdp_size == -1 else s.fsdp_size


def longest_response(plan: Plan) -> int:
    return max(
        (t.sampling.max_tokens for t in plan.explorer.tasksets),
        default=plan.learner.max_response_tokens,
    )


def _critic_step(plan: Plan, shape: ModelShape, prompt: int) -> Moment:
    """Return the critic's peak; its output is one number per token."""
    c = plan.learner.critic
    s = replace(
        plan.learner,
        max_token_len_per_gpu=c.max_token_len_per_gpu,
        use_dynamic_bsz=c.use_dynamic_bsz,
        micro_batch_size=c.micro_batch_size,
        gradient_checkpointing=c.gradient_checkpointing,
        offload_policy=c.offload_policy,
        lora=None,
    )
    micro = micro_batch(replace(plan, learner=s), prompt)
    gradients = 0 if c.offload_policy else shape.fullest(shape.parameters * 4, _shards(s))
    alone = replace(
        shape, parameters=shape.parameters - (0 if shape.tied else shape.embedding), tied=True
    )
    peak = max(list(_moments(alone, s, micro, gradients, False, False))[1:], key=lambda m: m.nbytes)
    return replace(peak, name=f"the critic's {peak.name}")


def canary(plan: Plan, shape: ModelShape) -> int:
    """Return the most bytes that a rank allocates to score the canary's tokens."""
    s = plan.learner
    runtime = plan.sync_runtime
    length = min(CANARY_PROMPT + runtime.canary_tokens, plan.engines[0].max_model_len)
    rows = max(1, min(runtime.canary_prompts, s.max_token_len_per_gpu // length))
    positions = rows * length
    micro = RowsAtOnce(
        alone=True,
        rows=rows,
        positions=positions,
        rooted=positions,
        keys=0,
        masked=0,
        pairs=positions * length,
        trained=rows * runtime.canary_tokens,
    )
    forward, _ = logits(shape, s, micro, entropy=False, reference=False)
    return _gathered(shape, s, freed=0)[0] + max(kept_by_layer(shape, s, micro), forward)


def micro_batch(plan: Plan, prompt: int) -> RowsAtOnce:
    """Return the largest micro-batch of one rank, cut like `rft.trainer.rows.pack`, if every prompt
    is `prompt` tokens long.
    """
    s = plan.learner
    response = longest_response(plan)
    runs = max(1, plan.num_runs)
    length = min(prompt + response, plan.engines[0].max_model_len)
    prompt = length - response if length > response else 1
    groups = plan.trainer.batch_groups or -(-(plan.trainer.batch_rows or runs) // runs)
    # ranks of a share compute equal parts of its micro-batches
    shares = s.world_size // s.sequence_parallel
    budget = s.max_token_len_per_gpu * s.sequence_parallel
    rank_rows = -(-groups * runs // shares)
    together = 1
    if s.row_layout in ("auto", "shared") and (response - 1) * (length - 1) <= MAX_MASK:
        together = -(-runs // -(-shares // groups))  # fewer groups than ranks: each is cut
    if not s.use_dynamic_bsz:
        rows = min(s.micro_batch_size or 1, rank_rows)
        together = min(together, runs)
    else:
        while together > 1 and prompt + together * response > budget:
            together = -(-together // 2)
        rows = together * max(
            1, min(budget // (prompt + together * response), -(-rank_rows // together))
        )
    if s.row_layout == "padded":
        positions = rooted = rows * length
        roots = rows
    else:
        roots = -(-rows // together)
        positions = roots * prompt + rows * response
        rooted = roots * length
    return RowsAtOnce(
        alone=rows >= rank_rows,
        rows=rows,
        positions=positions // s.sequence_parallel,
        rooted=rooted // s.sequence_parallel,
        keys=(rows - roots) * length // s.sequence_parallel,
        masked=(rows - roots) * response * length,
        pairs=(roots * length + (rows - roots) * response) * length,
        trained=rows * response // s.sequence_parallel,
        roots=roots,
    )


def _moments(
    shape: ModelShape,
    s: LearnerSettings,
    micro: RowsAtOnce,
    gradients: int,
    entropy: bool,
    reference: bool,
) -> Iterator[Moment]:
    """Yield the moments at which memory may peak, in order.

    `gradients`: bytes of this rank's shards.
    """
    item = BYTES[s.dtype]
    trains = s.lora is None
    images = image_bytes(shape, s, micro.positions, micro.patches)
    layer = kept_by_layer(shape, s, micro)
    stream = micro.positions * shape.hidden * item  # hidden states between two layers
    activations = stream + shape.layers * (stream if s.gradient_checkpointing else layer)
    if s.gradient_checkpointing and s.activation_offload:
        activations = 2 * stream
    masks = _masks(shape, s, micro)
    scores = (
        shape.heads * micro.pairs * (item + 4) // s.sequence_parallel if shape.unfused_layers else 0
    )
    again = layer - stream + scores if s.gradient_checkpointing else 0  # its input is there
    activations += 0 if s.gradient_checkpointing else shape.unfused_layers * scores
    work = work_of_layer(shape, s, micro) + scores
    forward, backward = logits(shape, s, micro, entropy=entropy, reference=reference)
    head = shape.embedding * (item if s.sharded else 4) if trains else 0
    begun = 0 if micro.alone else gradients
    at_logprobs, at_layer, at_end = _gathered(
        shape, s, freed=stream if s.gradient_checkpointing else layer
    )
    yield Moment(
        name="log-probs",
        gathered=at_logprobs,
        activations=activations + masks,
        images=images.text,
        work=max(forward, backward + head),
        gradients=begun,
    )
    last = Moment(
        name="backward pass of a layer",
        gathered=at_layer,
        activations=activations + masks + again,
        images=images.text,
        work=work + head,
        gradients=begun,
    )
    yield last
    first = min(last.activations, stream + masks + layer + scores)
    yield from _later_moments(shape, s, micro, last, first, images, gradients, head)
    yield Moment(
        name="end of the backward pass",
        gathered=at_end,
        work=head if shape.tied and not s.sharded else 0,
        gradients=gradients,
    )


def _later_moments(
    shape: ModelShape,
    s: LearnerSettings,
    micro: RowsAtOnce,
    last: Moment,
    first: int,
    images: ImageBytes,
    gradients: int,
    head: int,
) -> Iterator[Moment]:
    """Yield the moments after that of the `last` layer, where other layers' gradients have come.

    `first`: bytes that the first layer stores.  `head`: the gradient of the output layer, in work.
    """
    tower = shape.tower
    of_tower = tower.parameters if tower is not None and images.last else 0
    # of the layer at work the gradient of its MLP's last matrix has come
    rest = shape.block - shape.hidden * shape.mlp + (0 if shape.tied else shape.embedding)
    among = head if micro.alone and not s.sharded else 0  # it is one of the gradients
    # the MLP's product has been freed when the gradients of its factors come
    product = 0 if _lean(shape, s) else micro.positions * shape.mlp * BYTES[s.dtype]
    work = last.work - among - product
    moments = [("first layer", first, images.text, work, of_tower + rest)]
    if tower is not None and of_tower:
        part = of_tower // tower.layers
        moments += [
            ("tower", 0, images.last, head - among, of_tower),
            ("tower's first layer", 0, images.first, head - among, part),
        ]
    for name, activations, nbytes, work, missing in moments:
        coming = 4 * missing // _shards(s) if micro.alone and s.lora is None else 0
        yield replace(
            last,
            name=f"backward pass of the {name}",
            activations=activations,
            images=nbytes,
            work=work,
            gradients=max(0, gradients - coming),
        )


def _gathered(shape: ModelShape, s: LearnerSettings, freed: int) -> tuple[int, int, int]:
    """Return bytes of unsharded weights and gradients at each of a rank's `_moments`.

    `freed`: bytes that the backward pass of one layer frees.
    """
    if not s.sharded:
        return 0, 0, 0
    item, shards = BYTES[s.dtype], _shards(s)
    # ranks without experts count as if they had some
    block = shape.fullest(shape.block, shards) * shards
    root = shape.parameters - shape.layers * shape.block
    layers = 0 if s.reshard_after_forward else shape.layers * block * item
    at_logprobs = root * item + (layers or block * item)
    at_layer = root * item + (layers or 2 * block * item)
    if s.lora is not None:
        return at_logprobs, at_layer, 0
    # a layer's gradients, and those of the next layer, which are being reduced
    at_layer += block * item + max(0, 4 * block - freed)
    # unsharded gradients, also in float32, and the new shards; a single rank has one more copy
    # instead
    if shape.tower is not None and not s.train_vision:
        root -= shape.tower.parameters
    at_end = root * ((item if shards > 1 else 4) + 4) + root * 4 // shards
    return at_logprobs, at_layer, at_end


def kept_by_layer(shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce) -> int:
    """Return bytes that one layer stores for the backward pass.

    Norms store their input and output, a linear layer its input; the MLP gate, its activation, up
    and their product; attention queries, keys, values and its result, at the root of a prompt also
    keys and values for every query head.  Modules supported by `rft.trainer.model.recompute` store
    less: norms no float32 copy, and MLPs only gate and up.
    """
    item = BYTES[s.dtype]
    lean_norms = shape.lean_norms and not (s.compile or s.use_liger)
    if shape.float_norms:  # input and product in float32; also the output before a linear layer
        norms = (8 * shape.norms + 2 * item) * shape.hidden
        head_norm = 8
    else:
        product = 0 if lean_norms else 4
        norms = shape.norms * shape.hidden * (2 * item + product)
        head_norm = item + product
    if shape.head_norms:
        norms += (shape.queries + shape.keys) * head_norm
    if s.row_layout == "padded":
        attention = 2 * (shape.queries + shape.keys) * micro.positions
    elif _ragged(s):  # queries, the result before and after it is put back, and paths
        paths = micro.rooted + micro.keys
        attention = 3 * shape.queries * micro.positions + 2 * shape.keys * paths
    else:
        sharing = micro.positions - micro.rooted
        attention = (
            shape.queries * (2 * micro.positions + 3 * micro.rooted + 2 * sharing)
            + 2 * shape.keys * micro.keys
        )
    wide = 4 if shape.gated and not _lean(shape, s) else 2
    # experts also store their input and output
    mlp = wide * shape.mlp + 2 * shape.experts_per_token * shape.hidden
    return micro.positions * (norms + mlp * item) + attention * item


def work_of_layer(shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce) -> int:
    """Return the most bytes that the backward pass of one layer allocates.

    Two gradients of hidden states, and the larger of those of the MLP and of the attention.
    """
    item = BYTES[s.dtype]
    mlp = micro.positions * (3 if shape.gated else 2) * shape.mlp * item
    if _ragged(s):  # the kernel has gradients of keys and values for every query head
        paths = 2 * (micro.rooted + micro.keys)
        grouped = shape.heads != shape.kv_heads
        attention = (
            3 * shape.queries * micro.positions + (shape.keys + shape.queries * grouped) * paths
        ) * item
    else:
        attention = (
            2 * shape.queries * (micro.positions + micro.rooted) * item
            + 2 * shape.keys * micro.keys * item
        )
    if s.device == "cuda" and item < 4:
        # flash attention accumulates the gradients of queries in float32
        attention += 4 * shape.queries * (micro.positions if _ragged(s) else micro.rooted)
    return 2 * micro.positions * shape.hidden * item + max(mlp, attention)


def _ragged(s: LearnerSettings) -> bool:
    """Return whether attention takes shared and packed rows one behind the other."""
    if s.attn_implementation == "auto":
        return s.device == "cuda" and s.dtype != "float32" and s.row_layout != "padded"
    return s.attn_implementation in ("flash_attention_2", "varlen") and s.row_layout != "padded"


def _lean(shape: ModelShape, s: LearnerSettings) -> bool:
    return shape.lean and not (s.compile or s.use_liger or s.lora is not None)


def _masks(shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce) -> int:
    """Return bytes of the additive masks of rows that share a prompt, once per query head of a key
    head; 0 for flash attention.
    """
    if _ragged(s):
        return 0
    return micro.masked * (shape.heads // shape.kv_heads) * BYTES[s.dtype]


def logits(
    shape: ModelShape, s: LearnerSettings, micro: RowsAtOnce, *, entropy: bool, reference: bool
) -> tuple[int, int]:
    """Return (peak of the forward pass, peak of the backward pass) of log-probs by tiles
    (rft.trainer.model.logprobs).

    Includes one float32 tile of the output layer's weight gradient, but not that gradient.
    """
    item = BYTES[s.dtype]
    tokens = max(1, min(s.logprob_chunk_tokens, micro.trained))
    size = CPU_TILE if s.device == "cpu" else GPU_TILE
    everything = micro.trained * shape.vocab
    width = min(shape.vocab, max(LEAST_WIDTH, size // tokens))
    tile = tokens * width if s.entropy_chunking or not entropy else everything
    top = needs(s.algorithm).teacher_top
    # logits in float32 and in the compute type; with entropies also their exponentials, with likely
    # tokens the gradient of the others
    tiles = tile * (4 * (1 + entropy + (top > 0)) + (item if item < 4 else 0))
    sums = (SUMS + (1 if reference else 0)) * 4 * micro.trained
    if top:  # ids, both sides' log-probs, what the divergence keeps, gradients
        sums += TOP_BYTES * (top + 1) * micro.trained
    hidden = micro.trained * shape.hidden * item
    sums += (
        min(KEPT_BYTES, 4 * everything)
        if s.entropy_checkpointing or not entropy
        else 4 * everything
    )
    forward = tiles + sums + 2 * hidden
    of_weight = width * shape.hidden if item < 4 and s.lora is None else 0
    backward = max(tiles, tile * item + of_weight * item) + of_weight * 4
    return forward, backward + sums + 2 * hidden + micro.trained * shape.hidden * 4
