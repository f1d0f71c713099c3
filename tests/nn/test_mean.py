"""Means over axes: equal to torch's, finite in half precision, and with a gradient that is not materialized."""

from __future__ import annotations

import pytest
import torch

from visattn.nn.means import mean_over


@pytest.mark.parametrize("axes", [(2, 3), (1,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_mean_equals_torch_mean(axes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = mean_over(x, *axes), x.double().mean(axes, keepdim=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_mean_in_half_precision_is_finite_where_the_sum_overflows() -> None:
    x = torch.full((1, 2, 112, 112), 6e4, dtype=torch.float16)
    assert bool(x.sum((2, 3)).isinf().all())
    assert bool((mean_over(x, 2, 3) == x[..., :1, :1]).all())


def test_gradient_of_the_mean_stores_one_number_for_each_map() -> None:
    x = torch.randn(2, 8, 5, 7, requires_grad=True)
    (slope,) = torch.autograd.grad(mean_over(x, 2, 3).sum(), x)
    torch.testing.assert_close(slope, torch.full_like(x, 1 / 35))
    assert slope.untyped_storage().nbytes() == 2 * 8 * 4
