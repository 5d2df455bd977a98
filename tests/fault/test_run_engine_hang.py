"""SIGSTOP in mid-run.  Of an engine or a judge: it is restarted, no group is lost.  Of another
process: the run ends and names it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from rft.monitor.read import read, series
from rft.testing import tiny
from tests.helpers import runs

STEPS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def log(root: Path, name: str) -> str:
    return str((runs.folder(root) / "logs" / f"{name}.log").read_text())


def check_rows(root: Path, stalled: int) -> None:
    """Every group is there with every run, was used once, and the metrics say how many engines
    hung.
    """
    ok, found = runs.audit(runs.folder(root))
    assert ok and found["balanced"] and found["used_twice"] == 0, found
    assert found["used"] == STEPS * 4 * 4, found
    records = read(runs.folder(root) / "metrics.jsonl")
    assert sum(v for _, v in series(records, "rollout/failed")) == 0
    assert sum(v for _, v in series(records, "sync/engines_stalled")) == stalled
    assert sum(v for _, v in series(records, "sync/engines_restarted")) == stalled
    assert sum(v for _, v in series(records, "engine/generated_tokens")) > 0
    assert [s for s, _ in series(records, "actor/lr")] == list(range(1, STEPS + 1))


def test_vllm_hangs(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    arguments = runs.arguments(
        tiny_model,
        root,
        *runs.SMALL,
        f"trainer.total_steps={STEPS}",
        "explorer.rollout_model.engine_type=vllm",
        "explorer.rollout_model.stall_timeout=5",
        "explorer.rollout_model.kv_cache_bytes=67108864",
    )
    run = runs.Run(*arguments)
    run.wait_for("step 3/", 300)
    host = psutil.Process(runs.state(root)["parts"]["engine-0"])
    (core,) = (p for p in host.children() if "EngineCore" in p.name() + "".join(p.cmdline()))
    core.send_signal(signal.SIGSTOP)
    run.wait_for("step 7/", 300)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, (
        "what a hung engine leaves is ended with it"
    )
    assert run.end(600) == 0, run.output
    said = log(root, "coordinator")
    assert (
        "vLLM hangs: no sign of life" in said
        and "is stopped" in said
        and "engine 0 was restarted" in said
    ), said
    records = read(runs.folder(root) / "metrics.jsonl")
    assert sum(v for _, v in series(records, "engine/steps")) > 0
    assert all(0 <= v <= 1 for _, v in series(records, "engine/prefix_cache_hit_rate"))
    check_rows(root, stalled=1)


def test_processes_of_an_engine_and_of_a_judge_hang(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    judge = tiny.make(tmp_path / "rm", labels=1)
    aux = (
        f"[{{name: rm, model_path: {judge}, task: score, engine_type: transformers, cpu_threads: "
        f"1, stall_timeout: 5}}]"
    )
    arguments = runs.arguments(
        tiny_model,
        root,
        *runs.SMALL,
        f"trainer.total_steps={STEPS}",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.cpu_threads=1",
        "explorer.rollout_model.stall_timeout=5",
        "buffer.explorer_input.default_reward_fn_type=reward_model",
        f"explorer.auxiliary_models={aux}",
    )
    run = runs.Run(*arguments)
    run.wait_for("step 3/", 300)
    pids = runs.state(root)["parts"]
    psutil.Process(pids["engine-1"]).send_signal(signal.SIGSTOP)
    run.wait_for("step 7/", 300)
    psutil.Process(pids["aux-rm-0"]).send_signal(signal.SIGSTOP)
    assert run.end(600) == 0, run.output
    assert "engine 1 was restarted" in log(root, "coordinator")
    said = log(root, "explorer")
    assert "aux-rm-0 hangs: its process answers nothing" in said and "is brought back" in said, said
    check_rows(root, stalled=1)


@pytest.mark.parametrize("part", ["trainer-0", "trainer-1", "explorer", "buffer", "coordinator"])
def test_a_part_that_hangs_ends_the_run_which_can_go_on(
    part: str, tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    ranks = ("trainer.world_size=2", "trainer.cpu_threads=1") if part == "trainer-1" else ()
    more = (
        f"trainer.total_steps={STEPS}",
        "trainer.save_interval=2",
        "cluster.stall_timeout=5",
        *ranks,
    )
    arguments = runs.arguments(tiny_model, root, *runs.SMALL, *more)
    run = runs.Run(*arguments)
    run.wait_for("step 3/", 300)
    psutil.Process(runs.state(root)["parts"][part]).send_signal(signal.SIGSTOP)
    code = run.end()
    assert code == 4 and f"{part} hangs: its process answers nothing" in run.output, (
        code,
        run.output,
    )
    assert "is stopped" in run.output and "cluster.stall_timeout" in run.output
    again = runs.Run(*arguments)
    assert again.end(600) == 0, again.output
    check_rows(root, stalled=0)
