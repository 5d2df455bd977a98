#!/bin/sh
set -e
tr A-Z a-z < mail.txt | sed 's/^ *//; s/ *$//' | grep -E '^[^@]+@[^@]+$' | awk '!seen[$0]++' > clean.txt
