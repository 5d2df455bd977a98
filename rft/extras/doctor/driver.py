"""The NVIDIA driver and the oldest one that a CUDA version runs with.  Imports no torch."""

from __future__ import annotations

import shutil
import subprocess

# oldest driver of a major version, which serves its minor versions too (CUDA's release notes)
_OLDEST = {"12": 525, "13": 580}


def smi(query: str) -> str:
    """Return what `nvidia-smi` answers, one line a GPU.  Raises CalledProcessError."""
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def driver() -> str:
    """Return the driver's version; empty without nvidia-smi.  Raises SubprocessError."""
    if not shutil.which("nvidia-smi"):
        return ""
    return smi("--query-gpu=driver_version").partition("\n")[0]


def driver_text(cuda: str | None) -> str:
    """Return why the driver does not run torch's `cuda` version; empty if it does, or is unknown."""
    try:
        version = driver()
    except subprocess.CalledProcessError as e:
        return f"nvidia-smi fails: {(e.stderr or e.stdout).strip() or e}"
    except subprocess.TimeoutExpired as e:
        return f"nvidia-smi fails: {e}"
    oldest = _OLDEST.get((cuda or "").partition(".")[0])
    number = version.partition(".")[0]
    if oldest is None or not number.isdigit() or int(number) >= oldest:
        return ""
    return (
        f"Driver {version} is too old for CUDA {cuda}, which needs {oldest} or newer: update the "
        f"driver, or install a torch built for an older CUDA."
    )
