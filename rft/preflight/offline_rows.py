"""Preview the rows of a data set for mode train: as tokens, with their number and mean lengths.

Part of the second stage of `rft.preflight.check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rft.config.context import Problems
from rft.config.offline_plan import KEY
from rft.errors import ConfigError
from rft.preflight.preview import RowPreview, TasksetPreview, described, placed
from rft.taskset.settings import OfflineDataSettings

if TYPE_CHECKING:
    from rft.config.plan import Plan


def look(plan: Plan, problems: Problems) -> tuple[list[TasksetPreview], dict[str, int]]:
    """Return previews of the data sets, and their numbers of rows by name.

    « and » enclose trained text.
    """
    previews = []
    counts = {}
    for settings, is_eval in (
        (plan.trainer.offline_data, False),
        (plan.trainer.held_out, True),
        (plan.expert, False),
    ):
        if settings is None:
            continue
        try:
            preview = _preview(settings, is_eval, problems)
        except ConfigError as e:
            problems.add_errors(placed(e, settings.rows))
            continue
        if settings is not plan.expert:
            previews.append(preview)
            counts[settings.rows.name] = preview.num_rows
        elif plan.mix is not None:
            with problems.collect_errors():
                plan.mix.fits(preview.num_rows)
    return previews, counts


def _preview(settings: OfflineDataSettings, is_eval: bool, problems: Problems) -> TasksetPreview:
    from rft.taskset.chatfiles import ImageTokens, open_chat
    from rft.taskset.offline_data import end_tokens, open_offline_data, sides

    data = open_offline_data(settings)
    chat = open_chat(settings.model_path)
    folder = settings.weights_path or settings.model_path
    images = ImageTokens(settings.rows, folder, settings.image_processor_args)
    if data.left_out:
        problems.note(f"{settings.rows.name}: {data.left_out}")
    ends = end_tokens(chat, settings)
    answers = [tokens for record in data.records for tokens, _ in sides(record)]
    unended = sum(int(tokens[-1]) not in ends for tokens in answers)
    if settings.kind != "texts" and unended:
        problems.warn(
            f"{settings.rows.key}: {unended} of {len(answers)} answers end without an end token of "
            f"the model, which are {chat.marked(ends, [False] * len(ends))!r}, so engines would go "
            f"on after them.  Use a chat template that writes one, or add the template's own to "
            f"eos_token_id in generation_config.json"
        )
    lengths = data.lengths
    rows = []
    for record, length in zip(data.records[:2], lengths, strict=False):
        repeated = [n for x in record.images for n in range(x.start + 1, x.start + x.length)]
        texts = [
            chat.marked(*(np.delete(array, repeated).tolist() for array in side))
            for side in sides(record)
        ]
        row = RowPreview(
            index=record.id.task,
            prompt="\n".join(texts),
            tokens=length,
            truth=None,
            images=described(images, data.task(record)),
        )
        rows.append(row)
    return TasksetPreview(
        name=settings.rows.name,
        key=KEY,
        num_rows=len(data),
        is_eval=is_eval,
        rows=tuple(rows),
        max_image_tokens=max(sum(x.length for x in record.images) for record in data.records),
        mean_tokens=sum(lengths) / len(data),
        mean_trained_tokens=data.trained_tokens / len(data),
    )


def summary(plan: Plan, previews: tuple[TasksetPreview, ...]) -> dict[str, Any]:
    """Return the size of a train step and of the whole run; None for each unknown number."""
    unknown = dict.fromkeys(("epochs", "rows", "kind", "tokens", "trained_tokens"))
    facts: dict[str, Any] = {"train_steps": plan.total_steps, **unknown}
    offline = plan.trainer.offline_data
    if offline is None:  # the ledger of another run supplies the steps
        return facts
    size = plan.trainer.batch_groups or 0
    facts |= {"rows": size, "kind": offline.kind}
    for data in [t for t in previews if not t.is_eval][:1]:
        if plan.total_steps:
            facts["epochs"] = round(plan.total_steps * size / data.num_rows, 2)
        facts["tokens"] = round(size * (data.mean_tokens or 0)) or None
        facts["trained_tokens"] = round(size * (data.mean_trained_tokens or 0)) or None
    return facts
