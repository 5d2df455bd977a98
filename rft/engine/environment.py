"""Environment variables of engine and trainer processes, to be set before the process starts.
Torch-free.

LD_PRELOAD and GLIBC_TUNABLES take effect only at exec, so the parent process passes them on (Ray:
`runtime_env`'s `env_vars`).  Invariant: variables set by the user are kept; LD_PRELOAD is extended
at its front.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rft.engine import vllm_host
from rft.engine.settings import EXTERNAL_LIB, EngineSettings
from rft.errors import SetupError

log = logging.getLogger(__name__)

OPENMP = "libiomp5.so"
ALLOCATOR = "libtcmalloc_minimal.so.4"
TUNABLES = "GLIBC_TUNABLES"
# modules imported before vLLM's core is forked on a CPU
_IMPORTED = (
    "vllm.v1.engine.async_llm",
    "rft.engine.vllm",
    "rft.engine.vllm_worker",
    "rft.engine.vllm_cpu",
)
# Buffers of packed layers are reused by the next version; after memory is returned to the kernel,
# allocating it again costs 0.2 s per GB.
_KEPT = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
# No KMP_AFFINITY: it would bind a process's first thread to one core, and child processes would
# inherit that core.  KMP_BLOCKTIME: milliseconds before idle threads sleep and free their cores.
_WAITS = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
_REMEDY = {OPENMP: "pip install intel-openmp", ALLOCATOR: "apt-get install libtcmalloc-minimal4"}


def cpu_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables of the process that hosts an engine; vLLM's own processes inherit them.

    For device cuda only device-independent variables are returned.  Raises SetupError when there
    are too few cores.
    """
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if settings.log_stats or settings.log_requests else "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # keeps the environment of a renamed process readable, which identifies its owner
        "SPT_NOENV": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if Path(settings.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if settings.device == "cpu":
        if settings.enforce_eager:
            # the sampler's small compiled function would cost 15 s at the first request
            env["TORCH_COMPILE_DISABLE"] = "1"
        shards = _cores(settings)
        if settings.workers == 1:
            # vLLM then runs model and scheduler in one process and leaves thread binding to rft;
            # "0" enables this
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            env["OMP_NUM_THREADS"] = str(len(shards[0]))
            if library(OPENMP) is not None:
                env |= _WAITS
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in shards)
        env |= _preload(OPENMP, ALLOCATOR)
        if library(ALLOCATOR) is None:
            env[TUNABLES] = _KEPT
    return _unless_set(env) | (
        {} if settings.external_lib is None else {EXTERNAL_LIB: settings.external_lib}
    )


def host_program(settings: EngineSettings) -> list[str] | None:
    """Return the command of an interpreter that can fork an engine's core (`vllm_host`); None = the
    default command.

    A core cannot be forked if its variables need a new interpreter (several workers, compiled
    models, libraries not preloaded), or if a user module is imported, which may start threads.
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
    return [sys.executable, "-P", "-c", vllm_host.start_command(_IMPORTED)]


def trainer_environment(threads: int, device: str = "cpu") -> dict[str, str]:
    """Return the variables of a trainer rank with `threads` host threads; idle threads sleep soon,
    as in engines.
    """
    env = {
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "1000",
        **_WAITS,
        "TOKENIZERS_PARALLELISM": "false",
    }
    # row counts rarely repeat, and each cached kernel takes 0.3 MiB
    env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
    if device == "cuda":
        # shapes of micro-batches vary: without expandable segments freed blocks are rarely reused
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return _unless_set({**env, **_preload(*([OPENMP] if device == "cpu" else []), ALLOCATOR)})


def library(name: str) -> Path | None:
    """Find a shared library: in this interpreter's prefix, vLLM's wheel or the system folders."""
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
    """Return the missing libraries that would speed up CPU engines and trainers, each with its
    remedy.
    """
    return [
        f"{name} not found: {remedy}" for name, remedy in _REMEDY.items() if library(name) is None
    ]


def _preload(*names: str) -> dict[str, str]:
    paths = []
    for name in names:
        if (path := library(name)) is None:
            log.warning("%s not found; this process will be slower (%s)", name, _REMEDY[name])
        else:
            paths.append(str(path))
    before = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p not in paths]
    return {"LD_PRELOAD": ":".join([*paths, *before])} if paths else {}


def _cores(settings: EngineSettings) -> list[list[int]]:
    """Return the core ids of each worker.

    Workers share no core while the engines together have at most as many threads as there are
    cores.
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
