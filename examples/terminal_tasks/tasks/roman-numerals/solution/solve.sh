#!/bin/sh
set -e
cat > roman.py <<'E'
import sys

SIGNS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")]
SIGNS += [(50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def roman(number):
    out = ""
    for value, sign in SIGNS:
        out += sign * (number // value)
        number %= value
    return out


NUMBERS = {roman(n): str(n) for n in range(1, 4000)}
ROMANS = {number: sign for sign, number in NUMBERS.items()}
for word in sys.argv[1:]:
    print(NUMBERS.get(word) or ROMANS.get(word) or "?")
E
