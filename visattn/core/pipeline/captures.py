"""Capture of the attention of any model. Token layouts that no model family supplies are traced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from visattn._support.typed import typed
from visattn.core.capturing import record
from visattn.core.families import describe
from visattn.core.records import Recording

__all__ = ["capture"]


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
    gates: bool = True,
    outputs: bool = False,
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
        features: Features to keep: tokens of the `last` layer, of `all` layers, or `none`; `positions`, the table of positions that is
            added to the tokens; or globs of module names. Outputs of these modules are kept as they are, or as tokens in canonical order
            if they are `(B, N, D)` and can be traced.
        gradients: Whether to keep what `Recording.gradients(score)` needs: values and the autograd graph.
        gates: Whether to look for the gates of all modules; those of `visattn.nn`, timm and torchvision are always kept.
        outputs: Whether to keep the results of the attention kernels too, which `intervene` can put into another forward pass.
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
        gates=gates,
        outputs=outputs,
        remember=remember,
    )
