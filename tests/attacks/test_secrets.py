"""M4: no file of a run holds a secret, and nobody but its account reads them; a run whose secrets
were not saved goes on.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rft.config.load import load
from rft.config.save import changes, save
from rft.config.schema.source import hidden
from rft.launch.rundir import RunDir
from rft.preflight.check import check
from rft.secrets import is_secret_name, learn_environment, redact, to_file
from tests.attacks.table import attack

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"
C = "c4n4ry"  # in each of them, so that a part of one would be found too
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": f"{C}wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
    "OPENAI_KEY": f"{C}-plain-key-1",
    "SECRET_KEY": f"{C}-django-2",
    "DB_PASS": f"{C}-pass-3",
    "PGPASSWORD": f"{C}-pg-4",
    "SLACK": f"xoxb-123456789012-{C}AbCdEfGh",
    "GOOGLE": f"AIza{C}SyD4567890123456789012345678901",
    "JWT": f"eyJhbGciOiJIUzI1NiJ9.eyJ{C}SI6MX0.{C}signature",
    "GITHUB": f"ghp_{C}0123456789abcdefghij",
    "GITHUB_PAT": f"github_pat_{C}0123456789abcdefghij",
    "HF": f"hf_{C}0123456789abcdef",
    "ANTHROPIC": f"sk-ant-{C}-0123456789",
    "STRIPE": f"sk_live_{C}0123456789",
    "DATABASE_URL": f"postgres://user:p@{C}ss@host/db",
    "REDIS": f"redis://:{C}redis@host:6379/0",
    "COOKIE_JAR": f"session={C}-cookie",
    "CUSTOM_THING": f"{C}-anything-17",
    "NPM": f"npm_{C}012345678901234567890123456789",
}
HEADERS = {
    "Authorization": f"Bearer {C}-bearer-18",
    "X-Api-Key": f"{C}-header-19",
    "X-Whatever": f"{C}-header-20",
}
SIGNED = f"https://data.example.org/rows?sig={C}sig21&token={C}tok22"

WORKFLOW = """
import logging
from rft.workflow.base import Workflow

class Careless(Workflow):
    \"\"\"Prints and logs everything it is given, and fails with it now and then.\"\"\"

    def __init__(self, env, headers, address):
        self.env, self.headers, self.address = env, headers, address

    async def run(self, task, ctx):
        print(self.env, self.headers, self.address)
        logging.getLogger("careless").warning("%s %s %s", self.env, self.headers, self.address)
        await ctx.chat(task.chat())
        if task.index % 3 == 0:
            raise RuntimeError(f"{self.env} {self.headers} {self.address}")
        return ctx.transcript(info={"seen": 1})
"""


def _config(folder: Path) -> Path:
    tree = yaml.safe_load(CONFIG.read_text())
    (folder / "careless.py").write_text(WORKFLOW)
    source = tree["buffer"]["explorer_input"]
    source["default_workflow_type"] = f"{folder}/careless.py:Careless"
    source["taskset"]["workflow_args"] = {
        "env": dict(SECRETS),
        "headers": dict(HEADERS),
        "address": SIGNED,
    }
    tree["buffer"]["max_refill"] = 100
    tree["name"] = "name"
    path = folder / "config.yaml"
    remarks = f"# api_key: {C}-remark-23\n# see {SECRETS['DATABASE_URL']}\n"
    path.write_text(remarks + yaml.safe_dump(tree))
    return path


def _leaks(folder: Path) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and C.encode() in path.read_bytes():
            line = next((x for x in path.read_bytes().splitlines() if C.encode() in x), b"")
            at = line.find(C.encode())
            found.append(f"{path.relative_to(folder)}: {line[max(0, at - 60) : at + 60]!r}")
    return found


def _open_to_others(folder: Path) -> list[str]:
    paths = [folder, *folder.rglob("*")]
    return [
        f"{p}: {stat.S_IMODE(p.lstat().st_mode):o}"
        for p in paths
        if not p.is_symlink() and p.lstat().st_mode & 0o077
    ]


@attack(
    "M4",
    "secrets in environments, headers, URLs and arguments",
    "none is in a saved configuration; files are the account's own",
)
def test_m4_what_is_saved_of_a_configuration(tmp_path: Path) -> None:
    config = load(
        _config(tmp_path),
        [f"buffer.explorer_input.taskset.workflow_args.env.LATE_KEY={C}-override-24"],
    )
    run = RunDir.claim(tmp_path / "run")
    try:
        save(config, run.path)
        handler = to_file(run.logs / "x.log")
        logging.getLogger("attack").warning("%s %s %s", SECRETS, HEADERS, SIGNED)
        run.state("failed", reason=f"RuntimeError: {SECRETS} {HEADERS} {SIGNED}")
        logging.getLogger().removeHandler(handler)
        handler.close()
    finally:
        run.release()
    assert not _leaks(run.path) and not _open_to_others(run.path)
    saved = json.loads((run.path / "config.json").read_text())["tree"]["buffer"]["explorer_input"]
    assert set(saved["taskset"]["workflow_args"]["env"]) >= set(SECRETS), "names stay readable"
    assert not changes(config, run.path), (
        "values that are not saved do not keep a run from going on"
    )
    report = check(tmp_path / "config.yaml", schema_only=True)
    assert C not in json.dumps(report.to_json(), default=str)


@attack("M4", "a run that an earlier version saved, with secrets", "goes on")
def test_m4_a_run_saved_by_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Which kept what it did not take for a secret."""
    config = load(_config(tmp_path))
    save(config, tmp_path)
    file = tmp_path / "config.json"
    old = json.loads(file.read_text())
    old["tree"]["buffer"]["explorer_input"]["taskset"]["workflow_args"]["env"] = dict(SECRETS)
    file.write_text(json.dumps(old))
    assert not changes(config, tmp_path)


@attack(
    "M4",
    "a whole run started with 20 kinds of secrets, and again",
    "none in any file; every file the account's own",
)
@pytest.mark.e2e
def test_m4_a_whole_run_leaves_no_secret_and_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    config = _config(tmp_path)
    root = tmp_path / "runs"
    keys = {"MY_API_KEY": f"{C}-environment-25", "RFT_TEST_PASSWORD": f"{C}-environment-26"}
    command = [sys.executable, "-m", "rft.cli.main", "run", "--in-process", "-c", str(config)]
    command += [f"model.model_path={tiny_model}", f"checkpoint_root_dir={root}"]
    for steps in ("trainer.total_steps=1", "trainer.total_steps=2"):
        done = subprocess.run(
            [*command, steps],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, **keys},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        folder = root / "project" / "group" / "name"
        assert (
            (folder / "checkpoints").is_dir()
            and any(folder.rglob("*.log"))
            and (folder / "metrics.jsonl").is_file()
        )
        assert not _leaks(folder), "\n".join(_leaks(folder))
        assert not _open_to_others(folder)


@attack("M4", "secrets without a telling name", "found by their form")
@pytest.mark.parametrize(
    "text",
    [
        *SECRETS.values(),
        *HEADERS.values(),
        SIGNED,
        f"ssh://git:{C}@h/x",
        f"git+https://{C}-token@h/x",
        f"Server=h;Password={C}abc;",
    ],
)
def test_m4_known_forms_are_found_without_their_name(text: str) -> None:
    plain = {
        f"{C}-plain-key-1",
        f"{C}-django-2",
        f"{C}-pass-3",
        f"{C}-pg-4",
        f"session={C}-cookie",
        f"{C}-anything-17",
    }
    nameless = plain | {
        HEADERS["X-Api-Key"],
        HEADERS["X-Whatever"],
        SECRETS["AWS_SECRET_ACCESS_KEY"],
    }
    assert text in nameless or C not in redact(f"before {text} after")


@attack(
    "M4",
    "arguments of plugins that are called as people call a password",
    "their values are not shown",
)
@pytest.mark.parametrize(
    "name",
    ["dbPass", "service_creds", "passcode", "userPwd", "MYSQL_PWD", "clientSecret", "apiKey"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) and hidden(("workflow_args", name), "plain words")


@attack("M4", "names that look like secrets' (`max_tokens`)", "shown")
@pytest.mark.parametrize(
    "name",
    [
        "prompt_key",
        "response_key",
        "reward_fn_key",
        "max_tokens",
        "eos_token",
        "pad_token_id",
        "tokenizer",
        "tokens_per_minute",
        "header_envs",
        "author",
        "passes",
        "bypass_old_logprobs",
        "authority",
        "keyboard",
        "credit",
        "bypass",
        "compass",
    ],
)
def test_ordinary_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@attack("M4", "names of variables that hold secrets", "shown; the values are not")
def test_names_of_environment_variables_are_shown() -> None:
    assert not hidden(("judge", "header_envs", "Authorization"), "MY_JUDGE_KEY")
    assert hidden(("judge", "headers", "X-Whatever"), "abc") and not hidden(
        ("x", "headers", "Accept"), "text/html"
    )
    assert (
        not hidden(("env", "OMP_NUM_THREADS"), "4")
        and not hidden(("env", "DEBUG"), "1")
        and hidden(("env", "THING"), "abc")
    )


@attack("M4", "texts that look like addresses with secrets", "shown")
def test_ordinary_texts_stay_as_they_are() -> None:
    for text in (
        "http://host:80/path?mail=a@b",
        "see https://example.org/key=5",
        "basic arithmetic is a task",
        "a@b.c",
        "x: y@z",
    ):
        assert redact(text) == text


@attack(
    "M4", "`PWD`, and a password of 5,000 characters", "the folder is shown, the password is not"
)
def test_a_folder_in_the_environment_is_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PWD` is the working folder, and messages name it."""
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("LONG_PASSWORD", "x" * 5000)
    learn_environment()
    assert redact(f"looked for in {tmp_path}") == f"looked for in {tmp_path}"
    assert "xxx" not in redact("x" * 5000)
