"""The completions that a Hugging Face model writes together: rows that come, get a token each step, and leave.  For `transformers`.

Knows no event loop and no thread; all calls come from one thread.  Prompts are computed once however many rows have them.  Invariant: which
rows are beside a row changes nothing for it but rounding.

Shapes: N rows or sequences, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rft.engine.kvcache import RowCache
from rft.engine.routers import Routers
from rft.engine.sampling import RowState
from rft.engine.settings import EngineSettings
from rft.types.completion import Completion, VersionSpan
from rft.types.ids import Version
from rft.types.ports import GenerateRequest

PREFILL_TOKENS = 4096  # of one forward; padded
KV_CACHE_BYTES = 2 << 30
SCORE_BYTES = 256 << 20  # of the logits that are looked at together when given tokens are scored


@dataclass(eq=False)
class BatchJob:
    """A request under way; its rows' completions are gathered in `done`."""

    request: GenerateRequest
    prompt: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    done: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class BatchRow:
    """One completion being written."""

    job: BatchJob
    index: int
    state: RowState
    limit: int  # most tokens it may write
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routed: list[np.ndarray] | None = (
        None  # experts of the positions that are in the cache, [n, layers, experts] each, one behind the other
    )

    @property
    def experts(self) -> np.ndarray | None:
        return None if self.routed is None else np.concatenate(self.routed)

    @property
    def cached(self) -> int:
        """Tokens that are in the cache: all but the last one written, which is the next input."""
        return len(self.state.prompt) + len(self.state.written) - 1

    @property
    def need(self) -> int:
        return len(self.state.prompt) + self.limit

    def write(self, token: int, logprob: float, version: Version) -> None:
        at = len(self.state.written)
        self.state.written.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, at + 1)
        else:
            self.spans.append(VersionSpan(version, at, at + 1))


class RowBatch:
    """The rows, their cache, and the model's forward passes over them."""

    def __init__(self, model: Any, settings: EngineSettings, counted: dict[str, int]) -> None:
        """`counted`: where tokens that were computed are added up."""
        self.model, self.settings, self._counted = model, settings, counted
        self.rows: list[BatchRow] = []
        self.stale = False  # the cache was made by older weights and has to be made anew
        self.device: torch.device = next(model.parameters()).device
        self._cache = RowCache(self.device)
        self._routers: Routers | None = None
        if settings.router_replay:
            self._routers = Routers(model)
            self._routers.recording = True

    @property
    def stale_tokens(self) -> int:
        """Tokens whose keys and values are to be computed again."""
        return sum(row.cached for row in self.rows) if self.stale else 0

    def fits(self, more: Sequence[BatchRow]) -> bool:
        """Whether the cache may hold `more` rows, too: the number of sequences and its bytes are bounded; one row always fits."""
        rows = [*self.rows, *more]
        if len(rows) == 1:
            return True
        limit = self.settings.kv_cache_bytes or KV_CACHE_BYTES
        return (
            len(rows) <= self.settings.max_num_seqs and len(rows) * max(r.need for r in rows) * _token_bytes(self.model) <= limit
        )

    def first_prompts(self, new: Sequence[BatchRow]) -> list[tuple[int, ...]]:
        """The prompts of `new` that are computed in one forward."""
        prompts = list({tuple(row.state.prompt): None for row in new})
        return prompts[: self._together([len(p) for p in prompts])]

    def _together(self, lengths: Sequence[int]) -> int:
        """How many sequences of these lengths, from the first, one forward takes."""
        count, longest = 1, lengths[0]
        while (
            not self.settings.deterministic
            and count < len(lengths)
            and max(longest, lengths[count]) * (count + 1) <= PREFILL_TOKENS
        ):
            longest, count = max(longest, lengths[count]), count + 1
        return count

    def prefill(self, batch: list[BatchRow], prompts: list[tuple[int, ...]]) -> torch.Tensor:
        """Logits [N, V] of the first token of each row of `batch`, which is among the rows from now on."""
        number = {prompt: i for i, prompt in enumerate(prompts)}
        source = [number[tuple(row.state.prompt)] for row in batch]
        logits = self._forward([list(p) for p in prompts])
        if (told := self._told(len(prompts))) is not None:
            for row, i in zip(batch, source, strict=True):
                row.routed = [told[i, : len(row.state.prompt)]]
        self._counted["prefilled_tokens"] += sum(map(len, prompts))
        first = len(self.rows)
        self.rows += batch
        capacity = max(row.need for row in self.rows)
        into = list(range(first, len(self.rows)))
        self._cache.keep(source, [len(row.state.prompt) for row in batch], into, rows=len(self.rows), capacity=capacity)
        return logits[source]

    def recompute(self) -> None:
        """Keys and values of all rows anew, under the weights there are now."""
        self.stale = False
        rows, at = self.rows, 0
        while at < len(rows):
            lengths = [row.cached for row in rows[at:]]
            count = self._together(lengths)
            self._forward([[*row.state.prompt, *row.state.written][: row.cached] for row in rows[at : at + count]])
            if (told := self._told(count)) is not None:
                for row, experts in zip(rows[at : at + count], told, strict=True):
                    row.routed = [experts[: row.cached]]
            into, capacity = list(range(at, at + count)), max(row.need for row in rows)
            self._cache.keep(list(range(count)), lengths[:count], into, rows=len(rows), capacity=capacity)
            self._counted["recomputed_tokens"] += sum(lengths[:count])
            at += count

    def decode(self) -> torch.Tensor:
        """Logits [N, V] of the next token of every row."""
        if self.settings.deterministic:
            return torch.cat([self._next([row], i) for i, row in enumerate(self.rows)])
        return self._next(self.rows)

    def remove(self, ended: Sequence[BatchRow]) -> None:
        """Rows that ended leave; the last row moves into the gap."""
        for row in ended:
            i = self.rows.index(row)
            last = self.rows.pop()
            if last is not row:
                self.rows[i] = last
            self._cache.drop(i, last.cached)

    def score(self, tokens: list[int], first: int, temperature: float) -> np.ndarray:
        """float32 [len(tokens) - first]; the logits of a few positions at a time."""
        cache = RowCache(self.device)
        cache.begin_prefill()
        ids, count = torch.tensor([tokens], device=self.device), len(tokens)
        hidden = self.model.base_model(
            input_ids=ids,
            attention_mask=torch.ones(count, count, dtype=torch.bool, device=self.device).tril()[None, None],
            position_ids=torch.arange(count, device=self.device)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, first - 1 : -1]
        head, chunk = self.model.get_output_embeddings(), max(1, SCORE_BYTES // (4 * self.model.config.vocab_size))
        out = np.empty(count - first, np.float32)
        for at in range(0, len(out), chunk):
            logits = head(hidden[at : at + chunk]).float() / (temperature or 1.0)
            wanted = ids[0, first + at : first + at + len(logits), None]
            out[at : at + chunk] = logits.log_softmax(-1).gather(1, wanted)[:, 0].cpu().numpy()
        return out

    def _forward(self, sequences: list[list[int]]) -> torch.Tensor:
        """Logits [N, V] after the last token of each of N sequences; their keys wait in the cache for `keep`."""
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        longest = int(lengths.max())
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=self.device)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self.device).tril()[None, None]
        kept, where = (lengths - 1).unique(return_inverse=True)
        self._cache.begin_prefill()
        out = self.model(
            input_ids=ids,
            attention_mask=causal,
            position_ids=torch.arange(longest, device=self.device).expand(len(sequences), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=kept,
        )
        result: torch.Tensor = out.logits[torch.arange(len(sequences), device=self.device), where]
        return result

    def _next(self, rows: list[BatchRow], only: int | None = None) -> torch.Tensor:
        """Logits [N, V] after the last token of each of `rows`: all there are, or the one at place `only`."""
        cached = torch.tensor([row.cached for row in rows], device=self.device)
        length = int(cached.max()) + 1
        seen = torch.arange(length, device=self.device) <= cached.unsqueeze(1)
        self._cache.begin_decode(cached, length, only)
        out = self.model(
            input_ids=torch.tensor([[row.state.written[-1]] for row in rows], device=self.device),
            attention_mask=seen[:, None, None],
            position_ids=cached.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        )
        if (told := self._told(len(rows))) is not None:
            for row, experts in zip(rows, told, strict=True):
                assert row.routed is not None, "told since its prompt"
                row.routed.append(experts)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _told(self, sequences: int) -> np.ndarray | None:
        """Experts of all positions of the last forward: [sequences, width, layers, experts]."""
        if self._routers is None:
            return None
        chosen = self._routers.chosen
        told: np.ndarray = chosen.view(sequences, -1, *chosen.shape[1:]).cpu().numpy().astype(self._routers.sizes.dtype)
        return told


def _token_bytes(model: Any) -> int:
    """Bytes of one token in the cache: keys and values of all layers."""
    c = model.config
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return int(2 * c.num_hidden_layers * c.num_key_value_heads * size * model.dtype.itemsize)
