#!/bin/sh
set -e
cp word.txt answer.txt
