"""Capture's twin that writes: the attention of chosen layers is written out, edited, and the model goes on with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn.capturing.description import Anatomy
from visattn.capturing.intercept.calls import Call
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.trace.operations import edited_weights
from visattn.capturing.trace.tape import Attention
from visattn.capturing.watching import Watch
from visattn.errors import CaptureError, LayoutError, OptionError, ShapeError
from visattn.records import TokenLayout


@dataclass(frozen=True, eq=False)
class Attended:
    """The call whose weights are edited.

    Attributes:
        layer: Dotted name of the module that made it.
        call: Which call of that module in this forward.
        queries: Layout of the queries.
        keys: Layout of the keys.
        query_index: `(blocks, q)` token of each row; -1 is padding.
        key_index: `(blocks, k)` token of each column, likewise.
    """

    layer: str
    call: int
    queries: TokenLayout
    keys: TokenLayout
    query_index: Tensor
    key_index: Tensor


Edit = Callable[[Tensor, Attended], Tensor]  # weights (B, heads, blocks, q, k), and whose they are -> weights of the same shape


@contextmanager
def intervene(
    model: nn.Module, anatomy: Anatomy, layer: str, heads: Sequence[int] | None, edits: Sequence[Edit]
) -> Iterator[None]:
    """Edit the attention of the layers that match the glob; see `visattn.intervene`."""
    met: dict[str, bool] = {}

    def replace(name: str, owner: nn.Module, call: Call, attention: Attention) -> Tensor | None:
        met[name] = fnmatchcase(name, layer)
        if not met[name]:
            return None
        with torch._C.DisableTorchFunction():  # to a capture around this it is one operation
            arrangement, _ = watch.arranged(call, attention, owner)
            weights = _edited(name, attention.call, call, arrangement, heads, edits)
        return call.mix(edited_weights(weights, *call.sources()))

    watch = Watch(model, anatomy, lambda *_: None, replace)
    with watch.watching():
        yield
    if watch.forward < 0:
        raise CaptureError("the model was not run inside the intervention. Call model(pixels) inside the with block.")
    if not watch.images:
        raise CaptureError("the model was given no images. Pass pixels of shape (B, C, H, W) to the whole model.")
    if not any(met.values()):
        raise OptionError(f"no layer with attention matches {printable(layer)!r}; the model's are {', '.join(met) or 'none'}.")


def _edited(
    layer: str, number: int, call: Call, arrangement: Arrangement, heads: Sequence[int] | None, edits: Sequence[Edit]
) -> Tensor:
    """`(*lead, q, k)` weights after all edits."""
    if arrangement.reason:
        raise LayoutError(f"{layer}: {arrangement.reason}, so its tokens cannot be named. Choose another layer.")
    weights = call.weigh()
    given = arrangement.take(weights)
    blocks = given if given.ndim == 5 else given[:, :, None]
    rows, columns = (
        torch.arange(count, device=weights.device)[None] if index is None else index
        for index, count in ((arrangement.query_index, call.rows), (arrangement.key_index, call.columns))
    )
    attended = Attended(layer, number, arrangement.queries, arrangement.keys, rows, columns)
    changed = blocks
    for edit in edits:
        changed = edit(changed, attended)
        if changed.shape != blocks.shape:
            raise ShapeError(f"an edit must give weights of shape {tuple(blocks.shape)}, got {tuple(changed.shape)}.")
    if heads is not None:
        count = blocks.shape[1]
        if not all(-count <= head < count for head in heads):
            raise OptionError(f"head must lie in [{-count}, {count - 1}], got {', '.join(map(str, heads))}.")
        chosen = torch.zeros(1, count, 1, 1, 1, dtype=torch.bool, device=weights.device)
        chosen[:, list(heads)] = True
        changed = torch.where(chosen, changed, blocks)
    if arrangement.order is None:
        return changed[:, :, 0]
    back = arrangement.order.flatten().argsort()
    return changed.reshape(-1, *changed.shape[-2:])[back].reshape(*call.lead, *weights.shape[-2:])


def scaled(factor: float) -> Edit:
    """Weights times a number; 0 takes the layer or the heads out."""
    return lambda weights, _: weights * factor


def masked(tokens: Sequence[int], *, renormalize: bool) -> Edit:
    """Key tokens that nobody looks at; their weight goes to the others in proportion, or is lost."""

    def edit(weights: Tensor, attended: Attended) -> Tensor:
        count = len(attended.keys)
        if not all(0 <= token < count for token in tokens):
            raise OptionError(f"tokens must lie in [0, {count - 1}], got {', '.join(map(str, tokens))}.")
        gone = torch.isin(attended.key_index, torch.tensor(list(tokens), device=weights.device))[:, None, :]  # (blocks, 1, k)
        left = weights.masked_fill(gone, 0)
        if not renormalize:
            return left
        total = left.sum(-1, keepdim=True)
        return left / total.masked_fill(total == 0, 1) * weights.sum(-1, keepdim=True).masked_fill(total == 0, 0)

    return edit


def permuted(order: Sequence[int]) -> Edit:
    """Query `i` of each window gets the row of query `order[i]`."""

    def edit(weights: Tensor, _: Attended) -> Tensor:
        rows = weights.shape[-2]
        if sorted(order) != list(range(rows)):
            raise OptionError(f"order must name each of the {rows} queries of a window once, got {len(order)} numbers.")
        return weights[..., list(order), :]

    return edit
