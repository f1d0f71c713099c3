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

_IN_CACHE = 1 << 18  # numbers of a map that a thread works on at once on a CPU: 1 MB, of which three fit into its second cache
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
    def backward(ctx: Any, of_map: Tensor, of_mean: Tensor, of_peak: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the gradient of the map."""
        x, peak = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _taken_twice(PooledPlaces.plain, (x,), (of_map, of_mean, of_peak))
        gradient, of_mean = of_map.contiguous(), of_mean / (x.shape[2] * x.shape[3])
        scratch = _scratch(x)
        for some, slope, some_peak, mean_share, peak_share in _images(x, gradient, peak, of_mean, of_peak):
            is_peak = torch.eq(some, some_peak, out=scratch[: len(some)])  # in numbers, which a CPU vectorizes
            slope.add_(mean_share).addcmul_(is_peak, peak_share / is_peak.sum((2, 3), keepdim=True))
        return (gradient,)


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
        scratch = _scratch(x)
        for some, some_gate, some_mean, some_peak in _images(x, gate, mean, peak):
            gated = torch.mul(some, some_gate, out=scratch[: len(some)])
            torch.mean(gated, 1, keepdim=True, out=some_mean)
            torch.amax(gated, 1, keepdim=True, out=some_peak)
        ctx.save_for_backward(x, gate, peak)
        return x.view_as(x), mean, peak

    @staticmethod
    def backward(ctx: Any, of_map: Tensor, of_mean: Tensor, of_peak: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the gradients of the map and the gate."""
        x, gate, peak = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _taken_twice(PooledChannels.plain, (x, gate), (of_map, of_mean, of_peak))
        gradient, of_gate, of_mean = of_map.contiguous(), torch.empty_like(gate), of_mean / x.shape[1]
        scratch, parts = _scratch(x), _images(x, gate, peak, gradient, of_gate, of_mean, of_peak)
        for some, some_gate, some_peak, some_gradient, gate_gradient, mean_share, peak_share in parts:
            slope = torch.mul(some, some_gate, out=scratch[: len(some)]).eq_(some_peak)
            slope.mul_(peak_share / slope.sum(1, keepdim=True)).add_(mean_share)
            some_gradient.addcmul_(slope, some_gate)
            torch.sum(slope.mul_(some), (2, 3), keepdim=True, out=gate_gradient)
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
        for some, some_channels, some_places, out in _images(x, channels, places, product):
            torch.mul(some, some_channels, out=out).mul_(some_places)
        return product

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the gradients of the map and both gates."""
        x, channels, places = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _taken_twice(Gated.plain, (x, channels, places), (of_product,))
        gradient, of_channels, of_places = torch.empty_like(x), torch.empty_like(channels), torch.empty_like(places)
        scratch, parts = _scratch(x), _images(x, channels, places, of_product, gradient, of_channels, of_places)
        for some, some_channels, some_places, slope, out, channels_out, places_out in parts:
            of_both = torch.mul(slope, some, out=scratch[: len(some)]).flatten(2)
            torch.bmm(some_channels.flatten(2).mT, of_both, out=places_out.flatten(2))
            torch.bmm(of_both, some_places.flatten(2).mT, out=channels_out.flatten(2))
            torch.mul(slope, some_places, out=out).mul_(some_channels)
        return gradient, of_channels, of_places


class LargerGated(Function):
    """The larger product of a map with a gate of its channels and with a gate of its places."""

    @staticmethod
    def plain(x: Tensor, channels: Tensor, places: Tensor) -> tuple[Tensor]:
        """Multiply a map `(B, C, H, W)` by gates `(B, C, 1, 1)` and `(B, 1, H, W)`, and return the larger products."""
        return (torch.maximum(x * channels, x * places),)

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: Tensor, places: Tensor) -> Tensor:  # noqa: ANN401
        """See `plain`."""
        ctx.save_for_backward(x, channels, places)
        larger, scratch = torch.empty_like(x), _scratch(x)
        for some, some_channels, some_places, out in _images(x, channels, places, larger):
            by_channels = torch.mul(some, some_channels, out=scratch[: len(some)])
            torch.maximum(torch.mul(some, some_places, out=out), by_channels, out=out)
        return larger

    @staticmethod
    def backward(ctx: Any, of_larger: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the gradients of the map and both gates; equal products get half each, as in PyTorch."""
        x, channels, places = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _taken_twice(LargerGated.plain, (x, channels, places), (of_larger,))
        gradient, of_channels, of_places = torch.empty_like(x), torch.empty_like(channels), torch.empty_like(places)
        scratch, other, parts = (
            _scratch(x),
            _scratch(x),
            _images(x, channels, places, of_larger, gradient, of_channels, of_places),
        )
        for some, some_channels, some_places, slope, out, channels_out, places_out in parts:
            by_channels, by_places = (
                torch.mul(some, some_channels, out=scratch[: len(some)]),
                torch.mul(some, some_places, out=out),
            )
            larger = torch.gt(by_channels, by_places, out=other[: len(some)])
            share = torch.ge(by_channels, by_places, out=by_channels).add_(larger).mul_(0.5)  # of the channels: 0, 1/2 or 1
            torch.lerp(some_places, some_channels, share, out=out).mul_(slope)
            both = torch.mul(some, slope, out=other[: len(some)])
            torch.sum(share.mul_(both), (2, 3), keepdim=True, out=channels_out)
            torch.sum(both.sub_(share), 1, keepdim=True, out=places_out)
        return gradient, of_channels, of_places


def _images(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the images of a map and of what belongs to it that are worked on at once; on other devices than a CPU, all of them."""
    return zip(*(torch.split(tensor, _count(x)) for tensor in (x, *others)), strict=True)


def _scratch(x: Tensor) -> Tensor:
    """Return memory for a map of the images that are worked on at once: new memory for each costs as much as the work."""
    return torch.empty_like(x[: _count(x)])


def _count(x: Tensor) -> int:
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(1, torch.get_num_threads() * _IN_CACHE // max(1, x[0].numel()))


def _taken_twice(
    plain: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return gradients of a plain function as a part of the graph, for gradients of gradients."""
    with torch.enable_grad():
        # views, since one input may be computed from another
        tracked = tuple(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in inputs)
        return torch.autograd.grad(plain(*tracked), tracked, gradients, create_graph=True)
