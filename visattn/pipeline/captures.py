"""Captures and interventions of any model: what a family knows of it is looked up, the rest is followed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from visattn import capturing
from visattn._support.typed import typed
from visattn.capturing import Edit, masked, record, scaled
from visattn.families import anatomy
from visattn.records import Recording


@typed(but=("model",))  # what is no module has a message of its own
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
    """Record the attention of every forward pass of `model` inside a `with`.

    The model keeps its fused kernel and its results stay bit-identical; queries and keys are copied, weights are rebuilt from them
    when a method asks. Parameters, gradients, training flags and hooks are as before afterward, also after an error. Records hold
    what the kernel was given: in training mode that is attention before dropout. Where tokens lie is followed from the pixels,
    operation by operation; an attention whose tokens cannot be followed has a `reason`, and one that cannot be recorded stands in
    `recording.unseen`. Records are there when the forward ends.

    Args:
        model: Any module that is called with images `(B, C, H, W)`.
        grid: `(rows, columns)` of patches that cover the input, to tell where tokens lie instead of having them followed.
        prefix: The tokens before the patches, by name or number (`cls`, then `register0` and so on); with `grid` only.
        layers: Names of the layers whose attention is kept, as a glob: `blocks.11.*` costs a twelfth of the memory. Methods that
            multiply layers refuse such a recording.
        values: Whether to keep value vectors too (half as much memory again).
        features: Which features to keep: tokens of the `last` layer, of `all` layers, or `none`; or globs of module names, whose
            outputs are kept as they are, or as tokens in canonical order where they are `(B, N, D)` and could be followed.
        gradients: Whether to keep what `Recording.gradients(score)` needs: values, and the graph of the forward.
        remember: Whether a forward whose operations are, one by one, those of an earlier one takes over where its tokens lie. It gives
            the same recording in less time; False follows every forward anew.

    Returns:
        A context that gives the `Recording`.

    Raises:
        UnsupportedModel: If the model runs outside Python; in the forward, if a `flex_attention` does more to scores than add to them.
        OptionError: If `grid` or `prefix` make no sense.
        CaptureError: On leaving, if the model was not run or gave NaN.
        NoAttentionCaptured: On leaving, if no softmax attention ran, or none in `layers`.
        LayoutError: In the forward, if tokens are not as many as `prefix` and `grid`.
    """
    return record(
        model,
        anatomy(model, grid, prefix),
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
    """Change the attention of a model inside a `with`, and nothing else: ask what a head or a token is for.

    The attention of the chosen layers is written out as a matrix (a float32 softmax), edited, and multiplied with the values; other
    layers keep their kernel. Tokens are numbered as in the layouts of a recording: the prefix, then the grid in raster order, in
    windows too. Edits are done in the order `mask`, `drop`, `scale`, `edit`; without any the layers are only written out,
    which is the baseline to compare with. A capture around an intervention records the edited attention:
    `with capture(model) as recording, intervene(model, ...): model(pixels)`.

    Args:
        model: Any model that `capture` takes.
        layer: Name of the layers, as a glob: `blocks.3.attn`, `blocks.*`.
        head: Only this head, or these.
        scale: Weights are multiplied by it; 0 takes a head out.
        mask: Key tokens that nobody can look at: their weight goes to the others in proportion, as if they were masked before the
            softmax.
        drop: Key tokens whose weight is lost: rows then sum to less than 1.
        edit: Your own: a function of the weights `(B, heads, blocks, q, k)` and an `Attended` (layer, layouts, token numbers of rows
            and columns) that returns weights of the same shape. `visattn.permuted(order)` is one: query `i` of each window
            gets the row of query `order[i]`.
        grid: See `capture`.
        prefix: See `capture`.

    Returns:
        A context; the model is as before afterward.

    Raises:
        OptionError: On leaving, if no layer matches; in the forward, if a head or token does not exist.
        ShapeError: In the forward, if `edit` changes the shape.
        CaptureError: On leaving, if the model was not run.
        LayoutError: In the forward, if a chosen layer's tokens cannot be named.
    """
    edits = [masked(mask, renormalize=True)] if len(mask) else []
    edits += [masked(drop, renormalize=False)] if len(drop) else []
    edits += [scaled(scale)] if scale is not None else []
    edits += [edit] if edit is not None else []
    heads = None if head is None else [head] if isinstance(head, int) else list(head)
    return capturing.intervene(model, anatomy(model, grid, prefix), layer, heads, edits)
