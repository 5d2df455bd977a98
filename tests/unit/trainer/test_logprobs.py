from __future__ import annotations

import pytest
import torch

from rft.trainer.logprobs import token_logprobs, token_statistics


@pytest.mark.parametrize("chunk", [2, 5, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_plain_log_softmax(chunk: int, with_bias: bool, entropy: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    bias = torch.randn(11, requires_grad=True) if with_bias else None
    targets, temperatures = torch.randint(0, 11, (7,)), torch.rand(7) + 0.5
    inputs = [t for t in (hidden, weight, bias) if t is not None]

    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    logp = torch.log_softmax(logits, -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(logp.exp() * logp).sum(-1)
    pull, pull_entropy = torch.randn(7), torch.randn(7)
    loss = (expected * pull).sum() + ((expected_entropy * pull_entropy).sum() if entropy else 0)
    wanted = torch.autograd.grad(loss, inputs)

    found, found_entropy = token_logprobs(hidden, weight, targets, temperatures, bias=bias, chunk_tokens=chunk, entropy=entropy)
    torch.testing.assert_close(found, expected)
    loss = (found * pull).sum()
    if entropy:
        assert found_entropy is not None
        torch.testing.assert_close(found_entropy, expected_entropy)
        loss = loss + (found_entropy * pull_entropy).sum()
    else:
        assert found_entropy is None
    for mine, theirs in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_statistics_are_sums_over_the_vocabulary(chunk: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 4), torch.randn(11, 4)
    bias = torch.randn(11) if with_bias else None
    targets, temperatures = torch.randint(0, 11, (7,)), torch.rand(7) + 0.5
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).double() / temperatures[:, None], -1)
    p, entropy = logp.exp(), -(logp.exp() * logp).sum(-1)
    expected = (
        logp.gather(1, targets[:, None])[:, 0],
        entropy,
        (p**2).sum(-1),
        (p * (p * (entropy[:, None] + logp))).sum(-1),
    )
    found = token_statistics(hidden, weight, targets, temperatures, bias=bias, chunk_tokens=chunk)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)
