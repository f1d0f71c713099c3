"""Fit a checkpoint to a model: select the tensors, convert their precision, and check that they match the model.

This module is independent of model libraries. It takes names and shapes of a model's tensors, and returns tensors under those names, with a
note on every choice.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.language import flag
from visattn.core.loading.nests import WRAPPERS, is_usual, is_usual_prefix, is_wrapper, preference
from visattn.core.loading.stand_ins import tensor_of
from visattn.errors import WeightsError

__all__ = ["fill"]

Shapes = Mapping[str, torch.Size]
Translate = Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]

_DEPTH = 4  # of nested dictionaries
_MOST = 10_000  # dictionaries of one file that are searched
_SHOWN = 5
_LONGEST, _DEEPEST = 1000, 40  # characters and dots of a name that is split at its dots
_INNER = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # wrappers of single layers
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # types of tensors without code of their own
_COUNTER = "n_averaged"  # which torch.optim.swa_utils.AveragedModel saves beside the weights
_BROKEN = (RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError, struct.error)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the names and shapes of a model's tensors."""
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def unwrap(loaded: object, wanted: Shapes, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Select the tensors of a checkpoint that fit a model, from nested dictionaries and under prefixes.

    Every nested dictionary of tensors is tried with every prefix of its names. The best is the one with most tensors of matching name and
    shape, then of matching name. Ties go to averaged weights, then to the shortest prefix, then to the first in the file. Names without the
    prefix are kept as they are.

    Args:
        loaded: Content of the file.
        wanted: Names and shapes of the model's tensors.
        name: Name of the file, for messages.

    Returns:
        Tensors by name, and a note on each choice.

    Raises:
        WeightsError: If the content has no tensors.
    """
    parts = list(_dictionaries(loaded))
    if not parts:
        raise WeightsError(f"{name}: is not a dictionary of tensors; save model.state_dict().")
    fits = [fit for part in parts for fit in _fits(part, wanted)]
    if not fits:  # names of another library, or another model
        part = min(parts, key=lambda part: (not is_usual(part.path), -len(part.tensors)))
        return part.tensors, _notes_on_part(part, [])
    best = min(fits, key=lambda fit: fit.order)
    kept, left = _stripped(best.part.tensors, best.prefix, wanted)
    notes = list(_notes_on_part(best.part, [fit.part for fit in fits]))
    if best.prefix:
        notes.append(f"the prefix '{printable(best.prefix)}' of the checkpoint's names was removed")
    if rivals := _rivals(best, fits, wanted):
        notes.append(
            f"the names with the prefix {_listed([repr(rival.prefix) for rival in rivals])} fit as well and were not used"
        )
    if left:
        notes.append(
            f"{len(left)} tensors of the checkpoint without the prefix '{printable(best.prefix)}' were not used: {_listed(left)}"
        )
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
            else f"a {type(tensor).__name__}"
            if type(tensor) not in _PLAIN
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
    model: nn.Module,
    tensors: dict[str, Tensor],
    name: str,
    translate: Translate | None = None,
    lenient: bool = False,
    fix: str = "",
) -> tuple[str, ...]:
    """Load weights into a model; they must match it completely.

    Args:
        model: The model.
        tensors: Plain tensors by name.
        name: Name of the file, for messages.
        translate: The library's conversion of older checkpoints: new names, resampled position embeddings.
        lenient: Whether the library allows tensors that the model does not use; they are noted.
        fix: What to do if they do not match; by default, to choose another model.

    Returns:
        Notes on resampled and unused tensors.

    Raises:
        WeightsError: If a tensor is missing, is unexpected, or has another shape.
    """
    own = model.state_dict()
    fix = fix or (
        f"choose the model that the checkpoint was trained with{flag('model')}, or save model.state_dict() of the whole model"
    )
    try:
        given = translate(dict(tensors), model) if translate else tensors
    except _BROKEN as error:  # the translation failed on an unexpected name or shape
        raise WeightsError(f"{name}: {_misfit(tensors, own)}; {fix}.") from error
    shared = [key for key in given if key in own]
    if any(given[key].shape != own[key].shape for key in shared):
        raise WeightsError(f"{name}: {_misfit(given, own)}; {fix}.")
    odd = next((key for key in shared if own[key].is_floating_point() and not given[key].is_floating_point()), None)
    if odd:
        raise WeightsError(
            f"{name}: {odd} must hold floating-point numbers, got {str(given[odd].dtype).removeprefix('torch.')}; "
            "save the weights as they were before quantization."
        )
    missing, unexpected = model.load_state_dict(given, strict=False)  # checked below, to report both lists in one message
    if missing or (unexpected and not lenient):
        raise WeightsError(f"{name}: {_misfit(given, own, missing, unexpected)}; {fix}.")
    notes = [
        f"{key} was resampled from {_size(tensors[key])} to {_size(given[key])}"
        for key in shared
        if key in tensors and tensors[key].shape != given[key].shape
    ]
    if unexpected:
        notes.append(f"{len(unexpected)} tensors of the checkpoint are not used by this model: {_listed(unexpected)}")
    return tuple(notes)


@dataclass(frozen=True)
class _Part:
    """A dictionary of tensors in a checkpoint.

    Attributes:
        path: Keys that lead to it.
        tensors: Its tensors, by name.
        notes: Notes on how they were read.
    """

    path: tuple[str, ...]
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Fit:
    """A part and a prefix under which its names are the model's, with `order`: the smallest is the best fit."""

    part: _Part
    prefix: str
    matches: tuple[int, int]

    @property
    def order(self) -> tuple[Any, ...]:
        """Tuple to sort by: most matches, averaged weights, no prefix, the shortest prefix."""
        most = tuple(-count for count in self.matches)
        return most, preference(self.part.path), bool(self.prefix), preference(self.prefix.split(".")[:-1]), len(self.prefix)


def _dictionaries(loaded: object) -> Iterator[_Part]:
    """Yield every dictionary of tensors in a checkpoint, level by level, each in order of preference."""
    level: list[tuple[tuple[str, ...], object]] = [((), loaded)]
    seen: Counter[int] = Counter()
    for _ in range(_DEPTH):
        below: list[tuple[tuple[str, ...], object]] = []
        for path, content in level:
            if not isinstance(content, dict) or seen[id(content)] > 1 or len(seen) >= _MOST:  # a file may repeat one endlessly
                continue
            seen[id(content)] += 1
            below += [
                ((*path, str(key)), value)
                for key, value in content.items()
                if isinstance(key, (str, int)) and isinstance(value, dict)
            ]
            if part := _part(path, content):
                yield part
        level = sorted(below, key=lambda item: preference(item[0]))


def _part(path: tuple[str, ...], content: dict[Any, Any]) -> _Part | None:
    """Return the tensors and arrays of a dictionary, or None if it has none; wrappers inside its names are removed."""
    found = {key: tensor for key, value in content.items() if isinstance(key, str) and (tensor := tensor_of(value)) is not None}
    if not found:
        return None
    notes = ["arrays of NumPy were read as tensors"] if any(not isinstance(content[key], Tensor) for key in found) else []
    bare = {_without_inner(key): tensor for key, tensor in found.items()}
    if len(bare) == len(found) and bare.keys() != found.keys():
        notes.append("names of wrappers inside the checkpoint's names were removed")
        found = bare
    return _Part(path, found, tuple(notes))


def _without_inner(key: str) -> str:
    """Return a name without the wrappers that FSDP, activation checkpointing and torch.compile put inside it."""
    outer = ""
    while key.startswith(WRAPPERS):
        wrapper, _, key = key.partition(".")
        outer += f"{wrapper}."
    for wrapper in _INNER:
        key = key.replace(f".{wrapper}", ".")
    return outer + key


def _fits(part: _Part, wanted: Shapes) -> Iterator[_Fit]:
    """Yield every prefix under which a part has half of the model's names or more.

    A known prefix may lack some: the library may still translate the rest. Under any other, at most one layer may be missing, since a
    checkpoint may have no head.
    """
    if 2 * len(part.tensors) < len(wanted):  # a few common names are chance
        return
    named: Counter[str] = Counter()
    shaped: Counter[str] = Counter()
    for key, tensor in part.tensors.items():
        for prefix, rest in _splits(key):
            if rest in wanted:
                named[prefix] += 1
                shaped[prefix] += tensor.shape == wanted[rest]
    for prefix, count in named.items():
        if 2 * count < len(wanted):
            continue
        missing = {key.rpartition(".")[0] for key in wanted if prefix + key not in part.tensors}
        if is_usual_prefix(prefix) or len(missing) <= 1:
            yield _Fit(part, prefix, (shaped[prefix], count))


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield every split of a name at a dot, the whole name first; long names, which no model has, are not split."""
    yield "", key
    if len(key) <= _LONGEST and key.count(".") <= _DEEPEST:
        for at, character in enumerate(key):
            if character == ".":
                yield key[: at + 1], key[at + 1 :]


def _notes_on_part(part: _Part, fitting: Sequence[_Part]) -> tuple[str, ...]:
    if not part.path:
        return part.notes
    paths = dict.fromkeys(".".join(other.path) for other in fitting if other.path and other.path != part.path)
    others = f"; {_listed([repr(path) for path in paths])} not used" if paths else ""
    return (f"the weights were read from '{printable('.'.join(part.path))}' of the checkpoint{others}", *part.notes)


def _rivals(best: _Fit, fits: Sequence[_Fit], wanted: Shapes) -> list[_Fit]:
    """Return fits of the same part that are as good but hold other values."""
    rivals = [fit for fit in fits if fit.part is best.part and fit.prefix != best.prefix and fit.matches == best.matches]
    tensors = best.part.tensors
    return [
        rival
        for rival in rivals[:_SHOWN]
        if any(
            not torch.equal(tensors[best.prefix + key], tensors[rival.prefix + key])
            for key in wanted
            if best.prefix + key in tensors and rival.prefix + key in tensors
        )
    ]


def _stripped(tensors: Mapping[str, Tensor], prefix: str, wanted: Shapes) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors by name without the prefix, and the names that belong to other parts of a larger model.

    A wrapper prefix covers the whole model, so names without it are kept and must match, except the counter of averaged weights. Any other
    prefix covers only a part: names without it are kept only if the model has them, such as a head on a backbone.
    """
    kept = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    left = []
    for key in tensors:
        if key.startswith(prefix):
            continue
        bare = key
        while bare.startswith(WRAPPERS):
            bare = bare[bare.index(".") + 1 :]
        if bare == _COUNTER and prefix:
            left.append(key)
            continue
        if bare in wanted and bare not in kept:
            kept[bare] = tensors[key]
        elif not is_wrapper(prefix):
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
    return f"does not fit the model: {'; '.join(parts) or 'its tensors cannot be translated'}"


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
