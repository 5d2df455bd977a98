#!/bin/sh
set -e
find photos -type f \( -name '*.jpeg' -o -name '*.JPG' \) | while IFS= read -r f; do mv "$f" "${f%.*}.jpg"; done
