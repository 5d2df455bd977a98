#!/bin/sh
set -e
cat > config.json <<'E'
{"name": "north", "ports": [8080, 8081], "debug": false, "limits": {"cpu": 2, "memory": "4G"}, "path": "C:\\data"}
E
