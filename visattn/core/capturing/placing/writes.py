"""Rules for operations that put values into a tensor at chosen places; the rest of it stays as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import LEARNED, LOST, Kind, Places, later
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.planes import PADDING

_VALUE_ARGUMENT = {  # name of the argument that is written, by operation
    "index_put": "values",
    "_index_put_impl": "values",
    "_unsafe_index_put": "values",
    "index_copy": "source",
    "index_fill": "value",
    "scatter": "src",
    "masked_scatter": "source",
    "put": "source",
    "select_scatter": "src",
    "slice_scatter": "src",
    "diagonal_scatter": "src",
    "as_strided_scatter": "src",
    "select_backward": "grad_output",
}
_ACCUMULATING = {  # likewise, for operations that can add: those with the argument `accumulate`
    "index_put": "values",
    "_index_put_impl": "values",
    "_unsafe_index_put": "values",
    "put": "source",
}
_OVERWRITING = {  # operation that puts values where another adds them
    "scatter_add": "scatter",
    "scatter_reduce": "scatter",
    "index_add": "index_copy",
    "index_reduce": "index_copy",
    "_index_put_impl": "index_put",
    "_unsafe_index_put": "index_put",
}
_ONLY_FOR_VALUES = frozenset({"self", "value", "out", "accumulate", "reduce", "include_self", "alpha", "unsafe"})
_PUTTING = frozenset({"index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "scatter"})


def written(work: Work) -> Result:
    """Return the places of a tensor behind `index_put`, `scatter` and the like: position codes are put where these put values.

    Position codes say which cell of the image each element comes from.
    """
    target = work.places(work.get("self"))
    value_name = _VALUE_ARGUMENT[work.name]
    value = _value_places(work, work.get(value_name, work.get("value")))
    accumulates = work.get("accumulate", False) or work.get("reduce") is not None
    if accumulates:
        return _added(work, target, value)
    return _merged(work, target, value, lambda target_codes, codes: _put(work, target_codes, codes, value_name))


def replaces_unknown(work: Work) -> bool:
    """Check whether values overwrite all of a tensor of unknown content, such as memory that was never written."""
    accumulates = work.get("accumulate", False) or work.get("reduce") is not None
    if work.name not in _PUTTING or accumulates:
        return False
    if work.places(work.get("self")).kind != "lost":
        return False
    return bool((_write_counts(work, _VALUE_ARGUMENT[work.name]) > 0).all())


def copied(work: Work) -> Result:
    """Return the places of a tensor that `copy_` overwrites: those of the source, broadcast."""
    source = work.places(work.get("src"))
    broadcast = source._replace(others=None).each(lambda codes: codes.expand(work.shape))
    assert broadcast is not None  # noqa: S101 - it broadcasts
    return broadcast


def filled(work: Work) -> Result:
    """Return the places of a tensor that `fill_` overwrites by one value: all elements have the place of this value."""
    value = _value_places(work, work.get("value", 0))
    return value.each(lambda codes: codes.reshape(()).expand(work.shape)) or work.unknown(work.shape)


def added(work: Work) -> Result:
    """Return the places of a tensor behind `index_add`, `scatter_add` and the like, which add values at chosen places.

    Values that are added to zeros or other constants keep their places.
    """
    target = work.places(work.get("self"))
    value = _value_places(work, work.get("src", work.get("source")))
    return _added(work, target, value)


def _added(work: Work, target: Places, value: Places) -> Places:
    """Return the places of zeros or learned constants to which values were added; elements that got several values are lost.

    Raises:
        Unproven: If the target holds anything else, such as image tokens: then a sum has two origins.
    """
    if target.placed or target.kind in ("foreign", "lost"):
        raise Unproven(work.name)
    default = "src" if "src" in work.step.given else "source"
    value_name = _ACCUMULATING.get(work.name, default)
    counts = _write_counts(work, value_name)
    merged = _merged(work, target, value, lambda target_codes, codes: _put(work, target_codes, codes, value_name))
    return merged._replace(codes=torch.where(counts > 1, LOST, merged.codes).to(torch.int32))


def _write_counts(work: Work, value_name: str) -> Tensor:
    """Return how often each element of the target is written to: the operation adds ones to zeros instead of the real values."""
    zeros = torch.zeros(work.shape, dtype=torch.float64, device=work.device)
    contents = work.step.contents
    replaced = ("self", value_name, "out", "alpha")
    arguments = {key: contents.get(key, value) for key, value in work.step.given.items() if key not in replaced}
    value = work.get(value_name)
    value_shape = work.facts(value).shape if isinstance(value, Node) else ()
    ones = torch.ones(value_shape, dtype=torch.float64, device=work.device)
    adding_operation = getattr(torch.ops.aten, work.name)
    if work.name in _ACCUMULATING:
        arguments["accumulate"] = True
    if work.name == "scatter_reduce":
        arguments["reduce"] = "sum"
    if work.name == "scatter":
        adding_operation = torch.ops.aten.scatter_add
        arguments.pop("reduce", None)
    counts: Tensor = adding_operation(zeros, **{**arguments, value_name: ones})
    return counts


def _value_places(work: Work, value: Any) -> Places:  # noqa: ANN401
    """Return the places of a tensor or number that is written. The number zero counts as padding, any other as a constant."""
    if isinstance(value, Node):
        return work.places(value)
    code = PADDING if value == 0 else LEARNED
    return Places("learned", torch.full((), code, dtype=torch.int32, device=work.device))


def _merged(work: Work, target: Places, value: Places, put: Any) -> Places:  # noqa: ANN401
    """Return the places of a target into which a value was written; `put(target_codes, codes)` writes the position codes.

    Scores have two codes for each element, that of the query (row) and that of the key (column): both are written.

    Raises:
        Unproven: If one of them holds scores, and the other image tokens.
    """
    is_scores = target.columns is not None or value.columns is not None
    if is_scores and any(places.placed and places.columns is None for places in (target, value)):
        raise Unproven(work.name)
    if is_scores and value.columns is None:
        return target  # constants among scores, such as a mask: each element still belongs to its query and key
    codes = put(target.codes, value.codes)
    columns = None
    if is_scores:
        target_columns = target.codes if target.columns is None else target.columns
        columns = put(target_columns, value.codes if value.columns is None else value.columns)
    kind: Kind = "lost" if "lost" in (target.kind, value.kind) else target.kind
    kind = "placed" if target.placed or value.placed else kind
    base = value if value.placed else target
    return base._replace(
        kind=kind,
        codes=codes,
        columns=columns,
        copies=_merged_copies(work, target, value, put),
        behind=later(target.behind, value.behind),
        mixture=target.mixture or value.mixture,
        leaning=target.leaning or value.leaning,
        others=None,
    )


def _merged_copies(work: Work, target: Places, value: Places, put: Any) -> Tensor | None:  # noqa: ANN401
    """Return, for a target behind a write, which copy of the image each element comes from; None if no image was copied."""
    if target.copies is None and value.copies is None:
        return None
    zero = torch.zeros((), dtype=torch.int32, device=work.device)
    target_copies = zero.expand(target.shape) if target.copies is None else target.copies
    value_copies = zero.expand(value.shape) if value.copies is None else value.copies
    copies: Tensor = put(target_copies, value_copies)
    return copies


def _put(work: Work, target_codes: Tensor, value_codes: Tensor, value_name: str) -> Tensor:
    """Run the operation on position codes, and return those of the result; an operation that adds values overwrites codes."""
    assert work.step.op is not None  # noqa: S101 - a step of the model
    contents = work.step.contents
    replaced = _ONLY_FOR_VALUES | {value_name}
    arguments = {key: contents.get(key, value) for key, value in work.step.given.items() if key not in replaced}
    value = work.get(value_name)
    value_shape = work.facts(value).shape if isinstance(value, Node) else ()
    value_codes = value_codes.expand(value_shape).contiguous()
    target_codes = target_codes.expand(work.shape).contiguous()
    operation = _OVERWRITING.get(work.name, work.name)
    if operation == "index_fill":
        value_codes = value_codes.reshape(()).expand(_indexed_shape(target_codes, arguments)).contiguous()
        filled_codes: Tensor = torch.ops.aten.index_copy(target_codes, arguments["dim"], arguments["index"], value_codes)
        return filled_codes
    is_scatter_of_number = operation == "scatter" and not isinstance(value, Node)
    if is_scatter_of_number:
        value_codes = value_codes.reshape(()).expand(arguments["index"].shape).contiguous()
    written_name = {"scatter": "src", "index_copy": "source"}.get(operation, value_name)
    result: Tensor = getattr(torch.ops.aten, operation)(target_codes, **{**arguments, written_name: value_codes})
    return result


def _indexed_shape(target: Tensor, arguments: dict[str, Any]) -> list[int]:
    """Return the shape of the part of a target that `index` picks along `dim`."""
    shape = list(target.shape)
    shape[arguments["dim"]] = arguments["index"].numel()
    return shape
