#!/bin/sh
set -e
cat > table.py <<'E'
def fields(line):
    out, at = [], 0
    while True:
        word = ""
        if line[at : at + 1] == '"':
            at += 1
            while line[at] != '"' or line[at : at + 2] == '""':
                at += line[at : at + 2] == '""'
                word += line[at]
                at += 1
            at += 1
        else:
            while at < len(line) and line[at] != ",":
                word += line[at]
                at += 1
        out.append(word)
        if at >= len(line):
            return out
        at += 1
E
