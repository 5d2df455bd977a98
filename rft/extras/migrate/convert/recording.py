"""Runs a shell script by bash in a sandbox and records the commands that it would start, each with
its words and environment.

Depends on nothing of veRL but the pattern that names its programs.  Invariant: no command but bash
and tools for texts is run, and these reach neither network nor files; where the machine offers no
such isolation, ConfigError says why and what to do instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rft.config import yamlfile
from rft.errors import ConfigError
from rft.extras.migrate.convert.programs import Program
from rft.extras.sandbox import jobs
from rft.extras.sandbox.code_sandbox import DEFAULT, open_server
from rft.extras.sandbox.processes import ProgramLimits, SandboxError, SandboxUnavailable

ROOT = "\ue002"  # the sandbox's folder, in texts
# set on every machine: never taken as unset, and never one value
FIXED = ("HOME", "USER", "LOGNAME", "HOSTNAME", "PWD")
# bash's own, which differ from run to run
RANDOM = frozenset("RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME".split())
# of the sandbox's own bash, under names that a script may leave unset
_OWN = re.compile(r"\$\{(UID|EUID|PPID|BASHPID)\}|\$(UID|EUID|PPID|BASHPID)\b|\$(\$)")
OWN = {f"OWN_{name}": f"${name}" for name in ("UID", "EUID", "PPID", "BASHPID")} | {"OWN_PID": "$$"}
SANDBOX_VARIABLES = {
    *FIXED,
    "PATH",
    "SHELL",
    "LC_ALL",
    "TMPDIR",
    "BASH_ENV",
    "SHLVL",
    "OLDPWD",
    "_",
}
RUN_S = 8.0
BUDGET_S = 20.0
MOST_RECORDS = 150
FOLDERS = ("/bin", "/usr/bin", "/etc/alternatives")
_FILE_TEST = re.compile(r"(\[\[? |\btest )(! )?(-[defrswx] )")
_PRELUDE = Path(__file__).with_name("recorded.bash")
_PROGRAM = Path(__file__).with_name("run_recorded.py")
_LIMITS = ProgramLimits(
    timeout_s=RUN_S + 12,
    memory_mb=512,
    output_kb=8192,
    file_mb=32,
    files=256,
    processes=128,
    programs=True,
)


def without_own(text: str) -> str:
    """The script with variables that bash sets itself under names of `OWN`."""
    return _OWN.sub(lambda m: f"${{OWN_{m[1] or m[2] or 'PID'}}}", text)


def marker(name: str) -> str:
    """A text that stands for the value of an environment variable, made so that a piece of it is
    noticed, and a path too.
    """
    return f"\ue000aB/._-{name}-_./\ue001"


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    line: int
    captured: bool  # what it prints may be read by the script
    environment: Mapping[str, str]
    names: frozenset[str]  # variables that are set


@dataclass(frozen=True)
class Recording:
    commands: tuple[Command, ...]
    errors: str  # what bash says
    ended: bool


@dataclass(frozen=True)
class Inputs:
    """What a script is run with.  `prints`: what commands print that are not run; `ignore_exit`:
    `exit` does nothing; `other_files`: where the script asks for a file or folder, the answer is
    the opposite; `other`: the program that a module of its own is taken as.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    prints: str = "1"
    date: str = "date"
    ignore_exit: bool = False
    other_files: bool = False
    other: Program | None = None


class Recorder:
    """One script, run as often as needed within BUDGET_S.  `programs`: a pattern of bash for what
    names one of veRL's programs.
    """

    def __init__(self, text: str, path: Path, programs: str) -> None:
        self.name = path.name
        self._text = text
        self._path = path
        self._programs = programs
        self._end = time.monotonic() + BUDGET_S

    def run(self, inputs: Inputs) -> Recording:
        if time.monotonic() > self._end:
            raise ConfigError(
                f"{self.name}: running it takes longer than {BUDGET_S:g} s; write the launch with "
                f"plain values"
            )
        sandbox = _sandbox()
        order = {
            "folder": sandbox.folder,
            "root": ROOT,
            "seconds": RUN_S,
            "most_records": MOST_RECORDS,
        } | self._order(inputs)
        try:
            ran = jobs.run(
                sandbox.server, _PROGRAM.read_text("utf-8"), json.dumps(order).encode(), _LIMITS
            )
        except SandboxError as e:
            raise ConfigError(f"{self.name}: the sandbox failed: {e}; {INSTEAD}") from e
        if ran.reason:
            raise ConfigError(
                f"{self.name}: the script cannot be run to its end ({ran.reason}: {ran.detail}); "
                f"{INSTEAD}"
            )
        answer = json.loads(ran.output)
        return Recording(
            tuple(map(_command, answer["records"])), _shown(answer["errors"]), answer["ended"]
        )

    def _order(self, inputs: Inputs) -> dict[str, object]:
        script = f"{ROOT}/machine{self._path.absolute()}"
        text = (
            _FILE_TEST.sub(lambda m: f"{m[1]}{'' if m[2] else '! '}{m[3]}", self._text)
            if inputs.other_files
            else self._text
        )
        home = f"{ROOT}/{marker('HOME')}"
        here = f"{ROOT}/{marker('PWD')}"
        environment = {
            **{name: marker(name) for name in FIXED},
            **{
                f"RFT_{name}" if name in RANDOM else name: value
                for name, value in inputs.variables.items()
            },
            "HOME": inputs.variables.get("HOME", home),
            "PWD": here,
            "PATH": f"{ROOT}/bin",
            "SHELL": "/bin/bash",
            "LC_ALL": "C.UTF-8",
            "TMPDIR": f"{ROOT}",
            "BASH_ENV": f"{ROOT}/recorded.bash",
            "RFT_RECORDS": f"{ROOT}/records",
            "RFT_ROOT": f"{ROOT}/machine",
            "RFT_PROGRAMS": self._programs,
            "RFT_PRINTS": inputs.prints,
            "RFT_DATE": inputs.date,
            **({"RFT_IGNORE_EXIT": "1"} if inputs.ignore_exit else {}),
        }
        scripts = {
            f"{ROOT}/machine{p.absolute()}": p.read_text("utf-8", "replace") for p in self._beside()
        }
        return {
            "files": {
                f"{ROOT}/recorded.bash": _PRELUDE.read_text("utf-8"),
                **scripts,
                script: text,
            },
            "directories": [here, home],
            "command": ["bash", script, *inputs.arguments],
            "environment": environment,
        }

    def _beside(self) -> list[Path]:
        """Scripts in the same folder that this one names."""
        scripts = self._path.absolute().parent.glob("*.sh")
        return [
            p
            for p in scripts
            if p.name in self._text and p.is_file() and p.stat().st_size <= yamlfile.MAX_BYTES
        ]


INSTEAD = (
    "give the launch itself, with the values in it: rft convert verl -- python3 -m "
    "verl.trainer.main_ppo KEY=VALUE ..., or veRL's "
    "resolved configuration as a YAML file"
)


class _ScriptSandbox:
    """The process that scripts are run from, and the folder that they write in."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rft-convert-")
        Path(self._folder.name).chmod(0o777)  # scripts run under another account
        try:
            self.server = open_server(
                DEFAULT, sys.executable, folders=FOLDERS, writable=self._folder.name
            )
        except SandboxUnavailable as e:
            self._folder.cleanup()
            raise ConfigError(
                f"a launch script is run by bash in a sandbox; {e}.  Or {INSTEAD}"
            ) from None
        self.folder = "/tmp" if self.server.level == "namespaces" else self._folder.name

    def close(self) -> None:
        self.server.close()
        self._folder.cleanup()


_sandbox = functools.cache(_ScriptSandbox)


@atexit.register
def close() -> None:
    """Ends the process that scripts are run from.  The next script starts another."""
    if _sandbox.cache_info().currsize:
        _sandbox().close()
        _sandbox.cache_clear()


def _command(record: str) -> Command:
    line, depth, count, *rest = _shown(record).split("\0")
    words = rest[: int(count)]
    after = rest[int(count) :]
    environment = dict(entry.split("=", 1) for entry in after[: after.index("")] if "=" in entry)
    return Command(
        tuple(words), int(line or 1), int(depth) > 0, environment, frozenset(after[-1].split())
    )


def _shown(text: str) -> str:
    """Without what the sandbox adds to paths."""
    for name in ("HOME", "PWD"):
        text = text.replace(f"{ROOT}/{marker(name)}", marker(name))
    return text.replace(f"{ROOT}/machine", "")
