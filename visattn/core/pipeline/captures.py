"""Capture of, and intervention in, the attention of any model. Token layouts that no model family supplies are traced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from visattn._support.typed import typed
from visattn.core import capturing
from visattn.core.capturing import Edit, masked, record, scaled
from visattn.core.families import describe
from visattn.core.records import Recording

__all__ = ["capture", "intervene"]


@typed(but=("model",))  # a model of another type has its own error message
def capture(
    model: nn.Module,
    *,
    grid: Sequence[int] | None = None,
    prefix: int | Sequence[str] = 0,
    layers: str = "*",
    values: bool = False,
    features: str | Sequence[str] = "last",
    gradients: bool = False,
    remember: bool = True,
) -> AbstractContextManager[Recording]:
    """Record the attention of every forward pass of `model` inside a `with` block.

    The model keeps its fused kernel, and its results stay bit-identical. Queries and keys are copied; methods that need attention
    weights compute them from the copies. After the block, parameters, gradients, training flags and hooks are as before, even after
    an error. Records hold the kernel's inputs: in training mode that is attention before dropout.

    Token positions are traced from the pixels, operation by operation. If the tokens of a layer cannot be traced, its record has a
    `reason`. Attention that cannot be recorded at all is listed in `recording.unseen`. Records are available once the forward pass
    ends.

    Args:
        model: Any module that is called with images `(B, C, H, W)`.
        grid: `(rows, columns)` of the patches that cover the input; if given, token positions are not traced.
        prefix: Tokens before the patches: their names, or their number (`cls`, then `register0` and so on). Requires `grid`.
        layers: Glob of the names of the layers whose attention is kept: `blocks.11.*` needs a twelfth of the memory. Methods that
            multiply layers refuse such a recording.
        values: Whether to keep value vectors too; this needs half as much memory again. Where the model writes its attention out, its
            queries and keys are kept too.
        features: Features to keep: tokens of the `last` layer, of `all` layers, or `none`; or globs of module names. Outputs of
            these modules are kept as they are, or as tokens in canonical order if they are `(B, N, D)` and can be traced.
        gradients: Whether to keep what `Recording.gradients(score)` needs: values and the autograd graph.
        remember: Whether to reuse the token positions of an earlier forward pass that ran exactly the same operations. The recording
            is the same and takes less time. False traces every forward pass anew.

    Returns:
        A context manager that returns the `Recording`.

    Raises:
        UnsupportedModel: If the model runs outside Python; in the forward pass, if a `flex_attention` does more to scores than add
            to them.
        OptionError: If `grid` or `prefix` is invalid.
        CaptureError: On exit, if the model was not run or returned NaN.
        NoAttentionCaptured: On exit, if no softmax attention ran, or none in `layers`.
        LayoutError: In the forward pass, if the number of tokens does not match `prefix` and `grid`.
    """
    return record(
        model,
        describe(model, grid, prefix),
        layers=layers,
        values=values,
        features=features,
        gradients=gradients,
        remember=remember,
    )


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
    edits = [masked(mask, renormalize=True)] if len(mask) else []
    edits += [masked(drop, renormalize=False)] if len(drop) else []
    edits += [scaled(scale)] if scale is not None else []
    edits += [edit] if edit is not None else []
    heads = None if head is None else [head] if isinstance(head, int) else list(head)
    return capturing.intervene(model, describe(model, grid, prefix), layer, heads, edits)
