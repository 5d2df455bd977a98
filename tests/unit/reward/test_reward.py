from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rft.errors import ConfigError, PluginError, RunFailed
from rft.plugins import load_all
from rft.reward.base import hook, score, score_group
from rft.reward.build_reward import build
from rft.reward.extract import last_boxed
from rft.reward.readings import UnreadableTruth
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import TasksetSettings
from rft.types.completion import Score
from rft.worker.job_pool import WorkerDied, WorkerError, WorkerPool, counts
from rft.worker.process import WorkerProcess
from tests.helpers.answers import make_transcript, task


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_all()


@pytest.fixture(scope="module")
def math_pool():
    from rft.reward.math import POOL

    yield POOL
    pids = POOL.pids()
    POOL.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_exact_answer():
    fn = build("exact_answer", {})
    assert (await score(fn, task("7"), make_transcript("3 + 4 = 7"))).value == 1.0
    assert (await score(fn, task(7), make_transcript("The answer is 8"))).value == 0.0
    assert (await score(fn, task("7"), make_transcript(""))).value == 0.0
    assert (
        await score(
            build("exact_answer", {"compare": "text", "ignore_case": True, "wrong": -1}),
            task("Yes"),
            make_transcript(" yes "),
        )
    ).value == 1.0
    with pytest.raises(ValueError, match="has no truth"):
        await score(fn, task(None), make_transcript("1"))
    with pytest.raises(ValueError, match="must be one number"):
        await score(fn, task("seven"), make_transcript("1"))


@pytest.mark.extra
def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="Did you mean compare"):
        build("exact_answer", {"compere": "text"})
    with pytest.raises(
        ConfigError, match=r"args: arguments of reward 'exact_answer': compare: .*given 'txt'"
    ):
        build("exact_answer", {"compare": "txt"}, key="args")
    with pytest.raises(PluginError, match="Did you mean exact_answer"):
        build("exact_answr", {})
    with pytest.raises(ConfigError, match="unknown argument 'x'"):
        build("reasoning_gym", {"x": 1})


async def test_a_reward_is_called_with_what_it_takes(tmp_path):
    file = tmp_path / "takes.py"
    file.write_text(
        "class Wants:\n    def __init__(self, scale): self.scale = scale\n    def __call__(self, "
        "task, transcript): return self.scale\n"
        "def wants(task, transcript, *, scale): return scale\n"
        "def has(task, transcript, scale=1.0): return scale\n"
        "def other(answer): return 1.0\n"
    )
    for name in ("Wants", "wants"):
        with pytest.raises(
            ConfigError,
            match=rf"args: reward .*:{name}' cannot be called .*missing a required argument: "
            rf"'scale'",
        ):
            build(f"{file}:{name}", {}, key="args")
        assert (
            await score(build(f"{file}:{name}", {"scale": 2}), task("1"), make_transcript("1"))
        ).value == 2.0
    assert (
        await score(build(f"{file}:has", {"scale": 0.5}), task("1"), make_transcript("1"))
    ).value == 0.5
    with pytest.raises(ConfigError, match="too many positional arguments"):
        build(f"{file}:other", {})


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        float("inf"),
        "1",
        [1.0],
        None,
        {"a": "x"},
        {"a": float("nan")},
        Score(value=float("inf")),
        -2e18,
        {"a": 6e17, "b": 6e17},
    ],
)
async def test_a_reward_must_be_a_finite_number(bad):
    with pytest.raises(ValueError, match="finite number"):
        await score(lambda t, x: bad, task("1"), make_transcript("1"))


async def test_parts_are_summed_and_unscored_stays_unscored():
    got = await score(lambda t, x: {"a": 1, "b": -0.25}, task("1"), make_transcript("1"))
    assert got.value == 0.75 and got.parts == {"a": 1.0, "b": -0.25}
    assert (
        await score(lambda t, x: Score(value=None), task("1"), make_transcript("1"))
    ).value is None


async def test_format_reward():
    good = "<think>\nhm\n</think>\n<answer>7</answer>"
    fn = build("format_reward", {})
    assert (await score(fn, task("7"), make_transcript(good))).value == 0.1
    for bad in (
        "7",
        "<answer>7</answer>",
        good + "x",
        "<think>a</think><think>b</think><answer>7</answer>",
    ):
        assert (await score(fn, task("7"), make_transcript(bad))).value == -0.1


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        ("none", None),
        (r"\fbox{3}", "3"),
    ],
)
def test_last_boxed(text, inner):
    assert last_boxed(text) == inner


async def test_math_rewards(math_pool):
    fn = build("math_reward", {})
    assert (
        await score(
            fn, task("0.5"), make_transcript("<think>half</think><answer>\\frac{1}{2}</answer>")
        )
    ).parts == {
        "accuracy": 1.0,
        "format": 0.1,
    }
    assert (await score(fn, task("0.5"), make_transcript("It is 1/3."))).parts == {
        "accuracy": 0.0,
        "format": -0.1,
    }
    boxed = build("math_boxed_reward", {})
    assert (await score(boxed, task(r"\frac{1}{2}"), make_transcript(r"\boxed{0.5}"))).value == 1.0
    assert (await score(boxed, task("2"), make_transcript("2"))).value == 0.0
    hits = math_pool.memo_hits
    assert (
        await score(build("accuracy_reward", {}), task("17x+3"), make_transcript("$3+17x$"))
    ).value == 1.0
    assert (
        await score(build("accuracy_reward", {}), task("17x+3"), make_transcript("$3+17x$"))
    ).value == 1.0
    assert math_pool.memo_hits == hits + 1 and counts()["math_verify/memo_hits"] == hits + 1


async def test_a_killed_worker_is_replaced_and_asked_again(math_pool):
    assert await math_pool.call({"answer": "4", "truth": "4"}, 30) is True
    restarts = math_pool.restarts
    for pid in math_pool.pids():
        os.kill(pid, signal.SIGKILL)
    assert await math_pool.call({"answer": "5", "truth": "6"}, 30) is False
    assert math_pool.restarts > restarts


@pytest.mark.extra("worlds")
async def test_a_truth_that_math_verify_cannot_read_is_refused(math_pool):
    for name in ("math_reward", "math_boxed_reward", "accuracy_reward", "math_dapo_reward"):
        with pytest.raises(UnreadableTruth, match="formula that math-verify can read"):
            await score(build(name, {}), task("="), make_transcript("Answer: \\boxed{x+1}"))


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A pool over a worker module whose source the test gives."""
    pools = []

    def make(source: str) -> WorkerPool:
        (tmp_path / "toy_worker.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        pools.append(WorkerPool("toy", "toy_worker", size=1))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert pool.pids() == []


TOY = """
import os, subprocess, sys
from rft.worker.process import serve
def load():
    def answer(request):
        if request["do"] == "spin":
            while True: pass
        if request["do"] == "exit": os._exit(3)
        if request["do"] == "sys.exit": sys.exit(0)
        if request["do"] == "eat": return len(bytes(1 << 30))
        if request["do"] == "unsendable": return object()
        if request["do"] == "print": print("noise" * 1000)
        return request["do"]
    return answer
serve(load)
"""


async def test_hanging_worker_is_killed_at_the_deadline(worker):
    pool = worker(TOY)
    assert await pool.call({"do": "print"}, 30) == "print"
    (first,) = pool.pids()
    with pytest.raises(TimeoutError, match=r"killed after 0\.2 s"):
        await pool.call({"do": "spin"}, 0.2)
    assert pool.timeouts == 1
    assert await pool.call({"do": "again"}, 30) == "again"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_worker_that_dies_on_a_request_raises(worker):
    with pytest.raises(WorkerDied, match="exit status 3"):
        await worker(TOY).call({"do": "exit"}, 30)


@pytest.mark.parametrize(
    ("what", "error"), [("sys.exit", "SystemExit: 0"), ("unsendable", "not JSON serializable")]
)
async def test_what_a_worker_raises_is_named_and_it_goes_on(worker, what, error):
    pool = worker(TOY)
    with pytest.raises(WorkerError, match=error):
        await pool.call({"do": what}, 30)
    before = pool.pids()
    assert (
        await pool.call({"do": "again"}, 30) == "again"
        and pool.pids() == before
        and not pool.restarts
    )


async def test_a_worker_has_a_memory_limit(worker, math_pool):
    pool = worker(TOY.replace("serve(load)", "serve(load, memory_mb=256)"))
    with pytest.raises(WorkerError, match="MemoryError"):
        await pool.call({"do": "eat"}, 30)
    assert await pool.call({"do": "again"}, 30) == "again"
    await math_pool.call({"answer": "5", "truth": "5"}, 30)
    limits = [psutil.Process(pid).rlimit(psutil.RLIMIT_AS)[0] for pid in math_pool.pids()]
    assert limits and all(0 < most < 8 << 30 for most in limits)


def test_requests_are_mapped_in_order_over_several_workers(tmp_path, monkeypatch):
    (tmp_path / "toy_worker.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("toy", "toy_worker", size=2)
    try:
        assert list(pool.map({"do": i} for i in range(7))) == list(range(7))
        assert len(pool.pids()) == 2
        with pytest.raises(WorkerDied, match="exit status 3"):
            list(pool.map([{"do": "exit"}, {"do": 1}, {"do": 2}, {"do": 3}]))
    finally:
        pool.close()


async def test_worker_that_does_not_start_raises(worker):
    with pytest.raises(WorkerDied, match="did not start"):
        await worker("raise SystemExit(1)").call({"do": "x"}, 30)


async def test_the_deadline_is_that_of_both_attempts(worker, monkeypatch):
    """A worker that dies just before its deadline does not get it a second time."""
    pool = worker(TOY)
    asked = []
    clock = iter([0.0, 4.0, 100.0, 100.0])

    def dies(self, frame, timeout_s):
        asked.append(timeout_s)
        raise ConnectionError("gone")

    monkeypatch.setattr("rft.worker.job_pool.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("rft.worker.process.WorkerProcess.ask", dies)
    with pytest.raises(WorkerDied, match="twice"):
        await pool.call({"do": "x"}, 5.0)
    assert asked == [5.0, 1.0]


async def test_a_late_answer_does_not_wait_for_its_worker_to_be_gone(worker, monkeypatch):
    pool = worker(TOY)
    waited = []
    kill = WorkerProcess.kill
    monkeypatch.setattr(
        "rft.worker.process.WorkerProcess.kill", lambda self: (waited.append(self.pid), kill(self))
    )
    with pytest.raises(TimeoutError):
        await pool.call({"do": "spin"}, 0.2)
    assert not waited and pool.restarts == 1
    # the next one does, so there are never more than `size`
    assert await pool.call({"do": "x"}, 60) == "x"
    assert len(waited) == 1 and len(pool.pids()) == 1 and waited != pool.pids()


async def test_close_while_computing_ends_the_call(worker):
    pool = worker(TOY)
    await pool.call({"do": "warm"}, 30)
    job = asyncio.ensure_future(pool.call({"do": "spin"}, 60))
    await asyncio.sleep(0)  # the call is handed to its thread
    await asyncio.to_thread(pool.close)
    with pytest.raises((WorkerDied, asyncio.CancelledError)):
        await job


def test_workers_die_with_a_killed_parent(tmp_path):
    """kill -9 of the parent while its worker computes for ever: the pipe it inherited closes, so
    the reader sees the end.
    """
    (tmp_path / "toy_worker.py").write_text(
        TOY.replace("serve(load)", "os.set_inheritable(int(os.environ['MARK']), True); serve(load)")
    )
    read, write = os.pipe()
    parent = (
        "import asyncio, os, subprocess; from rft.worker import job_pool, process\n"
        "real = subprocess.Popen\n"
        f"process.subprocess.Popen = lambda *a, **k: real(*a, pass_fds=({write},), **k)\n"
        "p = job_pool.WorkerPool('toy', 'toy_worker', size=1)\n"
        "async def main():\n"
        "    await p.call({'do': 'warm'}, 60); job = asyncio.ensure_future(p.call({'do': 'spin'}, "
        "60))\n"
        "    print('up', flush=True); await job\n"
        "asyncio.run(main())\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "MARK": str(write),
    }
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment, pass_fds=(write,)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.close(write)
        process.kill()
    assert os.read(read, 1) == b""  # blocks until the last holder of `write` is gone
    os.close(read)


async def test_a_function_may_score_the_whole_group(tmp_path):
    file = tmp_path / "ranks.py"
    places = "[scale * i for i, _ in enumerate(transcripts)]"
    file.write_text(
        f"def ranks(task, transcripts, *, scale=1.0):\n    return {places}\n\nranks.whole_group = "
        f"True\n"
    )
    made = build(f"{file}:ranks", {"scale": 2.0})
    assert made.whole_group
    assert [
        s.value
        for s in await score_group(made, task("1"), [make_transcript("a"), make_transcript("b")])
    ] == [0.0, 2.0]


@pytest.mark.e2e
@pytest.mark.extra
async def test_reasoning_gym_scores_its_own_rows():
    made = open_taskset(
        TasksetSettings(
            name="g", path="reasoning_gym://chain_sum", workflow="w", args={"size": 3, "seed": 5}
        )
    )
    first = made.task(0)
    assert first.reward == "reasoning_gym"
    fn = build("reasoning_gym", {})
    assert (await score(fn, first, make_transcript(first.truth))).value == 1.0
    assert (
        await score(fn, first, make_transcript(f"<think>x</think><answer>{first.truth}</answer>"))
    ).value == 1.0
    assert (await score(fn, first, make_transcript("no"))).value < 0.5


@pytest.mark.parametrize("given", [np.float32(0.5), np.int64(1), np.bool_(True), np.array(2.0)])
async def test_numbers_of_numpy_are_numbers(given):
    for result in (given, {"part": given}, Score(value=given, parts={"part": given})):
        got = await score(lambda t, x, result=result: result, task("1"), make_transcript("1"))
        assert got.value == float(given) and type(got.value) is float
        assert all(type(part) is float for part in got.parts.values())


@pytest.mark.extra("migrate")
def test_a_deadline_that_a_reward_would_not_keep_is_refused():
    with pytest.raises(ConfigError, match="has until explorer"):
        build("exact_answer", {"reward_timeout_s": 5})


_RAISES = """
class Made:
    def __init__(self): open("/no/table.json")
    def __call__(self, task, transcript): return 1.0

class Plain:
    def prepare(self, models): self.client = models["judge"]
    def close(self): self.client.clear()
    def __call__(self, task, transcript): return 1.0
"""


async def test_what_a_rewards_own_code_raises_is_told_as_its_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(_RAISES)
    with pytest.raises(ConfigError, match="cannot be made:\nTraceback") as told:
        build(f"{file}:Made", {}, key="taskset t.reward_fn_args")
    assert told.value.key == "taskset t.reward_fn_args"
    assert f'File "{file}", line 3' in str(told.value) and "build_reward.py" not in str(told.value)
    for name, part in (
        ("weighted_reward", {"rewards": {"a": {"reward": f"{file}:Plain"}}}),
        (f"{file}:Plain", {}),
    ):
        made = build(name, part)
        client = {"open": 1}
        with pytest.raises(
            RunFailed, match=r"Plain.prepare of a reward failed:\nTraceback[\s\S]*KeyError: 'judge'"
        ):
            await hook(made.prepare, {})
        with pytest.raises(
            RunFailed,
            match=r"Plain.close of a reward failed:\nTraceback[\s\S]*no attribute 'client'",
        ):
            await hook(made.close)
        await hook(made.prepare, {"judge": client})
        await hook(made.close)
        assert not client, "hooks need not be async"


async def test_a_weighted_reward_tells_its_weights(tmp_path):
    """0.2 x 0.5 + 2 x 1 = 2.1; a part that is unscored has no term."""
    file = tmp_path / "parts.py"
    file.write_text(
        "from rft import Score\n"
        "def half(task, transcript): return {'x': 0.25, 'y': 0.25}\n"
        "def one(task, transcript): return 1.0\n"
        "def none(task, transcript): return Score(value=None)\n"
    )
    rewards = {
        "half": {"reward": f"{file}:half", "weight": 0.2},
        "one": {"reward": f"{file}:one", "weight": 2.0},
        "none": {"reward": f"{file}:none", "optional": True},
    }
    built = build("weighted_reward", {"rewards": rewards})
    result = await score(built, task(), make_transcript("a"))
    assert result.value == pytest.approx(2.1)
    assert result.weights == {"half": 0.2, "one": 2.0}
    assert result.parts == {"half/x": 0.25, "half/y": 0.25, "half": 0.5, "one": 1.0}
