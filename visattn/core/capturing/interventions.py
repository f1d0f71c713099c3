"""Interventions: compute the attention weights of chosen layers, edit them, and let the model continue with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape as glob_escape

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.intercept.calls import Call
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.trace.operations import edited_weights
from visattn.core.capturing.trace.tape import Attention
from visattn.core.capturing.watching import NO_IMAGES, Watch
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import CaptureError, LayoutError, OptionError, ShapeError

__all__ = ["AttentionCall", "Edit", "intervene", "masked", "permuted", "scaled"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Attention call whose weights are edited.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Index of the call among those of this module in the forward pass.
        queries: Layout of the queries.
        keys: Layout of the keys.
        query_index: `(blocks, q)` token index of each row; -1 for padding.
        key_index: `(blocks, k)` token index of each column; -1 for padding.
    """

    layer: str
    call: int
    queries: TokenLayout
    keys: TokenLayout
    query_index: Tensor
    key_index: Tensor


# takes weights (B, heads, blocks, q, k) and the call they belong to; returns weights of the same shape
Edit = Callable[[Tensor, AttentionCall], Tensor]


@contextmanager
def intervene(
    model: nn.Module, description: ModelDescription, layer: str, heads: Sequence[int] | None, edits: Sequence[Edit]
) -> Iterator[None]:
    """Edit the attention weights of the layers whose names match the glob; see `visattn.intervene`."""

    def edited(name: str, call: Call, attention: Attention, arrangement: Arrangement) -> Tensor:
        """Return the result of an attention call with edited weights."""
        with torch._C.DisableTorchFunction():  # an enclosing capture records only `edited_weights` and the product
            weights = _edited(name, attention.call, call, arrangement, heads, edits)
        return call.mix(edited_weights(weights, *call.sources()))

    with _replacing(model, description, layer, edited):
        yield


@contextmanager
def patched(
    model: nn.Module,
    description: ModelDescription,
    layer: str,
    heads: Sequence[int] | None,
    tokens: Sequence[int] | None,
    other: Recording,
) -> Iterator[None]:
    """Use results of attention of another forward pass in the layers whose names match; see `visattn.intervene`."""
    records = {(record.layer, record.call): record for record in other}

    def patch(name: str, call: Call, attention: Attention, arrangement: Arrangement) -> Tensor:
        """Return the result of an attention call with some heads and tokens of the other forward pass."""
        own = call.compute()
        with torch._C.DisableTorchFunction():
            return _patched(name, own, call, arrangement, heads, tokens, records.get((name, attention.call)))

    with _replacing(model, description, layer, patch):
        yield


@contextmanager
def each_part(
    model: nn.Module,
    description: ModelDescription,
    layer: str,
    number: int,
    values: Tensor | None,
    *,
    heads: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[None]:
    """Replace another part of the result of one attention call in each image of the batch.

    Args:
        model: The model.
        description: Facts about the model.
        layer: Name of the layer.
        number: Index of the call among those of the layer.
        values: `(1, heads, [blocks,] q, d)` result that the part is taken from; None: zero.
        heads: The head that is replaced in each image; None: all.
        tokens: The query token whose result is replaced in each image; None: all.

    Yields:
        Nothing.
    """

    def change(_: str, call: Call, attention: Attention, arrangement: Arrangement) -> Tensor:
        own = call.compute()
        if attention.call != number:
            return own
        with torch._C.DisableTorchFunction():
            led = call.led(own)
            blocks = _blocked(arrangement.take(led))  # (images, heads, blocks, q, d)
            given = blocks.new_zeros(()) if values is None else _blocked(values).to(blocks)
            is_replaced = torch.ones((len(blocks), 1, 1, 1, 1), dtype=torch.bool, device=own.device)
            if heads is not None:
                every = torch.arange(blocks.shape[1], device=own.device)
                is_replaced = is_replaced & (torch.tensor(heads, device=own.device)[:, None] == every)[:, :, None, None, None]
            if tokens is not None:
                rows = _rows(arrangement, call)
                is_replaced = is_replaced & (torch.tensor(tokens, device=own.device)[:, None, None] == rows)[:, None, :, :, None]
            return call.laid_out(_in_lead(torch.where(is_replaced, given, blocks), call, arrangement, led.shape[-2:]))

    with _replacing(model, description, glob_escape(layer), change):
        yield


def _blocked(result: Tensor) -> Tensor:
    """Return a result with an axis of blocks, `(B, heads, blocks, q, d)`."""
    return result if result.ndim == 5 else result[:, :, None]


def _rows(arrangement: Arrangement, call: Call) -> Tensor:
    """Return the token of each row, `(blocks, q)`; -1 for none."""
    index = arrangement.query_index
    return torch.arange(call.rows, device=call.value.device)[None] if index is None else index


Change = Callable[[str, Call, Attention, Arrangement], Tensor]  # takes a call that is about to run; returns its result


@contextmanager
def _replacing(model: nn.Module, description: ModelDescription, layer: str, change: Change) -> Iterator[None]:
    """Replace the results of the attention layers whose names match the glob."""
    is_edited: dict[str, bool] = {}  # by name of the attention layers that ran

    def replace(name: str, owner: nn.Module, call: Call, attention: Attention) -> Tensor | None:
        """Return the result that replaces that of an attention call; None to leave the call as it is."""
        matches = fnmatchcase(name, layer)
        with torch._C.DisableTorchFunction():
            located = watch.arranged(call, attention, owner) if matches or attention.doubtful else None
        is_attention = located is not None or not attention.doubtful
        if is_attention:
            is_edited[name] = matches
        return change(name, call, attention, located[0]) if matches and located is not None else None

    watch = Watch(model, description, lambda *_: None, replace)
    with watch.watching():
        yield
    if watch.forward < 0:
        raise CaptureError(
            "the model was not run inside the intervention by this thread. Call model(pixels) inside the with block."
        )
    if not watch.images:
        raise CaptureError(f"the model was given {NO_IMAGES}. Pass such pixels to the whole model.")
    if not any(is_edited.values()):
        names = ", ".join(is_edited) or "none"
        raise OptionError(f"no attention layer matches {printable(layer)!r}. The model's attention layers: {names}.")


def _patched(
    layer: str,
    own: Tensor,
    call: Call,
    arrangement: Arrangement,
    heads: Sequence[int] | None,
    tokens: Sequence[int] | None,
    record: AttentionRecord | None,
) -> Tensor:
    """Return the result of a call with some heads and tokens of another recording."""
    if arrangement.kind == "sampled" or arrangement.reason:
        raise LayoutError(
            f"{layer}: {arrangement.why or 'it weights points that it computes'}, so its tokens cannot be numbered."
        )
    if record is None or record.output is None:
        raise OptionError(f"{layer} has no result in the other recording. Record it with capture(model, outputs=True).")
    led = call.led(own)
    blocks, given = _blocked(arrangement.take(led)), _blocked(record.output)  # (B, heads, blocks, q, d)
    if given.shape[1:] != blocks.shape[1:] or len(given) not in (1, len(blocks)) or record.queries != arrangement.queries:
        raise ShapeError(
            f"{layer}: the other recording has results {tuple(given.shape)}, this forward pass {tuple(blocks.shape)}. Record the other "
            "photo alone or in as many, at the same size."
        )
    changed = given.expand_as(blocks)
    if tokens is not None:
        count = len(arrangement.queries)
        if not all(0 <= token < count for token in tokens):
            raise OptionError(f"token must lie in [0, {count - 1}], got {', '.join(map(str, tokens))}.")
        is_chosen = torch.isin(_rows(arrangement, call), torch.tensor(list(tokens), device=own.device))  # (blocks, q)
        changed = torch.where(is_chosen[:, :, None], changed, blocks)
    if heads is not None:
        changed = _in_heads(heads, changed, blocks)
    return call.laid_out(_in_lead(changed, call, arrangement, led.shape[-2:]))


def _in_lead(blocks: Tensor, call: Call, arrangement: Arrangement, sizes: Sequence[int]) -> Tensor:
    """Return `(B, heads, blocks, *sizes)` in the axes of the call, `(*lead, *sizes)`."""
    if arrangement.order is None:
        return blocks[:, :, 0]
    to_lead = arrangement.order.flatten().argsort()
    return blocks.reshape(-1, *blocks.shape[-2:])[to_lead].reshape(*call.lead, *sizes)


def _edited(
    layer: str, number: int, call: Call, arrangement: Arrangement, heads: Sequence[int] | None, edits: Sequence[Edit]
) -> Tensor:
    """Return the `(*lead, q, k)` weights of a call after all edits."""
    if arrangement.kind == "sampled":
        raise LayoutError(
            f"{layer}: it weights points that it computes, not tokens, so its weights cannot be edited. Choose another layer."
        )
    if arrangement.reason:
        raise LayoutError(
            f"{layer}: {arrangement.why}, so its tokens cannot be located. Choose another layer, or pass grid and prefix."
        )
    weights = call.weigh()
    arranged = arrangement.take(weights)
    blocks = arranged if arranged.ndim == 5 else arranged[:, :, None]  # (B, heads, blocks, q, k)
    rows, columns = (
        torch.arange(count, device=weights.device)[None] if index is None else index
        for index, count in ((arrangement.query_index, call.rows), (arrangement.key_index, call.columns))
    )
    attended = AttentionCall(layer, number, arrangement.queries, arrangement.keys, rows, columns)
    changed = blocks
    for edit in edits:
        changed = edit(changed, attended)
        if changed.shape != blocks.shape:
            raise ShapeError(f"an edit must return weights of shape {tuple(blocks.shape)}, got {tuple(changed.shape)}.")
    if heads is not None:
        changed = _in_heads(heads, changed, blocks)
    return _in_lead(changed, call, arrangement, weights.shape[-2:])


def _in_heads(heads: Sequence[int], changed: Tensor, unchanged: Tensor) -> Tensor:
    """Return the changed weights `(B, heads, blocks, q, k)` of these heads, and the unchanged ones of all others."""
    count = unchanged.shape[1]
    if not all(-count <= head < count for head in heads):
        raise OptionError(f"head must lie in [{-count}, {count - 1}], got {', '.join(map(str, heads))}.")
    is_chosen = torch.zeros(1, count, 1, 1, 1, dtype=torch.bool, device=unchanged.device)
    is_chosen[:, list(heads)] = True
    return torch.where(is_chosen, changed, unchanged)


def scaled(factor: float) -> Edit:
    """Return an edit that multiplies the weights by `factor`; 0 ablates the heads."""
    return lambda weights, _: weights * factor


def masked(tokens: Sequence[int], *, renormalize: bool) -> Edit:
    """Return an edit that masks key tokens: their weights become zero. With `renormalize`, each row is rescaled to its old sum."""

    def edit(weights: Tensor, attended: AttentionCall) -> Tensor:
        """Set the weights `(B, heads, blocks, q, k)` of the masked keys to zero."""
        count = len(attended.keys)
        if not all(0 <= token < count for token in tokens):
            raise OptionError(f"tokens must lie in [0, {count - 1}], got {', '.join(map(str, tokens))}.")
        masked_tokens = torch.tensor(list(tokens), device=weights.device)
        is_masked = torch.isin(attended.key_index, masked_tokens)[:, None, :]  # (blocks, 1, k)
        remaining = weights.masked_fill(is_masked, 0)
        if not renormalize:
            return remaining
        total = remaining.sum(-1, keepdim=True)
        old_total = weights.sum(-1, keepdim=True).masked_fill(total == 0, 0)
        return remaining / total.masked_fill(total == 0, 1) * old_total

    return edit


def permuted(order: Sequence[int]) -> Edit:
    """Return an edit that gives query `i` of each window the row of query `order[i]`."""

    def edit(weights: Tensor, _: AttentionCall) -> Tensor:
        rows = weights.shape[-2]
        if sorted(order) != list(range(rows)):
            raise OptionError(f"order must list each of the {rows} queries of a window once, got {len(order)} numbers.")
        return weights[..., list(order), :]

    return edit
