#!/bin/sh
set -e
awk '$2 == "failed" {
  n = ++count[$3]; at[$3, n] = $1
  if (n >= 4 && at[$3, n - 3] > $1 - 60 && !($3 in first)) first[$3] = $1
} END { for (a in first) print a, first[a] }' logins.txt | sort > attacks.txt
