"""Print the files that name a key of the configuration: section, use, tests, pages.

`python scripts/key_homes.py KEY...`, e.g. synchronizer.sync_offset.  The goal for a new key is three
files: its section, its use and its test.  Generated pages are counted apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("docs/reference/", "docs/measured/")


def homes(key: str) -> dict[str, list[str]]:
    """Return the files that name the last part of `key`, by their role."""
    name = key.rpartition(".")[2].removesuffix("[]")
    grep = ["git", "grep", "-lw", name, "--", "*.py", "*.md", "*.yaml", "*.json"]
    listing = subprocess.run(grep, cwd=ROOT, capture_output=True, text=True, check=False)
    roles: dict[str, list[str]] = {}
    for file in listing.stdout.split():
        roles.setdefault(_role(file, name), []).append(file)
    return roles


def _role(file: str, name: str) -> str:
    if file.startswith(GENERATED):
        return "generated"
    if file.startswith("tests/"):
        return "tests"
    if file.startswith("docs/") or not file.startswith("rft/"):
        return "pages, scripts and examples"
    text = (ROOT / file).read_text(encoding="utf-8")
    if re.search(
        rf"^    {name}: .*(?:\n.*)?= (?:\(\s*)?(?:key|safe_key|section|_\w+)\b", text, re.M
    ):
        return "section"
    return "extras" if file.startswith("rft/extras/") else "use"


def main(keys: list[str]) -> int:
    roles = ("section", "use", "tests", "extras", "pages, scripts and examples", "generated")
    print(f"| Key | {' | '.join(roles)} |\n|{'---|' * (len(roles) + 1)}")
    for key in keys:
        files = homes(key)
        cells = [_cell(files.get(role, []), role) for role in roles]
        print(f"| `{key}` | {' | '.join(cells)} |")
    return 0


def _cell(files: list[str], role: str) -> str:
    if role in ("section", "use"):
        return ", ".join(file.removeprefix("rft/") for file in files) or "none"
    return str(len(files))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
