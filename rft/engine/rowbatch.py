"""The batch of rows that a Hugging Face model generates together, for `transformers`: rows start,
get one token per step, and end.

Depends on no event loop; all calls come from one thread.  Each distinct prompt is computed once.
Invariant: up to rounding, a row does not depend on the other rows.

Shapes: N rows or sequences, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rft.engine import forwards
from rft.engine.routers import Routers
from rft.engine.sampling import RowState
from rft.engine.settings import EngineSettings
from rft.images.processor import Sight
from rft.types.completion import Completion, VersionSpan, top_tokens
from rft.types.ids import Version
from rft.types.images import ImagePlace
from rft.types.ports import GenerateRequest

PREFILL_TOKENS = 4096  # padded tokens of one forward
KV_CACHE_BYTES = 2 << 30
SCORE_BYTES = 256 << 20  # of the logits computed at once when scoring tokens


Prompt = tuple[tuple[int, ...], tuple[str, ...]]


@dataclass(eq=False)
class BatchJob:
    """A request in progress; `done` collects the completions of its rows."""

    request: GenerateRequest
    prompt: list[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    places: tuple[ImagePlace, ...] = ()  # of the prompt's images
    sight: Sight = ()
    done: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class BatchRow:
    """A completion in progress."""

    job: BatchJob
    index: int
    state: RowState
    limit: int  # maximum number of generated tokens
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routed: list[np.ndarray] | None = (
        # experts of the cached positions, consecutive arrays [n, layers, experts]
        None
    )

    @property
    def prompt(self) -> Prompt:
        """The prompt's tokens, and what its images are."""
        return tuple(self.state.prompt), tuple(shown.image.hash for shown in self.job.sight)

    @property
    def experts(self) -> np.ndarray | None:
        return None if self.routed is None else np.concatenate(self.routed)

    @property
    def cached(self) -> int:
        """Tokens in the cache: all except the last generated token, which is the next input."""
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
        """`counted`: dictionary in which computed tokens are added up."""
        self.model = model
        self.settings = settings
        self._counted = counted
        self.rows: list[BatchRow] = []
        self.stale = False  # the cache belongs to older weights and must be recomputed
        self.device: torch.device = next(model.parameters()).device
        routers = None
        if settings.router_replay:
            routers = Routers(model)
            routers.recording = True
        self._forwards = forwards.make(model, routers, alone=settings.deterministic)
        self._state_bytes, self._token_bytes = self._forwards.row_bytes()

    @property
    def stale_tokens(self) -> int:
        """Tokens whose keys and values must be recomputed."""
        return sum(row.cached for row in self.rows) if self.stale else 0

    def fits(self, more: Sequence[BatchRow]) -> bool:
        """Return whether `more` rows fit into the sequence limit and the cache bytes; one row
        always fits.
        """
        rows = [*self.rows, *more]
        if len(rows) == 1:
            return True
        limit = self.settings.kv_cache_bytes or KV_CACHE_BYTES
        row = self._state_bytes + max(r.need for r in rows) * self._token_bytes
        return len(rows) <= self.settings.max_num_seqs and len(rows) * row <= limit

    def first_prompts(self, new: Sequence[BatchRow]) -> dict[Prompt, Sight]:
        """Return the prompts of `new` that are computed in one forward, with their images."""
        prompts = {row.prompt: row.job.sight for row in new}
        count = self._together([len(tokens) for tokens, _ in prompts])
        return dict(list(prompts.items())[:count])

    def _together(self, lengths: Sequence[int]) -> int:
        """Return how many sequences of these lengths, from the first, fit into one forward."""
        count = 1
        longest = lengths[0]
        while (
            not self.settings.deterministic
            and count < len(lengths)
            and max(longest, lengths[count]) * (count + 1) <= PREFILL_TOKENS
        ):
            longest = max(longest, lengths[count])
            count = count + 1
        return count

    def prefill(self, batch: list[BatchRow], prompts: dict[Prompt, Sight]) -> torch.Tensor:
        """Add `batch` to the rows; return the logits [N, V] of each row's first token."""
        number = {prompt: i for i, prompt in enumerate(prompts)}
        source = [number[row.prompt] for row in batch]
        sequences = [tokens for tokens, _ in prompts]
        logits = self._forwards.prefill(sequences, list(prompts.values()))
        if experts := self._forwards.experts:
            for row, i in zip(batch, source, strict=True):
                row.routed = [experts[i][: len(row.state.prompt)]]
        self._counted["prefilled_tokens"] += sum(map(len, sequences))
        first = len(self.rows)
        self.rows += batch
        capacity = max(row.need for row in self.rows)
        into = list(range(first, len(self.rows)))
        self._forwards.keep(
            source,
            [len(row.state.prompt) for row in batch],
            into,
            rows=len(self.rows),
            capacity=capacity,
        )
        return logits[source]

    def recompute(self) -> None:
        """Recompute keys and values of all rows with the current weights."""
        self.stale = False
        rows = self.rows
        at = 0
        while at < len(rows):
            lengths = [row.cached for row in rows[at:]]
            count = self._together(lengths)
            self._forwards.prefill(
                [
                    [*row.state.prompt, *row.state.written][: row.cached]
                    for row in rows[at : at + count]
                ],
                [row.job.sight for row in rows[at : at + count]],
            )
            for row, experts in zip(
                rows[at : at + count], self._forwards.experts or [], strict=False
            ):
                row.routed = [experts[: row.cached]]
            into = list(range(at, at + count))
            capacity = max(row.need for row in rows)
            self._forwards.keep(
                list(range(count)), lengths[:count], into, rows=len(rows), capacity=capacity
            )
            self._counted["recomputed_tokens"] += sum(lengths[:count])
            at += count

    def decode(self) -> torch.Tensor:
        """Return logits [N, V] of the next token of every row."""
        if self.settings.deterministic:
            return torch.cat([self._next([row], i) for i, row in enumerate(self.rows)])
        return self._next(self.rows)

    def remove(self, ended: Sequence[BatchRow]) -> None:
        """Remove ended rows; the last row moves into each gap."""
        for row in ended:
            i = self.rows.index(row)
            last = self.rows.pop()
            if last is not row:
                self.rows[i] = last
            self._forwards.drop(i, last.cached)

    def score(
        self,
        tokens: list[int],
        first: int,
        temperature: float,
        top: int,
        known: int,
        sight: Sight = (),
    ) -> dict[str, np.ndarray]:
        """Score `tokens` from `first` on, a few positions at a time.

        `top`: return so many most likely tokens of the first `known` entries, too.
        """
        hidden = self._forwards.hidden(tokens, sight)[first - 1 : -1]
        targets = torch.tensor(tokens[first:], device=hidden.device)[:, None]
        chunk = max(1, SCORE_BYTES // (4 * len(self.model.get_output_embeddings().weight)))
        out = np.empty(len(hidden), np.float32)
        ids = np.empty((len(hidden), top), np.int32)
        values = np.empty((len(hidden), top + 1), np.float32)
        for at in range(0, len(out), chunk):
            part = slice(at, at + chunk)
            logits = self._forwards.logits(hidden[part]) / (temperature or 1.0)
            logprobs = logits.log_softmax(-1)
            out[part] = logprobs.gather(1, targets[part])[:, 0].cpu().numpy()
            if top:
                found = logprobs[:, :known].topk(top)
                others = logprobs.scatter(1, found.indices, -torch.inf).logsumexp(1, keepdim=True)
                ids[part] = found.indices.cpu().numpy()
                values[part] = torch.cat([found.values, others], 1).cpu().numpy()
        if not top:
            return {"logprobs": out}
        top_ids, top_logprobs = top_tokens(ids, values[:, :-1], values[:, -1])
        return {"logprobs": out, "top_ids": top_ids, "top_logprobs": top_logprobs}

    def _next(self, rows: list[BatchRow], only: int | None = None) -> torch.Tensor:
        """Return logits [N, V] after the last token of `rows`: all rows, or only row number `only`."""
        logits = self._forwards.decode(
            [row.state.written[-1] for row in rows], [row.cached for row in rows], only
        )
        for row, experts in zip(rows, self._forwards.experts or [], strict=False):
            assert row.routed is not None, "told since its prompt"
            row.routed.append(experts)
        return logits
