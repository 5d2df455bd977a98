"""Forecast a plan on a possibly absent cluster: step times, waits, and which split, interval and
style are faster.

Uses the run's own schedule on a simulated clock.  Invariant: a forecast follows from the plan, the
model's sizes and `Speeds` alone. Not included: evaluations, checkpoints, several turns of a run,
judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.extras.simulate import cluster_file
from rft.extras.simulate.cluster_file import (
    ClusterFile,
    Speeds,
    concurrent,
    decode_steps,
    prompts_of,
    rows_of,
)
from rft.preflight import lora_checks, model_folder
from rft.preflight.memory_estimate import engine, estimate, too_much
from rft.preflight.memory_shared import phases
from rft.preflight.memory_terms import BYTES
from rft.preflight.model_folder import ModelShape
from rft.sync.schedule import Style
from rft.sync.timeline import Span, simulate

_STEPS = 60  # simulated steps, rounded up to full intervals; the first third is ignored
_BOUNDS = (0, 1, 2, 4, 8)  # of staleness, in steps


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Step times, idle shares and staleness of a plan.

    Seconds of a step and of its parts, each alone; idle shares of the explorer (no batch) and of
    the trainer (no train step or publication); mean staleness of trained rows, in steps.
    """

    plan: Plan
    step_s: float
    explore_s: float
    train_s: float
    sync_s: float
    explorer_idle: float
    trainer_idle: float
    staleness: float
    tokens_per_s: float  # trained response tokens


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The forecast of a configuration, and the fastest variant for bounds of staleness."""

    cluster: ClusterFile
    speeds: Speeds
    forecast: Forecast
    faster: dict[int, Forecast]

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) rows, the assumptions last."""
        f = self.forecast
        c = self.cluster
        s = self.speeds
        rows = [
            ("step", f"{f.step_s:.3g} s, {f.tokens_per_s:,.0f} trained response tokens a second"),
            (
                "parts alone",
                f"explore batch {f.explore_s:.3g} s, train step {f.train_s:.3g} s, publication "
                f"{f.sync_s:.3g} s",
            ),
            ("waits", f"explorer {f.explorer_idle:.0%}, trainer {f.trainer_idle:.0%} of the time"),
            ("staleness", f"{f.staleness:.3g} steps on average"),
            (
                "answers",
                f"prompts of {s.prompt:,.0f} tokens, {s.response:,.0f} generated, the longest of a "
                f"batch {s.longest:,.0f}",
            ),
        ]
        if c.measured:
            rows.append(("measured in", ", ".join(c.measured)))
            names = (
                "batch",
                "decode_step",
                "decode_token",
                "prompt_token",
                "step",
                "trained_token",
                "sync",
            )
        else:
            names = (
                "train_share",
                "prefill_share",
                "decode_share",
                "decode_step_ms",
                "batch_s",
                "step_s",
                "sync_s",
            )
        values = {k: getattr(s if c.measured else c, k) for k in names} | {
            "overlap": c.shared_speed
        }
        return [
            *rows,
            (
                "seconds" if c.measured else "assumed",
                ", ".join(f"{k} {v:.3g}" for k, v in values.items()),
            ),
        ]

    def choices(self) -> list[tuple[str, ...]]:
        """Return a table row for each of `faster`."""
        return [
            (
                f"{bound} step{'s' * (bound != 1)} old",
                str(len(f.plan.engines)),
                str(f.plan.learner.world_size),
                f"{f.plan.schedule.style}, sync_interval {f.plan.schedule.interval}, sync_offset "
                f"{f.plan.schedule.offset}",
                f"{f.step_s:.3g}",
                f"{f.explorer_idle:.0%}",
                f"{f.trainer_idle:.0%}",
            )
            for bound, f in self.faster.items()
        ]

    def to_json(self) -> dict[str, Any]:
        def as_json(f: Forecast) -> dict[str, Any]:
            schedule = f.plan.schedule
            chosen = {
                "engines": len(f.plan.engines),
                "ranks": f.plan.learner.world_size,
                "sync_style": schedule.style,
            }
            chosen |= {"sync_interval": schedule.interval, "sync_offset": schedule.offset}
            return chosen | {x.name: getattr(f, x.name) for x in fields(f) if x.name != "plan"}

        speeds = msgspec.structs.asdict(self.speeds)
        cluster = msgspec.structs.asdict(self.cluster)
        faster = [{"max_staleness": k} | as_json(f) for k, f in self.faster.items()]
        return as_json(self.forecast) | {"speeds": speeds, "cluster": cluster, "faster": faster}


def simulated(cluster: ClusterFile, plan: Plan, folder: Path) -> Simulated:
    """Forecast a plan; `folder`: that of the cluster file.

    Raises ConfigError if no forecast is possible.
    """
    simulation = Simulation(cluster, plan, folder)
    return Simulated(
        cluster=cluster,
        speeds=simulation.speeds(plan),
        forecast=simulation.forecast(plan),
        faster=simulation.faster(),
    )


class Simulation:
    """A configuration on a cluster."""

    def __init__(self, cluster: ClusterFile, plan: Plan, folder: Path) -> None:
        """Prepare a forecast; `folder`: that of the cluster file.

        Raises ConfigError if no forecast is possible.
        """
        if plan.mode not in ("both", "colocate"):
            raise ConfigError(
                "only modes both and colocate are simulated, whose explorer and trainer wait for "
                "each other",
                key="mode",
                given=plan.mode,
            )
        sizes = model_folder.sizes(plan.learner.model_path)
        if sizes is None:
            raise ConfigError(
                "has no config.json, so the model's sizes are not known",
                key="model.model_path",
                given=plan.learner.model_path,
            )
        self._cluster = cluster
        self._plan = plan
        self._memory = cluster.facts().gpu_memory
        self._shape: ModelShape = model_folder.shape(sizes[0])
        lora = plan.learner.lora
        self._trained = (
            None if lora is None else lora_checks.parameters(lora, self._shape, sizes[1])
        )
        runs = cluster_file.measured(cluster, folder)
        self._measured = cluster_file.of_runs(runs) if runs else None

    def speeds(self, plan: Plan) -> Speeds:
        if self._measured is not None:
            return self._measured
        texts = min(self._at_once(plan), plan.runs_per_step / len(plan.engines))
        return cluster_file.of_hardware(self._cluster, plan, self._shape, texts)

    def _at_once(self, plan: Plan) -> float:
        """Return how many texts one engine generates at a time, within its limit and its cache."""
        most = concurrent(plan)
        e = plan.engines[0]
        c = self._cluster
        if not self._memory or e.device != "cuda" or not c.prompt_tokens or not c.response_tokens:
            return most
        cache = sum(
            t.nbytes
            for t in engine(plan, e, self._shape, c.prompt_tokens, self._memory).terms
            if t.name == "key/value cache"
        )
        text = (c.prompt_tokens + c.response_tokens) * self._shape.cached * BYTES[e.dtype] / e.gpus
        return max(1.0, min(most, cache / text))

    def forecast(self, plan: Plan) -> Forecast:
        """Forecast the configuration or a variant of it."""
        s = self.speeds(plan)
        texts = plan.runs_per_step / len(plan.engines)
        runs = max((t.num_runs for t in plan.explorer.tasksets), default=1)
        explore_s, two = (
            s.batch
            + decode_steps(n, self._at_once(plan), s.response, s.longest) * s.decode_step
            + n * s.response * s.decode_token
            + n / runs * s.prompt * s.prompt_token
            for n in (texts, 2 * texts)
        )
        batches = max(1, plan.explorer.max_concurrent_runs // plan.runs_per_step)
        tokens = rows_of(plan) * s.response
        positions = (tokens + prompts_of(plan) * s.prompt) * s.computed
        train_s = s.step + positions / plan.learner.world_size * s.trained_token
        interval = plan.schedule.interval
        steps = -(-_STEPS // interval) * interval
        overlap = 1.0 if plan.mode == "colocate" else self._cluster.shared_speed
        simulated_run = simulate(
            plan.schedule,
            steps=steps,
            explore_s=explore_s,
            more_s=two - explore_s,
            at_once=batches,
            train_s=train_s,
            sync_s=s.sync,
            overlap=overlap,
        )
        first = steps // 3 // interval * interval
        begin = simulated_run.trained[first - 1].end
        end = simulated_run.trained[-1].end
        passed = end - begin
        trained = simulated_run.trained[first:]
        synced = sum(begin < at <= end for at, _ in simulated_run.published) * s.sync
        return Forecast(
            plan=plan,
            step_s=passed / len(trained),
            explore_s=explore_s,
            train_s=train_s,
            sync_s=s.sync,
            explorer_idle=1 - _busy(simulated_run.explored, begin, end) / passed,
            trainer_idle=max(0.0, 1 - (_busy(simulated_run.trained, begin, end) + synced) / passed),
            staleness=sum(x.number - 1 - x.version for x in trained) / len(trained),
            tokens_per_s=tokens * len(trained) / passed,
        )

    def faster(self) -> dict[int, Forecast]:
        """Return for bounds of staleness the fastest fitting split of the GPUs, interval and style,
        without bounds that gain nothing.
        """
        by_staleness: dict[int, Forecast] = {}
        splits = [p for p in _splits(self._plan) if self._fits(p)]
        for bound in _BOUNDS:
            tried = [self.forecast(v) for p in splits for v in _styles(p, bound)]
            best = min(tried, key=lambda f: f.step_s, default=None)
            if best is not None and best.step_s < 0.99 * min(
                (f.step_s for f in by_staleness.values()), default=float("inf")
            ):
                by_staleness[bound] = best
        return by_staleness

    def _fits(self, plan: Plan) -> bool:
        roles = estimate(plan, self._shape, trained=self._trained, gpu_memory=self._memory)
        roles += phases(plan, roles, self._shape)
        return not too_much(roles, plan, ram=None, gpu_memory=self._memory)


def _splits(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with other numbers of engines and ranks on the same GPUs."""
    yield plan
    size = plan.engines[0].gpus
    free = plan.cluster.gpus - plan.cluster.auxiliary_gpus
    if plan.cluster.shared or not size or not plan.cluster.trainer_gpus:
        return
    most = (free - 1) // size
    steps = max(1, plan.cluster.gpu_per_node // size) if free > plan.cluster.gpu_per_node else 1
    tried = {max(1, round(most * i / 16 / steps) * steps) for i in range(1, 17)}
    for engines in sorted(x for x in tried - {len(plan.engines)} if x <= most):
        ranks = free - engines * size
        if ranks > plan.cluster.gpu_per_node and ranks % plan.cluster.gpu_per_node:
            continue  # full nodes only
        yield replace(
            plan,
            engines=tuple(replace(plan.engines[0], name=f"engine-{i}") for i in range(engines)),
            learner=replace(plan.learner, world_size=ranks),
            cluster=replace(plan.cluster, trainer_gpus=ranks),
        )


def _styles(plan: Plan, bound: int) -> Iterator[Plan]:
    """Yield the plan with the schedules whose rows are at most `bound` steps old."""
    if plan.mode == "colocate":
        yield plan
        return
    styles: tuple[tuple[Style, int], ...] = (("fixed", 0), ("fixed", 1), ("trainer_driven", 0))
    for interval, (style, offset) in product((1, 2, 4, 8), styles):
        most = bound if style == "trainer_driven" else None
        with suppress(ConfigError):  # the schedule cannot keep the bound
            schedule = replace(
                plan.schedule,
                style=style,
                interval=interval,
                offset=offset,
                max_staleness=most,
                threshold=None,
            )
            promised = schedule.staleness_bound
            if promised is not None and promised <= bound:
                yield replace(plan, schedule=schedule)


def _busy(spans: Sequence[Span], begin: float, end: float) -> float:
    """Return the seconds with at least one active span; spans are ordered by begin."""
    busy = 0.0
    for x in spans:
        busy += max(0.0, min(x.end, end) - max(x.begin, begin))
        begin = max(begin, x.end)
    return busy
