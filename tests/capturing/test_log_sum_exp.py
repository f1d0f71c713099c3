"""The log-sum-exp of fused kernels: what each kernel returns, and that one that does not fit the scores is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from visattn.core.capturing.intercept.calls import FusedCall
from visattn.core.operators.fused import LogSumExpReader

ATEN: Any = torch.ops.aten
SHAPE = 2, 3, 100, 64


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (ATEN._scaled_dot_product_flash_attention, ()),
        (ATEN._scaled_dot_product_efficient_attention, (None, False)),
        (ATEN._scaled_dot_product_efficient_attention, (None, True)),
        (ATEN._scaled_dot_product_cudnn_attention, (None, False)),
    ],
)
def test_kernels_of_gpus_are_asked_for_it(kernel: Any, arguments: tuple[Any, ...]) -> None:
    with FakeTensorMode():  # shapes only: no GPU is needed
        query = torch.empty(SHAPE, device="cuda", dtype=torch.bfloat16)
        with LogSumExpReader() as reader:  # type: ignore[no-untyped-call]
            out = kernel(query, query, query, *arguments)
    assert out[0].shape == SHAPE
    assert reader.lse is not None
    assert reader.lse.shape == SHAPE[:3]
    assert reader.lse.dtype == torch.float32


def test_the_kernel_of_the_cpu_returns_that_of_the_scores() -> None:
    query, key, value = torch.randn(3, *SHAPE).unbind()
    with LogSumExpReader() as reader:  # type: ignore[no-untyped-call]
        F.scaled_dot_product_attention(query, key, value)
    known = (query.double() @ key.double().mT / 8).logsumexp(-1)
    assert reader.lse is not None
    assert torch.allclose(reader.lse.double(), known, atol=1e-6)


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "scale", "grouped"])
def test_one_that_does_not_fit_the_scores_is_refused(case: str) -> None:
    query, key, value = torch.randn(3, *SHAPE).unbind()
    every: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.rand(SHAPE[2], SHAPE[2]) > 0.3},
        "bias": {"attn_mask": torch.randn(SHAPE[0], 1, SHAPE[2], SHAPE[2])},
        "scale": {"scale": 0.5},
        "grouped": {"enable_gqa": True},
    }
    options = every.get(case, {})
    if case == "grouped":
        key, value = key[:, :1], value[:, :1]
    call = FusedCall(query, key, value, **options)
    scores = query.double() @ call.key.double().mT * options.get("scale", SHAPE[-1] ** -0.5)
    mask = options.get("attn_mask")
    if case == "causal":
        mask = torch.ones(SHAPE[2], SHAPE[2], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    known = scores.logsumexp(-1).float()
    assert call.agrees(known)
    assert not call.agrees(known * (1 + 1e-3))  # the rounding of TF32
    assert not call.agrees(known / torch.log(torch.tensor(2.0)))  # another base
    assert not call.agrees(torch.zeros_like(known))
