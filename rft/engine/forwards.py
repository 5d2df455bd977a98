"""Compute rows that start and end at different times, for the `transformers` engine.

With full attention in every layer, all rows are one batch over `RowCache`.  Other layers (windows,
linear attention, Mamba, convolutions) keep their state in the model's own cache, where rows of
equal length advance together without padding.  `prove` compares either way with a forward without a
cache when the model is loaded.  Depends on no requests.
Invariant: rows are numbered 0 to N - 1; the last row takes the number of a row that ends.

Shapes: N rows or sequences, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rft.engine import rounding
from rft.engine.kvcache import RowCache
from rft.engine.routers import Routers
from rft.engine.vision import tells_types, vision_inputs
from rft.errors import SetupError
from rft.images.processor import Sight
from rft.types import row_layout
from rft.types.noise import Difference, allowed

FULL = frozenset(
    {
        "full_attention",
        "attention",
        "global",
        "latent attention",
        "mlp",
        "moe",
        "dense",
        "sparse",
        "experts",
    }
)
EXACT = 1e-3  # nats per token in float32, as in the canary; chunked forms round differently
_MEASURED = (2, 3)  # row lengths in tokens for measuring bytes; shorter than any window
# (prompt tokens, total tokens) of the random texts for `prove`
_PROOF = ((7, 12), (5, 9), (7, 9))


class Forwards(ABC):
    """Prefill and decode steps of `model`.  With `routers`, `experts` holds the last call's routed
    experts, [places, layers, experts] for each row.
    """

    def __init__(self, model: Any, routers: Routers | None) -> None:
        self.model = model
        self.routers = routers
        self.device: torch.device = next(model.parameters()).device
        self.experts: list[np.ndarray] | None = None
        # position - number of tokens before it: of prefilled sequences, of rows
        self._fresh_shifts: list[int] = []
        self._shifts: dict[int, int] = {}

    @abstractmethod
    def prefill(
        self, sequences: Sequence[Sequence[int]], sights: Sequence[Sight] = ()
    ) -> torch.Tensor:
        """Return logits [N, V] after the last token of each sequence; the caches wait for `keep`.

        `sights`: the images of each sequence; empty: none has any.
        """

    @abstractmethod
    def keep(
        self,
        source: Sequence[int],
        lengths: Sequence[int],
        into: Sequence[int],
        *,
        rows: int,
        capacity: int,
    ) -> None:
        """Store prefilled sequence `source[i]`, `lengths[i]` tokens long, as row `into[i]`.

        Afterwards `rows` are in use, each at most `capacity` tokens long.
        """

    @abstractmethod
    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        """Return logits [N, V] after one new token per row; row i has `cached[i]` tokens in the
        cache.

        `only`: compute this row alone.
        """

    @abstractmethod
    def drop(self, row: int, last_length: int) -> None:
        """End row `row`; the last row, `last_length` tokens long, takes its number."""

    @abstractmethod
    def hidden(self, tokens: Sequence[int], sight: Sight = ()) -> torch.Tensor:
        """Return the output layer's input for one text, [tokens, H], computed without a cache."""

    @abstractmethod
    def waiting_bytes(self) -> int:
        """Return the bytes of prefilled caches that wait for `keep`."""

    @torch.inference_mode()
    def row_bytes(self) -> tuple[int, int]:
        """Measure (bytes of a row independent of its length, bytes per token).

        Later tokens may take less: layers with windows drop old tokens.
        """
        short, long = (self._bytes_of(tokens) for tokens in _MEASURED)
        token = (long - short) // (_MEASURED[1] - _MEASURED[0])
        return short - _MEASURED[0] * token, token

    def _bytes_of(self, tokens: int) -> int:
        self.prefill([[0] * tokens])
        return self.waiting_bytes()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of hidden states."""
        how = row_layout.head(self.model.config.to_dict())
        z = self.model.get_output_embeddings()(hidden).float() * how.scale
        return z if how.cap is None else torch.tanh(z / how.cap) * how.cap

    def _keep_shifts(self, source: Sequence[int], into: Sequence[int]) -> None:
        for s, row in zip(source, into, strict=True):
            self._shifts[row] = self._fresh_shifts[s] if self._fresh_shifts else 0

    def _drop_shift(self, row: int, last: int) -> None:
        self._shifts[row] = self._shifts.pop(last, 0)

    def _with_images(
        self, ids: torch.Tensor, lengths: Sequence[int], sights: Sequence[Sight], **more: Any
    ) -> Any:
        """Run the layers over sequences with images; `more`: cache and attention mask."""
        inputs = vision_inputs(self.model, body_of(self.model), ids, lengths, sights)
        self._fresh_shifts = inputs.shifts
        return inputs.module(**inputs.arguments, **more)

    def _record(self, sequences: int) -> list[np.ndarray]:
        """Return the routed experts of the last forward, one array per sequence."""
        if self.routers is None:
            return []
        chosen = self.routers.chosen
        experts = (
            chosen.view(sequences, -1, *chosen.shape[1:])
            .cpu()
            .numpy()
            .astype(self.routers.sizes.dtype)
        )
        return list(experts)


class CachedRows(Forwards):
    """Computes all rows as one batch over `RowCache`."""

    def __init__(self, model: Any, routers: Routers | None) -> None:
        super().__init__(model, routers)
        self._cache = RowCache(self.device)

    def prefill(
        self, sequences: Sequence[Sequence[int]], sights: Sequence[Sight] = ()
    ) -> torch.Tensor:
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        longest = int(lengths.max())
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device)
        last_places, where = (lengths - 1).unique(return_inverse=True)
        self._cache.begin_prefill()
        self._fresh_shifts = []
        if any(sights):
            out = self._with_images(
                ids,
                lengths.tolist(),
                sights,
                attention_mask=self._causal(longest),
                past_key_values=self._cache,
                use_cache=True,
            )
            self.experts = self._record(len(sequences))
            ends = out.last_hidden_state[torch.arange(len(sequences)), lengths - 1]
            return self.logits(ends)
        out = self.model(
            input_ids=ids,
            attention_mask=self._causal(longest),
            position_ids=torch.arange(longest, device=self.device).expand(len(sequences), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=last_places,
        )
        self.experts = self._record(len(sequences))
        logits: torch.Tensor = out.logits[torch.arange(len(sequences), device=self.device), where]
        return logits

    def keep(
        self,
        source: Sequence[int],
        lengths: Sequence[int],
        into: Sequence[int],
        *,
        rows: int,
        capacity: int,
    ) -> None:
        self._cache.keep(source, lengths, into, rows=rows, capacity=capacity)
        self._keep_shifts(source, into)

    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        places = torch.tensor(cached, device=self.device)
        length = int(places.max()) + 1
        visible = torch.arange(length, device=self.device) <= places.unsqueeze(1)
        shifts = [self._shifts[row] for row in (range(len(tokens)) if only is None else [only])]
        self._cache.begin_decode(places, length, only)
        out = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=self._mask(visible[:, None, None]),
            position_ids=(places + torch.tensor(shifts, device=self.device)).unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        )
        self.experts = self._record(len(tokens))
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def drop(self, row: int, last_length: int) -> None:
        self._drop_shift(row, self._cache.rows - 1)
        self._cache.drop(row, last_length)

    def waiting_bytes(self) -> int:
        return _bytes(self._cache.waiting)

    def hidden(self, tokens: Sequence[int], sight: Sight = ()) -> torch.Tensor:
        cache = RowCache(self.device)
        count = len(tokens)
        cache.begin_prefill()
        if sight:
            ids = torch.tensor([list(tokens)], device=self.device)
            mask = self._causal(count)
            output = self._with_images(
                ids, [count], [sight], attention_mask=mask, past_key_values=cache, use_cache=True
            )
            return torch.as_tensor(output.last_hidden_state[0])
        out = body_of(self.model)(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            attention_mask=self._causal(count),
            position_ids=torch.arange(count, device=self.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def _causal(self, count: int) -> torch.Tensor:
        visible = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()
        return self._mask(visible[None, None])

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """Return the additive mask, which every attention of transformers accepts."""
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
        return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)


@dataclass(eq=False)
class _Block:
    """Rows of equal length in one cache of the model; an ended row is None until the cache is
    trimmed.
    """

    cache: Any
    rows: list[int | None]


class OwnCaches(Forwards):
    """Advances rows of equal length together in the model's own cache.  `alone`: one cache per row."""

    def __init__(self, model: Any, routers: Routers | None, *, alone: bool) -> None:
        super().__init__(model, routers)
        self._alone = alone
        self._fresh: list[tuple[list[int], Any]] = []  # (sequence numbers, cache) of a prefill
        self._blocks: list[_Block] = []
        self._rows = 0

    def prefill(
        self, sequences: Sequence[Sequence[int]], sights: Sequence[Sight] = ()
    ) -> torch.Tensor:
        logits: dict[int, torch.Tensor] = {}
        experts: dict[int, np.ndarray] = {}
        shifts: dict[int, int] = {}
        self._fresh = []
        for length in dict.fromkeys(map(len, sequences)):
            same_length = [i for i, s in enumerate(sequences) if len(s) == length]
            ids = [list(sequences[i]) for i in same_length]
            if any(sights[i] for i in same_length if sights):
                cache, ends = self._prefill_seen(ids, [sights[i] for i in same_length])
                shifts |= dict(zip(same_length, self._fresh_shifts, strict=True))
            else:
                out = self._forward(ids, None, [0] * len(ids))
                cache, ends = out.past_key_values, out.logits[:, -1]
            self._fresh.append((same_length, cache))
            logits |= dict(zip(same_length, ends, strict=True))
            experts |= dict(zip(same_length, self._record(len(same_length)), strict=False))
        self._fresh_shifts = [shifts.get(i, 0) for i in range(len(sequences))]
        self.experts = [experts[i] for i in sorted(experts)]
        return torch.stack([logits[i] for i in range(len(sequences))])

    def _prefill_seen(
        self, ids: list[list[int]], sights: Sequence[Sight]
    ) -> tuple[Any, torch.Tensor]:
        """Return the cache of sequences with images, and the logits after them."""
        lengths = [len(x) for x in ids]
        out = self._with_images(
            torch.tensor(ids, device=self.device), lengths, sights, use_cache=True
        )
        return out.past_key_values, self.logits(out.last_hidden_state[:, -1])

    def keep(
        self,
        source: Sequence[int],
        lengths: Sequence[int],
        into: Sequence[int],
        *,
        rows: int,
        capacity: int,
    ) -> None:
        self._rows = rows
        self._keep_shifts(source, into)
        for block in self._blocks:  # these rows are prefilled again
            block.rows = [None if row in into else row for row in block.rows]
        for sequences, cache in self._fresh:
            places = [
                (sequences.index(s), row)
                for s, row in zip(source, into, strict=True)
                if s in sequences
            ]
            for part in [[place] for place in places] if self._alone else [places]:
                part_cache = copy.deepcopy(cache) if self._alone else cache
                part_cache.reorder_cache(torch.tensor([at for at, _ in part], device=self.device))
                self._blocks.append(_Block(part_cache, [row for _, row in part]))
        self._fresh = []

    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        self._cut()
        logits: dict[int, torch.Tensor] = {}
        experts: dict[int, np.ndarray] = {}
        for block in self._blocks:
            rows = [row for row in block.rows if row is not None]
            if only is not None and only not in rows:
                continue
            at = [0] if only is not None else rows  # row indices into `tokens`
            places = [cached[i] + self._shifts[row] for i, row in zip(at, rows, strict=False)]
            out = self._forward([[tokens[i]] for i in at], block.cache, places)
            logits |= dict(zip(rows, out.logits[:, -1], strict=True))
            experts |= dict(zip(rows, self._record(len(rows)), strict=False))
        self.experts = [experts[row] for row in sorted(experts)]
        return torch.stack([logits[row] for row in sorted(logits)])

    def drop(self, row: int, last_length: int) -> None:
        self._rows -= 1
        self._drop_shift(row, self._rows)
        for block in self._blocks:
            block.rows = [None if r == row else row if r == self._rows else r for r in block.rows]

    def waiting_bytes(self) -> int:
        return _bytes([vars(layer) for _, cache in self._fresh for layer in cache.layers])

    def hidden(self, tokens: Sequence[int], sight: Sight = ()) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self.device)
        if sight:
            out = self._with_images(ids, [len(tokens)], [sight], use_cache=False)
        else:
            out = body_of(self.model)(input_ids=ids, use_cache=False)
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def _forward(self, ids: list[list[int]], cache: Any, firsts: Sequence[int]) -> Any:
        """Compute the logits after `ids`; `firsts`: position of the first token of each row."""
        starts = torch.tensor(firsts, device=self.device)[:, None]
        return self.model(
            input_ids=torch.tensor(ids, device=self.device),
            position_ids=starts + torch.arange(len(ids[0]), device=self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _cut(self) -> None:
        """Remove ended rows from the caches."""
        self._blocks = [
            block for block in self._blocks if any(row is not None for row in block.rows)
        ]
        for block in self._blocks:
            if None in block.rows:
                stay = [i for i, row in enumerate(block.rows) if row is not None]
                block.cache.reorder_cache(torch.tensor(stay, device=self.device))
                block.rows = [block.rows[i] for i in stay]


def _bytes(tensors: object) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    inner = (
        tensors.values()
        if isinstance(tensors, dict)
        else tensors
        if isinstance(tensors, list | tuple)
        else ()
    )
    return sum(map(_bytes, inner))


def body_of(lm: Any) -> Any:
    """Return the submodule that computes hidden states; in some models `base_model_prefix` is
    wrong.
    """
    children = dict(lm.named_children())
    return children.get(lm.base_model_prefix) or children["model"]


def make(model: Any, routers: Routers | None, *, alone: bool) -> Forwards:
    full = FULL.issuperset(row_layout.layer_types(model.config.to_dict()))
    if full and not tells_types(body_of(model)):
        return CachedRows(model, routers)
    return OwnCaches(model, routers, alone=alone)


@torch.inference_mode()
def prove(model: Any, name: str) -> None:
    """Compare cached rows that start and end at different times with forwards without a cache.

    Raises SetupError if they differ by more than EXACT; for shorter dtypes by more than this
    model's rounding noise allows.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        difference, noise = _differences(model, sampled=dtype != "float32")
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        NotImplementedError,
    ) as e:
        raise SetupError(
            f"{name}: {type(model).__name__} cannot write texts with a cache: {type(e).__name__}: "
            f"{e}.  Use vllm"
        ) from e
    limit = Difference(EXACT, EXACT) if dtype == "float32" else allowed(noise, dtype)
    if not difference.within(limit):
        raise SetupError(
            f"{name}: {type(model).__name__} with a cache gives log-probs that differ by {difference} "
            f"from those without one, allowed "
            f"are {limit}; its rows cannot be computed here.  Use vllm"
        )


def _differences(model: Any, *, sampled: bool) -> tuple[Difference, Difference]:
    """Return the differences caused by the cache, and by another rounding, at all places of random
    texts.

    One text ends before the others.  Per place: the largest log-prob difference, or with `sampled`
    the mean under the model's distribution.  In shorter dtypes, logits of 16 and more are 0.125
    apart, and of 50,000 tokens some always get the worst rounding.
    """
    draw = torch.Generator().manual_seed(0)
    size = int(model.get_input_embeddings().weight.shape[0])
    texts = [torch.randint(size, (end,), generator=draw).tolist() for _, end in _PROOF]
    begins = [begin for begin, _ in _PROOF]
    forwards = make(model, None, alone=False)
    right = [_logprobs(forwards.logits(forwards.hidden(text))) for text in texts]
    with rounding.otherwise(model, model.dtype):
        otherwise = [_logprobs(forwards.logits(forwards.hidden(text))) for text in texts]
    noise = torch.cat(
        [_apart(a, b, sampled=sampled) for a, b in zip(otherwise, right, strict=True)]
    )
    logits = forwards.prefill([t[:b] for t, b in zip(texts, begins, strict=True)])
    at = list(begins)
    differences = []
    forwards.keep(
        range(len(texts)), begins, range(len(texts)), rows=len(texts), capacity=max(map(len, texts))
    )
    active = list(range(len(texts)))
    while True:
        for row, text in enumerate(active):
            differences.append(
                _apart(_logprobs(logits[row]), right[text][at[text] - 1], sampled=sampled)
            )
        for text in [t for t in active if at[t] == len(texts[t])]:
            row = active.index(text)
            last = active[-1]
            active[row] = last
            active.pop()
            forwards.drop(row, at[last])
        if not active:
            return Difference.from_values(
                torch.stack(differences).cpu().numpy()
            ), Difference.from_values(noise.cpu().numpy())
        logits = forwards.decode([texts[t][at[t]] for t in active], [at[t] for t in active])
        for t in active:
            at[t] += 1


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)


def _apart(logprobs: torch.Tensor, right: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    """Return the largest difference of log-probs [..., V]; `sampled`: the mean under `right`."""
    apart = (logprobs - right).abs()
    return (right.exp() * apart).sum(-1) if sampled else apart.amax(-1)
