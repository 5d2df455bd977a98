"""`Experience`, the record that travels from explorer to trainer.  It is immutable and holds all
that training needs of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, field

from rft.types import experts
from rft.types.completion import Completion, Credit, VersionSpan
from rft.types.credit import ScoredRow
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.images import ImagePlace
from rft.types.task import SamplingArgs

Status = Literal["complete", "truncated", "failed"]
MAX_INFO_BYTES = 1 << 20
# key of `info`: the reward of a greedy run of the same task, if the algorithm needs it
BASELINE_KEY = "baseline_reward"
INT32 = np.dtype(np.int32)
BOOL = np.dtype(np.bool_)
FLOAT32 = np.dtype(np.float32)
LOGPROB_SLACK = 1e-4  # engines may report a log-prob this far above 0; it is clipped and counted


class SamplingRecord(Struct, frozen=True, kw_only=True, gc=False):
    """Sampling settings of the tokens [start, end) of an experience."""

    start: int
    end: int
    sampling: SamplingArgs
    logprob_mode: Literal["processed", "raw"] = "processed"
    engine: str = ""


class Experience(Struct, frozen=True, kw_only=True):
    """One trainable sequence.  T = number of tokens, prompt and response; every per-token array has
    length T.

    Example: prompt P (3 tokens), answer A (2):
        tokens = P + A        loss_mask = 0 0 0 1 1        logprobs = 0 0 0 -.2 -.9

    A failed run is a row without tokens (T = 0), with status "failed" and a `reason`.
    """

    id: ExperienceId
    taskset: str
    task_index: int  # row of the taskset
    workflow: str
    status: Status
    # why the row is never trained: the error of a failed run, or the operator that dropped it
    reason: str = ""
    finish_reason: str = ""
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True where tokens are trained
    logprobs: np.ndarray  # float32 [T], of the sampling policy; 0 where loss_mask is False
    has_logprobs: bool = True  # False: from an external server that reports none
    version_spans: tuple[VersionSpan, ...] = ()  # which weights wrote which of the T tokens
    sampling: tuple[SamplingRecord, ...] = ()
    reward: float | None = None  # None = not scored; never trained
    credit: Credit = "run"  # what was scored: the whole run, or the row's own calls ("step")
    reward_parts: dict[str, float] = field(default_factory=dict)
    token_rewards: np.ndarray | None = (
        None  # float32 [T]; token-level advantages read it, not `reward`
    )
    teacher_logprobs: np.ndarray | None = None  # float32 [T]
    # versions of the teacher that scored the tokens; lineage 1, step 0 for fixed weights
    teacher_spans: tuple[VersionSpan, ...] = ()
    # the teacher's k most likely tokens at each of the R tokens of `teacher_spans`; their
    # log-probs, and last that of all other tokens together
    teacher_top_ids: np.ndarray | None = None  # int32 [R, k]
    teacher_top_logprobs: np.ndarray | None = None  # float16 [R, k + 1]
    # MoE (unlike `is_expert`), uint8 or uint16 [P, layers, experts]: the experts to which the
    # engine's layers routed the first P <= T tokens, see rft.types.experts
    routed_experts: np.ndarray | None = None
    images: tuple[ImagePlace, ...] = ()  # in their order among the tokens
    is_expert: bool = False  # a demonstration, not sampled by the policy
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt_text: str = ""
    response_text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    clipped_logprobs: int = 0  # log-probs in (0, 1e-4], clipped to 0

    def __post_init__(self) -> None:
        check(self)

    @property
    def group(self) -> GroupId:
        return self.id.group

    @property
    def trainable(self) -> bool:
        return (
            self.status != "failed"
            and not self.reason
            and self.reward is not None
            and self.num_response_tokens > 0
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def teacher_mask(self) -> np.ndarray:
        """bool [T], the tokens that a teacher scored."""
        mask = np.zeros(len(self.tokens), np.bool_)
        for span in self.teacher_spans:
            mask[span.start : span.end] = True
        return mask

    @property
    def oldest_version(self) -> Version | None:
        return min((s.version for s in self.version_spans), default=None)

    @property
    def newest_version(self) -> Version | None:
        return max((s.version for s in self.version_spans), default=None)

    @property
    def temperature(self) -> float:
        """Temperature of the trained tokens; 1.0 where nothing was sampled."""
        if self.sampling:
            return self.sampling[0].sampling.temperature
        return 1.0


class Demonstration(Struct, frozen=True, kw_only=True):
    """An offline sequence to imitate (sft, cpt).

    T tokens; `loss_mask` marks the trained ones.
    """

    id: ExperienceId
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[ImagePlace, ...] = ()  # in their order among the tokens

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, INT32, len(self.tokens))
        _check_array("loss_mask", self.loss_mask, BOOL, len(self.tokens))


class LabelledAnswer(Demonstration, frozen=True, kw_only=True):
    """A prompt and a good or bad answer, whose tokens are trained (kto)."""

    label: bool


class Preference(Struct, frozen=True, kw_only=True):
    """A chosen and a rejected continuation of one prompt (dpo)."""

    id: ExperienceId
    prompt: np.ndarray  # int32 [P]
    chosen: np.ndarray  # int32
    rejected: np.ndarray  # int32
    images: tuple[ImagePlace, ...] = ()  # of the prompt

    def __post_init__(self) -> None:
        for name in ("prompt", "chosen", "rejected"):
            value = getattr(self, name)
            _check_array(name, value, INT32, len(value))


def failed(
    id: ExperienceId,
    *,
    taskset: str,
    task_index: int,
    workflow: str,
    reason: str,
    info: dict[str, Any] | None = None,
) -> Experience:
    """Make the row without tokens of a run that ended without a usable sequence."""
    return Experience(
        id=id,
        taskset=taskset,
        task_index=task_index,
        workflow=workflow,
        status="failed",
        reason=reason,
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        logprobs=np.zeros(0, np.float32),
        info=info or {},
    )


def scored_members(rows: Iterable[Experience]) -> list[ScoredRow]:
    """Convert the scored rows for group statistics."""
    return [
        ScoredRow(x.reward, x.id.run, x.id.step, x.num_response_tokens, x.credit, x.reward_parts)
        for x in rows
        if x.reward is not None
    ]


def from_completions(
    id: ExperienceId,
    completions: Sequence[Completion],
    *,
    taskset: str,
    task_index: int,
    workflow: str,
    reward: float | None,
    credit: Credit = "run",
    reward_parts: dict[str, float] | None = None,
    messages: tuple[dict[str, Any], ...] = (),
    tools: tuple[dict[str, Any], ...] = (),
    prompt_text: str = "",
    metrics: dict[str, float] | None = None,
    info: dict[str, Any] | None = None,
) -> Experience:
    """Join the model calls of one run into one sequence, without tokenising again.

    Each call's prompt must begin with the prompt and answer before it; tokens added in between are
    not trained.  Raises ValueError otherwise.
    """
    if not completions:
        raise ValueError("a run without a model call has no experience")
    joined = _joined(completions)
    last = completions[-1]
    return Experience(
        id=id,
        taskset=taskset,
        task_index=task_index,
        workflow=workflow,
        status="truncated" if last.finish_reason == "length" else "complete",
        finish_reason=last.finish_reason,
        **joined,
        reward=reward,
        credit=credit,
        reward_parts=reward_parts or {},
        messages=messages,
        tools=tools,
        prompt_text=prompt_text,
        response_text=last.text,
        metrics=metrics or {},
        info=info or {},
    )


def _joined(completions: Sequence[Completion]) -> dict[str, Any]:
    """Compute the fields of an experience that depend on its model calls alone."""
    tokens = np.zeros(0, np.int32)
    mask: list[np.ndarray] = []
    logps: list[np.ndarray] = []
    spans: list[VersionSpan] = []
    sampling: list[SamplingRecord] = []
    images: tuple[ImagePlace, ...] = ()
    clipped = 0
    for n, c in enumerate(completions):
        call = f"model call {n}"
        _check_array(f"{call}: prompt_tokens", c.prompt_tokens, INT32, len(c.prompt_tokens))
        _check_array(f"{call}: tokens", c.tokens, INT32, len(c.tokens))
        _check_array(f"{call}: logprobs", c.logprobs, FLOAT32, len(c.logprobs))
        start = len(c.prompt_tokens)
        if (
            start < len(tokens)
            or not np.array_equal(c.prompt_tokens[: len(tokens)], tokens)
            or c.images[: len(images)] != images
        ):
            raise ValueError(
                f"{call}: its prompt does not continue the {len(tokens)} tokens before it; "
                f"append to the messages and change none, "
                'or write ctx.transcript(layout="chains"): one row for each chain of calls'
            )
        clean = c.logprobs.astype(np.float32, copy=True)
        over = (clean > 0) & (clean <= LOGPROB_SLACK)
        clipped += int(over.sum())
        clean[over] = 0.0
        added = start - len(tokens)
        mask += [np.zeros(added, np.bool_), np.ones(len(c.tokens), np.bool_)]
        logps += [np.zeros(added, np.float32), clean]
        spans += [VersionSpan(s.version, s.start + start, s.end + start) for s in c.version_spans]
        sampling.append(
            SamplingRecord(
                start=start, end=start + len(c.tokens), sampling=c.sampling, engine=c.engine
            )
        )
        tokens = np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int32, copy=False)
        images = c.images
    return {
        "tokens": tokens,
        # external servers report `usage` and no tokens
        "has_logprobs": any(c.usage is None for c in completions),
        "loss_mask": np.concatenate(mask),
        "logprobs": np.concatenate(logps),
        "version_spans": tuple(spans),
        "sampling": tuple(sampling),
        "clipped_logprobs": clipped,
        "routed_experts": experts.joined([c.routed_experts for c in completions]),
        "images": images,
    }


def check(x: Experience) -> None:
    """Raise ValueError naming the field of `x` that a trainer cannot use."""
    n = len(x.tokens)
    _check_array("tokens", x.tokens, INT32, n)
    _check_array("loss_mask", x.loss_mask, BOOL, n)
    _check_array("logprobs", x.logprobs, FLOAT32, n)
    for name, value in (
        ("token_rewards", x.token_rewards),
        ("teacher_logprobs", x.teacher_logprobs),
    ):
        if value is not None:
            _check_array(name, value, FLOAT32, n)
            if not np.isfinite(value).all():
                raise ValueError(f"{name}: not finite")
    if x.routed_experts is not None:
        experts.check(x.routed_experts, n)
    if x.teacher_top_ids is not None or x.teacher_top_logprobs is not None:
        _check_top(x.teacher_top_ids, x.teacher_top_logprobs, int(np.count_nonzero(x.teacher_mask)))
    if x.images:
        _check_images(x)
    one_span = n > 0 and _has_one_span(x)
    if n:
        _check_values(x, one_span=one_span)
    _check_reward("reward", x.reward)
    for part, score in x.reward_parts.items():
        _check_reward(part, score)
    if x.status == "failed":
        if not x.reason:
            raise ValueError("reason: a failed run must say why it failed")
        return
    if n == 0 and x.has_logprobs:
        raise ValueError("tokens: empty; only failed runs, and answers of a server, have no tokens")
    for name, spans in (("version_spans", x.version_spans), ("teacher_spans", x.teacher_spans)):
        for span in spans:
            if not 0 <= span.start <= span.end <= n:
                raise ValueError(f"{name}: [{span.start}, {span.end}) is outside the {n} tokens")
    if not one_span and not x.is_expert and not _covered(x):
        raise ValueError("version_spans: some trained tokens have no version")
    if x.info and len(msgspec.json.encode(x.info)) > MAX_INFO_BYTES:
        raise ValueError(f"info: larger than {MAX_INFO_BYTES} bytes as JSON")


def _check_top(ids: np.ndarray | None, logprobs: np.ndarray | None, count: int) -> None:
    """Raise ValueError unless both arrays describe k different tokens at each of `count` tokens."""
    k = ids.shape[1] if ids is not None and ids.ndim == 2 else 0
    if ids is None or ids.dtype != INT32 or ids.shape != (count, k) or not k:
        raise ValueError(f"teacher_top_ids: must be int32 [{count}, k]")
    if logprobs is None or logprobs.dtype != np.float16 or logprobs.shape != (count, k + 1):
        raise ValueError(f"teacher_top_logprobs: must be float16 [{count}, {k + 1}]")
    in_order = np.sort(ids, axis=1)
    if count and (in_order[:, 0].min() < 0 or (np.diff(in_order, axis=1) == 0).any()):
        raise ValueError("teacher_top_ids: negative, or twice at one position")
    if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
        raise ValueError("teacher_top_logprobs: must be finite and at most 0")


def _check_images(x: Experience) -> None:
    end = 0
    for place in x.images:
        if not end <= place.start < place.start + place.length <= len(x.tokens):
            raise ValueError(
                f"images: [{place.start}, {place.start + place.length}) is outside the "
                f"{len(x.tokens)} tokens, empty, or overlaps the image before it"
            )
        end = place.start + place.length
        if x.loss_mask[place.start : end].any():
            raise ValueError("images: the loss mask marks tokens of an image, which nobody wrote")


def _check_reward(name: str, value: float | None) -> None:
    if type(value) is float and -math.inf < value < math.inf:  # the usual case
        return
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):  # or NumPy's
        raise ValueError(f"{name}: {value!r} is not a finite number")


def _has_one_span(x: Experience) -> bool:
    """Return whether the trained tokens are exactly one version span, as in a run of one model
    call.
    """
    if len(x.version_spans) != 1:
        return False
    (span,) = x.version_spans
    if not 0 <= span.start <= span.end <= len(x.tokens):
        return False
    inside = np.count_nonzero(x.loss_mask[span.start : span.end])
    return bool(np.count_nonzero(x.loss_mask) == span.end - span.start == inside)


def _check_values(x: Experience, *, one_span: bool) -> None:
    """Check the values of each array in one pass, since this runs for every experience.

    `argmin` and `argmax` are faster than `min` and `max` for arrays of this size.
    """
    if (lowest := x.tokens.item(x.tokens.argmin())) < 0:
        raise ValueError(f"tokens: {lowest} is negative")
    logprobs = x.logprobs
    highest = logprobs.item(logprobs.argmax())  # NaN if any value is NaN
    if not (highest < math.inf and logprobs.item(logprobs.argmin()) > -math.inf):
        raise ValueError("logprobs: not finite")
    if highest > 0:
        raise ValueError(f"logprobs: {highest} is above 0")
    if x.has_logprobs and _nonzero_outside_mask(x, one_span=one_span):
        raise ValueError("logprobs: must be 0 where loss_mask is False")


def _nonzero_outside_mask(x: Experience, *, one_span: bool) -> bool:
    """Return whether a log-prob outside the trained tokens is not 0."""
    if one_span:
        (span,) = x.version_spans
        after = span.end < len(x.logprobs) and np.count_nonzero(x.logprobs[span.end :])
        return bool(after or np.count_nonzero(x.logprobs[: span.start]))
    return bool(np.count_nonzero(x.logprobs.astype(np.bool_) > x.loss_mask))


def _covered(x: Experience) -> bool:
    """Return whether each trained token has a version."""
    covered = np.zeros(len(x.tokens), np.bool_)
    for span in x.version_spans:
        covered[span.start : span.end] = True
    return x.num_response_tokens == int(np.count_nonzero(x.loss_mask & covered))


def _check_array(name: str, value: np.ndarray, dtype: np.dtype, length: int) -> None:
    if type(value) is np.ndarray and value.dtype is dtype and value.shape == (length,):
        return
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise ValueError(f"{name}: must be a 1-d numpy array, not {type(value).__name__}")
    if value.dtype != dtype:
        raise ValueError(f"{name}: dtype {value.dtype}, must be {dtype}")
    if len(value) != length:
        raise ValueError(f"{name}: length {len(value)}, but there are {length} tokens")
