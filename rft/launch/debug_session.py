"""Models for `rft debug`, which runs one task.  One process, no Ray, no trainer, fixed weights.

Auxiliary models start at their first call.  Invariant: `Models.close` closes all started models.
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
from rft.engine.scripted import END, conversation
from rft.engine.settings import AuxiliarySettings, EngineSettings, ExternalModelConfig
from rft.errors import ConfigError
from rft.launch import leftovers, parts
from rft.testing.fakes import ScriptedModel
from rft.types.completion import Completion, TokenScores, VersionSpan
from rft.types.ids import FIXED
from rft.types.ports import ChatModel, Engine, GenerateRequest, ScoreRow

log = logging.getLogger(__name__)
Tell = Callable[[str], None]
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


def policy_settings(plan: Plan, engine_type: str) -> EngineSettings:
    """Return the plan's first engine as type transformers or vllm, with its model's weights."""
    return dataclasses.replace(
        plan.engines[0], engine_type=engine_type, name="policy", fixed_weights=True, lora_rank=None
    )


def server_settings(model_name: str, base_url: str | None) -> EngineSettings:
    """Return settings of an external server as policy; OPENAI_API_KEY contains its key."""
    external = ExternalModelConfig(model_name=model_name, base_url=base_url)
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
        """Start the policy, with the run's initial adapter; a server's answers get tokens."""
        if (
            (lora := self._plan.learner.lora) is not None
            and lora.path is not None
            and settings.external is None
        ):
            from rft.trainer.checkpoint.hf_folder import assemble_first

            folder = Path(self._started.enter_context(TemporaryDirectory(prefix="rft-debug-")))
            await asyncio.to_thread(assemble_first, self._plan.learner, Path(lora.path), folder)
            settings = dataclasses.replace(settings, model_path=str(folder))
        started = await self._start(settings)
        if settings.external is not None:
            return TextModel(started)
        return started

    def auxiliary(self, replaced: Mapping[str, ChatModel]) -> dict[str, ChatModel]:
        """Return auxiliary models by name, with `replaced`; models start at their first call."""
        models: dict[str, ChatModel] = {}
        for settings in self._plan.auxiliary:
            # a moving average begins with the weights of its folder
            engines = tuple(dataclasses.replace(e, fixed_weights=True) for e in settings.engines)
            settings = dataclasses.replace(settings, engines=engines)
            lazy = LazyModel(settings, self._start_auxiliary)
            models |= dict.fromkeys(settings.names, lazy)
        if unknown := [n for n in replaced if n not in models]:
            raise ConfigError(
                f"explorer.auxiliary_models has {', '.join(models) or 'no model'}",
                key="--judge",
                given=", ".join(unknown),
            )
        return {**models, **replaced}

    async def _start_auxiliary(self, settings: EngineSettings) -> Engine:
        sooner = "engine_type: transformers starts sooner, --judge fake:7 asks no model"
        slow = settings.engine_type == "vllm"
        return await self._start(settings, f" (a minute or more; {sooner})" if slow else "")

    async def _start(self, settings: EngineSettings, remark: str = "") -> Engine:
        where = settings.model_path
        if settings.external is not None:
            where = (
                f"{settings.external.model_name} at "
                f"{settings.external.base_url or '$' + settings.external.base_url_env}"
            )
        self._tell(f"{settings.name}: {settings.engine_type} {where}{remark}")
        engine = await make(settings)
        self._started.push_async_callback(engine.close)
        return engine

    async def close(self) -> None:
        await self._started.aclose()


def in_vllms_environment(settings: EngineSettings, command: Sequence[str]) -> int:
    """Run `command` with vLLM's environment variables, clean up after it, return its exit code.

    Without an own VLLM_LOGGING_LEVEL, vLLM and its libraries write errors alone.
    """
    run_id = uuid.uuid4().hex[:12]
    quiet = {} if settings.log_stats or settings.log_requests else _QUIET
    env = {**os.environ, **cpu_environment(settings), leftovers.RUN_ID: run_id}
    env |= {name: value for name, value in quiet.items() if name not in os.environ}
    try:
        return subprocess.run(command, env=env, check=False).returncode
    finally:
        for line in leftovers.clean(run_id):
            log.info("%s", line)


class LazyModel:
    """An auxiliary model that starts at its first call."""

    def __init__(self, settings: AuxiliarySettings, start: Any) -> None:
        self._settings = settings
        self._start = start
        self._engine: asyncio.Future[Engine] | None = None
        self.identity = parts.identity(settings)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await (await self._started_engine()).generate(request)

    async def score(self, row: ScoreRow) -> TokenScores:
        return await (await self._started_engine()).score(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await (await self._started_engine()).classify(messages)

    async def _started_engine(self) -> Engine:
        if self._engine is None:
            self._engine = asyncio.ensure_future(self._start(self._settings.engines[0]))
        return await asyncio.shield(self._engine)


class TextModel:
    """Adds tokens to a text-only model: the bytes of its texts, with log-probs of 0."""

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

    async def score(self, row: ScoreRow) -> TokenScores:
        return await self._model.score(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await self._model.classify(messages)


def scripted(texts: Sequence[str], gold: Any, runs: int) -> ScriptedModel:
    """Make a model that answers with `texts`, repeating the last.

    Without texts it gives the gold answer; without a gold answer, the last message.
    """
    if texts:
        return ScriptedModel(per_run=[texts] * runs, answer=lambda _: texts[-1])
    if isinstance(gold, str | int | float):
        return ScriptedModel(answer=lambda _: str(gold))
    return ScriptedModel(answer=lambda messages: str(messages[-1]["content"]))
