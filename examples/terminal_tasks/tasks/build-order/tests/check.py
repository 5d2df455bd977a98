import os

from judge import run

import tempfile

cases = {
    "app: core web\nweb: core html\ncore: base\ntests: app\ndocs: html\n": "base core html docs web app tests",
    "b: a\n": "a b",
    "a: b\nb: c\nc: a\nd:\n": "circle",
    "x:\ny:\n": "x y",
    "a: a\n": "circle",
    "c:\nb: z\na: b\n": "c z b a",
}
for parts, want in cases.items():
    with tempfile.NamedTemporaryFile("w") as file:
        os.chmod(file.name, 0o644)
        file.write(parts)
        file.flush()
        assert run("python3", "order.py", file.name).split() == want.split(), parts
