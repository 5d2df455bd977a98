"""status, export, log and buffer audit: they read a run's files and nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import rft
from rft.cli import chat_command, export_command, status_command
from rft.cli import main as cli
from rft.errors import CheckpointInvalid, ConfigError, SetupError
from rft.launch.progress import summary
from rft.launch.rundir import RunDir
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.helpers.asked_ledger import EVIL


def said(*arguments: str) -> tuple[str, int]:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as e:
        cli.main(list(arguments))
    return out.getvalue(), int(e.value.code or 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that saved steps 5 and 10, the latter with a model."""
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.state("done", version="1:10")
    for step in (5, 10):
        folder = run.checkpoints / f"global_step_{step}"
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "model.safetensors").write_bytes(b"t" * step)
        if step == 10:
            (folder / "huggingface").mkdir()
            (folder / "huggingface" / "model.safetensors").write_bytes(b"weights")
            (folder / "huggingface" / "config.json").write_text("{}")
        manifests.commit(
            folder,
            version=Version(1, step),
            parent=None,
            consumption=Consumption(num_uses=0, digest="", cursor=0),
        )
    lines = [
        {"role": "explorer", "step": 0, "time": 1.0, "values": {"eval/sums/mean@8": 0.25}},
        {
            "role": "trainer",
            "step": 10,
            "time": 2.0,
            "values": {"experience/reward/mean": 0.5, "perf/step_s": 2.0},
        },
        {"role": "explorer", "step": 10, "time": 3.0, "values": {"eval/sums/mean@8": 0.9}},
    ]
    (run.path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"role": "tra'
    )
    return run.path


# ------------------------------------------------------------ status


def test_status(run_dir: Path) -> None:
    out, code = said("status", str(run_dir))
    assert code == 0
    assert "phase        done" in out
    assert "step         10  reward 0.500  s/step 2.0" in out
    assert (
        "eval         step 0: sums" in out.replace("eval/", "")
        and "0.250" in out
        and "0.900" in out
    )
    assert "checkpoint   step 10, version 1:10, 0 MB, model" in out
    assert "the last line is cut" in out


def test_status_tells_alarms_and_names_what_shows_more(run_dir: Path) -> None:
    alarm = {
        "role": "explorer",
        "step": 9,
        "time": 4.0,
        "values": {"alarm/no_spread": 1.0},
        "notes": ["alarm no_spread: all alike"],
    }
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
    (run_dir / "metrics.jsonl").write_text("".join(f"{x}\n" for x in (*lines, json.dumps(alarm))))
    out, code = said("status", str(run_dir))
    assert (
        code == 0
        and "alarm        explorer 9: alarm no_spread: all alike" in out
        and "note" not in out
    )
    assert "curve        0.250 ▁█ 0.900  eval/sums/mean@8" in out
    assert (
        f"next         rft report {run_dir} -o report.html" in out
        and f"rft compare {run_dir} OTHER_RUN" in out
    )
    with (run_dir / "metrics.jsonl").open("a") as file:  # one of the trainer is no step
        file.write(json.dumps(alarm | {"role": "trainer", "step": 10}) + "\n")
    assert "step         10  reward 0.500  s/step 2.0" in said("status", str(run_dir))[0]


@pytest.mark.extra
def test_status_writes_control_characters_as_escapes(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    note = {"role": "trainer", "step": 9, "time": 9e9, "values": {}, "notes": [EVIL]}
    metrics.write_text(json.dumps(note) + "\n" + metrics.read_text())
    state = json.loads((run_dir / "state.json").read_text())
    (run_dir / "state.json").write_text(json.dumps({**state, "host": EVIL, "name": EVIL}))
    out, code = said("status", str(run_dir))
    assert code == 0
    assert "a\\x1b[31mred" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_a_message_writes_control_characters_as_escapes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rft", "status", str(tmp_path / "a\x1b[31mred\u202e")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "a\\x1b[31mred" in done.stderr
    assert not set(done.stderr) & {"\x1b", "\u202e"}


@pytest.mark.extra("view")
def test_runs_below_a_folder(run_dir: Path) -> None:
    broken = run_dir.parent / "other" / "run"
    broken.mkdir(parents=True)
    (broken / "state.json").write_text("{")
    out, code = said("ls", str(run_dir.parent), "--json")
    rows = {row["run"]: row for row in json.loads(out)}
    assert code == 0 and rows[str(broken)]["phase"] == "damaged"
    assert rows[str(run_dir)] == {
        "run": str(run_dir),
        "phase": "done",
        "step": 10,
        "reward": 0.5,
        "eval": 0.9,
    }
    assert said("ls", str(run_dir.parent / "nowhere"))[1] == 2


def test_status_of_a_run_that_goes_on(run_dir: Path) -> None:
    claimed = RunDir.claim(run_dir)
    claimed.state(
        "running",
        waiting=["the trainer waits for rows"],
        parts={"trainer-0": os.getpid(), "engine-0": 2**22 - 1},
    )
    facts = status_command.collect(run_dir)
    assert (facts["phase"], facts["holder"]) == ("running", os.getpid())
    text = "\n".join(status_command.lines(facts))
    assert (
        "waiting      the trainer waits for rows" in text and f"engine-0 {2**22 - 1} (gone)" in text
    )
    os.utime(claimed.lock_file, (1, 1))  # the clock was put forward since
    assert status_command.collect(run_dir)["phase"] == "running"
    state = json.loads((run_dir / "state.json").read_text()) | {"node": "elsewhere"}
    (run_dir / "state.json").write_text(json.dumps(state))
    text = "\n".join(status_command.lines(status_command.collect(run_dir)))
    assert "phase        running, on elsewhere, since" in text and "(gone)" not in text, (
        "nothing is known of processes there"
    )
    claimed.release()


def test_status_of_a_run_that_was_killed(run_dir: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    run = RunDir(run_dir)
    run.state("running")
    run.lock_file.write_text(child.stdout)
    assert status_command.collect(run_dir)["phase"] == "died"
    run.lock_file.write_text("1 1000000")  # the number was given to another process since
    assert status_command.collect(run_dir)["phase"] == "died"


def test_status_of_a_killed_run_names_its_last_sign_and_the_command(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N12, N13: it said "died, since 1m05s" a second after the kill, and to run the same command
    again.
    """
    run = RunDir(run_dir)
    run.goes_on("rft serve --config my.yaml trainer.total_steps=9")
    run.state("running")
    shutil.rmtree(run.checkpoints)
    long_ago = time.mktime((2026, 11, 27, 9, 0, 0, 0, 0, -1))
    seen = time.mktime((2026, 11, 27, 13, 51, 7, 0, 0, -1))
    for path, at in ((run.path / "state.json", long_ago), (run.path / "metrics.jsonl", seen)):
        os.utime(path, (at, at))
    out = said("status", str(run_dir))[0].splitlines()
    assert out[1:3] == [
        "phase        died at 2026-11-27 13:51 (last sign of life)",
        "resume       rft serve --config my.yaml trainer.total_steps=9",
    ]
    assert "checkpoint   none yet: a restart now would go back to step 0" in out
    monkeypatch.chdir(run_dir)
    folder = json.loads((run_dir / "state.json").read_text())["cwd"]
    assert (
        f"resume       cd {folder} && rft serve --config my.yaml trainer.total_steps=9"
        in said("status", str(run_dir))[0]
    )
    os.utime(run.path / "metrics.jsonl")
    assert re.search(r"died at \d\d:\d\d \(last sign of life\)", said("status", str(run_dir))[0])


def test_notes_of_an_earlier_attempt_are_not_those_of_this_one(run_dir: Path) -> None:
    """N14"""
    with (run_dir / "metrics.jsonl").open("a") as file:
        for at, note in ((5.0, "the old one"), (time.time() + 60, "the new one")):
            record = {"role": "explorer", "step": 11, "time": at, "values": {}, "notes": [note]}
            file.write("\n" * (at == 5.0) + json.dumps(record) + "\n")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("".join(f"{x}\n" for x in lines if x.endswith("}")))
    out = said("status", str(run_dir))[0]
    assert "note         explorer 11: the new one" in out and "the old one" not in out


@pytest.mark.extra("view")
def test_a_run_worked_as_long_wherever_it_is_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """N15: the end of the run, its report and the viewer had a duration each."""
    from rft.extras.view.found_runs import FoundRuns
    from rft.extras.view.report_facts import collect

    state = json.loads((run_dir / "state.json").read_text())
    ended = {"started": 1000.0, "time": 1080.0, "before_s": 40.0}
    (run_dir / "state.json").write_text(json.dumps(state | ended))
    assert "worked       2m00s" in said("status", str(run_dir))[0]
    summary(run_dir, Version(1, 10), 80.0, Version(1, 5))
    assert "done  step 10 in 2m00s, 1m20s of them from step 5 on" in capsys.readouterr().out
    assert dict(collect(rft.open_run(run_dir), answers=False).cost)["duration"].startswith("2m00s")
    assert [line.seconds for line in FoundRuns(run_dir.parent).lines()] == [120.0]
    again = RunDir(run_dir)
    again.goes_on("rft run --config x.yaml")
    again.state("running")
    assert json.loads((run_dir / "state.json").read_text())["before_s"] == 120.0, (
        "a later process counts on"
    )


def test_status_json_and_nonsense(run_dir: Path, tmp_path: Path) -> None:
    out, _ = said("status", str(run_dir), "--json")
    assert json.loads(out)["checkpoints"][1]["step"] == 10
    assert said("status", str(tmp_path))[1] == 2
    (run_dir / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json is damaged"):
        status_command.collect(run_dir)
    (run_dir / "checkpoints" / "global_step_5" / "manifest.json").write_text("{")
    (run_dir / "state.json").write_text('{"phase": "done"}')
    assert "damaged" in "\n".join(status_command.lines(status_command.collect(run_dir)))


# ------------------------------------------------------------ export


def test_export_copies_the_model_whole(run_dir: Path, tmp_path: Path) -> None:
    out = export_command.copy_model(run_dir, tmp_path / "model", None)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_export_without_a_folder_writes_beside_the_run(run_dir: Path) -> None:
    out, code = said("export", str(run_dir))
    assert code == 0
    assert Path(out.strip()) == run_dir.with_name("run-model")
    assert (run_dir.with_name("run-model") / "config.json").is_file()


def test_export_takes_its_folder_with_and_without_an_option(run_dir: Path, tmp_path: Path) -> None:
    """N20: `rft export RUN DIR` failed for want of -o."""
    assert said("export", str(run_dir), str(tmp_path / "a"))[1] == 0
    assert said("export", str(run_dir), "-o", str(tmp_path / "b"))[1] == 0
    assert (tmp_path / "a" / "config.json").is_file() and (tmp_path / "b" / "config.json").is_file()
    assert said("export", str(run_dir), str(tmp_path / "c"), "-o", str(tmp_path / "d"))[1] == 2


def test_export_takes_the_checkpoint_that_the_run_would_go_on_from(
    run_dir: Path, tmp_path: Path
) -> None:
    """Not one with more steps, of an attempt that the run did not go on from."""
    folder = run_dir / "checkpoints" / "global_step_7"
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "model.safetensors").write_bytes(b"later")
    manifests.commit(
        folder,
        version=Version(2, 7),
        parent=None,
        consumption=Consumption(num_uses=0, digest="", cursor=0),
    )
    assert manifests.latest(run_dir / "checkpoints").folder == folder  # type: ignore[union-attr]
    out = export_command.copy_model(run_dir, tmp_path / "model", None)
    assert (out / "model.safetensors").read_bytes() == b"later"


def test_export_refuses(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 has no model.*there are 10"):
        export_command.copy_model(run_dir, tmp_path / "model", 5)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export_command.copy_model(run_dir, tmp_path / "there", None)
    with pytest.raises(ConfigError, match="0 checkpoints"):
        export_command.copy_model(tmp_path, tmp_path / "model", None)
    (run_dir / "checkpoints/global_step_10/huggingface/model.safetensors").write_bytes(b"weighty")
    with pytest.raises(CheckpointInvalid, match=r"huggingface/model\.safetensors: xxh3-128"):
        export_command.copy_model(run_dir, tmp_path / "model", None)
    assert not (tmp_path / "model").exists()


# ------------------------------------------------------------ log


LAUNCHER = """2026-01-01 00:00:00,000 I rft.a: one
2026-01-01 00:00:02,000 E rft.a: three broke
Traceback (most recent call last):
  File "x"
2026-01-01 00:00:03,000 D rft.a: four \x1b[31mred
"""
TRAINER = "2026-01-01 00:00:01,000 W rft.b: two\n2026-01-01 00:00:04,000 I rft.b: not whole"


@pytest.fixture
def logs(run_dir: Path) -> Path:
    (run_dir / "logs" / "launcher.log").write_text(LAUNCHER)
    (run_dir / "logs" / "trainer-0.log").write_text(TRAINER)
    return run_dir


def words(out: str) -> list[str]:
    return [w for w in ("one", "two", "three", "Traceback", "four", "not whole") if w in out]


def test_log_merges_by_time_and_keeps_tracebacks_together(logs: Path) -> None:
    out, code = said("log", str(logs), "-l", "debug")
    assert code == 0
    assert [out.index(w) for w in ("one", "two", "three", "Traceback", "four")] == sorted(
        out.index(w) for w in ("one", "two", "three", "Traceback", "four")
    )
    assert "\\x1b[31mred" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), ["one", "two", "three", "Traceback"]),
        (("-l", "warning"), ["two", "three", "Traceback"]),
        (("-k", "BROKE"), ["three", "Traceback"]),
        (("-n", "2", "-l", "debug"), ["three", "Traceback", "four"]),
    ],
)
def test_log_filters(logs: Path, options: tuple[str, ...], found: list[str]) -> None:
    assert words(said("log", str(logs), *options)[0]) == found


def test_log_refuses(logs: Path, tmp_path: Path) -> None:
    assert said("log", str(logs), "-l", "loud")[1] == 2
    assert said("log", str(logs), "-n", "-1")[1] == 2
    assert said("log", str(tmp_path))[1] == 2


def test_log_reads_the_folders_of_machines(logs: Path) -> None:
    (logs / "logs" / "host-a").mkdir()
    (logs / "logs" / "host-a" / "engine-0.log").write_text(
        "2026-01-01 00:00:04,000 I rft.a: from a machine\n"
    )
    out, code = said("log", str(logs), "-k", "from a machine")
    assert code == 0 and out.startswith("host-a/engine-0 ")


def test_log_follows(logs: Path) -> None:
    following = subprocess.Popen(
        [sys.executable, "-m", "rft.cli.main", "log", str(logs), "-f", "-k", "needle"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    try:
        with (logs / "logs" / "launcher.log").open("a") as file:
            file.write("2026-01-01 00:00:05,000 I rft.a: needle 1\n")
        assert "needle 1" in following.stdout.readline()
        (logs / "logs" / "late.log").write_text("2026-01-01 00:00:06,000 I rft.a: needle 2\n")
        assert following.stdout.readline().startswith("late ")
        (logs / "logs" / "host-b").mkdir()
        (logs / "logs" / "host-b" / "engine-1.log").write_text(
            "2026-01-01 00:00:07,000 I rft.a: needle 3\n"
        )
        assert following.stdout.readline().startswith("host-b/engine-1 ")
        with (logs / "logs" / "host-b" / "engine-1.log").open("a") as file:
            file.write("2026-01-01 00:00:08,000 I rft.a: needle 4\n")
        assert "needle 4" in following.stdout.readline()
    finally:
        following.kill()
        following.communicate()


def test_log_shows_an_entry_whole_that_is_read_while_it_is_written(logs: Path) -> None:
    """What was read later counted as info: of an error's traceback, -l error showed the beginning
    alone.
    """
    following = subprocess.Popen(
        [sys.executable, "-m", "rft.cli.main", "log", str(logs), "-f", "-l", "error", "-n", "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    try:
        # what is there: it follows now
        assert ["three" in following.stdout.readline() for _ in range(3)] == [True, False, False]
        for name, text in (
            ("launcher", "2026-01-01 00:00:05,000 E rft.a: broke\nTraceback:\n"),
            ("other", "2026-01-01 00:00:06,000 I rft.a: fine\n"),
            ("other", "  which goes on\n"),
            ("launcher", '  File "y"\n'),
            ("other", "2026-01-01 00:00:07,000 E rft.a: bad\n"),
        ):
            with (logs / "logs" / f"{name}.log").open("a") as file:
                file.write(text)
            if text.endswith(":\n"):
                assert (
                    "broke" in following.stdout.readline()
                    and "Traceback" in following.stdout.readline()
                )
            elif name == "launcher":
                assert 'File "y"' in following.stdout.readline()
        assert "bad" in following.stdout.readline()
    finally:
        following.kill()
        following.communicate()


def test_a_checkpoint_that_the_run_removes_meanwhile_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(manifest: manifests.Manifest, *_: object, **__: object) -> None:
        shutil.rmtree(manifest.folder)
        (manifest.folder / "huggingface" / "config.json").read_bytes()

    monkeypatch.setattr(export_command, "_fill", removed)
    with pytest.raises(SetupError, match="global_step_10 was removed meanwhile"):
        export_command.copy_model(run_dir, run_dir / "out", None)
    assert not (run_dir / "out").exists()


@pytest.mark.extra("view")
def test_a_program_of_stages_has_no_logs_and_no_numbers_of_its_own(run_dir: Path) -> None:
    from rft.extras.view.report_facts import collect

    (run_dir.parent / "stages.json").write_text('{"stages": []}')
    with pytest.raises(ConfigError, match=f"is a program of stages; .*{run_dir}"):
        collect(rft.open_run(run_dir.parent))
    (run_dir.parent / "logs").mkdir()  # as whoever owns a folder makes it
    with pytest.raises(ConfigError, match=f"it holds the runs {run_dir}"):
        status_command.log(run_dir.parent)


# ------------------------------------------------------------ killed


@pytest.mark.extra("view")
@pytest.mark.parametrize("phase", ["running", "waiting for the trainer"])
def test_a_killed_run_has_died_wherever_it_is_told(
    phase: str, run_dir: Path, tmp_path: Path
) -> None:
    from rft.extras.view.report_facts import collect

    RunDir(run_dir).state(phase)
    assert status_command.collect(run_dir)["phase"] == "died"
    assert collect(rft.open_run(run_dir), answers=False).phase == "died"
    program = run_dir.parent / "program"
    program.mkdir()
    run_dir.rename(program / "one")
    RunDir(program).state("running", stage="one")
    stages = [{"stage_name": name, "version": None, "model": None} for name in ("one", "two")]
    (program / "stages.json").write_text(json.dumps({"stages": stages}))
    assert [s["phase"] for s in status_command.collect(program)["stages"]] == ["died", "not begun"]


def test_a_chat_takes_a_program_as_an_export_does(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = run_dir.parent / "program"
    program.mkdir()
    run_dir.rename(program / "one")
    record = {
        "stage_name": "one",
        "version": "1:10",
        "model": "one/checkpoints/global_step_10/huggingface",
    }
    (program / "stages.json").write_text(json.dumps({"stages": [record]}))
    talked = []
    monkeypatch.setattr(
        chat_command,
        "_talk",
        lambda folder, *_: talked.append(sorted(f.name for f in folder.iterdir())),
    )
    assert said("chat", str(program))[1] == 0 and talked == [["config.json", "model.safetensors"]]
