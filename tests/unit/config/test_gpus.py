"""GPUs as a driver's program lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.config import gpus
from rft.config.plan import Facts

GIB = 1 << 30
LISTED = """0, GPU-aaaa1111, 81920
1, GPU-bbbb2222, 40960
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program `nvidia-smi` that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{LISTED}E\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpus.listed_gpus.cache_clear()
    yield program
    gpus.listed_gpus.cache_clear()


def test_the_smallest_gpu_counts(driver: Path) -> None:
    facts = Facts(cpus=2)
    assert (facts.gpus, facts.gpu_memory) == (2, 40 * GIB)


@pytest.mark.parametrize(
    ("visible", "count", "nbytes"),
    [
        ("0", 1, 80 * GIB),
        ("GPU-bbbb", 1, 40 * GIB),
        ("1,0", 2, 40 * GIB),
        ("", 0, None),
        ("-1", 0, None),
        ("MIG-cccc", 1, None),
    ],
)
def test_only_visible_gpus_count(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int, nbytes: int | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (gpus.count_gpus(), gpus.smallest_gpu()) == (count, nbytes)


def test_numbers_of_unequal_gpus_name_none(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER")  # CUDA's 0 is the fastest
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (gpus.count_gpus(), gpus.smallest_gpu()) == (1, None)


@pytest.mark.parametrize("body", ["exit 9", "echo 0, GPU-aaaa, [N/A]", "echo Unable to determine"])
def test_a_driver_without_an_answer_lists_nothing(driver: Path, body: str) -> None:
    driver.write_text(f"#!/bin/sh\n{body}\n")
    assert gpus.listed_gpus() == () and gpus.smallest_gpu() is None
