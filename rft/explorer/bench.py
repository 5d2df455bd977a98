"""The evaluation tasksets under weights that stay as they are.  Nothing is stored and nothing is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rft.explorer.evaluate import Evaluator
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Slots
from rft.plugins import load_all
from rft.reward import pool
from rft.types.ids import Version
from rft.types.ports import ChatModel, MetricSink
from rft.workflow.base import NO_MODELS
from rft.workflow.build import Recipes


async def bench(
    settings: ExplorerSettings,
    model: ChatModel,
    sink: MetricSink,
    version: Version,
    *,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> dict[str, float]:
    """Plays every evaluation taskset once and reports it as bench/<taskset>/... at the train step of `version`; what was reported.

    Raises ConfigError and PluginError for what tasksets name, RunFailed if all runs of one ended without a score.
    """
    load_all(settings.plugin_dirs)
    recipes = Recipes()
    evaluator = Evaluator(settings, recipes, model, sink, Slots(settings.max_concurrent_runs), prefix="bench", models=models)
    for taskset in evaluator.tasksets:
        recipes.of(taskset.task(0))
    try:
        await recipes.prepare(models)
        return await evaluator.run(version)
    finally:
        await recipes.close()
        await asyncio.to_thread(pool.close_all)
