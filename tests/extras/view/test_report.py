"""`rft report` and `rft compare`: one file without scripts, equal to what other commands say; runs
beside each other.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rft
from rft.buffer.buffer import Buffer
from rft.buffer.query import Questions
from rft.buffer.query import open_run as query_run
from rft.buffer.settings import BufferSettings
from rft.cli import status_command
from rft.errors import ConfigError
from rft.extras.view.report_comparison import compared, differences
from rft.extras.view.report_facts import (
    EvalPoint,
    RunSummary,
    _cost,
    _subject,
    collect,
    eval_points,
    interval,
)
from rft.extras.view.report_page import MAX_BYTES, page
from rft.monitor import read as monitor_read
from rft.monitor.pictures import picture
from rft.monitor.read import read
from rft.testing.storage_contract import fill, take
from rft.types.metrics import MetricRecord
from tests.helpers.asked_ledger import EVIL, play, said

RECORDS = 3000
INJECTIONS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "</pre><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    '"><b onclick=alert(1)>',
    "' onmouseover='alert(1)",
    "<iframe src=javascript:alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "<object data=x>",
    "<embed src=x>",
    "<link rel=stylesheet href=//x>",
    "<meta http-equiv=refresh content=0;url=//x>",
    "<base href=//x>",
    "<form action=//x><input>",
    "<body onload=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<math><mi//xlink:href=javascript:alert(1)>",
    "<!--><script>alert(1)</script>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "{{ 7 * 7 }}",
    "{% raw %}x",
    "${7*7}",
    "<style>*{display:none}</style>",
    "&lt;script&gt;",
    "<video><source onerror=alert(1)>",
    "<x\x00script>",
    "\u202e<script>\u2066",
    "\ud800<b>",
    "<plaintext>",
    "<template><script>",
    EVIL,
)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def write(folder: Path, records: list[dict[str, Any]], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def curve(last: float, *, alarm: bool = False) -> list[dict[str, Any]]:
    found = [
        {"role": "explorer", "step": s, "time": float(s), "values": {"rollout/reward/mean": s / 10}}
        for s in (1, 2, 3)
    ]
    found.append(
        {
            "role": "eval",
            "step": 0,
            "time": 0.5,
            "values": {"eval/sums/mean@8": 0.25, "eval/sums/tasks": 100},
        }
    )
    values = {
        "eval/sums/mean@8": last,
        "eval/sums/sem@8": 0.01,
        "eval/sums/tasks": 100,
        "eval/sums/runs": 800,
        "eval/sums/failed": 2,
    }
    found.append({"role": "eval", "step": 3, "time": 9.0, "values": values})
    if alarm:
        found.append(
            {
                "role": "explorer",
                "step": 3,
                "time": 9.0,
                "values": {"alarm/length_drift": 1.0},
                "notes": ["answers grew"],
            }
        )
    return found


def planted(run: Path, evil: str) -> None:
    """Prompts, answers, reward parts, a reason, notes, names of metrics, the configuration: all of
    them say `evil`.
    """
    with closing(sqlite3.connect(run / "buffer" / "experience_buffer.db")) as ledger:
        text = evil.encode("utf-8", "surrogatepass")
        ledger.execute(
            "UPDATE texts SET prompt_text = CAST(? AS TEXT), response_text = CAST(? AS TEXT)",
            (text, text),
        )
        ledger.execute(
            "UPDATE experiences SET reward_parts = ?, taskset = ?",
            (json.dumps({evil: 1.0}), evil.encode("utf-8", "replace").decode()),
        )
        ledger.commit()
    records = curve(0.9, alarm=True)
    if "\ud800" not in evil:  # no part of a run can write half a character into metrics.jsonl
        records[-1]["notes"] = [evil]
        records[0]["values"][f"rollout/{evil}/mean"] = records[1]["values"][
            f"rollout/{evil}/mean"
        ] = 1.0
    tree = {
        "tree": {"seed": evil},
        "path": evil,
        "sha256": "x",
        "overrides": [evil],
        "versions": {evil: evil},
    }
    write(run, records, state={"phase": "failed", "reason": evil, "time": 1.0}, config=tree)


@pytest.mark.e2e
async def test_thirty_injections_are_shown_and_never_executed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await play(run)
    planted(run, "plain")
    plain = Tags(page(collect(rft.open_run(run))))
    assert len(INJECTIONS) >= 30 and plain.text.count("plain") > 20
    for evil in INJECTIONS:
        planted(run, evil)
        text = page(collect(rft.open_run(run)))
        found = Tags(text)
        assert (
            set(found.seen) <= {*plain.seen, "ul", "li"} and found.attributes <= plain.attributes
        ), evil
        assert all(found.seen[tag] == plain.seen[tag] for tag in ("meta", "style", "body", "pre"))
        assert not set(map(chr, (*range(9), *range(11, 32), 0x9B, 0x202E, 0x2066, 0xD800))) & set(
            text
        ), evil
        assert found.text.count(evil) > 20 or not evil.isprintable() or "\ud800" in evil, (
            "it is shown as it is"
        )
    head = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert head and unescape(head[1]).startswith("default-src 'none'; style-src 'sha256-")


async def test_answers_equal_the_ledgers(tmp_path: Path) -> None:
    await play(tmp_path / "run")
    write(tmp_path / "run", curve(0.9), state={"phase": "running"})
    answers = collect(rft.open_run(tmp_path / "run")).answers
    for kind in ("best", "worst"):
        told = json.loads(
            said(
                "buffer", "sample", str(tmp_path / "run"), "--step", "1", f"--{kind}", "3", "--json"
            )[0]
        )
        mine = [(a.id, a.reward, a.text) for a in answers if a.kind == kind]
        assert mine[0] == (told[0]["id"], told[0]["reward"], told[0]["response_text"])
        assert len({id[:-13] for id, *_ in mine}) == len(mine) == 2, "one of each group"


async def test_answers_are_found_in_two_readings_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instructions of SQLite's machine for each row, beside those of one reading."""
    opened = Questions.open
    ticks = Counter[str]()

    def counted(questions: Questions, **limits: Any) -> None:
        opened(questions, **limits)
        questions._raw.set_progress_handler(lambda: ticks.update(n=1), 10)

    monkeypatch.setattr(Questions, "open", counted)

    async def costs(steps: int) -> tuple[int, int]:
        run = tmp_path / str(steps)
        buffer = Buffer(BufferSettings(folder=run / "buffer"))
        await buffer.open()
        await buffer.start_lineage(None, None)
        for step in range(1, steps + 1):
            await fill(buffer, 1, step - 1)
            await take(buffer, 1, step)
            await buffer.reader(1).use(step)
        await buffer.close()
        with closing(sqlite3.connect(run / "buffer/experience_buffer.db")) as ledger, ledger:
            ledger.execute("DROP TRIGGER reward_edit")
            ledger.execute(
                "UPDATE experiences SET reward = (batch * 31 + task * 17 + run * 7) % 11 / 2.0 "
                "WHERE run != 3"
            )
            asked = "SELECT id, group_id, reward FROM v_experiences WHERE used_step > ? ORDER BY id"
            rows = ledger.execute(asked, (steps * 3 // 4,)).fetchall()
        ticks.clear()
        found = collect(rft.open_run(run)).answers
        spent = ticks.total()
        with query_run(run) as questions:
            ticks.clear()
            with questions.ask("SELECT max(used_step) FROM v_experiences") as answer:
                assert list(answer.rows) == [(steps,)]
        middle = sorted(reward for *_, reward in rows)[len(rows) // 2]
        told = set[str]()
        orders = {
            "best": lambda r: -r[2],
            "worst": lambda r: r[2],
            "typical": lambda r: r[2] != middle,
        }
        for kind, order in orders.items():
            first: dict[str, str] = {}
            for id, group, _ in sorted(rows, key=order):
                if id not in told:
                    first.setdefault(group, id)
            ids = list(first.values())[:3]
            told.update(ids)
            assert [a.id for a in found if a.kind == kind] == ids
        return spent, ticks.total()

    few, many = await costs(16), await costs(64)
    assert many[0] - few[0] < 3 * (many[1] - few[1]), (few, many)


def test_the_page_has_what_the_run_has(tmp_path: Path) -> None:
    run = write(tmp_path / "run", curve(0.9, alarm=True), state={"phase": "done"})
    out, _, code = said("report", str(run), "-o", str(tmp_path / "new" / "r.html"))
    text = (tmp_path / "new" / "r.html").read_text()
    assert (
        code == 0
        and "r.html" in out
        and "configuration:" in out
        and "answers: the run has no buffer" in out
    )
    tags = Tags(text)
    assert (
        tags.seen["svg"] == 1
        and "0.25 → 0.9" in tags.text
        and "length_drift" in tags.text
        and "answers grew" in tags.text
    )
    assert "0.8804 to 0.9196" in tags.text and "Not in this report" in tags.text
    assert said("report", str(run), "-o", str(tmp_path / "r.pdf"))[2] == 2
    assert said("report", str(tmp_path / "nowhere"))[2] == 2


async def test_half_a_ledger_and_a_cut_line_are_named(tmp_path: Path) -> None:
    await play(tmp_path / "run")
    (tmp_path / "run" / "buffer" / "experience_buffer.db").write_bytes(
        b"SQLite format 3\x00" + b"\x07" * 4000
    )
    (tmp_path / "run" / "metrics.jsonl").write_text('{"role": "trainer", "st')
    found = collect(rft.open_run(tmp_path / "run"))
    assert [m for m in found.missing if "the last line is cut" in m] and [
        m for m in found.missing if "damaged or not a ledger" in m
    ]
    assert "nothing has" not in page(found) and found.answers == []


@pytest.mark.e2e
def test_the_file_stays_small(tmp_path: Path) -> None:
    """300,000 records, each with many names; texts are cut where answers are shown."""
    many = [
        {
            "role": "trainer",
            "step": s,
            "time": float(s),
            "values": {"actor/loss": s * 0.1, "perf/step_s": 1.0, "alarm/x": 1.0},
        }
        for s in range(100_000)
    ]
    run = write(
        tmp_path / "run", many + curve(0.5), state={"phase": "done", "reason": "x" * 10_000_000}
    )
    text = page(collect(rft.open_run(run)))
    assert (
        len(text.encode()) < MAX_BYTES / 10
        and "more characters" in text
        and "The first 200 of 100000" in text
    )


def test_an_interval_over_tasks() -> None:
    assert interval(0.5, 0.1, 20) == (pytest.approx(0.304), pytest.approx(0.696))
    low, high = interval(1.0, 0.0, 100)
    assert (low, high) == (pytest.approx(0.963, abs=1e-3), pytest.approx(1.0)), (
        "all tasks alike: Wilson's, which is never empty"
    )
    assert interval(0.1, None, 50) == (
        pytest.approx(0.0435, abs=1e-4),
        pytest.approx(0.2136, abs=1e-4),
    )
    assert interval(3.5, None, 50) == (None, None) == interval(0.5, None, None)


def test_costs_of_processes_are_added(tmp_path: Path) -> None:
    def record(role: str, time: float, **values: float) -> MetricRecord:
        return MetricRecord(
            role=role,
            step=1,
            time=time,
            values={k.replace("__", "/"): v for k, v in values.items()},
        )  # type: ignore[arg-type]

    records = [
        record("synchronizer", 0, sync__version=0.0),
        record("explorer", 100, judge__j__cost_usd=0.25, rollout__time__batch=100.0),
        record("trainer", 150, perf__step_s=150.0, time__wait_s=100.0),
        record("explorer", 200, judge__j__cost_usd=0.5, rollout__time__batch=120.0),
        record("synchronizer", 1000, sync__version=0.0),  # the run was stopped and went on
        record("explorer", 1100, judge__j__cost_usd=0.125, rollout__time__batch=90.0),
        record("eval", 1110, eval__sums__time=20.0),
        # the next day its checkpoints were evaluated
        record("eval", 90_000, bench__sums__time=20.0, judge__j__cost_usd=0.5),
    ]
    assert dict(_cost({"trainer": {"world_size": 2}}, RunSummary(records))) == {
        "duration": "5m00s, pauses between its processes left out",
        "trainer": "2 rank(s): 10m00s held, 1m40s at work",
        "engines": "1 engine(s): 5m00s held",
        "judges and servers": "1.1250 USD",
    }


def test_a_resumed_training_on_data_did_not_last_while_it_was_stopped() -> None:
    steps = [
        MetricRecord(role="trainer", step=s, time=t, values={"perf/step_s": 10.0})
        for s, t in ((1, 10.0), (2, 86_400.0))
    ]
    assert dict(_cost({}, RunSummary(steps)))["trainer"] == "1 rank(s): 20s held, 20s at work"


def test_the_subject_says_what_was_played_and_not_what_nobody_has_written() -> None:
    """A null repeat_times is the algorithm's, which was told as 1; evaluations may have a workflow
    of their own.
    """
    tasks = {"taskset": {"name": "t"}, "eval_tasksets": [{"name": "e"}]}
    both = {
        "default_workflow_type": "w",
        "default_eval_workflow_type": "v",
        "default_reward_fn_type": "r",
    }
    tree = {
        "algorithm": {"repeat_times": None},
        "buffer": {"batch_size": 4, "explorer_input": tasks | both},
    }
    values = {"rollout/runs": 40.0, "rollout/groups/accepted": 4.0, "rollout/groups/rejected": 1.0}
    explored, trained = (
        MetricRecord(role=r, step=2, time=0.0, values=v)
        for r, v in (("explorer", values), ("trainer", {}))
    )
    told = dict(_subject(tree, RunSummary([explored, trained])))
    assert told["a step"] == "4 tasks, 8 answers each" and told["steps"] == "2"
    assert "workflow w" in told["trained on"] and "workflow v" in told["evaluated on"]
    assert dict(_subject(tree, RunSummary([])))["a step"] == "4 tasks"


def test_runs_beside_each_other(tmp_path: Path) -> None:
    tree = {"tree": {"seed": 42, "algorithm": {"repeat_times": 8}}, "versions": {"torch": "2.13"}}
    a = write(tmp_path / "a", curve(0.9), state={"phase": "done"}, config=tree)
    b = write(
        tmp_path / "b",
        curve(0.4, alarm=True),
        state={"phase": "done"},
        config={**tree, "tree": {"seed": 7, "algorithm": {}}},
    )
    out, _, code = said("compare", str(a), str(b), "-o", str(tmp_path / "c.svg"))
    assert code == 0 and "0.250 → 0.900 (0.880 to 0.920), step 3" in out and "since step 3" in out
    assert (
        re.search(r"algorithm.repeat_times +8 +default", out)
        and re.search(r"seed +42 +7", out)
        and "torch" not in out
    )
    assert "a: rollout/reward/mean" in (tmp_path / "c.svg").read_text()
    told = json.loads(said("compare", str(a), str(b), "--json")[0])
    assert told["newest"]["rollout/reward/mean"] == {"a": 0.3, "b": 0.3}
    assert said("compare", str(a))[2] == 2


def test_json_is_json_whatever_was_measured(tmp_path: Path) -> None:
    """A value that is not finite is null in metrics.jsonl, and in every JSON that is printed."""
    runs = [write(tmp_path / name, curve(0.5), state={"phase": "done"}) for name in "ab"]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        values = {"actor/loss": None, "rollout/reward/mean": None, "perf/step_s": None}
        for role in ("trainer", "explorer"):
            file.write(json.dumps({"role": role, "step": 9, "time": 9.0, "values": values}) + "\n")

    def number(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for verb in (("compare", *map(str, runs)), ("status", str(runs[0])), ("ls", str(tmp_path))):
        json.loads(said(*verb, "--json")[0], parse_constant=number)
    assert (
        json.loads(said("compare", *map(str, runs), "--json")[0])["newest"]["actor/loss"]["a"]
        is None
    )


def test_the_check_of_a_service_is_json() -> None:
    """Its trainer waits for rows without end, which was printed as Infinity."""
    out, _, code = said(
        "check", "--config", "examples/serve/config.yaml", "--schema-only", "--json"
    )
    assert (
        code == 0
        and json.loads(out, parse_constant=pytest.fail)["plan"]["trainer"]["read_deadline_s"]
        is None
    )


def test_points_are_those_of_the_file(tmp_path: Path) -> None:
    run = write(tmp_path, [*curve(0.9), curve(0.8)[-1]])
    (first, last) = eval_points(RunSummary(read(run / "metrics.jsonl")).series)
    assert (first.step, first.mean, first.low) == (0, 0.25, pytest.approx(0.1755, abs=1e-3))
    assert (last.step, last.mean, last.failed) == (3, 0.8, 2), (
        "of a step that was written twice the later value"
    )
    with pytest.raises(ConfigError):
        collect(rft.open_run(tmp_path / "nothing"))


@pytest.mark.e2e
def test_what_a_command_holds_does_not_grow_with_the_metrics_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes at the peak, for each record of 100 metrics that nobody draws; all records of a run
    were held.
    """
    monkeypatch.setattr(monitor_read, "_PORTION_BYTES", 1 << 16)

    def held(run: Path, read_it: Callable[[], object]) -> float:
        gc.collect()
        tracemalloc.start()
        try:
            read_it()
            return tracemalloc.get_traced_memory()[1] / RECORDS
        finally:
            tracemalloc.stop()

    values = {f"other/{i}": float(i) for i in range(100)} | {
        "perf/step_s": 1.0,
        "rollout/reward/mean": 0.5,
    }
    first = {
        "role": "synchronizer",
        "step": 0,
        "time": 0.0,
        "values": {"sync/version": 0.0, "sync/stage_s": 0.1},
    }
    lines = [
        {"role": "trainer", "step": s, "time": float(s), "values": values}
        for s in range(1, RECORDS + 1)
    ]
    run = write(tmp_path / "run", [first, *lines])
    reads: dict[str, Callable[[], object]] = {
        "status": lambda: status_command.collect(run),
        "report": lambda: page(collect(rft.open_run(run))),
        "compare": lambda: compared(
            [collect(rft.open_run(run), answers=False)] * 2, ["a", "b"], ["perf/step_s"]
        ),
        "timeline": lambda: picture(run, tmp_path / "timeline.svg", last=30),
        "plot": lambda: rft.open_run(run).plot(),
    }
    for read_it in reads.values():
        read_it()  # imports and caches
    found = {name: held(run, read_it) for name, read_it in reads.items()}
    assert max(found.values()) < 100 * 24, found


def test_a_folder_of_a_model_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for verb in (
        ("report", str(tmp_path), "-o", str(tmp_path / "r.html")),
        ("compare", str(tmp_path), str(tmp_path)),
    ):
        _, told, code = said(*verb)
        assert code == 2 and "is not the folder of a run" in told
    assert not (tmp_path / "r.html").exists()


def test_a_value_that_is_not_finite_hides_no_cost() -> None:
    steps = [
        MetricRecord(
            role="trainer",
            step=s,
            time=10.0 * s,
            values={"perf/step_s": v, "experience/response_tokens": v},
        )
        for s, v in ((1, 10.0), (2, math.nan), (3, math.inf))
    ]
    told = dict(_cost({}, RunSummary(steps)))
    assert told["duration"].startswith("10s") and told["tokens trained"] == "10"


def test_what_an_attempt_without_a_checkpoint_reached_is_not_told_of_the_next_one(
    tmp_path: Path,
) -> None:
    lines = [
        ("eval", 0, "eval/x/mean@1"),
        ("eval", 5, "eval/x/mean@1"),
        ("trainer", 5, "perf/step_s"),
    ]
    lines += [
        ("synchronizer", 0, "sync/version"),
        ("eval", 0, "eval/x/mean@1"),
        ("trainer", 1, "perf/step_s"),
    ]
    records = [
        {"role": role, "step": step, "time": 1.0, "values": {name: 1.0}}
        for role, step, name in lines
    ]
    facts = collect(rft.open_run(write(tmp_path / "run", records)), answers=False)
    assert facts.steps == 1 and [p.step for p in facts.evals] == [0]


def test_two_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    """Differences 0.5, 0.25, 0 of three common tasks: mean 0.25, sd 0.25, 1.96 x 0.25 / sqrt(3) =
    0.283.
    """
    runs = {}
    for name, means in (("a", (0.0, 0.5, 1.0, 1.0)), ("b", (0.5, 0.75, 1.0))):
        rows = [
            {"task": task, "run": run, "reward": mean + shift}
            for task, mean in enumerate(means)
            for run, shift in ((0, 0.25), (1, -0.25))
        ]
        rows.append({"task": 0, "run": 2, "reward": None})
        folder = tmp_path / name / "samples"
        folder.mkdir(parents=True)
        (folder / "eval_sums_10.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        point = EvalPoint("eval/sums/mean@2", 10, 0.0, None, None, 4, 8, 0)
        runs[name] = SimpleNamespace(folder=str(tmp_path / name), evals=[point])
    told = differences(runs)  # type: ignore[arg-type]
    assert told == {"a": {}, "b": {"eval/sums/mean@2": "+0.250 (-0.033 to +0.533), 3 tasks"}}
