#!/bin/sh
set -e
tr -cs 'A-Za-z' '\n' < story.txt | tr A-Z a-z | grep . | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 4 | awk '{print $2, $1}' > top.txt
