"""From the places of a call's queries and keys to its layout: which image, head, block and token each row and column is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from visattn._support.types import Kind
from visattn.capturing.tokens.planes import Plane, Planes
from visattn.geometry import Box
from visattn.records import TokenLayout


class Unplaced(Exception):
    """Why a call cannot be put back on the image."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """How the operands of a call, `(*lead, tokens, d)`, become images, heads, blocks and tokens in canonical order.

    Attributes:
        kind: Kind of attention.
        queries: Layout of the queries.
        keys: Layout of the keys.
        order: `(B, heads, blocks)` number of each group of the flattened lead; None: the lead is `(B, heads)` as it is.
        query_index: `(blocks, q)` token of each row; None for canonical order.
        key_index: `(blocks, k)` likewise.
        reason: Why it cannot be put on the image; then tokens are only numbered.
    """

    kind: Kind
    queries: TokenLayout
    keys: TokenLayout
    order: Tensor | None = None
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    reason: str | None = None

    @cached_property
    def _swapped(self) -> bool | None:
        """Whether the lead has blocks before heads, or heads before blocks; None where it has neither and groups must be gathered."""
        assert self.order is not None  # noqa: S101
        images, heads, blocks = self.order.shape
        plain = torch.arange(self.order.numel(), device=self.order.device)
        if torch.equal(self.order, plain.view(images, heads, blocks)):
            return False
        return True if torch.equal(self.order, plain.view(images, blocks, heads).transpose(1, 2)) else None

    def take(self, tensor: Tensor) -> Tensor:
        """`(B, heads, tokens, d)`, or `(B, heads, blocks, tokens, d)` where there are indices."""
        if self.order is None:
            return tensor
        (images, heads, blocks), rest = self.order.shape, tensor.shape[-2:]
        if self._swapped is None:
            groups = tensor.reshape(-1, *rest)[self.order]
        elif self._swapped:
            groups = tensor.reshape(images, blocks, heads, *rest).transpose(1, 2)
        else:
            groups = tensor.reshape(images, heads, blocks, *rest)
        return groups if self.query_index is not None else groups[:, :, 0]

    def take_bias(self, bias: Tensor, lead: Sequence[int]) -> Tensor:
        """The same for a bias that broadcasts to `(*lead, q, k)`; axes along which it is constant stay 1."""
        bias = bias.reshape(*(1,) * (len(lead) + 2 - bias.ndim), *bias.shape)
        if self.order is None:
            return bias
        own = torch.arange(bias[..., 0, 0].numel(), device=bias.device).view(bias.shape[:-2])
        index = own.expand(*lead).flatten()[self.order]
        for dim in range(3):
            alike = index.narrow(dim, 0, 1)
            if bool((alike == index).all()):
                index = alike
        groups = bias.reshape(-1, *bias.shape[-2:])[index]
        return groups if self.query_index is not None else groups[:, :, 0]


def unplaced(lead: Sequence[int], queries: int, keys: int, box: Box, reason: str) -> Arrangement:
    """Tokens by number only: the weights are exact, where they belong is not known."""
    layouts = [TokenLayout("unknown", tuple(f"token{i}" for i in range(count)), (), box) for count in (queries, keys)]
    groups = 1
    for side in lead:
        groups *= side
    batch = lead[0] if lead else 1
    order = torch.arange(groups).view(batch, -1, 1)
    return Arrangement("unplaced", layouts[0], layouts[1], order, reason=reason)


def channels(lead: Sequence[int], queries: int, keys: int, box: Box, images: int) -> Arrangement:
    """Channels that attend to channels."""
    groups = torch.Size(lead).numel()
    if groups % images:
        raise Unplaced("the channels of several images are mixed")
    layouts = [TokenLayout("channels", tuple(f"channel{i}" for i in range(count)), (), box) for count in (queries, keys)]
    return Arrangement("channel", layouts[0], layouts[1], torch.arange(groups).view(images, -1, 1))


def arrange(planes: Planes, queries: Tensor | None, keys: Tensor, lead: Sequence[int], rows: int) -> Arrangement:
    """Put a call's tokens in order.

    Args:
        planes: What the codes mean.
        queries: `(*lead, q)` codes; None for learned queries of no place.
        keys: `(*lead, k)` codes.
        lead: The axes before tokens.
        rows: Number of queries in a group.

    Returns:
        The arrangement.

    Raises:
        Unplaced: If tokens are missing, mixed or doubled; the message says which.
    """
    keys = keys.expand(*lead, keys.shape[-1]).reshape(-1, keys.shape[-1])
    image = _images(planes, keys)
    both = keys if queries is None else torch.cat([queries.expand(*lead, rows).reshape(-1, rows), keys], 1)
    _, block = torch.unique(both, dim=0, return_inverse=True)
    order = _grouped(image, block, planes.images)
    first = order[:, 0]  # (images, blocks)
    key_codes = _local(planes, keys[first], image[first])
    key_layout, key_index = _canonical(planes, key_codes, "tokens")
    if any(len(torch.unique(block)) < len(block) for block in (index[index >= 0] for index in key_index)):
        raise Unplaced("a token is there several times")
    if queries is None:
        if order.shape[2] > 1:
            raise Unplaced("learned queries look at windows")
        names = tuple(f"query{i}" for i in range(rows))
        query_layout, query_index = TokenLayout("pool", names, (), key_layout.box), torch.arange(rows, device=keys.device)[None]
    else:
        query_codes = _local(planes, both[:, :rows][first], image[first])
        query_layout, query_index = _canonical(planes, query_codes, "tokens")
        real = query_index[query_index >= 0]
        if real.numel() != torch.unique(real).numel():
            raise Unplaced("a token asks in several windows")
    if not query_layout.grid:
        kind: Kind = "pool"
        query_layout = replace(query_layout, space="pool")
    else:
        kind = "self" if query_layout == key_layout else "cross"
    plain = order.shape[2] == 1 and all(
        torch.equal(index[0], torch.arange(index.shape[1], device=index.device)) for index in (query_index, key_index)
    )
    if plain:
        trivial = len(lead) == 2 and torch.equal(order.flatten(), torch.arange(order.numel(), device=order.device))
        return Arrangement(kind, query_layout, key_layout, None if trivial else order)
    return Arrangement(kind, query_layout, key_layout, order, query_index, key_index)


def _images(planes: Planes, keys: Tensor) -> Tensor:
    """`(groups,)` image of each group of keys."""
    image = planes.images_of(keys)
    one = image.amax(1)
    if bool(((image != one[:, None]) & (keys >= 0)).any()):
        raise Unplaced("tokens of several images attend to each other")
    if bool((one < 0).any()):
        raise Unplaced("a window holds nothing but padding")
    return one


def _grouped(image: Tensor, block: Tensor, images: int) -> Tensor:
    """`(images, heads, blocks)` number of each group; groups with the same tokens are heads."""
    blocks: dict[tuple[int, int], list[int]] = {}
    for group, key in enumerate(zip(image.tolist(), block.tolist(), strict=True)):
        blocks.setdefault(key, []).append(group)
    rows: list[list[list[int]]] = [[] for _ in range(images)]
    for (number, _), groups in blocks.items():
        rows[number].append(groups)
    heads, count = len(next(iter(blocks.values()))), len(rows[0])
    if any(len(row) != count or any(len(groups) != heads for groups in row) for row in rows):
        raise Unplaced("the images of the batch, or its windows, are arranged differently")
    return torch.tensor(rows, device=image.device).transpose(1, 2)


def _local(planes: Planes, codes: Tensor, image: Tensor) -> Tensor:
    """`(blocks, tokens)` codes of the first image `(images, blocks, tokens)`; the others must be arranged alike."""
    local = codes.clone()
    for plane in planes.of(codes):
        here = (codes >= plane.base) & (codes < plane.base + plane.cells * planes.images)
        local = torch.where(here, codes - image[..., None] * plane.cells, local)
    if bool((local != local[:1]).any()):
        raise Unplaced("the images of the batch are arranged differently")
    return local[0]


def _canonical(planes: Planes, codes: Tensor, space: str) -> tuple[TokenLayout, Tensor]:
    """Layout of `(blocks, tokens)` codes of one image, and the canonical token of each."""
    found = planes.of(codes)
    grids = [plane for plane in found if plane.cells > 1]
    if len(grids) > 1:
        sizes = " and ".join(f"{plane.grid[0]} x {plane.grid[1]}" for plane in grids)
        raise Unplaced(f"tokens of several grids attend together: {sizes}")
    single = [plane for plane in found if plane.cells == 1]
    if not grids and len(single) == 1 and single[0].grid:  # the whole image is one token
        grids, single = single, []
    single.sort(key=lambda plane: _rank(plane, codes))
    names = token_names(single)
    index = torch.full_like(codes, -1, dtype=torch.int64)
    for i, plane in enumerate(single):
        index[codes == plane.base] = i
    if not grids:
        return TokenLayout(space, names, (), planes.input), index
    plane = grids[0]
    here = (codes >= plane.base) & (codes < plane.base + plane.cells)
    cell = (codes[here] - plane.base).long()
    present = torch.unique(cell)
    if len(present) < plane.cells:
        columns = plane.grid[1]
        part = planes.thinned(plane, cell // columns, cell % columns)
        if part is None:  # tokens that were dropped leave holes
            index[here] = torch.searchsorted(present, cell) + len(single)
            holes = torch.ones(plane.cells, dtype=torch.bool).index_fill_(0, present.cpu(), 0).nonzero().flatten()
            return TokenLayout(space, names, plane.grid, plane.box, tuple(holes.tolist())), index
        plane, cell = part
    index[here] = cell + len(single)
    return TokenLayout(space, names, plane.grid, plane.box), index


def _rank(plane: Plane, codes: Tensor) -> int:
    """Where a single token stands first."""
    return int((codes == plane.base).nonzero()[0, -1])


_BASES = {"register": "reg|storage", "foreign": "foreign"}


def token_names(planes: Sequence[Plane]) -> tuple[str, ...]:
    """The names that single tokens go by: learned ones by their parameter, others are means of the image."""
    names: list[str] = []
    for plane in planes:
        stem = plane.name.partition(":")[0].lower()
        if not plane.name:
            name = "mean"
        elif re.match("cls|class", stem):
            name = "cls"
        elif stem.startswith("dist"):
            name = "distillation"
        else:
            base = next((base for base, pattern in _BASES.items() if re.match(pattern, stem)), "token")
            name = f"{base}{sum(known.startswith(base) for known in names)}"
        names.append(name if name not in names else f"{name}{names.count(name) + 1}")
    return tuple(names)


@dataclass(frozen=True, eq=False)
class Tokens:
    """How an activation becomes `(B, N, D)` tokens in canonical order.

    Attributes:
        layout: Where they lie.
        channels: The axis of the channels.
        order: `(N,)` position of each token in the activation's other axes, flattened; None: as it is.
    """

    layout: TokenLayout
    channels: int
    order: Tensor | None

    def take(self, activation: Tensor) -> Tensor:
        """`(B, N, D)`."""
        flat = activation.movedim(self.channels, -1).flatten(1, -2)
        return flat if self.order is None else flat[:, self.order]

    def maps(self, activation: Tensor) -> Tensor:
        """`(B, D, H, W)`, of an activation with two other axes."""
        return activation.movedim(self.channels, 1)


def arrange_tokens(planes: Planes, codes: Tensor) -> Tokens | None:
    """Put the tokens of an activation `(B, N, D)`, `(B, H, W, D)` or `(B, D, H, W)` in order; None if they are not one set."""
    if codes.ndim not in (3, 4) or codes.shape[0] != planes.images:
        return None
    for channels in (codes.ndim - 1, 1):
        alike = codes.narrow(channels, 0, 1)
        if bool((codes == alike).all()):
            break
    else:
        return None
    flat = alike.movedim(channels, -1).flatten(1)
    try:
        image = _images(planes, flat)
        layout, index = _canonical(planes, _local(planes, flat[:, None], image[:, None]), "tokens")
    except Unplaced:
        return None
    order = index[0].argsort()
    numbers = torch.arange(len(layout), device=codes.device)
    if index.shape[1] != len(layout) or not torch.equal(index[0][order], numbers):
        return None
    return Tokens(layout, channels, None if torch.equal(order, numbers) else order)
