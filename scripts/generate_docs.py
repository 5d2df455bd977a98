"""Writes the pages that are made from the code: docs/reference/configuration.md and docs/reference/config.schema.json.

python scripts/generate_docs.py            writes them
python scripts/generate_docs.py --check    exit code 1 if they differ from what is there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rft.config.reference import json_schema, markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/configuration.md": markdown,
    "docs/reference/config.schema.json": lambda: json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n",
}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'differs; run python scripts/generate_docs.py' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
