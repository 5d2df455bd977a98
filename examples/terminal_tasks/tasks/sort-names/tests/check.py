from judge import text

assert text("sorted.txt").splitlines() == ['Ada', 'Ben', 'Cleo', 'Ivo', 'Mia', 'Zoe', 'mia', 'zoe']
