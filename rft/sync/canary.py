"""Does an engine really serve the weights it claims to?  Compares log-probs of tokens it just generated with the trainer's.

Knows neither how weights travel nor when. The one invariant: a verdict rests only on tokens the engine generated
under the version in question, never on what it reports about itself.

Why a stale engine cannot pass once the step moved the probe. Let y' be the tokens of the previous version's probe,
E' the engine's log-probs of them then, S the trainer's log-probs under the new weights, and d = max |S(y') - E'(y')|,
how far the step moved the probe (at most `limit` of it is the engine's own error). Prompts and seeds never change,
so an engine that still serves the old weights draws y' again and reports E'(y') up to its repetition noise n, and its
error is, by the triangle inequality,

    max |S(y') - E_now(y')|  >=  max |S(y') - E'(y')| - max |E'(y') - E_now(y')|  >=  d - n.

`limit` is at least 5 times the error of the first version, and n is at most twice that error (two runs, each that
near to the truth), so n < limit, and for d > 3 * limit the error is above 2 * limit: the probe fails. Where d is
smaller the verdict says `below_noise`, and hashes and packed-layer probes have to carry the proof. (If noise makes
it draw another token, everything before is still compared.)

A partly stale engine is no different from any wrong one: its own tokens are scored by the trainer, and the difference
must be in limits.

Source of the limits: float32 engines and trainers agree to 1e-5..1e-4 nats; 1e-3 is the stop limit of the first
version.  In shorter types it follows from the noise of this model: engine and trainer compute the same tokens in two
batch shapes, and the limit is NOISE_MULTIPLE times the largest difference, at least the type's rounding of a logit of
about 10 (FLOORS), and at most `canary_limit_bf16`.

With router replay the trainer scores a probe through the experts that the engine chose: of two experts with equal
weights either may be taken, which moves a log-prob by whole nats and says nothing of the weights.  That the routers'
own weights arrived is told by hashes and layer probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from rft.errors import ConfigError, WeightSyncFailed
from rft.sync.settings import SyncSettings
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import Engine, GenerateRequest, Scorer, ScoreRow
from rft.types.task import SamplingArgs

log = logging.getLogger(__name__)

MIN_TOKENS = 64
MOVED_TOKENS = 16  # at least so many tokens of the previous probe tell how far the version moved it
NOISE_MULTIPLE = 8
FLOORS = {"bfloat16": 0.02, "float16": 0.004}  # nats
_SEED = 20_000  # prompt i is always drawn with seed _SEED + i


class Probe(Struct, frozen=True):
    """What one engine generated for the probe prompts: per prompt int32 [R] tokens and float32 [R] log-probs.

    `experts`: which they went through, where the engine tells.
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
        """Its first prompts, at least two (they take turns in temperature), until `tokens` were generated for them."""
        ends = np.cumsum([len(t) for t in self.tokens])
        n = max(2, int(np.searchsorted(ends, tokens)) + 1)
        return Probe(self.version, self.prompts[:n], self.tokens[:n], self.logprobs[:n], self.experts[:n])


class Verdict(Struct, frozen=True, kw_only=True):
    """A passed canary, nats.  `moved` = how far the version moved the previous probe's log-probs (0 for the first version).

    `noise`: between two batch shapes when the run began; None in float32, where it is not measured.
    """

    max_abs: float
    limit: float
    moved: float
    below_noise: bool
    num_tokens: int
    noise: float | None = None


class Canary:
    """Probes of `prompts` (token ids).  With `kv_cache: keep` they must be shorter than a cache block."""

    def __init__(self, settings: SyncSettings, prompts: Sequence[Sequence[int]], scorer: Scorer) -> None:
        asked = len(prompts) * settings.canary_tokens
        if asked < MIN_TOKENS or not all(len(p) for p in prompts):
            raise ConfigError(
                f"{len(prompts)} prompts x {settings.canary_tokens} tokens = {asked} probe tokens; at least {MIN_TOKENS} "
                "are needed, and no prompt may be empty. Raise canary_prompts or canary_tokens.",
                key="synchronizer",
            )
        self._prompts = tuple(tuple(int(t) for t in p) for p in prompts)
        self._num_tokens, self._temperature = settings.canary_tokens, settings.canary_temperature or 1.0
        self._dtype, self._ceiling = settings.engine_dtype, settings.canary_limit_bf16
        self._stated = settings.canary_limit if self._dtype == "float32" else self._ceiling
        self._noises: dict[str, float] = {}  # of the engines and of the trainer
        self._later_limit: float | None = None
        self._scorer = scorer

    @property
    def noise(self) -> float | None:
        """The largest difference between two batch shapes; None where it is not measured."""
        return max(self._noises.values(), default=None)

    @property
    def limit(self) -> float:
        """The largest difference in nats that passes: for the first version that of the type; then at least 5 x its error, too."""
        if self._later_limit is not None:
            return self._later_limit
        if self.noise is None:
            return self._stated
        return min(self._ceiling, max(FLOORS.get(self._dtype, FLOORS["bfloat16"]), NOISE_MULTIPLE * self.noise))

    async def probe(self, engine: Engine, version: Version) -> Probe:
        """Let `engine` generate.  Raises WeightSyncFailed when the answer is unusable or says it is of another version."""
        done = await asyncio.gather(*(engine.generate(self._request(i, version)) for i in range(len(self._prompts))))
        probe = _probe([answers[0] for answers in done], version)
        if self._later_limit is None and self._dtype != "float32":
            alone = [(await engine.generate(self._request(i, version)))[0] for i in range(len(self._prompts))]
            self._heard("engines", _apart(probe, _probe(alone, version))[1])
        return probe

    def _heard(self, whose: str, noise: float) -> None:
        self._noises[whose] = max(noise, self._noises.get(whose, 0.0))

    async def check(self, probes: Sequence[Probe], previous: Sequence[Probe], *, names: Sequence[int] | None = None) -> Verdict:
        """One call of the scorer judges all engines' `probes`, and how far the version moved the `previous` ones.

        Raises WeightSyncFailed naming the engine by its place in `probes` (or among `names`), the difference and the limit.
        """
        previous = [p.first(MOVED_TOKENS) for p in previous]
        scored = await self._score([*probes, *previous])
        errors = [_max_abs(p.logprobs, s) for p, s in zip(probes, scored, strict=False)]
        moved = max((_max_abs(p.logprobs, s) for p, s in zip(previous, scored[len(probes) :], strict=True)), default=0.0)
        worst = int(np.argmax(errors))
        name = worst if names is None else names[worst]
        limit = self.limit
        if not errors[worst] <= limit:
            stale = (
                ", which is what an engine with the old weights would show"
                if moved > 3 * limit and errors[worst] >= moved / 2
                else ""
            )
            raise WeightSyncFailed(
                f"engine {name}: its log-probs of {probes[worst].num_tokens} generated tokens differ from the trainer's by "
                f"up to {errors[worst]:.2e} nats, allowed are {limit:.2e}; the version moved them by {moved:.2e}{stale}"
            )
        if self._later_limit is None:
            self._later_limit = max(limit, 5 * errors[worst])
            self._say_limits(errors[worst], limit)
        return Verdict(
            max_abs=errors[worst],
            limit=limit,
            moved=moved,
            below_noise=bool(previous) and moved <= 3 * limit,
            num_tokens=sum(p.num_tokens for p in probes),
            noise=self.noise,
        )

    def _say_limits(self, error: float, limit: float) -> None:
        assert self._later_limit is not None
        why = "stated for float32"
        if self.noise is not None:
            floor = FLOORS.get(self._dtype, FLOORS["bfloat16"])
            told = ", ".join(f"{whose} {noise:.2e}" for whose, noise in self._noises.items())
            why = (
                f"{NOISE_MULTIPLE} x the noise in {self._dtype} between two batch shapes ({told}), {floor:g} to {self._ceiling:g}"
            )
        log.info(
            "canary: the first version differs by %.2e nats, allowed are %.2e (%s); from now on %.2e",
            error,
            limit,
            why,
            self._later_limit,
        )

    def prove_same(self, now: Probe, before: Probe) -> None:
        """Raises WeightSyncFailed unless `now` is what the weights of `before` say: a roll-back verified without the trainer.

        Same prompts and seeds draw the same tokens; where noise made one differ, the prompt is compared up to there, and at least
        half of all tokens must be comparable.
        """
        compared, error = _apart(now, before)
        if 2 * compared < before.num_tokens:
            raise WeightSyncFailed(
                f"only {compared} of {before.num_tokens} probe tokens are those that {before.version} generated"
            )
        if not error <= self.limit:
            raise WeightSyncFailed(
                f"log-probs differ from those of {before.version} by {error:.2e} nats, allowed are {self.limit:.2e}"
            )

    def _request(self, index: int, version: Version) -> GenerateRequest:
        sampling = SamplingArgs(
            temperature=self._temperature_of(index), max_tokens=self._num_tokens, ignore_eos=True, seed=_SEED + index
        )
        return GenerateRequest(prompt_tokens=self._prompts[index], sampling=sampling, request_id=f"canary-{version}-{index}")

    def _temperature_of(self, index: int) -> float:
        """Prompts take turns between 1 and the temperature of training, at which dtypes can differ too."""
        return self._temperature if index % 2 else 1.0

    async def _score(self, probes: Sequence[Probe]) -> list[tuple[np.ndarray, ...]]:
        """Per probe and prompt float32 [R]; equal sequences (engines that drew the same) are scored once."""
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
                raise WeightSyncFailed(f"the trainer scored {len(score)} of {len(row.tokens) - row.prompt_length} probe tokens")
        if self._later_limit is None and self._dtype != "float32":
            alone = [(await self._scorer.score([row]))[0] for _, row in rows.values()]
            self._heard("trainer", _max_abs(scores, alone))
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


def _apart(now: Probe, before: Probe) -> tuple[int, float]:
    """How many tokens can be compared, of two probes of the same prompts and seeds, and their largest difference."""
    compared, error = 0, 0.0
    for ours, theirs, a, b in zip(now.tokens, before.tokens, now.logprobs, before.logprobs, strict=True):
        n = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:n] != theirs[:n])
        n = int(differ[0]) if len(differ) else n
        compared += n
        error = max(error, float(np.abs(a[:n] - b[:n]).max(initial=0.0)))
    return compared, error


def _check_answer(completion: Completion, version: Version) -> None:
    labels = {s.version for s in completion.version_spans}
    if labels != {version}:
        raise WeightSyncFailed(
            f"its probe answer is labelled {', '.join(map(str, sorted(labels))) or 'with nothing'}, not {version}"
        )
    if len(completion.tokens) == 0 or len(completion.tokens) != len(completion.logprobs):
        raise WeightSyncFailed(f"its probe answer has {len(completion.tokens)} tokens and {len(completion.logprobs)} log-probs")
    if not np.isfinite(completion.logprobs).all():
        raise WeightSyncFailed("its probe answer has log-probs that are not finite")


def _max_abs(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Largest difference; NaN where there is one, so that no comparison with a limit passes."""
    return float(np.max([np.max(np.abs(a.astype(np.float64) - b)) for a, b in zip(ours, theirs, strict=True)]))
