#!/bin/sh
set -e
for f in log?.txt; do sed "s/^/$f /" $f; done | sort -k2,2 > all.txt
