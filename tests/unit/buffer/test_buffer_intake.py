"""Frames a trainer could not rely on are refused, each with a counted reason; the trainer never
sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import FrameRejected
from rft.testing.storage_contract import group, row
from rft.types.block import bundle, encode
from rft.types.experience import SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.task import SamplingArgs


def patched(**changes: Any) -> bytes:
    """A frame whose first header says something else: what a faulty writer would send past
    `Experience`'s own checks.
    """
    frame = encode(group(1, 0, 0))
    headers, body = parts(frame)
    headers[0][0].update(changes)
    head = msgspec.msgpack.encode(headers)
    return (
        frame[:4] + len(head).to_bytes(8, "little") + head + b"\0" * (-(12 + len(head)) % 8) + body
    )


def parts(frame: bytes) -> tuple[list[tuple[dict[str, Any], int]], bytes]:
    """Fields of each row with the size of its arrays, and all arrays."""
    end = 12 + int.from_bytes(frame[4:12], "little")
    return msgspec.msgpack.decode(frame[12:end]), frame[end + -end % 8 :]


def array(index: int, **changes: int) -> bytes:
    """A frame in which an array of the first row begins elsewhere or has another length."""
    headers, _ = parts(encode(group(1, 0, 0)))
    name = ("tokens", "loss_mask", "logprobs")[index]
    dtype, length, offset = headers[0][0][name]
    return patched(**{name: [dtype, changes.get("length", length), changes.get("offset", offset)]})


def negative_token() -> bytes:
    frame = encode(group(1, 0, 0))
    body = parts(frame)[1]
    return frame[: -len(body)] + (-5).to_bytes(4, "little", signed=True) + body[4:]


a = group(1, 0, 0)
b = group(1, 0, 1)
BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "rows of many blocks": ("damaged", lambda: bundle([(encode(a), [0], [1.0])])),
    "bytes of nobody": ("damaged", lambda: encode(a) + b"12345678"),
    "not a frame": ("damaged", lambda: b"hello"),
    "a pickle": ("damaged", lambda: b"\x80\x05cos\nsystem\n"),
    "cut short": ("damaged", lambda: encode(a)[:200]),
    "arrays cut off": ("damaged", lambda: encode(a)[:-40]),
    "no rows": ("empty", lambda: encode([])),
    "two groups": ("mixed_groups", lambda: encode([a[0], b[0]])),
    "two tasks": (
        "mixed_tasks",
        lambda: encode([a[0], msgspec.structs.replace(a[1], task_index=5)]),
    ),
    "an id twice": ("duplicate_ids", lambda: encode([a[0], a[0]])),
    "weights of the future": (
        "future_version",
        lambda: encode([row(GroupId(1, 0, 0, 0).run(0), version=Version(1, 3))]),
    ),
    "weights of nobody": (
        "unknown_version",
        lambda: encode([row(GroupId(1, 0, 0, 0).run(0), version=Version(9, 0))]),
    ),
    "another explorer": ("foreign_explorer", lambda: encode(group(1, 0, 0, explorer=1))),
    "too large": (
        "too_large",
        lambda: encode([msgspec.structs.replace(a[0], response_text="x" * 20000)]),
    ),
    "negative token": ("invalid_tokens", negative_token),
    "mask too short": ("invalid_loss_mask", lambda: array(1, length=3)),
    "array outside": ("damaged", lambda: array(0, offset=10**9)),
    "array before": ("damaged", lambda: array(0, offset=-8)),
    "reward is text": ("invalid_reward", lambda: patched(reward="high")),
    "reward is infinite": ("invalid_reward", lambda: patched(reward=float("inf"))),
    "reward is nan": ("invalid_reward", lambda: patched(reward=float("nan"))),
    "no version": ("invalid_version_spans", lambda: patched(version_spans=[])),
    "negative version": (
        "invalid_version_spans",
        lambda: patched(version_spans=[[[1, -1], 0, 12]]),
    ),
    "unknown status": ("invalid_status", lambda: patched(status="great")),
    "array missing": ("invalid_tokens", lambda: patched(tokens=None)),
}


async def test_bad_frames_are_rejected_and_counted(tmp_path: Path) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path, max_row_bytes=10000))
    await buffer.open()
    await buffer.start_lineage(None, None)
    expected: dict[str, int] = {}
    for what, (reason, make) in BAD.items():
        with pytest.raises(FrameRejected) as told:
            await buffer.append(1, make(), accepted=True)
        assert str(told.value).startswith(reason + ":"), (what, str(told.value))
        expected[reason] = expected.get(reason, 0) + 1
    with pytest.raises(FrameRejected, match="no_reason"):
        await buffer.append(1, encode(a), accepted=False)
    await buffer.writer(1).close_batch(0, accepted=0, expected=0, reasons={})
    with pytest.raises(FrameRejected, match="closed_batch"):
        await buffer.append(1, encode(a), accepted=True)
    stats = await buffer.stats()
    assert stats["rejected"] == {**expected, "no_reason": 1, "closed_batch": 1}
    assert stats["acked"] == 0
    await buffer.close()


async def test_numbers_of_sampling_that_no_ledger_holds_are_refused_where_they_are_made(
    tmp_path: Path,
) -> None:
    """A workflow's seed of 64 random bits ended the run with an OverflowError of SQLite."""
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    await buffer.start_lineage(None, None)
    for task, (name, value) in enumerate(
        [("seed", -(1 << 63)), ("seed", (1 << 63) - 1), ("top_k", (1 << 31) - 1)]
    ):
        drawn = SamplingRecord(start=0, end=12, sampling=SamplingArgs(**{name: value}))
        frame = encode([msgspec.structs.replace(x, sampling=(drawn,)) for x in group(1, 0, task)])
        assert (await buffer.writer(1).append(frame, accepted=True)).appended == 4
    await buffer.close()
    for name, value in [
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("top_k", 1 << 31),
        ("temperature", float("nan")),
    ]:
        with pytest.raises(ValueError, match=rf"^{name} .*: must be"):
            SamplingArgs(**{name: value})
