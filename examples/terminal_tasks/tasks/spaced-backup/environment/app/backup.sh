#!/bin/sh
n=0
for f in $(find $1 -name *.txt); do
  mkdir -p $2/$(dirname ${f#$1/})
  cp $f $2/${f#$1/}
  n=$((n+1))
done
echo $n
