"""Log-probs (engine, trainer) and advantages of a row's tokens, as the ledger stores them.

Depends on experiences, not on models or tables.  Numbers have 9 digits, enough for every float32.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec import Struct

from rft.types.experience import Experience


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """One row.

    `pairs`, JSON: [engine, trainer, advantage] of each token from `token_start` on.

    null: a token that was not trained, or a number that is missing or not finite.
    """

    id: str
    token_start: int
    pairs: str


class TrainerTokens(Struct, frozen=True):
    """The trainer's numbers of one row, float32 [T]: 0 if not trained, NaN if unknown."""

    logprobs: np.ndarray
    advantages: np.ndarray


def of_row(
    row: Experience, trainer: np.ndarray, advantages: np.ndarray | None = None
) -> TokenLogprobs:
    """Join the row's log-probs with the trainer's: float32 [L], L trained tokens."""
    starts = [span.start for span in row.version_spans if span.end > span.start]
    start = min([*starts, int(row.loss_mask.argmax())])
    entries = ["null"] * (row.num_tokens - start)
    trained = np.flatnonzero(row.loss_mask)
    nothing = [math.nan] * len(trained)
    engine = row.logprobs[trained].tolist() if row.has_logprobs else nothing
    trained_advantages = nothing if advantages is None else advantages.tolist()
    for at, *numbers in zip(
        trained.tolist(), engine, trainer.tolist(), trained_advantages, strict=True
    ):
        entries[at - start] = f"[{','.join(map(_number, numbers))}]"
    return TokenLogprobs(str(row.id), start, f"[{','.join(entries)}]")


def of_trainer(token_start: int, pairs: str) -> TrainerTokens:
    """Return the trainer's columns of `TokenLogprobs.pairs`."""
    decoded = _PAIRS.decode(pairs)

    def column(at: int) -> np.ndarray:
        values = [
            0.0 if p is None else math.nan if len(p) <= at or p[at] is None else p[at]
            for p in decoded
        ]
        return np.array([0.0] * token_start + values, np.float32)

    return TrainerTokens(column(1), column(2))


def encode(rows: list[TokenLogprobs]) -> bytes:
    """Encode the rows of a step as one frame."""
    return msgspec.msgpack.encode(rows)


def decode(frame: bytes) -> list[TokenLogprobs]:
    """Decode a frame.  Raises msgspec.MsgspecError for a foreign frame."""
    return _ROWS.decode(frame)


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.9g}"
    return "null"


_PAIRS = msgspec.json.Decoder(list[list[float | None] | None])
_ROWS = msgspec.msgpack.Decoder(list[TokenLogprobs])
