"""Prove, when a model is loaded, that the trainer's row layout gives the results of transformers
for each row alone.

A few unequal rows, two with a common prompt, go through the model as it will train: its layout, its
attention, its log-probs at several temperatures.  The reference is transformers' own forward in
eval mode, log_softmax(float32 logits / temperature). Differences up to 1e-5 nats in float32 are
exact.  Beyond that, and in shorter dtypes, two conditions must hold: the difference is at most a
multiple of this model's own noise (the same tokens in another batch shape, from embeddings rounded
differently), and the layout is exact in float64 on a copy of the model's first layers, where no
rounding hides a wrong layer. A model that numbers its input positions itself, instead of using
`position_ids`, may be right only near its beginning (Llama 4 scales attention by position, in steps
of 8,192).  It is also compared behind as many other positions as a micro-batch of the run can have.
Depends on policies and critics, not on losses.  Invariant: all ranks reach the same verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rft.algorithm.needs import needs
from rft.engine import rounding
from rft.errors import ConfigError, RunFailed, SetupError, is_out_of_memory
from rft.plugins import import_library
from rft.trainer.model import attention, batch, layer_copy, loading, sharding
from rft.trainer.model import policy as policies
from rft.trainer.model.image_rows import ImageReader
from rft.trainer.model.policy import Policy
from rft.trainer.rows.pack import RowImage, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.row_layout import KEY, AskedLayout, choose

log = logging.getLogger(__name__)

_MULTIPLE = 8  # factor of the noise that a difference may reach
_EXACT = 1e-5  # nats, in float32; also in float64, where some layers still compute in float32
_FLOOR = {"float32": _EXACT, "bfloat16": 1e-3}  # nats
# upper limit of noise, in nats; bfloat16 models differ too much for a limit
_CEILING = {"float32": 1e-3, "bfloat16": float("inf")}
_NO_CONFIG = SimpleNamespace()
# the layout to try when one is not exact
_NEXT: dict[AskedLayout, AskedLayout] = {"shared": "packed", "packed": "padded"}
# window and chunk size during the comparison, so that the short rows exceed it
_SHORT = 5
_WIDTHS = ("sliding_window", "attention_chunk_size")
_TAIL = 7  # extra tokens of the second batch shape
_NUMBERING = frozenset({torch.arange, torch.cumsum, torch.Tensor.cumsum})


@dataclass(frozen=True)
class Proof:
    """Differences of log-probs in nats; for a critic or a copy, of projected hidden states.

    Float32: the largest over all tokens; shorter dtypes: the mean, because a different choice of
    expert moves a token by whole nats. `in_float64`: difference of the copy; text: why it could not
    be computed; None: not needed. `reach`: number of positions before the rows in a second
    comparison, if the model numbers positions itself; else 0.
    """

    apart: float
    noise: float
    dtype: str
    num_tokens: int
    reach: int = 0
    in_float64: float | str | None = None

    @property
    def limit(self) -> float:
        return min(max(_FLOOR[self.dtype], _MULTIPLE * self.noise), _CEILING[self.dtype])

    @property
    def rounded(self) -> bool:
        """Return whether the difference is rounding noise of the model but too large to be exact."""
        return self.apart <= self.limit and not (self.dtype == "float32" and self.apart <= _EXACT)

    @property
    def exact(self) -> bool:
        """Return whether the layout counts as exact.

        A copy that could not be computed neither proves nor refutes, except for a model that
        numbers positions itself.
        """
        if isinstance(self.in_float64, str):
            return self.apart <= self.limit and not self.reach
        return self.apart <= self.limit and (
            self.in_float64 is None or self.in_float64 <= _EXACT
        )  # False for NaN

    def __str__(self) -> str:
        which = "the largest difference" if self.dtype == "float32" else "the mean difference"
        text = (
            f"{which} to plain transformers rows over {self.num_tokens} tokens is {self.apart:.1e} "
            f"nats, "
            f"allowed are {self.limit:.1e} (noise of this model in {self.dtype}: {self.noise:.1e})"
        )
        if self.reach:
            text += (
                f", up to {self.reach:,} positions into the input, whose places the model "
                f"numbers by itself"
            )
        if isinstance(self.in_float64, str):
            return (
                f"{text}; the layout was not computed in float64 ({self.in_float64}), so only "
                f"the types of layers speak for it"
            )
        if self.in_float64 is not None:
            allowed = f"allowed are {_EXACT:.0e}"
            return f"{text}; the first layers in float64 are {self.in_float64:.1e} apart, {allowed}"
        return text


def decided(settings: LearnerSettings) -> LearnerSettings:
    """Return `settings` with the row layouts that the configurations of policy and critic allow.

    Raises ConfigError like `choose`.
    """
    import_library(settings.external_lib)
    critic = settings.critic
    if needs(settings.algorithm).critic:
        critic = replace(
            critic,
            row_layout=_decided(
                settings, critic.model_path or settings.model_path, critic.row_layout
            ),
        )
    return replace(
        settings,
        row_layout=_decided(settings, settings.model_path, settings.row_layout),
        critic=critic,
    )


def _decided(settings: LearnerSettings, path: str, layout: AskedLayout) -> AskedLayout:
    if layout == "auto" and settings.attn_implementation == "eager":
        return "padded"
    override = loading.override_of(settings, path)
    config = loading.config_of(
        Path(path), trust_remote_code=settings.trust_remote_code, override=override
    )
    choice = choose(config.to_dict(), layout)
    if choice.layout == "padded" or attention.exchangeable(config):
        return choice.layout
    if layout == "auto":
        log.warning(
            "%s: rows are padded: its attention is its own code, which cannot be exchanged", path
        )
        return "padded"
    raise ConfigError(
        "the model's attention is its own code, which cannot be exchanged.  Write auto or padded",
        key=KEY,
        given=layout,
    )


def prove(model: Policy, settings: LearnerSettings, *, fall_back: bool) -> AskedLayout:
    """Return the layout to train `model` with: that of `settings` (decided), or with `fall_back`
    the next exact one.

    Collective. Raises ConfigError naming the difference for a layout that is not exact.
    """
    proof = _tried(model, settings)
    if isinstance(proof, Proof) and proof.exact:
        level = logging.WARNING if isinstance(proof.in_float64, str) else logging.INFO
        log.log(
            level,
            "%s: %s rows are taken as exact: %s",
            settings.model_path,
            settings.row_layout,
            proof,
        )
        return settings.row_layout
    other = _NEXT.get(settings.row_layout)
    if other is not None and fall_back and (other != "padded" or settings.sequence_parallel == 1):
        log.warning(
            "%s: %s rows are not used, and rows are %s: %s",
            settings.model_path,
            settings.row_layout,
            other,
            proof,
        )
        if other == "padded":
            attention.switch(model.lm, policies.plain_attention(model.lm, settings))
        return prove(model, replace(settings, row_layout=other), fall_back=True)
    verdict = "are not exact" if isinstance(proof, Proof) else "cannot be computed"
    what = f"{settings.row_layout} rows of {type(model.lm).__name__} {verdict}: {proof}"
    if settings.row_layout == "padded":
        raise SetupError(f"{settings.model_path}: {what}.  The trainer cannot train this model")
    raise ConfigError(f"{what}.  Write auto or padded", key=KEY, given=settings.row_layout)


def _tried(model: Policy, settings: LearnerSettings) -> Proof | str:
    """Return the proof, or the reason why the model cannot be computed in its layout."""
    try:
        proof = measure(model, settings)
    except Exception as e:  # third-party model code may raise anything; its error is the verdict
        if is_out_of_memory(e):
            raise
        return _describe(e)
    return replace(proof, in_float64=_in_float64(settings)) if proof.rounded else proof


def _describe(e: Exception) -> str:
    return e.message if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"


def check_rows(
    model: Policy, settings: LearnerSettings, rows: Sequence[TrainRow], reader: ImageReader | None
) -> str:
    """Compare `rows` of the first batch with separate rows; return a message for the log.

    `reader`: of their images; None if they have none.  Collective. Raises RunFailed if they differ.
    """
    # a lease's arrays are read-only
    chosen = [msgspec.structs.replace(r, tokens=r.tokens.copy(), experts=None) for r in rows]
    if reader is None:
        proof = measure(model, settings, chosen)
    else:
        proof = measure_images(model, settings, chosen, reader)
    if not proof.apart <= proof.limit:
        layout = settings.row_layout if reader is None else settings.image_layout
        raise RunFailed(
            f"the first batch, as {layout} rows of {type(model.lm).__name__}, is not what "
            f"transformers computes: {proof}.  "
            f"Write {KEY}: padded; if that is written, the trainer cannot train this model"
        )
    return f"first batch: {len(chosen)} of its rows are what transformers computes: {proof}"


def prove_images(model: Policy, settings: LearnerSettings, reader: ImageReader) -> AskedLayout:
    """Return the layout of micro-batches with images: that of texts where it is exact, else padded.

    Collective.
    """
    layout = settings.row_layout
    if layout == "padded":
        return layout
    verdict: Proof | str = "tokens of an image see each other"
    if not reader.needs_padding:
        try:
            tried = replace(settings, image_layout=layout)
            verdict = measure_images(model, tried, _shown_rows(model, reader), reader)
        except Exception as e:  # as in `_tried`
            if is_out_of_memory(e):
                raise
            verdict = _describe(e)
    if isinstance(verdict, Proof) and verdict.exact:
        log.info("%s: %s rows with images are exact: %s", settings.model_path, layout, verdict)
        return layout
    log.warning("%s: rows with images are padded: %s", settings.model_path, verdict)
    return "padded"


@torch.no_grad()
def measure(model: Policy, settings: LearnerSettings, rows: list[TrainRow] | None = None) -> Proof:
    """Compare `model` in the layout of `settings` with separate rows, of `rows` or of random ones.

    Collective.
    """
    has_rows = rows is not None
    rows = _rows(model) if rows is None else rows
    tokens = [torch.from_numpy(r.tokens).to(settings.device, torch.int64) for r in rows]
    width = max(map(len, tokens)) + _TAIL
    filled = torch.stack([t.repeat(-(-width // len(t)))[:width] for t in tokens])
    with _narrowed(model):
        values, reach = _laid_out(model, settings, rows, far=not has_rows)
        with _plainly(model, settings):
            inputs = [{"input_ids": t[None]} for t in tokens]
            alone = _read(model, rows, [out[0] for out in model.reference_outputs(inputs)])
            with rounding.otherwise(model.lm, sharding.DTYPES[settings.dtype]):
                joined = _read(model, rows, model.reference_outputs([{"input_ids": filled}])[0])
    return _proof(model, settings, (values, alone, joined), reach)


@torch.no_grad()
def measure_images(
    model: Policy, settings: LearnerSettings, rows: list[TrainRow], reader: ImageReader
) -> Proof:
    """Compare `rows` that show images, in `image_layout`, with separate rows.  Collective."""
    layout = settings.image_layout
    micro_batch = batch.make(rows, layout=layout, device=torch.device(settings.device))
    policies.lay_out(model, settings, layout)
    values = model.numbers(reader.placed(rows, micro_batch))[None]
    policies.lay_out(model, settings, settings.row_layout)
    inputs = [reader.reference_inputs(row, settings.device) for row in rows]
    with _plainly(model, settings):
        alone = _read(model, rows, [out[0] for out in model.reference_outputs(inputs)])
        with rounding.otherwise(model.lm, sharding.DTYPES[settings.dtype]):
            again = _read(model, rows, [out[0] for out in model.reference_outputs(inputs)])
    return _proof(model, settings, (values, alone, again), 0)


def _proof(
    model: Policy,
    settings: LearnerSettings,
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reach: int,
) -> Proof:
    """Return the proof from the rows' numbers in the layout [1 or 2, N], alone [N], and alone with
    other roundings [N].
    """
    values, alone, joined = numbers
    reduce = torch.amax if settings.dtype == "float32" else torch.mean
    differences = torch.stack(
        [reduce((values - alone).abs(), -1).max(), reduce((joined - alone).abs())]
    )
    differences = differences.nan_to_num(float("inf"), float("inf"))
    if settings.world_size > 1:
        dist.all_reduce(differences, dist.ReduceOp.MAX)
    model.to_shards()
    return Proof(float(differences[0]), float(differences[1]), settings.dtype, len(alone), reach)


def _in_float64(settings: LearnerSettings) -> float | str:
    """Return the difference of the layout on a float64 copy, or the reason why it is unknown.

    Collective; rank 0 computes.
    """
    difference: list[float | str] = [0.0]
    if settings.world_size == 1 or dist.get_rank() == 0:
        try:
            difference = [copy_apart(settings)]
        except Exception as e:  # third-party code may raise anything; then the layers' types decide
            difference = [_describe(e)]
    if settings.world_size > 1:
        dist.broadcast_object_list(difference, src=0)
    return difference[0]


@torch.no_grad()
def copy_apart(settings: LearnerSettings) -> float:
    """Return the largest difference between the layout and separate rows on a float64 copy."""
    # kernels of flash-attn do not support float64
    kernel = "eager" if settings.attn_implementation == "eager" else "sdpa"
    alone = replace(settings, sequence_parallel=1, world_size=1, attn_implementation=kernel)
    model = layer_copy.make(alone)
    rows = _rows(model)
    tokens = [torch.from_numpy(r.tokens).to(alone.device, torch.int64)[None] for r in rows]
    inputs = [{"input_ids": t} for t in tokens]
    with _narrowed(model):
        values, _ = _laid_out(model, alone, rows, far=True)
        with _plainly(model, alone):
            right = _read(model, rows, [out[0] for out in model.reference_outputs(inputs)])
    return float((values - right).abs().max().nan_to_num(float("inf"), float("inf")))


def _laid_out(
    model: Policy, settings: LearnerSettings, rows: list[TrainRow], *, far: bool
) -> tuple[torch.Tensor, int]:
    """Return the numbers of `rows` in the layout, [1 or 2, N], and the reach (see `Proof`).

    The first line is computed at the beginning of the input.  The second, if `far` and the model
    may number positions itself, follows that many other positions.
    """
    device = torch.device(settings.device)
    micro_batch = batch.make(rows, layout=settings.row_layout, device=device)
    length = micro_batch.input_ids.shape[1]
    places = _Places({length, -(-length // settings.sequence_parallel)})
    with nullcontext() if settings.compile else places:
        near = model.numbers(micro_batch)
    unseen = settings.compile or not type(model.lm).__module__.startswith("transformers.")
    if not far or settings.row_layout == "padded" or not (places.numbered or unseen):
        return near[None], 0
    reach = _reach(settings)
    before = _fillers(rows, reach - length)
    behind = model.numbers(batch.make([*before, *rows], layout=settings.row_layout, device=device))
    return torch.stack([near, behind[len(before) :]]), reach


class _Places(TorchFunctionMode):
    """Detects whether a model numbers a sequence with one of these lengths."""

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()
        self._lengths = lengths
        self.numbered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _NUMBERING and out.dim() and out.shape[-1] in self._lengths:
            self.numbered = True
        return out


def _reach(settings: LearnerSettings) -> int:
    """Return how many positions a micro-batch of the run can have."""
    sizes = [
        (
            settings.max_token_len_per_gpu,
            None if settings.use_dynamic_bsz else settings.micro_batch_size,
        )
    ]
    sizes += [
        (f.max_token_len_per_gpu, f.micro_batch_size)
        for f in (settings.log_prob, settings.ref)
        if f is not None
    ]
    return max(tokens * (rows or 1) for tokens, rows in sizes) * settings.sequence_parallel


def _fillers(rows: Sequence[TrainRow], positions: int) -> list[TrainRow]:
    """Return rows of at least `positions` positions in total, none longer than `rows`, with one
    trained token each.

    They precede `rows` in the micro-batch; their first token, 0, which they may share, never occurs
    in `rows`.
    """
    draw = np.random.default_rng(1)
    width = max(len(r.tokens) for r in rows)
    most = max(int(r.tokens.max()) for r in rows)
    fillers = []
    for i in range(1 + positions // (width - 2)):
        tokens = np.concatenate([[0], draw.integers(1, most + 1, size=width - 1)]).astype(np.int32)
        mask = np.arange(width) == width - 1
        zeros = np.zeros(width, np.float32)
        fillers.append(
            TrainRow(
                tokens=tokens, loss_mask=mask, logprobs=zeros, temperatures=1.0, group=f"before {i}"
            )
        )
    return fillers


def _read(model: Policy, rows: list[TrainRow], outs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the compared numbers from the outputs of each row."""
    return torch.cat([model.read(out, row) for out, row in zip(outs, rows, strict=True)])


@contextmanager
def _plainly(model: Policy, settings: LearnerSettings) -> Iterator[None]:
    """Let `model` compute like transformers in eval mode inside the block."""
    modes = {module: module.training for module in model.modules()}
    trained_with = model.lm.config._attn_implementation
    model.eval()
    model.states.begin(None)
    attention.switch(model.lm, policies.plain_attention(model.lm, settings))
    try:
        yield
    finally:
        attention.switch(model.lm, trained_with)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _narrowed(model: Policy) -> Iterator[None]:
    """Set windows and chunks of all layers of `model` to `_SHORT` inside the block."""
    places = {
        id(at): at
        for module in model.modules()
        for at in (vars(module), vars(vars(module).get("config", _NO_CONFIG)))
    }
    wide = [
        (at, name, width)
        for at in places.values()
        for name in _WIDTHS
        if isinstance(width := at.get(name), int) and width > _SHORT
    ]
    try:
        for at, name, _ in wide:
            at[name] = _SHORT
        yield
    finally:
        for at, name, width in wide:
            at[name] = width


def _shown_rows(model: Policy, reader: ImageReader) -> list[TrainRow]:
    """Return `_rows`, the first two behind one image, the third behind another and that one."""
    pictures = [reader.example(seed) for seed in range(2)]
    shown = [(0,), (0,), (1, 0), ()]
    rows = []
    for row, numbers in zip(_rows(model), shown, strict=True):
        texts = row.tokens % reader.token  # no other special token, which are behind it
        images = []
        tokens = texts[:1]
        for place, data in (pictures[n] for n in numbers):
            start = len(tokens)
            images.append(RowImage(msgspec.structs.replace(place, start=start), data))
            span = np.full(place.length, reader.token)
            tokens = np.concatenate([tokens, span, texts[:1]]).astype(np.int32)
        added = len(tokens) - 1
        tokens = np.concatenate([tokens, texts[1:]]).astype(np.int32)
        mask = np.concatenate([np.zeros(added, np.bool_), row.loss_mask])
        zeros = np.zeros(len(tokens), np.float32)
        rows.append(
            msgspec.structs.replace(
                row, tokens=tokens, loss_mask=mask, logprobs=zeros, images=tuple(images)
            )
        )
    return rows


def _rows(model: Policy) -> list[TrainRow]:
    """Return two rows with a common prompt and two others, of several lengths and temperatures."""
    config = model.lm.config.get_text_config()
    draw = np.random.default_rng(0)
    max_positions = vars(config).get("max_position_embeddings") or 64
    unit = max(1, min(9, (max_positions - _TAIL) // 5))
    prompt = draw.integers(1, config.vocab_size, size=2 * unit + 1)
    rows: list[TrainRow] = []
    for begin, count, temperature in (
        (prompt, unit, 1.0),
        (prompt, 2 * unit, 0.9),
        (prompt[:0], 3 * unit, 1.0),
        (prompt[:0], unit, 0.7),
    ):
        answer = draw.integers(1, config.vocab_size, size=count + 1)
        tokens = np.concatenate([begin, answer]).astype(np.int32)
        mask = np.arange(len(tokens)) >= max(1, len(begin))
        rows.append(
            TrainRow(
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.zeros(len(tokens), np.float32),
                temperatures=temperature,
                group="shared" if len(begin) else str(len(rows)),
            )
        )
    return rows
