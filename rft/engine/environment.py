"""Environment variables of processes that compute: to be set before the process starts.
Torch-free.

LD_PRELOAD and GLIBC_TUNABLES work only at exec, so whoever starts an engine's or trainer's process
passes these on (Ray: `runtime_env`'s `env_vars`).
Invariant: a variable that the user has set is kept, except LD_PRELOAD, where ours are put in front.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rft.engine import vllm_host
from rft.engine.settings import EngineSettings
from rft.errors import SetupError

log = logging.getLogger(__name__)

OPENMP = "libiomp5.so"
ALLOCATOR = "libtcmalloc_minimal.so.4"
TUNABLES = "GLIBC_TUNABLES"
# tells vLLM's own processes the module to import before they build the model
LIBRARY = "RFT_EXTERNAL_LIB"
# What layers are packed into is used again for the next version: memory that is given back costs
# the kernel 0.2 s a GB to give anew.
_KEPT = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
# No KMP_AFFINITY: it would bind the first thread of a process, and its children would inherit that
# one core.  Threads that wait longer than so many ms sleep, so that whoever idles leaves its cores
# to the others.
_WAITS = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
_REMEDY = {OPENMP: "pip install intel-openmp", ALLOCATOR: "apt-get install libtcmalloc-minimal4"}


def cpu_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables for the process that hosts an engine.

    vLLM's own processes inherit them.  For device cuda only the neutral ones are given.  Raises
    SetupError when there are too few cores.
    """
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if settings.log_stats or settings.log_requests else "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # a process that gives itself a title keeps its environment readable, which tells whose it
        # is
        "SPT_NOENV": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if Path(settings.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if settings.device == "cpu":
        if settings.enforce_eager:
            # the sampler has a small compiled function: 15 s at the first request for nothing
            env["TORCH_COMPILE_DISABLE"] = "1"
        shards = _cores(settings)
        if settings.workers == 1:
            # vLLM then runs model and scheduler in one process and leaves thread binding to us; "0"
            # is what lets it do so
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            env["OMP_NUM_THREADS"] = str(len(shards[0]))
            if library(OPENMP) is not None:
                env |= _WAITS
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in shards)
        env |= _preload(OPENMP, ALLOCATOR)
        if library(ALLOCATOR) is None:
            env[TUNABLES] = _KEPT
    return _unless_set(env) | (
        {} if settings.external_lib is None else {LIBRARY: settings.external_lib}
    )


def host_program(settings: EngineSettings) -> list[str] | None:
    """The interpreter with its arguments for the process that hosts an engine; None: as any other.

    Some cores need a new interpreter for their variables: of several workers, of compiled models,
    where libraries are not preloaded; and where a module of the user's is imported, which may start
    threads.
    """
    eager = (
        settings.engine_type == "vllm"
        and settings.device == "cpu"
        and settings.enforce_eager
        and settings.workers == 1
    )
    if (
        not eager
        or settings.external_lib is not None
        or library(OPENMP) is None
        or library(ALLOCATOR) is None
    ):
        return None
    return [sys.executable, "-P", "-c", vllm_host.START]


def trainer_environment(threads: int, device: str = "cpu") -> dict[str, str]:
    """Variables for a trainer rank that computes with `threads` threads on the host; idle ones
    sleep soon, as in engines.
    """
    env = {
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "1000",
        **_WAITS,
        "TOKENIZERS_PARALLELISM": "false",
    }
    # numbers of rows hardly come again, and a kernel for each takes 0.3 MiB
    env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
    return _unless_set({**env, **_preload(*([OPENMP] if device == "cpu" else []), ALLOCATOR)})


def library(name: str) -> Path | None:
    """Where a shared library lies: beside this interpreter, in vLLM's wheel, or in the system's
    folders.
    """
    system = (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    )
    wheels = [Path(p) / "vllm" / "libs" for p in sys.path if p.endswith("site-packages")]
    for folder in (Path(sys.prefix) / "lib", *wheels, *map(Path, system)):
        if (folder / name).exists():
            return folder / name
    return None


def missing_libraries() -> list[str]:
    """What would make CPU engines and trainers faster and is not installed, with the remedy."""
    return [
        f"{name} not found: {remedy}" for name, remedy in _REMEDY.items() if library(name) is None
    ]


def _preload(*names: str) -> dict[str, str]:
    found = []
    for name in names:
        if (path := library(name)) is None:
            log.warning("%s not found; this process will be slower (%s)", name, _REMEDY[name])
        else:
            found.append(str(path))
    before = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p not in found]
    return {"LD_PRELOAD": ":".join([*found, *before])} if found else {}


def _cores(settings: EngineSettings) -> list[list[int]]:
    """For each worker the ids of its cores, which are its own where the engines together have no
    more threads than there are cores.
    """
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    if (workers := settings.workers) > len(allowed):
        raise SetupError(
            f"tensor_parallel_size {workers} on CPU needs a core for each worker, {len(allowed)} "
            f"are there; lower it"
        )
    each = max(1, min(settings.cpu_threads, len(allowed)) // workers)
    return [
        [allowed[(settings.first_core + w * each + i) % len(allowed)] for i in range(each)]
        for w in range(workers)
    ]


def _unless_set(env: dict[str, str]) -> dict[str, str]:
    return {k: v if k == "LD_PRELOAD" else os.environ.get(k, v) for k, v in env.items()}
