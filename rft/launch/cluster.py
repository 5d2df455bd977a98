"""The Ray of a run, local or joined, and the placement of actors on it.

A local Ray listens on 127.0.0.1 only, requires a token, keeps its files in one temporary folder and
ends with all its processes.  `Cluster.connect` must run before anything imports ray, which reads its
settings at import.

Order of placement: explorer engines (tensor parallel inside one node), then auxiliary models, then
the trainer's ranks, neighbours on one node.  `rft check` applies `placement` to the declared
cluster, `rft run` to the real one, where it reserves exactly these places.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rft.engine.settings import EngineSettings
from rft.errors import RayFailed, SetupError
from rft.launch.ray_calls import ANSWER_S, LOOK_S, RayProcesses, answer, in_daemon, local_processes
from rft.secrets import learn_secrets
from rft.trainer.settings import LearnerSettings

log = logging.getLogger(__name__)

_LOCAL = {
    # otherwise Ray replaces 127.0.0.1 by the routable address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # engines and trainer are no background jobs
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",  # a worker may import an engine first
    # every actor has its own environment, so prestarted workers are never used
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",  # unused
    "RAY_event_stats": "0",
}
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_STARTS_LATE = "timed out during startup"
_OBJECT_STORE_BYTES = 256 << 20
_STOPPED_S = 15.0  # limit for a stopped process while Ray starts
_SHUTDOWN_S = 5.0
# Ray's folder and sockets are open to all accounts; the folder around it is private
_RAYS = "ray"
_ATTEMPT_S = 10.0  # between two attempts to place seats on free GPUs
_NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
_SOCKET_PATH_LIMIT = 60  # unix socket paths end at 107 bytes, Ray adds up to 45


class Cluster:
    """A connected Ray.

    `close` disconnects, and ends a local Ray and removes its files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._processes: list[psutil.Process] = []
        self.watched = RayProcesses()

    @classmethod
    def connect(
        cls,
        address: str | None,
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        timeline: bool = False,
    ) -> Cluster:
        """Join the Ray at `address`, or start one here.

        A local Ray has `num_cpus` CPUs (default: the machine's, at least 8); `num_gpus` declares GPUs
        instead of counting them (tests).  `timeline`: keep events for `Cluster.timeline`.
        """
        os.environ.update(_ALWAYS)
        if address is None:
            os.environ.update(
                _LOCAL, RAY_task_events_report_interval_ms="1000" if timeline else "0"
            )
            # not replaced: Ray reads it once per process
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
            learn_secrets([os.environ["RAY_AUTH_TOKEN"]])
        try:
            import ray
        except ImportError as e:
            raise SetupError(
                f"Ray cannot be imported ({e}). Install it (`pip install ray`), or run everything "
                f"in one process with --in-process."
            ) from e
        if address is not None:
            try:
                host, _, port = address.rpartition(":")
                # without a listener, Ray's library would try for a quarter of an hour
                if port.isdecimal():
                    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
                joined = in_daemon(
                    ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR
                )
                if not wait([joined], ANSWER_S).done:
                    raise RayFailed(
                        f"cluster.ray_address {address!r}: Ray does not let this process join "
                        f"within {ANSWER_S:.0f} s"
                    )
                info = joined.result().address_info
            except (OSError, ValueError) as e:
                raise SetupError(
                    f"cluster.ray_address {address!r}: no Ray answers there ({e}). Start it (ray "
                    f"start --head), or remove the key."
                ) from e
            cluster = cls(None)
            cluster.watched.add(local_processes(info["raylet_socket_name"], info["session_dir"]))
            return cluster
        folder = Path(tempfile.mkdtemp(prefix="rft-"))
        if len(str(folder / _RAYS)) > _SOCKET_PATH_LIMIT:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="rft-", dir="/tmp"))
        cluster = cls(folder)
        try:
            cluster._start(
                folder / _RAYS, num_cpus=num_cpus or max(8, os.cpu_count() or 1), num_gpus=num_gpus
            )
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _start(self, folder: Path, **resources: int | None) -> None:
        """Start Ray in three attempts: its own wait of 30 s is too short on a busy machine."""
        import ray

        before = psutil.Process().children(recursive=True)
        for attempts_left in (2, 1, 0):
            self.watched = RayProcesses()
            failed: list[str] = []
            over = threading.Event()
            in_daemon(self._end_failed, before, failed, over)
            try:
                with _quiet_sigint(), _without_unused():
                    ray.init(
                        address="local",  # ignore RAY_ADDRESS
                        **resources,
                        include_dashboard=False,
                        _temp_dir=str(folder),
                        _node_ip_address="127.0.0.1",
                        object_store_memory=_OBJECT_STORE_BYTES,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    )
                return
            except Exception as e:
                late = bool(failed) or _STARTS_LATE in str(e)  # Ray raises a bare Exception
                if not late and not isinstance(e, OSError | RuntimeError | ValueError):
                    raise
                if not late or not attempts_left:
                    reason = f"{failed[0]} while Ray starts" if failed else e
                    raise SetupError(f"Ray could not be started on this machine: {reason}") from e
            finally:
                over.set()
                self._processes = [
                    p for p in psutil.Process().children(recursive=True) if p not in before
                ]
                self.watched.add(self._processes)
            reason = (
                failed[0]
                if failed
                else "Ray did not start within its limit of 30 s (is the machine busy?)"
            )
            log.warning("%s; starting it again", reason)
            _kill(self._processes)
            ray.shutdown()

    def _end_failed(
        self, before: Sequence[psutil.Process], failed: list[str], over: threading.Event
    ) -> None:
        """End a starting Ray once one of its processes ends or hangs; `ray.init` may wait for ever."""
        me = psutil.Process()
        while not over.wait(LOOK_S):
            started = [p for p in me.children(recursive=True) if p not in before]
            self.watched.add(started)
            if reason := self.watched.failed(_STOPPED_S):
                failed.append(reason)
                _kill(started)
                return

    def timeline(self, path: Path) -> None:
        """Write events of Ray's processes atomically in Chrome's trace format."""
        import ray

        aside = path.with_suffix(".tmp")
        ray.timeline(str(aside))
        aside.replace(path)

    def close(self) -> None:
        """Leave or end Ray.

        Raises RayFailed if a joined Ray does not release this process.
        """
        import ray

        started = time.monotonic()
        if self._folder is not None:
            _kill(self.watched.stopped())
        ended = in_daemon(ray.shutdown)
        if not wait([ended], _SHUTDOWN_S).done:
            reason = self.watched.trouble() or "Ray does not answer"
            log.warning("%s: no end within %.0f s", reason, _SHUTDOWN_S)
            if self._folder is not None:
                _kill(self._processes)
            if not wait([ended], _SHUTDOWN_S).done:
                raise RayFailed(f"{reason}, so this process cannot leave it")
        ended.result()
        if self._folder is None:
            return
        _end(self._processes)
        removed = self._folder.with_suffix(".gone")
        with suppress(FileNotFoundError):
            # a worker that ends late must not write into a folder being removed
            self._folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        log.info("Ray stopped in %.1f s", time.monotonic() - started)


@contextmanager
def _without_unused() -> Iterator[None]:
    """Start Ray without its autoscaler, log monitor and dashboard, for which it has no option.

    Each takes processor time, and `ray.init` waits for the last.
    """
    from ray._private.node import Node

    unused = {
        "start_monitor": _nothing,
        "start_log_monitor": _nothing,
        "start_api_server": _no_dashboard,
    }
    methods = {name: vars(Node)[name] for name in unused if name in vars(Node)}
    try:
        for name in methods:
            setattr(Node, name, unused[name])
        yield
    finally:
        for name, method in methods.items():
            setattr(Node, name, method)


def _nothing(node: Any, **options: Any) -> None: ...


def _no_dashboard(node: Any, **options: Any) -> None:
    """Store an address: Ray's agent polls for it each second and logs every failure."""
    node.get_gcs_client().internal_kv_put(b"dashboard", b"127.0.0.1:0", True, b"dashboard")


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _end(processes: list[psutil.Process]) -> None:
    """Wait five seconds for processes to end, then kill them."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        log.warning("process %d did not exit; killing it", process.pid)
    _kill(alive)


@contextmanager
def _quiet_sigint() -> Iterator[None]:
    """Block SIGINT for children started inside: this process ends them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@dataclass(frozen=True)
class Seat:
    """Place of one actor: `gpus` devices of one node."""

    role: str  # "engine" | "auxiliary" | "trainer"
    index: int
    gpus: int
    node: int  # index in the declared or real cluster
    host: int | None = None  # of a rank: engine whose GPUs it shares


def placement(
    engines: Sequence[EngineSettings],
    learner: LearnerSettings | None,
    gpus_per_node: list[int],
    auxiliary: Sequence[int] = (),
    *,
    shared: bool = False,
) -> list[Seat]:
    """Place all engines, auxiliary models (GPUs of each of their engines) and trainer ranks.

    `shared`: ranks use the engines' GPUs in their order, then free ones.  Raises SetupError naming
    role and numbers if the cluster is too small.
    """
    free = list(gpus_per_node)
    placed: list[Seat] = []

    def refuse(role: str, index: int, gpus: int) -> SetupError:
        ranks = learner.world_size if learner is not None and learner.device == "cuda" else 0
        needed = sum(e.gpus for e in engines) + sum(auxiliary) + (0 if shared else ranks)
        return SetupError(
            f"{role} {index} needs {gpus} GPU(s) on one node, but the nodes have {free} left of "
            f"{gpus_per_node}. "
            f"The plan needs {needed} GPUs in all ({len(engines)} engine(s), {len(auxiliary)} "
            f"auxiliary, {ranks} trainer rank(s)); "
            "lower explorer.rollout_model.engine_num or tensor_parallel_size, set device: cpu, or "
            "use a larger cluster."
        )

    for role, sizes in (("engine", [e.gpus for e in engines]), ("auxiliary", auxiliary)):
        for index, gpus in enumerate(sizes):
            node = next((n for n, have in enumerate(free) if have >= gpus), None)
            if node is None:
                raise refuse(role, index, gpus)
            free[node] -= gpus
            placed.append(Seat(role, index, gpus, node))
    if learner is None:
        return placed
    if learner.device == "cpu":
        return placed + [Seat("trainer", rank, 0, 0) for rank in range(learner.world_size)]
    hosts: list[list[int]] = [[] for _ in free]
    for seat in placed:
        if shared and seat.role == "engine":
            hosts[seat.node] += [seat.index] * seat.gpus
    gpus_of_engines = _neighbours([len(h) for h in hosts], learner)
    ranks: list[tuple[int, int | None]] = [(node, hosts[node].pop(0)) for node in gpus_of_engines]
    ranks += [(node, None) for node in _neighbours(free, learner)]
    if len(ranks) < learner.world_size:
        raise refuse("trainer", len(ranks), 1)
    del ranks[learner.world_size :]
    return placed + [Seat("trainer", rank, 1, *place) for rank, place in enumerate(ranks)]


def _neighbours(free: list[int], learner: LearnerSettings) -> list[int]:
    """Return the node of each free GPU; ranks of an FSDP or Ulysses group share a node."""
    remaining = list(free)
    most_free_first = sorted(range(len(free)), key=lambda n: -free[n])
    sizes = {learner.world_size, learner.fsdp_size, learner.sequence_parallel, 1} - {-1}
    dealt: list[int] = []
    for together in sorted(sizes, reverse=True):
        for node in most_free_first:
            count = remaining[node] // together * together
            dealt += [node] * count
            remaining[node] -= count
    return dealt


class Places:
    """Reserved seats of a connected Ray, with actor options per seat.

    `shown`: devices of engines whose GPUs are shared with ranks.  Ray assigns these GPUs to the
    ranks, so an engine gets them by its environment.
    """

    def __init__(
        self, seats: list[Seat], group: Any, shown: Mapping[int, str] | None = None
    ) -> None:
        self.seats = seats
        self._group = group
        self._shown = shown or {}

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Return Ray actor options for a seat."""
        seat = next(s for s in self.seats if (s.role, s.index) == (role, index))
        if seat.gpus == 0:
            return {"num_gpus": 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=_bundle(self.seats, seat)
        )
        shown = role == "engine" and index in self._shown
        return {
            "num_cpus": 0,
            "num_gpus": 0 if shown else seat.gpus,
            "scheduling_strategy": strategy,
        }

    def env(self, role: str, index: int) -> dict[str, str]:
        """Return environment variables for a seat."""
        return (
            {"CUDA_VISIBLE_DEVICES": self._shown[index]}
            if role == "engine" and index in self._shown
            else {}
        )


def _bundle(seats: Sequence[Seat], seat: Seat) -> int:
    """Return the index of a seat among the bundles of the placement group."""
    holder = (
        seat
        if seat.host is None
        else next(s for s in seats if (s.role, s.index) == ("engine", seat.host))
    )
    return [s for s in seats if s.gpus and s.host is None].index(holder)


def here() -> dict[str, Any]:
    """Return Ray actor options for this machine, whose disk and memory hold the run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


async def reserve(seats_on: Callable[[list[int]], list[Seat]], timeout_s: float = 60.0) -> Places:
    """Reserve the seats that `seats_on` places on the nodes' free GPUs.

    Raises SetupError if the cluster is too small, or other jobs free too few GPUs in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    deadline = time.monotonic() + timeout_s
    while True:
        nodes = await answer("list its nodes", gpus_of_nodes)
        try:
            seats = seats_on([free for _, free in nodes.values()])
        except SetupError:
            # other jobs may free GPUs meanwhile
            seats = seats_on([total for total, _ in nodes.values()])
        reserved = [s for s in seats if s.gpus and s.host is None]
        if not reserved:
            return Places(seats, None)
        ids = list(nodes)
        bundles = [{"GPU": s.gpus} for s in reserved]
        labels = [{_NODE_ID: ids[s.node]} for s in reserved]
        group = await answer(
            "reserve GPUs", placement_group, bundles, "PACK", bundle_label_selector=labels
        )
        left_s = deadline - time.monotonic()
        try:
            await asyncio.wait_for(
                await answer("ask for GPUs", group.ready), min(_ATTEMPT_S, left_s)
            )
            break
        except TimeoutError:
            # other GPUs may be free now
            await answer("give GPUs back", remove_placement_group, group)
            if left_s <= _ATTEMPT_S:
                gpus = sum(s.gpus for s in reserved)
                raise SetupError(
                    f"the cluster did not reserve {gpus} GPUs within {timeout_s:.0f} s; other jobs "
                    f"hold them"
                ) from None
    hosts = sorted({s.host for s in seats if s.host is not None})
    return Places(seats, group, {i: await _devices(seats, group, i, timeout_s) for i in hosts})


def gpus_of_nodes() -> dict[str, tuple[int, ...]]:
    """Return (all GPUs, free GPUs) of every living node by its id, this machine's first."""
    import ray
    from ray._private.state import available_resources_per_node

    this = ray.get_runtime_context().get_node_id()
    living = [n for n in ray.nodes() if n["Alive"]]
    living.sort(key=lambda n: (n["NodeID"] != this, n["NodeManagerAddress"], n["NodeID"]))
    free = available_resources_per_node()
    return {
        n["NodeID"]: tuple(
            int(r.get("GPU", 0)) for r in (n["Resources"], free.get(n["NodeID"], {}))
        )
        for n in living
    }


async def _devices(seats: list[Seat], group: Any, engine: int, timeout_s: float) -> str:
    """Return the GPUs of an engine's bundle as in CUDA_VISIBLE_DEVICES."""
    import ray

    seat = next(s for s in seats if (s.role, s.index) == ("engine", engine))
    options = Places(seats, group).options("engine", engine)
    look = ray.remote(max_retries=0)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "")).options(
        **options
    )
    try:
        devices: str = await asyncio.wait_for(await answer("start a task", look.remote), timeout_s)
    except TimeoutError:
        raise RayFailed(
            f"Ray did not say within {timeout_s:.0f} s which GPUs engine {engine} has"
        ) from None
    assert len(devices.split(",")) == seat.gpus, devices
    return devices
