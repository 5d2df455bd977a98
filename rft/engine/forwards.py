"""How rows that come and go are computed with a Hugging Face model and a cache.  For the
`transformers` engine.

Where every layer is full attention, all rows are one batch over `RowCache`.  Other layers (windows,
linear attention, Mamba, convolutions) keep their state in the model's own cache, and rows of equal
length advance together in one such cache: nothing is padded, so no layer needs to know of padding.
Either is compared with a forward without a cache when the model is loaded. Knows no requests.
Invariant: the place of a row is its number; the last row takes the place of one that ends.

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

from rft.engine import kvcache, rounding
from rft.engine.kvcache import RowCache
from rft.engine.routers import Routers
from rft.errors import SetupError
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
EXACT = 1e-3  # nats, of any token in float32, as the canary: recurrences and chunks round apart
_MEASURED = (2, 3)  # tokens of the rows whose bytes are counted: fewer than any window
# (places of the prompt, of the whole text) of a few random texts
_PROOF = ((7, 12), (5, 9), (7, 9))


class Forwards(ABC):
    """Of `model`.  `routers`: where they record, `told` holds the experts of the last call,
    [places, layers, experts] of each row.
    """

    def __init__(self, model: Any, routers: Routers | None) -> None:
        self.model = model
        self.routers = routers
        self.device: torch.device = next(model.parameters()).device
        self.told: list[np.ndarray] | None = None

    @abstractmethod
    def prefill(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [N, V] after the last token of each sequence; what was computed waits for `keep`."""

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
        """Row `into[i]` is prefilled sequence `source[i]`, `lengths[i]` tokens long.

        `rows` are in use afterwards, and none of them will be longer than `capacity`.
        """

    @abstractmethod
    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        """Logits [N, V] after one more token of every row, of which `cached[i]` are in the cache;
        `only`: of this row alone.
        """

    @abstractmethod
    def drop(self, row: int, last_length: int) -> None:
        """Row `row` ended: the last row, `last_length` tokens long, takes its place."""

    @abstractmethod
    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the output layer sees of one text, [tokens, H], without a cache."""

    @abstractmethod
    def waiting_bytes(self) -> int:
        """Bytes of the caches of what was prefilled and waits for `keep`."""

    @torch.inference_mode()
    def row_bytes(self) -> tuple[int, int]:
        """Bytes that a row has in the cache whatever its length, and those of each token; measured.

        A token that is computed later may take less than that: windows forget.
        """
        short, long = (self._bytes_of(tokens) for tokens in _MEASURED)
        token = (long - short) // (_MEASURED[1] - _MEASURED[0])
        return short - _MEASURED[0] * token, token

    def _bytes_of(self, tokens: int) -> int:
        self.prefill([[0] * tokens])
        return self.waiting_bytes()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits of hidden states."""
        how = row_layout.head(self.model.config.to_dict())
        z = self.model.get_output_embeddings()(hidden).float() * how.scale
        return z if how.cap is None else torch.tanh(z / how.cap) * how.cap

    def _record(self, sequences: int) -> list[np.ndarray]:
        """Experts of all places of the last forward."""
        if self.routers is None:
            return []
        chosen = self.routers.chosen
        told = (
            chosen.view(sequences, -1, *chosen.shape[1:])
            .cpu()
            .numpy()
            .astype(self.routers.sizes.dtype)
        )
        return list(told)


class CachedRows(Forwards):
    """All rows are one batch over `RowCache`."""

    def __init__(self, model: Any, routers: Routers | None) -> None:
        super().__init__(model, routers)
        self._cache = RowCache(self.device)

    def prefill(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        longest = int(lengths.max())
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device)
        kept, where = (lengths - 1).unique(return_inverse=True)
        self._cache.begin_prefill()
        out = self.model(
            input_ids=ids,
            attention_mask=self._causal(longest),
            position_ids=torch.arange(longest, device=self.device).expand(len(sequences), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=kept,
        )
        self.told = self._record(len(sequences))
        found: torch.Tensor = out.logits[torch.arange(len(sequences), device=self.device), where]
        return found

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

    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        places = torch.tensor(cached, device=self.device)
        length = int(places.max()) + 1
        seen = torch.arange(length, device=self.device) <= places.unsqueeze(1)
        self._cache.begin_decode(places, length, only)
        out = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=seen[:, None, None],
            position_ids=places.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        )
        self.told = self._record(len(tokens))
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def drop(self, row: int, last_length: int) -> None:
        self._cache.drop(row, last_length)

    def waiting_bytes(self) -> int:
        return _bytes(self._cache.waiting)

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        cache = RowCache(self.device)
        count = len(tokens)
        cache.begin_prefill()
        out = body_of(self.model)(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            attention_mask=self._causal(count),
            position_ids=torch.arange(count, device=self.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        found: torch.Tensor = out.last_hidden_state[0]
        return found

    def _causal(self, count: int) -> torch.Tensor:
        return torch.ones(count, count, dtype=torch.bool, device=self.device).tril()[None, None]


@dataclass(eq=False)
class _Block:
    """Rows of one length in one cache of the model's; a row that has left is None until the cache
    is cut.
    """

    cache: Any
    rows: list[int | None]


class OwnCaches(Forwards):
    """Rows of equal length advance together, in the cache that the model makes.  `alone`: each row
    for itself.
    """

    def __init__(self, model: Any, routers: Routers | None, *, alone: bool) -> None:
        super().__init__(model, routers)
        self._alone = alone
        self._fresh: list[tuple[list[int], Any]] = []  # sequences of a prefill, and their cache
        self._blocks: list[_Block] = []
        self._rows = 0

    def prefill(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        told: dict[int, np.ndarray] = {}
        self._fresh = []
        for length in dict.fromkeys(map(len, sequences)):
            mine = [i for i, s in enumerate(sequences) if len(s) == length]
            out = self._forward([list(sequences[i]) for i in mine], None, 0)
            self._fresh.append((mine, out.past_key_values))
            found |= dict(zip(mine, out.logits[:, -1], strict=True))
            told |= dict(zip(mine, self._record(len(mine)), strict=False))
        self.told = [told[i] for i in sorted(told)]
        return torch.stack([found[i] for i in range(len(sequences))])

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
        for block in self._blocks:  # these are computed anew
            block.rows = [None if row in into else row for row in block.rows]
        for mine, cache in self._fresh:
            places = [
                (mine.index(s), row) for s, row in zip(source, into, strict=True) if s in mine
            ]
            for part in [[place] for place in places] if self._alone else [places]:
                own = copy.deepcopy(cache) if self._alone else cache
                own.reorder_cache(torch.tensor([at for at, _ in part], device=self.device))
                self._blocks.append(_Block(own, [row for _, row in part]))
        self._fresh = []

    def decode(
        self, tokens: Sequence[int], cached: Sequence[int], only: int | None = None
    ) -> torch.Tensor:
        self._cut()
        found: dict[int, torch.Tensor] = {}
        told: dict[int, np.ndarray] = {}
        for block in self._blocks:
            rows = [row for row in block.rows if row is not None]
            if only is not None and only not in rows:
                continue
            at = [0] if only is not None else rows  # where the rows stand in what was given
            out = self._forward([[tokens[i]] for i in at], block.cache, cached[at[0]])
            found |= dict(zip(rows, out.logits[:, -1], strict=True))
            told |= dict(zip(rows, self._record(len(rows)), strict=False))
        self.told = [told[row] for row in sorted(told)]
        return torch.stack([found[row] for row in sorted(found)])

    def drop(self, row: int, last_length: int) -> None:
        self._rows -= 1
        for block in self._blocks:
            block.rows = [None if r == row else row if r == self._rows else r for r in block.rows]

    def waiting_bytes(self) -> int:
        return _bytes([vars(layer) for _, cache in self._fresh for layer in cache.layers])

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self.device)
        found: torch.Tensor = body_of(self.model)(input_ids=ids, use_cache=False).last_hidden_state[
            0
        ]
        return found

    def _forward(self, ids: list[list[int]], cache: Any, cached: int) -> Any:
        places = torch.arange(cached, cached + len(ids[0]), device=self.device)
        return self.model(
            input_ids=torch.tensor(ids, device=self.device),
            position_ids=places.expand(len(ids), -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _cut(self) -> None:
        """Take rows that have left out of the caches."""
        self._blocks = [
            block for block in self._blocks if any(row is not None for row in block.rows)
        ]
        for block in self._blocks:
            if None in block.rows:
                stay = [i for i, row in enumerate(block.rows) if row is not None]
                block.cache.reorder_cache(torch.tensor(stay, device=self.device))
                block.rows = [block.rows[i] for i in stay]


def _bytes(held: object) -> int:
    """Of all tensors in `held`."""
    if isinstance(held, torch.Tensor):
        return held.nbytes
    inner = (
        held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    )
    return sum(map(_bytes, inner))


def body_of(lm: Any) -> Any:
    """What gives hidden states; some models have it under another name than their own
    `base_model_prefix`.
    """
    children = dict(lm.named_children())
    return children.get(lm.base_model_prefix) or children["model"]


def attention_for(config: Any) -> dict[str, str]:
    """Arguments for loading the model of `config` with the attention that its layers need here."""
    full = FULL.issuperset(row_layout.layer_types(config.to_dict()))
    return {"attn_implementation": kvcache.ATTENTION} if full else {}


def make(model: Any, routers: Routers | None, *, alone: bool) -> Forwards:
    """For `model`, which was loaded with `attention_for`."""
    if model.config._attn_implementation == kvcache.ATTENTION:
        return CachedRows(model, routers)
    return OwnCaches(model, routers, alone=alone)


@torch.inference_mode()
def prove(model: Any, name: str) -> None:
    """Compare rows that come and go with forwards without a cache.

    Raises SetupError where they differ by more than EXACT, in shorter types by more than the noise
    of this model allows.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        found, noise = _differences(model, sampled=dtype != "float32")
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
    if not found.within(limit):
        raise SetupError(
            f"{name}: {type(model).__name__} with a cache gives log-probs that differ by {found} "
            f"from those without one, allowed "
            f"are {limit}; its rows cannot be computed here.  Use vllm"
        )


def _differences(model: Any, *, sampled: bool) -> tuple[Difference, Difference]:
    """Of all places of a few random texts, one of which leaves before the others: with a cache, and
    with other roundings.

    Of each place the largest difference of a token's log-prob, or the mean over those that would be
    sampled there: in shorter types logits of 16 and more are 0.125 apart, and with 50,000 tokens
    some always meet the worst rounding.
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
    found = []
    forwards.keep(
        range(len(texts)), begins, range(len(texts)), rows=len(texts), capacity=max(map(len, texts))
    )
    there = list(range(len(texts)))
    while True:
        for row, text in enumerate(there):
            found.append(_apart(_logprobs(logits[row]), right[text][at[text] - 1], sampled=sampled))
        for text in [t for t in there if at[t] == len(texts[t])]:
            row = there.index(text)
            last = there[-1]
            there[row] = last
            there.pop()
            forwards.drop(row, at[last])
        if not there:
            return Difference.of(torch.stack(found).cpu().numpy()), Difference.of(
                noise.cpu().numpy()
            )
        logits = forwards.decode([texts[t][at[t]] for t in there], [at[t] for t in there])
        for t in there:
            at[t] += 1


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)


def _apart(found: torch.Tensor, right: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    """Of log-probs [..., V], the largest difference; `sampled`: the mean over tokens that `right`
    draws.
    """
    apart = (found - right).abs()
    return (right.exp() * apart).sum(-1) if sampled else apart.amax(-1)
