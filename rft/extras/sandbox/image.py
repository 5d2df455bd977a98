"""Build images of tasks from a Dockerfile with the command line of Podman or Docker.

Invariant: the name is derived from the content, so an existing image is not built again.
"""

from __future__ import annotations

import hashlib
import json
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
    """Return the name of the image of `files`, texts by path including a Dockerfile, and build it
    if missing.  Raises SandboxError, SandboxUnavailable.
    """
    started = tuple(command or container_command())
    name = f"localhost/rft-task:{hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:32]}"
    with _BUILDING:
        if (
            subprocess.run(
                [*started, "image", "inspect", name], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return name
        with tempfile.TemporaryDirectory(prefix="rft-image-") as folder:
            for path, text in files.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")
            line = [*started, "build", "--quiet", "--tag", name, folder]
            try:
                done = subprocess.run(
                    line, capture_output=True, text=True, timeout=BUILD_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise SandboxError(f"the Dockerfile was not built within {BUILD_S:g} s") from None
    if done.returncode:
        raise SandboxError(
            f"the Dockerfile cannot be built (status {done.returncode}): "
            f"{done.stderr.strip()[-1000:]}"
        )
    return name
