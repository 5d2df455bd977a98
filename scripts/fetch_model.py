"""Download and convert the quickstart's model; prints its folder.  `RFT_CACHE` says where it is
kept.
"""

from __future__ import annotations

import sys

from rft.errors import SetupError
from rft.testing.models import smollm2

if __name__ == "__main__":
    try:
        print(smollm2())
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
