"""Float32 products by oneDNN: what `torch.mm` gives, for every layout of the operands, and where it
takes the place of MKL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rft.trainer.model import products

LAYOUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "plain": torch.randn,
    "transposed": lambda m, n: torch.randn(n, m).t(),
    "a part of another": lambda m, n: torch.randn(2 * m + 3, 2 * n + 5)[3::2, 5::2],
    "one row for all": lambda m, n: torch.randn(1, n).expand(m, n),
    "one number for all": lambda m, n: torch.randn(1, 1).expand(m, n),
}


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(67, 76, 52), (1, 33, 7), (5, 1, 1), (0, 4, 3), (4, 0, 3), (4, 3, 0)], ids=str
)
def test_every_layout_and_size(left: str, right: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, k, n = shape
    a = LAYOUTS[left](m, k)
    b = LAYOUTS[right](k, n)
    found = products.by_onednn(a, b)
    assert found.dtype == torch.float32 and found.shape == (m, n)
    exact = a.double() @ b.double()
    sizes = a.double().abs() @ b.double().abs()
    assert bool(((found - exact).abs() <= k * torch.finfo(torch.float32).eps * sizes).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_types_are_multiplied_as_before(dtype: torch.dtype) -> None:
    a, b = (torch.arange(6).reshape(shape).to(dtype) for shape in ((2, 3), (3, 2)))
    found = products.by_onednn(a, b)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.double().numpy(), a.double().numpy() @ b.double().numpy())


def test_sizes_that_do_not_fit_are_told_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        products.by_onednn(torch.zeros(2, 3), torch.zeros(4, 2))


def names(module: nn.Module, x: torch.Tensor) -> list[str]:
    """The operators of a forward and backward pass."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        module(x).square().sum().backward()
    return [event.name for event in seen.events()]


@pytest.mark.parametrize(
    ("vendor", "products_of_a_layer"), [("AuthenticAMD", 3), ("GenuineIntel", 0)]
)
def test_linear_layers_and_their_gradients_use_it_on_processors_of_amd(
    vendor: str, products_of_a_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    here = products.prefer_onednn()  # what learners of other tests have done
    if here is not None:
        here._destroy()
        products.prefer_onednn.cache_clear()
    layer = nn.Linear(8, 5, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    library = products.prefer_onednn(told)
    try:
        found = names(layer, x)
    finally:
        if library is not None:
            library._destroy()
    assert found.count("mkldnn::_linear_pointwise") == products_of_a_layer
    assert layer.weight.grad is not None and x.grad is not None


def test_without_cpuinfo_nothing_changes(tmp_path: Path) -> None:
    assert products.prefer_onednn(tmp_path / "none") is None
