import os

from judge import run

import tempfile

os.umask(0)
with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o777)
    for name in ("from here/a b.txt", "from here/c d/e.txt", "from here/c d/f.md", "none/x.md"):
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(name)
    assert run("sh", "/app/backup.sh", f"{folder}/from here", f"{folder}/to there").split() == ["2"]
    found = sorted(os.path.relpath(os.path.join(d, n), folder) for d, _, ns in os.walk(f"{folder}/to there") for n in ns)
    assert found == ["to there/a b.txt", "to there/c d/e.txt"], found
    assert run("sh", "/app/backup.sh", f"{folder}/none", f"{folder}/nowhere").split() == ["0"]
