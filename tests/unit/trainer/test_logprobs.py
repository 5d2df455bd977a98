"""Log-probs by tiles against plain log_softmax: values, gradients, and what they take of memory."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from rft.trainer.model import logprobs as module
from rft.trainer.model.logprobs import token_logprobs, token_statistics
from rft.types.row_layout import Head

# tokens, entries of the vocabulary; 7 tokens and 11 entries there are
TILES = [(2, 4), (5, 3), (100, 11), (100, 100)]


def tiles(monkeypatch: pytest.MonkeyPatch, width: int, kept: int = 0) -> None:
    monkeypatch.setattr(module, "CPU_TILE", 1)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    monkeypatch.setattr(module, "LEAST_WIDTH", width)


@pytest.mark.parametrize(("chunk", "width"), TILES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept", [0, 7 * 6 * 4, 1 << 20])
def test_values_and_gradients_are_those_of_plain_log_softmax(
    chunk: int,
    width: int,
    with_bias: bool,
    entropy: bool,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles(monkeypatch, width, kept)
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(11, 4, requires_grad=True)
    bias = torch.randn(11, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 11, (7,))
    temperatures = torch.rand(7) + 0.5
    inputs = [t for t in (hidden, weight, bias) if t is not None]

    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    logp = torch.log_softmax(logits, -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(logp.exp() * logp).sum(-1)
    pull = torch.randn(7)
    pull_entropy = torch.randn(7)
    loss = (expected * pull).sum() + ((expected_entropy * pull_entropy).sum() if entropy else 0)
    wanted = torch.autograd.grad(loss, inputs)

    found, found_entropy, _ = token_logprobs(
        hidden, weight, targets, temperatures, bias=bias, chunk_tokens=chunk, entropy=entropy
    )
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


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("head", [Head(scale=0.125), Head(cap=3.0), Head(0.7, 2.0)])
@pytest.mark.parametrize("tempered", [False, True])
def test_logits_are_scaled_and_capped_before_the_temperature(
    head: Head, tempered: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(monkeypatch, 4, kept)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    targets = torch.randint(0, 11, (7,))
    temperatures = torch.rand(7, dtype=torch.float64) + 0.5 if tempered else None
    z = head.scale * (hidden @ weight.t())
    if head.cap is not None:
        z = head.cap * torch.tanh(z / head.cap)
    logp = (z if temperatures is None else z / temperatures[:, None]).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    found = token_logprobs(
        hidden, weight, targets, temperatures, chunk_tokens=3, entropy=True, head=head
    )
    statistics = token_statistics(hidden, weight, targets, temperatures, chunk_tokens=3, head=head)
    pull = torch.randn(2, 7, dtype=torch.float64)
    grads = []
    for pair in (expected, found):
        assert pair[1] is not None
        loss = (pair[0] * pull[0] + pair[1] * pull[1]).sum()
        grads.append(torch.autograd.grad(loss, (hidden, weight)))
    for mine, theirs in zip(
        [*found[:2], *statistics[:2], *grads[1]], [*expected, *expected, *grads[0]], strict=True
    ):
        assert mine is not None
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("chunk", "width"), TILES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept", [0, 7 * 6 * 4, 1 << 20])
@pytest.mark.parametrize("head", [Head(), Head(0.7, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_at_given_ids_and_of_all_others(
    chunk: int,
    width: int,
    entropy: bool,
    kept: int,
    head: Head,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles(monkeypatch, width, kept)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (7, 11))
    targets = torch.randint(0, 11, (7,))
    ids = torch.stack([torch.randperm(11)[:3] for _ in range(7)])
    ids[0, 0] = targets[0]  # a sampled token may be among them
    ids[0, 1:] = (targets[0] + torch.tensor([1, 2])) % 11
    temperatures = torch.rand(7) + 0.5

    double = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    z = head.scale * (double[0] @ double[1].t())
    z = z if head.cap is None else head.cap * torch.tanh(z / head.cap)
    logp = (z / temperatures[:, None]).log_softmax(-1)
    others = logp.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    expected = (
        logp.gather(1, targets[:, None])[:, 0],
        -(logp.exp() * logp).sum(-1) if entropy else None,
        torch.cat([logp.gather(1, ids), others], 1),
    )
    found = token_logprobs(
        hidden,
        weight,
        targets,
        temperatures,
        ids=ids,
        chunk_tokens=chunk,
        entropy=entropy,
        head=head,
    )
    pulls = [torch.randn(shape, dtype=torch.float64) for shape in ((7,), (7,), (7, 4))]
    close = (
        {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    )
    losses = []
    for outputs in (found, expected):
        parts = [(x * p).sum() for x, p in zip(outputs, pulls, strict=True) if x is not None]
        losses.append(torch.stack([x.double() for x in parts]).sum())
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine.double(), theirs, **close)
    grads = zip(
        torch.autograd.grad(losses[0], (hidden, weight)),
        torch.autograd.grad(losses[1], double),
        strict=True,
    )
    for mine, theirs in grads:
        torch.testing.assert_close(mine.double(), theirs, **close)


@pytest.mark.parametrize("peak", [15.0, 40.0, 200.0])
def test_others_that_are_almost_impossible_have_a_bounded_gradient(
    peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 1 - p of the ids has no digit left; the sum over the others has all."""
    tiles(monkeypatch, 4)
    weight = torch.eye(11)
    hidden = torch.zeros(2, 11)
    hidden[:, 3] = peak
    hidden.requires_grad_()
    ids = torch.tensor([[3, 5], [5, 3]])
    _, _, found = token_logprobs(hidden, weight, ids[:, 0], None, ids=ids, chunk_tokens=2)
    assert found is not None
    z = hidden.detach().double().requires_grad_()
    expected = z.log_softmax(-1).scatter(1, ids, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(found[:, 2].double(), expected.clamp(min=-60))
    (mine,) = torch.autograd.grad(found[:, 2].sum(), hidden)
    (theirs,) = torch.autograd.grad(expected.clamp(min=-60).sum(), z)
    torch.testing.assert_close(mine.double(), theirs, atol=1e-6, rtol=1e-5)
    full = torch.stack([torch.randperm(11) for _ in range(2)])
    _, _, whole = token_logprobs(hidden, weight, ids[:, 0], None, ids=full, chunk_tokens=2)
    assert whole is not None and (whole[:, -1] == -60).all(), "no token is left"
    (gradient,) = torch.autograd.grad(whole.sum(), hidden)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_in_double_precision_are_finite_differences(
    entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(monkeypatch, 4)
    torch.manual_seed(0)
    given = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (11, 3), (11,))
    ]
    targets = torch.randint(0, 11, (5,))
    temperatures = torch.rand(5, dtype=torch.float64) + 0.5

    def made(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found = token_logprobs(
            hidden, weight, targets, temperatures, bias=bias, chunk_tokens=2, entropy=entropy
        )
        return tuple(t for t in found if t is not None)

    assert gradcheck(made, given)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_wanted_gradients_are_made(frozen: str) -> None:
    torch.manual_seed(0)
    given = {"hidden": torch.randn(6, 4), "weight": torch.randn(9, 4)}
    for name, tensor in given.items():
        tensor.requires_grad_(name != frozen)
    found, *_ = token_logprobs(
        **given, targets=torch.arange(6), temperatures=torch.ones(6), chunk_tokens=4
    )
    found.sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is not None} == set(given) - {
        frozen
    }


def test_half_precision_is_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 16)
    torch.manual_seed(0)
    hidden = torch.randn(64, 32)
    weight = torch.randn(200, 32)
    targets = torch.randint(0, 200, (64,))
    ones = torch.ones(64)
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = [t.bfloat16().to(dtype).requires_grad_() for t in (hidden, weight)]
        found, entropy, _ = token_logprobs(*given, targets, ones, chunk_tokens=8, entropy=True)
        assert (
            found.dtype == torch.float32 and entropy is not None and entropy.dtype == torch.float32
        )
        grads[dtype] = torch.autograd.grad(found.sum() + entropy.sum(), given)
    for exact, rounded in zip(grads[torch.float32], grads[torch.bfloat16], strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() < 0.01 * exact.norm()


class _Largest(TorchDispatchMode):
    """The most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_no_row_of_logits_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 50)
    hidden = torch.randn(40, 2, requires_grad=True)
    weight = torch.randn(1000, 2, requires_grad=True)
    with _Largest() as seen:
        found, entropy, _ = token_logprobs(
            hidden,
            weight,
            torch.zeros(40, dtype=torch.int64),
            torch.ones(40),
            chunk_tokens=40,
            entropy=True,
        )
        assert entropy is not None
        (found.sum() + entropy.sum()).backward()
    assert seen.elements == 40 * 50, "a tile of logits; the weight and its gradient have as many"


@pytest.mark.parametrize(("chunk", "width"), TILES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_statistics_are_sums_over_the_vocabulary(
    chunk: int, width: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(monkeypatch, width)
    torch.manual_seed(0)
    hidden = torch.randn(7, 4)
    weight = torch.randn(11, 4)
    bias = torch.randn(11) if with_bias else None
    targets = torch.randint(0, 11, (7,))
    temperatures = torch.rand(7) + 0.5
    logp = torch.log_softmax(
        torch.nn.functional.linear(hidden, weight, bias).double() / temperatures[:, None], -1
    )
    p = logp.exp()
    entropy = -(logp.exp() * logp).sum(-1)
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


@pytest.mark.slow
# of the compiler itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_tiles_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 600)
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = torch.randn(1300, 16, requires_grad=True)
    targets = torch.randint(0, 1300, (37,))
    temperatures = torch.rand(37) + 0.5
    made = []
    for fused in (False, True):
        found, entropy, _ = token_logprobs(
            hidden, weight, targets, temperatures, chunk_tokens=16, entropy=True, fused=fused
        )
        assert entropy is not None
        made.append(
            (found, entropy, *torch.autograd.grad(found.sum() + entropy.sum(), (hidden, weight)))
        )
    for plain, compiled in zip(*made, strict=True):
        torch.testing.assert_close(compiled, plain, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.9, 1.0, 0.7])
def test_half_precision_divides_float32_logits_by_the_temperature(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines do: dividing bfloat16 hidden states by a bfloat16 temperature moves log-probs by
    up to 0.25 nats.
    """
    tiles(monkeypatch, 5, 7 * 5 * 4)
    torch.manual_seed(0)
    hidden = (3 * torch.randn(7, 16)).bfloat16().requires_grad_()
    weight = torch.randn(11, 16).bfloat16()
    targets = torch.randint(0, 11, (7,))
    asked = None if temperature == 1.0 else torch.full((7,), temperature)
    found, *_ = token_logprobs(hidden, weight, targets, asked, chunk_tokens=3)
    logits = (hidden.detach() @ weight.t()).float().requires_grad_()
    wanted = (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    (mine,) = torch.autograd.grad(found.sum(), hidden)
    (pull,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(mine.float(), pull @ weight.float(), atol=2e-2, rtol=2e-2)
    squares = token_statistics(hidden, weight, targets, asked, chunk_tokens=3)
    torch.testing.assert_close(squares[0], wanted, atol=2e-5, rtol=0)
