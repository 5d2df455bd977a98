"""The page names the versions of command-line agents that are installed and tested."""

from __future__ import annotations

import json
import re

from tests.helpers.runs import ROOT

AGENTS = ROOT / "scripts" / "agents"


def test_versions_of_agents_are_those_installed() -> None:
    page = (ROOT / "docs" / "howto" / "agent.md").read_text()
    listed = re.findall(r"^\| .+ `\w+` \| ([\d.]+) \|", page, re.MULTILINE)
    npm = json.loads((AGENTS / "package.json").read_text())["dependencies"]
    pinned = re.findall(r"^mini-swe-agent==(.+)$", (AGENTS / "requirements.txt").read_text(), re.M)
    assert sorted(listed) == sorted([*npm.values(), *pinned])
