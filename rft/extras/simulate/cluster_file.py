"""The file of `rft simulate`: a cluster that need not be here, and how fast it is, measured or
assumed.

Knows runs' metrics, not the schedule.  Invariant: every number that a forecast uses is one of
`assumptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from rft.config.memory_estimate import BYTES, GIB
from rft.config.model_folder import ModelShape
from rft.config.plan import Facts, Plan
from rft.config.yamlfile import parse
from rft.errors import ConfigError, nearest
from rft.files.disk import read_regular
from rft.monitor.read import read
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
    """Speeds in units of one GPU, or of the machine's cores where there is none; GB are 10⁹ bytes."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    gpu_memory_gib: Positive | None = None
    peak_tflops: Positive | None = None  # in the types that are computed with
    memory_gbps: Positive | None = None  # of a GPU's own memory
    link_gbps: Positive | None = None  # between GPUs of a node
    network_gbps: Positive | None = None  # of a node, to the others
    prompt_tokens: Count | None = None  # mean of a task's prompt
    response_tokens: Count | None = None  # mean of a run's answer
    longest_response: Count | None = None  # mean over batches of their longest answer
    train_share: Share = 0.4  # of peak_tflops, forward and backward
    prefill_share: Share = 0.5  # of peak_tflops
    decode_share: Share = 0.6  # of memory_gbps
    # of one token of all texts, beside reading memory: scheduling, sampling
    decode_step_ms: Annotated[float, Meta(ge=0)] = 5.0
    # of an explore batch, beside its tokens: rewards, storing
    batch_s: Annotated[float, Meta(ge=0)] = 1.0
    step_s: Annotated[float, Meta(ge=0)] = 0.5  # of a train step, beside its tokens
    # of a publication, beside its bytes: pause, probes, canary
    sync_s: Annotated[float, Meta(ge=0)] = 1.0
    # speed of each side while both work; without GPUs they share the cores
    overlap: Share | None = None
    measured: tuple[str, ...] = ()  # folders of runs, whose times replace the speeds above

    @property
    def shared_speed(self) -> float:
        return self.overlap if self.overlap is not None else 1.0 if self.gpus_per_node else 0.5

    def facts(self) -> Facts:
        """Of a machine of it; neither its memory nor its disk is judged."""
        memory = None if self.gpu_memory_gib is None else int(self.gpu_memory_gib * GIB)
        return Facts(
            gpus=self.nodes * self.gpus_per_node,
            memory=None,
            gpu_memory=memory,
            disk=lambda folder: None,
        )

    def overrides(self) -> list[str]:
        return [f"cluster.node_num={self.nodes}", f"cluster.gpu_per_node={self.gpus_per_node}"]


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and mean tokens.  `prompt_token` and `trained_token` are of one engine and of one
    rank.
    """

    batch: float
    decode_step: float  # one token of every text that an engine writes
    decode_token: float  # more for each of these texts
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
    """Raises ConfigError that names the key, what was given and what is allowed."""
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
        found = msgspec.convert(value, ClusterFile, strict=True)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"{path}: {str(e).replace('$.', '')}",
            key=KEY,
            given=value if not isinstance(value, dict) else None,
        ) from None
    lacking = [k for k in _HARDWARE if getattr(found, k) is None]
    if lacking and not found.measured:
        raise ConfigError(
            f"{path} lacks {', '.join(lacking)}; write them, or `measured: [RUN]` with the folder "
            f"of a run",
            key=KEY,
        )
    if found.nodes > 1 and found.network_gbps is None and not found.measured:
        raise ConfigError(f"{path} has {found.nodes} nodes and lacks network_gbps", key=KEY)
    return found


def of_hardware(c: ClusterFile, plan: Plan, shape: ModelShape, texts: float) -> Speeds:
    """From peaks and shares, for an engine that writes `texts` at a time.

    Decoding reads the weights once for a token of all texts, and the keys and values of each;
    prefill and training are counted in multiplications: 2 a parameter and token forward, 4 backward
    (Kaplan et al. 2020, section 2.1), without those of attention.
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
    # what bounds it: memory or arithmetic
    token = max(weights + texts * cached, texts * computed) - weights
    passes = 6 + 2 * learner.gradient_checkpointing + 2 * _forward_passes(plan)
    ranks = learner.world_size
    trained = passes * active / (peak * c.train_share)
    # weights are gathered twice and gradients are spread once for each micro-batch, while others
    # compute
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
    """Parameters that one token is multiplied with; of experts those that it goes through."""
    attention = shape.hidden * (2 * shape.queries + 2 * shape.keys)
    layer = attention + (3 if shape.gated else 2) * shape.hidden * shape.mlp
    return min(shape.parameters, shape.layers * layer + shape.embedding)


def _forward_passes(plan: Plan) -> int:
    """Before each step; a critic's are not counted."""
    from rft.algorithm.needs import needs

    before = needs(plan.learner.algorithm).before
    return ("ref" in before) + bool(before - {"ref", "values"})


def of_runs(runs: Mapping[str, tuple[Plan, list[MetricRecord]]]) -> Speeds:
    """From the times of runs on such machines: least squares with coefficients that are not
    negative.

    Raises ConfigError where there are too few steps.
    """
    batches = []
    steps = []
    syncs = []
    verified = []
    lengths = []
    computed = []
    for plan, records in runs.values():
        for v in (
            r.values
            for r in records
            if r.role == "explorer" and "rollout/response_length/mean" in r.values
        ):
            texts, mean, longest, prompt = (v[f"rollout/{x}"] for x in _LENGTHS)
            texts /= len(plan.engines)
            prompts = texts / max(t.num_runs for t in plan.explorer.tasksets) * prompt
            batches.append(
                (
                    [
                        1.0,
                        decode_steps(texts, concurrent(plan), mean, longest),
                        texts * mean,
                        prompts,
                    ],
                    v["rollout/time/batch"],
                )
            )
            lengths.append((mean, longest, prompt))
        # the first step compiles
        later = [r.values for r in records if r.role == "trainer" and r.step > 1]
        for v in (v for v in later if "time/train_s" in v):
            tokens = (
                v["experience/response_tokens"]
                + prompts_of(plan) * v["experience/prompt_length/mean"]
            )
            positions = v.get("perf/computed_positions", tokens)
            steps.append(([1.0, positions / plan.learner.world_size], v["time/train_s"]))
            computed.append(positions / tokens)
            syncs += [v["time/sync_s"]] if "time/sync_s" in v else []
        verified += [
            v["sync/total_s"] - v["sync/opened_s"]
            for v in (r.values for r in records)
            if "sync/opened_s" in v
        ]
    if min(len(batches), len(steps), len(syncs)) < 3:
        raise ConfigError(
            f"{', '.join(runs)}: three steps with a publication are the least to learn speeds from",
            key=KEY,
        )
    batch, decode_step, decode_token, prompt_token = _fitted(batches)
    step, trained = _fitted(steps)
    mean, longest, prompt = (fmean(x[i] for x in lengths) for i in range(3))
    return Speeds(
        batch=batch,
        decode_step=decode_step,
        decode_token=decode_token,
        prompt_token=prompt_token,
        step=step,
        trained_token=trained,
        sync=median(syncs) - median(verified or [0.0]),
        prompt=prompt,
        response=mean,
        longest=longest,
        computed=fmean(computed),
    )


def _fitted(rows: list[tuple[list[float], float]]) -> list[float]:
    """Least squares over all choices of columns whose coefficients come out positive; those of the
    others are 0.
    """
    given = np.array([r[0] for r in rows])
    times = np.array([r[1] for r in rows])
    scale = given.max(axis=0).clip(1e-12)
    width = given.shape[1]
    best = np.zeros(width)
    least = float(times @ times)
    for columns in chain.from_iterable(combinations(range(width), n) for n in range(1, width + 1)):
        part = given[:, columns] / scale[list(columns)]
        found = np.linalg.lstsq(part, times, rcond=None)[0]
        off = part @ found - times
        if (found >= 0).all() and off @ off < least:
            least = float(off @ off)
            best = np.zeros(width)
            best[list(columns)] = found / scale[list(columns)]
    return [float(x) for x in best]


def concurrent(plan: Plan) -> int:
    """Texts that one engine may write at a time."""
    return max(
        1,
        min(
            plan.engines[0].max_num_seqs, -(-plan.explorer.max_concurrent_runs // len(plan.engines))
        ),
    )


def decode_steps(texts: float, at_once: float, mean: float, longest: float) -> float:
    """Tokens in a row that an engine writes until the last of `texts` answers ends, `at_once` of
    them at a time.
    """
    return longest + mean * max(0.0, texts / at_once - 1)


def prompts_of(plan: Plan) -> float:
    """Prompts that a train step computes: one a group where rows share it, else one a row."""
    runs = max((t.num_runs for t in plan.explorer.tasksets), default=1)
    return rows_of(plan) / (runs if plan.learner.row_layout in ("auto", "shared") else 1)


def rows_of(plan: Plan) -> float:
    """Rows of a train step."""
    return plan.runs_per_step * plan.sync.step_units / plan.sync.batch_units


def measured(cluster: ClusterFile, beside: Path) -> dict[str, tuple[Plan, list[MetricRecord]]]:
    """The runs that the file names, by folder; relative ones are beside it.  Raises ConfigError."""
    from rft.config.verify import check

    found = {}
    for name in cluster.measured:
        folder = beside / name
        report = check(folder / "config.resolved.yaml", schema_only=True)
        if report.plan is None or not (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                "is no folder of a run that has trained", key=f"{KEY}: measured", given=name
            )
        found[name] = (report.plan, read(folder / "metrics.jsonl"))
    return found
