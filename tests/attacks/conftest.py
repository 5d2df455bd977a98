"""Sandboxes of every level, for the tests of programs."""

import importlib.util

if importlib.util.find_spec("rft.extras.sandbox") is not None:
    from tests.extras.sandbox.sandboxes import anybodys_python as anybodys_python
    from tests.extras.sandbox.sandboxes import server as server
    from tests.extras.sandbox.sandboxes import strongest as strongest
