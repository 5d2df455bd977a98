from judge import python

code = """
from cache import Cache
c = Cache(2)
c.put("a", 1); c.put("b", 2); c.get("b"); c.put("c", 3)
print(c.get("a"), c.get("b"), c.get("c"))
c.put("a", 4); c.put("d", 5)
print(c.get("b"), c.get("c", "none"), c.get("d"))
c = Cache(2); c.put("a", None); c.put("b", 2); c.put("b", 3); print(c.get("a", "gone"), c.get("b"))
c = Cache(5000)
for i in range(50000): c.put(i, i); c.get(i // 2)
print("quick")
"""
assert python(code) == "None 2 3\nNone none 5\nNone 3\nquick\n"
