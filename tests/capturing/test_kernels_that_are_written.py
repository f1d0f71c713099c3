"""Kernels of convolutions that are written between forward passes without a trace: tokens lie where the kernels now say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import visattn
from visattn.core.capturing.trace.tape import TAPES

CHANNELS = 64  # its kernel is large enough to be marked by a projection
CENTERED = torch.zeros(3, 3).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(1.0))
LEANING = torch.tensor([[1.0, 0.2, 0.1]]).expand(3, 3)


class Convolved(nn.Module):
    """Patches, a convolution of them, and attention among its cells; a depthwise one has a small kernel."""

    def __init__(self, *, depthwise: bool = False, standardized: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        groups = CHANNELS if depthwise else 1
        self.patches = nn.Conv2d(3, CHANNELS, 4, 4)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups)
        self.amounts, self.standardized = torch.rand(*self.conv.weight.shape[:2], 1, 1, generator=generator) + 0.5, standardized
        self.write(CENTERED)

    def write(self, taps: Tensor) -> None:
        """Give the kernel other taps, such that the version of the weight stays the same."""
        self.conv.weight.detach().numpy()[:] = (self.amounts * taps).numpy()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight * 2 if self.standardized else self.conv.weight
        tokens = F.conv2d(self.patches(x), weight, self.conv.bias, padding=1, groups=self.conv.groups).flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens).mean((1, 2))


def reason(model: nn.Module) -> str | None:
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.ones(1, 3, 16, 16))
    return recording[0].reason


MODELS: dict[str, Callable[[], Convolved]] = {
    "large": Convolved,
    "small": lambda: Convolved(depthwise=True),
    "computed": lambda: Convolved(standardized=True),
    "channels last": lambda: Convolved().to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_behind_a_kernel_that_was_written_are_those_of_a_fresh_capture(name: str) -> None:
    model = MODELS[name]().eval()
    for taps, located in [(CENTERED, True)] * 3 + [(LEANING, False)] * 2 + [(CENTERED, True)] * 2 + [(LEANING, False)]:
        model.write(taps)
        assert (reason(model) is None) == located
    assert len(TAPES.of(model)) == 2


def test_one_row_that_is_written_is_noticed() -> None:
    model = Convolved().eval()
    assert [reason(model) for _ in range(3)] == [None] * 3
    model.conv.weight.detach().numpy()[5] = 1e3 * LEANING.numpy()
    assert reason(model)


def test_model_that_leaves_the_tape_behind_a_written_kernel_is_located_by_the_new_one() -> None:
    class Branching(Convolved):
        scaled = False

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(self.patches(x))
            tokens = (tokens * 2 if self.scaled else tokens).flatten(2).mT[:, None]
            return F.scaled_dot_product_attention(tokens, tokens, tokens).mean((1, 2))

    model = Branching().eval()
    for scaled, taps in [
        (False, CENTERED),
        (False, CENTERED),
        (True, LEANING),
        (False, LEANING),
        (True, CENTERED),
        (True, LEANING),
    ]:
        model.scaled = scaled
        model.write(taps)
        assert (reason(model) is None) == (taps is CENTERED)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count of the values that are read inside the model."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_while_a_known_model_runs() -> None:
    model = Convolved().eval()
    for _ in range(2):
        assert reason(model) is None
    inside: Any = Reads()  # type: ignore[no-untyped-call]
    handles = (
        model.patches.register_forward_hook(lambda *_: inside.__enter__() and None),
        model.register_forward_hook(lambda *_: inside.__exit__(None, None, None)),
    )
    assert reason(model) is None
    for handle in handles:
        handle.remove()
    assert inside.count == 0
