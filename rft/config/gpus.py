"""GPUs of this machine as the driver lists them.  Torch-free: no CUDA context starts here."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)


@functools.cache
def listed_gpus() -> tuple[tuple[str, str, int], ...]:
    """Return (index, uuid, bytes) of each GPU that the driver lists; () without a driver.

    Warns of a driver that does not answer.

    nvidia-smi asks NVML, also under WSL2, where there is no /dev/nvidia0, and starts no CUDA
    context in this process.
    """
    if (program := shutil.which("nvidia-smi")) is None:
        return ()
    query = (program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        rows = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
        return tuple((index, uuid, int(mib) << 20) for index, uuid, mib in rows)
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        log.warning("%s does not list its GPUs (%s): their memory is not judged", program, e)
        return ()


def _visible() -> list[str] | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return [v.strip() for v in visible.split(",") if v.strip() not in ("", "-1")]


def count_gpus() -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES leaves."""
    devices = sum(p.name.removeprefix("nvidia").isdecimal() for p in Path("/dev").glob("nvidia*"))
    count = len(listed_gpus()) or devices
    visible = _visible()
    return count if visible is None else min(count, len(visible))


def smallest_gpu() -> int | None:
    """Return the bytes of the smallest visible GPU; None without one, where a MIG slice is visible,
    or where CUDA's numbers may name other GPUs than the driver's: it lists the fastest first.
    """
    gpus = listed_gpus()
    visible = _visible()
    if visible is not None:
        numbers = len(visible) < len(gpus) and any(v.isdecimal() for v in visible)
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if numbers and not by_bus and len({nbytes for *_, nbytes in gpus}) > 1:
            return None
        chosen = [g for g in gpus if any(v == g[0] or g[1].startswith(v) for v in visible)]
        gpus = tuple(chosen) if len(chosen) == len(visible) else ()
    return min((nbytes for _, _, nbytes in gpus), default=None)
