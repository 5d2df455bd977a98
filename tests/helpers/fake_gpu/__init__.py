"""A GPU without memory or kernels: tensors on `cuda` have shapes and no values, so steps of real models run on any machine.

`guard.cpp` lets a torch for CPUs accept the device, `device` computes shapes with torch's fake tensors, counts bytes and notes where
the host waits, and the other modules run the trainer on it.  It changes torch for good, so each runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++") or shutil.which("clang++")


def missing() -> str:
    """Return what this machine lacks for a fake GPU, or nothing.  A torch with CUDA has its own."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    if Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists():
        return "a torch for CPUs"
    return "" if COMPILER else "g++ or clang++"


def build(folder: Path) -> Path:
    """Compile the device's guard into `folder` with `COMPILER`."""
    spec = importlib.util.find_spec("torch")
    assert COMPILER is not None and spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    library = folder / "fake_gpu.so"
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{root / 'include'}",
        str(Path(__file__).with_name("guard.cpp")),
    ]
    command += [
        "-o",
        str(library),
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{root / 'lib'}",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return library


def load(library: Path) -> None:
    """Give this process the device.  Torch asks once for what there is, so it must not be imported yet."""
    assert "torch" not in sys.modules
    ctypes.CDLL(str(library))


def play(module: str, arguments: Sequence[str], lines: Iterable[str]) -> list[dict[str, Any]]:
    """Run a module of this package with `lines` as its input; return the JSON objects it prints.

    The fake GPU changes a process for good, so it gets one of its own.
    """
    run = subprocess.run(
        [sys.executable, "-m", f"{__name__}.{module}", *arguments],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
