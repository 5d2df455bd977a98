import os

from judge import run

import tempfile

cases = {
    "3 4 + .": "7", "7 2 - . 7 2 / . -7 2 / .": "5 3 -4", "1 2 < . 2 2 = . 3 2 < .": "1 1 0",
    "5 [ dup . 1 - ] .": "5 4 3 2 1 0", "0 [ 9 . ] .": "0", ": square dup * ; 7 square .": "49",
    "3 [ dup [ dup . 1 - ] drop 1 - ] .": "3 2 1 2 1 1 0", "1 2 swap . .": "1 2",
    ": down dup . 1 - dup [ down 0 ] drop ; 3 down drop": "3 2 1", "1 +": "error", "1 . nonsense": "1 error",
    "1 0 /": "error", "1 [ 2": "error",
}
for program, want in cases.items():
    with tempfile.NamedTemporaryFile("w") as file:
        os.chmod(file.name, 0o644)
        file.write(program)
        file.flush()
        assert run("python3", "machine.py", file.name).split() == want.split(), program
