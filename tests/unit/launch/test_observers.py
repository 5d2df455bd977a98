"""enable_openai_api: the models of a run, served to people beside it."""

from __future__ import annotations

import json
import stat
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.explorer.settings import ApiSettings
from rft.launch.parts import _observers


async def test_models_are_served_while_the_run_goes_on(tmp_path: Path) -> None:
    apis = (ApiSettings(), ApiSettings(model="judge", key="sesame"))
    plan = SimpleNamespace(explorer=SimpleNamespace(apis=apis), run_dir=tmp_path)
    file = tmp_path / "openai_api.json"
    async with AsyncExitStack() as servers:
        await _observers(
            plan, ScriptedEngine("I act"), {"judge": ScriptedEngine("I judge")}, servers
        )  # type: ignore[arg-type]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        told = json.loads(file.read_text())
        assert told["judge"]["api_key"] == "sesame" and len(told["policy"]["api_key"]) > 40
        async with httpx.AsyncClient(timeout=20) as http:
            for name, said in (("policy", "I act"), ("judge", "I judge")):
                body = {"messages": [{"role": "user", "content": "who?"}]}
                key = {"Authorization": f"Bearer {told[name]['api_key']}"}
                got = await http.post(
                    f"{told[name]['base_url']}/chat/completions", json=body, headers=key
                )
                assert got.json()["choices"][0]["message"]["content"] == said
            other = {"Authorization": f"Bearer {told['judge']['api_key']}"}
            got = await http.get(f"{told['policy']['base_url']}/models", headers=other)
            assert got.status_code == 401
    assert not file.exists()
    async with httpx.AsyncClient(timeout=20) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{told['policy']['base_url']}/models")
