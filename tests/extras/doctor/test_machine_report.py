"""The file of `rft doctor --gpu --report`, and what is said of a driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft import secrets
from rft.errors import ConfigError
from rft.extras.doctor import doctor_command
from rft.extras.doctor.check_line import Line
from rft.extras.doctor.driver import driver_text
from rft.extras.doctor.machine_report import content

LINES = [
    Line(topic="arithmetic", state="ok", text="a product"),
    Line(topic="vllm", state="failed", text="started with the key sk-of-this-test-alone-9f31c2"),
    Line(topic="flash-attn", state="note", text="not installed"),
]


def test_report_counts_proofs_and_names_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "jane")
    secrets.learn_secrets(["sk-of-this-test-alone-9f31c2"])
    findings = [{"topic": "disk", "state": "ok", "text": f"80 GiB in {tmp_path}/jane/runs"}]
    page = json.loads(content("cuda", findings, LINES))
    assert page["summary"] == "1 of 3 proven on this machine"
    assert page["machine"][0]["text"] == "80 GiB in ~/runs"
    assert [c["state"] for c in page["checks"]] == ["ok", "failed", "note"]
    assert "sk-of-this-test" not in json.dumps(page) and "jane" not in json.dumps(page)


def test_report_needs_the_checks_of_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report: belongs to --gpu"):
        doctor_command.doctor(report=tmp_path / "report.json")


@pytest.mark.parametrize(
    ("version", "cuda", "reason"),
    [
        ("550.54.15", "13.0", "Driver 550.54.15 is too old for CUDA 13.0, which needs 580 or"),
        ("515.43", "12.8", "needs 525 or newer"),
        ("580.95.05", "13.0", ""),
        ("550.54.15", "12.8", ""),
        ("550.54.15", None, ""),
        ("No devices were found", "13.0", ""),
    ],
)
def test_a_driver_older_than_cuda_needs_is_named(
    version: str, cuda: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text = driver_text(cuda)
    assert (reason in text) if reason else text == ""


def test_without_nvidia_smi_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_text("13.0") == ""


def test_an_nvidia_smi_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'cannot reach the NVIDIA driver'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert driver_text("13.0") == "nvidia-smi fails: cannot reach the NVIDIA driver"
