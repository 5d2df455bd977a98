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
version, bf16 has a stated absolute one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from rft.errors import ConfigError, WeightSyncFailed
from rft.sync.settings import SyncSettings
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import Engine, GenerateRequest, Scorer, ScoreRow
from rft.types.task import SamplingArgs

MIN_TOKENS = 64
_SEED = 20_000  # prompt i is always drawn with seed _SEED + i


class Probe(Struct, frozen=True):
    """What one engine generated for the probe prompts: per prompt int32 [R] tokens and float32 [R] log-probs."""

    version: Version
    prompts: tuple[np.ndarray, ...]
    tokens: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.tokens)


class Verdict(Struct, frozen=True, kw_only=True):
    """A passed canary, nats.  `moved` = how far the version moved the previous probe's log-probs (0 for the first version)."""

    max_abs: float
    limit: float
    moved: float
    below_noise: bool
    num_tokens: int


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
        self._num_tokens = settings.canary_tokens
        self._first_limit = settings.canary_limit if settings.engine_dtype == "float32" else settings.canary_limit_bf16
        self._floor = settings.canary_limit
        self._later_limit: float | None = None
        self._scorer = scorer

    @property
    def limit(self) -> float:
        """The largest difference in nats that passes: a stated one for the first version, then max(1e-3, 5 x its error)."""
        return self._first_limit if self._later_limit is None else self._later_limit

    async def probe(self, engine: Engine, version: Version) -> Probe:
        """Let `engine` generate.  Raises WeightSyncFailed when the answer is unusable or says it is of another version."""
        done = await asyncio.gather(*(engine.generate(self._request(i, version)) for i in range(len(self._prompts))))
        completions = [answers[0] for answers in done]
        for completion in completions:
            _check_answer(completion, version)
        return Probe(
            version,
            tuple(c.prompt_tokens for c in completions),
            tuple(c.tokens for c in completions),
            tuple(c.logprobs for c in completions),
        )

    async def check(self, probes: Sequence[Probe], previous: Sequence[Probe], *, names: Sequence[int] | None = None) -> Verdict:
        """One call of the scorer judges all engines' `probes`, and how far the version moved the `previous` ones.

        Raises WeightSyncFailed naming the engine by its place in `probes` (or among `names`), the difference and the limit.
        """
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
            self._later_limit = max(self._floor, 5 * errors[worst])
        return Verdict(
            max_abs=errors[worst],
            limit=limit,
            moved=moved,
            below_noise=bool(previous) and moved <= 3 * limit,
            num_tokens=sum(p.num_tokens for p in probes),
        )

    def prove_same(self, now: Probe, before: Probe) -> None:
        """Raises WeightSyncFailed unless `now` is what the weights of `before` say: a roll-back proven without the trainer.

        Same prompts and seeds draw the same tokens; where noise made one differ, the prompt is compared up to there, and at least
        half of all tokens must be comparable.
        """
        compared, error = 0, 0.0
        for ours, theirs, a, b in zip(now.tokens, before.tokens, now.logprobs, before.logprobs, strict=True):
            n = min(len(ours), len(theirs))
            differ = np.flatnonzero(ours[:n] != theirs[:n])
            n = int(differ[0]) if len(differ) else n
            compared += n
            error = max(error, float(np.abs(a[:n] - b[:n]).max(initial=0.0)))
        if 2 * compared < before.num_tokens:
            raise WeightSyncFailed(
                f"only {compared} of {before.num_tokens} probe tokens are those that {before.version} generated"
            )
        if not error <= self.limit:
            raise WeightSyncFailed(
                f"log-probs differ from those of {before.version} by {error:.2e} nats, allowed are {self.limit:.2e}"
            )

    def _request(self, index: int, version: Version) -> GenerateRequest:
        sampling = SamplingArgs(temperature=1.0, max_tokens=self._num_tokens, ignore_eos=True, seed=_SEED + index)
        return GenerateRequest(prompt_tokens=self._prompts[index], sampling=sampling, request_id=f"canary-{version}-{index}")

    async def _score(self, probes: Sequence[Probe]) -> list[tuple[np.ndarray, ...]]:
        """Per probe and prompt float32 [R]; equal sequences (engines that drew the same) are scored once."""
        rows: dict[bytes, tuple[int, ScoreRow]] = {}
        places: list[list[int]] = []
        for probe in probes:
            places.append([])
            for prompt, tokens in zip(probe.prompts, probe.tokens, strict=True):
                row = ScoreRow(tokens=np.concatenate([prompt, tokens]).astype(np.int32, copy=False), prompt_length=len(prompt))
                key = len(prompt).to_bytes(4, "little") + row.tokens.tobytes()
                places[-1].append(rows.setdefault(key, (len(rows), row))[0])
        scores = await self._scorer.score([row for _, row in rows.values()])
        for (_, row), score in zip(rows.values(), scores, strict=True):
            if len(score) != len(row.tokens) - row.prompt_length:
                raise WeightSyncFailed(f"the trainer scored {len(score)} of {len(row.tokens) - row.prompt_length} probe tokens")
        return [tuple(scores[i] for i in place) for place in places]


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
