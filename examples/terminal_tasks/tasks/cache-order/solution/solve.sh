#!/bin/sh
set -e
cat > cache.py <<'E'
from collections import OrderedDict


class Cache:
    def __init__(self, size):
        self.size = size
        self.entries = OrderedDict()

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key, value):
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self.size:
            self.entries.popitem(last=False)
E
