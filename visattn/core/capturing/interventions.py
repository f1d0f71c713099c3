"""Interventions: compute the attention weights of chosen layers, edit them, and let the model continue with the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
from visattn.core.records.parts import Part
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


Compute = Callable[[], Tensor]  # computes the result of an attention call

# takes weights (B, heads, blocks, q, k) and the call they belong to; returns weights of the same shape
Edit = Callable[[Tensor, AttentionCall], Tensor]


@contextmanager
def intervene(
    model: nn.Module, description: ModelDescription, layer: str, heads: Sequence[int] | None, edits: Sequence[Edit]
) -> Iterator[None]:
    """Edit the attention weights of the layers whose names match the glob; see `visattn.intervene`."""

    def edited(name: str, call: Call, attention: Attention, arrangement: Arrangement, _: Compute) -> Tensor:
        """Return the result of an attention call with edited weights."""
        with torch._C.DisableTorchFunction():  # an enclosing capture records only `edited_weights` and the product
            weights = _edited(name, attention.call, call, arrangement, heads, edits)
        return call.mix(edited_weights(weights, *call.sources()))

    with _replacing(model, description, [layer], edited):
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

    def patch(name: str, call: Call, attention: Attention, arrangement: Arrangement, compute: Compute) -> Tensor:
        """Return the result of an attention call with some heads and tokens of the other forward pass."""
        own = compute()
        with torch._C.DisableTorchFunction():
            return _patched(name, own, call, arrangement, heads, tokens, records.get((name, attention.call)))

    with _replacing(model, description, [layer], patch):
        yield


@contextmanager
def each_part(model: nn.Module, description: ModelDescription, parts: Sequence[Part]) -> Iterator[None]:
    """Replace one part of the result of an attention call in each image of a batch, another one in each.

    Args:
        model: The model.
        description: Facts about the model.
        parts: A part for each image; those of one call take values of the same result.

    Yields:
        Nothing.

    Raises:
        CaptureError: If the forward pass lacks one of these calls.
    """
    by_call: dict[tuple[str, int], list[Part | None]] = {}
    for image, part in enumerate(parts):
        by_call.setdefault(part[:2], [None] * len(parts))[image] = part

    def change(name: str, call: Call, attention: Attention, arrangement: Arrangement, compute: Compute) -> Tensor | None:
        chosen = by_call.pop((name, attention.call), None)
        if chosen is None:
            return None
        own = compute()
        with torch._C.DisableTorchFunction():
            led = call.led(own)
            blocks = _blocked(arrangement.take(led))  # (images, heads, blocks, q, d)
            values = next(part for part in chosen if part is not None).values
            given = blocks.new_zeros(()) if values is None else _blocked(values).to(blocks)
            is_replaced = _is_replaced(chosen, blocks.shape[1], _rows(arrangement, call))
            return call.laid_out(_in_lead(torch.where(is_replaced, given, blocks), call, arrangement, led.shape[-2:]))

    layers = {glob_escape(part.layer) for part in parts}
    with _replacing(model, description, layers, change, is_over=lambda: not by_call):
        yield
    if by_call:
        layer, number = next(iter(by_call))
        raise CaptureError(f"the forward pass had no call {number} of {layer}, so nothing of it was replaced.")


def _is_replaced(parts: Sequence[Part | None], heads: int, rows: Tensor) -> Tensor:
    """Return which rows of which heads are replaced in each image, `(images, heads, blocks, q, 1)`; `rows` are their tokens."""
    is_head = [[part is not None and part.head in (None, head) for head in range(heads)] for part in parts]
    in_head = torch.tensor(is_head, device=rows.device)[:, :, None, None, None]
    if all(part is None or part.token is None for part in parts):
        return in_head
    tokens = torch.tensor([-1 if part is None or part.token is None else part.token for part in parts], device=rows.device)
    any_row = torch.tensor([part is not None and part.token is None for part in parts], device=rows.device)
    in_rows = (tokens[:, None, None] == rows) | any_row[:, None, None]
    return in_head & in_rows[:, None, :, :, None]


def _blocked(result: Tensor) -> Tensor:
    """Return a result with an axis of blocks, `(B, heads, blocks, q, d)`."""
    return result if result.ndim == 5 else result[:, :, None]


def _rows(arrangement: Arrangement, call: Call) -> Tensor:
    """Return the token of each row, `(blocks, q)`; -1 for none."""
    index = arrangement.query_index
    return torch.arange(call.rows, device=call.value.device)[None] if index is None else index


# takes a call that is about to run; returns the result that replaces its own, or None
Change = Callable[[str, Call, Attention, Arrangement, Compute], Tensor | None]


@contextmanager
def _replacing(
    model: nn.Module,
    description: ModelDescription,
    layers: Collection[str],
    change: Change,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Replace the results of the attention layers whose names match one of the globs; once this `is_over`, nothing is intercepted."""
    is_edited: dict[str, bool] = {}  # by name of the attention layers that ran

    def replace(name: str, owner: nn.Module, call: Call, attention: Attention, compute: Compute) -> Tensor | None:
        """Return the result that replaces that of an attention call; None to leave the call as it is."""
        is_matching = any(fnmatchcase(name, layer) for layer in layers)
        with torch._C.DisableTorchFunction():
            located = watch.arranged(call, attention, owner) if is_matching or attention.doubtful else None
        is_attention = located is not None or not attention.doubtful
        if is_attention:
            is_edited[name] = is_matching
        return change(name, call, attention, located[0], compute) if is_matching and located is not None else None

    def leave(*_: object) -> None:
        """Stop after the last call that is replaced."""
        if is_over():
            watch.leave()

    watch = Watch(model, description, leave, replace)
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
        raise OptionError(
            f"no attention layer matches {printable(' or '.join(layers))!r}. The model's attention layers: {names}."
        )


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
