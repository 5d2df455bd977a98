from judge import text

assert text("answer.txt").strip() == "lantern"
