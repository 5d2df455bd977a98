"""A small ledger with rows of every state, and what a command answers about it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.cli import main as cli
from rft.testing.storage_contract import fill, group, row, take
from rft.types.block import encode
from rft.types.experience import failed
from rft.types.ids import GroupId

EVIL = "a\x1b[31mred\x1b]0;title\x07\nb\u202egnp.exe\x9b2J"


def said(*arguments: str) -> tuple[str, str, int]:
    """What a command prints to stdout and stderr, and its exit code."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as e:
        cli.main(list(arguments))
    return out.getvalue(), err.getvalue(), int(e.value.code or 0)


async def play(run_dir: Path, **more: Any) -> None:
    """Three batches of two groups of four; the first is trained, the second leased, one run of the
    third failed, one is evil.
    """
    buffer = Buffer(BufferSettings(folder=run_dir / "buffer", **more))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    await fill(buffer, 1, 1)
    members = group(1, 2, 0)
    members[0] = msgspec.structs.replace(
        members[0], prompt_text=EVIL, response_text=EVIL, taskset="other"
    )
    members = [msgspec.structs.replace(m, taskset="other") for m in members]
    name = GroupId(1, 0, 2, 1)
    rest = [
        failed(name.run(0), taskset="toy", task_index=1, workflow="toy", reason="timeout"),
        row(name.run(1)),
    ]
    writer = buffer.writer(1)
    await writer.append(encode(members), accepted=True)
    await writer.append(encode(rest), accepted=True)
    await writer.close_batch(2, accepted=2, expected=2, reasons={})
    await take(buffer, 1, 1)
    await buffer.reader(1).use(1)
    rests_on = msgspec.to_builtins(await buffer.reader(1).consumption(1))
    checkpoint = run_dir / "checkpoints" / "global_step_1"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 5, "version": [1, 1], "parent": None, "consumption": rests_on}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    await take(buffer, 1, 2)
    await buffer.close()
