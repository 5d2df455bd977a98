"""One owner per run folder; state is readable while the run lives."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from rft.errors import SetupError
from rft.launch.execute import _clean_after_a_crash
from rft.launch.rundir import RunDir, began, write_json
from rft.secrets import learn_secrets


def test_second_owner_is_refused_with_the_holder(tmp_path):
    run = RunDir.claim(tmp_path / "run")
    try:
        code = (
            f"from rft.launch.rundir import RunDir; from pathlib import Path; "
            f"RunDir.claim(Path({str(tmp_path / 'run')!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert f"in use by process {os.getpid()}" in done.stderr
    finally:
        run.release()
    RunDir.claim(tmp_path / "run").release()


def test_a_dead_owner_does_not_block(tmp_path):
    code = (
        "import os, signal; from rft.launch.rundir import RunDir; from pathlib import Path; "
        f"RunDir.claim(Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    RunDir.claim(tmp_path).release()


def test_unwritable_folder_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        RunDir.claim(tmp_path / "file" / "run")


def test_state_is_json_without_secrets(tmp_path):
    learn_secrets(["sesame-open-please"])
    run = RunDir.claim(tmp_path)
    run.state("running", reason="key sesame-open-please")
    run.release()
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["phase"] == "running" and state["pid"] == os.getpid()
    assert "sesame" not in (tmp_path / "state.json").read_text()


def test_json_is_never_half_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {("not", "a", "key"): 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_run_of_another_machine_lives_as_long_as_its_lock(tmp_path):
    """Its processes cannot be asked from here, where folders are shared: another one may have the
    number of its process.
    """
    run = RunDir.claim(tmp_path)
    run.state("running")
    state = json.loads((tmp_path / "state.json").read_text()) | {"node": "elsewhere"}
    run.lock_file.write_text(str(2**22 - 1))
    assert RunDir(tmp_path).phase(state) == ("running", None)
    run.release()
    assert RunDir(tmp_path).phase(state) == ("died", None)


def test_a_copy_of_a_run_that_lives_leaves_its_processes_alone(tmp_path):
    """What a killed run has left is ended by the next start in its folder; this one's launcher is
    there.
    """
    with ExitStack() as started:

        def sleeper(**environment: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environment})
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        launcher = sleeper()
        part = sleeper(RFT_RUN_ID="0123456789ab")
        run = RunDir(tmp_path)
        run.run_id = "0123456789ab"
        run.state("running")
        own = json.loads((tmp_path / "state.json").read_text())
        # the clock was put forward since
        state = own | {"pid": launcher.pid, "began": began(launcher.pid), "time": 0.0}

        def cleaned(**facts: object) -> bool:
            write_json(tmp_path / "state.json", state | facts)
            _clean_after_a_crash(run)
            return part.poll() is not None

        assert not cleaned()
        assert not cleaned(node="elsewhere", folder=0), (
            "whether its launcher lives cannot be asked from here"
        )
        launcher.kill()
        launcher.wait()
        assert cleaned()
        part = sleeper(RFT_RUN_ID="0123456789ab")
        assert cleaned(node="elsewhere"), "this folder was that run's: it has ended"
