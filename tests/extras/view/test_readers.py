"""What the viewer reads: metrics as they are written, filters as SQL, the index of rollouts, runs
below a folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError, RunFailed
from rft.extras.view.charts import numbers
from rft.extras.view.filters import ORDERS, Filters
from rft.extras.view.found_runs import FoundRuns, differences
from rft.extras.view.metric_curves import MOST_POINTS, Curves, spark
from rft.extras.view.opened_run import OpenedRun
from rft.extras.view.rollout_index import RolloutIndex, TextCodes, _first
from rft.monitor import read as monitor_read
from rft.monitor.pictures import bars, shares
from rft.monitor.read import MetricTail, read, series
from rft.testing.storage_contract import fill, take
from rft.types.ids import Version
from tests.extras.view.viewed import metrics, stored
from tests.helpers.asked_ledger import said


def line(role: str, step: int, time: float = 0.0, **values: Any) -> str:
    return (
        json.dumps(
            {
                "role": role,
                "step": step,
                "time": time,
                "values": {k.replace("__", "/"): v for k, v in values.items()},
            }
        )
        + "\n"
    )


def test_a_tail_gives_each_whole_record_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = MetricTail(file)
    assert list(tail.new()) == []
    file.write_text(line("trainer", 1, a=1.0) + line("trainer", 2, a=2.0)[:-9])
    assert [r.step for r in tail.new()] == [1]
    assert list(tail.new()) == []
    file.write_text(
        line("trainer", 1, a=1.0)
        + line("trainer", 2, a=2.0)
        + "damaged\n"
        + line("trainer", 3, a=3.0)
    )
    assert [r.step for r in tail.new()] == [2, 3]
    assert len(tail.problems) == 1
    assert ":3 is not a metric record" in tail.problems[0]


def test_a_file_that_was_begun_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line("trainer", 1, a=1.0) + line("trainer", 2, a=2.0))
    curves = Curves(tmp_path)
    curves.refresh()
    (tmp_path / "new").write_text(line("trainer", 1, b=5.0))
    os.replace(tmp_path / "new", file)
    curves.refresh()
    assert set(curves.series) == {"b"}
    assert curves.num_records == 1


def test_curves_are_the_series_that_others_read(tmp_path: Path) -> None:
    """Also where a resumed run wrote steps again, and where batches ended in another order."""
    steps = [1, 2, 3, 5, 4, 2, 3, 6]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line("trainer", s, 10.0 * i, x=float(i)) for i, s in enumerate(steps))
    )
    curves = Curves(tmp_path)
    curves.refresh()
    x, y = curves.points("x", "step")
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == series(
        read(tmp_path / "metrics.jsonl"), "x"
    )
    assert curves.newest("x") == (6, 7.0)


def test_what_an_attempt_reached_beyond_a_checkpoint_is_no_point(tmp_path: Path) -> None:
    """The newest reward was one of the attempt that was left behind."""
    lines = [
        line("synchronizer", 0, sync__version=0.0),
        *(line("trainer", s, x=float(s)) for s in (1, 2, 3, 4)),
    ]
    lines += [line("synchronizer", 2, sync__version=2.0), line("trainer", 3, x=30.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curves = Curves(tmp_path)
    curves.refresh()
    x, y = curves.points("x", "step")
    assert (
        list(zip(x.tolist(), y.tolist(), strict=True))
        == series(read(tmp_path / "metrics.jsonl"), "x")
        == [(1, 1), (2, 2), (3, 30)]
    )
    assert curves.newest("x") == (3, 30.0)


def test_the_table_of_runs_reads_what_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records decoded: a run of weeks was read from its begin at each look."""
    metrics(tmp_path, steps=400)
    decoded = []
    monkeypatch.setattr(
        monitor_read,
        "_record",
        lambda *given, real=monitor_read._record: decoded.append(given) or real(*given),
    )
    found = FoundRuns(tmp_path)
    assert found.lines()[0].step == 400 and len(decoded) >= 400
    decoded.clear()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line("trainer", 401, 9e9, perf__step_s=1.0))
    assert found.lines()[0].step == 401 and len(decoded) == 1


def test_axes_of_time_and_tokens(tmp_path: Path) -> None:
    lines = [
        line("explorer", 1, 3600.0, r=0.5),
        line("trainer", 1, 5400.0, experience__response_tokens=100.0),
        line("explorer", 2, 7200.0, r=1.0),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curves = Curves(tmp_path)
    curves.refresh()
    assert [a.tolist() for a in curves.points("r", "time")] == [[0.0, 1.0], [0.5, 1.0]]
    assert [a.tolist() for a in curves.points("r", "tokens")] == [[0.0, 100.0], [0.5, 1.0]]


def test_a_name_of_two_roles_is_two_curves(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line("explorer", 1, x=1.0) + line("trainer", 1, x=2.0))
    curves = Curves(tmp_path)
    curves.refresh()
    assert {n: c.values[0] for n, c in curves.series.items()} == {"x": 1.0, "x@trainer": 2.0}


def test_costs_of_all_processes_are_added(tmp_path: Path) -> None:
    counted = [
        line("explorer", i + 1, judge__j__cost_usd=c) for i, c in enumerate([0.1, 0.4, 0.4, 0.5])
    ]
    # the run went on, and counts from 0
    counted.insert(2, line("synchronizer", 2, sync__total_s=1.0))
    (tmp_path / "metrics.jsonl").write_text("".join(counted))
    curves = Curves(tmp_path)
    curves.refresh()
    assert curves.cost_usd() == pytest.approx(0.9)


def test_time_in_which_two_batches_are_explored_counts_once(tmp_path: Path) -> None:
    lines = [
        line("explorer", s, t, rollout__time__batch=10.0)
        for s, t in ((1, 10.0), (2, 15.0), (3, 40.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curves = Curves(tmp_path)
    curves.refresh()
    assert numbers(curves)["busy"] == {"exploring": 25.0}


def test_long_curves_keep_their_extremes(tmp_path: Path) -> None:
    values = np.sin(np.arange(20_000) / 50)
    values[[777, 15_001]] = 9.0, -9.0
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line("trainer", i + 1, x=float(v)) for i, v in enumerate(values))
    )
    curves = Curves(tmp_path)
    curves.refresh()
    x, y = curves.points("x", "step")
    assert len(x) <= MOST_POINTS + 1
    assert y.max() == 9.0
    assert y.min() == -9.0
    assert (np.diff(x) > 0).all()
    assert x[-1] == 20_000


def test_the_timeline_is_the_one_of_the_command(tmp_path: Path) -> None:
    metrics(tmp_path, steps=400)
    curves = Curves(tmp_path)
    curves.refresh()
    expected = bars(read(tmp_path / "metrics.jsonl"), last=30)
    found, told = curves.timeline(30)
    assert found == expected
    assert told == shares(expected)
    with pytest.raises(RunFailed):
        Curves(tmp_path / "none").timeline(30)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], False),
        ([1.0], False),
        ([float("nan"), 1.0], False),
        ([1.0, 1.0], True),
        ([0.0] * 500, True),
    ],
)
def test_small_curves(values: list[float], shown: bool) -> None:
    assert spark(values).startswith("M") is shown


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("step", "x"),
        ("step", "1.5"),
        ("low", "nan"),
        ("high", "inf"),
        ("batch", "9" * 30),
        ("order", "up"),
        ("status", "fine"),
        ("text", "x" * 201),
    ],
)
def test_a_wrong_filter_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Filters.read({name: text})
    assert error.value.key == name


def test_filters_come_back_from_their_address() -> None:
    from urllib.parse import parse_qsl

    f = Filters(step=3, taskset="a b&c", low=0.5, order="worst", text="50% ?'")
    assert Filters.read(dict(parse_qsl(f.query()))) == f


async def test_filters_as_sql_choose_the_same_rows(tmp_path: Path) -> None:
    run = await stored(tmp_path / "run")
    index = RolloutIndex()
    with open_run(run) as questions:
        while not index.refresh(questions):
            pass
        for given in (
            {},
            {"status": "failed"},
            {"state": "used", "order": "best"},
            {"state": "leased", "order": "worst"},
            {"task": "1"},
            {"taskset": "other", "low": "0.5"},
            {"reason": "time"},
            {"reason": "%"},
            {"reason": "'"},
            {"high": "0", "order": "longest"},
            {"version": "0", "order": "shortest"},
        ):
            f = Filters.read(given)
            with questions.ask(f.sql()) as answer:
                expected = [row[0] for row in answer.rows]
            chosen = index.choose(f, 50)
            assert sorted(index.ids(chosen.positions)) == sorted(expected), given
            assert chosen.total == len(expected)
            assert not chosen.more
        with questions.ask(Filters(text="what? it's 100%_\\").sql()) as answer:
            assert list(answer.rows) == []


# ---------------------------------------------------------------- the index


async def test_the_index_follows_states_rewards_and_new_lineages(tmp_path: Path) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    index = RolloutIndex()
    with open_run(tmp_path / "run") as questions:

        def states() -> dict[str, int]:
            while not index.refresh(questions):
                pass
            return {
                s: index.choose(Filters(state=s), 50).total
                for s in ("available", "leased", "used", "explained")
            }

        assert states() == {"available": 8, "leased": 0, "used": 0, "explained": 0}
        await take(buffer, 1, 1)
        assert states() == {"available": 0, "leased": 8, "used": 0, "explained": 0}
        await buffer.reader(1).use(1)
        await fill(buffer, 1, 1)
        assert states() == {"available": 8, "leased": 0, "used": 8, "explained": 0}
        await buffer.start_lineage(Version(1, 0), None)  # resumed from before the use
        assert states()["used"] == 0
        assert index.size == 16
    await buffer.close()


def test_the_first_of_many_keys_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        size = int(rng.integers(1, 9000))
        num = int(rng.integers(1, 60))
        keys = (
            rng.integers(0, int(rng.integers(1, 3000)), size).astype(float)
            if trial % 2
            else rng.random(size)
        )
        positions = np.sort(rng.permutation(20_000)[:size])
        assert (
            _first(keys, positions, num).tolist()
            == positions[np.argsort(keys, kind="stable")][:num].tolist()
        )


@pytest.mark.parametrize("order", ORDERS)
def test_pages_follow_each_other_without_gap(order: str) -> None:
    index = RolloutIndex()
    rng = np.random.default_rng(1)
    size = 997
    for name, column in index._columns.items():
        index._columns[name] = rng.integers(0, 5, size).astype(column.dtype)
    index._columns["reward"][::7] = np.nan
    index.size = size
    seen: list[int] = []
    after = None
    more = True
    while more:
        chosen = index.choose(Filters(order=order), 50, after)
        seen += chosen.positions.tolist()
        after = int(chosen.positions[-1])
        more = chosen.more
    assert len(seen) == len(set(seen))
    expected = (
        np.flatnonzero(~np.isnan(index.column("reward")))
        if order in ("best", "worst")
        else np.arange(size)
    )
    assert sorted(seen) == expected.tolist()


def test_too_many_texts_share_a_number() -> None:
    codes = TextCodes(2)
    assert [codes.number(t) for t in ("a", "b", "c", "a", "d", None)] == [0, 1, 2, 0, 2, 2]
    assert set(codes.numbers) == {"a", "b"}


# ---------------------------------------------------------------- runs


async def test_runs_are_found_with_their_stages(tmp_path: Path) -> None:
    for name in ("a/b/one", "two", "program/sft", "program/rl"):
        (tmp_path / name).mkdir(parents=True)
        metrics(tmp_path / name)
    (tmp_path / "program" / "stages.json").write_text("[]")
    (tmp_path / "program" / "state.json").write_text("{}")
    (tmp_path / "two" / "checkpoints" / "metrics.jsonl").parent.mkdir()
    (tmp_path / "two" / "checkpoints" / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to(tmp_path / "two")
    runs = FoundRuns(tmp_path)
    assert sorted(r.name for r in runs.lines()) == ["a/b/one", "program/rl", "program/sft", "two"]
    assert {r.reward for r in runs.lines()} == {0.6}
    again = FoundRuns(tmp_path)
    unread = [
        sum(not r.read for r in again.lines(0.0)),
        sum(not r.read for r in again.lines()),
        sum(not r.read for r in again.lines(0.0)),
    ]
    assert unread == [4, 0, 0]
    assert runs.path("..") is None
    assert runs.path("a~b~one") == tmp_path / "a" / "b" / "one"
    assert [p.name for p in FoundRuns(tmp_path / "two").paths.values()] == []  # not looked for yet
    assert FoundRuns(tmp_path / "two").path("two") == tmp_path / "two"


def test_configurations_are_compared_key_by_key(tmp_path: Path) -> None:
    for name, tree in (
        (
            "a",
            {
                "trainer": {"total_steps": 1},
                "plugin_dirs": ["p", "q"],
                "buffer": {"explorer_input": {"tasksets": [{"max_rows": 1}]}},
            },
        ),
        (
            "b",
            {
                "trainer": {"total_steps": 2},
                "plugin_dirs": ["p", "q"],
                "buffer": {"explorer_input": {"tasksets": [{"max_rows": 1}, {"max_rows": 2}]}},
            },
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"tree": tree}))
    (tmp_path / "c").mkdir()
    assert differences([tmp_path / "a", tmp_path / "b"]) == {
        "trainer.total_steps": ["1", "2"],
        "buffer.explorer_input.tasksets[1].max_rows": ["default", "2"],
    }
    assert differences([tmp_path / "a", tmp_path / "c"])["plugin_dirs"] == ['["p", "q"]', "default"]


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "nothing", "is no folder"), (tmp_path, "no run below")):
        _, err, code = said("view", str(folder))
        assert code == 2
        assert why in err


async def test_metrics_stay_as_they_are_while_a_page_reads_them(tmp_path: Path) -> None:
    metrics(tmp_path, steps=2)
    run = OpenedRun(tmp_path)
    entered = threading.Event()
    go = threading.Event()

    def slow(curves: Curves) -> tuple[int, int]:
        before = curves.num_records
        entered.set()
        assert go.wait(60)
        return before, curves.num_records

    first = asyncio.ensure_future(run.metrics(slow))
    assert await asyncio.to_thread(entered.wait, 60)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line("trainer", 3, new=1.0))
    second = asyncio.ensure_future(run.metrics(lambda curves: curves.num_records))
    assert not (await asyncio.wait({second}, timeout=0.2))[0]
    go.set()
    assert await first == (6, 6)
    assert await second == 7
    await run.close()
