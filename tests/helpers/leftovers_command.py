"""The leftover check in a shell.

    python -m tests.helpers.leftovers_command --before FILE; ...; python -m
    tests.helpers.leftovers_command --after FILE

Exit code 1: something is left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rft.launch.leftovers import Snapshot, clean, compare, snapshot


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.leftovers_command",
        description="Checks that nothing is left on the machine.",
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--before", type=Path, metavar="FILE", help="remember what is there")
    choice.add_argument(
        "--after",
        type=Path,
        metavar="FILE",
        help="say what came since and is still there; exit 1 if anything",
    )
    choice.add_argument("--clean", metavar="RUN_ID", help="remove what a dead run left")
    given = parser.parse_args(arguments)
    if given.before is not None:
        kept = {name: sorted(found) for name, found in asdict(snapshot()).items()}
        given.before.write_text(json.dumps(kept))
        return 0
    if given.clean is not None:
        print("\n".join(clean(given.clean)) or "nothing to clean")
        return 0
    began = time.monotonic()
    before = {name: frozenset(found) for name, found in json.loads(given.after.read_text()).items()}
    left = compare(Snapshot(**before))
    print(
        "\n".join(f"left over: {line}" for line in left)
        or f"nothing is left ({time.monotonic() - began:.1f} s)"
    )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
