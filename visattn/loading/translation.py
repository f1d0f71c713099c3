"""A checkpoint against a model: which of its tensors are meant, in which precision, and whether they are all the model needs.

Nothing here knows a library: names and shapes of a model come in, tensors under those names and notes about every choice go out.
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

# where training scripts keep weights, averaged ones first: of two that fit alike the first is taken
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
_WRAPPERS = ("module.", "_orig_mod.")  # around a whole model: DistributedDataParallel, torch.compile
_PARTS = ("teacher.", "student.", "model.", "backbone.", "encoder.")  # one part of something larger
_DEPTH = 4
_SHOWN = 5
_BROKEN = (RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError, struct.error)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Names and shapes of a model's tensors."""
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def unwrap(loaded: object, wanted: Shapes, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of a checkpoint that a model wants, whatever they are wrapped in.

    Of all dictionaries inside and all prefixes of their names, those are taken that give the model most tensors of its shapes, then
    most of its names; of equals the averaged weights, then the shortest prefix. What does not help is left as it is.

    Args:
        loaded: The content of the file.
        wanted: Names and shapes of the model's tensors.
        name: Name of the file, for messages.

    Returns:
        Tensors by name, and a note about each choice.

    Raises:
        WeightsError: If there are no tensors in it.
    """
    found = dict(_dictionaries(loaded))
    if not found:
        raise WeightsError(f"{name}: is not a dictionary of tensors; save model.state_dict().")
    choices = [(path, prefix) for path, tensors in found.items() for prefix in _prefixes(tensors)]
    path, prefix = max(choices, key=lambda choice: _fitness(found[choice[0]], choice[1], wanted))
    notes = []
    if path:
        others = ", ".join(f"'{other}'" for other in found if other and other != path)
        notes.append(f"the weights are those under '{path}' of the checkpoint{f'; {others} left aside' if others else ''}")
    kept, left = _stripped(found[path], prefix, wanted)
    if prefix:
        notes.append(f"the prefix '{prefix}' of the checkpoint's names was removed")
    if left:
        notes.append(f"{len(left)} tensors of the checkpoint that are not under '{prefix}' were left aside: {_listed(left)}")
    return kept, tuple(notes)


def as_float32(tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Weights in the precision that maps are computed in, and a note where they were stored in another.

    Raises:
        WeightsError: If one is no plain tensor of real numbers; the message names it.
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
            else "larger than what is stored of it"
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
    """How many classes a checkpoint's head has, by the name(s) of the model's own head; 0 if it has none."""
    weight = _weight(tensors, head or "head")
    return int(weight.shape[0]) if weight is not None and weight.ndim else 0


def channels_in(tensors: Mapping[str, Tensor], stem: str | Sequence[str] | None) -> int:
    """How many input channels a checkpoint's first convolution takes, by its name(s) in the model; 3 if it has none."""
    weight = _weight(tensors, stem or "patch_embed.proj")
    return int(weight.shape[1]) or 3 if weight is not None and weight.ndim == 4 else 3


def fill(
    model: nn.Module, tensors: dict[str, Tensor], name: str, translate: Translate | None = None, lenient: bool = False
) -> tuple[str, ...]:
    """Give a model all of its weights, or refuse.

    Args:
        model: The model.
        tensors: Plain tensors by name.
        name: Name of the file, for messages.
        translate: What the model's library does to older checkpoints: new names, resampled position embeddings.
        lenient: Whether the library allows tensors that the model does not use; they are noted.

    Returns:
        A note about every tensor that is not as it was stored.

    Raises:
        WeightsError: If a tensor is missing, is not the model's, or has another shape.
    """
    own = model.state_dict()
    try:
        given = translate(dict(tensors), model) if translate else tensors
    except WeightsError as error:  # of a translation that is ours
        raise WeightsError(f"{name}: {error}") from error
    except _BROKEN as error:  # its arithmetic met a shape or a name it does not know
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
    missing, unexpected = model.load_state_dict(given, strict=False)  # judged here: what is missing and what is too much is told
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
    """Every dictionary of tensors in a checkpoint with the keys that lead to it, in the order of preference."""
    if not isinstance(loaded, dict) or not depth:
        return
    tensors = {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        yield path, tensors
    for nest in _NESTS:
        yield from _dictionaries(loaded.get(nest), f"{path}.{nest}" if path else nest, depth - 1)


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Chains of known prefixes that some name begins with, shortest first."""
    found = last = [""]
    for _ in range(_DEPTH):
        longer = (prefix + part for prefix in last for part in (*_WRAPPERS, *_PARTS))
        last = [prefix for prefix in longer if any(key.startswith(prefix) for key in tensors)]
        found = found + last
    return found


def _fitness(tensors: Mapping[str, Tensor], prefix: str, wanted: Shapes) -> tuple[int, int]:
    inside = {key.removeprefix(prefix): tensor.shape for key, tensor in tensors.items() if key.startswith(prefix)}
    named = [key for key in inside if key in wanted]
    if 2 * len(named) < len(wanted):  # a few names in common are chance; a library may still know how to translate them
        return 0, 0
    return sum(inside[key] == wanted[key] for key in named), len(named)


def _stripped(tensors: Mapping[str, Tensor], prefix: str, wanted: Shapes) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under their names without the prefix, and the names of those that belong to something larger than the model.

    A wrapper is around the whole model: a name without it is of the model and stays, to be refused if it does not fit. Beside a part,
    only what the model knows by name stays: the head on a backbone.
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
    """What differs, the first things by name; where neither is given, missing and unexpected names are those of the tensors."""
    wrong = [key for key in given if key in own and given[key].shape != own[key].shape]
    if not missing and not unexpected:
        missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    parts = []
    if wrong:
        first, more = wrong[0], f" (and {len(wrong) - 1} more of another shape)" if len(wrong) > 1 else ""
        parts.append(f"{first}: checkpoint {_size(given[first])}, model {_size(own[first])}{more}")
    parts += [f"{len(missing)} missing: {_listed(missing)}"] if missing else []
    parts += [f"{len(unexpected)} unexpected: {_listed(unexpected)}"] if unexpected else []
    fix = "choose the model that it was trained as (--model), or save model.state_dict() of the whole model"
    return f"does not fit the model: {'; '.join(parts) or 'its tensors cannot be translated'}; {fix}."


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
