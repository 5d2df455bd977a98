"""Broadcast weights from the trainer's rank 0 to all engine workers through a torch.distributed
group.

Depends on the layout of a version's bytes, not on their source or use.  The group is separate from
all others of a process (no default group is created or used) and is reused in the next round while
its members stay the same.

    worker:   "here, with group G and version V" ─▶ meeting point at the trainer
              ─▶ "keep G" | "form G'" | "stop, because …" ─▶ buckets
    trainer:  waits for all workers, or names the absent ones

If all workers have the same version, which the trainer still has, too, only the changes since that
version are sent, bucket by bucket.

Invariant: nothing is sent before all members are present, and a group with a failure is never
reused.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rft.errors import WeightSyncFailed
from rft.fault_injection import fault
from rft.types import delta
from rft.types.ports import Broadcast, TensorSpec, WeightManifest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0  # limit of a meeting and of one bucket
_RAISES = "TORCH_NCCL_BLOCKING_WAIT"
NONE = "-"  # placeholder for the name of a group or version


@dataclass(frozen=True)
class Bucket:
    """Complete tensors that are sent together: bytes [start, end) of the version."""

    start: int
    end: int
    tensors: tuple[TensorSpec, ...]


def buckets(tensors: Sequence[TensorSpec], bucket_bytes: int | None) -> list[Bucket]:
    """Return the buckets in byte order.

    A tensor larger than a bucket has its own; `bucket_bytes` None: every tensor has its own.
    """
    grouped: list[Bucket] = []
    for spec in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        end = spec.offset + spec.nbytes
        if grouped and bucket_bytes is not None and end - grouped[-1].start <= bucket_bytes:
            grouped[-1] = Bucket(grouped[-1].start, end, (*grouped[-1].tensors, spec))
        else:
            grouped.append(Bucket(spec.offset, end, (spec,)))
    return grouped


class _Member:
    """One rank's side of the rounds: its group, and the transfer of buckets."""

    def __init__(self) -> None:
        self._group: Any = None
        self._work: Any = None  # the running transfer of a bucket
        self._group_name = ""  # unique name of the group
        # size of the group: with fewer members it would wait for the absent ones
        self._world = 0
        self._store: Any = None

    def close(self) -> None:
        """Leave the group, so that no member waits for this one.

        The group's connections end with its last reference, so only these attributes may refer to
        it; `abort` would leave waiting members blocked for good.
        """
        self._work = self._group = None
        self._group_name = ""

    @contextmanager
    def _closing_on_error(self, what: str) -> Iterator[None]:
        """Close the group on an error inside the block; name the activity in torch's errors."""
        try:
            yield
        except BaseException as e:
            self.close()
            if isinstance(e, RuntimeError):  # errors of torch
                raise WeightSyncFailed(f"{what}: {str(e).splitlines()[0]}") from None
            raise

    def _form(self, b: Broadcast, name: str, rank: int) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        self.close()
        store = PrefixStore(name, self._store)
        if b.backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(b.host))]
            options._timeout = timedelta(seconds=b.timeout_s)
            options._threads = 2
            self._group = ProcessGroupGloo(store, rank, b.world, options)  # type: ignore[arg-type, call-arg]
        else:
            from torch.distributed.distributed_c10d import ProcessGroupNCCL

            limits = ProcessGroupNCCL.Options()
            limits._timeout = timedelta(seconds=b.timeout_s)
            with _own_errors():
                self._group = ProcessGroupNCCL(store, rank, b.world, limits)
        self._group_name = name
        self._world = b.world

    def _stream(
        self,
        manifest: WeightManifest,
        memory: torch.Tensor,
        *,
        sends: bool,
        done: Callable[[Bucket], None],
        changed: bool = False,
        before: torch.Tensor | None = None,
    ) -> int:
        """Transfer all buckets of `memory` (uint8, on the host) through the group; return the
        transferred bytes.

        `done` is called with each transferred bucket, during the next transfer if the round
        overlaps. `changed`: transfer only the changes since the common version, which is `before`
        at the trainer and `memory` itself at a worker.
        """
        b = manifest.broadcast
        assert b is not None
        earlier: Bucket | None = None
        moved = 0
        for bucket in buckets(manifest.tensors, b.bucket_bytes):
            part = memory[bucket.start : bucket.end]
            packed = (
                self._packed(b, part, None if before is None else before[bucket.start : bucket.end])
                if changed
                else None
            )
            data = part if packed is None else packed
            moved += len(data)
            room = self._begin(b, data, sends)
            if earlier is not None:
                done(earlier)
            self._end(b, data, room, sends)
            if packed is not None and not sends:
                delta.apply(part.numpy(), packed.numpy())
            if not b.overlap:
                done(bucket)
            earlier = bucket if b.overlap else None
        if earlier is not None:
            done(earlier)
        return moved

    def _packed(
        self, b: Broadcast, part: torch.Tensor, before: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a bucket's changes, or at a worker room for them; None if the full bucket is sent.

        Their size is broadcast first.
        """
        import torch

        changes = None if before is None else delta.pack(before.numpy(), part.numpy())
        size = torch.tensor([-1 if changes is None else len(changes)])
        self._end(b, size, self._begin(b, size, before is not None), before is not None)
        if size < 0:
            return None
        return (
            torch.empty(int(size), dtype=torch.uint8)
            if changes is None
            else torch.from_numpy(changes)
        )

    def _begin(self, b: Broadcast, data: torch.Tensor, sends: bool) -> torch.Tensor:
        """Start the transfer of `data`, if not empty; return the tensor in transfer."""
        import torch

        room = (
            data
            if b.backend == "gloo"
            else data.cuda()
            if sends
            else torch.empty_like(data, device="cuda")
        )
        self._work = self._group.broadcast([room], _from_trainer()) if len(data) else None
        return room

    def _end(self, b: Broadcast, data: torch.Tensor, room: torch.Tensor, sends: bool) -> None:
        if self._work is None:
            return
        if b.backend == "gloo":
            self._work.wait()  # up to the group's own limit
        else:
            self._work.wait(timedelta(seconds=b.timeout_s))
            if not sends:
                data.copy_(room)
        self._work = None


class TrainerEnd(_Member):
    """Rank 0 and the meeting point.

    Call `send` from one thread at a time; `abort_round` may come from any other thread.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        super().__init__()
        self.host = host
        self.token = secrets.token_hex(8)
        listening = socket.create_server((host, 0))
        self.port: int = listening.getsockname()[1]
        limit = timedelta(seconds=TIMEOUT_S)
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listening.detach(),
        )
        # a second client, because a wait blocks its store
        self._door = TCPStore(
            host, self.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        self._lock = threading.Lock()
        self._meeting: tuple[int, list[str]] | None = None  # round, keys of the expected members
        self._abandoned = (0, "")
        self._groups = 0

    def send(
        self,
        manifest: WeightManifest,
        memory: torch.Tensor,
        staged: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Send the version's bytes (uint8, in the manifest's layout) to all workers in one round.

        `staged`: versions that are still in memory, in the same layout. Raises WeightSyncFailed.
        """
        b = manifest.broadcast
        assert b is not None, "only a manifest that names the group of a round is sent"
        with self._closing_on_error(f"sending {manifest.version} to {_members(b)} broke off"):
            before = self._meet(b, staged or {})
            self._stream(
                manifest, memory, sends=True, done=_sent, changed=before is not None, before=before
            )

    def abort_round(self, round: int, reason: str) -> None:
        """End the meeting of this round, or of an earlier one, now or when it begins."""
        with self._lock:
            self._abandoned = max(self._abandoned, (round, reason))
            if self._meeting is not None and self._meeting[0] <= round:
                for key in self._meeting[1]:
                    self._door.compare_set(key, "", "gone")  # sets only keys of absent members

    def _meet(self, b: Broadcast, staged: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Wait for all members; form or reuse the group.

        Returns the bytes of the version that all workers have, if it is in `staged`.
        """
        names = {f"{b.token}/{b.round}/here/{rank}": _name(b, rank) for rank in range(1, b.world)}
        go = f"{b.token}/{b.round}/go"
        keys = list(names)
        with self._lock:
            self._meeting = (b.round, keys)
            abandoned = self._abandoned
        try:
            if abandoned[0] < b.round:
                self._wait(keys, b.timeout_s)
            absent = [name for key, name in names.items() if not self._store.check([key])]
            answers = [self._store.get(key).decode().split() for key in keys] if not absent else []
            with self._lock:
                abandoned = self._abandoned
            if abandoned[0] >= b.round:
                raise self._stop(go, f"the round was given up: {abandoned[1]}")
            if absent:
                raise self._stop(go, f"{', '.join(absent)} did not come within {b.timeout_s:g} s")
            versions = {version for _, version in answers}
            since = versions.pop() if len(versions) == 1 else NONE
            before = staged.get(since)
            base_version = NONE if before is None else since
            if (
                {group for group, _ in answers} == {self._group_name}
                and self._group_name
                and self._world == b.world
            ):
                self._store.set(go, f"keep {self._group_name} {base_version}")
            else:
                self._groups += 1
                name = f"{b.token}/group/{self._groups}"
                self._store.set(go, f"form {name} {base_version}")
                self._form(b, name, 0)
            return before
        finally:
            with self._lock:
                self._meeting = None
            for key in keys:
                self._store.delete_key(key)

    def _wait(self, keys: list[str], timeout_s: float) -> None:
        from torch.distributed import DistStoreError

        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            log.warning("not everyone came to the broadcast within %g s", timeout_s)

    def _stop(self, go: str, reason: str) -> WeightSyncFailed:
        self._store.set(go, f"stop {reason}")
        return WeightSyncFailed(reason)


class Worker(_Member):
    """An engine worker's side.  Call from one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._at: tuple[str, int] | None = None  # address of the store's meeting point

    def receive(
        self,
        manifest: WeightManifest,
        worker: int,
        memory: torch.Tensor,
        holds: str,
        done: Callable[[Bucket], None],
    ) -> tuple[float, float, int]:
        """Receive a version into `memory` (uint8 [size of the version]) in one round.

        `worker`: this worker's number in its engine.  `holds`: the version in `memory`, or NONE.
        `done` is called with each received bucket. Returns (seconds until the group was formed,
        seconds of the transfer, received bytes). Raises WeightSyncFailed.
        """
        b = manifest.broadcast
        assert b is not None, "only a version that is broadcast is received"
        rank = b.first + worker
        began = time.monotonic()
        with self._closing_on_error(f"receiving {manifest.version} as {_name(b, rank)} broke off"):
            changed = self._meet(b, rank, holds) != NONE
            met = time.monotonic()
            moved = self._stream(manifest, memory, sends=False, done=done, changed=changed)
        return met - began, time.monotonic() - met, moved

    def _meet(self, b: Broadcast, rank: int, holds: str) -> str:
        """Join the group; return the version since which changes are sent, or NONE."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=b.timeout_s)
        if self._at != (b.host, b.port):
            self.close()
            self._store = TCPStore(
                b.host, b.port, is_master=False, wait_for_workers=False, timeout=limit
            )
            self._at = (b.host, b.port)
        go = f"{b.token}/{b.round}/go"
        self._store.set(f"{b.token}/{b.round}/here/{rank}", f"{self._group_name or NONE} {holds}")
        # the trainer gives up earlier and reports why
        self._store.wait([go], timedelta(seconds=2 * b.timeout_s))
        answer: str = self._store.get(go).decode()
        command, _, rest = answer.partition(" ")
        if command == "stop":
            raise WeightSyncFailed(rest)
        name, since = rest.split()
        if command == "form":
            self._form(b, name, rank)
        return since


def _sent(bucket: Bucket) -> None:
    fault("sync.sent")


@contextmanager
def _own_errors() -> Iterator[None]:
    """Make NCCL groups created inside the block raise their errors at the wait for a bucket.

    By default torch's watchdog ends this process as soon as another member dies
    (https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
    """
    before = os.environ.get(_RAISES)
    os.environ[_RAISES] = "1"
    try:
        yield
    finally:
        os.environ.pop(_RAISES)
        os.environ.update({} if before is None else {_RAISES: before})


def _from_trainer() -> Any:
    from torch.distributed.distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


def _own_address(host: str) -> str:
    """Return this machine's address on the route to `host`, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _name(b: Broadcast, rank: int) -> str:
    at = rank - 1
    for engine, workers in zip(b.engines, b.workers, strict=True):
        if at < workers:
            return f"engine {engine}" if workers == 1 else f"worker {at} of engine {engine}"
        at -= workers
    raise AssertionError(f"rank {rank} of {b.world}")


def _members(b: Broadcast) -> str:
    return f"engine{'s' if len(b.engines) > 1 else ''} {', '.join(map(str, b.engines))}"
