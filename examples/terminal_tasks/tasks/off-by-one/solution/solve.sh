#!/bin/sh
set -e
cat > pages.py <<'E'
def count(items, size):
    return -(-len(items) // size)


def page(items, size, number):
    start = (number - 1) * size
    return items[start : start + size]
E
