"""A buffer whose rows show images is killed at every point of an append, and the run goes on: no
row and no file is lost or stored twice, and the files on disk are those that the ledger names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.query import open_run
from tests.fault.image_child import GROUPS, STEPS, image

POINTS = [
    "buffer.append.before:2",
    "storage.put:4",
    "storage.put.torn:5",
    "storage.put.aside:3",
    "buffer.append.stored:2",
    "buffer.append.after:2",
    "buffer.close_batch:2",
    "buffer.lease:1",
]


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[str]]:
    file = Path(__file__).with_name("image_child.py")
    env = {**os.environ, "PYTHONPATH": str(file.parents[2])}
    with subprocess.Popen(
        [sys.executable, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0


def live(child: subprocess.Popen[str], root: Path, kind: str, fault: str) -> int:
    """The exit code of one life."""
    assert child.stdin is not None
    assert child.stdout is not None
    what = {"root": str(root), "kind": kind, "env": {"RFT_FAULT": fault}}
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()
    return int(child.stdout.readline())


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["sql", "file", "queue"])
def test_no_image_is_lost_or_stored_twice(
    child: subprocess.Popen[str], tmp_path: Path, kind: str
) -> None:
    killed = 0
    for number, point in enumerate(POINTS):
        root = tmp_path / str(number)
        code = live(child, root, kind, f"{point}=kill")
        assert code in (0, -9), point  # a storage may not have the point
        killed += code == -9
        assert live(child, root, kind, "") == 0, point
        assert audit_run(root).ok, point
        with open_run(root) as questions, questions.reading() as tx:
            rows = tx.exec_driver_sql("SELECT count(*) FROM experiences").scalar()
            names = [name for (name,) in tx.exec_driver_sql("SELECT sha256 FROM images")]
            uses = tx.exec_driver_sql("SELECT count(*) FROM image_uses").scalar()
            payloads = tx.exec_driver_sql("SELECT count(*) FROM payloads").scalar()
        images = {image(batch, task) for batch in range(STEPS) for task in range(GROUPS)}
        assert rows == STEPS * GROUPS * 2, point
        assert uses == STEPS * GROUPS, point
        assert sorted(names) == sorted(x.sha256 for x in images), point
        if kind == "sql":
            assert payloads == len(images) + STEPS * GROUPS, point
    assert killed >= len(POINTS) - 2
