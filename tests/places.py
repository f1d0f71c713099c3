"""Oracle for token locations: change the pixels of one cell and check which vectors change.

It shares no code with `visattn.capturing`, and uses only the claims of a record: prefix, grid and indices. During the check the model
is made local: attention adds nothing, and a convolution reads only the pixels of its own cell. So only one token may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording, TokenLayout

Size = tuple[int, int]
Cell = tuple[int, int]

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_FAINT = 2.0**-60  # the weights can still be compared, but what they add vanishes next to the residual
_ARGUMENTS = {
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv_transpose2d": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "max_pool2d": ("input", "kernel_size", "stride"),
    "avg_pool2d": ("input", "kernel_size", "stride"),
    "interpolate": ("input", "size", "scale_factor"),
}


class Local(TorchFunctionMode):
    """Function mode that makes a model local: no information passes from one cell to another.

    Attention adds nothing. Convolutions keep the taps on their own cell, pooling reads its own cell, resizing uses the nearest cell, and
    nothing is normalized over the image. `halving` is the input size, for models where only attention leads to the next stage: each
    query then takes the value at every second row and column.
    """

    __module__ = "torch"  # a capture refuses attention that modes of others change

    def __init__(self, halving: Size | None = None) -> None:
        super().__init__()
        self._halving = halving

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").strip("_")
        given = dict(zip(_ARGUMENTS[name], args, strict=False)) | kwargs if name in _ARGUMENTS else {}
        if given and name.startswith("conv"):
            given["weight"], given["bias"] = own_taps(**given), None
            return func(**given)
        if given and name.endswith("pool2d"):
            rows, columns = func(*args, **kwargs).shape[-2:]
            stride = given.get("stride") or given["kernel_size"]
            return func(given["input"], stride, stride, ceil_mode=True)[..., :rows, :columns]
        if name == "interpolate" and given["input"].ndim == 4:
            return func(given["input"], given.get("size"), given.get("scale_factor"), mode="nearest")
        if name == "group_norm":
            return args[0]
        out = func(*args, **kwargs)
        if name == "pad" and out.ndim == 4:
            widths = args[1] if len(args) > 1 else kwargs["pad"]
            out.before = (widths[2] if len(widths) > 2 else 0, widths[0])
        if func is F.scaled_dot_product_attention:
            return torch.zeros_like(out)
        if func in _SOFTMAX and out.ndim > 2:
            return out * _FAINT + (0 if self._halving is None else _every_second(out, self._halving))
        return out


def own_taps(input: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, **_: Any) -> Tensor:
    """Zero the taps of a kernel outside the cell of `stride` pixels that its output represents."""
    mask = torch.ones_like(weight)
    for axis in (0, 1):
        size = weight.shape[axis - 2]
        step, gap = (value if isinstance(value, int) else value[axis % len(value)] for value in (stride, dilation))
        same = (size - 1) * gap // 2
        before = same if isinstance(padding, str) else padding if isinstance(padding, int) else padding[axis % len(padding)]
        if not before:
            padded = getattr(input, "before", None)
            # without padding: a kernel that overlaps the border of its patch
            before = padded[axis] if padded is not None else max(0, (size - step) // 2)
        at = torch.arange(size) * gap - before
        inside = ((at >= 0) & (at < step)).to(weight)
        mask = mask * (inside[:, None] if axis == 0 else inside)
    return weight * mask


def _every_second(weights: Tensor, size: Size) -> Tensor:
    """Return one-hot weights from each query to the key at twice its row and column; zero unless the queries form the halved grid."""
    queries, keys = weights.shape[-2:]
    rows = round((keys * size[0] / size[1]) ** 0.5)
    columns, halved = keys // rows, -(-(keys // rows) // 2)
    found = torch.zeros_like(weights)
    if queries < keys and queries == -(-rows // 2) * halved:
        for i in range(queries):
            found[..., i, i // halved * 2 * columns + i % halved * 2] = 1
    return found


class Probe(NamedTuple):
    """Image whose pixels differ from image 0 in one cell of a grid."""

    image: int
    grid: Size
    cell: Cell


def look(model: nn.Module, pixels: Tensor, halving: bool = False) -> Recording:
    """Record the model while it is local."""
    size = (pixels.shape[-2], pixels.shape[-1])
    with torch.no_grad(), Local(size if halving else None), visattn.capture(model, values=True) as recording:
        model(pixels)
    return recording


def grids_of(recording: Recording) -> list[Size]:
    """Return all grids that the records claim."""
    layouts = [layout for record in recording for layout in (record.queries, record.keys)]
    return [(layout.grid[0], layout.grid[1]) for layout in dict.fromkeys(layouts) if len(layout.grid) == 2]


def cells(grid: Size) -> list[Cell]:
    """Return cells near corners, edges and the center, which a rotated, mirrored or shifted map moves."""
    rows, columns = grid
    return list(dict.fromkeys([(0, 0), (0, columns - 1), (rows - 1, columns // 2), (rows // 2, columns // 3)]))


def rectangle(size: Size, grid: Size, cell: Cell, *, doubling: bool = False, core: bool = False) -> tuple[slice, slice]:
    """Compute the pixels whose centers lie in a cell, or in its inner half (`core`).

    A cell is an even share of the input. If each stage pads and halves (`doubling`), its side is rounded up to a power of two.
    """
    sides = []
    for length, count, index in zip(size, grid, cell, strict=True):
        side = 1 << (-(-length // count) - 1).bit_length() if doubling else length / count
        rim = side / 4 if core else 0
        sides.append(slice(ceil(index * side + rim - 0.5), min(length, ceil((index + 1) * side - rim - 0.5))))
    return sides[0], sides[1]


def probes(grids: Sequence[Size]) -> list[Probe]:
    """Return one probe per tested cell; image 0 is not changed."""
    tried = [(grid, cell) for grid in dict.fromkeys(grids) for cell in cells(grid)]
    return [Probe(image, grid, cell) for image, (grid, cell) in enumerate(tried, 1)]


def changed_values(record: AttentionRecord, image: int) -> Tensor:
    """Measure how much the value of each key token differs from that of image 0, `(K,)`."""
    assert record.value is not None
    return _spread(_norm(record.value, image), record.operator.key_index, record.operator.shape[3])


def changed_queries(record: AttentionRecord, image: int) -> Tensor:
    """Measure how much each query differs from that of image 0, `(Q,)`.

    Compare query vectors, or if only weights exist, their rows without the keys that changed.
    """
    operator = record.operator
    if isinstance(operator, SoftmaxOperator):
        return _spread(_norm(operator.query, image), operator.query_index, operator.shape[2])
    assert isinstance(operator, MatrixOperator)
    assert record.value is not None
    moved = _norm(record.value, image)
    rows = torch.zeros(operator.weights.shape[2:4], dtype=torch.float64)
    for block in range(len(rows)):
        part = operator.weights[[0, image], :, block][..., moved[block] <= 0.1 * moved.max()].double()
        part = part / part.sum(-1, keepdim=True)
        rows[block] = (part[1] - part[0]).abs().sum((0, -1)).nan_to_num()
    return _spread(rows, operator.query_index, operator.shape[2])


def _norm(vectors: Tensor, image: int) -> Tensor:
    """Return the distance `(blocks, tokens)` of an image's vectors `(B, heads, [blocks,] tokens, d)` from those of image 0."""
    distance = (vectors[image] - vectors[0]).square().sum((0, -1)).sqrt()
    return distance.reshape(-1, distance.shape[-1])


def _spread(blocks: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Assign numbers `(blocks, tokens)` to their tokens in a loop; a token in several windows gets the largest."""
    tokens = [0.0] * count
    for b in range(blocks.shape[0]):
        for i in range(blocks.shape[1]):
            token = i if index is None else int(index[b, i])
            if token >= 0:
                tokens[token] = max(tokens[token], float(blocks[b, i]))
    return torch.tensor(tokens, dtype=torch.float64)


def token_of(layout: TokenLayout, cell: Cell) -> int:
    """Compute the token that a layout claims for a cell."""
    return len(layout.prefix) + cell[0] * layout.grid[1] + cell[1]
