from judge import text

import csv
import io

rows = list(csv.reader(io.StringIO(text("people.csv"))))
assert rows == [["name", "city", "age"], ["Ada", "Rome, IT", "36"], ['Bo "B" Li', "", "4"], ["Cy", "Oslo", ""]], rows
