#!/bin/sh
set -e
cat > order.py <<'E'
import sys

needs = {}
for line in open(sys.argv[1]):
    part, _, rest = line.partition(":")
    if part.strip():
        needs.setdefault(part.strip(), set()).update(rest.split())
for part in [p for needed in needs.values() for p in needed]:
    needs.setdefault(part, set())
order = []
while len(order) < len(needs):
    ready = [p for p in needs if p not in order and needs[p] <= set(order)]
    if not ready:
        sys.exit(print("circle"))
    order.append(min(ready))
print("\n".join(order))
E
