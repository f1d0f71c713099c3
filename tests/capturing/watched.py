"""A model of one layer that runs a given function, and the list of what a watch of it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.forward import Forward
from visattn.core.capturing.intercept.calls import Call
from visattn.core.capturing.trace.tape import Attention, Tape
from visattn.core.capturing.watching import Watch


class Layer(nn.Module):
    """Layer that runs a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Model(nn.Module):
    """Model that hands its arguments over to the layer `attn`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.attn = Layer(run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


class Seen:
    """Watch of a model, and the attention calls and forward passes that it has reported.

    Attributes:
        calls: Layer, module, call and description of each attention call.
        forwards: Forward passes that have ended.
        drops: Number of forward passes that have failed.
    """

    def __init__(self, model: nn.Module, replace: Any = None, *, facts: dict[str, Any] | None = None, **options: Any) -> None:
        self.calls: list[tuple[str, nn.Module, Call, Attention]] = []
        self.forwards: list[Forward] = []
        self.drops = 0
        description = ModelDescription({}, "", **facts or {})
        receive: Any = lambda *call: self.calls.append(call)  # noqa: E731
        options = {"finish": self.forwards.append, "drop": self._drop} | options
        self.watch = Watch(model, description, receive, replace, **options)

    def _drop(self) -> None:
        self.drops += 1

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Layer and number of each attention call."""
        return [(layer, attention.call) for layer, _, _, attention in self.calls]

    @property
    def attention(self) -> Attention:
        """Description of the last attention call."""
        return self.calls[-1][3]

    @property
    def call(self) -> Any:
        """The last attention call."""
        return self.calls[-1][2]

    def tape(self, number: int = -1) -> Tape:
        return self.forwards[number]._tape


def image(batch: int = 2, seed: int = 0) -> Tensor:
    """Return images of three channels and 2 x 3 pixels."""
    return torch.randn(batch, 3, 2, 3, generator=torch.Generator().manual_seed(seed))


def tokens(x: Tensor) -> Tensor:
    """Return the pixels of images as the tokens of one head, `(B, 1, 6, 3)`."""
    return x.flatten(2).mT[:, None]


def attend(x: Tensor) -> Tensor:
    q = tokens(x)
    return F.scaled_dot_product_attention(q, q, q).mT.reshape(x.shape)


class Network(nn.Module):
    """Two layers one after the other, and one that lies three levels deep and is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(attend), Layer(attend)
        self.deep = nn.Sequential(nn.Sequential(nn.Sequential(Layer(attend))))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def watched(run: Callable[..., Any], *args: Any, times: int = 1, replace: Any = None, **options: Any) -> tuple[Seen, list[Any]]:
    """Run a function as the layer of a model several times; return what was seen, and the outputs."""
    model = Model(run)
    seen = Seen(model, replace, **options)
    with seen.watch.watching():
        outputs = [model(*args) for _ in range(times)]
    return seen, outputs
