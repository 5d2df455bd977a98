import json

from judge import python, text

lines = ['a,b', '', 'a,,', '"a,b",c', '"say ""hi""",x', '"",y', 'a "b" c,d']
want = [["a", "b"], [""], ["a", "", ""], ["a,b", "c"], ['say "hi"', "x"], ["", "y"], ['a "b" c', "d"]]
assert "csv" not in text("table.py")
assert json.loads(python(f"import json, table; print(json.dumps([table.fields(x) for x in {lines!r}]))")) == want
