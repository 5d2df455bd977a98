"""Give the log-probs of a teacher's own tokens to the policy's tokens of the same text.

A span is the text between two places where a token of both tokenizers ends.  Depends on tokenizers,
on no model.  Invariant: the log-probs that the policy's tokens of a span get sum up to the teacher's
of that span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from rft.engine.chat import Chat, special_tokens
from rft.types.completion import TokenScores
from rft.types.ports import ScoreRow

_BROKEN = "\ufffd"  # decoded from a part of a character's bytes
Spans = list[tuple[int, int]]  # number of the policy's and of the teacher's tokens up to each end


class TextSpans:
    """Reads answers in the tokens of `policy`, a tokenizer, for the teacher with this `chat`."""

    def __init__(self, chat: Chat, policy: Any) -> None:
        self._chat = chat
        self._policy = policy
        self._special = special_tokens(policy)

    def read(self, row: ScoreRow) -> tuple[ScoreRow, Spans]:
        """Return the row in the teacher's tokens.  The end of a turn is the teacher's.  Raises
        ValueError for a row that has no such form.
        """
        name = self._chat.settings.name
        prompt = row.prompt or row.chat
        if prompt is None or prompt.images or row.places:
            raise ValueError(
                f"{name}: alignment: text needs calls with messages, and without images"
            )
        if row.top or row.logprobs is None:
            raise ValueError(
                f"{name}: alignment: text gives one log-prob a token to tokens with the policy's "
                f"own; most likely tokens need the policy's tokenizer"
            )
        ids = row.tokens[row.prompt_length :].tolist()
        ended = bool(ids) and ids[-1] in self._special
        text, ours = _ends(self._policy, ids[:-1] if ended else ids)
        tokens = self._chat.answer_tokens(text) if text else []
        again, theirs = _ends(self._chat.tokenizer, tokens)
        if again != text:
            raise ValueError(
                f"{name}: its tokenizer reads the answer {text!r:.80} as {again!r:.80}"
            )
        spans = common(ours, theirs)
        if ours and not spans:
            raise ValueError(f"{name}: an answer of {len(ours)} tokens has no text to score")
        if ended:
            end = self._chat.end_of_turn
            if end is None:
                raise ValueError(f"{name}: neither its template nor its tokenizer ends an answer")
            tokens = [*tokens, end]
            spans.append((len(ids), len(tokens)))
        read = replace(
            row, tokens=np.array(tokens, np.int32), prompt_length=0, prompt=prompt, chat=None
        )
        return read, spans


def common(ours: Sequence[int], theirs: Sequence[int]) -> Spans:
    """Return the spans of two tokenisations of a text, from the `_ends` of their tokens."""
    counts = [{end: i for i, end in enumerate(ends, 1) if end > 0} for ends in (ours, theirs)]
    return [(counts[0][end], counts[1][end]) for end in sorted(counts[0].keys() & counts[1].keys())]


def divided(spans: Spans, teacher: np.ndarray, policy: np.ndarray) -> np.ndarray:
    """Return the teacher's log-probs of the policy's tokens, float32 [R].

    With T and S the sums over a span of `teacher` and of `policy` [R], a token that the policy gave
    s gets T s / S (arXiv:2606.09456), and an equal part of T where S is 0.

    Example: T = -2, s = (-1, -3) gives (-0.5, -1.5).
    """
    if not spans:
        return np.zeros(0, np.float32)
    ends, their_ends = np.array(spans).T
    sizes = np.diff(ends, prepend=0)
    starts = ends - sizes
    values = policy.astype(np.float64)
    total = np.add.reduceat(teacher.astype(np.float64), [0, *their_ends[:-1]])
    mass = np.repeat(np.add.reduceat(values, starts), sizes)
    share = np.divide(values, mass, out=1 / np.repeat(sizes, sizes), where=mass < 0)
    parts: np.ndarray = (share * np.repeat(total, sizes)).astype(np.float32)
    return parts


def in_policy_tokens(spans: Spans, scores: TokenScores, policy: np.ndarray) -> TokenScores:
    """Return a teacher's scores of its own tokens as scores of the policy's."""
    return replace(scores, logprobs=divided(spans, scores.logprobs, policy))


def _ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, and after how many characters each one ends: 0 inside a
    character.
    """
    decode: Callable[..., str] = tokenizer.decode
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    text = ""
    ends = []
    known = ""  # text of the tokens from `first` to `start`, which come before the next ones
    first = start = 0
    for i in range(1, len(ids) + 1):
        both = decode(ids[first:i], **how)
        if both.endswith(_BROKEN) and i < len(ids):
            ends.append(0)
            continue
        text += both[len(known) :]
        ends.append(len(text))
        first, start = start, i
        known = decode(ids[first:start], **how)
    return text, ends
