"""The folder that vLLM's processes use for sockets and temporary files.  Imports no vLLM."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Sockets:
    """The folder of vLLM's sockets and temporary files, which vLLM does not remove.

    One per process, because vLLM reads its variables once.  The name holds the process id, so that
    `rft.launch.leftovers` finds the folder of a killed process.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._users = 0

    def open(self) -> None:
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=f"rft-vllm-{os.getpid()}-"))
            os.environ["VLLM_RPC_BASE_PATH"] = str(self._path)
        self._path.mkdir(mode=0o700, exist_ok=True)
        self._users += 1

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Point TMPDIR at the folder; compiled code stays where other engines find it."""
        assert self._path is not None, "it is open"
        before = os.environ.get("TMPDIR")
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        )
        os.environ["TMPDIR"] = str(self._path)
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before

    def close(self) -> None:
        self._users -= 1
        if self._users == 0 and self._path is not None:
            shutil.rmtree(self._path)


SOCKETS = Sockets()
