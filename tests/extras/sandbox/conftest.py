"""Sandboxes of every level, for the tests of programs."""

from tests.extras.sandbox.sandboxes import anybodys_python as anybodys_python
from tests.extras.sandbox.sandboxes import server as server
