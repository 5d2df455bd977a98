"""From logits to tokens."""

import numpy as np
import pytest
import torch

from rft.engine.sampling import RowState, draw, pick
from rft.types.task import SamplingArgs


def row(
    seed: int = 0, prompt: tuple[int, ...] = (), written: tuple[int, ...] = (), **sampling: object
) -> RowState:
    return RowState(SamplingArgs(**sampling), seed, prompt, (0,), list(written))  # type: ignore[arg-type]


LOGITS = torch.tensor([1.0, 2.0, 3.0, 0.0, -1.0])


def one(**sampling: object) -> tuple[int, float]:
    tokens, logps = draw(LOGITS[None].clone(), [row(**sampling)])  # type: ignore[arg-type]
    return tokens[0], logps[0]


def test_greedy_takes_the_best_and_reports_the_plain_log_prob() -> None:
    token, logp = one(temperature=0.0)
    assert token == 2 and logp == pytest.approx(LOGITS.log_softmax(-1)[2].item())


def test_draws_follow_the_distribution() -> None:
    count = 4000
    rows = [row(seed=i, temperature=0.5) for i in range(count)]
    tokens, logps = draw(LOGITS.repeat(count, 1), rows)
    want = (LOGITS / 0.5).softmax(-1)
    found = torch.tensor(tokens).bincount(minlength=5) / count
    assert torch.allclose(found, want, atol=0.03)
    assert np.allclose(np.exp(logps), want[tokens].numpy(), atol=1e-6)


def test_any_seed_of_a_request_draws() -> None:
    tokens = [
        draw(LOGITS[None].clone(), [row(seed=seed)])[0] for seed in (-1, -(1 << 63), (1 << 64) - 1)
    ]  # as the ledger keeps them
    assert tokens[0] == tokens[2]


def test_every_token_has_its_own_part_of_the_unit_interval() -> None:
    logps = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    logps[:, 4990:] = float("-inf")
    logps[:, :3] = float("-inf")
    sums = logps.double().exp().cumsum(-1)
    ends = (sums / sums[:, -1:])[0, 2:4990]
    inside = (ends[:-1] + ends[1:]) / 2
    assert pick(logps.expand(len(inside), -1), inside).tolist() == list(range(3, 4990))
    # nor does rounding reach what has no probability
    extremes = torch.tensor([0.0, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert pick(logps.expand(3, -1), extremes).tolist() == [3, 4989, 4989]


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    alone = [draw(LOGITS[None].clone(), [row(seed=i)])[0][0] for i in range(20)]
    assert draw(LOGITS.repeat(20, 1), [row(seed=i) for i in range(20)])[0] == alone


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_p": 0.01}, {2}),
        ({"min_p": 0.3}, {1, 2}),
        ({"min_tokens": 1}, {1, 2, 3, 4}),
    ],
)
def test_cuts(sampling: dict[str, object], kept: set[int]) -> None:
    rows = [
        row(seed=i, temperature=3.0 if "min_tokens" in sampling else 1.0, **sampling)
        for i in range(300)
    ]
    tokens, logps = draw(LOGITS.repeat(300, 1), rows)
    assert set(tokens) == kept
    total = sum(np.exp(dict(zip(tokens, logps, strict=True))[t]) for t in kept)
    assert total == pytest.approx(1.0, abs=1e-5)


def test_penalties() -> None:
    _, logp = draw(
        LOGITS[None].clone(),
        [row(prompt=(2,), written=(1, 1), temperature=0.0, repetition_penalty=2.0)],
    )
    assert logp[0] == pytest.approx(
        torch.tensor([1.0, 1.0, 1.5, 0.0, -1.0]).log_softmax(-1)[2].item()
    )
    token, logp = draw(
        LOGITS[None].clone(),
        [row(written=(2, 2), temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5)],
    )
    assert token[0] == 1 and logp[0] == pytest.approx(
        torch.tensor([1.0, 2.0, 1.0, 0.0, -1.0]).log_softmax(-1)[1].item()
    )


def test_choices_are_all_there_is() -> None:
    only = [RowState(SamplingArgs(temperature=t), 1, (), (0,), choices=(0, 3)) for t in (0.0, 1.0)]
    tokens, logps = draw(LOGITS[None].repeat(2, 1), only)
    assert tokens[0] == 0 and logps[0] == pytest.approx(-np.log1p(np.exp(-1.0)), abs=1e-6)
    assert tokens[1] in (0, 3)
