"""The completions that a Hugging Face model writes together: rows that come, get a token each step,
and leave.  For `transformers`.

Knows no event loop and no thread; all calls come from one thread.  Prompts are computed once
however many rows have them.  Invariant: which rows are beside a row changes nothing for it but
rounding.

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
        # experts of the positions that are in the cache, [n, layers, experts] each, one behind the
        # other
        None
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
        self.model = model
        self.settings = settings
        self._counted = counted
        self.rows: list[BatchRow] = []
        self.stale = False  # the cache was made by older weights and has to be made anew
        self.device: torch.device = next(model.parameters()).device
        routers = None
        if settings.router_replay:
            routers = Routers(model)
            routers.recording = True
        self._forwards = forwards.make(model, routers, alone=settings.deterministic)
        self._state_bytes, self._token_bytes = self._forwards.row_bytes()

    @property
    def stale_tokens(self) -> int:
        """Tokens whose keys and values are to be computed again."""
        return sum(row.cached for row in self.rows) if self.stale else 0

    def fits(self, more: Sequence[BatchRow]) -> bool:
        """Whether the cache may hold `more` rows, too: the number of sequences and its bytes are
        bounded; one row always fits.
        """
        rows = [*self.rows, *more]
        if len(rows) == 1:
            return True
        limit = self.settings.kv_cache_bytes or KV_CACHE_BYTES
        row = self._state_bytes + max(r.need for r in rows) * self._token_bytes
        return len(rows) <= self.settings.max_num_seqs and len(rows) * row <= limit

    def first_prompts(self, new: Sequence[BatchRow]) -> list[tuple[int, ...]]:
        """The prompts of `new` that are computed in one forward."""
        prompts = list({tuple(row.state.prompt): None for row in new})
        return prompts[: self._together([len(p) for p in prompts])]

    def _together(self, lengths: Sequence[int]) -> int:
        """How many sequences of these lengths, from the first, one forward takes."""
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

    def prefill(self, batch: list[BatchRow], prompts: list[tuple[int, ...]]) -> torch.Tensor:
        """Logits [N, V] of the first token of each row of `batch`, which is among the rows from now
        on.
        """
        number = {prompt: i for i, prompt in enumerate(prompts)}
        source = [number[tuple(row.state.prompt)] for row in batch]
        logits = self._forwards.prefill(prompts)
        if told := self._forwards.told:
            for row, i in zip(batch, source, strict=True):
                row.routed = [told[i][: len(row.state.prompt)]]
        self._counted["prefilled_tokens"] += sum(map(len, prompts))
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
        """Keys and values of all rows anew, under the weights there are now."""
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
                ]
            )
            for row, experts in zip(rows[at : at + count], self._forwards.told or [], strict=False):
                row.routed = [experts[: row.cached]]
            into = list(range(at, at + count))
            capacity = max(row.need for row in rows)
            self._forwards.keep(
                list(range(count)), lengths[:count], into, rows=len(rows), capacity=capacity
            )
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
            self._forwards.drop(i, last.cached)

    def score(self, tokens: list[int], first: int, temperature: float) -> np.ndarray:
        """float32 [len(tokens) - first]; the logits of a few positions at a time."""
        hidden = self._forwards.hidden(tokens)[first - 1 : -1]
        wanted = torch.tensor(tokens[first:], device=hidden.device)[:, None]
        chunk = max(1, SCORE_BYTES // (4 * len(self.model.get_output_embeddings().weight)))
        out = np.empty(len(hidden), np.float32)
        for at in range(0, len(out), chunk):
            logits = self._forwards.logits(hidden[at : at + chunk]) / (temperature or 1.0)
            out[at : at + chunk] = (
                logits.log_softmax(-1).gather(1, wanted[at : at + chunk])[:, 0].cpu().numpy()
            )
        return out

    def _next(self, rows: list[BatchRow], only: int | None = None) -> torch.Tensor:
        """Logits [N, V] after the last token of each of `rows`: all there are, or the one at place
        `only`.
        """
        logits = self._forwards.decode(
            [row.state.written[-1] for row in rows], [row.cached for row in rows], only
        )
        for row, experts in zip(rows, self._forwards.told or [], strict=False):
            assert row.routed is not None, "told since its prompt"
            row.routed.append(experts)
        return logits
