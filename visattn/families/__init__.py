"""The door to models: load one by name, ask how it wants its pixels, capture its forward passes. One file per library."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from visattn._support.checks import first_line, printable
from visattn._support.files import is_file
from visattn._support.typed import typed
from visattn.capturing import Anatomy, Attended, Edit, intervene as _intervene, masked, permuted, record, scaled
from visattn.errors import ModelError, OptionError, ResourceError, VisattnError
from visattn.families import custom, timm, torchvision, trained
from visattn.families._spec import InputSpec
from visattn.provenance import Provenance
from visattn.records import Recording

__all__ = [
    "FAMILIES",
    "Anatomy",
    "Attended",
    "InputSpec",
    "cam_layer",
    "capture",
    "head",
    "input_spec",
    "intervene",
    "labels",
    "load_model",
    "names",
    "provenance_of",
    "register",
]

# the first that owns a model answers for it
FAMILIES: dict[str, ModuleType] = {"trained": trained, "timm": timm, "torchvision": torchvision, "custom": custom}

Describe = TypeVar("Describe", bound=Callable[[Any, Provenance], Anatomy])
_registered: dict[type[nn.Module], Callable[[Any, Provenance], Anatomy]] = {}

_loaded: WeakKeyDictionary[nn.Module, Provenance] = WeakKeyDictionary()


@typed()
def load_model(
    name: str,
    *,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    img_size: int | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build a model by its timm name, as `tv:` and its torchvision name, by `file.py:factory` or a folder, in evaluation mode.

    Args:
        name: For example `vit_small_patch14_dinov2.lvd142m`, `tv:resnet50`, `tv:resnet50.IMAGENET1K_V1`, a file of yours and the
            function in it that makes the model, or a folder with a network that visattn trained.
        weights: `auto`: the local cache, then the hub; `none`: random weights; else a safetensors file, or a checkpoint that loads
            without running code. It must have every tensor of the model; the number of classes and of input channels is its own.
            A file's function and a folder have their own: only `auto` then.
        seed: Seed of random weights.
        img_size: Input side in pixels to build for, where the model takes one size only.
        device: Where the model lives: `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        The model; where its weights came from is remembered for the provenance.

    Raises:
        OptionError: If no device goes by such a name, or weights are given to a model that has its own.
        ModelError: If there is no such device on this machine.
        UnsupportedModel: If there is no such model.
        WeightsError: If weights are unreachable, damaged or of another model.
    """
    place = check_device(device)
    from_file, folder = name.rpartition(":")[0].endswith(".py"), Path(name)
    if weights != "auto" and (from_file or is_file(folder / trained.FACTS)):
        what = "the function of a file loads its own weights" if from_file else "a folder holds its own weights"
        raise OptionError(f"{printable(name)}: {what}, got {printable(str(weights))}. Leave weights out.")
    if from_file:
        model, provenance = custom.load(name)
    elif is_file(folder / trained.FACTS):
        model, provenance = trained.load(folder)
    else:
        family = torchvision if name.startswith(torchvision.PREFIX) else timm
        model, provenance = family.load(name, weights if isinstance(weights, str) else Path(weights), seed, img_size)
    model = _moved(model, place)
    _loaded[model] = provenance
    return model


def _moved(model: nn.Module, place: torch.device) -> nn.Module:
    try:
        model.to(place)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"out of memory on {place}; choose a smaller model or another device.") from error
    except Exception as error:  # a model on the meta device, one with a `to` of its own
        raise ModelError(
            f"{type(model).__name__}: cannot be moved to {place} ({first_line(error)}). Return a model whose parameters have values."
        ) from error
    return model


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
    when a method asks. Parameters, gradients, training flags and hooks are as before afterwards, also after an error. Records hold
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
    anatomy = _anatomy(model, grid, prefix)
    return record(model, anatomy, layers=layers, values=values, features=features, gradients=gradients, remember=remember)


@typed()
def intervene(
    model: nn.Module,
    layer: str = "*",
    *,
    head: int | Sequence[int] | None = None,
    scale: float | None = None,
    mask: Sequence[int] = (),
    drop: Sequence[int] = (),
    permute: Sequence[int] | None = None,
    edit: Edit | None = None,
    grid: Sequence[int] | None = None,
    prefix: int | Sequence[str] = 0,
) -> AbstractContextManager[None]:
    """Change the attention of a model inside a `with`, and nothing else: ask what a head or a token is for.

    The attention of the chosen layers is written out as a matrix (a float32 softmax), edited, and multiplied with the values; other
    layers keep their kernel. Tokens are numbered as in the layouts of a recording: the prefix, then the grid in raster order, in
    windows too. Edits are done in the order `permute`, `mask`, `drop`, `scale`, `edit`; without any the layers are only written out,
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
        permute: Query `i` of each window gets the row of query `permute[i]`.
        edit: Your own: a function of the weights `(B, heads, blocks, q, k)` and an `Attended` (layer, layouts, token numbers of rows
            and columns) that returns weights of the same shape.
        grid: See `capture`.
        prefix: See `capture`.

    Returns:
        A context; the model is as before afterwards.

    Raises:
        OptionError: On leaving, if no layer matches; in the forward, if a head or token does not exist.
        ShapeError: In the forward, if `edit` changes the shape.
        CaptureError: On leaving, if the model was not run.
        LayoutError: In the forward, if a chosen layer's tokens cannot be named.
    """
    edits = [permuted(permute)] if permute is not None else []
    edits += [masked(mask, renormalize=True)] if len(mask) else []
    edits += [masked(drop, renormalize=False)] if len(drop) else []
    edits += [scaled(scale)] if scale is not None else []
    edits += [edit] if edit is not None else []
    heads = None if head is None else [head] if isinstance(head, int) else list(head)
    return _intervene(model, _anatomy(model, grid, prefix), layer, heads, edits)


def register(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Tell what cannot be seen of a model class of your own: which modules give its tokens, and what stands for the whole image.

    >>> @register(MyViT)
    ... def describe(model, provenance):
    ...     return Anatomy({"blocks": model.blocks, "norm": model.norm}, "cls", provenance)

    Args:
        kind: The class; its subclasses count too. The last that was registered answers.

    Returns:
        A decorator for a function of a model and the provenance of its weights that gives an `Anatomy`; with `place=` it also says
        where tokens lie, which are then not followed.
    """

    def decorate(describe: Describe) -> Describe:
        _registered[kind] = describe
        return describe

    return decorate


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How `model` wants its pixels.

    Raises:
        OptionError: If it does not take `img_size`.
        ModelError: If what the model states of its input makes no sense.
    """  # noqa: DOC501 - errors of ours pass
    try:
        spec: InputSpec = _family_of(model).input_spec(_uncompiled(model), img_size)
        return spec.checked()
    except VisattnError:
        raise
    except Exception as error:  # attributes of a foreign model may be anything
        what = f"what it states of its input cannot be used ({type(error).__name__}: {first_line(error)})"
        raise ModelError(f"{type(model).__name__}: {what}. Give it a size, mean and std that can be.") from error


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes, where they are known."""
    known: tuple[str, ...] | None = _family_of(model).labels(_uncompiled(model))
    return known


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """From what any block gives to the model's output, where that is known."""
    known: Callable[[Tensor], Tensor] | None = _family_of(model).head(_uncompiled(model))
    return known


def cam_layer(model: nn.Module) -> str | None:
    """The module whose tokens or feature map Grad-CAM reads, where that is known."""
    known: str | None = _family_of(model).cam_layer(_uncompiled(model))
    return known


def names(pattern: str = "*") -> list[str]:
    """Models with published weights whose maps are known, by name pattern."""
    return timm.names(pattern) + torchvision.names(pattern)


def _anatomy(model: nn.Module, grid: Sequence[int] | None, prefix: int | Sequence[str]) -> Anatomy:
    provenance = provenance_of(model)
    if grid is not None:
        return custom.told(model, grid, prefix, provenance)
    if prefix:
        raise OptionError("prefix tells where tokens lie together with grid. Pass grid=(rows, columns) too.")
    for kind, describe in reversed(_registered.items()):
        if isinstance(model, kind):
            return replace(describe(model, provenance), stated=True)
    anatomy: Anatomy = _family_of(model).anatomy(model, provenance)
    return anatomy


def check_device(name: str | torch.device) -> torch.device:
    """A device that works, tried before weights are fetched."""
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"unknown device '{printable(str(name))}'. Choose cpu, or cuda or cuda:N for a GPU.") from error
    try:
        torch.zeros(1, device=place).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:  # which of them depends on how torch was built
        count = torch.cuda.device_count()
        there = f"cpu, {', '.join(f'cuda:{i}' for i in range(count))}" if count else "cpu"
        raise ModelError(f"device '{place}' must be one that works on this machine. Choose from: {there}.") from error
    return place


def _family_of(model: nn.Module) -> ModuleType:
    return next(family for family in FAMILIES.values() if family.owns(_uncompiled(model)))


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; any other model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def provenance_of(model: nn.Module) -> Provenance:
    """Where a model's weights came from."""
    if model not in _loaded:
        _loaded[model] = Provenance(model=type(model).__name__, weights="given with the model")
    return _loaded[model]
