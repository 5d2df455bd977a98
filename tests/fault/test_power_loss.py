"""The machine stops: the process is killed, and what it wrote without syncing is lost, or half of
it is.

A shim (power_shim.c) copies whatever is synced; after the kill a folder is put together from those
copies, and it alone is judged. With `power` everything acknowledged is there.  With `process` the
store opens, and what is left of it is right.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from rft.buffer.buffer import Buffer
from rft.buffer.schema import groups, uses
from rft.buffer.settings import BufferSettings
from rft.buffer.storage.base import Storage
from rft.buffer.storage_choice import make_storage
from rft.errors import PayloadDamaged
from rft.testing.storage_contract import fill, group, take
from rft.types.block import encode
from rft.types.ids import GroupId

HERE = Path(__file__).parent
PAGE = 4096
POINTS = [
    "storage.put",
    "storage.put.torn",
    "buffer.append.stored",
    "buffer.append.after",
    "buffer.use.before",
    "buffer.use.after",
]
KINDS = ["sql", "queue", "file"]


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the shim")
    shim = tmp_path_factory.mktemp("shim") / "power.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(HERE / "power_shim.c"), "-ldl"],
        check=True,
        timeout=60,
    )
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "LD_PRELOAD": str(shim)}
    with subprocess.Popen(
        [sys.executable, str(HERE / "power_child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0


def live(
    child: subprocess.Popen[str], tmp: Path, kind: str, durability: str, fault: str
) -> list[dict[str, list[int]]]:
    """One life that ends at the fault; what was acknowledged in it."""
    assert child.stdin is not None
    assert child.stdout is not None
    for name in ("root", "shadow"):
        (tmp / name).mkdir()
    (tmp / "said").touch()
    env = {"POWER_ROOT": str(tmp / "root"), "POWER_SHADOW": str(tmp / "shadow"), "RFT_FAULT": fault}
    what = {
        "root": str(tmp / "root"),
        "kind": kind,
        "durability": durability,
        "said": str(tmp / "said"),
        "env": env,
    }
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()
    assert int(child.stdout.readline()) == -signal.SIGKILL, f"{fault} was never reached"
    return [json.loads(line) for line in (tmp / "said").read_text().splitlines()]


class Loss:
    """What a power loss leaves of `root`.  Without dice only what was synced; with dice each
    unsynced page and name by chance.
    """

    def __init__(self, root: Path, shadow: Path, dice: random.Random | None) -> None:
        self._root = root
        self._shadow = shadow
        self._dice = dice
        self._paths = {p.stat().st_ino: p for p in root.rglob("*")}

    def leave(self, out: Path) -> None:
        self._folder(self._root.stat().st_ino, self._root, out)

    def _folder(self, inode: int, path: Path, out: Path) -> None:
        out.mkdir()
        synced = {}
        if (self._shadow / str(inode)).exists():
            for line in (self._shadow / str(inode)).read_text().splitlines():
                number, _, name = line.partition(" ")
                synced[name] = int(number)
        now = {p.name: p.stat().st_ino for p in path.iterdir()}
        for name in sorted({*synced, *now}):
            found = self._either(synced.get(name), now.get(name))
            # shared memory is made anew by whoever opens the database first
            if found is None or name.endswith("-shm"):
                continue
            here = self._paths.get(found)
            if here is not None and here.is_dir():
                self._folder(found, here, out / name)
            else:
                (out / name).write_bytes(self._content(found, here))

    def _content(self, inode: int, path: Path | None) -> bytes:
        copy = self._shadow / str(inode)
        synced = copy.read_bytes() if copy.exists() else b""
        now = path.read_bytes() if path else synced
        size = max(len(synced), len(now))
        pages = [
            self._either(synced[i : i + PAGE], now[i : i + PAGE]).ljust(PAGE, b"\0")
            for i in range(0, size, PAGE)
        ]
        return b"".join(pages)[: self._either(len(synced), len(now))]

    def _either(self, synced: Any, now: Any) -> Any:
        return synced if self._dice is None else self._dice.choice((synced, now))


def found(tx: Connection, storage: Storage, line: int, batch: int, task: int) -> bool:
    """Whether a group is there as it was appended.  Raises PayloadDamaged when only its header is."""
    name = str(GroupId(line, 0, batch, task))
    locator = tx.scalar(select(groups.c.locator).where(groups.c.id == name))
    if locator is None:
        return False
    (block,) = storage.get([locator], tx)
    assert block == encode(group(line, batch, task, tokens=100 + 900 * task))
    return True


async def judge(
    out: Path, kind: Any, durability: Any, said: list[dict[str, list[int]]]
) -> Counter[str]:
    """What became of the acknowledged groups and uses; the store is open for more afterwards."""
    settings = BufferSettings(folder=out / "run/buffer", storage_type=kind, durability=durability)
    buffer = Buffer(settings)
    await buffer.open()
    seen: Counter[str] = Counter()
    connection = buffer._ledger.database.connection
    with connection.begin():
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
        storage = make_storage(settings)
        for what in said:
            if "acked" in what:
                try:
                    seen["there" if found(connection, storage, *what["acked"]) else "lost"] += 1
                except PayloadDamaged:
                    seen["damaged"] += 1
            else:
                line, step = what["used"]
                n = connection.scalar(
                    select(func.count()).where(uses.c.lineage == line, uses.c.step == step)
                )
                assert n in (0, 12)
                seen["used" if n else "unused"] += 1
    start = await buffer.start_lineage(None, None)
    await fill(buffer, start.lineage, 0)
    await take(buffer, start.lineage, 1)
    await buffer.reader(start.lineage).use(1)
    audit = await buffer.audit()
    assert audit.ok, audit
    await buffer.close()
    return seen


async def trial(
    child: subprocess.Popen[str], tmp: Path, kind: str, durability: str, seed: int
) -> Counter[str]:
    """One life and two ways to lose power at its end."""
    dice = random.Random(f"{kind} {durability} {seed}")
    point = dice.choice(["storage.put.aside", *POINTS] if kind == "file" else POINTS)
    if kind == "sql" and point == "storage.put.torn":
        point = "storage.put"
    last = 24 if point.startswith("storage") and kind != "sql" else 8
    said = live(child, tmp, kind, durability, f"{point}:{dice.randint(2, last)}")
    seen: Counter[str] = Counter()
    for way, chance in (("lost", None), ("mixed", dice)):
        Loss(tmp / "root", tmp / "shadow", chance).leave(tmp / way)
        seen += await judge(tmp / way, kind, durability, said)
    return seen


async def run(
    child: subprocess.Popen[str], tmp: Path, kind: str, durability: str, trials: range
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in trials:
        folder = tmp / f"{kind}-{seed}"
        folder.mkdir()
        seen += await trial(child, folder, kind, durability, seed)
        shutil.rmtree(folder)
    return seen


@pytest.mark.parametrize(("kind", "trials"), [("sql", 2), ("queue", 1), ("file", 2)])
async def test_power_keeps_what_was_acknowledged(
    children: subprocess.Popen[str], tmp_path: Path, kind: str, trials: int
) -> None:
    seen = await run(children, tmp_path, kind, "power", range(trials))
    assert seen.keys() == {"there", "used"}, seen


@pytest.mark.parametrize("kind", KINDS)
async def test_process_opens_clean(
    children: subprocess.Popen[str], tmp_path: Path, kind: str
) -> None:
    """And shows that the shim takes things away."""
    seen = await run(children, tmp_path, kind, "process", range(1))
    assert seen["lost"] + seen["damaged"] > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_power_fifty_times(
    children: subprocess.Popen[str], tmp_path: Path, kind: str
) -> None:
    seen = await run(children, tmp_path, kind, "power", range(100, 150))
    assert seen.keys() == {"there", "used"}, seen
    assert seen["there"] > 500
