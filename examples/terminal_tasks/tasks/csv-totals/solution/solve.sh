#!/bin/sh
set -e
cat > /tmp/t.py <<'E'
import csv, decimal
sums = {}
for row in csv.DictReader(open("sales.csv")):
    sums[row["customer"]] = sums.get(row["customer"], 0) + decimal.Decimal(row["amount"])
with open("totals.csv", "w") as out:
    print("customer,amount", file=out)
    for name, value in sorted(sums.items(), key=lambda item: -item[1]):
        print(f"{name},{value:.2f}", file=out)
E
python3 /tmp/t.py
