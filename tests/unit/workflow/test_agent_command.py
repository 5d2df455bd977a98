"""A program that is an agent: its placeholders, its folder, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rft.engine.scripted import ScriptedEngine
from rft.testing import run_workflow_async
from rft.worker import keeper
from rft.workflow.agent import CommandArgs

SHOWS = """
import json, os, pathlib, sys, urllib.request
files = {str(f): f.read_text() for f in pathlib.Path(".").rglob("*") if f.is_file()}
pathlib.Path("new/folder").mkdir(parents=True)
body = {"messages": [{"role": "user", "content": "x"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
show = {"argv": sys.argv[1:], "stdin": sys.stdin.read(), "files": files, "here": os.getcwd()}
print(json.dumps(show | {"env": dict(os.environ)}))
"""


async def shown(task: dict[str, Any], *argv: str, **args: Any) -> dict[str, Any]:
    """Play a program that shows what it got."""
    command = [sys.executable, "-c", SHOWS, *argv]
    played = await run_workflow_async(
        "agent_command_workflow",
        task,
        ScriptedEngine("4"),
        reward="exact_answer",
        workflow_args={"command": command, **args},
        timeout_s=30,
    )
    (row,) = played.group.rows
    found: dict[str, Any] = json.loads(row.info["agent_output"])
    return found


async def test_placeholders_are_filled_once_everywhere() -> None:
    found = await shown(
        {"prompt": "say {api_key} {home}", "truth": "4"},
        "{prompt}",
        '{"a": {b}}',
        env={"URL": "{base_url}", "KEPT": "{other}"},
        stdin="-{prompt}-",
        home={"a/b.json": '{"key": "{api_key}", "at": "{home}"}'},
    )
    env = found["env"]
    assert found["argv"] == ["say {api_key} {home}", '{"a": {b}}']
    assert found["stdin"] == "-say {api_key} {home}-"
    assert (env["URL"], env["KEPT"]) == (env["OPENAI_BASE_URL"], "{other}")
    written = json.loads(found["files"]["a/b.json"])
    assert written == {"key": env["OPENAI_API_KEY"], "at": found["here"]}


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


async def test_each_run_has_a_home_that_is_removed() -> None:
    task = {"prompt": "x", "truth": "4"}
    first, second = [await shown(task, home={"given.txt": "1"}) for _ in range(2)]
    assert first["files"] == second["files"] == {"given.txt": "1"}
    assert first["here"] != second["here"] and first["env"]["HOME"] == first["here"]
    assert not await asyncio.to_thread(existing, [first["here"], second["here"]])


async def test_a_prompt_is_the_text_of_all_messages() -> None:
    parts = [{"type": "text", "text": "Add "}, {"type": "text", "text": "1."}]
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": parts}]
    found = await shown({"messages": messages, "truth": "4"}, stdin="{prompt}", home={})
    assert found["stdin"] == "Short.\n\nAdd 1."


async def test_an_image_in_a_prompt_fails_the_run() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    messages = [{"role": "user", "content": [image]}]
    with pytest.raises(ValueError, match="gets texts alone"):
        await shown({"messages": messages, "truth": "4"}, stdin="{prompt}")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"home": {"/etc/x": ""}}, "below the home folder"),
        ({"home": {"a/../../x": ""}}, "below the home folder"),
        ({"home": {"./": ""}}, "below the home folder"),
        ({"env": {"X": "{home}/x"}}, "{home} needs"),
        ({"stdin": "{home}"}, "{home} needs"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CommandArgs(command=[sys.executable], **args)


def test_a_home_is_removed_when_its_run_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch()
    keeper_end, lifeline = os.pipe()
    program = [sys.executable, "-c", "print(flush=True); import signal; signal.pause()"]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(keeper_end), str(home), *program],
        pass_fds=(keeper_end,),
        stdout=subprocess.PIPE,
    ) as process:
        os.close(keeper_end)
        assert process.stdout is not None
        process.stdout.readline()
        assert home.exists()
        os.close(lifeline)  # as the kernel does for a killed process
        assert process.wait(20) == 128 + 9
    assert not home.exists()
