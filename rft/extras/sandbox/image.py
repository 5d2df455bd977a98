"""Build images of tasks from a Dockerfile with the command line of Podman or Docker.

Invariant: the name is derived from the content, so an existing image is not built again.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rft.extras.sandbox.container import container_command
from rft.extras.sandbox.processes import SandboxError

BUILD_S = 1800.0
_BUILDING = threading.Lock()  # concurrent groups may request the same image


def built(files: Mapping[str, str], *, command: Sequence[str] | None = None) -> str:
    """Return the name of the image of `files`, texts by path including a Dockerfile; see
    `built_from`.
    """
    with tempfile.TemporaryDirectory(prefix="rft-image-") as folder:
        for path, text in files.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        return built_from(Path(folder), command=command)


def built_from(
    folder: Path, *, timeout_s: float = BUILD_S, command: Sequence[str] | None = None
) -> str:
    """Return the name of the image of a folder with a Dockerfile, and build it if missing.

    Raises SandboxError, SandboxUnavailable.
    """
    engine = tuple(command or container_command())
    name = f"localhost/rft-task:{_digest(folder)}"
    with _BUILDING:
        inspected = subprocess.run(
            [*engine, "image", "inspect", name], capture_output=True, check=False
        )
        if inspected.returncode == 0:
            return name
        try:
            done = subprocess.run(
                [*engine, "build", "--quiet", "--tag", name, str(folder)],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"the Dockerfile was not built within {timeout_s:g} s") from None
    if done.returncode:
        raise SandboxError(
            f"the Dockerfile cannot be built (status {done.returncode}): "
            f"{done.stderr.strip()[-1000:]}"
        )
    return name


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        mode = path.stat().st_mode & 0o111
        digest.update(f"{path.relative_to(folder)}\0{mode}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:32]
