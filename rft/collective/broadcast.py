"""Weights through one torch.distributed group of the trainer's rank 0 and all engine workers.

Knows where tensors lie in a version's bytes; not where the bytes come from, nor what becomes of
them.  A group stands beside all others of a process (no default group is made or used) and is kept
for the next round as long as the same members hold it.

    worker:  "here, I hold group G and version V" ─▶ meeting point at the trainer ─▶ "keep G" |
    "form G'" | "stop, because …" ─▶ buckets trainer: waits for all, or says who did not come

Where all workers hold one version, which the trainer has, too, only what changed since then is
sent, bucket by bucket.

Invariant: nothing is sent before everyone is there, and a group in which something failed is never
used again.
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
TIMEOUT_S = 120.0  # most that a meeting or one bucket may take
_RAISES = "TORCH_NCCL_BLOCKING_WAIT"
NONE = "-"  # instead of the name of a group or version


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that are sent at once: bytes [start, end) of the version."""

    start: int
    end: int
    tensors: tuple[TensorSpec, ...]


def buckets(tensors: Sequence[TensorSpec], bucket_bytes: int | None) -> list[Bucket]:
    """In the order of the bytes.  A tensor larger than a bucket goes alone; None: every tensor
    does.
    """
    made: list[Bucket] = []
    for spec in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        end = spec.offset + spec.nbytes
        if made and bucket_bytes is not None and end - made[-1].start <= bucket_bytes:
            made[-1] = Bucket(made[-1].start, end, (*made[-1].tensors, spec))
        else:
            made.append(Bucket(spec.offset, end, (spec,)))
    return made


class _Member:
    """One rank's part in rounds: the group it holds, and how buckets go through it."""

    def __init__(self) -> None:
        self._group: Any = None
        self._work: Any = None  # the bucket under way
        self._held = ""  # name of the group; no two have the same
        # its size: with fewer members it would wait for those that do not take part
        self._world = 0
        self._store: Any = None

    def close(self) -> None:
        """Leaves the group, so that nobody waits for this member in it.

        Its connections end with the last reference (so there is no other one than these; `abort`
        would leave those who wait in it waiting for good).
        """
        self._work = self._group = None
        self._held = ""

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """What fails inside ends the group and is named."""
        try:
            yield
        except BaseException as e:
            self.close()
            if isinstance(e, RuntimeError):  # all of torch's
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
        self._held = name
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
        """All buckets of `memory` (uint8, this host's) through the group; `done` with each that is
        there, overlapped if so wanted.

        `changed`: only what changed since the version that all hold, which is `before` at the
        trainer and `memory` itself at a worker. Returns the bytes that went through.
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
        """The changes of a bucket, at a worker room for them; None where the bucket itself is sent.
        Its size goes ahead.
        """
        import torch

        made = None if before is None else delta.pack(before.numpy(), part.numpy())
        size = torch.tensor([-1 if made is None else len(made)])
        self._end(b, size, self._begin(b, size, before is not None), before is not None)
        if size < 0:
            return None
        return torch.empty(int(size), dtype=torch.uint8) if made is None else torch.from_numpy(made)

    def _begin(self, b: Broadcast, data: torch.Tensor, sends: bool) -> torch.Tensor:
        """Where `data` is on its way; nothing is where there is none."""
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
            self._work.wait()  # as long as the group's own limit
        else:
            self._work.wait(timedelta(seconds=b.timeout_s))
            if not sends:
                data.copy_(room)
        self._work = None


class TrainerEnd(_Member):
    """Rank 0 and the meeting point.  `send` is called from one thread at a time, `abandon` from any
    other.
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
        # a wait blocks its store
        self._door = TCPStore(
            host, self.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        self._lock = threading.Lock()
        self._meeting: tuple[int, list[str]] | None = None  # round, and whom it waits for
        self._abandoned = (0, "")
        self._groups = 0

    def send(
        self,
        manifest: WeightManifest,
        memory: torch.Tensor,
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """One round: the version's bytes (uint8, as the manifest places them) to all workers.
        Raises WeightSyncFailed.

        `held`: versions that are still there, placed in the same way.
        """
        b = manifest.broadcast
        assert b is not None, "only a manifest that names the group of a round is sent"
        with self._whole(f"sending {manifest.version} to {_members(b)} broke off"):
            before = self._meet(b, held or {})
            self._stream(
                manifest, memory, sends=True, done=_sent, changed=before is not None, before=before
            )

    def abandon(self, round: int, reason: str) -> None:
        """Ends the meeting of this round, or of an earlier one, now or when it begins."""
        with self._lock:
            self._abandoned = max(self._abandoned, (round, reason))
            if self._meeting is not None and self._meeting[0] <= round:
                for key in self._meeting[1]:
                    self._door.compare_set(key, "", "gone")  # sets it only where nobody came

    def _meet(self, b: Broadcast, held: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Everyone is there, in one group.  The bytes of the version that all workers hold, if it
        is one of `held`.
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
            said = [self._store.get(key).decode().split() for key in keys] if not absent else []
            with self._lock:
                abandoned = self._abandoned
            if abandoned[0] >= b.round:
                raise self._stop(go, f"the round was given up: {abandoned[1]}")
            if absent:
                raise self._stop(go, f"{', '.join(absent)} did not come within {b.timeout_s:g} s")
            versions = {version for _, version in said}
            since = versions.pop() if len(versions) == 1 else NONE
            before = held.get(since)
            told = NONE if before is None else since
            if (
                {group for group, _ in said} == {self._held}
                and self._held
                and self._world == b.world
            ):
                self._store.set(go, f"keep {self._held} {told}")
            else:
                self._groups += 1
                name = f"{b.token}/group/{self._groups}"
                self._store.set(go, f"form {name} {told}")
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
    """An engine worker's part.  Called from one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._at: tuple[str, int] | None = None  # the meeting point that the store is of

    def receive(
        self,
        manifest: WeightManifest,
        worker: int,
        memory: torch.Tensor,
        holds: str,
        done: Callable[[Bucket], None],
    ) -> tuple[float, float, int]:
        """One round: fills `memory` (uint8 [size of the version]); `done` is called with each
        bucket that is there.

        `worker` is this one's number in its engine.  `holds`: the version that `memory` is of, or
        NONE.  (seconds until the group stood, seconds of all that followed, bytes that came).
        Raises WeightSyncFailed.
        """
        b = manifest.broadcast
        assert b is not None, "only a version that is broadcast is received"
        rank = b.first + worker
        began = time.monotonic()
        with self._whole(f"receiving {manifest.version} as {_name(b, rank)} broke off"):
            changed = self._meet(b, rank, holds) != NONE
            met = time.monotonic()
            moved = self._stream(manifest, memory, sends=False, done=done, changed=changed)
        return met - began, time.monotonic() - met, moved

    def _meet(self, b: Broadcast, rank: int, holds: str) -> str:
        """The version since which changes are sent."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=b.timeout_s)
        if self._at != (b.host, b.port):
            self.close()
            self._store = TCPStore(
                b.host, b.port, is_master=False, wait_for_workers=False, timeout=limit
            )
            self._at = (b.host, b.port)
        go = f"{b.token}/{b.round}/go"
        self._store.set(f"{b.token}/{b.round}/here/{rank}", f"{self._held or NONE} {holds}")
        # the trainer gives up first, and says why
        self._store.wait([go], timedelta(seconds=2 * b.timeout_s))
        answer: str = self._store.get(go).decode()
        said, _, rest = answer.partition(" ")
        if said == "stop":
            raise WeightSyncFailed(rest)
        name, since = rest.split()
        if said == "form":
            self._form(b, name, rank)
        return since


def _sent(bucket: Bucket) -> None:
    fault("sync.sent")


@contextmanager
def _own_errors() -> Iterator[None]:
    """A group of NCCL that is made inside raises its errors where a bucket is waited for.  Else
    torch's watchdog ends this process as soon as another member dies
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
    """The address of this machine from which `host` is reached; sends nothing."""
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
