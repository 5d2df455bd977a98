"""Names that configurations of this family lead to and that are no key of the schema: command-line options, metrics, plugin arguments.

Only those that are not active yet stand here; `rft doctor --keys` lists them.  Invariant: what exists is not in it.
"""

from __future__ import annotations

LATER_OUTSIDE: dict[str, str] = {}
