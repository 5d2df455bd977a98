"""What comes from the outside at append: texts, numbers and JSON that no database or trainer may
see; each refusal is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError, FrameRejected
from rft.testing.storage_contract import group, row
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import ExperienceId, GroupId, Version
from tests.helpers.ledger_contract import ask

ID = GroupId(1, 0, 0, 0).run(0)


def one(**changes: Any) -> bytes:
    return encode([msgspec.structs.replace(row(ID), **changes)])


def spliced(old: bytes, new: bytes, **changes: Any) -> bytes:
    """A frame whose bytes `old` (a msgpack value) are `new`: what no writer of ours would send."""
    frame = one(**changes)
    end = 12 + int.from_bytes(frame[4:12], "little")
    head = frame[12:end]
    body = frame[end + -end % 8 :]
    assert head.count(old) == 1
    head = head.replace(old, new)
    return (
        frame[:4] + len(head).to_bytes(8, "little") + head + b"\0" * (-(12 + len(head)) % 8) + body
    )


def numbered(**numbers: int) -> bytes:
    made = ExperienceId(**{"lineage": 1, "explorer": 0, "batch": 0, "task": 0, "run": 0, **numbers})
    return encode([msgspec.structs.replace(row(ID), id=made)])


def with_text(text: str) -> Experience:
    return msgspec.structs.replace(row(ID), response_text=text)


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"k": value}
    return value


BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "text that is no UTF-8": (
        "damaged",
        lambda: spliced(b"\xabprompt_text\xa1a", b"\xabprompt_text\xa1\xff"),
    ),
    "a lone surrogate": (
        "damaged",
        lambda: spliced(
            b"\xabprompt_text\xa3abc", b"\xabprompt_text\xa3\xed\xa0\x80", prompt_text="abc"
        ),
    ),
    "much text in one of eight": (
        "too_large",
        lambda: encode([*group(1, 0, 0, runs=8)[1:], with_text("x" * 200_000)]),
    ),
    "info as a list": ("invalid_info", lambda: spliced(b"\xa4info\x80", b"\xa4info\x90")),
    "info that is huge": (
        "invalid_info",
        lambda: one_unchecked(info={str(i): i for i in range(200_000)}),
    ),
    "info that is deep": (
        "damaged",
        lambda: spliced(b"\xa4info\x80", b"\xa4info" + b"\x81\xa1k" * 100_000 + b"\xc0"),
    ),
    "a token the model does not know": (
        "invalid_tokens",
        lambda: one(tokens=np.full(12, 1000, np.int32)),
    ),
    "a reward of 1e30": ("invalid_reward", lambda: one(reward=1e30)),
    "a reward as a list": (
        "invalid_reward",
        lambda: spliced(b"\xa6reward\xcb", b"\xa6reward\x91\xcb"),
    ),
    "a part of a reward that is nan": (
        "invalid_exact",
        lambda: one_unchecked(reward_parts={"exact": float("nan")}),
    ),
    "a batch beyond the columns": ("invalid_id", lambda: numbered(batch=2**31)),
    "a run beyond the columns": ("invalid_id", lambda: numbered(run=2**40)),
    "a negative task": ("invalid_id", lambda: numbered(task=-1)),
    "a negative row of the taskset": ("invalid_task_index", lambda: one(task_index=-1)),
    "a row beyond the columns": ("invalid_task_index", lambda: one(task_index=2**31)),
    "log-probs above 0": (
        "invalid_logprobs",
        lambda: array_of("logprobs", np.full(12, 0.5, np.float32)),
    ),
    "log-probs of -inf": (
        "invalid_logprobs",
        lambda: array_of("logprobs", np.full(12, -np.inf, np.float32)),
    ),
    "log-probs of nan": (
        "invalid_logprobs",
        lambda: array_of("logprobs", np.full(12, np.nan, np.float32)),
    ),
    "a version of the future": (
        "future_version",
        lambda: one(version_spans=(VersionSpan(Version(1, 1), 0, 12),)),
    ),
    "a version beyond the columns": (
        "future_version",
        lambda: one(version_spans=(VersionSpan(Version(1, 2**60), 0, 12),)),
    ),
    "a version of another lineage": (
        "unknown_version",
        lambda: one(version_spans=(VersionSpan(Version(2, 0), 0, 12),)),
    ),
}


def one_unchecked(**changes: Any) -> bytes:
    """As `one`, past the checks of `Experience`."""
    good = row(ID)
    for name, value in changes.items():
        msgspec.structs.force_setattr(good, name, value)
    return encode([good])


def array_of(name: str, values: np.ndarray) -> bytes:
    return one_unchecked(**{name: values})


@pytest.mark.parametrize("what", BAD)
async def test_it_is_refused_and_counted(tmp_path: Path, what: str) -> None:
    buffer = Buffer(
        BufferSettings(
            folder=tmp_path,
            vocab_size=1000,
            max_row_bytes=2 << 20 if "huge" in what or "deep" in what else 100_000,
        )
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    reason, make = BAD[what]
    with pytest.raises(FrameRejected) as told:
        await buffer.append(1, make(), accepted=True)
    assert str(told.value).startswith(f"{reason}: "), str(told.value)[:200]
    stats = await buffer.stats()
    assert (stats["rejected"], stats["acked"]) == ({reason: 1}, 0)
    # the next one is not harmed
    good = await buffer.append(1, encode(group(1, 0, 1)), accepted=True)
    assert good.appended == 4
    await buffer.close()


@pytest.mark.parametrize("info", [deep(5000), {"me": ...}], ids=["deep", "cyclic"])
def test_info_that_cannot_be_sent_is_refused_where_it_is_made(info: dict[str, Any]) -> None:
    if info.get("me") is ...:
        info["me"] = info
    with pytest.raises((RecursionError, ValueError)):
        msgspec.structs.replace(row(ID), info=info)


async def test_no_reward_is_unscored_and_not_zero(tmp_path: Path) -> None:
    settings = BufferSettings(folder=tmp_path)
    buffer = Buffer(settings)
    await buffer.open()
    await buffer.start_lineage(None, None)
    await buffer.append(
        1, encode([row(ID, reward=None), row(GroupId(1, 0, 0, 0).run(1))]), accepted=True
    )
    assert ask(settings, "SELECT reward, state, explained FROM v_experiences ORDER BY id") == [
        (None, "explained", "unscored"),
        (1.0, "available", None),
    ]
    assert ask(settings, "SELECT num_scored, reward_mean, reward_variance FROM v_groups") == [
        (1, 1.0, None)
    ]
    await buffer.close()


async def test_an_answer_of_nothing_but_its_end_is_kept(tmp_path: Path) -> None:
    """One trained token, the end of the text; and an answer without tokens, which is no row to
    train.
    """
    settings = BufferSettings(folder=tmp_path)
    buffer = Buffer(settings)
    await buffer.open()
    await buffer.start_lineage(None, None)
    empty = row(GroupId(1, 0, 0, 0).run(1), trained=False)
    await buffer.append(1, encode([row(ID, tokens=2), empty]), accepted=True)
    asked = "SELECT num_response_tokens, state, explained FROM v_experiences ORDER BY id"
    assert ask(settings, asked) == [(1, "available", None), (0, "explained", "untrainable")]
    assert ask(settings, "SELECT mean_response_tokens FROM v_groups") == [(0.5,)]
    await buffer.close()


async def test_rows_without_logprobs_say_so(tmp_path: Path) -> None:
    settings = BufferSettings(folder=tmp_path)
    buffer = Buffer(settings)
    await buffer.open()
    await buffer.start_lineage(None, None)
    without = msgspec.structs.replace(
        row(ID), has_logprobs=False, logprobs=np.zeros(12, np.float32)
    )
    await buffer.append(1, encode([without]), accepted=True)
    assert ask(settings, "SELECT has_logprobs FROM v_experiences") == [(0,)]
    await buffer.close()


@pytest.mark.parametrize(
    "name", ["x'; DROP TABLE experiences", "a-b", "1a", "", "a" * 64, "a b", 'a"b']
)
def test_names_that_are_no_identifiers(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a buffer"):
        Buffer(BufferSettings(folder=tmp_path, name=name))


@pytest.mark.parametrize(
    "name", ["'; DROP TABLE experiences; --", "toy' OR '1'='1", "%s", ":id", "?"]
)
async def test_names_inside_experiences_are_only_text(tmp_path: Path, name: str) -> None:
    settings = BufferSettings(folder=tmp_path)
    buffer = Buffer(settings)
    await buffer.open()
    await buffer.start_lineage(None, None)
    rows: list[Experience] = [
        msgspec.structs.replace(x, taskset=name, workflow=name) for x in group(1, 0, 0)
    ]
    await buffer.append(1, encode(rows), accepted=True)
    assert ask(settings, "SELECT DISTINCT taskset, workflow FROM v_experiences") == [(name, name)]
    assert (await buffer.audit()).ok
    await buffer.close()
