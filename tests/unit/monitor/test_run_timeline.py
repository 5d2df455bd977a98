"""Who worked and who waited, from records alone."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rft.cli.main import make
from rft.errors import ConfigError, RunFailed
from rft.monitor.pictures import Bar, bars, shares, svg
from rft.types.metrics import MetricRecord

SYNC = {
    "sync/stage_s": 0.5,
    "sync/pause_s": 0.25,
    "sync/load_s": 0.5,
    "sync/resume_s": 0.25,
    "sync/canary_s": 0.5,
}


def record(role: str, step: int, time: float, **values: float) -> MetricRecord:
    return MetricRecord(role=role, step=step, time=time, values=values)  # type: ignore[arg-type]


def run() -> list[MetricRecord]:
    """Version 0 at 12; batch 0 from 12 to 14, step 1 from 14 to 18: trained for 2 s, published for
    2 s; an evaluation from 18 to 19.
    """
    return [
        record("synchronizer", 0, 12, **SYNC),
        record("explorer", 1, 14, **{"rollout/time/batch": 2.0}),
        record("synchronizer", 1, 18, **SYNC, **{"explorer/idle_ratio": 0.1}),
        record(
            "trainer",
            1,
            18,
            **{"perf/step_s": 6.0, "time/wait_s": 2.0, "time/train_s": 2.0, "time/sync_s": 2.0},
        ),
        record("eval", 1, 20, **{"eval/copy/time": 1.0, "eval/copy/mean@1": 0.5}),
    ]


def test_bars_lie_where_the_records_say() -> None:
    found = bars(run())
    assert Bar("explore", "explore", "batch 0", 12, 14) in found
    assert [b for b in found if b.row == "train"] == [
        Bar("train", "train", "step 1", 14, 16),
        Bar("train", "sync", "step 1", 16, 18),
    ]
    phases = [b for b in found if b.row == "sync" and b.label == "version 1"]
    assert [(b.kind, b.begin, b.end) for b in phases] == [
        ("stage", 16, 16.5),
        ("pause", 16.5, 16.75),
        ("load", 16.75, 17.25),
        ("resume", 17.25, 17.5),
        ("canary", 17.5, 18),
    ]
    assert Bar("evaluate", "evaluate", "copy, version 1", 19, 20) in found


def test_engines_that_roll_end_their_requests_before_they_pause() -> None:
    """Without it the phases before stood too late by as much."""
    (stage, drain, *_) = bars([record("synchronizer", 1, 30, **SYNC, **{"sync/drain_s": 10.0})])
    assert (stage.kind, stage.begin, drain.kind, drain.begin, drain.end) == (
        "stage",
        18.0,
        "drain",
        18.5,
        28.5,
    )


def test_shares_count_from_the_first_version_on() -> None:
    """From the first bar of a sync to end, 12 ... 20 less what was before the first phase ended."""
    told = shares([b for b in bars(run()) if b.label != "version 0" or b.kind == "canary"])
    assert told == pytest.approx(
        {
            "explorer idle": 5 / 8,
            "trainer idle": 4 / 8,
            "engines paused": 1 / 8,
            "both at work": 0.0,
        }
    )


def test_shares_of_steps_without_a_version_count_all_of_their_time() -> None:
    found = [b for b in bars(run()) if b.row != "sync"]
    assert shares(found)["engines paused"] == 0 and 0 < shares(found)["trainer idle"] < 1


def test_only_the_newest_process_and_its_last_steps() -> None:
    again = [record(r.role, r.step + 1, r.time + 100, **r.values) for r in run()]
    found = bars([*run(), *again])
    assert min(b.begin for b in found) == 110 and {b.label for b in found if b.kind == "train"} == {
        "step 2"
    }
    more = [*run(), record("trainer", 2, 24, **{"perf/step_s": 4.0, "time/train_s": 4.0})]
    assert {b.label for b in bars(more, last=1)} == {"step 2"}
    with pytest.raises(RunFailed, match="a timeline is drawn of a run that explores"):
        bars(run()[1:2])


def test_the_picture_is_well_formed_and_shows_every_bar() -> None:
    found = [*bars(run()), Bar("evaluate", "evaluate", "a<b & c, version 1", 19.5, 20)]
    root = ET.fromstring(svg(found, shares(found)))
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(found) and any("a<b & c" in t for t in titles)
    boxes = [
        (float(e.attrib["y"]), float(e.attrib["x"]), float(e.attrib["width"]))
        for e in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    for y, x, width in boxes:  # nothing lies on anything else
        assert all(y != y2 or x2 >= x + width - 0.3 or x2 <= x for y2, x2, _ in boxes)


def test_the_command(tmp_path: Path) -> None:
    lines = [
        json.dumps({"role": r.role, "step": r.step, "time": r.time, "values": r.values})
        for r in run()
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said = CliRunner().invoke(make("timeline"), ["timeline", str(tmp_path)])
    assert (
        said.exit_code == 0
        and "trainer idle" in said.output
        and (tmp_path / "timeline.svg").is_file()
    )


def test_only_a_picture_is_replaced(tmp_path: Path) -> None:
    (rows := tmp_path / "questions.jsonl").write_text("precious")
    (tmp_path / "metrics.jsonl").write_text("")
    said = CliRunner().invoke(make("timeline"), ["timeline", str(tmp_path), "--out", str(rows)])
    assert isinstance(said.exception, ConfigError) and "must end in .svg" in str(said.exception)
    assert rows.read_text() == "precious"
