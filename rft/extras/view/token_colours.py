"""Tokens of one experience with what is known of each, and the class of colour that shows one
number of it.

Depends on experiences, on no pages.  Invariant: the numbers are those of the ledger and its
payload; classes are steps of fixed scales, so that one colour means the same in every run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rft.buffer.inspect import Shown
from rft.buffer.token_texts import TokenTexts
from rft.secrets import safe
from rft.types.experience import Experience

COLOURS = {
    "logprob": "log-prob of the engine",
    "advantage": "advantage",
    "mismatch": "log-prob of the trainer − of the engine",
    "version": "weights that wrote it",
    "teacher": "log-prob of the teacher − of the engine",
}
SURPRISE = (0.01, 0.1, 0.3, 0.7, 1.5, 3.0, 6.0)  # −log-prob: edges of the classes s0 to s7
# size of a difference of log-probs: edges of the classes n0 to n4 and p0 to p4
APART = (1e-4, 1e-3, 1e-2, 0.1)
TAUGHT = (1e-9, 0.5, 1.0, 2.0)  # size of the trainer's advantage, or of the teacher's difference
SAID = 3  # likely tokens of the teacher that are told
# where that is not kept: of the largest distance from the mean in the group
SHARES = (1e-9, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class ShownToken:
    """One token: `css` is its class, `about` all that is known of it."""

    text: str
    css: str
    about: str
    newline: bool


def shown_tokens(
    x: Shown, words: TokenTexts, by: str, advantage: tuple[float, float] | None, most: int
) -> Iterator[ShownToken]:
    """The first `most` tokens.  `advantage`: reward of the row − mean of its group, and the largest
    such distance in the group.
    """
    p = x.payload
    if p is None:
        return
    trained = p.loss_mask.tolist()
    first = trained.index(True) if True in trained else len(trained)
    nothing: list[float | None] = [None] * len(trained)
    trainer_logprobs = nothing if x.trainer is None else x.trainer.logprobs.tolist()
    advantages = nothing if x.trainer is None else x.trainer.advantages.tolist()
    engine = p.logprobs.tolist() if p.has_logprobs else nothing
    spans = [(s.start, s.end, str(s.version)) for s in p.version_spans]
    names = {v: i for i, v in enumerate(dict.fromkeys(v for _, _, v in spans))}
    earned = None if p.token_rewards is None else p.token_rewards.tolist()
    teacher = nothing if p.teacher_logprobs is None else p.teacher_logprobs.tolist()
    place = np.cumsum(p.teacher_mask) - 1  # of a token among those that the teacher scored
    for at, (token, is_trained, *numbers) in enumerate(
        zip(p.tokens.tolist()[:most], trained, engine, trainer_logprobs, advantages, strict=False)
    ):
        text = words(token)
        version = next((v for a, b, v in spans if a <= at < b), "")
        about = [f"token {at}: {token}"]
        if not is_trained:
            css = "prompt" if at < first else "masked"
            about.append("prompt, not trained" if at < first else "masked, not trained")
        else:
            theirs, ours, advantage_value = (
                None if v is None or math.isnan(v) else v for v in numbers
            )
            taught = teacher[at]
            if by == "teacher":
                css = _apart(taught, theirs, TAUGHT)
            elif by == "version":
                css = f"v{names[version] % 6}" if version in names else "none"
            else:
                css = _colour(by, theirs, ours, advantage_value, advantage)
            about.append("no log-prob" if theirs is None else f"log-prob {theirs:.6g}")
            if x.trainer is not None:
                about.append("trainer's not known" if ours is None else f"trainer's {ours:.6g}")
                about += (
                    [f"difference {ours - theirs:.3g}"]
                    if ours is not None and theirs is not None
                    else []
                )
                about += [f"advantage {advantage_value:.6g}"] if advantage_value is not None else []
            if taught is not None:
                about.append(f"teacher's {taught:.6g}")
                about += _would_say(p, int(place[at]), words)
        about += [f"weights {version}"] if version else []
        about += [f"reward {earned[at]:.6g}"] if earned is not None and earned[at] else []
        yield ShownToken(
            safe(text, lines=True).replace("\n", "↵"), css, "; ".join(about), "\n" in text
        )


def _colour(
    by: str,
    theirs: float | None,
    ours: float | None,
    difference: float | None,
    group: tuple[float, float] | None,
) -> str:
    if by == "logprob" and theirs is not None:
        return f"s{bisect_right(SURPRISE, -theirs)}"
    if by == "mismatch":
        return _apart(ours, theirs, APART)
    if by == "advantage" and difference is not None:
        return _signed(difference, bisect_right(TAUGHT, abs(difference)))
    if by == "advantage" and group is not None:
        distance, largest = group
        return _signed(distance, bisect_right(SHARES, abs(distance) / largest if largest else 0.0))
    return "none"


def _would_say(p: Experience, place: int, words: TokenTexts) -> list[str]:
    """Tell the teacher's likeliest tokens at scored token number `place`, where they are kept."""
    if p.teacher_top_ids is None or p.teacher_top_logprobs is None:
        return []
    likely = zip(p.teacher_top_ids[place], np.exp(p.teacher_top_logprobs[place]), strict=False)
    said = [f"{words(int(token))!r} {share:.2f}" for token, share in list(likely)[:SAID]]
    return [f"it would say {', '.join(said)}"]


def _apart(value: float | None, theirs: float | None, edges: tuple[float, ...]) -> str:
    if value is None or theirs is None:
        return "none"
    return _signed(value - theirs, bisect_right(edges, abs(value - theirs)))


def _signed(value: float, size: int) -> str:
    return f"{'n' if value < 0 else 'p'}{size}"
