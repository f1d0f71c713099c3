"""Windows in image order: the operator times the values is the layer's own output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import visattn
from tests import tiny, zoo
from tests.conftest import Figures
from visattn.core.records import AttentionRecord

Size = tuple[int, int]
Position = Callable[[int, int], int]  # index of the token at a row and column in the layer's own output


def window(row: int, column: int, grid: Size, side: Size) -> int:
    """Return the index in adjacent windows over a grid padded at the bottom and right; tokens are row by row in each."""
    across = -(-grid[1] // side[1])
    number = row // side[0] * across + column // side[1]
    return number * side[0] * side[1] + row % side[0] * side[1] + column % side[1]


def shifted(row: int, column: int, grid: Size, side: Size, shift: Size) -> int:
    """Return the index in windows of a grid that is first rolled up and left, as in Swin."""
    return window((row - shift[0]) % grid[0], (column - shift[1]) % grid[1], grid, side)


def dilated(row: int, column: int, grid: Size, side: Size) -> int:
    """Return the index in windows whose tokens are `grid / side` apart, as in MaxViT's grid attention."""
    steps = grid[0] // side[0], grid[1] // side[1]
    number = row % steps[0] * steps[1] + column % steps[1]
    return number * side[0] * side[1] + row // steps[0] * side[1] + column // steps[1]


def unrolled(row: int, column: int, grid: Size, times: int) -> int:
    """Return the index in Hiera's order: the grid is halved `times` times, each time with the position in its 2 x 2 block first."""
    if not times:
        return row * grid[1] + column
    half = grid[0] // 2, grid[1] // 2
    quarter = (row % 2) * 2 + column % 2
    return quarter * half[0] * half[1] + unrolled(row // 2, column // 2, half, times - 1)


def pair(side: Any) -> Size:
    return (side, side) if isinstance(side, int) else (int(side[0]), int(side[1]))


def of_swin(model: nn.Module, layer: str, grid: Size, _: Tensor) -> Position:
    block: Any = model.get_submodule(layer.rpartition(".")[0])
    return lambda r, c: shifted(r, c, grid, pair(block.window_size), pair(block.shift_size))


def of_maxvit(model: nn.Module, layer: str, grid: Size, _: Tensor) -> Position:
    part: Any = model.get_submodule(layer.rpartition(".")[0])
    place = window if part.partition_block else dilated
    return lambda r, c: place(r, c, grid, pair(part.partition_size))


def of_hiera(model: nn.Module, layer: str, grid: Size, _: Tensor) -> Position:
    whole: Any = model
    times = {side: 3 - i for i, side in enumerate(whole.tokens_spatial_shape[0] >> j for j in range(4))}
    return lambda r, c: unrolled(r, c, grid, max(0, times[grid[0]]))


def of_windows(model: nn.Module, layer: str, grid: Size, given: Tensor) -> Position:
    """Return the index function for windows of the layer's size, else of its output's rows and columns, else square ones."""
    own = getattr(model.get_submodule(layer), "window_size", None)
    side = pair(own) if own else pair(given.shape[1:3]) if given.ndim == 4 else pair(round(given.shape[1] ** 0.5))
    return lambda r, c: window(r, c, grid, side)


def of_blocks(model: nn.Module, layer: str, grid: Size, given: Tensor) -> Position:
    """Return the index function for NesT's square blocks, `(B, blocks, tokens, D)`."""
    return lambda r, c: window(r, c, grid, pair(round(given.shape[2] ** 0.5)))


def of_image(model: nn.Module, layer: str, grid: Size, _: Tensor) -> Position:
    return lambda r, c: r * grid[1] + c


class Case(NamedTuple):
    """Model, its input size, and the order of tokens in the output of its layers."""

    build: Callable[[Size], nn.Module]
    size: Size
    position: Callable[[nn.Module, str, Size, Tensor], Position]
    heads_last: bool = False  # channels are ordered with the head index last


def _family(name: str) -> Callable[[Size], nn.Module]:
    return zoo.FAMILIES[name].build


CASES: dict[str, Case] = {
    "swin": Case(_family("swin"), (64, 64), of_swin),
    "swin wide": Case(_family("swin"), (64, 96), of_swin),
    "swin padded": Case(_family("swin padded"), (40, 56), of_swin),
    "swin with oblong windows": Case(_family("swin with oblong windows"), (56, 40), of_swin),
    "swin v2 padded": Case(_family("swin v2 padded"), (40, 56), of_swin),
    "swin v2": Case(_family("swin v2"), (64, 96), of_swin),
    "swin of torchvision": Case(_family("torchvision swin"), (64, 96), of_image),
    "swin of torchvision padded": Case(_family("torchvision swin padded"), (40, 56), of_image),
    "swin v2 of torchvision": Case(_family("torchvision swin v2"), (64, 96), of_image),
    "maxvit": Case(_family("maxvit"), (64, 96), of_maxvit),
    "maxvit with its own windows": Case(_family("maxvit of tensorflow"), (128, 64), of_maxvit),
    "hiera": Case(_family("hiera"), (64, 128), of_hiera),
    "sam2 hiera": Case(_family("sam2 hiera"), (128, 128), of_windows),
    "sam2 hiera padded": Case(_family("sam2 hiera"), (96, 160), of_windows),
    "davit": Case(_family("davit"), (64, 96), of_windows),
    "tiny_vit": Case(_family("tiny_vit"), (96, 128), of_windows),
    "nest": Case(_family("nest"), (64, 64), of_blocks, heads_last=True),
    "gcvit": Case(_family("gcvit"), (64, 96), of_windows),
    "sam": Case(_family("sam"), (64, 96), of_windows),
}


def values_of(record: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Return values in image order, `(B, heads, K, d)`, and the common value of all padding, `(B, heads, d)`."""
    value, index = record.value, record.operator.key_index
    assert value is not None
    whole = value.new_full((*value.shape[:2], record.operator.shape[3], value.shape[-1]), torch.nan)
    padding = value.new_zeros(*value.shape[:2], value.shape[-1])
    if index is None:
        return value, padding
    for b in range(index.shape[0]):
        for i in range(index.shape[1]):
            if index[b, i] >= 0:
                whole[:, :, index[b, i]] = value[:, :, b, i]
            else:
                padding = value[:, :, b, i]
    missed = [(value[:, :, b, i] - padding).abs().max() for b, i in (index < 0).nonzero().tolist()]
    assert not missed or max(missed) == 0
    return whole, padding


def own_outputs(model: nn.Module) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    return outputs


@torch.no_grad()
@pytest.mark.parametrize("name", list(CASES))
def test_operator_times_values_equals_the_output_of_the_layer(name: str, figures: Figures) -> None:
    """Compare with each layer's output. With a bias, padding has a value too, which is added by the weight that leaks to it."""
    case = CASES[name]
    model = case.build(case.size).eval().double()
    for key, parameter in model.named_parameters():
        if "qkv" in key:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)  # peaked attention, and padding with a nonzero value
    outputs = own_outputs(model)
    with visattn.capture(model, values=True) as recording:
        model(tiny.pixels(2, case.size).double())
    worst, windowed = 0.0, False
    for record in recording.select(kind="self").records + recording.select(kind="cross").records:
        operator = record.operator.to(torch.float64)
        windowed = windowed or operator.key_index is not None
        values, padding = values_of(record)
        mixed = operator @ values + operator.leaked()[..., None] * padding[:, :, None]
        owner: Any = model.get_submodule(record.layer)
        joined = mixed.permute(0, 2, 3, 1) if case.heads_last else mixed.transpose(1, 2)
        projected = owner.proj(joined.flatten(2))  # (B, Q, D)
        given = outputs[record.layer]
        grid = record.queries.grid[0], record.queries.grid[1]
        position = case.position(model, record.layer, grid, given)
        order = [position(r, c) for r in range(grid[0]) for c in range(grid[1])]
        expected = given.reshape(2, -1, given.shape[-1])[:, order]
        assert projected.isfinite().all()
        worst = max(worst, float((projected - expected).abs().max() / expected.abs().max()))
    assert windowed
    figures(f"{name}: operator times values against the layer's own output, relative", worst, "<= 1e-5")
    assert worst <= 1e-5
