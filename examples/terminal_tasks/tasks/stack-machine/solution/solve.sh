#!/bin/sh
set -e
cat > machine.py <<'E'
import sys

words = {}
stack = []
BINARY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
BINARY |= {"/": lambda a, b: a // b, "=": lambda a, b: int(a == b), "<": lambda a, b: int(a < b)}


def run(code):
    at = 0
    while at < len(code):
        word = code[at]
        at += 1
        if word in words:
            run(words[word])
        elif word in BINARY:
            b, a = stack.pop(), stack.pop()
            stack.append(BINARY[word](a, b))
        elif word == "dup":
            stack.append(stack[-1])
        elif word == "swap":
            stack[-1], stack[-2] = stack[-2], stack[-1]
        elif word == "drop":
            stack.pop()
        elif word == ".":
            print(stack.pop())
        elif word == ":":
            end = code.index(";", at)
            words[code[at]] = code[at + 1 : end]
            at = end + 1
        elif word == "[":
            end, depth = at, 1
            while depth:
                depth += {"[": 1, "]": -1}.get(code[end], 0)
                end += 1
            while stack[-1]:
                run(code[at : end - 1])
            at = end
        else:
            stack.append(int(word))


try:
    run(open(sys.argv[1]).read().split())
except (ValueError, IndexError, ZeroDivisionError, RecursionError):
    print("error")
E
