"""Log-probs of a row's tokens by the engine that sampled them and by the trainer that learnt from them, as the ledger keeps them.

Knows experiences; not models or tables.  Numbers are written with 9 digits, which tell one float32 from every other.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec import Struct

from rft.types.experience import Experience


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Of one row.  `pairs`, JSON: [engine, trainer] for each token from `token_start` to the row's end.

    null stands for a token that was not trained, and for a number that is not there or not finite.
    """

    id: str
    token_start: int
    pairs: str


def beside(row: Experience, trainer: np.ndarray) -> TokenLogprobs:
    """`trainer`: float32 [L], of the row's trained tokens."""
    starts = [span.start for span in row.version_spans if span.end > span.start]
    start = min([*starts, int(row.loss_mask.argmax())])
    found = ["null"] * (row.num_tokens - start)
    trained = np.flatnonzero(row.loss_mask)
    engine = row.logprobs[trained].tolist() if row.has_logprobs else [math.nan] * len(trained)
    for at, theirs, ours in zip(trained.tolist(), engine, trainer.tolist(), strict=True):
        found[at - start] = f"[{_number(theirs)},{_number(ours)}]"
    return TokenLogprobs(str(row.id), start, f"[{','.join(found)}]")


def of_trainer(token_start: int, pairs: str) -> np.ndarray:
    """float32 [T]: the trainer's log-probs of all tokens; 0 where none was trained, NaN where it is not known."""
    read = _PAIRS.decode(pairs)
    made = [0.0 if pair is None else math.nan if pair[1] is None else pair[1] for pair in read]
    return np.array([0.0] * token_start + made, np.float32)


def encode(rows: list[TokenLogprobs]) -> bytes:
    """One frame for rows of a step."""
    return msgspec.msgpack.encode(rows)


def decode(frame: bytes) -> list[TokenLogprobs]:
    """Raises msgspec.MsgspecError for a foreign frame."""
    return _ROWS.decode(frame)


def _number(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else "null"


_PAIRS = msgspec.json.Decoder(list[tuple[float | None, float | None] | None])
_ROWS = msgspec.msgpack.Decoder(list[TokenLogprobs])
