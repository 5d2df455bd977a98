"""Verify that an engine serves the weights it claims: compare log-probs of tokens it just generated
with the trainer's.

Depends on neither the transport nor the schedule of weights. Invariant: a verdict depends only on
tokens that the engine generated under the version in question, never on the engine's own report.

Why a stale engine cannot pass once the step moved the probe: let y' be the tokens of the previous
version's probe, E' the engine's log-probs of them at that time, S the trainer's log-probs under the
new weights, and d = max |S(y') - E'(y')|, how far the step moved the probe (at most `limit` of it
is the engine's own error). Prompts and seeds never change, so an engine that still serves the old
weights draws y' again and reports E'(y') up to its repetition noise n, and its error is, by the
triangle inequality,

    max |S(y') - E_now(y')|  >=  max |S(y') - E'(y')| - max |E'(y') - E_now(y')|  >=  d - n.

`limit` is at least 5 times the error of the first version, and n is at most twice that error (two
runs, each within it), so n < limit, and for d > 3 * limit the error is above 2 * limit: the probe
fails. For smaller d the verdict says `below_noise`, and hashes and packed-layer probes must provide
the proof. (If noise makes the engine draw another token, the tokens before it are still compared.)

A partly stale engine is like any wrong engine: the trainer scores its tokens, and the difference
must be within the limits.

Source of the limits: float32 engines and trainers agree to 1e-5..1e-4 nats; 1e-3 is the limit for
the first version.  In shorter types the verdict uses the mean over the tokens (and the largest,
with a wide limit), and the limits are multiples of this model's noise, see `rft.types.noise`: the
trainer, whose arithmetic is proven when it loads the model, scores the first version's tokens a
second time with other roundings.  The argument above holds for means as for maxima, up to the first
token drawn differently; after it, other tokens of the same weights are compared.

With router replay the trainer scores a probe through the engine's choice of experts: of two experts
with equal weights either may be chosen, which moves a log-prob by whole nats and says nothing about
the weights.  Hashes and layer probes show that the routers' weights arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from rft.errors import ConfigError, WeightSyncFailed
from rft.sync.settings import SyncConfig, SyncRuntime
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.noise import Difference, allowed
from rft.types.ports import Engine, GenerateRequest, Scorer, ScoreRow
from rft.types.task import SamplingArgs

log = logging.getLogger(__name__)

MIN_TOKENS = 64
# float32: least tokens of the previous probe that measure how far the version moved it
MOVED_TOKENS = 16
KEY = "synchronizer.canary_tolerance"
_STALE = ", which is what an engine with the old weights would show"
_SEED = 20_000  # prompt i is always drawn with seed _SEED + i


class Probe(Struct, frozen=True):
    """An engine's completions of the probe prompts: int32 [R] tokens, float32 [R] log-probs each.

    `experts`: the chosen experts, if the engine reports them.
    """

    version: Version
    prompts: tuple[np.ndarray, ...]
    tokens: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]
    experts: tuple[np.ndarray | None, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.tokens)

    def first(self, tokens: int) -> Probe:
        """Return the first prompts, at least two (temperatures alternate), with at least `tokens`
        generated tokens in total.
        """
        ends = np.cumsum([len(t) for t in self.tokens])
        n = max(2, int(np.searchsorted(ends, tokens)) + 1)
        return Probe(
            self.version, self.prompts[:n], self.tokens[:n], self.logprobs[:n], self.experts[:n]
        )


class Verdict(Struct, frozen=True, kw_only=True):
    """A passed canary, in nats.

    `moved`: how far the version moved the previous probe's log-probs (0 for the first version).
    `noise`: effect of other roundings on the trainer's log-probs at the start of the run; None in
    float32, where it is not measured.
    """

    error: Difference
    limit: Difference
    moved: float
    below_noise: bool
    num_tokens: int
    noise: Difference | None = None


class Canary:
    """Checks engines with the probe `prompts` (token ids).

    With `kv_cache: keep` prompts must be shorter than a cache block.
    """

    def __init__(
        self,
        config: SyncConfig,
        runtime: SyncRuntime,
        prompts: Sequence[Sequence[int]],
        scorer: Scorer,
    ) -> None:
        probe_tokens = len(prompts) * runtime.canary_tokens
        if probe_tokens < MIN_TOKENS or not all(len(p) for p in prompts):
            raise ConfigError(
                f"{len(prompts)} prompts x {runtime.canary_tokens} tokens = {probe_tokens} probe tokens; "
                f"at least {MIN_TOKENS} "
                "are needed, and no prompt may be empty. Raise canary_prompts or canary_tokens.",
                key="synchronizer",
            )
        self._prompts = tuple(tuple(int(t) for t in p) for p in prompts)
        self._num_tokens = runtime.canary_tokens
        self._temperature = runtime.canary_temperature or 1.0
        self._tolerance = config.canary_tolerance
        self._runtime = runtime
        self._exact = runtime.canary_dtype == "float32"
        self._noise: Difference | None = None
        self._first: Difference | None = None  # error of the first version
        self._scorer = scorer

    @property
    def limit(self) -> Difference:
        """Return the largest allowed difference.

        For the first version it follows from the type or the noise; later the first version's error
        counts, too.
        """
        first = self._first or Difference(0.0, 0.0)
        if self._exact:
            largest = max(self._runtime.canary_limit, 5 * first.largest)
            return Difference(largest, largest)
        assert self._noise is not None, "measured with the first version"
        noise = Difference(
            max(self._noise.mean, first.mean), max(self._noise.largest, first.largest)
        )
        return allowed(noise, self._runtime.canary_dtype, self._tolerance)

    async def probe(self, engine: Engine, version: Version) -> Probe:
        """Let `engine` generate a probe.

        Raises WeightSyncFailed for an unusable answer or one labelled with another version.
        """
        done = await asyncio.gather(
            *(engine.generate(self._request(i, version)) for i in range(len(self._prompts)))
        )
        return _probe([answers[0] for answers in done], version)

    async def check(
        self,
        probes: Sequence[Probe],
        previous: Sequence[Probe],
        *,
        names: Sequence[int] | None = None,
    ) -> Verdict:
        """Judge all engines' `probes`, and how far the version moved the `previous` ones, with one
        call of the scorer.

        Raises WeightSyncFailed naming the engine by its index in `probes` (or its entry in
        `names`), the difference and the limit.
        """
        if self._exact:
            previous = [p.first(MOVED_TOKENS) for p in previous]
        scored = await self._score([*probes, *previous])
        errors = [_difference(p.logprobs, s) for p, s in zip(probes, scored, strict=False)]
        moves = [
            _difference(p.logprobs, s) for p, s in zip(previous, scored[len(probes) :], strict=True)
        ]
        moved = max(map(self._judged, moves), default=0.0)
        limit = self.limit
        worst = int(
            np.argmax([math.inf if not e.within(limit) else self._judged(e) for e in errors])
        )
        error = errors[worst]
        enough = 3 * self._judged(limit)
        if not error.within(limit):
            stale = moved > enough and self._judged(error) >= moved / 2
            raise WeightSyncFailed(
                f"engine {worst if names is None else names[worst]}: its log-probs of "
                f"{probes[worst].num_tokens} generated tokens "
                f"differ from the trainer's by {self._text(error)}, allowed are "
                f"{self._text(limit)}{self._source()}; "
                f"the version moved them by {moved:.2e}{_STALE if stale else ''}"
            )
        if self._first is None:
            self._first = error
            log.info(
                "canary: the first version differs by %s, allowed are %s%s; from now on %s",
                self._text(error),
                self._text(limit),
                self._source(),
                self._text(self.limit),
            )
        return Verdict(
            error=error,
            limit=limit,
            moved=moved,
            below_noise=bool(previous) and moved <= enough,
            num_tokens=sum(p.num_tokens for p in probes),
            noise=self._noise,
        )

    def _judged(self, difference: Difference) -> float:
        return difference.largest if self._exact else difference.mean

    def _text(self, difference: Difference) -> str:
        return f"{difference.largest:.2e} nats at most" if self._exact else str(difference)

    def _source(self) -> str:
        """Describe the limit in shorter types."""
        if self._noise is None:
            return ""
        return (
            f" ({KEY} {self._tolerance:g} x the noise of this model in "
            f"{self._runtime.canary_dtype}, "
            f"{self._noise})"
        )

    def prove_same(self, now: Probe, before: Probe) -> None:
        """Raise WeightSyncFailed unless `now` matches the probe `before`: a roll-back's proof.

        It needs no trainer: same prompts and seeds draw the same tokens.  If noise changes a token,
        the prompt is compared up to it; half of all tokens must be comparable, in shorter types a
        quarter.
        """
        compared = _comparable(now, before)
        if (2 if self._exact else 4) * len(compared) < before.num_tokens:
            raise WeightSyncFailed(
                f"only {len(compared)} of {before.num_tokens} probe tokens are those that "
                f"{before.version} generated"
            )
        error = Difference.from_values(compared)
        if not error.within(self.limit):
            raise WeightSyncFailed(
                f"log-probs differ from those of {before.version} by {self._text(error)}, allowed "
                f"are {self._text(self.limit)}"
            )

    def _request(self, index: int, version: Version) -> GenerateRequest:
        sampling = SamplingArgs(
            temperature=self._temperature_of(index),
            max_tokens=self._num_tokens,
            ignore_eos=True,
            seed=_SEED + index,
        )
        return GenerateRequest(
            prompt_tokens=self._prompts[index],
            sampling=sampling,
            request_id=f"canary-{version}-{index}",
        )

    def _temperature_of(self, index: int) -> float:
        """Return a prompt's temperature: alternately 1 and that of training.

        Dtypes may differ more at the temperature of training.
        """
        return self._temperature if index % 2 else 1.0

    async def _score(self, probes: Sequence[Probe]) -> list[tuple[np.ndarray, ...]]:
        """Return scores per probe and prompt, float32 [R]; equal sequences are scored once."""
        rows: dict[bytes, tuple[int, ScoreRow]] = {}
        places: list[list[int]] = []
        for probe in probes:
            places.append([])
            for i, (prompt, tokens) in enumerate(zip(probe.prompts, probe.tokens, strict=True)):
                experts = probe.experts[i]
                row = ScoreRow(
                    tokens=np.concatenate([prompt, tokens]).astype(np.int32, copy=False),
                    prompt_length=len(prompt),
                    temperature=self._temperature_of(i),
                    routed_experts=experts,
                )
                key = f"{row.temperature} {len(prompt)} ".encode() + row.tokens.tobytes()
                key += b"" if experts is None else experts.tobytes()
                places[-1].append(rows.setdefault(key, (len(rows), row))[0])
        scores = await self._scorer.score([row for _, row in rows.values()])
        for (_, row), score in zip(rows.values(), scores, strict=True):
            if len(score) != len(row.tokens) - row.prompt_length:
                raise WeightSyncFailed(
                    f"the trainer scored {len(score)} of {len(row.tokens) - row.prompt_length} "
                    f"probe tokens"
                )
        if self._first is None and not self._exact:
            otherwise = [
                replace(row, rounded=self._runtime.canary_dtype) for _, row in rows.values()
            ]
            self._noise = _difference(scores, await self._scorer.score(otherwise))
        return [tuple(scores[i] for i in place) for place in places]


def _probe(completions: Sequence[Completion], version: Version) -> Probe:
    for completion in completions:
        _check_answer(completion, version)
    return Probe(
        version,
        tuple(c.prompt_tokens for c in completions),
        tuple(c.tokens for c in completions),
        tuple(c.logprobs for c in completions),
        tuple(c.routed_experts for c in completions),
    )


def _comparable(now: Probe, before: Probe) -> np.ndarray:
    """Return the log-prob differences of two probes of the same prompts and seeds, for each prompt
    up to the first different token.
    """
    differences = []
    for ours, theirs, a, b in zip(
        now.tokens, before.tokens, now.logprobs, before.logprobs, strict=True
    ):
        n = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:n] != theirs[:n])
        n = int(differ[0]) if len(differ) else n
        differences.append(a[:n].astype(np.float64) - b[:n])
    return np.concatenate(differences)


def _check_answer(completion: Completion, version: Version) -> None:
    labels = {s.version for s in completion.version_spans}
    if labels != {version}:
        raise WeightSyncFailed(
            f"its probe answer is labelled "
            f"{', '.join(map(str, sorted(labels))) or 'with nothing'}, not {version}"
        )
    if len(completion.tokens) == 0 or len(completion.tokens) != len(completion.logprobs):
        raise WeightSyncFailed(
            f"its probe answer has {len(completion.tokens)} tokens and {len(completion.logprobs)} "
            f"log-probs"
        )
    if not np.isfinite(completion.logprobs).all():
        raise WeightSyncFailed("its probe answer has log-probs that are not finite")


def _difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Difference:
    return Difference.from_values(
        np.concatenate([a.astype(np.float64) - b for a, b in zip(ours, theirs, strict=True)])
    )
