#!/bin/sh
set -e
cat logs/*.log | awk '$2 == "ERROR"' | wc -l > answer.txt
