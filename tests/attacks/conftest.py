"""Sandboxes of every level, for the tests of programs."""

from tests.conftest import has_extra

if has_extra("sandbox"):
    from tests.extras.sandbox.sandboxes import anybodys_python as anybodys_python
    from tests.extras.sandbox.sandboxes import server as server
    from tests.extras.sandbox.sandboxes import strongest as strongest
