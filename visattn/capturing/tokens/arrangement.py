"""Arrangement of an attention call: image, head, block and token of each row and column, found from their position codes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.types import Kind
from visattn.capturing.tokens.planes import Planes
from visattn.capturing.tokens.points import Drift
from visattn.geometry import Box
from visattn.records import TokenLayout
from visattn.records.layouts import WORDS


class Unplaced(Exception):
    """Error: a call cannot be located in the image. The message is the reason.

    Attributes:
        of_places: Whether the reason is where the tokens lie, which may be because they mix several places.
        drift: How far values were read from their tokens, if this is the reason.
    """

    def __init__(self, reason: str, *, of_places: bool = False, drift: Drift | None = None) -> None:
        """Store the reason."""
        super().__init__(reason)
        self.of_places, self.drift = of_places, drift


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Order that brings the operands of a call, `(*lead, tokens, d)`, into images, heads, blocks and canonical tokens.

    Attributes:
        kind: Kind of attention.
        queries: Layout of the queries.
        keys: Layout of the keys.
        order: `(B, heads, blocks)` index of each group in the flattened lead; None if the lead already is `(B, heads)`.
        query_index: `(blocks, q)` token index of each row; None for canonical order.
        key_index: `(blocks, k)` token index of each column; None for canonical order.
        reason: Why the call cannot be located in the image; its tokens are then only numbered. None if it can.
        drift: How far values were read from their tokens, if this is the reason.
    """

    kind: Kind
    queries: TokenLayout
    keys: TokenLayout
    order: Tensor | None = None
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    reason: str | None = None
    drift: Drift | None = None

    @property
    def why(self) -> str | None:
        """Reason in the latest forward pass."""
        return self.reason if self.reason is None or self.drift is None else self.reason + self.drift.told

    def apart(self) -> Arrangement:
        """Return the arrangement of a call that cannot be located and does not depend on the image."""
        return replace(self, queries=replace(self.queries, space="apart"), keys=replace(self.keys, space="apart"))

    @cached_property
    def _swapped(self) -> bool | None:
        """Order of the lead: True for blocks before heads, False for heads before blocks, None if groups must be gathered."""
        assert self.order is not None  # noqa: S101
        images, heads, blocks = self.order.shape
        plain = torch.arange(self.order.numel(), device=self.order.device)
        if torch.equal(self.order, plain.view(images, heads, blocks)):
            return False
        return True if torch.equal(self.order, plain.view(images, blocks, heads).transpose(1, 2)) else None

    def take(self, tensor: Tensor) -> Tensor:
        """Rearrange an operand to `(B, heads, tokens, d)`, or to `(B, heads, blocks, tokens, d)` if there are indices."""
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
        """Rearrange a bias that broadcasts to `(*lead, q, k)`, as `take` does; axes along which it is shared get size 1."""
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


class Samples(NamedTuple):
    """Samples that a call weights, and where they lie on the finest grid that is sampled.

    Attributes:
        order: `(N * Q,)` index of the weights of each query in the flattened axes of the call; N counts images and heads.
        number: `(N * Q, k)` number of each sample, counted over all maps and their points `(N, Q, P)`.
        maps: For each map: factors and offsets from its points to `(column, row)` of the grid.
        size: Rows and columns of the grid.
        lead: N and Q.
    """

    order: Tensor
    number: Tensor
    maps: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    size: tuple[int, int]
    lead: tuple[int, int]


@dataclass(frozen=True, eq=False)
class SampledArrangement(Arrangement):
    """Order of the tokens of a call that weights samples: its lead is `(N,)`, and its keys are the cells of the finest grid."""

    samples: Samples = field(kw_only=True)


def unplaced(lead: Sequence[int], queries: int, keys: int, box: Box, reason: str) -> Arrangement:
    """Return an arrangement that only numbers the tokens: the weights are exact, but their locations are unknown."""
    layouts = [TokenLayout("unknown", tuple(f"token{i}" for i in range(count)), (), box) for count in (queries, keys)]
    groups = 1
    for side in lead:
        groups *= side
    batch = lead[0] if lead else 1
    order = torch.arange(groups).view(batch, -1, 1)
    return Arrangement("unplaced", layouts[0], layouts[1], order, reason=reason)


def channels(lead: Sequence[int], queries: int, keys: int, box: Box, images: int) -> Arrangement:
    """Return the arrangement of channels that attend to channels.

    Raises:
        Unplaced: If channels of several images are mixed.
    """
    groups = torch.Size(lead).numel()
    if groups % images:
        raise Unplaced("the channels of several images are mixed")
    layouts = [TokenLayout("channels", tuple(f"channel{i}" for i in range(count)), (), box) for count in (queries, keys)]
    return Arrangement("channel", layouts[0], layouts[1], torch.arange(groups).view(images, -1, 1))


def arrange(planes: Planes, queries: Tensor | None, keys: Tensor, lead: Sequence[int], rows: int) -> Arrangement:
    """Arrange the tokens of a call.

    Args:
        planes: Planes that the codes refer to.
        queries: `(*lead, q)` codes; None for learned queries, which have no location.
        keys: `(*lead, k)` codes.
        lead: Sizes of the axes before the token axis.
        rows: Number of queries in a group.

    Returns:
        The arrangement.

    Raises:
        Unplaced: If the tokens cannot be arranged. The message gives the reason.
    """
    keys = keys.expand(*lead, keys.shape[-1]).reshape(-1, keys.shape[-1])
    image = _images(planes, keys, lead)
    both = keys if queries is None else torch.cat([queries.expand(*lead, rows).reshape(-1, rows), keys], 1)
    both = planes.given(both, image[:, None])
    keys = both[:, both.shape[1] - keys.shape[1] :]
    _, block = torch.unique(both, dim=0, return_inverse=True)
    order = _grouped(image, block, planes.images)
    first = order[:, 0]  # (images, blocks)
    local = planes.apart(_local(planes, both[first], image[first]), both.shape[1] - keys.shape[1])
    key_layout, key_index = _canonical(planes, local[:, both.shape[1] - keys.shape[1] :], "tokens")
    if any(len(torch.unique(block)) < len(block) for block in (index[index >= 0] for index in key_index)):
        raise Unplaced("a token occurs several times", of_places=True)
    if queries is None:
        if order.shape[2] > 1:
            raise Unplaced("learned queries attend within windows")
        names = tuple(f"query{i}" for i in range(rows))
        query_layout, query_index = TokenLayout(POOL, names, (), planes.input), torch.arange(rows, device=keys.device)[None]
    else:
        query_layout, query_index = _canonical(planes, local[:, :rows], "tokens")
        real = query_index[query_index >= 0]
        if not query_layout.grid and order.shape[2] > 1 and query_layout.space == POOL:
            raise Unplaced("learned queries attend within windows")
        if real.numel() != torch.unique(real).numel():
            raise Unplaced("a token is a query in several windows", of_places=True)
    alike = query_layout == key_layout and planes.of(local[:, :rows]) == planes.of(local[:, rows:])  # two sets may share names
    kind: Kind = "self" if alike else "cross"
    if key_layout.grid and not query_layout.grid and query_layout.space == POOL:
        kind = "pool"
    plain = order.shape[2] == 1 and all(
        torch.equal(index[0], torch.arange(index.shape[1], device=index.device)) for index in (query_index, key_index)
    )
    if plain:
        trivial = len(lead) == 2 and torch.equal(order.flatten(), torch.arange(order.numel(), device=order.device))
        return Arrangement(kind, query_layout, key_layout, None if trivial else order)
    return Arrangement(kind, query_layout, key_layout, order, query_index, key_index)


def _images(planes: Planes, keys: Tensor, lead: Sequence[int]) -> Tensor:
    """Return the image index of each group of keys, `(groups,)`. Sets that no image has reached are the same for every image."""
    image = planes.images_of(keys)
    one = image.amax(1)
    if bool(((image != one[:, None]) & (image >= 0)).any()):
        raise Unplaced("tokens of several images attend to each other")
    if bool((one < 0).any()):
        if bool((keys < 0).all(1).any()):
            raise Unplaced("a window holds nothing but padding")
        if not lead or lead[0] != planes.images:
            raise Unplaced("its tokens come from parameters alone, not from the image")
        one = torch.where(one < 0, _in_turn(one, planes.images), one)
    if not planes.on_grid(keys) and bool((one != _in_turn(one, planes.images)).any()):  # heads may have been taken for images
        raise Unplaced("the images of the batch are arranged differently")
    return one


def _in_turn(groups: Tensor, images: int) -> Tensor:
    """Return the image of each group if the groups of each image follow each other."""
    return torch.arange(len(groups), device=groups.device) * images // len(groups)


def _grouped(image: Tensor, block: Tensor, images: int) -> Tensor:
    """Return the index of each group, `(images, heads, blocks)`; groups with the same tokens are heads of one block."""
    blocks: dict[tuple[int, int], list[int]] = {}
    for group, key in enumerate(zip(image.tolist(), block.tolist(), strict=True)):
        blocks.setdefault(key, []).append(group)
    rows: list[list[list[int]]] = [[] for _ in range(images)]
    for (number, _), groups in blocks.items():
        rows[number].append(groups)
    if not all(rows):
        raise Unplaced("it holds only some images of the batch")
    heads, count = len(next(iter(blocks.values()))), len(rows[0])
    if any(len(row) != count or any(len(groups) != heads for groups in row) for row in rows):
        raise Unplaced("the images of the batch, or its windows, are arranged differently")
    return torch.tensor(rows, device=image.device).transpose(1, 2)


def _local(planes: Planes, codes: Tensor, image: Tensor) -> Tensor:
    """Reduce codes `(images, blocks, tokens)` to those of the first image, `(blocks, tokens)`; the others must be arranged the same."""
    local = codes.clone()
    for plane in planes.of(codes):
        here = (codes >= plane.base) & (codes < plane.base + plane.cells * planes.images)
        local = torch.where(here, codes - image[..., None] * plane.cells, local)
    if bool((wrong := local != local[:1]).any()):
        alone = not planes.on_grid(codes[wrong])
        what = (
            "tokens that lie nowhere in the image cannot be matched with the images"
            if alone
            else "the images of the batch are arranged differently"
        )
        raise Unplaced(what)
    return local[0]


def _canonical(planes: Planes, codes: Tensor, space: str) -> tuple[TokenLayout, Tensor]:
    """Return the layout of the codes of one image, `(blocks, tokens)`, and the canonical token index of each code."""
    found = planes.of(codes)
    grids = [plane for plane in found if plane.grid and plane.cells > 1]
    if len(grids) > 1:
        sizes = " and ".join(" x ".join(map(str, plane.grid)) for plane in grids)
        raise Unplaced(f"tokens of several grids attend together: {sizes}")
    if not grids and len(found) == 1 and found[0].grid:  # the whole image is one token
        grids = found
    plane = grids[0] if grids else None
    loose = codes >= 0
    if plane is not None:
        loose &= (codes < plane.base) | (codes >= plane.base + plane.cells)
    index = torch.full_like(codes, -1, dtype=torch.int64)
    tokens, index[loose] = _in_order(planes, codes, loose)
    names = token_names(planes, tokens, "token" if grids else "query")
    if plane is None:
        words = bool(names) and all(name.startswith(_GIVEN) for name in names)
        return TokenLayout(WORDS if words else POOL, names, (), planes.input), index
    here = ~loose & (codes >= 0)
    cell = (codes[here] - plane.base).long()
    present = torch.unique(cell)
    if len(present) < plane.cells:
        part = planes.thinned(plane, cell)
        if part is None:  # dropped tokens leave holes
            index[here] = torch.searchsorted(present, cell) + len(tokens)
            holes = torch.ones(plane.cells, dtype=torch.bool).index_fill_(0, present.cpu(), 0).nonzero().flatten()
            return TokenLayout(space, names, plane.grid, plane.box, tuple(holes.tolist())), index
        plane, cell = part
    index[here] = cell + len(tokens)
    return TokenLayout(space, names, plane.grid, plane.box), index


def _in_order(planes: Planes, codes: Tensor, loose: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct codes among the `loose` ones, and the index of each loose one in them.

    Members of a set keep its own order, so that they have the same names in every call. Sets come in the order of their first tokens.
    """
    values, number = torch.unique(codes[loose], return_inverse=True)
    at = loose.flatten().nonzero().flatten() % codes.shape[-1]
    group = planes.numbers(values)
    first = at.new_full((len(group) and int(group.max()) + 1,), codes.shape[-1]).scatter_reduce(0, group[number], at, "amin")
    order = first[group].argsort(stable=True)
    return values[order], order.argsort()[number]


POOL = "pool"  # space of learned queries
_GIVEN = "word", "foreign"
_BASES = {
    "register": "reg|storage",
    "foreign": "foreign",
    "word": "word",
    "query": ".*quer|.*object|detection",
}


def token_names(planes: Planes, codes: Tensor, other: str = "token") -> tuple[str, ...]:
    """Name tokens that lie on no grid, in the order given.

    Learned ones are named after their parameter (`cls`, `register0`, `query0`), words `word0`, tokens averaged over the image `mean`.
    `other` is the name of learned tokens whose parameter says nothing.
    """
    names: list[str] = []
    counts: Counter[str] = Counter()
    for code in codes:
        plane = planes.of(code[None])[0]
        stem = plane.name.lower()
        if not plane.name:
            name = "mean"
        elif re.match("cls|class", stem):
            name = "cls"
        elif stem.startswith("dist"):
            name = "distillation"
        else:
            base = next((base for base, pattern in _BASES.items() if re.match(pattern, stem)), other)
            number = planes.number(plane, int(code)) if base == "word" else counts[base]  # words as the caller counts them
            name = f"{base}{number}"
            counts[base] += 1
        if name in names:
            counts[name] += 1
            name += (
                f".{counts[name] + 1}" if name[-1].isdigit() else str(counts[name] + 1)
            )  # `word1.2`, since `word12` is another
        names.append(name)
    return tuple(names)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Order that brings an activation into canonical tokens `(B, N, D)`.

    Attributes:
        layout: Layout of the tokens.
        channels: Channel axis of the activation.
        order: `(N,)` position of each token in the flattened other axes; None if they are in canonical order.
    """

    layout: TokenLayout
    channels: int
    order: Tensor | None

    def take(self, activation: Tensor) -> Tensor:
        """Return the tokens of an activation, `(B, N, D)`."""
        flat = activation.movedim(self.channels, -1).flatten(1, -2)
        return flat if self.order is None else flat[:, self.order]

    def maps(self, activation: Tensor) -> Tensor:
        """Return an activation with two spatial axes channels first, `(B, D, H, W)`."""
        return activation.movedim(self.channels, 1)


def arrange_tokens(planes: Planes, codes: Tensor) -> Tokens | None:
    """Arrange the tokens of an activation `(B, N, D)`, `(B, H, W, D)` or `(B, D, H, W)`; None if they are not one complete layout."""
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
        image = _images(planes, flat, flat.shape[:1])
        layout, index = _canonical(planes, _local(planes, flat[:, None], image[:, None]), "tokens")
    except Unplaced:
        return None
    order = index[0].argsort()
    numbers = torch.arange(len(layout), device=codes.device)
    if index.shape[1] != len(layout) or not torch.equal(index[0][order], numbers):
        return None
    return Tokens(layout, channels, None if torch.equal(order, numbers) else order)
