import json

from judge import text

assert json.loads(text("config.json")) == {
    "name": "north", "ports": [8080, 8081], "debug": False,
    "limits": {"cpu": 2, "memory": "4G"}, "path": "C:\\data",
}
