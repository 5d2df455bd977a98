#!/bin/sh
# Judges /app.  What a program of the agent has left running ends before the reward is written.
python3 -E -s -B /tests/check.py
code=$?
python3 -E -s -B /tests/judge.py || kill -9 -1 2>/dev/null
if [ "$code" = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
