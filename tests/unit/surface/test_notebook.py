"""`rft.open_run`: numbers, rollouts, tokens and checkpoints of a run from its files, in whatever
state they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

import rft
from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError, Interrupted, PayloadDamaged, RunFailed
from rft.testing.storage_contract import group
from rft.trainer.checkpoint import manifest as manifests
from rft.types.block import encode
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.helpers import runs
from tests.helpers.asked_ledger import play, said


def measured(folder: Path, *lines: dict[str, object], rest: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def line(role: str, step: int, **values: float | None) -> dict[str, object]:
    return {
        "role": role,
        "step": step,
        "time": 1.0,
        "values": {k.replace("__", "/"): v for k, v in values.items()},
    }


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    await play(tmp_path / "run")
    return tmp_path / "run"


async def test_rollouts_are_those_of_the_view(run_dir: Path) -> None:
    run = rft.open_run(run_dir)
    every = run.rollouts()
    count = json.loads(
        said(
            "buffer", "query", str(run_dir), "SELECT count(*) AS n FROM v_experiences", "-f", "json"
        )[0]
    )
    assert len(every) == count[0]["n"] == 22
    assert len(run.rollouts(step=1)) == 8 == len(run.rollouts("used_step = 1"))
    assert run.rollouts("status = 'failed' -- a remark")["reason"][:] == ["timeout"]
    ordered = run.rollouts(order="-num_tokens")
    assert ordered["num_tokens"][:] == sorted(every["num_tokens"][:], reverse=True)
    assert sorted(ordered["id"][:]) == every["id"][:]
    with pytest.raises(ConfigError, match=r"no column\.  Did you mean reward\?"):
        run.rollouts(order="rewrd")
    none = run.rollouts("reward > 1e9", step=1)
    assert len(none) == 0 and none.features == every.features, (
        "columns and their types do not depend on the rows"
    )
    with pytest.raises(ConfigError, match=r"no such column: rewrd.*Did you mean reward"):
        run.rollouts("rewrd > 0")


async def test_tokens_are_those_of_sample(run_dir: Path) -> None:
    run = rft.open_run(run_dir)
    id = run.rollouts(step=1)["id"][0]
    told = json.loads(said("buffer", "sample", str(run_dir), "--id", id, "--tokens", "--json")[0])[
        0
    ]
    frame = run.tokens(id)
    assert (
        frame["token"].tolist() == told["tokens"] and frame["trained"].tolist() == told["loss_mask"]
    )
    mine = frame[frame["trained"]]
    assert mine["logprob"].tolist() == [
        p for p, m in zip(told["logprobs"], told["loss_mask"], strict=True) if m
    ]
    assert (
        set(mine["version"]) == {told["version_spans"][0]["version"]}
        and frame["logprob"].isna().sum() == (~frame["trained"]).sum()
    )
    with pytest.raises(ConfigError, match="'nobody' is not in"):
        run.tokens("nobody")
    failed = run.rollouts("status = 'failed'")["id"][0]
    assert run.tokens(failed).empty


async def test_samples_have_what_one_judges_an_answer_by(tmp_path: Path) -> None:
    """N22: messages, gold answer, and the judge's question were in the command line alone."""
    question = [{"role": "user", "content": "Is 5 right?"}]
    exchange = {"judge": "helpful", "question": question, "reply": "7", "why": "it is near"}
    info = {"gold_answer": "4", "judge": [exchange], "seen": 1}
    messages = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"})
    rows = [msgspec.structs.replace(r, info=info, messages=messages) for r in group(1, 0, 0)]
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await buffer.writer(1).append(encode(rows), accepted=True)
    await buffer.close()
    run = rft.open_run(tmp_path / "run")
    (sample,) = run.samples(num=1, order="best")
    assert sample["reward"] == max(run.rollouts()["reward"])
    assert sample["messages"] == list(messages) and sample["gold_answer"] == "4"
    assert sample["judges"] == [exchange] and sample["info"] == {"seen": 1}
    (same,) = run.samples(id=sample["id"])
    assert same == sample
    with pytest.raises(ConfigError, match=r"^id: 'none' is not in"):
        run.samples(id="none")
    with pytest.raises(ConfigError, match=r"no such column: rewrd"):
        run.samples("rewrd > 0")


def test_errors_are_a_line_in_a_cell() -> None:
    """N22: they stood under 27 frames.  IPython calls this method for the lines that it prints."""
    assert RunFailed("the engine is gone")._render_traceback_() == ["RunFailed: the engine is gone"]


async def test_a_payload_that_was_kept_in_memory(tmp_path: Path) -> None:
    await play(tmp_path / "run", storage_type="queue", storage_path="none")
    run = rft.open_run(tmp_path / "run")
    with pytest.raises(PayloadDamaged, match="kept in memory only"):
        run.tokens(run.rollouts(step=1)["id"][0])


def test_metrics_of_a_run_that_is_being_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        rft.open_run(folder)
    (folder / "state.json").write_text("{}")
    run = rft.open_run(folder)
    assert (
        run.metrics().empty
        and list(run.metrics().columns) == ["role", "step", "time"]
        and run.version is None
    )
    assert "nothing measured" in run.plot().svg
    measured(
        folder,
        line("explorer", 1, rollout__reward__mean=0.5),
        line("trainer", 1, actor__loss=None),
        rest='{"role": "tra',
    )
    frame = run.metrics()
    assert (
        frame["rollout/reward/mean"].tolist()[0] == 0.5
        and frame["actor/loss"].isna().all()
        and len(frame) == 2
    )
    assert "rollout/reward/mean" in run.plot("rollout/reward/mean").svg
    with pytest.raises(
        ConfigError,
        match=r"rollout/rewrd: was never measured\.  Did you mean rollout/reward/mean\?"
        r"  There are 2: rollout/reward/mean, actor/loss",
    ):
        run.plot("rollout/rewrd")
    measured(folder, rest='{"role": 1}\n')
    with pytest.raises(RunFailed, match=r"metrics.jsonl:1 is not a metric record"):
        run.metrics()


def test_folders_that_hold_no_or_half_a_run(tmp_path: Path) -> None:
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "a" / "run" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"runs below it: {tmp_path / 'a' / 'run'}"):
        rft.open_run(tmp_path)
    run = rft.open_run(tmp_path / "a" / "run")
    with pytest.raises(ConfigError, match="has no rollouts; it has no buffer"):
        run.rollouts()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        run.checkpoint()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        run.config()
    (run.run_dir / "buffer").mkdir()
    with pytest.raises(ConfigError, match="must hold one buffer"):
        run.rollouts()
    (run.run_dir / "buffer" / "experience_buffer.db").write_bytes(
        b"SQLite format 3\x00" + b"\x07" * 4000
    )
    with pytest.raises(ConfigError, match="damaged or not a ledger"):
        run.rollouts()


def test_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    for lineage, step in ((1, 5), (1, 10), (2, 7)):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        folder.mkdir(parents=True)
        manifests.commit(
            folder,
            version=Version(lineage, step),
            parent=None,
            consumption=Consumption(num_uses=0, digest="", cursor=0),
        )
    run = rft.open_run(tmp_path)
    assert run.version == Version(2, 7) and run.checkpoint().name == "global_step_7", (
        "a resumed run is newer, whatever its step"
    )
    assert run.checkpoint(5).name == "global_step_5"
    with pytest.raises(ConfigError, match=r"none of step 6; there are 5, 7, 10"):
        run.checkpoint(6)
    with pytest.raises(ConfigError, match="no evaluation; name a metric"):
        run.checkpoint("best")
    values = [(5, 0.9), (7, 0.2), (8, 1.0), (10, 0.4)]
    measured(
        tmp_path,
        *(
            line("eval", step, **{"eval__sums__mean@8": v, "eval__sums__failed": v})
            for step, v in values
        ),
    )
    assert run.checkpoint("best").name == "global_step_5"
    assert run.checkpoint("best", metric="eval/sums/failed", mode="min").name == "global_step_7"
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "tree": {
                    "trainer": {
                        "checkpoint": {"best_metric": "eval/sums/mean@8", "best_mode": "min"}
                    }
                }
            }
        )
    )
    assert run.checkpoint("best").name == "global_step_7"


@pytest.mark.e2e
async def test_a_run_in_a_notebook(tmp_path: Path, tiny_model: Path) -> None:
    """A cell runs inside of an event loop; its interrupt ends the run."""
    given = [f"model.model_path={tiny_model}", f"checkpoint_root_dir={tmp_path}", *runs.SMALL]
    assert rft.run(
        runs.TINY, *given, "trainer.total_steps=2", "name=short", in_process=True
    ).version == Version(1, 2)
    endless = threading.Thread(
        target=_interrupt_once_it_trains,
        args=(tmp_path / "rft" / "examples" / "long" / "metrics.jsonl",),
    )
    endless.start()
    with pytest.raises(Interrupted, match="stopped on request"):
        rft.run(runs.TINY, *given, "trainer.total_steps=100000", "name=long", in_process=True)
    endless.join()
    assert rft.open_run(tmp_path / "rft" / "examples" / "long").version is not None, (
        "it ends with a checkpoint"
    )


@pytest.mark.e2e
@pytest.mark.extra("judge_lab", "view")
async def test_a_notebook_does_what_the_commands_do(tmp_path: Path, tiny_model: Path) -> None:
    """N22, in a cell, whose thread has an event loop: replay, report, compare, evaluate."""
    given = [f"model.model_path={tiny_model}", f"checkpoint_root_dir={tmp_path}", *runs.SMALL]
    given += ["trainer.total_steps=1"]
    one, two = (
        rft.run(runs.TINY, *given, f"name={name}", f"seed={seed}", in_process=True)
        for seed, name in enumerate(("one", "two"))
    )
    rewards = one.replay("format_reward", limit=2)
    assert len(rewards) == 8 and rewards["new"].notna().all()
    with pytest.raises(ConfigError, match=r"^where: no rollout matches"):
        one.replay("format_reward", where="reward > 9")
    assert "<svg" in one.report(tmp_path / "one.html").read_text()
    assert one.compare(two)["configuration"]["seed"] == {"one": "0", "two": "1"}
    found = rft.evaluate(
        tiny_model,
        "rft.testing.tiny:copy_tasks",
        split="eval",
        rows=2,
        runs=2,
        max_prompt_tokens=60,
        max_response_tokens=1,
        out=tmp_path,
    )
    assert "bench/copy_tasks/mean@2" in found.metrics().columns
    with pytest.raises(ConfigError, match="engine_type"):
        rft.evaluate(tiny_model, "rft.testing.tiny:copy_tasks", engine="none")


def _interrupt_once_it_trains(metrics: Path) -> None:
    from rft.launch.signals import interrupt

    until = time.monotonic() + 120
    while time.monotonic() < until and not (
        metrics.is_file() and '"trainer"' in metrics.read_text()
    ):
        threading.Event().wait(0.05)
    interrupt()


@pytest.mark.e2e
def test_a_run_from_python(tmp_path: Path, tiny_model: Path) -> None:
    """`rft.run` trains and returns the run; opening it in another process imports no torch."""
    given = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "trainer.total_steps=2",
        *runs.SMALL,
    ]
    run = rft.run(runs.TINY, *given, in_process=True)
    assert run.version == Version(1, 2) and run.seconds is not None and run.resumed_from is None
    code = f"""
import sys, rft
run = rft.open_run({str(run.run_dir)!r})
frame, rows = run.metrics(), run.rollouts(step=2)
assert len(rows) == 16 == frame.query("role == 'trainer' and step == 2")["experience/rows"].item()
tokens = run.tokens(rows[0]["id"])
assert tokens["trained"].sum() == rows[0]["num_response_tokens"] and "copy" not in tokens["version"].tolist()
assert run.checkpoint("last").name == "global_step_2" and run.plot().svg.startswith("<svg")
assert "torch" not in sys.modules and "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=runs.ROOT)
