"""Numbers of a row's tokens, as the ledger keeps them: log-probs by the engine that sampled and the
trainer that learnt, advantages.

Knows experiences; not models or tables.  Numbers are written with 9 digits, which tell one float32
from every other.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec import Struct

from rft.types.experience import Experience


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Of one row.  `pairs`, JSON: [engine, trainer, advantage] for each token from `token_start` to
    the row's end.

    null stands for a token that was not trained, and for a number that is not there or not finite.
    """

    id: str
    token_start: int
    pairs: str


class TrainerTokens(Struct, frozen=True):
    """What the trainer had for the tokens of one row: float32 [T] each, 0 where none was trained,
    NaN where it is not known.
    """

    logprobs: np.ndarray
    advantages: np.ndarray


def beside(
    row: Experience, trainer: np.ndarray, advantages: np.ndarray | None = None
) -> TokenLogprobs:
    """`trainer`, `advantages`: float32 [L], of the row's trained tokens; None: not known."""
    starts = [span.start for span in row.version_spans if span.end > span.start]
    start = min([*starts, int(row.loss_mask.argmax())])
    found = ["null"] * (row.num_tokens - start)
    trained = np.flatnonzero(row.loss_mask)
    nothing = [math.nan] * len(trained)
    engine = row.logprobs[trained].tolist() if row.has_logprobs else nothing
    taught = nothing if advantages is None else advantages.tolist()
    for at, *numbers in zip(trained.tolist(), engine, trainer.tolist(), taught, strict=True):
        found[at - start] = f"[{','.join(map(_number, numbers))}]"
    return TokenLogprobs(str(row.id), start, f"[{','.join(found)}]")


def of_trainer(token_start: int, pairs: str) -> TrainerTokens:
    read = _PAIRS.decode(pairs)

    def column(at: int) -> np.ndarray:
        made = [
            0.0 if p is None else math.nan if len(p) <= at or p[at] is None else p[at] for p in read
        ]
        return np.array([0.0] * token_start + made, np.float32)

    return TrainerTokens(column(1), column(2))


def encode(rows: list[TokenLogprobs]) -> bytes:
    """One frame for rows of a step."""
    return msgspec.msgpack.encode(rows)


def decode(frame: bytes) -> list[TokenLogprobs]:
    """Raises msgspec.MsgspecError for a foreign frame."""
    return _ROWS.decode(frame)


def _number(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else "null"


_PAIRS = msgspec.json.Decoder(list[list[float | None] | None])
_ROWS = msgspec.msgpack.Decoder(list[TokenLogprobs])
