"""A scripted engine whose answers have tool calls, for agents that are not rft's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.types.completion import Completion
from rft.types.ports import GenerateRequest

Called = tuple[str, dict[str, Any]]
# the text of an answer, and the tool that it calls with what arguments
Decide = Callable[[GenerateRequest], tuple[str, Called | None]]


class CallingEngine(ScriptedEngine):
    """Answers as `decide` says, with at most one call."""

    def __init__(self, decide: Decide) -> None:
        settings = EngineSettings(  # its tokens are bytes
            engine_type="scripted", name="scripted-0", max_model_len=1 << 20
        )
        super().__init__(settings=settings)
        self._decide = decide

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        text, called = self._decide(request)
        calls: tuple[dict[str, Any], ...] = ()
        if called is not None:
            name, arguments = called
            assert name in [tool["function"]["name"] for tool in request.tools]
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls = ({"id": f"call{len(self.calls):05}", "type": "function", "function": function},)
        self.will_say(text + json.dumps([call["function"] for call in calls]))
        (answer,) = await super().generate(request)
        return [msgspec.structs.replace(answer, text=text, tool_calls=calls)]
