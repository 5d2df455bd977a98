"""The worker process of scoring functions that the `prime` manager calls; a function that hangs is
killed with it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.worker.process import serve


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Gives the function that answers {file or module, name, given} with {value, parts}."""
    from rft.plugins import import_file
    from rft.reward.base import to_score
    from rft.worker.threads import guarded

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        home = (
            import_file(Path(request["file"]))
            if request["file"]
            else importlib.import_module(request["module"])
        )
        result = getattr(home, request["name"])(**request["given"])
        if inspect.isawaitable(result):
            result = asyncio.run(guarded(result, "the reward"))
        score = to_score(result, request["name"])
        return {"value": score.value, "parts": score.parts}

    return answer


if __name__ == "__main__":
    serve(load)
