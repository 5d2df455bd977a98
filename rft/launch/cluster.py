"""The Ray that a run uses, its own on this machine or one that is there, and who sits where on it.

A local Ray listens on 127.0.0.1 only, asks for a token, keeps its files in one temporary folder and
takes everything with it when it ends.  Must be called before anything imports ray: the settings are
read at import.

Order of placement: explorer engines (tensor parallel inside one node), then auxiliary models, then
the trainer's ranks, neighbours on one node.  `rft check` judges the declared cluster with
`placement`; `rft run` judges the real one and reserves exactly those places.
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
    # engines and trainer are the work of this machine, not background jobs
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",  # a worker may import an engine first
    # every actor has its own environment, so prestarted workers are never used
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",  # nothing reads them; the program has metrics of its own
    "RAY_event_stats": "0",
}
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_STARTS_LATE = "timed out during startup"
_OBJECT_STORE_BYTES = 256 << 20
_STOPPED_S = 15.0  # of a process of a Ray that is starting
_SHUTDOWN_S = 5.0
# Ray opens its folder and its sockets to everybody; the folder around it is the account's
_RAYS = "ray"
_ATTEMPT_S = 10.0  # before seats are dealt anew to the GPUs that are free by then
_NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
_SOCKET_PATH_LIMIT = 60  # unix socket paths end at 107 bytes, Ray adds up to 45


class Cluster:
    """A connected Ray.  `close` disconnects, and ends it and removes its files if it is ours."""

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

        A local Ray is told of `num_cpus` CPUs, else of the machine's and at least 8; `num_gpus`
        declares GPUs instead of counting them (tests).  `timeline`: it keeps the events of each
        call, which `timeline` writes.
        """
        os.environ.update(_ALWAYS)
        if address is None:
            os.environ.update(
                _LOCAL, RAY_task_events_report_interval_ms="1000" if timeline else "0"
            )
            # kept: Ray reads it once in a process
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
                # where nothing listens, Ray's library would try for a quarter of an hour
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
        """Ray waits only 30 s for its own processes, too short on a busy machine: it gets three
        attempts.
        """
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
                        address="local",  # whatever RAY_ADDRESS says
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
                late = bool(failed) or _STARTS_LATE in str(e)  # Ray raises a bare Exception for it
                if not late and not isinstance(e, OSError | RuntimeError | ValueError):
                    raise
                if not late or not attempts_left:
                    why = f"{failed[0]} while Ray starts" if failed else e
                    raise SetupError(f"Ray could not be started on this machine: {why}") from e
            finally:
                over.set()
                self._processes = [
                    p for p in psutil.Process().children(recursive=True) if p not in before
                ]
                self.watched.add(self._processes)
            why = (
                failed[0]
                if failed
                else "Ray did not start within its limit of 30 s (is the machine busy?)"
            )
            log.warning("%s; starting it again", why)
            _kill(self._processes)
            ray.shutdown()

    def _end_failed(
        self, before: Sequence[psutil.Process], failed: list[str], over: threading.Event
    ) -> None:
        """Ends a Ray that starts once one of its processes has ended or hangs: `ray.init` could
        wait for it for ever.
        """
        me = psutil.Process()
        while not over.wait(LOOK_S):
            started = [p for p in me.children(recursive=True) if p not in before]
            self.watched.add(started)
            if why := self.watched.failed(_STOPPED_S):
                failed.append(why)
                _kill(started)
                return

    def timeline(self, path: Path) -> None:
        """Write what every process of Ray did when, in the trace format of Chrome, whole or not at
        all.
        """
        import ray

        aside = path.with_suffix(".tmp")
        ray.timeline(str(aside))
        aside.replace(path)

    def close(self) -> None:
        """Raises RayFailed where a Ray of others does not let go of this process, which cannot end
        in the usual way then.
        """
        import ray

        started = time.monotonic()
        if self._folder is not None:
            _kill(self.watched.stopped())
        ended = in_daemon(ray.shutdown)
        if not wait([ended], _SHUTDOWN_S).done:
            why = self.watched.trouble() or "Ray does not answer"
            log.warning("%s: no end within %.0f s", why, _SHUTDOWN_S)
            if self._folder is not None:
                _kill(self._processes)
            if not wait([ended], _SHUTDOWN_S).done:
                raise RayFailed(f"{why}, so this process cannot leave it")
        ended.result()
        if self._folder is None:
            return
        _end(self._processes)
        gone = self._folder.with_suffix(".gone")
        with suppress(FileNotFoundError):
            # so that a worker that ends late cannot write a file into what is being removed
            self._folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        log.info("Ray stopped in %.1f s", time.monotonic() - started)


@contextmanager
def _without_unused() -> Iterator[None]:
    """Ray starts without the parts that nothing here uses: they scale a cluster, copy logs to a
    driver, and serve a dashboard.

    It has no option for that.  Each takes processor time, and `ray.init` waits for the last.
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
    """Ray's agent asks for the address once a second until it gets one, and writes each failure
    down.
    """
    node.get_gcs_client().internal_kv_put(b"dashboard", b"127.0.0.1:0", True, b"dashboard")


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes that should be ending; after five seconds make them."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        log.warning("process %d did not exit; killing it", process.pid)
    _kill(alive)


@contextmanager
def _quiet_sigint() -> Iterator[None]:
    """Children started inside do not receive Ctrl-C: this process decides when they end."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@dataclass(frozen=True)
class Seat:
    """One actor's place: `gpus` devices of one node."""

    role: str  # "engine" | "auxiliary" | "trainer"
    index: int
    gpus: int
    node: int  # number of the node in the declared or real cluster
    host: int | None = None  # a rank: the engine whose GPUs it shares


def placement(
    engines: Sequence[EngineSettings],
    learner: LearnerSettings | None,
    gpus_per_node: list[int],
    auxiliary: Sequence[int] = (),
    *,
    shared: bool = False,
) -> list[Seat]:
    """Seats for all engines, auxiliary models (GPUs of each of their engines) and trainer ranks.

    `shared`: the ranks sit on the engines' GPUs, in their order, and on GPUs of their own when
    there are more of them.

    Raises SetupError when the cluster is too small, naming role and numbers.
    """
    free = list(gpus_per_node)
    placed: list[Seat] = []

    def refuse(role: str, index: int, gpus: int) -> SetupError:
        ranks = learner.world_size if learner is not None and learner.device == "cuda" else 0
        wanted = sum(e.gpus for e in engines) + sum(auxiliary) + (0 if shared else ranks)
        return SetupError(
            f"{role} {index} needs {gpus} GPU(s) on one node, but the nodes have {free} left of "
            f"{gpus_per_node}. "
            f"The plan needs {wanted} GPUs in all ({len(engines)} engine(s), {len(auxiliary)} "
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
    """Return the node of each free GPU, ordered so that ranks of one FSDP or Ulysses group share
    it.
    """
    left = list(free)
    most_free_first = sorted(range(len(free)), key=lambda n: -free[n])
    sizes = {learner.world_size, learner.fsdp_size, learner.sequence_parallel, 1} - {-1}
    dealt: list[int] = []
    for together in sorted(sizes, reverse=True):
        for node in most_free_first:
            count = left[node] // together * together
            dealt += [node] * count
            left[node] -= count
    return dealt


class Places:
    """Reserved seats of a connected Ray; gives actor options per seat.

    `shown`: GPUs of the engines whose GPUs ranks share.  Ray counts those as the ranks', so the
    engine is told which they are.
    """

    def __init__(
        self, seats: list[Seat], group: Any, shown: Mapping[int, str] | None = None
    ) -> None:
        self.seats = seats
        self._group = group
        self._shown = shown or {}

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Ray actor options that put the actor on its seat."""
        seat = next(s for s in self.seats if (s.role, s.index) == (role, index))
        if seat.gpus == 0:
            return {"num_gpus": 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=_bundle(self.seats, seat)
        )
        told = role == "engine" and index in self._shown
        return {
            "num_cpus": 0,
            "num_gpus": 0 if told else seat.gpus,
            "scheduling_strategy": strategy,
        }

    def env(self, role: str, index: int) -> dict[str, str]:
        """Environment of the actor on this seat."""
        return (
            {"CUDA_VISIBLE_DEVICES": self._shown[index]}
            if role == "engine" and index in self._shown
            else {}
        )


def _bundle(seats: Sequence[Seat], seat: Seat) -> int:
    """Its number among the bundles of the placement group."""
    holder = (
        seat
        if seat.host is None
        else next(s for s in seats if (s.role, s.index) == ("engine", seat.host))
    )
    return [s for s in seats if s.gpus and s.host is None].index(holder)


def here() -> dict[str, Any]:
    """Ray actor options that put it beside the process that asks, on whose disks and in whose
    memory its work lies.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


async def reserve(seats_on: Callable[[list[int]], list[Seat]], timeout_s: float = 60.0) -> Places:
    """Reserve the seats that `seats_on` deals to the nodes' free GPUs, each on exactly its node.

    Raises SetupError when the cluster is too small, or other jobs do not free enough GPUs in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    deadline = time.monotonic() + timeout_s
    while True:
        nodes = await answer("list its nodes", gpus_of_nodes)
        try:
            seats = seats_on([free for _, free in nodes.values()])
        except SetupError:
            # GPUs of other jobs may become free meanwhile
            seats = seats_on([total for total, _ in nodes.values()])
        wanted = [s for s in seats if s.gpus and s.host is None]
        if not wanted:
            return Places(seats, None)
        ids = list(nodes)
        bundles = [{"GPU": s.gpus} for s in wanted]
        labels = [{_NODE_ID: ids[s.node]} for s in wanted]
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
            # other GPUs may be free by now
            await answer("give GPUs back", remove_placement_group, group)
            if left_s <= _ATTEMPT_S:
                gpus = sum(s.gpus for s in wanted)
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
    """The GPUs of an engine's bundle, as CUDA_VISIBLE_DEVICES names them."""
    import ray

    seat = next(s for s in seats if (s.role, s.index) == ("engine", engine))
    options = Places(seats, group).options("engine", engine)
    look = ray.remote(max_retries=0)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "")).options(
        **options
    )
    try:
        found: str = await asyncio.wait_for(await answer("start a task", look.remote), timeout_s)
    except TimeoutError:
        raise RayFailed(
            f"Ray did not say within {timeout_s:.0f} s which GPUs engine {engine} has"
        ) from None
    assert len(found.split(",")) == seat.gpus, found
    return found
