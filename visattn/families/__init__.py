"""The door to models: load one by name, ask how it wants its pixels, capture its forward passes. One file per library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

from torch import nn

from visattn._capture import record
from visattn.errors import OptionError
from visattn.families import custom, timm
from visattn.families._spec import InputSpec
from visattn.provenance import Provenance
from visattn.records import Recording

__all__ = ["FAMILIES", "InputSpec", "capture", "input_spec", "load_model"]

FAMILIES: dict[str, ModuleType] = {"timm": timm, "custom": custom}  # the first that owns a model answers for it

_loaded: WeakKeyDictionary[nn.Module, Provenance] = WeakKeyDictionary()


def load_model(
    name: str, *, weights: str | os.PathLike[str] = "auto", seed: int = 0, img_size: int | None = None, device: str = "cpu"
) -> nn.Module:
    """Build a model by its timm name, or by `file.py:factory`, in evaluation mode.

    Args:
        name: For example `vit_small_patch14_dinov2.lvd142m`, or a file of yours and the function in it that makes the model.
        weights: `auto`: the local cache, then the hub; `none`: random weights; else a safetensors file, or a checkpoint that loads
            without running code.
        seed: Seed of random weights.
        img_size: Input side in pixels to build for, where the model takes one size only.
        device: Where the model lives.

    Returns:
        The model; where its weights came from is remembered for the provenance.

    Raises:
        UnsupportedModel: If there is no such model.
        WeightsError: If weights are unreachable, damaged or of another model.
    """
    if name.rpartition(":")[0].endswith(".py"):
        model, provenance = custom.load(name)
    else:
        model, provenance = timm.load(name, weights if isinstance(weights, str) else Path(weights), seed, img_size)
    model = model.to(device)
    _loaded[model] = provenance
    return model


def capture(
    model: nn.Module,
    *,
    grid: Sequence[int] | None = None,
    prefix: int | Sequence[str] = 0,
    layers: str = "*",
    values: bool = False,
    features: str | Sequence[str] = "last",
    gradients: bool = False,
) -> AbstractContextManager[Recording]:
    """Record the attention of every forward pass of `model` inside a `with`.

    The model keeps its fused kernel and its results stay bit-identical; queries and keys are copied, weights are rebuilt from them
    when a method asks. Parameters, gradients, training flags and hooks are as before afterwards, also after an error. Records hold
    what the kernel was given: in training mode that is attention before dropout. Where tokens lie is followed from the pixels,
    operation by operation, in the first forward of a size; an attention whose tokens cannot be followed has a `reason`.

    Args:
        model: Any module that is called with images `(B, C, H, W)`.
        grid: `(rows, columns)` of patches that cover the input, to tell where tokens lie instead of having them followed.
        prefix: The tokens before the patches, by name or number (`cls`, then `register0` and so on); with `grid` only.
        layers: Names of the layers whose attention is kept, as a glob: `blocks.11.*` costs a twelfth of the memory. Methods that
            multiply layers refuse such a recording.
        values: Whether to keep value vectors too (half as much memory again).
        features: Which features to keep: tokens of the `last` layer, of `all` layers, or `none`; or globs of module names, whose
            outputs are kept as they are.
        gradients: Whether to keep what `Recording.gradients(score)` needs: values, and the graph of the forward.

    Returns:
        A context that gives the `Recording`.

    Raises:
        UnsupportedModel: If the model runs outside Python; in the forward, if a `flex_attention` does more to scores than add to them.
        OptionError: If `grid` or `prefix` make no sense.
        CaptureError: On leaving, if the model was not run or gave NaN.
        NoAttentionCaptured: On leaving, if no softmax attention ran, or none in `layers`.
        LayoutError: In the forward, if tokens are not as many as `prefix` and `grid`.
    """
    provenance = _provenance_of(model)
    if grid is not None:
        anatomy = custom.told(model, grid, prefix, provenance)
    elif prefix:
        raise OptionError("prefix tells where tokens lie together with grid. Pass grid=(rows, columns) too.")
    else:
        anatomy = _family_of(model).anatomy(model, provenance)
    return record(model, anatomy, layers=layers, values=values, features=features, gradients=gradients)


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How `model` wants its pixels.

    Raises:
        OptionError: If it does not take `img_size`.
    """
    spec: InputSpec = _family_of(model).input_spec(model, img_size)
    return spec


def _family_of(model: nn.Module) -> ModuleType:
    return next(family for family in FAMILIES.values() if family.owns(model))


def _provenance_of(model: nn.Module) -> Provenance:
    known = _loaded.get(model)
    return known if known is not None else Provenance(model=type(model).__name__, weights="given with the model")
