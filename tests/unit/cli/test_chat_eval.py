"""`rft chat` and `rft eval`: a model without a configuration file."""

from __future__ import annotations

import builtins
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.asked_ledger import said


@pytest.mark.e2e
def test_a_chat_answers_each_line_and_begins_anew(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one is longer than the model takes
    lines = iter(["hello", "again", "", "new", 600 * "x", "new"])

    def spoken(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", spoken)
    out, err, code = said(
        "chat", str(tiny_model), "--max-tokens", "3", "--system", "be brief", "--temperature", "0"
    )
    assert code == 0 and len(out.splitlines()) >= 3 and "\x1b" not in out
    assert "loading" in err and err.count("begin anew with an empty line") == 1


def test_what_cannot_be_talked_to_is_named(tmp_path: Path, tiny_model: Path) -> None:
    _, err, code = said("chat", str(tmp_path))
    assert code == 2 and "holds neither checkpoints nor a model" in err
    assert said("chat", str(tiny_model), "--step", "3")[2] == 2


def test_a_model_that_was_not_copied_whole_is_named(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, model := tmp_path / "model")
    template = model / "tokenizer_config.json"
    template.write_text(
        json.dumps(
            {k: v for k, v in json.loads(template.read_text()).items() if k != "chat_template"}
        )
    )
    (model / "chat_template.jinja").unlink(missing_ok=True)
    _, err, code = said("chat", str(model))
    assert code == 2 and "has no chat template" in err and "Traceback" not in err
    os.truncate(model / "model.safetensors", 1000)
    _, err, code = said("chat", str(model))
    assert (
        code == 2
        and "model.safetensors is damaged" in err
        and "copy it again" in err
        and "Traceback" not in err
    )


@pytest.mark.e2e
def test_a_model_is_evaluated(tmp_path: Path, tiny_model: Path) -> None:
    lengths = ["--max-prompt-tokens", "60", "--max-response-tokens", "1"]
    given = [
        "rft.testing.tiny:copy_tasks",
        "--split",
        "eval",
        "--rows",
        "4",
        "--runs",
        "2",
        *lengths,
    ]
    out, _, code = said("eval", str(tiny_model), *given, "-o", str(tmp_path))
    assert code == 0
    assert "copy_tasks/mean@2" in out
    assert "copy_tasks/parts/" not in out  # exact_answer has none
    (metrics,) = tmp_path.glob("rft/eval/*-copy_tasks-*/metrics.jsonl")
    assert "bench/copy_tasks/mean@2" in metrics.read_text()
    assert said("eval", str(tiny_model), "x.jsonl", "--engine", "none")[2] == 2


@pytest.mark.e2e
def test_no_bars_where_nobody_watches(tiny_model: Path) -> None:
    """A bar of tqdm whose reader has gone (`rft chat RUN 2>&1 | head -1`) waits for ever."""
    command = [sys.executable, "-m", "rft.cli.main", "chat", str(tiny_model), "--max-tokens", "3"]
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr.splitlines() == [f"loading {tiny_model} on cpu"]


@pytest.mark.e2e
def test_ctrl_c_at_the_prompt_ends_a_chat(tiny_model: Path) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "rft.cli.main", "chat", str(tiny_model)]
    # Ctrl-C there is a signal to this process alone
    own = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=own
    )
    os.close(theirs)
    try:
        said = b""
        while b"> " not in said:
            said += os.read(mine, 1000)
        ends = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < ends:
            os.write(mine, b"\x03")  # again: readline misses one that comes just before it waits
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        # the latter if pressed again while it ends
        assert process.returncode in (130, -signal.SIGINT)
    finally:
        process.kill()
        process.wait()
        os.close(mine)
