"""Whole runs in one process that fail, and runs that go on from what others left: named cause, exit
code, nothing lost.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rft.errors import is_out_of_memory
from rft.monitor.read import read, series
from rft.trainer.checkpoint import manifest as manifests
from tests.helpers.command import Done, rft

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"
INPUT = "buffer.explorer_input"
BROKEN = """
from rft.types.completion import Score
from rft.workflow.base import Workflow

class Raises(Workflow):
    async def run(self, task, ctx):
        return self.parse(task)

    def parse(self, task):
        return {"answer": 1}["anwser"]

class RaisesPlainly(Workflow):
    def run(self, task, ctx):
        raise OSError("the tool server is gone")

class NoCall(Workflow):
    async def run(self, task, ctx):
        return ctx.transcript()

class Exits(Workflow):
    async def run(self, task, ctx):
        raise SystemExit(3)

def reward_raises(task, transcript):
    return 1 / 0

def reward_none(task, transcript):
    return None

def reward_nan(task, transcript):
    return float("nan")

def reward_text(task, transcript):
    return "good"

def unscored(task, transcript):
    return Score(value=None)

def sometimes(task, transcript):
    if transcript.turns[0].completion.tokens[0] % 2:
        raise RuntimeError("bad luck")
    return 1.0

def part_is_nan(task, transcript):
    odd = transcript.turns[0].completion.tokens[0] % 2
    return {"right": 1.0, "short": float("nan") if odd else 0.5}
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    return file


def start(root: Path, model: Path, *changes: str) -> Done:
    return rft(
        "run",
        "--in-process",
        "-c",
        CONFIG,
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        *changes,
    )


def folder(root: Path) -> Path:
    return root / "project" / "group" / "name"


def state(root: Path) -> dict[str, object]:
    return dict(json.loads((folder(root) / "state.json").read_text()))


def balanced(root: Path) -> dict[str, int]:
    """The run's account, recomputed from its files."""
    done = rft("buffer", "audit", folder(root), "--json")
    assert done.code == 0, done.output
    return dict(json.loads(done.output))


# ------------------------------------------------------------ user code that fails

FAILS = {
    "workflow raises": (
        f"{INPUT}.default_workflow_type",
        "Raises",
        ("KeyError: 'anwser'", "in parse", "broken.py"),
    ),
    "blocking workflow raises": (
        f"{INPUT}.default_workflow_type",
        "RaisesPlainly",
        ("OSError: the tool server is gone", "broken.py"),
    ),
    "workflow makes no call": (f"{INPUT}.default_workflow_type", "NoCall", ("made no model call",)),
    "workflow exits": (f"{INPUT}.default_workflow_type", "Exits", ("called sys.exit(3)",)),
    "reward raises": (
        f"{INPUT}.default_reward_fn_type",
        "reward_raises",
        ("ZeroDivisionError", "in reward_raises", "broken.py"),
    ),
    "reward is None": (
        f"{INPUT}.default_reward_fn_type",
        "reward_none",
        ("reward is None; it must be a finite number",),
    ),
    "reward is NaN": (
        f"{INPUT}.default_reward_fn_type",
        "reward_nan",
        ("reward is nan; it must be a finite number",),
    ),
    "reward is text": (
        f"{INPUT}.default_reward_fn_type",
        "reward_text",
        ("reward is 'good'; it must be a finite number",),
    ),
}


# as "reward is None"; tests/unit/reward looks at every value
SAME_WAY = ("reward is NaN", "reward is text")
EACH = [pytest.param(kind, marks=pytest.mark.slow) if kind in SAME_WAY else kind for kind in FAILS]


@pytest.mark.parametrize("kind", EACH)
def test_user_code_that_always_fails_stops_the_run(
    tiny_model: Path, tmp_path: Path, broken: Path, kind: str
) -> None:
    key, name, says = FAILS[kind]
    done = start(tmp_path, tiny_model, f"{key}={broken}:{name}")
    assert done.code == 4, done.output
    for text in ("10 groups in a row failed completely, so the run stops", *says):
        assert text in done.output, done.output
    assert "bug in rft" not in done.output and done.cpu_s < 30
    assert state(tmp_path)["phase"] == "failed" and "10 groups in a row" in str(
        state(tmp_path)["reason"]
    )
    account = balanced(tmp_path)
    assert account["acked"] >= 20, "every failed run is on record, none of them as a zero"
    assert account["used"] == 0


def test_a_small_run_shows_the_users_traceback_too(
    tiny_model: Path, tmp_path: Path, broken: Path
) -> None:
    """Its batch is short before ten groups have failed."""
    done = start(
        tmp_path,
        tiny_model,
        f"{INPUT}.default_workflow_type={broken}:Raises",
        "buffer.batch_size=1",
    )
    assert done.code == 4 and "all 3 refills are used up" in done.output, done.output
    assert "KeyError: 'anwser'" in done.output and "in parse" in done.output


def test_the_same_command_goes_on_once_the_code_is_corrected(
    tiny_model: Path, tmp_path: Path, broken: Path
) -> None:
    """Nothing was learnt yet, so another reward may be named too."""
    assert (
        start(tmp_path, tiny_model, f"{INPUT}.default_reward_fn_type={broken}:reward_text").code
        == 4
    )
    done = start(tmp_path, tiny_model)
    assert done.code == 0 and "done  step 2" in done.output, done.output
    assert balanced(tmp_path)["used"] == 2 * 4 * 2


def test_groups_that_nobody_can_score_end_the_run_and_say_so(
    tiny_model: Path, tmp_path: Path, broken: Path
) -> None:
    done = start(tmp_path, tiny_model, f"{INPUT}.default_reward_fn_type={broken}:unscored")
    assert done.code == 4 and "10 groups in a row got no reward, so the run stops" in done.output, (
        done.output
    )
    assert "group 0001.00.00000000.000000 cannot be trained: unscored.  " in done.output


@pytest.mark.parametrize(
    ("reward", "algorithm", "says"),
    [
        ("sometimes", "grpo", "RuntimeError: bad luck"),
        ("part_is_nan", "gdpo", "reward part 'short' is nan; it must be a finite number"),
    ],
)
def test_rewards_that_fail_now_and_then_cost_their_runs_only(
    tiny_model: Path, tmp_path: Path, broken: Path, reward: str, algorithm: str, says: str
) -> None:
    done = start(
        tmp_path,
        tiny_model,
        f"{INPUT}.default_reward_fn_type={broken}:{reward}",
        f"algorithm.algorithm_type={algorithm}",
        "algorithm.repeat_times=6",
        "buffer.max_refill=40",
    )
    assert done.code == 0, done.output
    failed = sum(v for _, v in series(read(folder(tmp_path) / "metrics.jsonl"), "rollout/failed"))
    account = balanced(tmp_path)
    assert failed > 0 and account["used"] + failed <= account["acked"]
    with closing(sqlite3.connect(folder(tmp_path) / "buffer/experience_buffer.db")) as ledger:
        reasons = ledger.execute(
            "SELECT reason, reward FROM experiences WHERE status = 'failed'"
        ).fetchall()
        named = [value for reason, value in reasons if says in reason]
        assert named and {value for _, value in reasons} == {None}, "counted, and never a zero"


# ------------------------------------------------------------ out of memory

LIMITED = """
import resource, sys
import torch, transformers, rft.engine.transformers, rft.launch.modes, rft.trainer.loop.learner
from rft.cli.main import main
torch.set_num_threads(1)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1200 << 20),) * 2)
main(sys.argv[1:])
"""


def test_out_of_memory_is_named_with_its_remedy(tiny_model: Path, tmp_path: Path) -> None:
    """A real one: the process may not grow by more than 1.2 GB, and one micro-batch of 384 long
    rows needs more.
    """
    arguments = [
        "run",
        "--in-process",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "model.max_prompt_tokens=400",
        "model.max_response_tokens=100",
        "algorithm.repeat_times=48",
        "buffer.batch_size=8",
        "trainer.row_layout=padded",
        "trainer.max_token_len_per_gpu=200000",
        "trainer.logprob_chunk_tokens=200000",
    ]
    # the limit counts addresses, and each thread's arena reserves many
    one_arena = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        env=one_arena,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert "OutOfMemory: trainer rank 0 ran out of cpu memory" in output, output
    assert (
        "Lower trainer.max_token_len_per_gpu (now 200000)" in output and "Traceback" not in output
    )
    assert state(tmp_path)["phase"] == "failed" and balanced(tmp_path)["used"] == 0


@pytest.mark.parametrize(
    "says",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to"
        ),
        RuntimeError("could not create a primitive"),
        RuntimeError("can't start new thread"),
        RuntimeError("CUDA error: out of memory"),  # where another process has filled the GPU
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_libraries_say_without_memory(says: BaseException) -> None:
    assert is_out_of_memory(says) and not is_out_of_memory(RuntimeError("shape mismatch"))


# ------------------------------------------------------------ going on


@pytest.fixture(scope="module")
def two_checkpoints(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two_checkpoints")
    done = start(root, tiny_model, "trainer.save_interval=1", "trainer.save_hf_checkpoint=never")
    assert done.code == 0, done.output
    assert {p.name for p in manifests.committed(folder(root) / "checkpoints")} == {
        "global_step_1",
        "global_step_2",
    }
    return root


@pytest.fixture
def copy(two_checkpoints: Path, tmp_path: Path) -> Iterator[Path]:
    """The run in a folder of its own, for a test to damage."""
    shutil.copytree(two_checkpoints, tmp_path / "copy")
    yield tmp_path / "copy"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_another_model_is_refused(
    two_checkpoints: Path, tiny_untied: Path, tiny_model: Path
) -> None:
    before = {
        p: p.stat().st_mtime_ns
        for p in folder(two_checkpoints).rglob("*")
        if p.is_file() and p.name != ".lock"
    }
    done = start(two_checkpoints, tiny_untied)
    assert done.code == 2
    assert (
        f"model.model_path: was '{tiny_model}' when the run in {folder(two_checkpoints)} began and "
        f"is '{tiny_untied}'" in done.output
    )
    assert "write the old value, or choose another `name`" in done.output
    assert before == {p: p.stat().st_mtime_ns for p in before}, (
        "a refused change leaves the run as it was"
    )


def test_another_learning_rate_is_taken_and_logged(copy: Path, tiny_model: Path) -> None:
    done = start(
        copy,
        tiny_model,
        "algorithm.optimizer.lr=5e-4",
        "trainer.total_steps=3",
        f"resume_from_path={copy}",
    )
    assert done.code == 0 and "from step 2 on" in done.output, done.output
    assert (
        "note  changed since the run began: algorithm.optimizer.lr 0.001 -> 0.0005" in done.output
    )
    assert "without effect: the run goes on from its own checkpoint" in done.output
    log = (folder(copy) / "logs" / "launcher.log").read_text()
    assert "changed since the run began: algorithm.optimizer.lr 0.001 -> 0.0005" in log
    step, rate = series(read(folder(copy) / "metrics.jsonl"), "actor/lr")[-1]
    assert step == 3 and rate == pytest.approx(5e-4)


def test_a_damaged_checkpoint_is_passed_over(copy: Path, tiny_model: Path) -> None:
    damaged = (
        folder(copy)
        / "checkpoints"
        / "global_step_2"
        / "trainer"
        / "model-00001-of-00001.safetensors"
    )
    flip(damaged)
    done = start(copy, tiny_model, "trainer.total_steps=3")
    assert done.code == 0 and "from step 1 on" in done.output, done.output
    log = (folder(copy) / "logs" / "launcher.log").read_text()
    assert (
        f"checkpoint passed over: {damaged}" in log
        and "the file has changed" in log
        and "falling back to" in log
    )
    account = balanced(copy)
    assert account["used"] == 3 * 4 * 2 and account["used_twice"] == 0, (
        "step 2 was trained again, with rows of its own"
    )


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_afresh(
    copy: Path, tiny_model: Path
) -> None:
    for step in (1, 2):
        flip(
            folder(copy)
            / "checkpoints"
            / f"global_step_{step}"
            / "trainer"
            / "model-00001-of-00001.safetensors"
        )
    done = start(copy, tiny_model, "trainer.total_steps=3")
    assert (
        done.code == 4
        and "CheckpointInvalid: no checkpoint in" in done.output
        and "model-00001-of-00001.safetensors" in done.output
    )
    assert "Traceback" not in done.output
    assert {p.name for p in manifests.committed(folder(copy) / "checkpoints")} == {
        "global_step_1",
        "global_step_2",
    }


def test_a_run_that_does_not_continue_gets_a_folder_of_its_own(
    copy: Path, tiny_model: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in folder(copy).rglob("*") if p.is_file()}
    done = start(copy, tiny_model, "continue_from_checkpoint=false")
    assert done.code == 0, done.output
    assert len(list(folder(copy).parent.glob("name_2*"))) == 1
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_finished_run_has_nothing_to_do(two_checkpoints: Path, tiny_model: Path) -> None:
    metrics = folder(two_checkpoints) / "metrics.jsonl"
    before = metrics.read_bytes()
    done = start(
        two_checkpoints, tiny_model, "trainer.save_interval=1", "trainer.save_hf_checkpoint=never"
    )
    assert (
        done.code == 0
        and "nothing to do" in done.output
        and "is trained to step 2 already" in done.output
    )
    assert metrics.read_bytes() == before, "no part has worked"
    kept = (folder(two_checkpoints) / "config.resolved.yaml").read_bytes()
    done = start(
        two_checkpoints,
        tiny_model,
        "algorithm.optimizer.lr=0.5",
        "trainer.save_hf_checkpoint=never",
    )
    assert done.code == 0 and "nothing to do" in done.output
    assert (folder(two_checkpoints) / "config.resolved.yaml").read_bytes() == kept, (
        "nothing was trained with that rate"
    )


def test_an_evaluation_that_failed_at_the_end_is_not_forgotten(
    copy: Path, tiny_model: Path, broken: Path
) -> None:
    """All steps are trained then, so the same command has nothing to do; it says what is missing."""
    given = (
        f"name: held, path: 'rft.testing.tiny:copy_tasks', split: eval, max_rows: 2, "
        f"default_reward_fn_type: '{broken}:reward_raises'"
    )
    more = (
        f"{INPUT}.eval_tasksets=[{{{given}}}]",
        "explorer.eval_on_startup=false",
        "trainer.total_steps=3",
    )
    done = start(copy, tiny_model, *more)
    assert done.code == 4 and "ended without a score" in done.output, done.output
    done = start(copy, tiny_model, *more)
    assert done.code == 0 and "nothing to do" in done.output
    assert (
        "its last process ended (failed) after all steps" in done.output
        and "mode=bench" in done.output
    ), done.output
