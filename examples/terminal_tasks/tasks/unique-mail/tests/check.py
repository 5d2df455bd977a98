from judge import text

assert text("clean.txt").split("\n") == ["ada@example.org", "bob@example.org", "cy@example.org", ""]
