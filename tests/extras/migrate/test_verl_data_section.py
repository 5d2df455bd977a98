"""veRL's data section: every key that it becomes is one of ours and active."""

from __future__ import annotations

import re

import pytest

from rft.config.schema.walk import field_at
from rft.extras.migrate.compat.keys.verl_keys import rows


@pytest.mark.parametrize(
    "target", sorted({t for row in rows() if row.section == 1 for t in row.targets})
)
def test_every_target_of_the_data_section_is_active(target):
    parts = tuple(re.sub(r"\[\w*\]", "", target).split("."))
    for n in range(1, len(parts) + 1):
        field = field_at(parts[:n])
        assert field is not None, ".".join(parts[:n])
