from judge import text

assert text("top.txt").splitlines() == ["the 6", "river 3", "and 2", "hill 2"], text("top.txt")
