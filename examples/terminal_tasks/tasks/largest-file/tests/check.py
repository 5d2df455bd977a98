from judge import text

assert text("answer.txt").strip().removeprefix("./") == "data/deep/er/c.txt"
