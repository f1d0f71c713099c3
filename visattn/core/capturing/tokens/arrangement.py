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
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.tokens.refusals import Unplaced, WithoutImage
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.core.records.layouts import WORDS

MEAN = "mean"  # name of a token that stands for the whole image


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
        """True if windows (blocks) come before heads in the lead, False if heads do; None if groups must be gathered one by one."""
        assert self.order is not None  # noqa: S101
        images, heads, blocks = self.order.shape
        in_turn = torch.arange(self.order.numel(), device=self.order.device)
        if torch.equal(self.order, in_turn.view(images, heads, blocks)):
            return False
        blocks_come_first = torch.equal(self.order, in_turn.view(images, blocks, heads).transpose(1, 2))
        return True if blocks_come_first else None

    def take(self, tensor: Tensor) -> Tensor:
        """Rearrange an operand to `(B, heads, tokens, d)`, or to `(B, heads, blocks, tokens, d)` if there are indices."""
        if self.order is None:
            return tensor
        (images, heads, blocks), token_shape = self.order.shape, tensor.shape[-2:]
        if self._swapped is None:
            groups = tensor.reshape(-1, *token_shape)[self.order]
        elif self._swapped:
            groups = tensor.reshape(images, blocks, heads, *token_shape).transpose(1, 2)
        else:
            groups = tensor.reshape(images, heads, blocks, *token_shape)
        return groups if self.query_index is not None else groups[:, :, 0]

    def take_bias(self, bias: Tensor, lead: Sequence[int]) -> Tensor:
        """Rearrange a bias that broadcasts to `(*lead, q, k)`, as attention scores are, to `(B, heads, [blocks,] q, k)`.

        Axes along which it is shared, such as those of images, get size 1.
        """
        missing_axes = (1,) * (len(lead) + 2 - bias.ndim)
        bias = bias.reshape(*missing_axes, *bias.shape)
        if self.order is None:
            return bias
        number = torch.arange(bias[..., 0, 0].numel(), device=bias.device).view(bias.shape[:-2])
        index = number.expand(*lead).flatten()[self.order]  # which bias each image, head and block uses
        for dim in range(3):
            first = index.narrow(dim, 0, 1)
            if bool((first == index).all()):
                index = first
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
    query_layout, key_layout = (TokenLayout("unknown", tuple(f"token{i}" for i in range(n)), (), box) for n in (queries, keys))
    groups = 1
    for size in lead:
        groups *= size
    batch = lead[0] if lead else 1
    order = torch.arange(groups).view(batch, -1, 1)
    return Arrangement("unplaced", query_layout, key_layout, order, reason=reason)


def channels(lead: Sequence[int], queries: int, keys: int, box: Box, images: int) -> Arrangement:
    """Return the arrangement of a call in which channels attend to channels, from its leading axes and numbers of channels.

    Raises:
        Unplaced: If channels of several images are mixed.
    """
    groups = torch.Size(lead).numel()
    if groups % images:
        raise Unplaced("the channels of several images are mixed")
    query_layout, key_layout = (TokenLayout("channels", tuple(f"channel{i}" for i in range(n)), (), box) for n in (queries, keys))
    return Arrangement("channel", query_layout, key_layout, torch.arange(groups).view(images, -1, 1))


def arrange(planes: Planes, queries: Tensor | None, keys: Tensor, lead: Sequence[int], rows: int) -> Arrangement:
    """Find image, head, window (block) and token of each query and key of an attention call, from their position codes.

    Args:
        planes: Planes (grids of cells, and sets of tokens) that the codes refer to.
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
    tokens = keys if queries is None else torch.cat([queries.expand(*lead, rows).reshape(-1, rows), keys], 1)
    tokens = planes.given(tokens, image[:, None])
    first_key = tokens.shape[1] - keys.shape[1]  # 0 if queries are learned
    _, block = torch.unique(tokens, dim=0, return_inverse=True)
    order = _grouped(image, block, planes.images)
    first_heads, blocks = order[:, 0], order.shape[2]
    local = planes.apart(_local(planes, tokens[first_heads], image[first_heads]), first_key)
    key_layout, key_index = _canonical(planes, local[:, first_key:], "tokens")
    keys_of_blocks = [index[index >= 0] for index in key_index]
    if any(len(torch.unique(index)) < len(index) for index in keys_of_blocks):
        raise Unplaced("a token occurs several times", of_places=True)
    query_layout, query_index = _arranged_queries(planes, local[:, :first_key], rows, blocks)
    # two sets may share names
    is_self = query_layout == key_layout and planes.of(local[:, :rows]) == planes.of(local[:, rows:])
    is_pool = bool(key_layout.grid) and not query_layout.grid and query_layout.space == POOL
    kind: Kind = "pool" if is_pool else "self" if is_self else "cross"
    if blocks > 1 or not _is_in_turn(query_index[0]) or not _is_in_turn(key_index[0]):
        return Arrangement(kind, query_layout, key_layout, order, query_index, key_index)
    is_lead_of_heads = tuple(lead) == tuple(order.shape[:2]) and _is_in_turn(order.flatten())
    return Arrangement(kind, query_layout, key_layout, None if is_lead_of_heads else order)


def _arranged_queries(planes: Planes, codes: Tensor, rows: int, blocks: int) -> tuple[TokenLayout, Tensor]:
    """Return the layout of the queries of one image, and the number in it of each query of each window.

    `codes` are position codes `(blocks, rows)`, or `(blocks, 0)` if all `rows` queries are learned and have no location.

    Raises:
        Unplaced: If there is no such layout.
    """
    if codes.shape[1] == 0:
        if blocks > 1:
            raise Unplaced("learned queries attend within windows")
        names = tuple(f"query{i}" for i in range(rows))
        return TokenLayout(POOL, names, (), planes.input), torch.arange(rows, device=codes.device)[None]
    layout, index = _canonical(planes, codes, "tokens")
    located = index[index >= 0]
    if not layout.grid and blocks > 1 and layout.space == POOL:
        raise Unplaced("learned queries attend within windows")
    if located.numel() != torch.unique(located).numel():
        raise Unplaced("a token is a query in several windows", of_places=True)
    return layout, index


def _is_in_turn(index: Tensor) -> bool:
    """Check whether an index is 0, 1, 2, ..., so that it changes no order."""
    return torch.equal(index, torch.arange(len(index), device=index.device))


def _images(planes: Planes, keys: Tensor, lead: Sequence[int]) -> Tensor:
    """Return the image index of each group of keys, `(groups,)`, from their position codes.

    Sets that no image has reached, such as object queries, are the same for every image.

    Raises:
        Unplaced: If a group has several images, or the groups come in another order than the images.
        WithoutImage: If a group has none.
    """
    image_of_key = planes.images_of(keys)
    image = image_of_key.amax(1)
    if bool(((image_of_key != image[:, None]) & (image_of_key >= 0)).any()):
        raise Unplaced("tokens of several images attend to each other")
    if bool((image < 0).any()):
        if bool((keys < 0).all(1).any()):
            raise Unplaced("a window holds nothing but padding")
        if not lead or lead[0] != planes.images:
            raise WithoutImage("its tokens do not come from the image")
        image = torch.where(image < 0, _images_in_turn(image, planes.images), image)
    # heads may have been taken for images
    if not planes.on_grid(keys) and bool((image != _images_in_turn(image, planes.images)).any()):
        raise Unplaced("the images of the batch are arranged differently")
    return image


def _images_in_turn(groups: Tensor, images: int) -> Tensor:
    """Return the image of each group if the groups of each image follow each other."""
    return torch.arange(len(groups), device=groups.device) * images // len(groups)


def _grouped(image: Tensor, block: Tensor, images: int) -> Tensor:
    """Return the index of each group, `(images, heads, blocks)`; groups with the same tokens are heads of one window (block)."""
    heads_of_blocks: dict[tuple[int, int], list[int]] = {}
    for group, image_and_block in enumerate(zip(image.tolist(), block.tolist(), strict=True)):
        heads_of_blocks.setdefault(image_and_block, []).append(group)
    blocks_of_images: list[list[list[int]]] = [[] for _ in range(images)]
    for (image_number, _), heads in heads_of_blocks.items():
        blocks_of_images[image_number].append(heads)
    if not all(blocks_of_images):
        raise Unplaced("it holds only some images of the batch")
    block_counts = {len(blocks) for blocks in blocks_of_images}
    head_counts = {len(heads) for heads in heads_of_blocks.values()}
    if len(block_counts) > 1 or len(head_counts) > 1:
        raise Unplaced("the images of the batch, or its windows, are arranged differently")
    return torch.tensor(blocks_of_images, device=image.device).transpose(1, 2)


def _local(planes: Planes, codes: Tensor, image: Tensor) -> Tensor:
    """Reduce codes `(images, blocks, tokens)` to those of the first image, `(blocks, tokens)`; the others must be arranged the same."""
    local = codes.clone()
    for plane in planes.of(codes):
        belongs = (codes >= plane.base) & (codes < plane.base + plane.cells * planes.images)
        local = torch.where(belongs, codes - image[..., None] * plane.cells, local)
    differs = local != local[:1]
    if not bool(differs.any()):
        return local[0]
    if planes.on_grid(codes[differs]):
        raise Unplaced("the images of the batch are arranged differently")
    raise Unplaced("tokens that lie nowhere in the image cannot be matched with the images")


def _canonical(planes: Planes, codes: Tensor, space: str) -> tuple[TokenLayout, Tensor]:
    """Return the layout of the tokens of one image, and the number in it of each code `(blocks, tokens)`; -1 for padding.

    A layout begins with the tokens that lie nowhere, such as a class token; the cells of one grid follow, in raster order.

    Raises:
        Unplaced: If tokens lie on several grids.
    """
    all_planes = planes.of(codes)
    grids = [plane for plane in all_planes if plane.grid and plane.cells > 1]
    if len(grids) > 1:
        sizes = " and ".join(" x ".join(map(str, plane.grid)) for plane in grids)
        raise Unplaced(f"tokens of several grids attend together: {sizes}")
    if not grids and len(all_planes) == 1 and all_planes[0].grid:  # the whole image is one token
        grids = all_planes
    plane = grids[0] if grids else None
    is_off_grid = codes >= 0
    if plane is not None:
        is_off_grid &= (codes < plane.base) | (codes >= plane.base + plane.cells)
    index = torch.full_like(codes, -1, dtype=torch.int64)
    prefix_codes, index[is_off_grid] = _in_order(planes, codes, is_off_grid)
    names = token_names(planes, prefix_codes, "token" if grids else "query")
    if plane is None:
        are_words = bool(names) and all(name.startswith(_GIVEN) for name in names)
        return TokenLayout(WORDS if are_words else POOL, names, (), planes.input), index
    is_on_grid = ~is_off_grid & (codes >= 0)
    cell = (codes[is_on_grid] - plane.base).long()
    present_cells = torch.unique(cell)
    thinned = planes.thinned(plane, cell) if len(present_cells) < plane.cells else (plane, cell)
    if thinned is None:  # dropped tokens leave holes
        index[is_on_grid] = torch.searchsorted(present_cells, cell) + len(prefix_codes)
        holes = torch.ones(plane.cells, dtype=torch.bool).index_fill_(0, present_cells.cpu(), 0).nonzero().flatten()
        return TokenLayout(space, names, plane.grid, plane.box, tuple(holes.tolist())), index
    thinned_plane, thinned_cell = thinned
    index[is_on_grid] = thinned_cell + len(prefix_codes)
    return TokenLayout(space, names, thinned_plane.grid, thinned_plane.box), index


def _in_order(planes: Planes, codes: Tensor, is_off_grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct codes of the tokens that lie on no grid, such as words, and the index of each such token in them.

    Members of a set keep its own order, so that they have the same names in every call. Sets come in the order of their first tokens.
    """
    tokens = codes.shape[-1]
    distinct, number = torch.unique(codes[is_off_grid], return_inverse=True)
    position = is_off_grid.flatten().nonzero().flatten() % tokens
    set_number = planes.numbers(distinct)
    set_count = len(set_number) and int(set_number.max()) + 1
    first_positions = position.new_full((set_count,), tokens).scatter_reduce(0, set_number[number], position, "amin")
    order = first_positions[set_number].argsort(stable=True)
    return distinct[order], order.argsort()[number]


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
        parameter = plane.name.lower()
        if not plane.name:
            name = MEAN
        elif re.match("cls|class", parameter):
            name = "cls"
        elif parameter.startswith("dist"):
            name = "distillation"
        else:
            base = next((base for base, pattern in _BASES.items() if re.match(pattern, parameter)), other)
            number = planes.number(plane, int(code)) if base == "word" else counts[base]  # words as the caller counts them
            name = f"{base}{number}"
            counts[base] += 1
        if name in names:
            counts[name] += 1
            separator = "." if name[-1].isdigit() else ""  # `word1.2`, since `word12` is another
            name += f"{separator}{counts[name] + 1}"
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
    for channel_axis in (codes.ndim - 1, 1):
        first_channel = codes.narrow(channel_axis, 0, 1)
        if bool((codes == first_channel).all()):
            break
    else:  # no axis along which all elements belong to one token
        return None
    token_codes = first_channel.movedim(channel_axis, -1).flatten(1)
    try:
        image = _images(planes, token_codes, token_codes.shape[:1])
        layout, index = _canonical(planes, _local(planes, token_codes[:, None], image[:, None]), "tokens")
    except Unplaced:
        return None
    order = index[0].argsort()
    numbers = torch.arange(len(layout), device=codes.device)
    is_complete = index.shape[1] == len(layout) and torch.equal(index[0][order], numbers)
    if not is_complete:
        return None
    return Tokens(layout, channel_axis, None if torch.equal(order, numbers) else order)
