"""What `rft simulate` foretells: formulas against numbers computed by hand, planted speeds found
again, wrong files refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rft.cli.main import make
from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.extras.simulate import cluster_file, forecast
from rft.extras.simulate.cluster_file import ClusterFile, decode_steps
from rft.extras.simulate.forecast import Simulated, simulated
from rft.preflight.check import check
from rft.sync.schedule import Schedule
from rft.sync.timeline import simulate
from rft.types.metrics import MetricRecord
from tests.helpers import runs

CLUSTERS = runs.ROOT / "examples" / "clusters"
SPEEDS = {
    "peak_tflops": 100.0,
    "memory_gbps": 1000.0,
    "link_gbps": 100.0,
    "prompt_tokens": 100,
    "response_tokens": 200,
    "longest_response": 400,
}


def plan(cluster: ClusterFile, *changes: str) -> Plan:
    where = f"model.model_path={CLUSTERS / 'model'}"
    report = check(
        CLUSTERS / "config.yaml",
        [where, *changes, *cluster.overrides()],
        schema_only=True,
        facts=cluster.facts(),
    )
    assert report.plan is not None, report.errors
    return report.plan


def told(cluster: ClusterFile, *changes: str) -> Simulated:
    return simulated(cluster, plan(cluster, *changes), CLUSTERS)


def test_a_publication_stops_both_sides() -> None:
    found = simulate(Schedule(), steps=4, explore_s=3.0, train_s=2.0, sync_s=1.0)
    assert [x.end for x in found.trained] == [5.0, 11.0, 17.0, 23.0]
    ahead = simulate(Schedule(offset=1), steps=20, explore_s=3.0, train_s=2.0, sync_s=1.0)
    assert ahead.trained[-1].end - ahead.trained[-2].end == pytest.approx(4.0), (
        "a batch of 3 s and the pause in it"
    )


def test_shared_cores_are_no_faster_than_turns() -> None:
    ahead = simulate(Schedule(offset=1), steps=30, explore_s=3.0, train_s=2.0, overlap=0.5)
    assert ahead.trained[-1].end - ahead.trained[-2].end == pytest.approx(5.0)


def test_the_formulas_by_hand() -> None:
    c = ClusterFile(gpus_per_node=8, decode_step_ms=0, batch_s=0, step_s=0, sync_s=0, **SPEEDS)
    found = told(
        c,
        "buffer.batch_size=4",
        "algorithm.repeat_times=2",
        "explorer.rollout_model.engine_num=4",
        "trainer.world_size=4",
    )
    weights = 8_030_261_248 * 2 / (1000e9 * 0.6)  # seconds to read them once
    active = 7_504_658_432
    cached = 2 * 32 * 8 * 128 * 2
    per_text = 200 * cached / (1000e9 * 0.6)  # prompt and half of the answer, for each of two texts
    assert 2 * per_text + weights > 2 * 2 * active / (100e12 * 0.5), (
        "memory is what bounds decoding here"
    )
    explore = 400 * weights + 2 * 200 * per_text + 1 * 100 * 2 * active / (100e12 * 0.5)
    assert found.forecast.explore_s == pytest.approx(explore, rel=0.01)
    tokens = (8 * 200 + 4 * 100) / 4
    assert found.forecast.train_s == pytest.approx(tokens * 8 * active / (100e12 * 0.4), rel=0.01)
    assert found.forecast.sync_s == pytest.approx(8_030_261_248 * 2 / 100e9, rel=0.01)
    assert found.forecast.step_s == pytest.approx(
        explore + found.forecast.train_s + found.forecast.sync_s, rel=0.01
    )
    assert found.forecast.explorer_idle + found.forecast.trainer_idle == pytest.approx(1.0), (
        "they work in turns"
    )


def test_batches_that_may_begin_are_explored_at_once() -> None:
    """Three under each version: together 3 + 2 * 1 s, then their three steps of 2 s."""
    found = simulate(
        Schedule(interval=3), steps=6, explore_s=3.0, more_s=1.0, at_once=8, train_s=2.0, sync_s=1.0
    )
    assert [(x.begin, x.end) for x in found.explored[:3]] == [(0.0, pytest.approx(5.0))] * 3
    assert [x.end for x in found.trained] == pytest.approx([7.0, 9.0, 11.0, 19.0, 21.0, 23.0])
    assert forecast._busy(found.explored, 0.0, 23.0) == pytest.approx(10.0)
    two = simulate(Schedule(interval=3), steps=3, explore_s=3.0, more_s=1.0, at_once=2, train_s=2.0)
    assert [x.end for x in two.explored] == pytest.approx([4.0, 4.0, 7.0])


def test_later_turns_of_an_engine_take_the_mean() -> None:
    assert decode_steps(8, 8, 100.0, 300.0) == 300.0
    assert decode_steps(24, 8, 100.0, 300.0) == 500.0


def test_what_is_recommended_is_faster_within_its_bound() -> None:
    found = told(ClusterFile(gpus_per_node=8, gpu_memory_gib=80, **SPEEDS))
    times = [f.step_s for f in found.faster.values()]
    assert times == sorted(times, reverse=True) and times[0] <= found.forecast.step_s
    for bound, f in found.faster.items():
        assert (
            f.plan.staleness_bound is not None
            and f.plan.staleness_bound <= bound
            and f.staleness <= bound
        )
        assert len(f.plan.engines) + f.plan.learner.world_size == 8


def test_what_does_not_fit_is_not_recommended() -> None:
    assert told(ClusterFile(gpus_per_node=8, gpu_memory_gib=8, **SPEEDS)).faster == {}
    c = ClusterFile(gpus_per_node=8, gpu_memory_gib=40, **SPEEDS)
    split = ("explorer.rollout_model.engine_num=6", "trainer.world_size=2")
    whole = plan(c, *split)
    adapter = plan(c, *split, "model.lora_configs=[{lora_rank: 8}]")
    fits = [forecast.Simulation(c, p, CLUSTERS)._fits(p) for p in (whole, adapter)]
    assert fits == [False, True], (
        "the moments of 4 billion weights take 32 GB; an adapter has next to none"
    )


def test_planted_speeds_are_found_again(tmp_path: Path) -> None:
    """Of three runs whose times follow the model exactly."""
    given = np.random.default_rng(0)
    c = ClusterFile()
    found = {}
    for tasks in (2, 4, 16):
        p = plan(c, f"buffer.batch_size={tasks}", "algorithm.repeat_times=4")
        failed = {
            "rollout/runs": tasks * 4.0,
            "rollout/failed": tasks * 4.0,
            "rollout/time/batch": 99.0,
        }
        # no run of it has an answer
        records = [MetricRecord(role="explorer", step=1, time=0.0, values=failed)]
        for step in range(1, 9):
            mean = given.uniform(50, 60)
            longest = given.uniform(80, 120)
            rows = tasks * 4
            v: dict[str, float] = {
                "rollout/runs": rows,
                "rollout/response_length/mean": mean,
                "rollout/response_length/max": longest,
            }
            v |= {
                "rollout/prompt_length/mean": 30.0,
                "rollout/time/batch": 0.5
                + longest * 0.02
                + rows * mean * 0.001
                + tasks * 30 * 0.0005,
            }
            t = {
                "experience/response_tokens": rows * mean,
                "experience/prompt_length/mean": 30.0,
                "time/sync_s": 1.1,
            }
            t["perf/computed_positions"] = (rows * mean + tasks * 30) * (0.5 if step % 2 else 1.0)
            t["time/train_s"] = 0.3 + t["perf/computed_positions"] * 0.002
            records += [
                MetricRecord(role="explorer", step=step, time=0.0, values=v),
                MetricRecord(role="trainer", step=step, time=0.0, values=t),
                MetricRecord(
                    role="synchronizer",
                    step=step,
                    time=0.0,
                    values={"sync/total_s": 1.0, "sync/opened_s": 0.6},
                ),
            ]
        found[str(tasks)] = (p, records)
    s = cluster_file.of_runs(found)
    assert s.decode_step == pytest.approx(0.02, rel=0.05) and s.decode_token == pytest.approx(
        0.001, rel=0.05
    )
    assert s.trained_token == pytest.approx(0.002, rel=1e-6) and s.step == pytest.approx(
        0.3, rel=1e-6
    )
    assert s.computed == pytest.approx(5.5 / 7), "of steps 2 to 8"
    assert s.batch == pytest.approx(0.5, rel=0.2) and s.sync == pytest.approx(0.7), (
        "until exploring may go on"
    )


WRONG: dict[str, tuple[str, str]] = {
    "unknown key": ("memory_gpbs: 3", "no key memory_gpbs.*Did you mean memory_gbps"),
    "bandwidth zero": ("memory_gbps: 0", "memory_gbps"),
    "negative": ("nodes: -1", "nodes"),
    "text": ("peak_tflops: fast", "peak_tflops"),
    "share above 1": ("train_share: 1.5", "train_share"),
    "no speeds": ("nodes: 1", "lacks peak_tflops, memory_gbps, link_gbps"),
    "no network": (
        "{nodes: 2, " + ", ".join(f"{k}: {v}" for k, v in SPEEDS.items()) + "}",
        "lacks network_gbps",
    ),
    # whose speeds need no network's
    "no run on two nodes": ("{nodes: 2, measured: [nowhere]}", "no folder of a run"),
    "a list": ("[1, 2]", "object"),
    "no run": ("measured: [nowhere]", "no folder of a run"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused_with_the_key(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        c = cluster_file.load(file)
        simulated(c, plan(c), tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_the_examples_are_foretold(gpus: int) -> None:
    c = cluster_file.load(CLUSTERS / f"{gpus}-gpus.yaml")
    found = told(c, f"explorer.rollout_model.engine_num={gpus // 2}")
    assert len(found.faster) > 1 and found.forecast.step_s > max(
        found.forecast.explore_s, found.forecast.train_s
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", str(CLUSTERS / "model"))

    def run(cluster: Path, *overrides: str) -> Any:
        line = ["simulate", str(cluster), "--config", str(CLUSTERS / "config.yaml"), "--json"]
        line += overrides
        done = CliRunner().invoke(make("simulate"), line, catch_exceptions=False)
        return json.loads(done.output)

    forecast = run(CLUSTERS / "8-gpus.yaml")["simulation"]
    assert forecast["step_s"] > 0 and forecast["faster"][0]["max_staleness"] == 0
    errors = run(CLUSTERS / "64-gpus.yaml")["errors"]
    assert "whole nodes" in errors[0]["message"], "63 ranks are no whole nodes"
    small = tmp_path / "small.yaml"
    text = (CLUSTERS / "64-gpus.yaml").read_text()
    small.write_text(text.replace("gpu_memory_gib: 80", "gpu_memory_gib: 1"))
    errors = run(small, "explorer.rollout_model.engine_num=32")["errors"]
    assert any("GiB" in e["message"] for e in errors), "the file says how large its GPUs are"
    with pytest.raises(ConfigError, match="CLUSTER"):
        run(tmp_path / "none.yaml")
