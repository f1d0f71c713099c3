"""Loading checkpoints of other implementations into our modules, alone or inside a network."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of, printable
from visattn.errors import OptionError, WeightsError
from visattn.nn.attaching.checkpoint_layouts import LAYOUTS, OWN, Layout
from visattn.nn.attaching.with_attention import WithAttention

_SHOWN = 5
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_COUNTS = "num_batches_tracked"  # torch adds it where an old checkpoint has none


@dataclass(frozen=True)
class _Reading:
    """Tensors of one module, interpreted in one layout.

    Attributes:
        layout: The layout.
        names: Mapping from names in the checkpoint to our names.
        tensors: Tensors by our names, reshaped to our shapes where this is unambiguous.
        gap: Number of names on either side without a match.
        lacking: Number of our names without a match.
        fits: Whether names and shapes are those of the layout.
    """

    layout: Layout
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    gap: int
    lacking: int
    fits: bool


def load_checkpoint(module: nn.Module, state: Mapping[str, Tensor], layout: str | None = None) -> None:
    """Load a checkpoint, of our code or another implementation, strictly into one of our modules or a network that contains some.

    The table in `docs/modules.md` lists the layouts. The layout of a checkpoint is detected from names and shapes. Settings that no
    checkpoint stores, such as heads, activations and pooling, must match the options of the module.

    Args:
        module: A module of `visattn.nn`, or any network that contains some. The other names must be those of the network. Our module
            may have another name than theirs in its block, such as `attention` instead of `cbam`. It is then loaded from the only part of
            that block in the checkpoint that the network lacks.
        state: Tensors by name, as returned by `state_dict()`.
        layout: Name of a layout, for checkpoints that fit several.

    Raises:
        OptionError: If no layout has this name, or `module` is not a module.
        WeightsError: If a tensor is missing, unexpected or has another shape, if the options of the module differ from the code of the
            layout, or if the layout is ambiguous.
    """
    given = translate(module, state, layout)
    own = module.state_dict()
    wrong = [name for name, tensor in given.items() if name in own and own[name].shape != tensor.shape]
    if wrong:
        name, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise WeightsError(
            f"{_kind(module)} must be given {printable(name)} of {_size(own[name])}, got {_size(given[name])}{more}. Build it with the "
            "settings of the checkpoint."
        )
    try:
        missing, unexpected = module.load_state_dict(given, strict=False)  # reported below in one line
    except (RuntimeError, ValueError) as problem:
        raise WeightsError(f"{_kind(module)} refuses the checkpoint: {printable(' '.join(str(problem).split()))}") from problem
    parts = [
        f"{len(names)} {what}: {_listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if parts:
        prefix = next((wrapper for wrapper in _WRAPPERS if unexpected and all(key.startswith(wrapper) for key in given)), "")
        fix = (
            f"Remove the prefix '{prefix}' from its names"
            if prefix
            else "Build it with the settings of the checkpoint; docs/modules.md lists which fit"
        )
        raise WeightsError(f"the checkpoint must have the tensors of {_kind(module)}, got {'; '.join(parts)}. {fix}.")


def translate(module: nn.Module, state: Mapping[str, Tensor], layout: str | None = None) -> dict[str, Tensor]:
    """Return a checkpoint with our names: names of a known layout are translated, all others stay.

    Args:
        module: Module to load the checkpoint into; it is not changed.
        state: Tensors by name.
        layout: Name of a layout, as in `load_checkpoint`.

    Returns:
        Tensors by name, for `module.load_state_dict`.

    Raises:
        OptionError: If no layout has this name, or `module` is not a module.
        WeightsError: If `state` is not a mapping from names to tensors, if the options of the module differ from the code of the layout, or
            if the layout is ambiguous.
    """
    if not isinstance(module, nn.Module):
        raise OptionError(f"module must be a torch.nn.Module, got {type(module).__name__}. Pass the module to load into.")
    if layout is not None:
        one_of(layout, [known.name for known in LAYOUTS], "layout")
    if not isinstance(state, Mapping) or not all(isinstance(key, str) and isinstance(state[key], Tensor) for key in state):
        raise WeightsError(f"a checkpoint must map names to tensors, got {_content(state)}. Pass the result of state_dict().")
    given = dict(state)
    for name, part, theirs in _parts(module, state):
        ours = f"{name}." if name else ""
        held = _under(theirs, state)
        reading = _read(part, held, layout, printable(name))
        if reading is None:
            continue
        for key in held:
            del given[theirs + key]
        left = {key: tensor for key, tensor in held.items() if key not in reading.names}
        given |= {ours + key: tensor for key, tensor in reading.tensors.items()} | {
            theirs + key: tensor for key, tensor in left.items()
        }
    if hasattr(state, "_metadata"):  # versions, which state_dict() adds and some modules read
        given = OrderedDict(given)
        given._metadata = state._metadata  # type: ignore[attr-defined]
    return given


def _parts(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each module that has a layout: its name, the module, and the prefix of its names in the checkpoint."""
    modules = dict(module.named_modules())
    blocks: dict[str, list[str]] = {}  # modules that the checkpoint does not have under their names
    for name, part in modules.items():
        if not any(type(part) is layout.module for layout in LAYOUTS):
            continue
        if not name or any(key.startswith(f"{name}.") for key in state):
            yield name, part, f"{name}." if name else ""
            continue
        block = name.rpartition(".")[0]
        while isinstance(modules[block], WithAttention):
            block = block.rpartition(".")[0]
        blocks.setdefault(block, []).append(name)
    for block, (name, *others) in blocks.items():
        above = f"{block}." if block else ""
        heads = dict.fromkeys(key.removeprefix(above).split(".")[0] for key in state if key.startswith(above))
        strange = [f"{above}{head}." for head in heads if head not in modules[block]._modules]
        theirs = [prefix for prefix in strange if _may_be(modules[name], _under(prefix, state))]
        if len(theirs) == 1 and not others:
            yield name, modules[name], theirs[0]


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _may_be(part: nn.Module, held: Mapping[str, Tensor]) -> bool:
    """Check whether tensors may belong to such a module. Names shared with other modules must match completely."""
    return any(one.fits or (one.names and one.layout.names is not OWN) for one in _readings(part, held))


def _read(part: nn.Module, held: Mapping[str, Tensor], asked: str | None, name: str) -> _Reading | None:
    """Interpret the tensors of one module in their layout; return None if no layout matches.

    Raises:
        WeightsError: If the module computes something else than the code of the layout, or if several layouts fit.
    """
    readings = _readings(part, held)
    named = [one for one in readings if one.layout.name == asked]
    fitting = named or [one for one in readings if one.fits]
    where = f"'{name}' ({_kind(part)})" if name else _kind(part)
    if not fitting:
        least = min((one.gap for one in readings if one.names), default=None)
        fitting = [one for one in readings if one.gap == least and not one.layout.lacks][:1]
    elif len({(*one.names.items(), *one.layout.options, one.layout.lacks) for one in fitting}) > 1:
        which = " and ".join(one.layout.name for one in fitting)
        raise WeightsError(
            f"the layout of {where} is ambiguous: names and shapes fit {which}. Pass layout= with one of these names."
        )
    if not fitting:
        return None
    layout = fitting[0].layout
    if layout.lacks:
        raise WeightsError(f"{where} cannot load a checkpoint of {layout.name}: {layout.lacks}. No option does that.")
    wrong = [option for option, holds in layout.options.items() if not holds(part)] if not fitting[0].lacking else []
    if wrong:
        raise WeightsError(
            f"{where} must be built with {', '.join(wrong)} to match {layout.name}, whose layout the checkpoint has. "
            "Its present options compute something else."
        )
    return fitting[0]


def _readings(part: nn.Module, held: Mapping[str, Tensor]) -> list[_Reading]:
    """Interpret the tensors of a module in each layout of its class."""
    own = part.state_dict()
    constants = {name: tensor for name, tensor in part.named_buffers() if name not in own}
    kinds = [Layout("ours", type(part), OWN), *(layout for layout in LAYOUTS if layout.module is type(part))]
    found = []
    for layout in kinds:
        names: dict[str, str] = {}
        for key, tensor in held.items():
            ours = _ours(key, layout.names)
            if ours in own or (ours in constants and _equal(tensor, constants[ours])):
                names[key] = ours
        tensors = {ours: _shaped(layout.change(part, ours, held[key]), own[ours]) for key, ours in names.items() if ours in own}
        lacking = [name for name in own if name not in tensors and not name.endswith(_COUNTS)]
        gap = len(lacking) + len(held) - len(names)
        have_our_shapes = bool(layout.lacks) or all(tensor.shape == own[name].shape for name, tensor in tensors.items())
        fits = not gap and have_our_shapes and layout.told(part, tensors)
        found.append(_Reading(layout, names, tensors, gap, len(lacking), fits))
    return found


def _ours(key: str, names: Mapping[str, str]) -> str:
    """Translate a name of the layout into ours; return an empty string if the layout does not have it."""
    for pattern, stand_in in names.items():
        found = re.match(pattern, key)
        if found:
            return found.expand(stand_in) + key[found.end() :]
    return ""


def _shaped(tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape between a linear layer and a 1 x 1 convolution; any other shape stays."""
    bare, wanted = (list(one.shape) for one in (tensor, like))
    longer, shorter = (bare, wanted) if len(bare) > len(wanted) else (wanted, bare)
    return tensor.reshape(like.shape) if longer == [*shorter, 1, 1] else tensor


def _equal(tensor: Tensor, constant: Tensor) -> bool:
    return tensor.numel() == constant.numel() and torch.equal(tensor.flatten().to(constant), constant.flatten())


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _content(state: object) -> str:
    if not isinstance(state, Mapping):
        return type(state).__name__
    odd = next(key for key in state if not isinstance(key, str) or not isinstance(state[key], Tensor))
    return f"{type(state[odd]).__name__} as {printable(repr(odd))}"


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
