"""Check of token locations that shares no code with the tracing: pixels of one cell are changed, and the tokens that change are found."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from visattn.core.records import AttentionRecord, Recording, TokenLayout

Inputs = dict[str, Any]
_BY_ROWS = "muse"  # models whose image processor orders patches by rows; they are merged after the layers of attention
_NOISE = 1e-6  # share of the largest value below which a change is rounding; random weights may let the image vanish


class WithoutAttention(TorchFunctionMode):
    """Mode in which every attention gives zero: each token then holds what its own pixels gave, and nothing of the others."""

    __module__ = "torch"  # a capture refuses attention that modes of others change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        weights = getattr(func, "__name__", "") == "softmax" and out.ndim > 2  # others are gates, such as those of experts
        return out * 0 if func is F.scaled_dot_product_attention or weights else out


def lit_cells(model: nn.Module, inputs: Inputs, key: str, before: Recording, seeds: int = 2) -> tuple[list[str], int, int]:
    """Light cells of each grid that is recorded, and compare the tokens that change with the recorded places.

    The pixels of a cell are replaced by noise; of all values that the model mixes, those of this cell must then change most. This is
    done for the first call with each layout of keys, with every attention switched off.

    Args:
        model: Model in evaluation mode.
        inputs: Its inputs.
        key: Name of the pixels among the inputs, `(B, C, H, W)` or clips with one axis more.
        before: What `captured` gives for these inputs.
        seeds: Number of cells drawn for each layout.

    Returns:
        Cells that were found elsewhere, the number of cells found, and the number of cells that changed nothing.
    """
    wrong: list[str] = []
    right = undecided = 0
    first: dict[TokenLayout, int] = {}
    for number, record in enumerate(before):
        if len(record.keys.grid) > 1 and record.value is not None:
            first.setdefault(record.keys, number)
    for layout, number in first.items():
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            chosen = layout.present[int(torch.randint(layout.cells, (), generator=generator))]
            cell = tuple(int(x) for x in torch.unravel_index(torch.tensor(chosen), layout.grid))
            packed = "image_grid_thw" in inputs
            image = 0 if packed else int(torch.randint(len(inputs[key]), (), generator=generator))
            if packed:
                lit = _lit_patches(inputs, key, layout, cell, _merged(model))
            elif "spatial_shapes" in inputs:
                lit = _lit_patch(inputs, key, cell, image)
            else:
                lit = _lit(inputs[key], layout, cell, image, generator)
            after = captured(model, {**inputs, key: lit})
            change = key_changes(before[number], after[number])
            elsewhere = [other for other in range(len(change)) if other != image and float(change[other].max()) > 0]
            grid = layout.on_grid(change[image, len(layout.prefix) :]).nan_to_num(0)
            found = tuple(int(x) for x in torch.unravel_index(grid.argmax(), grid.shape))
            near = all(abs(a - b) <= 1 for a, b in zip(found, cell, strict=True))
            if not float(grid.max()) > _NOISE * float(_values(before[number]).abs().max()):
                undecided += 1
            elif elsewhere or not near or not float(grid[cell]) > float(grid.max()) / 4:  # overlapping patches share pixels
                wrong.append(f"{before[number].layer}: cell {cell} of image {image} lit, found {found} {elsewhere or ''}")
            else:
                right += 1
    return wrong, right, undecided


def captured(model: nn.Module, inputs: Inputs) -> Recording:
    """Capture a model with every attention switched off."""
    torch.manual_seed(0)
    with torch.no_grad(), WithoutAttention(), visattn.capture(model, values=True) as recording:
        model(**inputs)
    return recording


def _lit(pixels: Tensor, layout: TokenLayout, cell: tuple[int, ...], image: int, generator: torch.Generator) -> Tensor:
    """Replace the pixels of one cell of one image by noise."""
    *frames, row, column = cell
    rows, columns = layout.grid[-2:]
    box, height, width = layout.box, pixels.shape[-2], pixels.shape[-1]
    top, left = (box.top + row * box.height / rows), (box.left + column * box.width / columns)
    area = [
        slice(max(round(start), 0), max(min(round(start + length), side), 1))
        for start, length, side in ((top, box.height / rows, height), (left, box.width / columns, width))
    ]
    lit = pixels.clone()
    part = lit[image]
    if frames:
        time = 1 if pixels.shape[2] in (1, 3) else 2  # the axis of frames, as the mapping of clips states
        count = pixels.shape[time] // layout.grid[0]
        part = part.narrow(time - 1, frames[0] * count, count)
    patch = part[..., area[0], area[1]]
    patch.copy_(torch.randn(patch.shape, generator=generator) * 3)
    return lit


def _merged(model: Any) -> int:  # noqa: ANN401
    """Return the side of the blocks in which a model gets its patches, as its configuration states it."""
    if model.config.model_type.startswith(_BY_ROWS):
        return 1
    vision: Any = getattr(model.config, "vision_config", model.config)
    return vision.spatial_merge_size if hasattr(vision, "spatial_merge_size") else getattr(vision, "merge_size", 1)


def _lit_patches(inputs: Inputs, key: str, layout: TokenLayout, cell: tuple[int, ...], side: int) -> Tensor:
    """Replace the patches of one cell; the image processors of these models order patches by blocks of `side` x `side`."""
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    high, wide = rows // layout.grid[-2], columns // layout.grid[-1]
    lit: Tensor = inputs[key].clone()
    for row in range(cell[-2] * high, (cell[-2] + 1) * high):
        for column in range(cell[-1] * wide, (cell[-1] + 1) * wide):
            block = (row // side) * (columns // side) + column // side
            number = block * side * side + row % side * side + column % side
            lit[number] = torch.randn(lit[number].shape, generator=torch.Generator().manual_seed(number)) * 3
    return lit


def _lit_patch(inputs: Inputs, key: str, cell: tuple[int, ...], image: int) -> Tensor:
    """Replace one patch of one image, whose patches are ordered by rows, with padding behind them."""
    _, columns = inputs["spatial_shapes"][image].tolist()
    lit: Tensor = inputs[key].clone()
    patch = lit[image, cell[-2] * columns + cell[-1]]
    patch.copy_(torch.randn(patch.shape, generator=torch.Generator().manual_seed(0)) * 3)
    return lit


def key_changes(before: AttentionRecord, after: AttentionRecord) -> Tensor:
    """Return how much the values of each key changed, `(B, keys)`."""
    change = (_values(after) - _values(before)).double().square().sum((1, -1))
    index = before.operator.key_index
    if index is None:
        return change.sqrt()
    whole = change.new_zeros(len(change), len(before.keys) + 1)  # the last place collects the padding of windows
    place = index.where(index >= 0, len(before.keys)).flatten().expand(len(change), -1)
    return whole.scatter_reduce(1, place, change.flatten(1), "amax")[:, :-1].sqrt()


def _values(record: AttentionRecord) -> Tensor:
    assert record.value is not None  # noqa: S101 - captured with values
    return record.value
