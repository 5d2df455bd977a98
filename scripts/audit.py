"""Audit a run's buffer by its files alone: `python scripts/audit.py RUN_DIR [--json]`.  Exit 0 when
it balances, 4 when not.
"""

from __future__ import annotations

import argparse
import sys

from rft.buffer.audit import as_json, audit_run
from rft.errors import RftError


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Was every acknowledged experience kept, and none trained twice?"
    )
    parser.add_argument("run_dir", help="folder of a run, with buffer/ and checkpoints/ in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-payload", action="store_true", help="do not read the experiences themselves back"
    )
    args = parser.parse_args()
    try:
        audit = audit_run(args.run_dir, payload=not args.no_payload)
    except RftError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return e.exit_code
    if args.json:
        print(as_json(audit))
    else:
        explained = ", ".join(f"{n} {reason}" for reason, n in audit.discarded.items()) or "none"
        print(
            f"checkpoint {audit.version or '(none)'}, {audit.manifests} manifests compared, "
            f"{audit.num_uses} uses counted"
        )
        where = (
            f"used {audit.used} + leased {audit.leased} + available {audit.available} + "
            f"explained ({explained})"
        )
        print(f"acked {audit.acked} = {where}")
        print(f"trained more often than allowed: {audit.used_twice}")
        print("\n".join(audit.problems) or "no problems")
    return 0 if audit.ok else 4


if __name__ == "__main__":
    sys.exit(main())
