"""The cluster file of `rft simulate`: a possibly absent cluster and its measured or assumed speeds.

Depends on runs' metrics, not on the schedule.  Invariant: every number that a forecast uses is
listed in its assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from rft.config.plan import Facts, Plan
from rft.config.yamlfile import parse
from rft.errors import ConfigError, nearest
from rft.files.disk import read_regular
from rft.monitor.read import read
from rft.preflight.memory_terms import BYTES, GIB
from rft.preflight.model_folder import ModelShape
from rft.types.metrics import MetricRecord

KEY = "CLUSTER"
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
_LENGTHS = ("runs", "response_length/mean", "response_length/max", "prompt_length/mean")
_HARDWARE = (
    "peak_tflops",
    "memory_gbps",
    "link_gbps",
    "prompt_tokens",
    "response_tokens",
    "longest_response",
)


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speeds of one GPU, or of the machine's cores without GPUs; GB are 10⁹ bytes."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    gpu_memory_gib: Positive | None = None
    peak_tflops: Positive | None = None  # in the compute dtypes
    memory_gbps: Positive | None = None  # of a GPU's own memory
    link_gbps: Positive | None = None  # between GPUs of a node
    network_gbps: Positive | None = None  # between nodes
    prompt_tokens: Count | None = None  # mean of a task's prompt
    response_tokens: Count | None = None  # mean of a run's answer
    longest_response: Count | None = None  # mean over batches of their longest answer
    train_share: Share = 0.4  # of peak_tflops, forward and backward
    prefill_share: Share = 0.5  # of peak_tflops
    decode_share: Share = 0.6  # of memory_gbps
    # per token of all texts, besides reading memory: scheduling, sampling
    decode_step_ms: Annotated[float, Meta(ge=0)] = 5.0
    # per explore batch, besides its tokens: rewards, storing
    batch_s: Annotated[float, Meta(ge=0)] = 1.0
    step_s: Annotated[float, Meta(ge=0)] = 0.5  # per train step, besides its tokens
    # per publication, besides its bytes: pause, probes, canary
    sync_s: Annotated[float, Meta(ge=0)] = 1.0
    # speed of each side while both work; without GPUs they share the cores
    overlap: Share | None = None
    measured: tuple[str, ...] = ()  # run folders whose times replace these speeds

    @property
    def shared_speed(self) -> float:
        return self.overlap if self.overlap is not None else 1.0 if self.gpus_per_node else 0.5

    def facts(self) -> Facts:
        """Return the facts of a machine of the cluster; main memory and disk are not judged."""
        memory = None if self.gpu_memory_gib is None else int(self.gpu_memory_gib * GIB)
        return Facts(
            gpus=self.nodes * self.gpus_per_node,
            memory=None,
            gpu_memory=memory,
            gpu_memory_declared=memory is not None,
            disk=lambda folder: None,
        )

    def overrides(self) -> list[str]:
        return [f"cluster.node_num={self.nodes}", f"cluster.gpu_per_node={self.gpus_per_node}"]


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and mean tokens.  `prompt_token` is per engine, `trained_token` per rank."""

    batch: float
    decode_step: float  # one token of every text that an engine generates
    decode_token: float  # additional, for each of these texts
    prompt_token: float
    step: float
    trained_token: float
    sync: float
    prompt: float
    response: float
    longest: float
    # share of positions that a step computes: groups with equal rewards are skipped
    computed: float = 1.0


def load(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises ConfigError naming the key, the given value and the allowed values.
    """
    try:
        value, _ = parse(read_regular(path, 1 << 20).decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot be read: {e}", key=KEY, given=str(path)) from None
    if isinstance(value, dict) and (
        unknown := [k for k in value if k not in ClusterFile.__struct_fields__]
    ):
        allowed = ", ".join(ClusterFile.__struct_fields__)
        raise ConfigError(
            f"has no key {unknown[0]}; it takes "
            f"{allowed}.{nearest(unknown[0], ClusterFile.__struct_fields__)}",
            key=KEY,
        )
    try:
        cluster = msgspec.convert(value, ClusterFile, strict=True)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"{path}: {str(e).replace('$.', '')}",
            key=KEY,
            given=value if not isinstance(value, dict) else None,
        ) from None
    lacking = [k for k in _HARDWARE if getattr(cluster, k) is None]
    if lacking and not cluster.measured:
        raise ConfigError(
            f"{path} lacks {', '.join(lacking)}; write them, or `measured: [RUN]` with the folder "
            f"of a run",
            key=KEY,
        )
    if cluster.nodes > 1 and cluster.network_gbps is None and not cluster.measured:
        raise ConfigError(f"{path} has {cluster.nodes} nodes and lacks network_gbps", key=KEY)
    return cluster


def of_hardware(c: ClusterFile, plan: Plan, shape: ModelShape, texts: float) -> Speeds:
    """Return speeds from peaks and shares, for an engine that generates `texts` at a time.

    Decoding reads the weights once for a token of all texts, and the keys and values of each;
    prefill and training are counted in multiplications: 2 per parameter and token forward, 4
    backward (Kaplan et al. 2020, section 2.1), without those of attention.
    """
    assert (
        c.peak_tflops
        and c.memory_gbps
        and c.link_gbps
        and c.prompt_tokens
        and c.response_tokens
        and c.longest_response
    )
    engine = plan.engines[0]
    learner = plan.learner
    gpus = max(1, engine.gpus)
    active = _active(shape)
    memory = gpus * c.memory_gbps * 1e9 * c.decode_share
    peak = c.peak_tflops * 1e12
    weights = shape.parameters * BYTES[engine.dtype] / memory
    cached = (c.prompt_tokens + c.response_tokens / 2) * shape.cached * BYTES[engine.dtype] / memory
    computed = 2 * active / (gpus * peak * c.prefill_share)
    # bounded by memory or arithmetic
    token = max(weights + texts * cached, texts * computed) - weights
    passes = 6 + 2 * learner.gradient_checkpointing + 2 * _forward_passes(plan)
    ranks = learner.world_size
    trained = passes * active / (peak * c.train_share)
    # each micro-batch gathers weights twice and scatters gradients once, overlapping computation
    if ranks > 1:
        link = (
            c.link_gbps
            if ranks <= c.gpus_per_node or not c.network_gbps
            else c.network_gbps / c.gpus_per_node
        )
        moved = 3 * shape.parameters * BYTES[learner.dtype] * (ranks - 1) / ranks / (link * 1e9)
        trained = max(trained, moved / learner.max_token_len_per_gpu)
    sent = (
        shape.parameters
        * BYTES[learner.dtype]
        / ((c.network_gbps if c.nodes > 1 and c.network_gbps else c.link_gbps) * 1e9)
    )
    return Speeds(
        batch=c.batch_s,
        decode_step=c.decode_step_ms / 1e3 + weights,
        decode_token=token / max(1.0, texts),
        prompt_token=computed,
        step=c.step_s,
        trained_token=trained,
        sync=c.sync_s + sent,
        prompt=c.prompt_tokens,
        response=c.response_tokens,
        longest=c.longest_response,
    )


def _active(shape: ModelShape) -> int:
    """Return the parameters multiplied per token; of experts, only the chosen ones."""
    attention = shape.hidden * (2 * shape.queries + 2 * shape.keys)
    layer = attention + (3 if shape.gated else 2) * shape.hidden * shape.mlp
    return min(shape.parameters, shape.layers * layer + shape.embedding)


def _forward_passes(plan: Plan) -> int:
    """Return the number of forward passes before each step, without the critic's."""
    from rft.algorithm.needs import needs

    before = needs(plan.learner.algorithm).before
    return ("ref" in before) + bool(before - {"ref", "values"})


@dataclass
class _Samples:
    """Terms and seconds of every step of the runs."""

    batches: list[tuple[list[float], float]] = field(default_factory=list)
    steps: list[tuple[list[float], float]] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    lengths: list[tuple[float, float, float]] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)  # positions / tokens

    def add_batch(self, plan: Plan, values: Mapping[str, float]) -> None:
        texts, mean, longest, prompt = (values[f"rollout/{x}"] for x in _LENGTHS)
        texts /= len(plan.engines)
        prompts = texts / max(t.num_runs for t in plan.explorer.tasksets) * prompt
        steps = decode_steps(texts, concurrent(plan), mean, longest)
        terms = [1.0, steps, texts * mean, prompts]
        self.batches.append((terms, values["rollout/time/batch"]))
        self.lengths.append((mean, longest, prompt))

    def add_step(self, plan: Plan, values: Mapping[str, float]) -> None:
        prompts = prompts_of(plan) * values["experience/prompt_length/mean"]
        tokens = values["experience/response_tokens"] + prompts
        positions = values.get("perf/computed_positions", tokens)
        terms = [1.0, positions / plan.learner.world_size]
        self.steps.append((terms, values["time/train_s"]))
        self.computed.append(positions / tokens)
        if "time/sync_s" in values:
            self.syncs.append(values["time/sync_s"])


def of_runs(runs: Mapping[str, tuple[Plan, list[MetricRecord]]]) -> Speeds:
    """Fit speeds to the times of runs on such machines, by least squares with non-negative
    coefficients.

    Raises ConfigError for too few steps.
    """
    samples = _Samples()
    for plan, records in runs.values():
        for r in records:
            if r.role == "explorer" and "rollout/response_length/mean" in r.values:
                samples.add_batch(plan, r.values)
            # the first step compiles
            if r.role == "trainer" and r.step > 1 and "time/train_s" in r.values:
                samples.add_step(plan, r.values)
            if "sync/opened_s" in r.values:
                samples.verified.append(r.values["sync/total_s"] - r.values["sync/opened_s"])
    if min(len(samples.batches), len(samples.steps), len(samples.syncs)) < 3:
        raise ConfigError(
            f"{', '.join(runs)}: three steps with a publication are the least to learn speeds from",
            key=KEY,
        )
    batch, decode_step, decode_token, prompt_token = _fitted(samples.batches)
    step, trained = _fitted(samples.steps)
    mean, longest, prompt = (fmean(x[i] for x in samples.lengths) for i in range(3))
    return Speeds(
        batch=batch,
        decode_step=decode_step,
        decode_token=decode_token,
        prompt_token=prompt_token,
        step=step,
        trained_token=trained,
        sync=median(samples.syncs) - median(samples.verified or [0.0]),
        prompt=prompt,
        response=mean,
        longest=longest,
        computed=fmean(samples.computed),
    )


def _fitted(rows: list[tuple[list[float], float]]) -> list[float]:
    """Return the best least-squares fit over all subsets of columns with non-negative coefficients;
    other coefficients are 0.
    """
    terms = np.array([r[0] for r in rows])
    times = np.array([r[1] for r in rows])
    scale = terms.max(axis=0).clip(1e-12)
    width = terms.shape[1]
    best = np.zeros(width)
    least = float(times @ times)
    for columns in chain.from_iterable(combinations(range(width), n) for n in range(1, width + 1)):
        part = terms[:, columns] / scale[list(columns)]
        coefficients = np.linalg.lstsq(part, times, rcond=None)[0]
        off = part @ coefficients - times
        if (coefficients >= 0).all() and off @ off < least:
            least = float(off @ off)
            best = np.zeros(width)
            best[list(columns)] = coefficients / scale[list(columns)]
    return [float(x) for x in best]


def concurrent(plan: Plan) -> int:
    """Return how many texts one engine may generate at a time."""
    return max(
        1,
        min(
            plan.engines[0].max_num_seqs, -(-plan.explorer.max_concurrent_runs // len(plan.engines))
        ),
    )


def decode_steps(texts: float, at_once: float, mean: float, longest: float) -> float:
    """Return the tokens that an engine generates in sequence until the last of `texts` answers
    ends, with `at_once` at a time.
    """
    return longest + mean * max(0.0, texts / at_once - 1)


def prompts_of(plan: Plan) -> float:
    """Return the prompts that a train step computes: one per group if shared, else one per row."""
    runs = max((t.num_runs for t in plan.explorer.tasksets), default=1)
    return rows_of(plan) / (runs if plan.learner.row_layout in ("auto", "shared") else 1)


def rows_of(plan: Plan) -> float:
    """Return the rows of a train step."""
    return plan.runs_per_step * plan.schedule.step_units / plan.schedule.batch_units


def measured(cluster: ClusterFile, base: Path) -> dict[str, tuple[Plan, list[MetricRecord]]]:
    """Return the runs that the file names, by folder; relative folders start at `base`.

    Raises ConfigError.
    """
    from rft.preflight.check import check

    by_folder = {}
    for name in cluster.measured:
        folder = base / name
        report = check(folder / "config.resolved.yaml", schema_only=True)
        if report.plan is None or not (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                "is no folder of a run that has trained", key=f"{KEY}: measured", given=name
            )
        by_folder[name] = (report.plan, read(folder / "metrics.jsonl"))
    return by_folder
