"""Every door through which a plugin comes, opened by a real run: tasks → explorer → the durable
buffer.
"""

from __future__ import annotations

import asyncio
import json
import textwrap

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.engine.scripted import ScriptedEngine
from rft.errors import PluginError
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.plugins import REGISTRY, load_all
from rft.taskset.settings import TasksetSettings
from rft.types.block import decode
from rft.types.ids import Version
from rft.types.ports import Assignment


class OpenGate:
    """A trainer that is always ready."""

    def __init__(self):
        self._next = 0

    async def next_batch(self, *, lag, fingerprint, total):
        self._next += 1
        return (
            Assignment(batch=self._next - 1, version=Version(1, 0))
            if self._next <= total
            else "all are explored"
        )

    async def evaluates(self):
        return True

    async def wait_verified(self, version):
        return True

    async def explored(self, batch):
        return None

    async def wait_final(self):
        return Version(1, 0)


class Sink:
    def __init__(self):
        self.records = []

    async def log(self, record):
        self.records.append(record)

    async def samples(self, name, step, rows):
        return None


def plugin(name: str, value: float, *, marked: bool = True) -> str:
    """Source of a workflow and a reward; `marked` gives them names, else they are found by path."""
    return textwrap.dedent(f"""
        from rft.reward.base import reward
        from rft.workflow.base import Workflow, workflow

        {f'@workflow("{name}")' if marked else ""}
        class Flow(Workflow):
            async def run(self, task, ctx):
                await ctx.chat(task.chat())
                return ctx.transcript(info={{"door": "{name}"}})

        {f'@reward("{name}_reward")' if marked else ""}
        def grade(task, transcript):
            return {value}
    """)


async def explore(tmp_path, workflow, reward, *, plugin_dirs=()):
    """One batch of two groups with the given plugins; the rows that a trainer would get."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(4)))
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    try:
        lineage = (await buffer.start_lineage(None, None)).lineage
        taskset = TasksetSettings(
            name="t", path=str(tasks), workflow=workflow, reward=reward, num_runs=2
        )
        settings = ExplorerSettings(
            tasksets=(taskset,), batch_size=2, total_batches=1, plugin_dirs=plugin_dirs
        )
        engine, sink = ScriptedEngine(answer=lambda m: "x"), Sink()
        explorer = Explorer(
            settings,
            model=engine,
            buffer=buffer.writer(lineage),
            gate=OpenGate(),
            sink=sink,
            lineage=lineage,
        )
        async with asyncio.timeout(60):
            await explorer.run()
            lease = await buffer.reader(lineage).lease(
                1, groups=2, rows=None, deadline_s=30, max_staleness=None
            )
        return decode(lease.frame)
    finally:
        await buffer.close()


def door_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "flow.py").write_text(plugin("door_dir", 1.5))
    return "door_dir", "door_dir_reward", (str(tmp_path / "mine"),)


def door_module(tmp_path, monkeypatch):
    (tmp_path / "door_pkg").mkdir()
    (tmp_path / "door_pkg" / "__init__.py").write_text("")
    (tmp_path / "door_pkg" / "inner.py").write_text(plugin("door_module", 2.5, marked=False))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "door_pkg.inner:Flow", "door_pkg.inner:grade", ()


def door_file(tmp_path, monkeypatch):
    (tmp_path / "flow.py").write_text(plugin("door_file", 3.5, marked=False))
    return f"{tmp_path}/flow.py:Flow", f"{tmp_path}/flow.py:grade", ()


def distribution(tmp_path, monkeypatch, module, source):
    """An installed distribution with one entry point in the group rft.plugins."""
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rft.plugins]\n{module} = {module}\n")
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


def door_entry_point(tmp_path, monkeypatch):
    distribution(tmp_path, monkeypatch, "door_dist", plugin("door_dist", 4.5))
    return "door_dist", "door_dist_reward", ()


def door_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr("rft.plugins.shipped_workflows", lambda: tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "flow.py").write_text(plugin("door_shipped", 5.5))
    return "door_shipped", "door_shipped_reward", ()


@pytest.mark.parametrize(
    ("door", "name", "value"),
    [
        (door_shipped, "door_shipped", 5.5),
        (door_folder, "door_dir", 1.5),
        (door_module, "door_module", 2.5),
        (door_file, "door_file", 3.5),
        (door_entry_point, "door_dist", 4.5),
    ],
)
async def test_a_plugin_plays_and_scores_through_its_door(tmp_path, monkeypatch, door, name, value):
    workflow, reward, dirs = door(tmp_path, monkeypatch)
    rows = await explore(tmp_path, workflow, reward, plugin_dirs=dirs)
    assert [(r.reward, r.info, r.workflow) for r in rows] == [(value, {"door": name}, workflow)] * 4


BROKEN = "import json\n\ndef helper():\n    raise RuntimeError('broken on import')\n\nhelper()\n"


async def test_a_plugin_that_does_not_import_stops_the_run_with_its_traceback(
    tmp_path, monkeypatch
):
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "bad.py").write_text(BROKEN)
    with pytest.raises(
        PluginError,
        match=r"(?s)bad\.py failed to import.*line 4, in helper.*RuntimeError: broken on import",
    ):
        await explore(
            tmp_path, "simple_workflow", "exact_answer", plugin_dirs=(str(tmp_path / "dir"),)
        )
    with pytest.raises(PluginError, match="broken on import"):
        await explore(tmp_path, f"{tmp_path}/dir/bad.py:Flow", "exact_answer")
    distribution(tmp_path, monkeypatch, "door_bad_dist", "raise SystemExit(0)\n")
    with pytest.raises(
        PluginError,
        match=r"(?s)entry point door_bad_dist = door_bad_dist failed to import.*SystemExit",
    ):
        await explore(tmp_path, "simple_workflow", "exact_answer")


def test_two_plugins_of_one_name_are_refused(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "flow.py").write_text(plugin("door_twice", 1.0))
    with pytest.raises(
        PluginError,
        match=r"workflow 'door_twice' is defined twice: in .*/one/flow\.py and in .*/two/flow\.py",
    ):
        load_all([tmp_path / "one", tmp_path / "two"])


def test_looking_twice_finds_the_same(tmp_path):
    (tmp_path / "flow.py").write_text(plugin("door_again", 1.0))
    load_all([tmp_path])
    first = REGISTRY.get("workflow", "door_again").obj
    load_all([tmp_path])
    assert REGISTRY.get("workflow", "door_again").obj is first


def test_refused_doors(tmp_path):
    with pytest.raises(PluginError, match="does not exist or is not a folder"):
        load_all([tmp_path / "no"])
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PluginError, match="can be written by everyone"):
        load_all([tmp_path / "open"])
    with pytest.raises(PluginError, match=r"no\.py does not exist"):
        REGISTRY.get("workflow", f"{tmp_path}/no.py:Flow")
    with pytest.raises(PluginError, match="No module named 'no_such_package'"):
        REGISTRY.get("workflow", "no_such_package:Flow")
    (tmp_path / "flow.py").write_text(plugin("door_kind", 1.0))
    with pytest.raises(PluginError, match="has no 'Flaw'; it defines Flow, grade"):
        REGISTRY.get("workflow", f"{tmp_path}/flow.py:Flaw")
    with pytest.raises(PluginError, match="is a reward"):
        REGISTRY.get("workflow", f"{tmp_path}/flow.py:grade")
    with pytest.raises(
        PluginError, match=r"unknown workflow 'door_kimd'\.  Did you mean door_kind.*Known: "
    ):
        REGISTRY.get("workflow", "door_kimd")
