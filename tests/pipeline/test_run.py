"""State of a model after one pass: nothing in it may break later training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests import tiny
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import look, one_pass
from visattn.core.pipeline.targets import Target
from visattn.core.pipeline.tensors import prepare_tensor


class Keeps(nn.Module):
    """Module that adds a table cached in the first forward pass, like networks with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny.vit()
        self.scale = nn.Parameter(torch.ones(1))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[-1]).expand(x.shape[-2:]).clone()
        logits: Tensor = self.vit(x * self.scale + self.scale * self.table)
        return logits


def test_tensors_that_a_model_caches_can_be_trained_with_later() -> None:
    model = Keeps()
    look(model, prepare_tensor(torch.rand(1, 3, *tiny.INPUT), model))
    model.train()
    model(tiny.pixels()).sum().backward()
    assert model.scale.grad is not None


def test_a_pass_returns_the_classes_that_it_explains() -> None:
    model = tiny.vit()
    pixels = torch.cat([tiny.pixels(), tiny.pixels().flip(3)])
    labels = [f"kind {i}, and more" for i in range(1000)]
    with torch.no_grad():
        shares = model.eval()(pixels).softmax(1)
    resolved = one_pass(model, Prepared(pixels, (), ()), target=Target([1, "kind 2"], labels=labels)).resolved
    assert resolved is not None
    assert resolved.names == ("kind 1", "kind 2")
    torch.testing.assert_close(
        torch.tensor([score["probability"] for score in resolved.scores]), torch.stack([shares[0, 1], shares[1, 2]])
    )
