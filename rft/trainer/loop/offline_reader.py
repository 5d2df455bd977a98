"""Serve the rows of a data set as train batches, and compute the loss on held-out rows.

Depends on records and the order of a data set, not on files, templates or losses.  Invariant: the
rows of a step follow from the step alone, so a checkpoint's position in the data is its step, and
no state of the rows is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from rft.algorithm.args import Computed
from rft.algorithm.base import Denominators, LossInputs, StepInputs
from rft.buffer.given_rows import GivenRows, expert_row
from rft.errors import RunFailed
from rft.taskset.offline_data import OfflineData, sides
from rft.taskset.settings import OfflineDataSettings
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.types.block import encode
from rft.types.experience import Demonstration, Experience, LabelledAnswer, Preference
from rft.types.ids import GroupId
from rft.types.ports import Consumption, EndOfData, GroupStats, Lease

_THE_LOSS = ("pg_loss", "sft_loss")  # `loss` less KL and entropy terms


class OfflineReader(GivenRows):
    """Batches of a data set: step n always gets the same rows.

    Nothing is stored, so no lease waits and no row is lost.
    """

    key = "buffer.trainer_input.experience_buffer.path"

    def __init__(
        self, data: OfflineData, *, size: int, seed: int, lineage: int, total_steps: int
    ) -> None:
        super().__init__(data.settings.rows.path)
        self._data = data
        self._size = size
        self._seed = seed
        self._lineage = lineage
        self._steps = total_steps

    def rows_of(self, step: int) -> Lease:
        """Return the rows of `step`.  Raises EndOfData after the last step."""
        if step > self._steps:
            raise EndOfData(f"all {self._steps} steps are trained")
        places = self._data.batch(step, self._size, self._seed)
        records = [self._data.records[at] for at in places]
        groups = _experiences(records, GroupId(self._lineage, 0, step - 1, 0), self._data.settings)
        stats = tuple(
            GroupStats(group=str(m[0].group), rewards=(), mean=0.0, std=0.0) for m in groups
        )
        frame = encode([x for m in groups for x in m])
        return Lease(step=step, frame=frame, images=self._data.images(records), groups=stats)

    def consumed(self, step: int) -> Consumption:
        return Consumption(
            num_uses=step * self._size,
            digest=self._data.place(step, self._size, self._seed),
            cursor=step,
        )


def _experiences(
    records: Sequence[Demonstration | Preference], first: GroupId, settings: OfflineDataSettings
) -> list[list[Experience]]:
    """Return each record's rows: one of a demonstration; chosen, then rejected, of a preference; of an
    answer with a label itself, then its prompt with the answer of the next record, without a label,
    cut at the longest row that is allowed.
    """
    groups = []
    for i, record in enumerate(records):
        label: list[dict[str, Any]] = [{}, {}]
        sequences = sides(record)
        if isinstance(record, LabelledAnswer):
            label[0] = {"label": record.label}
            sequences.append(_mismatched(record, records[(i + 1) % len(records)], settings))
        group = msgspec.structs.replace(first, task=i)
        groups.append(
            [
                expert_row(
                    group.run(run),
                    tokens,
                    mask,
                    taskset=settings.rows.name,
                    task_index=record.id.task,
                    images=record.images,
                    info=label[run],
                )
                for run, (tokens, mask) in enumerate(sequences)
            ]
        )
    return groups


def _mismatched(
    record: LabelledAnswer, other: Demonstration | Preference, settings: OfflineDataSettings
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, loss mask) of the prompt of one with the answer of the other."""
    assert isinstance(other, LabelledAnswer)
    prompt = int(np.flatnonzero(record.loss_mask)[0])
    answer = other.tokens[int(np.flatnonzero(other.loss_mask)[0]) :]
    tokens = np.concatenate([record.tokens[:prompt], answer])[: settings.max_tokens]
    return tokens, np.arange(len(tokens)) >= prompt


class HeldOut:
    """Evaluates the algorithm's loss on rows that are not trained."""

    def __init__(self, data: OfflineData) -> None:
        self.name = data.settings.rows.name
        self._data = data

    async def evaluate(self, ranks: Ranks) -> dict[str, float]:
        """Return eval/NAME/loss and the loss's other metrics over all held-out rows, under the
        current weights.
        """
        needs = ranks.algorithm.needs
        settings = self._data.settings
        groups = _experiences(self._data.records, GroupId(1, 0, 0, 0), settings)
        found = [x for group in groups for x in group]
        files = self._data.images(self._data.records)
        rows = [batch_builder.train_row(x, pairs=needs.pairs, files=files) for x in found]
        what: set[Computed] = {"old", *needs.before}
        what |= {"ref"} if needs.reference else set()
        what |= {"entropy"} if needs.entropy else set()
        scored = await ranks.compute(rows, sorted(what))
        steps = [batch_builder.step_row(x, s) for x, s in zip(found, scored, strict=True)]
        prepared = ranks.algorithm.prepare(StepInputs(rows=steps, groups={}))

        def packed(arrays: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays))

        def computed(name: Computed) -> torch.Tensor | None:
            return packed([s[name] for s in scored]) if name in what else None

        logprobs = packed([s["old"] for s in scored])
        if not bool(torch.isfinite(logprobs).all()):
            raise RunFailed(f"the log-probs of {self.name} are not finite; lower the learning rate")
        lengths = [int(r.loss_mask.sum()) for r in rows]
        none = torch.zeros_like(logprobs)
        s = ranks.settings
        keep = prepared.keep or [np.ones(length, np.bool_) for length in lengths]
        count = sum(map(np.count_nonzero, keep))
        num_rows = sum(bool(k.any()) for k in keep)
        out = ranks.algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs,
                advantages=none,
                mask=packed(keep),
                row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
                num_rows=len(rows),
                denominators=Denominators(
                    count, num_rows, s.loss_scale_factor or s.max_response_tokens, count, num_rows
                ),
                ref_logprobs=computed("ref"),
                entropy=computed("entropy"),
                rollout_logprobs=none,
                is_expert=torch.ones_like(logprobs, dtype=torch.bool),
                extra={name: packed(arrays) for name, arrays in prepared.extra.items()},
                factors=ranks.factors,
            )
        )
        return {
            f"eval/{self.name}/{name}": float(value) / count
            for name, value in out.sums.items()
            if name not in _THE_LOSS
        }
