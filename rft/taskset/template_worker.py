"""Chat templates in a process of limited memory, which is killed at a deadline:
`python -m rft.taskset.template_worker`.

A template comes from a model's folder or a data set, and one call of a filter can take any memory
and time.  Depends on Jinja's sandbox, used as transformers does.  Invariant: no template runs in
the process that asks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from rft.errors import ConfigError
from rft.taskset.parallel import CODEC
from rft.types import modelfiles
from rft.worker.job_pool import WorkerPool
from rft.worker.process import WorkerDied, WorkerError, serve

RENDER_S = 10.0
MEMORY_MB = 512
MAX_TEXT = 32 << 20  # characters of a rendered chat
_POOL = WorkerPool("templates", "rft.taskset.template_worker", memo=False, codec=CODEC)


def render(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    names: dict[str, Any],
    beginnings: Sequence[tuple[int, bool]],
    *,
    today: datetime | None = None,
    key: str,
) -> list[str]:
    """Return beginnings of a chat as the template `source` writes them, each given as its number of
    messages and whether the start of an answer follows; `today`: the date that it reads.

    Raises ConfigError naming `key` for a template that fails, takes more than MEMORY_MB, or does
    not end within RENDER_S.
    """
    try:
        date = None if today is None else today.isoformat()
        request = CODEC.pack((source, messages, tools, names, beginnings, date))
        answer = _POOL.ask(request, RENDER_S)
    except TimeoutError:
        raise ConfigError(
            f"the chat template did not finish these messages within {RENDER_S:g} s", key=key
        ) from None
    except OverflowError as e:
        raise ConfigError(f"a chat holds a number that no template reads: {e}", key=key) from None
    except (WorkerDied, WorkerError) as e:
        raise ConfigError(f"the chat template ended its process: {e}", key=key) from None
    if "error" in answer:
        raise ConfigError(
            f"the chat template does not work on these messages: {answer['error']}", key=key
        )
    return [str(text) for text in answer["texts"]]


Request = tuple[str, list[Any], list[Any], dict[str, Any], list[tuple[int, bool]], str | None]


def _answer(request: Request) -> Any:
    source, messages, tools, names, beginnings, date = request
    clock = {} if date is None else {"strftime_now": datetime.fromisoformat(date).strftime}
    try:
        texts = [
            _compiled(source).render(
                messages=modelfiles.prepare_tool_calls(messages[:count], source),
                tools=tools or None,
                **{**clock, **names, "add_generation_prompt": opening},
            )
            for count, opening in beginnings
        ]
        if (size := sum(map(len, texts))) > MAX_TEXT:
            return {"error": f"it writes {size} characters; at most {MAX_TEXT} are allowed"}
        return {"texts": texts}
    except Exception as e:  # a template raises anything
        return {"error": f"{type(e).__name__}: {e}"}


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = (
        lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    )
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(modelfiles.without_generation_tag(source))


def _load() -> Any:
    _compiled("{{ 'loaded' }}")
    return _answer


if __name__ == "__main__":
    serve(_load, codec=CODEC, memory_mb=MEMORY_MB)
