"""Proves, when a model is loaded, that rows as the trainer lays them out give what transformers
gives for each row by itself.

A few unequal rows, two of them with a common prompt, go through the model as it will train: its
layout, its attention, its log-probs at several temperatures.  The other side is transformers' own
forward in eval mode, log_softmax(float32 logits / temperature). Differences up to 1e-5 nats in
float32 are exact.  Beyond that, and in shorter types, two things must hold: the difference is no
more than a multiple of this model's own noise (the same tokens in another batch shape, from
embeddings that are rounded differently), and the layout is exact in float64 on a copy of the
model's first layers, where nothing hides a wrong layer. A model that numbers the places of its
input by itself, instead of taking `position_ids`, may be right near its beginning alone (Llama 4
scales attention by the place, in steps of 8,192).  It is compared behind as many other positions as
a micro-batch of the run can have. Knows policies and critics; not losses.  Invariant: all ranks
come to the same verdict.
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
from rft.trainer import attention, batch, layer_copy, loading, sharding
from rft.trainer import policy as policies
from rft.trainer.pack import TrainRow
from rft.trainer.policy import Policy
from rft.trainer.settings import LearnerSettings
from rft.types.row_layout import KEY, AskedLayout, choose

log = logging.getLogger(__name__)

_MULTIPLE = 8  # of the noise
_EXACT = 1e-5  # nats, in float32, and in float64, in which some layers compute in float32 still
_FLOOR = {"float32": _EXACT, "bfloat16": 1e-3}  # nats
# what is more than noise can be; in bfloat16 models differ too much
_CEILING = {"float32": 1e-3, "bfloat16": float("inf")}
_NO_CONFIG = SimpleNamespace()
# what is tried where one is not exact
_NEXT: dict[AskedLayout, AskedLayout] = {"shared": "packed", "packed": "padded"}
# positions of a window or chunk while rows are compared, so that the short rows reach beyond it
_SHORT = 5
_WIDTHS = ("sliding_window", "attention_chunk_size")
_TAIL = 7  # tokens that make the second batch shape
_NUMBERING = frozenset({torch.arange, torch.cumsum, torch.Tensor.cumsum})


@dataclass(frozen=True)
class Proof:
    """Differences of log-probs in nats; of a critic and of a copy, of a projection of its last
    hidden states.

    In float32 the largest over all tokens, in shorter types the mean: there one expert chosen
    otherwise moves a token by whole nats. `in_float64`: of the copy; why there is none; or None
    where it is not needed.  `reach`: how many positions into the input the rows were compared too,
    where the model numbers places by itself; else 0.
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
        """Whether the difference is within what rounding does to this model, and too large to be
        exact by itself.
        """
        return self.apart <= self.limit and not (self.dtype == "float32" and self.apart <= _EXACT)

    @property
    def exact(self) -> bool:
        """A copy that could not be computed proves nothing, and refutes nothing either but where
        the model's own places have to be.
        """
        if isinstance(self.in_float64, str):
            return self.apart <= self.limit and not self.reach
        return self.apart <= self.limit and (
            self.in_float64 is None or self.in_float64 <= _EXACT
        )  # False where it is not a number

    def __str__(self) -> str:
        which = "the largest difference" if self.dtype == "float32" else "the mean difference"
        said = (
            f"{which} to plain transformers rows over {self.num_tokens} tokens is {self.apart:.1e} "
            f"nats, "
            f"allowed are {self.limit:.1e} (noise of this model in {self.dtype}: {self.noise:.1e})"
        )
        if self.reach:
            said += (
                f", up to {self.reach:,} positions into the input, whose places the model "
                f"numbers by itself"
            )
        if isinstance(self.in_float64, str):
            return (
                f"{said}; the layout was not computed in float64 ({self.in_float64}), so only "
                f"the types of layers speak for it"
            )
        if self.in_float64 is not None:
            allowed = f"allowed are {_EXACT:.0e}"
            return f"{said}; the first layers in float64 are {self.in_float64:.1e} apart, {allowed}"
        return said


def decided(settings: LearnerSettings) -> LearnerSettings:
    """`settings` with the row layouts that the configurations of policy and critic allow.  Raises
    ConfigError as `choose` does.
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


def _decided(settings: LearnerSettings, path: str, asked: AskedLayout) -> AskedLayout:
    if asked == "auto" and settings.attn_implementation == "eager":
        return "padded"
    override = loading.override_of(settings, path)
    config = loading.config_of(
        Path(path), trust_remote_code=settings.trust_remote_code, override=override
    )
    choice = choose(config.to_dict(), asked, device=settings.device)
    if choice.layout == "padded" or attention.exchangeable(config):
        return choice.layout
    if asked == "auto":
        log.warning(
            "%s: rows are padded: its attention is its own code, which cannot be exchanged", path
        )
        return "padded"
    raise ConfigError(
        "the model's attention is its own code, which cannot be exchanged.  Write auto or padded",
        key=KEY,
        given=asked,
    )


def prove(model: Policy, settings: LearnerSettings, *, fall_back: bool) -> AskedLayout:
    """The layout to train `model` with: that of `settings` (decided), or the next that is exact
    where it may be left.  Collective.

    Raises ConfigError for a layout that is not exact, naming what differs.
    """
    found = _tried(model, settings)
    if isinstance(found, Proof) and found.exact:
        level = logging.WARNING if isinstance(found.in_float64, str) else logging.INFO
        log.log(
            level,
            "%s: %s rows are taken as exact: %s",
            settings.model_path,
            settings.row_layout,
            found,
        )
        return settings.row_layout
    other = _NEXT.get(settings.row_layout)
    if other is not None and fall_back and (other != "padded" or settings.sequence_parallel == 1):
        log.warning(
            "%s: %s rows are not used, and rows are %s: %s",
            settings.model_path,
            settings.row_layout,
            other,
            found,
        )
        if other == "padded":
            attention.switch(model.lm, policies.plain_attention(model.lm, settings))
        return prove(model, replace(settings, row_layout=other), fall_back=True)
    verdict = "are not exact" if isinstance(found, Proof) else "cannot be computed"
    what = f"{settings.row_layout} rows of {type(model.lm).__name__} {verdict}: {found}"
    if settings.row_layout == "padded":
        raise SetupError(f"{settings.model_path}: {what}.  The trainer cannot train this model")
    raise ConfigError(f"{what}.  Write auto or padded", key=KEY, given=settings.row_layout)


def _tried(model: Policy, settings: LearnerSettings) -> Proof | str:
    """The proof, or why the model cannot be computed in its layout."""
    try:
        found = measure(model, settings)
    except Exception as e:  # a model's code may be anyone's, and what it raises is the verdict
        if is_out_of_memory(e):
            raise
        return _said(e)
    return replace(found, in_float64=_in_float64(settings)) if found.rounded else found


def _said(e: Exception) -> str:
    return e.message if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"


def check_rows(model: Policy, settings: LearnerSettings, rows: Sequence[TrainRow]) -> str:
    """Compare `rows`, which are about to be trained on, with plain rows; what to say of it.
    Collective.

    Raises RunFailed where they differ.
    """
    # a lease's arrays are read-only
    chosen = [msgspec.structs.replace(r, tokens=r.tokens.copy(), experts=None) for r in rows]
    found = measure(model, settings, chosen)
    if not found.apart <= found.limit:
        raise RunFailed(
            f"the first batch, as {settings.row_layout} rows of {type(model.lm).__name__}, is not "
            f"what transformers computes: {found}.  "
            f"Write {KEY}: padded; if that is written, the trainer cannot train this model"
        )
    return f"first batch: {len(chosen)} of its rows are what transformers computes: {found}"


@torch.no_grad()
def measure(model: Policy, settings: LearnerSettings, rows: list[TrainRow] | None = None) -> Proof:
    """Compare `model` in the layout of `settings` with plain rows, of `rows` or of random ones.
    Collective.
    """
    given = rows is not None
    rows = _rows(model) if rows is None else rows
    tokens = [torch.from_numpy(r.tokens).to(settings.device, torch.int64) for r in rows]
    width = max(map(len, tokens)) + _TAIL
    filled = torch.stack([t.repeat(-(-width // len(t)))[:width] for t in tokens])
    with _narrowed(model):
        mine, reach = _laid_out(model, settings, rows, far=not given)
        with _plainly(model, settings):
            alone = _read(model, rows, [out[0] for out in model.plain([t[None] for t in tokens])])
            with rounding.otherwise(model.lm, sharding.DTYPES[settings.dtype]):
                joined = _read(model, rows, model.plain([filled])[0])
    of = torch.amax if settings.dtype == "float32" else torch.mean
    found = torch.stack([of((mine - alone).abs(), -1).max(), of((joined - alone).abs())])
    found = found.nan_to_num(float("inf"), float("inf"))
    if settings.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    model.to_shards()
    return Proof(float(found[0]), float(found[1]), settings.dtype, len(alone), reach)


def _in_float64(settings: LearnerSettings) -> float | str:
    """How far the layout of `settings` is from plain rows on a copy in float64, or why that is not
    known.  Collective; rank 0 computes.
    """
    found: list[float | str] = [0.0]
    if settings.world_size == 1 or dist.get_rank() == 0:
        try:
            found = [copy_apart(settings)]
        except (
            Exception
        ) as e:  # a model's code may be anyone's; the layers' types decide where it cannot be cut
            found = [_said(e)]
    if settings.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


@torch.no_grad()
def copy_apart(settings: LearnerSettings) -> float:
    """The largest difference between the layout of `settings` and plain rows on a copy in float64."""
    # kernels of flash-attn know no float64
    plain = "eager" if settings.attn_implementation == "eager" else "sdpa"
    alone = replace(settings, sequence_parallel=1, world_size=1, attn_implementation=plain)
    model = layer_copy.make(alone)
    rows = _rows(model)
    tokens = [torch.from_numpy(r.tokens).to(alone.device, torch.int64)[None] for r in rows]
    with _narrowed(model):
        mine, _ = _laid_out(model, alone, rows, far=True)
        with _plainly(model, alone):
            right = _read(model, rows, [out[0] for out in model.plain(tokens)])
    return float((mine - right).abs().max().nan_to_num(float("inf"), float("inf")))


def _laid_out(
    model: Policy, settings: LearnerSettings, rows: list[TrainRow], *, far: bool
) -> tuple[torch.Tensor, int]:
    """What `rows` give in the layout of `settings`, [1 or 2, N]: at the beginning of the input,
    and, if `far`, where places matter and may be others far into it, behind so many positions, too.
    """
    device = torch.device(settings.device)
    made = batch.make(rows, layout=settings.row_layout, device=device)
    length = made.input_ids.shape[1]
    places = _Places({length, -(-length // settings.sequence_parallel)})
    with nullcontext() if settings.compile else places:
        near = model.numbers(made)
    unseen = settings.compile or not type(model.lm).__module__.startswith("transformers.")
    if not far or settings.row_layout == "padded" or not (places.seen or unseen):
        return near[None], 0
    reach = _reach(settings)
    before = _fillers(rows, reach - length)
    behind = model.numbers(batch.make([*before, *rows], layout=settings.row_layout, device=device))
    return torch.stack([near, behind[len(before) :]]), reach


class _Places(TorchFunctionMode):
    """Sees whether anything is numbered that has one of these lengths."""

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()
        self._lengths = lengths
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _NUMBERING and out.dim() and out.shape[-1] in self._lengths:
            self.seen = True
        return out


def _reach(settings: LearnerSettings) -> int:
    """Positions that a micro-batch of the run can have."""
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
    """Rows of at least so many positions, no longer than `rows`, one trained token each.

    They stand before `rows`: token 0, which is their first, and which they may share, is none of
    those.
    """
    draw = np.random.default_rng(1)
    width = max(len(r.tokens) for r in rows)
    most = max(int(r.tokens.max()) for r in rows)
    made = []
    for i in range(1 + positions // (width - 2)):
        tokens = np.concatenate([[0], draw.integers(1, most + 1, size=width - 1)]).astype(np.int32)
        mask = np.arange(width) == width - 1
        zeros = np.zeros(width, np.float32)
        made.append(
            TrainRow(
                tokens=tokens, loss_mask=mask, logprobs=zeros, temperatures=1.0, group=f"before {i}"
            )
        )
    return made


def _read(model: Policy, rows: list[TrainRow], outs: Iterable[torch.Tensor]) -> torch.Tensor:
    """The same from the outputs of each row."""
    return torch.cat([model.read(out, row) for out, row in zip(outs, rows, strict=True)])


@contextmanager
def _plainly(model: Policy, settings: LearnerSettings) -> Iterator[None]:
    """Let `model` compute as transformers does in eval mode."""
    modes = {module: module.training for module in model.modules()}
    trained_with = model.lm.config._attn_implementation
    model.eval()
    attention.switch(model.lm, policies.plain_attention(model.lm, settings))
    try:
        yield
    finally:
        attention.switch(model.lm, trained_with)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _narrowed(model: Policy) -> Iterator[None]:
    """Windows and chunks of all layers of `model` are `_SHORT`."""
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


def _rows(model: Policy) -> list[TrainRow]:
    """Two rows with a common prompt and two others, all of other lengths, at several temperatures."""
    config = model.lm.config.get_text_config()
    draw = np.random.default_rng(0)
    known = vars(config).get("max_position_embeddings") or 64
    unit = max(1, min(9, (known - _TAIL) // 5))
    prompt = draw.integers(1, config.vocab_size, size=2 * unit + 1)
    made: list[TrainRow] = []
    for begin, count, temperature in (
        (prompt, unit, 1.0),
        (prompt, 2 * unit, 0.9),
        (prompt[:0], 3 * unit, 1.0),
        (prompt[:0], unit, 0.7),
    ):
        own = draw.integers(1, config.vocab_size, size=count + 1)
        tokens = np.concatenate([begin, own]).astype(np.int32)
        mask = np.arange(len(tokens)) >= max(1, len(begin))
        made.append(
            TrainRow(
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.zeros(len(tokens), np.float32),
                temperatures=temperature,
                group="shared" if len(begin) else str(len(made)),
            )
        )
    return made
