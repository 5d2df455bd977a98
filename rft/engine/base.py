"""Shared parts of all engines: errors, limits, checks, and the plugin kind "engine"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from msgspec.structs import replace

import rft.plugins as plugins
from rft.engine.admission import Admission
from rft.engine.settings import EngineSettings
from rft.errors import EngineFailed, SetupError, WeightSyncFailed
from rft.types import modelfiles
from rft.types.adapter import AdapterSpec
from rft.types.completion import Completion, TokenScores
from rft.types.ids import Version
from rft.types.images import ImagePlace
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, LoadReport, PausedRequests, ScoreRow, WeightManifest

engine = plugins.kind("engine")


class PromptTooLong(ValueError):
    """The prompt leaves no room for a single token; raised before anything is generated."""

    def __init__(self, tokens: int, limit: int, what: str = "the prompt") -> None:
        super().__init__(
            f"{what} has {tokens} tokens, the engine takes at most {limit}; "
            "shorten the prompt or raise max_model_len / max_prompt_tokens"
        )
        self.tokens = tokens
        self.limit = limit
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return (PromptTooLong, (self.tokens, self.limit, self.what))


class TokensDiffer(ValueError):
    """With tokenization_check: strict, the tokens of several turns differ from those of the whole
    chat tokenised at once; raised before anything is generated.
    """


class RequestFailed(Exception):
    """One request cannot be answered because of its own content or answer; the engine serves all
    others.
    """


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Split `text` at the first stop text: (text before, stop text); (`text`, "") without a stop
    text.
    """
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, ""
    place, stop = min(places)
    return text[:place], stop


def prompt_limit(settings: EngineSettings, *, goes_on: bool = False) -> int:
    """Return the longest allowed prompt in tokens; one token of the context stays free for an
    answer.

    max_prompt_tokens limits first turns; a prompt that extends an earlier call (`goes_on`) may use
    the whole context.
    """
    room = settings.max_model_len - 1
    return (
        room
        if goes_on or settings.max_prompt_tokens is None
        else min(room, settings.max_prompt_tokens)
    )


def check_tokens(tokens: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise ValueError for a token id without an embedding; such an id would crash the engine."""
    if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(t for t in tokens if not 0 <= t < vocab_size)
        raise ValueError(
            f"{name}: token id {wrong} is out of range; the model has ids from 0 to "
            f"{vocab_size - 1}"
        )


def check_row(
    row: ScoreRow, settings: EngineSettings, *, longest: int, vocab_size: int
) -> list[int]:
    """Return the tokens of a row to score.  Raises ValueError when nothing is to be scored or the
    row has more than `longest` tokens.
    """
    tokens = [int(t) for t in row.tokens]
    if not 0 < row.prompt_length <= len(tokens):
        raise ValueError(
            f"{settings.name}: prompt_length {row.prompt_length} of {len(tokens)} tokens; it must "
            f"be at least 1"
        )
    if len(tokens) > longest:
        raise ValueError(
            f"{settings.name}: {len(tokens)} tokens to score, at most {longest} fit; raise its "
            f"max_model_len"
        )
    check_tokens(tokens, vocab_size, settings.name)
    return tokens


def row_behind(
    prompt: Sequence[int] | np.ndarray, row: ScoreRow, places: tuple[ImagePlace, ...] = ()
) -> ScoreRow:
    """Return `row` with the tokens of its prompt, which are not scored, and their images."""
    tokens = np.concatenate([np.asarray(prompt, np.int32), row.tokens])
    images = () if row.prompt is None else row.prompt.images
    return replace(
        row, tokens=tokens, prompt_length=len(prompt), prompt=None, places=places, images=images
    )


def check_prompt(tokens: int, limit: int) -> None:
    """Raise PromptTooLong, or ValueError for an empty prompt."""
    if tokens == 0:
        raise ValueError("the prompt has no tokens; give messages or prompt_tokens")
    if tokens > limit:
        raise PromptTooLong(tokens, limit)


class BaseEngine:
    """Base class of engines; a custom engine derives from it and overrides what it supports.

    The base class generates nothing, scores nothing and takes no weights.  `extra_engine_args` are
    checked against `Args`, a pydantic model in the class.
    """

    Args: ClassVar[type | None] = None
    COUNTED: ClassVar[tuple[str, ...]] = ("requests", "prompt_tokens")
    FIXED_WEIGHTS: ClassVar[str] = "its weights are fixed; nothing can be published to it"

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.version: Version | None = None  # of the served weights
        self.admission = Admission(
            settings.name
        )  # `generate` runs inside `admission.counted(request)`
        self._counted = dict.fromkeys(self.COUNTED, 0)

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Start an engine that answers requests.  Raises SetupError or ConfigError."""
        return cls(settings)

    @property
    def running(self) -> int:
        """Completions in progress."""
        return self.admission.under_way

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        raise ValueError(f"{self.settings.name}: it generates nothing")

    async def score(self, row: ScoreRow) -> TokenScores:
        kind = (
            self.settings.engine_type
            if self.settings.task == "generate"
            else f"task: {self.settings.task}"
        )
        raise ValueError(
            f"{self.settings.name}: engine_type {kind} gives no log-probs of given tokens; use "
            f"vllm or transformers for a teacher"
        )

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        raise ValueError(
            f"{self.settings.name}: this model writes text; a reward model is an auxiliary model "
            f"with task: score"
        )

    async def pause(self, *, clear_cache: bool = True) -> None:
        raise self.fixed()

    async def sleep(self) -> None:
        """Free no memory by default."""

    async def load(self, manifest: WeightManifest) -> LoadReport:
        raise self.fixed()

    async def resume(self) -> None:
        raise self.fixed()

    async def drain(self, timeout_s: float) -> None:
        await self.admission.drain(timeout_s)

    async def admit(self) -> None:
        self.admission.admit()

    def fixed(self) -> EngineFailed:
        return EngineFailed(f"{self.settings.name}: {self.FIXED_WEIGHTS}")

    async def health(self) -> None: ...

    async def metrics(self) -> list[Metric]:
        counted = [
            Metric(f"engine/{name}", float(value), "sum") for name, value in self._counted.items()
        ]
        return [Metric("engine/requests_running", float(self.running), "sum"), *counted]

    async def close(self) -> None: ...


class ScoresOnly(BaseEngine):
    """Base class of engines for models with a classification head."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        raise ValueError(
            f"{self.settings.name}: task: score gives numbers, no answers; ask it with "
            f"classify(messages)"
        )

    async def score(self, row: ScoreRow) -> TokenScores:
        return await BaseEngine.score(self, row)


def check_base(name: str, model_path: str, spec: AdapterSpec) -> None:
    """Raise WeightSyncFailed if the engine `name` was started with another base than the adapter's."""
    if (fingerprint := modelfiles.fingerprint(Path(model_path))) != spec.base:
        raise WeightSyncFailed(
            f"{name}: the adapter is for other weights (sha256 {spec.base[:12]}) than those in "
            f"{model_path} ({fingerprint[:12]}), with which the "
            "engine was started; give both sides the same model.model_path, or write "
            "model.lora_configs[0].merge: true"
        )


def checked_model(name: str, folder: str, loaded: tuple[Any, dict[str, Any]]) -> Any:
    """Return the model that transformers loaded from `folder`.  Raises SetupError if weights are
    missing, which transformers would initialise at random.
    """
    model, loading_info = loaded
    if lost := sorted(map(str, loading_info["missing_keys"])):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise SetupError(
            f"{name}: {folder} has no weights for {', '.join(lost[:3])}{more}; it is not of the "
            f"kind that config.json says"
        )
    return model


def worst(reports: Sequence[LoadReport], expected: Version) -> LoadReport:
    """Merge the reports of several workers or engines: fewest tensors, all problems, slowest load."""
    probe, slow = max(reports, key=lambda r: r.probe_error), max(reports, key=lambda r: r.load_s)
    held_requests = {
        name: sum(getattr(r.paused, name) for r in reports)
        for name in PausedRequests.__struct_fields__
    }
    return replace(
        slow,
        version=next((r.version for r in reports if r.version != expected), expected),
        num_tensors=min(r.num_tensors for r in reports),
        nbytes=min(r.nbytes for r in reports),
        missing=_union(r.missing for r in reports),
        unexpected=_union(r.unexpected for r in reports),
        bad_hash=_union(r.bad_hash for r in reports),
        failed=next((r.failed for r in reports if r.failed), ""),
        probed_layers=min(r.probed_layers for r in reports),
        probe_error=probe.probe_error,
        probe_worst=probe.probe_worst,
        paused=PausedRequests(**held_requests),
    )


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for part in parts for name in part}))
