"""Intervention in the attention of any model. Token layouts that no model family supplies are traced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from visattn._support.typed import typed
from visattn.core.capturing import interventions
from visattn.core.capturing.interventions import Edit, masked, scaled
from visattn.core.families import describe
from visattn.core.records import Recording
from visattn.errors import OptionError

__all__ = ["intervene"]


@typed()
def intervene(
    model: nn.Module,
    layer: str = "*",
    *,
    head: int | Sequence[int] | None = None,
    scale: float | None = None,
    mask: Sequence[int] = (),
    drop: Sequence[int] = (),
    edit: Edit | None = None,
    patch: Recording | None = None,
    token: int | Sequence[int] | None = None,
    grid: Sequence[int] | None = None,
    prefix: int | Sequence[str] = 0,
) -> AbstractContextManager[None]:
    """Edit the attention weights of a model inside a `with` block, for example to measure the effect of a head or a token.

    In the chosen layers the attention matrix is computed explicitly (a float32 softmax), edited, and multiplied with the values.
    Other layers keep their kernel. Tokens are numbered as in the layouts of a recording: the prefix, then the grid in raster order,
    also in layers with windows. Edits are applied in the order `mask`, `drop`, `scale`, `edit`. Without an edit the matrix is only
    computed explicitly: this is the baseline to compare with. To record the edited attention, put a capture around the intervention:
    `with capture(model) as recording, intervene(model, ...): model(pixels)`.

    Args:
        model: Any model that `capture` accepts.
        layer: Glob of layer names: `blocks.3.attn`, `blocks.*`.
        head: Index of the head to edit, or several; by default all heads.
        scale: Factor on the attention weights; 0 removes a head.
        mask: Key tokens that no query may attend to. Their weight goes to the other keys in proportion, as if they were masked before
            the softmax.
        drop: Key tokens whose weight is set to 0 without renormalization: rows then sum to less than 1.
        edit: Your own function of the weights `(B, heads, blocks, q, k)` and an `AttentionCall` (layer, layouts, token numbers of rows
            and columns). It returns weights of the same shape. `visattn.permuted(order)` makes one: query `i` of each window
            gets the row of query `order[i]`.
        patch: Recording of another forward pass of this model, made with `capture(model, outputs=True)`: what the attention heads of the
            chosen layers gave there replaces what they give now. No other edit goes with it.
        token: Index of the query token whose result is replaced by that of `patch`, or several; by default all.
        grid: See `capture`.
        prefix: See `capture`.

    Returns:
        A context manager; the model is as before afterward.

    Raises:
        OptionError: On exit, if no layer matches; in the forward pass, if a head or token does not exist.
        ShapeError: In the forward pass, if `edit` changes the shape.
        CaptureError: On exit, if the model was not run.
        LayoutError: In the forward pass, if the tokens of a chosen layer cannot be numbered.
    """
    heads = None if head is None else [head] if isinstance(head, int) else list(head)
    tokens = None if token is None else [token] if isinstance(token, int) else list(token)
    if patch is not None:
        if len(mask) or len(drop) or scale is not None or edit is not None:
            raise OptionError(
                "a patch replaces results of attention, so no edit of its weights goes with it. Leave out all but one."
            )
        return interventions.patched(model, describe(model, grid, prefix), layer, heads, tokens, patch)
    if tokens is not None:
        raise OptionError("token names queries whose result a patch replaces. Pass patch, or mask for keys.")
    edits = [masked(mask, renormalize=True)] if len(mask) else []
    edits += [masked(drop, renormalize=False)] if len(drop) else []
    edits += [scaled(scale)] if scale is not None else []
    edits += [edit] if edit is not None else []
    return interventions.intervene(model, describe(model, grid, prefix), layer, heads, edits)
