"""Tokens that several windows read: one if its vectors are the same in all of them, and else a token of each window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.tokens.sharing import _names, may_share, merged
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.nn import SlidingWindowAttention

BOX = Box(0, 0, 8, 12)


class Globals(nn.Module):
    """Two layers of sliding windows with global tokens, on a grid of several tiles."""

    def __init__(self, grid: tuple[int, int], count: int) -> None:
        super().__init__()
        self.grid, self.embed = grid, nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, count, 8))
        self.layers = nn.ModuleList(SlidingWindowAttention(8, 2, radius=2, global_tokens=count) for _ in range(2))

    def given(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.given(x)
        for layer in self.layers:
            x = x + layer(x, self.grid)
        return x.mean(1)


class Tiles(nn.Module):
    """Four tiles with a class token each, which first ask, and are then read by the patches of their tile alone."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.embed = apart, nn.Conv2d(3, 8, 4, 4)
        self.cls_token, self.qkv = nn.Parameter(torch.randn(1, 1, 8)), nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # (B, 8, 4, 6)
        x = x.unfold(2, 2, 2).unfold(3, 3, 3).permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(0, 2)  # (B * 4, 6, 8)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        if self.apart:
            query, key, value = self.qkv[0](x)[:, None].chunk(3, -1)
            x = F.scaled_dot_product_attention(query, key, value)[:, 0]
        query, key, value = self.qkv[1](x)[:, None].chunk(3, -1)
        out = F.scaled_dot_product_attention(query[:, :, 1:], key, value)
        return torch.unflatten(out, 0, (-1, 4)).mean((1, 2, 3))


def last(model: nn.Module, size: tuple[int, int], images: int, **options: Any) -> visattn.Recording:
    x = torch.randn(images, 3, *size, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # traced, and on the tape that is known
        with torch.no_grad(), visattn.capture(model.eval(), **options) as recording:
            model(x)
    return recording


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("grid", "count", "images"), [((24, 20), 2, 1), ((13, 21), 3, 2)])
def test_global_tokens_of_windows_are_one_token_each(grid: tuple[int, int], count: int, images: int, values: bool) -> None:
    torch.manual_seed(0)
    model = Globals(grid, count)
    recording = last(model, (4 * grid[0], 4 * grid[1]), images, values=values)
    names = ("cls", *(f"cls{number}" for number in range(2, count + 1)))
    assert [(record.keys.prefix, record.queries.prefix, record.keys.grid) for record in recording] == [
        (names, (), grid),
        (names, names, grid),
    ] * 2
    with torch.no_grad():
        x = model.given(torch.randn(images, 3, 4 * grid[0], 4 * grid[1], generator=torch.Generator().manual_seed(0)))
        first: Any = model.layers[0]
        _, weights = first(x, grid, need_weights=True)
    torch.testing.assert_close(recording[0].operator.dense(), weights[:, :, count:], rtol=0, atol=1e-6)
    row = torch.rand(images, 2, 1, grid[0] * grid[1])
    torch.testing.assert_close(row @ recording[0].operator, row @ weights[:, :, count:], rtol=1e-4, atol=1e-5)
    if values:
        expected = first.qkv(x).detach()[..., 16:].view(images, -1, 2, 4).transpose(1, 2)
        torch.testing.assert_close(recording.values("layers.0"), expected)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("apart", [True, False])
def test_class_tokens_of_tiles_are_one_only_as_long_as_they_are_the_same(apart: bool, images: int) -> None:
    torch.manual_seed(0)
    recording = last(Tiles(apart), (16, 24), images)
    assert recording[-1].keys.prefix == (("cls", "cls2", "cls3", "cls4") if apart else ("cls",))
    assert recording[-1].keys.grid == (4, 6)
    if apart:
        assert recording[0].queries.prefix == ("cls", "cls2", "cls3", "cls4")


def layout(prefix: tuple[str, ...] = ()) -> TokenLayout:
    return TokenLayout("tokens", prefix, (2, 3), BOX)


def windows(queries: tuple[str, ...] = ()) -> Arrangement:
    """Return two windows of three patches each, which read two tokens of their own."""
    index = torch.tensor([[0, 2, 4, 5, 6], [1, 3, 7, 8, 9]])
    order = torch.arange(2).view(1, 1, 2)
    return Arrangement("cross", layout(queries), layout(("cls", "cls2", "register0", "register1")), order, index[:, 2:], index)


def test_only_columns_with_the_same_keys_and_values_are_merged() -> None:
    key = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    value = key.flip(2).contiguous()
    assert merged(windows(), key, value).keys.prefix == ("cls", "cls2", "register0", "register1")
    key[1, 1] = key[0, 1]
    assert merged(windows(), key, value).keys.prefix == ("cls", "cls2", "register0", "register1")
    value[1, 1] = value[0, 1]
    one = merged(windows(), key, value)
    assert one.keys.prefix == ("cls", "cls2", "register0")
    assert one.key_index is not None
    assert one.key_index.tolist() == [[0, 2, 3, 4, 5], [1, 2, 6, 7, 8]]
    key[1, 0], value[1, 0] = key[0, 0], value[0, 0]
    both = merged(windows(), key, value)
    assert both.keys.prefix == ("cls", "register0")
    assert both.key_index is not None
    assert both.key_index.tolist() == [[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]
    assert merged(windows(("cls",)), key, value).keys.prefix == ("cls", "cls2", "register0", "register1")


def test_names_are_numbered_anew() -> None:
    assert _names(["cls", "cls5", "register3", "register7", "word1.2", "token4"]) == (
        "cls",
        "cls2",
        "register0",
        "register1",
        "word0",
        "token0",
    )


@pytest.mark.parametrize(
    ("lead", "images", "may"), [((8,), 2, True), ((2, 3, 4), 2, True), ((2, 3), 2, False), ((2,), 2, False), ((), 1, False)]
)
def test_calls_without_windows_share_nothing(lead: tuple[int, ...], images: int, may: bool) -> None:
    assert may_share(lead, images) is may
