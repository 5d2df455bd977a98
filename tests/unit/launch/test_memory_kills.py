"""Whose processes the kernel killed for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.launch.remote import _oom_kills

MACHINE = {"proc/vmstat": "oom_kill_other 9\noom_kill 3\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/job:1\n0::/\n",
    "sys/fs/cgroup/memory/job:1/memory.oom_control": "oom_kill_disable 0\noom_kill 1\n",
}
V2 = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 7\noom_kill 2\n"}


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        (MACHINE | V1, 1),
        (MACHINE | V2, 2),
        (MACHINE | {"proc/self/cgroup": "0::/\n"}, 3),
        (MACHINE, 3),
        ({}, 0),
    ],
)
def test_kills_of_other_groups_do_not_count(
    files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _oom_kills(tmp_path) == kills
