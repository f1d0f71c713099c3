"""Means, maxima and gates of feature maps whose backward passes keep the map alone: no product, no mask and no copy of it.

The work runs over a few images at a time, which stay in the cache of a CPU. Where PyTorch must see single operations, as in a capture, a
compiler or `torch.func`, the same is computed in the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from visattn.nn.means import mean_over

_IN_CACHE = 1 << 19  # numbers of a map that are worked on at once on a CPU: 2 MB
_DTYPES = torch.float32, torch.float64


def is_lean(x: Tensor) -> bool:
    """Check whether a plain map `(B, C, H, W)` is in a training step that nothing watches."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or type(x) is not Tensor:
        return False
    is_watched = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    is_trained = torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
    return is_trained and not is_watched and not is_transformed and x.dtype in _DTYPES and x.is_contiguous()


class PooledPlaces(Function):
    """Mean and maximum of each channel, with the map itself, through which its other gradients pass."""

    @staticmethod
    def plain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the map `(B, C, H, W)`, and `(B, C, 1, 1)` means and maxima."""
        return x, mean_over(x, 2, 3), x.amax((2, 3), keepdim=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """See `plain`."""
        _, mean, peak = PooledPlaces.plain(x)
        ctx.save_for_backward(x, peak)
        return x.view_as(x), mean, peak

    @staticmethod
    def backward(ctx: Any, of_map: Tensor, of_mean: Tensor, of_peak: Tensor) -> Tensor:  # noqa: ANN401
        """Return the gradient of the map."""
        x, peak = ctx.saved_tensors
        if torch.is_grad_enabled():
            (gradient,) = _taken_twice(PooledPlaces.plain, (x,), (of_map, of_mean, of_peak))
            return gradient
        gradient, of_mean = of_map.contiguous(), of_mean / (x.shape[2] * x.shape[3])
        for some in _images(x):
            is_peak = torch.eq(x[some], peak[some], out=torch.empty_like(x[some]))  # in numbers, which a CPU vectorizes
            of_each = of_peak[some] / is_peak.sum((2, 3), keepdim=True)
            gradient[some].add_(of_mean[some]).addcmul_(is_peak, of_each)
        return gradient


class PooledChannels(Function):
    """Mean and maximum over the channels of a map times a gate, with the map itself, through which its other gradients pass."""

    @staticmethod
    def plain(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the map `(B, C, H, W)`, and `(B, 1, H, W)` means and maxima of it times the gate `(B, C, 1, 1)`."""
        gated = x * gate
        return x, mean_over(gated, 1), gated.amax(1, keepdim=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """See `plain`."""
        mean, peak = (x.new_empty(len(x), 1, *x.shape[2:]) for _ in range(2))
        for some in _images(x):
            _, mean[some], peak[some] = PooledChannels.plain(x[some], gate[some])
        ctx.save_for_backward(x, gate, peak)
        return x.view_as(x), mean, peak

    @staticmethod
    def backward(ctx: Any, of_map: Tensor, of_mean: Tensor, of_peak: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of the map and the gate."""
        x, gate, peak = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_x, of_gate = _taken_twice(PooledChannels.plain, (x, gate), (of_map, of_mean, of_peak))
            return of_x, of_gate
        gradient, of_gate, of_mean = of_map.contiguous(), torch.empty_like(gate), of_mean / x.shape[1]
        for some in _images(x):
            slope = (x[some] * gate[some]).eq_(peak[some])
            slope.mul_(of_peak[some] / slope.sum(1, keepdim=True)).add_(of_mean[some])
            gradient[some].addcmul_(slope, gate[some])
            of_gate[some] = slope.mul_(x[some]).sum((2, 3), keepdim=True)
        return gradient, of_gate


class Gated(Function):
    """A map times a gate of its channels and a gate of its places."""

    @staticmethod
    def plain(x: Tensor, channels: Tensor, places: Tensor) -> tuple[Tensor]:
        """Multiply a map `(B, C, H, W)` by gates `(B, C, 1, 1)` and `(B, 1, H, W)`."""
        return (x * channels * places,)

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: Tensor, places: Tensor) -> Tensor:  # noqa: ANN401
        """See `plain`."""
        ctx.save_for_backward(x, channels, places)
        product = torch.empty_like(x)
        for some in _images(x):
            torch.mul(x[some], channels[some], out=product[some]).mul_(places[some])
        return product

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of the map and both gates."""
        x, channels, places = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_x, of_channels, of_places = _taken_twice(Gated.plain, (x, channels, places), (of_product,))
            return of_x, of_channels, of_places
        gradient, of_channels, of_places = torch.empty_like(x), torch.empty_like(channels), torch.empty_like(places)
        for some in _images(x):
            of_both = (of_product[some] * x[some]).flatten(2)
            of_places[some] = (channels[some].flatten(2).mT @ of_both).view_as(places[some])
            of_channels[some] = (of_both @ places[some].flatten(2).mT).view_as(channels[some])
            torch.mul(of_product[some], places[some], out=gradient[some]).mul_(channels[some])
        return gradient, of_channels, of_places


def _images(x: Tensor) -> Iterator[slice]:
    """Yield slices of images that are worked on at once; on other devices than a CPU, all of them."""
    count = max(1, len(x) if x.device.type != "cpu" else _IN_CACHE // max(1, x[0].numel()))
    return (slice(start, start + count) for start in range(0, len(x), count))


def _taken_twice(
    plain: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return gradients of a plain function as a part of the graph, for gradients of gradients."""
    with torch.enable_grad():
        # views, since one input may be computed from another
        tracked = tuple(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in inputs)
        return torch.autograd.grad(plain(*tracked), tracked, gradients, create_graph=True)
