"""One run with everything real, in the fast set: vLLM, Ray, two ranks; killed in the middle, and
the same command goes on.

The long forms of what is looked at here are test_main_job.py, test_run_kill.py and
test_learner_ranks.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from rft.buffer.query import open_run
from rft.launch import leftovers
from rft.monitor.read import read, series
from rft.trainer.checkpoint import manifest as manifests
from tests.helpers import runs

pytestmark = pytest.mark.smoke
STEPS = 3
ENGINE = "vllm" if importlib.util.find_spec("vllm") else "transformers"


class Smoke(NamedTuple):
    """What was seen of the run that was killed, and of the one that went on."""

    folder: Path
    parts: list[str]
    listening: list[str]
    open_sockets: list[Path]
    killed: int
    code: int
    output: str
    left: list[str]


@pytest.fixture(scope="module")
def smoke(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    root = tmp_path_factory.mktemp("smoke")
    before = leftovers.snapshot()
    arguments = runs.arguments(
        tiny_model,
        root,
        *runs.SMALL,
        f"explorer.rollout_model.engine_type={ENGINE}",
        "trainer.world_size=2",
        "trainer.save_interval=1",
        "monitor.keep_trainer_logprobs=true",
        f"trainer.total_steps={STEPS}",
    )
    run = runs.Run(*arguments, env={"RFT_FAULT": f"trainer.leased:{STEPS}=stop"})
    run.wait_for(f"step {STEPS - 1}/")
    state = runs.state(root)
    family = [*runs.parts(state["run_id"]), psutil.Process(run.process.pid)]
    listening = [
        c.laddr.ip
        for p in family
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    sockets = {
        Path(c.laddr)
        for p in family
        for c in p.net_connections(kind="unix")
        if str(c.laddr).startswith("/")
    }
    assert sockets, "Ray has some"
    of_all = [
        path for path in sockets if all(folder.stat().st_mode & 0o077 for folder in path.parents)
    ]
    runs.kill(family)
    killed = run.end()
    again = runs.Run(*arguments)
    code = again.end()
    return Smoke(
        runs.folder(root),
        sorted(state["parts"]),
        listening,
        of_all,
        killed,
        code,
        again.output,
        runs.left(before),
    )


def test_every_part_is_there_and_listens_on_loopback_alone(smoke: Smoke) -> None:
    assert smoke.parts == [
        "buffer",
        "coordinator",
        "engine-0",
        "explorer",
        "trainer-0",
        "trainer-1",
    ]
    assert smoke.listening, "a live run has listeners; none seen means the scan looked at nothing"
    assert {address.removeprefix("::ffff:") for address in smoke.listening} <= {"127.0.0.1", "::1"}
    assert not smoke.open_sockets, "other accounts of the machine get to them"


def test_the_same_command_goes_on_after_kill_nine(smoke: Smoke) -> None:
    assert smoke.killed != 0 and smoke.code == 0 and f"step {STEPS}/{STEPS}" in smoke.output, (
        smoke.output
    )
    ok, found = runs.audit(smoke.folder)
    assert ok and found["balanced"] and found["used_twice"] == 0, found
    assert found["used"] == STEPS * 4 * 4, found
    # raises where a file is not whole
    manifests.read(smoke.folder / "checkpoints" / f"global_step_{STEPS}")
    assert smoke.left == []


def test_every_version_is_proven(smoke: Smoke) -> None:
    records = read(smoke.folder / "metrics.jsonl")
    errors = series(records, "sync/canary_max_abs")
    assert {step for step, _ in errors} == set(range(STEPS + 1)) and max(
        error for _, error in errors
    ) <= 1e-4
    assert {step for step, _ in series(records, "actor/lr")} == set(range(1, STEPS + 1))


def test_engine_and_trainer_agree_on_every_token(smoke: Smoke) -> None:
    kept = """SELECT count(*), count(trainer_logprob), max(abs(trainer_logprob - logprob)), count(DISTINCT trainer_logprob)
        FROM v_tokens t JOIN uses u ON u.experience = t.id AND u.lineage = t.train_lineage AND u.step = t.train_step"""
    with open_run(smoke.folder) as questions:
        with questions.ask(kept) as answer:
            ((tokens, told, apart, values),) = answer.rows
        with questions.ask(
            "SELECT sum(num_response_tokens) FROM v_experiences WHERE state = 'used'"
        ) as answer:
            ((used,),) = answer.rows
    assert tokens == told >= used > 0 and apart <= 1e-4 and values > 10, "on policy, row by row"
