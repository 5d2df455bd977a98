from judge import run

values = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def roman(n):
    out = ""
    for value, sign in values:
        out, n = out + sign * (n // value), n % value
    return out


numbers = [1, 4, 9, 14, 40, 90, 400, 1987, 2026, 3999]
assert run("python3", "roman.py", *map(str, numbers)).split() == [roman(n) for n in numbers]
assert run("python3", "roman.py", *map(roman, numbers)).split() == [str(n) for n in numbers]
assert run("python3", "roman.py", "IIII", "IC", "0", "4000", "VX", "hello", "XII").split() == ["?"] * 6 + ["12"]
