"""Models for playing one task by hand: `rft debug`.  One process, no Ray, no trainer; weights stay
as they are.

Knows a Plan and starts what it is asked for, auxiliary models only when they are first called.
Invariant: everything that was started is closed with `Models.close`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from rft.config.plan import Plan
from rft.engine.built_in import make
from rft.engine.environment import cpu_environment
from rft.engine.scripted import END, FIXED, conversation
from rft.engine.settings import AuxiliarySettings, EngineSettings, ExternalSettings
from rft.errors import ConfigError
from rft.launch import leftovers, parts
from rft.testing.fakes import ScriptedModel
from rft.types.completion import Completion, VersionSpan
from rft.types.ports import ChatModel, Engine, GenerateRequest, ScoreRow

log = logging.getLogger(__name__)
Tell = Callable[[str], None]


def policy_settings(plan: Plan, engine_type: str) -> EngineSettings:
    """The plan's first engine as one of type transformers or vllm, which serves the weights of its
    model.
    """
    return dataclasses.replace(
        plan.engines[0], engine_type=engine_type, name="policy", fixed_weights=True, lora_rank=None
    )


def server_settings(model_name: str, base_url: str | None) -> EngineSettings:
    """A server as the policy; its key is in OPENAI_API_KEY."""
    external = ExternalSettings(model_name=model_name, base_url=base_url)
    return EngineSettings(
        engine_type="external", name="policy", fixed_weights=True, external=external
    )


class Models:
    """The policy and the auxiliary models of one session; belongs to one event loop."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan = plan
        self._tell = tell
        self._started = AsyncExitStack()

    async def policy(self, settings: EngineSettings) -> ChatModel:
        """A started engine, with the adapter that a run begins with; one behind a server is given
        tokens (the bytes of its texts), without which nothing could be recorded.
        """
        if (
            (lora := self._plan.learner.lora) is not None
            and lora.path is not None
            and settings.external is None
        ):
            from rft.trainer.hf_folder import assemble_first

            folder = Path(self._started.enter_context(TemporaryDirectory(prefix="rft-debug-")))
            await asyncio.to_thread(assemble_first, self._plan.learner, Path(lora.path), folder)
            settings = dataclasses.replace(settings, model_path=str(folder))
        started = await self._start(settings)
        return TextModel(started) if settings.external is not None else started

    def auxiliary(self, replaced: Mapping[str, ChatModel]) -> dict[str, ChatModel]:
        """All models beside the policy by name; those in `replaced` are given, any other is started
        at its first call.
        """
        found: dict[str, ChatModel] = {}
        for settings in self._plan.auxiliary:
            lazy = LazyModel(settings, self._start)
            found |= dict.fromkeys(settings.names, lazy)
        if unknown := [n for n in replaced if n not in found]:
            raise ConfigError(
                f"explorer.auxiliary_models has {', '.join(found) or 'no model'}",
                key="--judge",
                given=", ".join(unknown),
            )
        return {**found, **replaced}

    async def _start(self, settings: EngineSettings) -> Engine:
        where = settings.model_path
        if settings.external is not None:
            where = (
                f"{settings.external.model_name} at "
                f"{settings.external.base_url or '$' + settings.external.base_url_env}"
            )
        self._tell(f"{settings.name}: {settings.engine_type} {where}")
        engine = await make(settings)
        self._started.push_async_callback(engine.close)
        return engine

    async def close(self) -> None:
        await self._started.aclose()


def in_vllms_environment(settings: EngineSettings, command: Sequence[str]) -> int:
    """Runs `command` with the variables that vLLM reads when its process starts, and removes what
    its processes leave; the exit code.
    """
    run_id = uuid.uuid4().hex[:12]
    env = {**os.environ, **cpu_environment(settings), leftovers.RUN_ID: run_id}
    try:
        return subprocess.run(command, env=env, check=False).returncode
    finally:
        for line in leftovers.clean(run_id):
            log.info("%s", line)


class LazyModel:
    """An auxiliary model that is started by its first call."""

    def __init__(self, settings: AuxiliarySettings, start: Any) -> None:
        self._settings = settings
        self._start = start
        self._engine: asyncio.Future[Engine] | None = None
        self.identity = parts.identity(settings)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await (await self._there()).generate(request)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        return await (await self._there()).logprobs(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await (await self._there()).classify(messages)

    async def _there(self) -> Engine:
        if self._engine is None:
            self._engine = asyncio.ensure_future(self._start(self._settings.engines[0]))
        return await asyncio.shield(self._engine)


class TextModel:
    """A model that gives texts alone, as one that gives tokens: their bytes, with log-probs of 0."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        prompt = conversation(request)
        answers = await self._model.generate(request)
        return [self._with_tokens(c, prompt) for c in answers]

    def _with_tokens(self, c: Completion, prompt: np.ndarray) -> Completion:
        tokens = np.array([*c.text.encode(), END], np.int32)
        return msgspec.structs.replace(
            c,
            prompt_tokens=prompt,
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            version_spans=(VersionSpan(FIXED, 0, len(tokens)),),
        )

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        return await self._model.logprobs(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await self._model.classify(messages)


def scripted(texts: Sequence[str], gold: Any, runs: int) -> ScriptedModel:
    """Says `texts` in each run, the last one for ever; where there are none the gold answer;
    without one the last message again.
    """
    if texts:
        return ScriptedModel(per_run=[texts] * runs, answer=lambda _: texts[-1])
    if isinstance(gold, str | int | float):
        return ScriptedModel(answer=lambda _: str(gold))
    return ScriptedModel(answer=lambda messages: str(messages[-1]["content"]))
