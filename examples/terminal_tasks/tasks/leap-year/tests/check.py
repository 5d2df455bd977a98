import json

from judge import python, text

import datetime

dates = [(1, 1, 1), (4, 3, 1), (100, 2, 28), (100, 3, 1), (1900, 3, 1), (2000, 2, 29), (2000, 3, 1), (2024, 12, 31), (2100, 12, 31)]
want = [datetime.date(*d).toordinal() for d in dates]
assert "import" not in text("days.py")
assert json.loads(python(f"import days; print([days.day(*d) for d in {dates}])")) == want
