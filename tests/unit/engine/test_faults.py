import pytest

from rft.errors import ConfigError
from rft.faults import fault


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_FAULT", raising=False)
    assert not fault("sync.skip")


def test_always_and_nth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_FAULT", "sync.skip,sync.stale_head:2,sync.stale_head:4")
    assert [fault("sync.skip") for _ in range(3)] == [True, True, True]
    assert [fault("sync.stale_head") for _ in range(5)] == [False, True, False, True, False]
    assert not fault("sync.missing_tensor")


@pytest.mark.parametrize("setting", ["sync.skip:0", "sync.skip:x", ":1", "a,,b"])
def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("RFT_FAULT", setting)
    with pytest.raises(ConfigError, match="RFT_FAULT"):
        fault("sync.skip")
