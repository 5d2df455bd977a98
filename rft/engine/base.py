"""What all engines share: their errors, the plugin kind "engine", and the factory that makes one from its settings.

Knows no engine's library; each is imported when it is asked for.  An engine is a class with `async def start(settings)` as a
class method that gives back something that fulfils `rft.types.ports.Engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rft import plugins
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, EngineFailed, WeightSyncFailed
from rft.types import modelfiles
from rft.types.adapter import AdapterSpec
from rft.types.ids import Version
from rft.types.ports import Engine, HeldRequests, LoadReport, ScoreRow

engine = plugins.kind("engine")

BUILT_IN = {
    "vllm": "rft.engine.vllm:VllmEngine",
    "transformers": "rft.engine.transformers:TransformersEngine",
    "scripted": "rft.testing.scripted:ScriptedEngine",
    "external": "rft.engine.external:ExternalEngine",
}
CLASSIFIERS = {  # of task: score
    "vllm": "rft.engine.vllm:VllmClassifier",
    "transformers": "rft.engine.classifier:ClassifierEngine",
}


class PromptTooLong(ValueError):
    """The prompt leaves no room for a single token; raised before anything is generated."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the engine takes at most {limit}; "
            "shorten the prompt or raise max_model_len / max_prompt_tokens"
        )
        self.tokens = tokens
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return (PromptTooLong, (self.tokens, self.limit))


class TokensDiffer(ValueError):
    """tokenization_check: strict, and the tokens of several turns are not those of the whole chat; raised before anything is generated."""


def not_loaded(name: str) -> EngineFailed:
    """What an engine raises when it is asked before its first load."""
    return EngineFailed(f"{name}: no weights were loaded yet; an engine serves only versions that were published to it")


def no_logprobs(name: str, kind: str) -> ValueError:
    """What an engine raises that cannot score given tokens."""
    return ValueError(f"{name}: engine_type {kind} gives no log-probs of given tokens; use vllm or transformers for a teacher")


def no_scores(name: str) -> ValueError:
    """What an engine raises whose model writes text and gives no score."""
    return ValueError(f"{name}: this model writes text; a reward model is an auxiliary model with task: score")


def prompt_limit(settings: EngineSettings, *, goes_on: bool = False) -> int:
    """The longest prompt, in tokens: one token of the context must stay free for an answer.

    max_prompt_tokens is about openings; a prompt that goes on from an earlier call (`goes_on`) has the whole context.
    """
    room = settings.max_model_len - 1
    return room if goes_on or settings.max_prompt_tokens is None else min(room, settings.max_prompt_tokens)


def check_row(row: ScoreRow, settings: EngineSettings, *, longest: int) -> list[int]:
    """The tokens of a row to be scored.  Raises ValueError for one that has nothing to score, or is over `longest` tokens."""
    tokens = [int(t) for t in row.tokens]
    if not 0 < row.prompt_length <= len(tokens):
        raise ValueError(f"{settings.name}: prompt_length {row.prompt_length} of {len(tokens)} tokens; it must be at least 1")
    if len(tokens) > longest:
        raise ValueError(f"{settings.name}: {len(tokens)} tokens to score, at most {longest} fit; raise its max_model_len")
    return tokens


def check_prompt(tokens: int, settings: EngineSettings, *, goes_on: bool = False) -> None:
    """Raises PromptTooLong, or ValueError for an empty prompt."""
    if tokens == 0:
        raise ValueError("the prompt has no tokens; give messages or prompt_tokens")
    if tokens > (limit := prompt_limit(settings, goes_on=goes_on)):
        raise PromptTooLong(tokens, limit)


async def make(settings: EngineSettings) -> Engine:
    """A started engine of `settings.engine_type`: a built-in name, a plugin's name, `pkg.module:Name` or `path/file.py:Name`."""
    name = settings.engine_type
    known = plugins.REGISTRY.names("engine")
    if name not in BUILT_IN and ":" not in name and name not in known:
        raise ConfigError(
            f"unknown engine {name!r}.  Known: {', '.join(sorted({*BUILT_IN, *known}))}.", key="engine_type", given=name
        )
    target = name if name in known else BUILT_IN.get(name, name)
    if settings.task == "score" and name in BUILT_IN:
        if name not in CLASSIFIERS:
            raise ConfigError(f"engine_type {name} gives no scores; use {' or '.join(CLASSIFIERS)}", key="task", given="score")
        target = CLASSIFIERS[name]
    found = plugins.REGISTRY.get("engine", target).obj
    if not callable(getattr(found, "start", None)):
        raise ConfigError(
            f"{name!r} is not an engine: it has no async class method start(settings)", key="engine_type", given=name
        )
    started: Engine = await found.start(settings)
    return started


def check_base(name: str, model_path: str, spec: AdapterSpec) -> None:
    """Raises WeightSyncFailed where the engine `name` was started with another base than the adapter's."""
    if (mine := modelfiles.fingerprint(Path(model_path))) != spec.base:
        raise WeightSyncFailed(
            f"{name}: the adapter is for other weights (sha256 {spec.base[:12]}) than those in {model_path} ({mine[:12]}), with which the "
            "engine was started; give both sides the same model.model_path, or write model.lora_configs[0].merge: true"
        )


def worst(reports: Sequence[LoadReport], wanted: Version) -> LoadReport:
    """One report for several workers or engines: the least that was loaded, everything that is wrong, the slowest."""
    probe, slow = max(reports, key=lambda r: r.probe_error), max(reports, key=lambda r: r.load_s)
    return LoadReport(
        version=next((r.version for r in reports if r.version != wanted), wanted),
        num_tensors=min(r.num_tensors for r in reports),
        nbytes=min(r.nbytes for r in reports),
        missing=_union(r.missing for r in reports),
        unexpected=_union(r.unexpected for r in reports),
        bad_hash=_union(r.bad_hash for r in reports),
        failed=next((r.failed for r in reports if r.failed), ""),
        probed_layers=min(r.probed_layers for r in reports),
        probe_error=probe.probe_error,
        probe_worst=probe.probe_worst,
        load_s=slow.load_s,
        meeting_s=slow.meeting_s,
        transfer_s=slow.transfer_s,
        verify_s=slow.verify_s,
        probe_s=slow.probe_s,
        held=HeldRequests(
            requests=sum(r.held.requests for r in reports),
            aborted=sum(r.held.aborted for r in reports),
            recomputed_tokens=sum(r.held.recomputed_tokens for r in reports),
            tokens_per_s=sum(r.held.tokens_per_s for r in reports),
        ),
    )


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for part in parts for name in part}))
