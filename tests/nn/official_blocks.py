"""Attention blocks as their authors publish them: the names of their tensors, and what they compute, one image and one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ContextBlock(nn.Module):
    """Block of GCNet: a context vector is added to each position, or its sigmoid scales the channels."""

    def __init__(self, channels: int, width: int, *, adds: bool) -> None:
        super().__init__()
        self.conv_mask = nn.Conv2d(channels, 1, 1)
        change = nn.Sequential(
            nn.Conv2d(channels, width, 1), nn.LayerNorm([width, 1, 1]), nn.ReLU(), nn.Conv2d(width, channels, 1)
        )
        self.channel_add_conv = change if adds else None
        self.channel_mul_conv = None if adds else change

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for image in x:
            share = self.conv_mask(image[None])[0, 0].exp()
            context = (image * share / share.sum()).sum((1, 2))[None, :, None, None]
            if self.channel_add_conv is not None:
                results.append(image + self.channel_add_conv(context)[0])
            else:
                assert self.channel_mul_conv is not None
                results.append(image / (1 + (-self.channel_mul_conv(context)[0]).exp()))
        return torch.stack(results)


class Plane(nn.Module):
    """Branch of triplet attention; the convolution has another name in the networks of its authors."""

    def __init__(self, part: str) -> None:
        super().__init__()
        block = nn.Module()
        block.conv, block.bn = nn.Conv2d(2, 1, 7, padding=3, bias=False), nn.BatchNorm2d(1)
        self.add_module(part, block)

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.children()
        largest_and_mean = torch.stack([x.max(1).values, x.mean(1)], 1)
        return x * torch.sigmoid(block.bn(block.conv(largest_and_mean)))  # type: ignore[operator]


class Triplet(nn.Module):
    """Triplet attention: the mean of three gated maps; each gate pools over another axis."""

    def __init__(self, names: tuple[str, str, str] = ("cw", "hc", "hw"), part: str = "conv") -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Plane(part))

    def forward(self, x: Tensor) -> Tensor:
        over_rows, over_columns, over_channels = self.children()
        first = over_rows(x.transpose(1, 2)).transpose(1, 2)
        second = over_columns(x.transpose(1, 3)).transpose(1, 3)
        return (first + second + over_channels(x)) / 3  # type: ignore[no-any-return]


class SmpSCSE(nn.Module):
    """scSE of segmentation_models_pytorch: two `nn.Sequential`, and a sum."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.cSE = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, channels, 1), nn.Sigmoid()
        )
        self.sSE = nn.Sequential(nn.Conv2d(channels, 1, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cSE(x) + x * self.sSE(x)  # type: ignore[no-any-return]


class AuthorsSCSE(nn.Module):
    """scSE of its authors: linear layers, and the larger of both."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cSE, self.sSE = nn.Module(), nn.Module()
        self.cSE.fc1, self.cSE.fc2 = nn.Linear(channels, channels // 2), nn.Linear(channels // 2, channels)
        self.sSE.conv = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        channels = torch.sigmoid(self.cSE.fc2(F.relu(self.cSE.fc1(x.mean((2, 3))))))  # type: ignore[operator]
        return torch.max(x * channels[..., None, None], x * torch.sigmoid(self.sSE.conv(x)))  # type: ignore[operator]


class NonLocalBlock(nn.Module):
    """Non-local block of Non-local_pytorch, written as a loop over images and queries."""

    def __init__(self, channels: int, similarity: str, *, pools: bool, norm: bool = True) -> None:
        super().__init__()
        width, self.similarity = channels // 2, similarity

        def layer(*, pooled: bool) -> nn.Module:
            conv = nn.Conv2d(channels, width, 1)
            return nn.Sequential(conv, nn.MaxPool2d(2)) if pooled else conv

        self.g = layer(pooled=pools)
        last = nn.Conv2d(width, channels, 1)
        self.W = nn.Sequential(last, nn.BatchNorm2d(channels)) if norm else last
        if similarity != "gaussian":
            self.theta, self.phi = layer(pooled=False), layer(pooled=pools)
        else:
            self.theta, self.phi = nn.Identity(), nn.MaxPool2d(2) if pools else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        answers = torch.zeros(len(x), x.shape[1] // 2, x.shape[2] * x.shape[3], dtype=x.dtype)
        for number in range(len(x)):
            image = x[number : number + 1]
            queries, keys, values = (part(image)[0].flatten(1) for part in (self.theta, self.phi, self.g))
            for query in range(queries.shape[1]):
                scores = (queries[:, query, None] * keys).sum(0)
                weights = scores / len(scores) if self.similarity == "dot_product" else scores.exp() / scores.exp().sum()
                answers[number, :, query] = (values * weights).sum(1)
        return x + self.W(answers.reshape(*answers.shape[:2], *x.shape[2:]))  # type: ignore[no-any-return]
