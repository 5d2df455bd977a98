"""A run over two machines: two hosts with a network between them, each with disks and memory of its
own, on one Ray.

The hosts are namespaces of Linux (network, mounts, host name), which takes root; elsewhere these
tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import runs

EXAMPLE = runs.ROOT / "examples" / "two_processes"
NEEDED = ("ip", "unshare", "nsenter", "mount")
START_S = 400
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
        reason=f"needs root and {', '.join(NEEDED)}",
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Machine:
    """Host `rft-<number>` with address 192.0.2.<number> (RFC 5737); what is in `disks` is empty
    there, and stays there.
    """

    def __init__(self, number: int, disks: list[Path], opened: ExitStack) -> None:
        self.address = f"192.0.2.{number}"
        name = f"rft-{os.getpid()}-{number}"
        ip("netns", "add", name)
        opened.callback(ip, "netns", "del", name)
        ip("-n", name, "link", "set", "lo", "up")
        self.namespace = name
        mounts = " && ".join(f"mount -t tmpfs tmpfs {disk}" for disk in ("/dev/shm", *disks))
        self._holder = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "-m",
                "-u",
                "sh",
                "-c",
                f"hostname rft-{number} && {mounts} && echo up && cat",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        opened.callback(self._end)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "up\n"
        self.within = ("nsenter", "-t", str(self._holder.pid), "-n", "-m", "-u")

    def _end(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(20)

    def path(self, path: Path) -> Path:
        """What is `path` there, as it is seen from here."""
        return Path(f"/proc/{self._holder.pid}/root{path}")


def connect(first: Machine, second: Machine) -> None:
    ends = [f"v{os.getpid()}-{number}" for number in (1, 2)]
    ip(
        "link",
        "add",
        ends[0],
        "netns",
        first.namespace,
        "type",
        "veth",
        "peer",
        "name",
        ends[1],
        "netns",
        second.namespace,
    )
    for machine, end in zip((first, second), ends, strict=True):
        ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", end)
        ip("-n", machine.namespace, "link", "set", end, "up")


class Machines:
    """Two of them on one Ray, and their commands."""

    def __init__(self, opened: ExitStack) -> None:
        here = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        self.root = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="runs-")))
        self.machines = [Machine(number, [here, self.root], opened) for number in (1, 2)]
        first, second = self.machines
        connect(first, second)
        self._address = f"{first.address}:6379"
        self._environment = runs.ray_environment()
        memory = "--object-store-memory=100000000"
        head = (
            "--head",
            "--port=6379",
            f"--node-ip-address={first.address}",
            "--include-dashboard=false",
            f"--temp-dir={here}",
        )
        opened.callback(runs.Ray(*head, memory, env=self._environment, within=first.within).end)
        joins = (f"--address={self._address}", f"--node-ip-address={second.address}")
        opened.callback(runs.Ray(*joins, memory, env=self._environment, within=second.within).end)

    def run(self, number: int, file: str, model: Path, *overrides: str) -> Any:
        """`rft run` of one of the example's files."""
        given = (
            f"model.model_path={model}",
            f"checkpoint_root_dir={self.root}",
            f"cluster.ray_address={self._address}",
            "cluster.stall_timeout=null",
            "buffer.batch_size=8",
            "trainer.total_steps=8",
            "explorer.eval_interval=4",
        )
        within = self.machines[number - 1].within
        return runs.Run(
            "run",
            "-c",
            str(EXAMPLE / file),
            *given,
            *overrides,
            env=self._environment,
            within=within,
        )

    @property
    def run_dir(self) -> Path:
        return self.root / "rft" / "examples" / "two_processes"

    def folder(self, number: int) -> Path:
        """The run's folder on a machine, as it is seen from here."""
        return self.machines[number - 1].path(self.run_dir)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as opened:
        yield Machines(opened)


def test_weights_are_broadcast_to_a_machine_that_shares_no_disk(
    machines: Machines, tiny_model: Path
) -> None:
    way = "synchronizer.sync_method=nccl"
    explorer = machines.run(2, "explore.yaml", tiny_model, way)
    trainer = machines.run(1, "train.yaml", tiny_model, way)
    codes = [x.end(START_S) for x in (trainer, explorer)]
    assert codes == [0, 0], f"{trainer.output}\n{explorer.output}"
    here = machines.folder(1)
    there = machines.folder(2)
    assert "explorer first on rft-2 has joined" in (here / "logs" / "coordinator.log").read_text()
    assert (here / "checkpoints").is_dir() and (here / "logs" / "trainer-0.log").is_file()
    assert {p.name for p in there.iterdir()} == {"explorers"}, (
        "what the trainer's command owns lies on its machine"
    )
    assert (there / "explorers" / "first" / "logs" / "engine-0.log").is_file()
    audit = [
        *machines.machines[0].within,
        sys.executable,
        str(runs.ROOT / "scripts" / "audit.py"),
        str(machines.run_dir),
    ]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "acked 512 = used 512" in done.stdout, done.stdout + done.stderr


def test_memory_is_refused_to_an_explorer_of_another_machine(
    machines: Machines, tiny_model: Path
) -> None:
    trainer = machines.run(1, "train.yaml", tiny_model)
    explorer = machines.run(2, "explore.yaml", tiny_model)
    assert explorer.end(START_S) == 3, explorer.output
    assert (
        "memory works inside one machine" in explorer.output
        and "are on rft-2" not in trainer.output
    )
    trainer.interrupt()
    assert trainer.end(START_S) == 130, trainer.output


RANK = """
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from rft.launch import parts
from rft.trainer.model import sharding
from rft.trainer.settings import LearnerSettings

rank, meeting, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
parts._address = lambda plan: address  # where Ray says that this machine is
parts.ready_to_meet(SimpleNamespace(cluster=SimpleNamespace(node_num=2)), rank, meeting)
sharding.join(LearnerSettings(model_path="", world_size=2), rank, meeting)
number = torch.tensor([float(rank + 1)])
dist.all_reduce(number)
assert number == 3
dist.destroy_process_group()
"""


def test_ranks_on_two_machines_meet_where_both_see_the_run_folder(tmp_path: Path) -> None:
    with ExitStack() as opened:
        apart = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="apart-")))
        first, second = (Machine(number, [apart], opened) for number in (1, 2))
        connect(first, second)
        (tmp_path / "meeting").touch()
        ranks = [
            subprocess.Popen(
                [
                    *machine.within,
                    sys.executable,
                    "-c",
                    RANK,
                    str(rank),
                    str(tmp_path / "meeting"),
                    machine.address,
                ]
            )
            for rank, machine in enumerate((first, second))
        ]
        assert [rank.wait(START_S) for rank in ranks] == [0, 0]
        first.path(apart / "meeting").touch()
        alone = [
            *second.within,
            sys.executable,
            "-c",
            RANK,
            "1",
            str(apart / "meeting"),
            second.address,
        ]
        done = subprocess.run(alone, capture_output=True, text=True, check=False)
        assert (
            "trainer rank 1 on rft-2 does not see" in done.stderr
            and "checkpoint_root_dir" in done.stderr
        )
