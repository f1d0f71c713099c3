"""Fit a checkpoint to a model: select the tensors, convert their precision, and check that they match the model.

This module is independent of model libraries. It takes names and shapes of a model's tensors, and returns tensors under those names, with a
note on every choice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn.errors import WeightsError

Shapes = Mapping[str, torch.Size]
Translate = Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]

# keys under which training scripts store weights; averaged weights first, since the first of equally good fits is used
_NESTS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "teacher",
    "state_dict",
    "model",
    "model_state_dict",
    "module",
    "encoder",
    "student",
)
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of wrapped models: DistributedDataParallel, torch.compile
_PARTS = ("teacher.", "student.", "model.", "backbone.", "encoder.")  # prefixes of one part of a larger model
_DEPTH = 4
_SHOWN = 5
_BROKEN = (RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError, struct.error)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the names and shapes of a model's tensors."""
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def unwrap(loaded: object, wanted: Shapes, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Select the tensors of a checkpoint that fit a model, from nested dictionaries and under prefixes.

    Every nested dictionary is tried with every known prefix. The best is the one with most tensors of matching name and shape, then of
    matching name. Ties go to averaged weights, then to the shortest prefix. Names without the prefix are kept as they are.

    Args:
        loaded: Content of the file.
        wanted: Names and shapes of the model's tensors.
        name: Name of the file, for messages.

    Returns:
        Tensors by name, and a note on each choice.

    Raises:
        WeightsError: If the content has no tensors.
    """
    found = dict(_dictionaries(loaded))
    if not found:
        raise WeightsError(f"{name}: is not a dictionary of tensors; save model.state_dict().")
    choices = [(path, prefix) for path, tensors in found.items() for prefix in _prefixes(tensors)]
    path, prefix = max(choices, key=lambda choice: _fitness(found[choice[0]], choice[1], wanted))
    notes = []
    if path:
        others = ", ".join(f"'{other}'" for other in found if other and other != path)
        notes.append(f"the weights were read from '{path}' of the checkpoint{f'; {others} not used' if others else ''}")
    kept, left = _stripped(found[path], prefix, wanted)
    if prefix:
        notes.append(f"the prefix '{prefix}' of the checkpoint's names was removed")
    if left:
        notes.append(f"{len(left)} tensors of the checkpoint without the prefix '{prefix}' were not used: {_listed(left)}")
    return kept, tuple(notes)


def as_float32(tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Cast floating-point weights to float32, in which maps are computed, and note the stored precision if it differs.

    Raises:
        WeightsError: If a tensor is not a plain tensor of real numbers (quantized, sparse, complex, ...); the message names it.
    """
    for key, tensor in tensors.items():
        kind = (
            "quantized"
            if tensor.is_quantized
            else "sparse"
            if tensor.layout != torch.strided
            else "without values"
            if tensor.is_meta
            else "complex"
            if tensor.is_complex()
            else "larger than its storage"
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
            else ""
        )
        if kind:
            raise WeightsError(f"{name}: {printable(key)} is {kind}; save plain float tensors.")
    stored = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} - {torch.float32}
    cast = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
    return cast, (f"weights stored as {names} were cast to float32",) if stored else ()


def classes_in(tensors: Mapping[str, Tensor], head: str | Sequence[str] | None) -> int:
    """Return the number of classes of a checkpoint's head, found by the name(s) of the model's head; 0 if it has none."""
    weight = _weight(tensors, head or "head")
    return int(weight.shape[0]) if weight is not None and weight.ndim else 0


def channels_in(tensors: Mapping[str, Tensor], stem: str | Sequence[str] | None) -> int:
    """Return the input channels of a checkpoint's first convolution, found by its name(s) in the model; 3 if it has none."""
    weight = _weight(tensors, stem or "patch_embed.proj")
    return int(weight.shape[1]) or 3 if weight is not None and weight.ndim == 4 else 3


def fill(
    model: nn.Module, tensors: dict[str, Tensor], name: str, translate: Translate | None = None, lenient: bool = False
) -> tuple[str, ...]:
    """Load weights into a model; they must match it completely.

    Args:
        model: The model.
        tensors: Plain tensors by name.
        name: Name of the file, for messages.
        translate: The library's conversion of older checkpoints: new names, resampled position embeddings.
        lenient: Whether the library allows tensors that the model does not use; they are noted.

    Returns:
        Notes on resampled and unused tensors.

    Raises:
        WeightsError: If a tensor is missing, is unexpected, or has another shape.
    """
    own = model.state_dict()
    try:
        given = translate(dict(tensors), model) if translate else tensors
    except WeightsError as error:  # raised by one of our own translations
        raise WeightsError(f"{name}: {error}") from error
    except _BROKEN as error:  # the translation failed on an unexpected name or shape
        raise WeightsError(f"{name}: {_misfit(tensors, own)}") from error
    shared = [key for key in given if key in own]
    if any(given[key].shape != own[key].shape for key in shared):
        raise WeightsError(f"{name}: {_misfit(given, own)}")
    odd = next((key for key in shared if own[key].is_floating_point() and not given[key].is_floating_point()), None)
    if odd:
        raise WeightsError(
            f"{name}: {odd} must hold floating-point numbers, got {str(given[odd].dtype).removeprefix('torch.')}; "
            "save the weights as they were before quantization."
        )
    missing, unexpected = model.load_state_dict(given, strict=False)  # checked below, to report both lists in one message
    if missing or (unexpected and not lenient):
        raise WeightsError(f"{name}: {_misfit(given, own, missing, unexpected)}")
    notes = [
        f"{key} was resampled from {_size(tensors[key])} to {_size(given[key])}"
        for key in shared
        if key in tensors and tensors[key].shape != given[key].shape
    ]
    if unexpected:
        notes.append(f"{len(unexpected)} tensors of the checkpoint are not used by this model: {_listed(unexpected)}")
    return tuple(notes)


def _dictionaries(loaded: object, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every dictionary of tensors in a checkpoint with its path of keys, in order of preference."""
    if not isinstance(loaded, dict) or not depth:
        return
    tensors = {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        yield path, tensors
    for nest in _NESTS:
        yield from _dictionaries(loaded.get(nest), f"{path}.{nest}" if path else nest, depth - 1)


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return all chains of known prefixes that occur in the names, shortest first."""
    found = last = [""]
    for _ in range(_DEPTH):
        longer = (prefix + part for prefix in last for part in (*_WRAPPERS, *_PARTS))
        last = [prefix for prefix in longer if any(key.startswith(prefix) for key in tensors)]
        found = found + last
    return found


def _fitness(tensors: Mapping[str, Tensor], prefix: str, wanted: Shapes) -> tuple[int, int]:
    inside = {key.removeprefix(prefix): tensor.shape for key, tensor in tensors.items() if key.startswith(prefix)}
    named = [key for key in inside if key in wanted]
    if 2 * len(named) < len(wanted):  # a few common names are chance; the library may still translate the rest
        return 0, 0
    return sum(inside[key] == wanted[key] for key in named), len(named)


def _stripped(tensors: Mapping[str, Tensor], prefix: str, wanted: Shapes) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors by name without the prefix, and the names that belong to other parts of a larger model.

    A wrapper prefix covers the whole model, so names without it are kept and must match. A part prefix covers only a part: names without it
    are kept only if the model has them, such as a head on a backbone.
    """
    kept = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    left = []
    for key in tensors:
        if key.startswith(prefix):
            continue
        bare = key
        while bare.startswith(_WRAPPERS):
            bare = bare[bare.index(".") + 1 :]
        if bare in wanted and bare not in kept:
            kept[bare] = tensors[key]
        elif any(part in prefix for part in _PARTS):
            left.append(key)
        else:
            kept[key] = tensors[key]
    return kept, left


def _weight(tensors: Mapping[str, Tensor], names: str | Sequence[str]) -> Tensor | None:
    every = [names] if isinstance(names, str) else names
    return next((tensors[f"{item}.weight"] for item in every if f"{item}.weight" in tensors), None)


def _misfit(
    given: Mapping[str, Tensor], own: Mapping[str, Tensor], missing: Sequence[str] = (), unexpected: Sequence[str] = ()
) -> str:
    """Describe how tensors differ from the model's; missing and unexpected names are computed if neither is given."""
    wrong = [key for key in given if key in own and given[key].shape != own[key].shape]
    if not missing and not unexpected:
        missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    parts = []
    if wrong:
        first, more = wrong[0], f" (and {len(wrong) - 1} more of another shape)" if len(wrong) > 1 else ""
        parts.append(f"{first}: checkpoint {_size(given[first])}, model {_size(own[first])}{more}")
    parts += [f"{len(missing)} missing: {_listed(missing)}"] if missing else []
    parts += [f"{len(unexpected)} unexpected: {_listed(unexpected)}"] if unexpected else []
    fix = "choose the model that the checkpoint was trained with (--model), or save model.state_dict() of the whole model"
    return f"does not fit the model: {'; '.join(parts) or 'its tensors cannot be translated'}; {fix}."


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
