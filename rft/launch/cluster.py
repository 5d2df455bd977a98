"""Starts and stops the Ray that a run uses: its own on this machine, or one that is there.

A Ray of our own listens on 127.0.0.1 only, asks for a token, keeps its files in one temporary folder and takes everything with it
when it ends.  Must be called before anything imports ray: the settings are read at import.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rft.errors import SetupError
from rft.logs import learn_secrets

log = logging.getLogger(__name__)

_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray replaces 127.0.0.1 by the routable address
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # engines and trainer are the work of this machine, not background jobs
    "RAY_enable_worker_prestart": "0",  # every actor has its own environment, so prestarted workers are never used
    "RAY_prestart_worker_first_driver": "0",
}
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_OBJECT_STORE_BYTES = 256 << 20
_SOCKET_PATH_LIMIT = 60  # unix socket paths end at 107 bytes, Ray adds up to 45


class Cluster:
    """A connected Ray.  `close` disconnects, and ends it and removes its files if it is ours."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._processes: list[psutil.Process] = []

    @classmethod
    def connect(cls, address: str | None, *, num_cpus: int | None = None, num_gpus: int | None = None) -> Cluster:
        """Join the Ray at `address`, or start one here.

        A Ray of our own is told of `num_cpus` CPUs, else of the machine's and at least 8; `num_gpus` declares GPUs instead of
        counting them (tests).
        """
        os.environ.update(_ALWAYS)
        if address is None:
            os.environ.update(_LOCAL)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # kept: Ray reads it once in a process
            learn_secrets([os.environ["RAY_AUTH_TOKEN"]])
        try:
            import ray
        except ImportError as e:
            raise SetupError(
                f"Ray cannot be imported ({e}). Install it (`pip install ray`), or run everything in one process with --in-process."
            ) from e
        if address is not None:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError) as e:
                raise SetupError(
                    f"cluster.ray_address {address!r}: no Ray answers there ({e}). Start it (ray start --head), or remove the key."
                ) from e
            return cls(None)
        folder = Path(tempfile.mkdtemp(prefix="rft-"))
        if len(str(folder)) > _SOCKET_PATH_LIMIT:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="rft-", dir="/tmp"))
        cluster = cls(folder)
        try:
            with _quiet_sigint():
                ray.init(
                    num_cpus=num_cpus or max(8, os.cpu_count() or 1),
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    _temp_dir=str(folder),
                    _node_ip_address="127.0.0.1",
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except BaseException as e:
            cluster.close()
            if isinstance(e, OSError | RuntimeError | ValueError):
                raise SetupError(f"Ray could not be started on this machine: {e}") from e
            raise
        cluster._processes = psutil.Process().children(recursive=True)
        return cluster

    def resources(self) -> dict[str, float]:
        import ray

        return {k: float(v) for k, v in ray.cluster_resources().items()}

    def gpus_per_node(self) -> list[int]:
        """How many GPUs each living node has."""
        import ray

        return [int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]]

    def timeline(self, path: Path) -> None:
        """Write what every process of Ray did when, in the trace format of Chrome, whole or not at all."""
        import ray

        aside = path.with_suffix(".tmp")
        ray.timeline(str(aside))
        aside.replace(path)

    def close(self) -> None:
        import ray

        started = time.monotonic()
        ray.shutdown()
        if self._folder is None:
            return
        _end(self._processes)
        shutil.rmtree(self._folder, ignore_errors=True)
        log.info("Ray stopped in %.1f s", time.monotonic() - started)


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes that should be ending; after five seconds make them."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        log.warning("process %d (%s) did not end by itself; killing it", process.pid, process.name())
        process.kill()
    psutil.wait_procs(alive, timeout=5)


class _quiet_sigint:
    """Children started inside do not receive Ctrl-C: this process decides when they end."""

    def __enter__(self) -> None:
        import signal

        self._old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def __exit__(self, *_: Any) -> None:
        import signal

        signal.pthread_sigmask(signal.SIG_SETMASK, self._old)
