from judge import python

code = "import pages as p; x = list(range(10)); print([p.count(x[:n], 3) for n in (0, 1, 3, 4, 9, 10)], [p.page(x, 3, n) for n in (1, 2, 4, 5)])"
assert python(code) == "[0, 1, 1, 2, 3, 4] [[0, 1, 2], [3, 4, 5], [9], []]\n"
