"""Tokens go through the experts that are given, in every layout of rows, and the gradient does not
depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.engine.routers import Routers
from rft.errors import ConfigError
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types import experts
from tests.helpers import families

Settings = Callable[..., LearnerSettings]
# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "olmoe",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "minimax",
)


def forced(rows: list[TrainRow], layers: int, *, seed: int = 0) -> list[TrainRow]:
    """`rows` with other experts than any router would choose; the rows of a group have those of
    their prompt in common, but one.
    """
    draw = np.random.default_rng(seed)
    prompts: dict[str, np.ndarray] = {}
    made = []
    for i, row in enumerate(rows):
        mine = (
            np.stack([draw.permutation(4)[:2] for _ in range(len(row.inputs) * layers)])
            .reshape(-1, layers, 2)
            .astype(np.uint8)
        )
        before = prompts.setdefault(row.group, mine[: int(row.loss_mask.argmax()) - 1])
        mine[: len(before)] = before
        if i == 1:
            mine[2] = (mine[2] + 1) % 4
        made.append(msgspec.structs.replace(row, experts=mine))
    return made


def plainly(folder: Path, rows: list[TrainRow]) -> Iterator[np.ndarray]:
    """Log-probs of transformers' own forward of each row, through its experts."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    routers = Routers(lm)
    for row in rows:
        ids = torch.from_numpy(row.tokens)[None].long()
        whole = np.full((len(row.tokens), routers.layers, 2), -1)
        if row.experts is not None:
            whole[: len(row.experts)] = row.experts
        routers.prescribe(torch.from_numpy(whole))
        at = torch.from_numpy(row.loss_mask.nonzero()[0])
        with torch.no_grad():
            logits = lm(input_ids=ids, use_cache=False).logits[0, at - 1]
        temperature = float(np.asarray(row.temperatures).flat[0])
        yield (logits / temperature).log_softmax(-1).gather(1, ids[0, at, None])[:, 0].numpy()


def apart(learner: Learner, rows: list[TrainRow], wanted: list[np.ndarray]) -> float:
    found = learner.score([rows])[0]
    return max(
        float(np.abs(mine["old"] - want).max()) for mine, want in zip(found, wanted, strict=True)
    )


@pytest.fixture
def grouped(rows: list[TrainRow]) -> list[TrainRow]:
    """Tokens that the families' small vocabulary has."""
    return [msgspec.structs.replace(r, tokens=r.tokens % families.VOCABULARY) for r in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_disagreement_is_replayed(
    family: str, tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    folder = families.make(family, tmp_path / family)
    learner = Learner(settings(model_path=str(folder), router_replay=True))
    assert learner.policy.routers is not None
    given = forced(grouped, learner.policy.routers.layers)
    wanted = list(plainly(folder, given))
    assert apart(learner, grouped, wanted) > 0.05, "without replay the experts make a difference"
    assert apart(learner, given, wanted) <= 1e-5
    for layout in {"packed", "padded"} & (
        {"padded"} if learner.settings.row_layout == "padded" else {"packed", "padded"}
    ):
        other = Learner(settings(model_path=str(folder), router_replay=True, row_layout=layout))
        assert apart(other, given, wanted) <= 1e-5, layout


def test_rows_without_experts_choose_themselves(
    tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    folder = families.make("qwen3_moe", tmp_path / "m")
    learner = Learner(settings(model_path=str(folder), router_replay=True))
    some = [row if i % 2 else grouped[i] for i, row in enumerate(forced(grouped, 2))]
    short = [
        r if r.experts is None else msgspec.structs.replace(r, experts=r.experts[:4]) for r in some
    ]
    for rows in (grouped, some, short):
        assert apart(learner, rows, list(plainly(folder, rows))) <= 1e-5


@pytest.mark.e2e
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_any_cut_gives_the_same_gradient(
    layout: Any, checkpointing: bool, tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    folder = families.make("qwen3_moe", tmp_path / "m")
    how: dict[str, Any] = {
        "model_path": str(folder),
        "row_layout": layout,
        "gradient_checkpointing": checkpointing,
    }
    learner = Learner(settings(router_replay=True, **how))
    given = forced(grouped, 2)
    whole, cut, one = (
        gradient(learner, given, Budget(tokens, layout)) for tokens in (4000, 60, 25)
    )
    own = gradient(Learner(settings(**how)), grouped, Budget(4000, layout))
    scale = max(float(g.abs().max()) for g in whole.values())
    for other in (cut, one):
        assert max(float((whole[n] - other[n]).abs().max()) for n in whole) <= 1e-5 * scale
    assert max(float((whole[n] - own[n]).abs().max()) for n in whole) > 1e-2 * scale


def gradient(learner: Learner, rows: list[TrainRow], budget: Budget) -> dict[str, torch.Tensor]:
    (cut,) = plan(rows, 1, budget)
    shares = tuple(tuple(rows[i] for i in m) for m in cut)
    tokens = float(sum(r.loss_mask.sum() for r in rows))
    found: dict[str, torch.Tensor] = {}

    def keep(lr: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in learner.policy.names().items() if p.grad is not None}
        )
        learner.optimizer.zero_grad()
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    learner.step(RankBatch(step=1, micro_batches=shares, tokens=tokens, rows=float(len(rows))))
    return found


def test_the_policy_without_its_adapter_chooses_itself(
    tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    folder = families.make("qwen3_moe", tmp_path / "m")
    lora = LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "o_proj"))
    learner = Learner(settings(model_path=str(folder), router_replay=True, lora=lora))
    micro = learner._micro_batch(forced(grouped, 2))
    wanted = np.concatenate(list(plainly(folder, grouped)))
    assert np.abs(learner._reference_logprobs(micro).numpy() - wanted).max() <= 1e-5


def test_experts_of_another_model_are_refused(
    tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    learner = Learner(
        settings(model_path=str(families.make("qwen3_moe", tmp_path / "m")), router_replay=True)
    )
    with pytest.raises(ConfigError, match="engine and trainer need the same model"):
        learner.score([forced(grouped, 3)])


def test_a_model_without_experts_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        Learner(settings(router_replay=True))


def test_tokens_are_marked_by_their_experts() -> None:
    tokens = np.array([5, 5, 5, 7], np.int32)
    given = np.array([[[0, 1]], [[1, 0]], [[0, 1]]], np.uint8)
    marked = experts.marked(tokens, given)
    assert (marked & experts.TOKEN).tolist() == tokens.tolist()
    assert marked[0] == marked[2] != marked[1] and marked[3] == 7
