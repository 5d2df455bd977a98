from judge import text

assert text("answer.txt").split() == ["34"]
