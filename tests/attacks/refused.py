"""What every bad file must end with: one line that names it, exit code 2 or 3, no traceback, soon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.command import Done, rft

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"
TASKSET = "buffer.explorer_input.taskset"
# what is bounded takes tenths; what is not would take minutes, or memory without end
COMPUTING_S = 10.0


def check(config: Path | str, model: Path | str, *overrides: Any) -> Done:
    return rft(
        "check",
        "-c",
        config,
        f"model.model_path={model}",
        "checkpoint_root_dir=/nowhere",
        *overrides,
    )


def assert_refused(done: Done, *says: str) -> None:
    assert done.code in (2, 3), done.output
    assert "Traceback" not in done.output and "bug in rft" not in done.output
    lines = [line for line in done.output.splitlines() if line.startswith(("error", "SetupError"))]
    assert len(lines) == 1, done.output
    for text in says:
        assert text in lines[0], done.output
    assert done.cpu_s < COMPUTING_S
