"""Runs that an earlier rft left behind (tests/fixtures) are opened, audited and gone on with by the code as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.types.block import decode
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.fixtures.v2_runs.make import used

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests/fixtures"
NEWEST = {"sql": 4, "queue": 4, "file": 3}  # step of the newest checkpoint; `file` was killed in step 4
storages = pytest.mark.parametrize("storage", sorted(NEWEST))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return extracted("v1_runs", tmp_path)


def extracted(name: str, to: Path) -> Path:
    with tarfile.open(STORED / name / "runs.tar.xz") as archive:
        archive.extractall(to, filter="data")
    return to


def folder(root: Path, storage: str) -> Path:
    return root / "stored/runs" / storage


def manifest(run: Path, step: int) -> tuple[Version, Consumption]:
    found = json.loads((run / f"checkpoints/global_step_{step}/manifest.json").read_bytes())
    return msgspec.convert(found["version"], Version), msgspec.convert(found["consumption"], Consumption)


@storages
def test_it_is_audited_and_read(root: Path, storage: str) -> None:
    run, step = folder(root, storage), NEWEST[storage]
    audit = audit_run(run)
    assert (audit.ok, audit.acked, audit.used, audit.num_uses, audit.manifests) == (True, 16, 4 * step, 4 * step, 1), audit
    with open_run(run) as questions, questions.ask("SELECT id FROM v_experiences WHERE state <> 'explained'") as answer:
        ids = [str(name) for (name,) in answer.rows]
    with open_run(run) as questions:
        payload = questions.payload(ids)
    assert len(payload) == 16
    assert all(x.trainable for x in payload.values())


@storages
async def test_the_buffer_goes_on_from_its_checkpoint(root: Path, storage: str) -> None:
    run, step = folder(root, storage), NEWEST[storage]
    version, consumption = manifest(run, step)
    buffer = Buffer(BufferSettings(folder=run / "buffer", run=f"stored/runs/{storage}", storage_type=storage))
    await buffer.open()
    start = await buffer.start_lineage(version, consumption)
    assert (start.lineage, start.cursor, start.orphaned) == (2, step, 0)
    assert start.available == 16 - 4 * step
    if start.available:  # trained by step 4, which no checkpoint rests on
        await buffer.writer(2).close_batch(3, accepted=2, wanted=2, reasons={})
        lease = await buffer.reader(2).lease(4, groups=2, rows=None, deadline_s=5, max_staleness=None)
        assert [x.id.batch for x in decode(lease.frame)] == [3] * 4
        await buffer.reader(2).use(4)
    assert (await buffer.consumption(2, 4)).num_uses == 16
    assert (await buffer.audit()).ok
    await buffer.close()


def go_on(root: Path, config: str, *changes: str) -> None:
    command = [sys.executable, "-m", "rft.cli.main", "run", "--in-process", "-c", config, *changes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done  step 6" in done.stdout


@pytest.mark.e2e
@storages
def test_the_run_goes_on(root: Path, storage: str) -> None:
    changes = (f"name={storage}", f"buffer.trainer_input.experience_buffer.storage_type={storage}", "trainer.total_steps=6")
    go_on(root, "config.yaml", *changes)
    audit = audit_run(folder(root, storage))
    assert (audit.ok, audit.used, audit.num_uses, audit.used_twice) == (True, 24, 24, 0), audit


@pytest.mark.e2e
@pytest.mark.parametrize("algorithm", ("sft", "dpo", "grpo", "ppo"))
def test_a_run_goes_on_with_the_rows_that_the_earlier_rft_would_have_used(tmp_path: Path, algorithm: str) -> None:
    root = extracted("v2_runs", tmp_path)
    go_on(root, f"{algorithm}.yaml")
    run = folder(root, algorithm)
    assert used(run) == json.loads((root / "used.json").read_bytes())[algorithm]
    if (run / "buffer").exists():
        audit = audit_run(run)
        assert (audit.ok, audit.used_twice) == (True, 0), audit
