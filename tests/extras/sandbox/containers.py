"""An image with this machine's Python for tests of containers, made without a registry."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rft.extras.sandbox.container import COMMAND

FROM = "docker.io/library/python:3.12-slim"  # what the shipped tasks begin with
NAME = "rft-test-python:4"
PODMAN = (
    # what works inside containers and old kernels too
    "podman --storage-driver=vfs --cgroup-manager=cgroupfs --runtime runc"
)
REQUIRED = "RFT_REQUIRE_CONTAINERS"  # in the environment where containers must not be skipped
# programs of this machine beside Python, for tasks in a shell
_PROGRAMS = """
bash sh cat ls cp mv rm mkdir rmdir ln chmod chown touch head tail cut sort uniq wc tr tee env id sleep date dirname basename
readlink realpath stat seq printf echo test true false kill expr mktemp nl paste join comm split od sha256sum md5sum base64
install du df find xargs grep egrep fgrep sed awk gawk mawk diff cmp tar gzip gunzip zcat make yes
""".split()
_ETC = {
    "passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
}
_LEFT_OUT = {
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "dist-packages",
    "site-packages",
}


def command(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """How containers are started here; skips without Podman."""
    if not os.environ.get(COMMAND):
        if shutil.which("podman") is None:
            assert not os.environ.get(REQUIRED), "Podman must be installed here"
            pytest.skip("Podman is not installed")
        monkeypatch.setenv(COMMAND, PODMAN)
    return tuple(os.environ[COMMAND].split())


def image(started: tuple[str, ...], folder: Path) -> str:
    """Name of the image, which is made where it is not there yet."""
    if subprocess.run(
        [*started, "image", "inspect", NAME], capture_output=True, check=False
    ).returncode:
        archive = folder / "image.tar"
        _pack(archive)
        done = subprocess.run(
            [*started, "import", str(archive), NAME], capture_output=True, text=True, check=False
        )
        if done.returncode:
            assert not os.environ.get(REQUIRED), done.stderr
            pytest.skip(f"this account has no containers: {done.stderr.strip()[-200:]}")
    return NAME


@contextmanager
def built_images(started: tuple[str, ...], folder: Path) -> Iterator[None]:
    """The image stands for that of the shipped tasks; images that are built meanwhile are removed.

    One process at a time: removing an image ends its containers, also those of others.
    """
    with (Path(tempfile.gettempdir()) / "rft-test-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([*started, "tag", image(started, folder), FROM], check=True)
        before = _tasks(started)
        try:
            yield
        finally:
            if made := _tasks(started) - before:
                subprocess.run([*started, "rmi", "--force", *made], check=True, capture_output=True)


def _tasks(started: tuple[str, ...]) -> set[str]:
    line = [*started, "images", "--format", "{{.Repository}}:{{.Tag}}", "localhost/rft-task"]
    return set(subprocess.run(line, check=True, capture_output=True, text=True).stdout.split())


def _pack(archive: Path) -> None:
    python = Path(shutil.which("python3", path="/usr/bin") or sys.executable).resolve()
    version = re.fullmatch(r"python(3\.\d+)", python.name)
    assert version, f"{python} is no system Python"
    programs = {
        name: Path(found).resolve()
        for name in _PROGRAMS
        if (found := shutil.which(name, path="/usr/bin:/bin"))
    }
    told = subprocess.run(
        ["ldd", str(python), *map(str, programs.values())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    with tarfile.open(archive, "w") as made:
        made.add(python, "usr/bin/python3")
        for name, program in programs.items():
            made.add(program, f"usr/bin/{name}")
        for name in ("bin", "sbin"):
            made.addfile(_link(name, "usr/bin"))
        for library in sorted(set(re.findall(r"/\S+\.so\S*", told))):
            made.add(Path(library).resolve(), library.lstrip("/"))
        made.add(
            python.parents[1] / "lib" / f"python{version[1]}",
            f"usr/lib/python{version[1]}",
            filter=_kept,
        )
        for name in ("tmp", "proc", "dev", "sys", "etc"):
            made.addfile(_folder(name), io.BytesIO())
        for name, text in _ETC.items():
            entry = tarfile.TarInfo(f"etc/{name}")
            entry.size = len(text)
            made.addfile(entry, io.BytesIO(text.encode()))


def _link(name: str, target: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = tarfile.SYMTYPE
    made.linkname = target
    return made


def _folder(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = tarfile.DIRTYPE
    made.mode = 0o1777 if name == "tmp" else 0o755
    return made


def _kept(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT & set(Path(file.name).parts) or "config-" in file.name else file
