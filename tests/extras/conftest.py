"""What whole runs of extras share with those of the core."""

from tests.integration.conftest import environment as environment
from tests.integration.conftest import launch as launch
