"""vLLM's CUDA build, as users install it, on a machine without a driver.

`DRIVER` is a driver that finds no device, so that the wheels import; `gpu` answers for a GPU of a
chosen generation.  Both change a process for good, so each runs in one of its own, with the Python
of an environment that `make test-cuda-build` installs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("RFT_CUDA_PYTHON", "")
COMPILER = shutil.which("gcc") or shutil.which("clang")
GENERATIONS = {"Ampere": "8.0", "Hopper": "9.0", "Blackwell": "10.0"}
# functions of the driver that the wheels are linked with; each says that there is no device
DRIVER = (
    "cuCtxGetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxResetPersistingL2Cache cuCtxSetCurrent "
    "cuCtxSetLimit cuDeviceGetAttribute cuDeviceGetName cuDevicePrimaryCtxRetain "
    "cuFuncSetAttribute cuGetErrorName cuGetErrorString cuGetProcAddress_v2 cuInit "
    "cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuMemAddressFree "
    "cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease "
    "cuMemSetAccess cuMemUnmap cuModuleGetFunction cuModuleLoadData cuModuleUnload "
    "cuPointerGetAttribute cuStreamSetAttribute cuTensorMapEncodeIm2col cuTensorMapEncodeTiled"
).split()
_NO_DEVICE = 100


def driver(folder: Path) -> Path:
    """Compile a driver without devices into `folder`, for LD_LIBRARY_PATH; return `folder`."""
    assert COMPILER is not None
    lines = [f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in DRIVER]
    lines.append("int cuDriverGetVersion(int *v) { *v = 13000; return 0; }")
    source = folder / "driver.c"
    source.write_text("\n".join(lines))
    library = str(folder / "libcuda.so.1")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, str(source)], check=True)
    return folder


def play(
    module: str, folder: Path, arguments: Iterable[str], lines: Iterable[str]
) -> list[dict[str, Any]]:
    """Run a module of this package in the CUDA environment, with `lines` as its input and the
    driver in `folder`; return the JSON objects that it prints.
    """
    command = ["-m", f"{__name__}.{module}", *arguments]
    done = run(command, folder, "\n".join(lines))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run(
    command: Sequence[str], folder: Path, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python of the CUDA environment with `text` as its input and the driver in `folder`."""
    return subprocess.run(
        [PYTHON, *command],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)},
        timeout=5400,
        check=False,
    )
