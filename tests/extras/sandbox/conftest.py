"""Sandboxes of every level, for the tests of programs."""

from tests.helpers.sandboxes import anybodys_python as anybodys_python
from tests.helpers.sandboxes import server as server
