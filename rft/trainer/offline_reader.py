"""Training on a data set instead of on what an explorer samples: its rows as train batches, and its
loss on rows that are held out.

Knows records and the order of a data set; not files, templates or losses.  Invariant: which rows a
step takes follows from the step alone, so a checkpoint's place in the data is its step, and nothing
has to be stored of the rows.
"""

from __future__ import annotations

import numpy as np
import torch

from rft.algorithm.args import Computed
from rft.algorithm.base import Denominators, LossInputs
from rft.buffer.given_rows import GivenRows, expert_row
from rft.errors import RunFailed
from rft.taskset.offline_data import OfflineData, sides
from rft.trainer import batch_builder
from rft.trainer.pack import TrainRow
from rft.trainer.ranks import Ranks
from rft.types.block import encode
from rft.types.experience import Demonstration, Experience, Preference
from rft.types.ids import GroupId
from rft.types.ports import Consumption, EndOfData, GroupStats, Lease

_THE_LOSS = ("pg_loss", "sft_loss", "dpo_loss")  # `loss` less KL and entropy terms


class OfflineReader(GivenRows):
    """A data set: step n always gets the same rows.  There is no store: nothing waits and nothing
    is lost.
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
        """The rows of `step`.  Raises EndOfData after the last step."""
        if step > self._steps:
            raise EndOfData(f"all {self._steps} steps are trained")
        places = self._data.batch(step, self._size, self._seed)
        made = [
            experiences(
                self._data.records[at],
                GroupId(self._lineage, 0, step - 1, i),
                self._data.settings.rows.name,
            )
            for i, at in enumerate(places)
        ]
        stats = tuple(
            GroupStats(group=str(m[0].group), rewards=(), mean=0.0, std=0.0) for m in made
        )
        return Lease(step=step, frame=encode([x for m in made for x in m]), groups=stats)

    def consumed(self, step: int) -> Consumption:
        return Consumption(
            num_uses=step * self._size,
            digest=self._data.place(step, self._size, self._seed),
            cursor=step,
        )


def experiences(record: Demonstration | Preference, group: GroupId, name: str) -> list[Experience]:
    """The rows that a step trains on for a record: one, or of a pair the chosen and then the
    rejected one.
    """
    return [
        expert_row(group.run(run), tokens, mask, taskset=name, task_index=record.id.task)
        for run, (tokens, mask) in enumerate(sides(record))
    ]


class HeldOut:
    """The loss of the algorithm on rows that are not trained."""

    def __init__(self, data: OfflineData) -> None:
        self.name = data.settings.rows.name
        self._records = data.records

    async def evaluate(self, ranks: Ranks) -> dict[str, float]:
        """Metrics eval/NAME/loss, and the other numbers of the policy loss, over all rows under the
        weights as they are.
        """
        needs = ranks.algorithm.needs
        rows: list[TrainRow] = []
        for i, record in enumerate(self._records):
            made = experiences(record, GroupId(1, 0, 0, i), self.name)
            rows += [batch_builder.train_row(x, pairs=needs.pairs) for x in made]
        what: list[Computed] = ["old"]
        what += ["ref"] if needs.reference else []
        what += ["entropy"] if needs.entropy else []
        scored = await ranks.compute(rows, what)

        def packed(name: Computed) -> torch.Tensor | None:
            return (
                torch.from_numpy(np.concatenate([s[name] for s in scored]))
                if name in what
                else None
            )

        logprobs = packed("old")
        if logprobs is None or not bool(torch.isfinite(logprobs).all()):
            raise RunFailed(f"the log-probs of {self.name} are not finite; lower the learning rate")
        lengths = [int(r.loss_mask.sum()) for r in rows]
        none = torch.zeros_like(logprobs)
        s = ranks.settings
        count = len(logprobs)
        out = ranks.algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs,
                advantages=none,
                mask=torch.ones(count, dtype=torch.bool),
                row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
                num_rows=len(rows),
                denominators=Denominators(
                    count, len(rows), s.loss_scale_factor or s.max_response_tokens, count, len(rows)
                ),
                ref_logprobs=packed("ref"),
                entropy=packed("entropy"),
                rollout_logprobs=none,
                is_expert=torch.ones(count, dtype=torch.bool),
                kl_coef=ranks.kl_coefs.get("kl_loss"),
            )
        )
        values = {
            name: float(value) / count for name, value in out.sums.items() if name not in _THE_LOSS
        }
        return {f"eval/{self.name}/{name}": value for name, value in values.items()}
