import errno
import os
import signal
import subprocess
import sys

import pytest

from rft.errors import ConfigError
from rft.fault_injection import fault, planned


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_FAULT", raising=False)
    assert not fault("sync.skip")


def test_always_and_nth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_FAULT", "sync.skip,sync.stale_head:2,sync.stale_head:4")
    assert [fault("sync.skip") for _ in range(3)] == [True, True, True]
    assert [fault("sync.stale_head") for _ in range(5)] == [False, True, False, True, False]
    assert not fault("sync.missing_tensor")


@pytest.mark.parametrize(
    "setting", ["sync.skip:0", "sync.skip:x", ":1", "a,,b", "a=burn", "a:1=", "a:2-x"]
)
def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("RFT_FAULT", setting)
    with pytest.raises(ConfigError, match="RFT_FAULT"):
        fault("sync.skip")


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_FAULT", "sync.corrupt_byte:2-3,sync.wrong_version:3-")
    assert [fault("sync.corrupt_byte") for _ in range(5)] == [False, True, True, False, False]
    assert [fault("sync.wrong_version") for _ in range(5)] == [False, False, True, True, True]
    assert planned("sync.wrong_version")
    assert not planned("sync.skip")


@pytest.mark.parametrize(
    ("action", "number"), [("enospc", errno.ENOSPC), ("edquot", errno.EDQUOT), ("eio", errno.EIO)]
)
def test_errors_are_raised(monkeypatch: pytest.MonkeyPatch, action: str, number: int) -> None:
    monkeypatch.setenv("RFT_FAULT", f"storage.put:2={action}")
    assert not fault("storage.put")
    with pytest.raises(OSError, match=r"RFT_FAULT at storage\.put") as e:
        fault("storage.put")
    assert e.value.errno == number


def test_a_point_of_the_buffer_kills_by_default() -> None:
    code = (
        "from rft.fault_injection import fault\nfor n in range(3): fault('buffer.lease'); "
        "print(n, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RFT_FAULT": "buffer.lease:3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])
