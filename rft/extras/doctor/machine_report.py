"""One JSON file of a machine and what was proven on it, to be shared: no secret, no name of a host or
person.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rft import __version__, secrets
from rft.extras.doctor.check_line import Line

FORMAT = 1


def content(device: str, findings: Sequence[dict[str, Any]], lines: Sequence[Line]) -> str:
    """Return the text of the file; `findings` as of `rft doctor --json`."""
    proven = sum(line.state == "ok" for line in lines)
    page = {
        "format": FORMAT,
        "rft": __version__,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "summary": f"{proven} of {len(lines)} proven on this machine",
        "machine": list(findings),
        "checks": [msgspec.to_builtins(line) for line in lines],
    }
    text = secrets.redact(json.dumps(page, indent=1))
    return text.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~") + "\n"


def write(
    path: Path, device: str, findings: Sequence[dict[str, Any]], lines: Sequence[Line]
) -> None:
    """Write the file and print its summary."""
    text = content(device, findings, lines)
    path.write_text(text, encoding="utf-8")
    print(f"{json.loads(text)['summary']}; written to {path}")
