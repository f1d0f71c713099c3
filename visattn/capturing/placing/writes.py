"""Rules for operations that put values into a tensor at chosen places; the rest of it stays as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.nodes import Node
from visattn.capturing.placing.places import LEARNED, LOST, Places, later
from visattn.capturing.placing.work import Result, Unproven, Work
from visattn.capturing.tokens.planes import PADDING

_VALUE = {
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
_PUTTING = frozenset({"index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "scatter"})
_ADDING = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_reduce"})


def written(work: Work) -> Result:
    """Put codes where the operation puts values."""
    target = work.places(work.get("self"))
    name = _VALUE[work.name]
    value = work.get(name, work.get("value"))
    new = _of(work, value)
    if work.get("accumulate", False) or work.get("reduce") is not None:
        return _added(work, target, new)
    return _together(work, target, new, lambda into, part: _put(work, into, part, name))


def replaces_unknown(work: Work) -> bool:
    """Check whether values are put into a tensor of unknown content, such as memory that was never written, and leave none of it."""
    if work.name not in _PUTTING or work.get("accumulate", False) or work.get("reduce") is not None:
        return False
    return work.places(work.get("self")).kind == "lost" and bool((_times(work, _VALUE[work.name]) > 0).all())


def copied(work: Work) -> Result:
    """Overwrite all of a tensor by another, broadcast."""
    source = work.places(work.get("src"))
    made = source._replace(others=None).each(lambda codes: codes.expand(work.shape))
    assert made is not None  # noqa: S101 - it broadcasts
    return made


def filled(work: Work) -> Result:
    """Overwrite all of a tensor by one value."""
    return _of(work, work.get("value", 0)).each(lambda codes: codes.reshape(()).expand(work.shape)) or work.unknown(work.shape)


def added(work: Work) -> Result:
    """Add values at chosen places: into zeros they are written, into other constants they are added."""
    target, new = work.places(work.get("self")), _of(work, work.get("src", work.get("source")))
    return _added(work, target, new)


def _added(work: Work, target: Places, new: Places) -> Places:
    """Add values at chosen places; if two land on one element, its place is unknown."""
    if target.placed or target.kind in ("foreign", "lost"):
        raise Unproven(work.name)
    name = {"index_put": "values", "_index_put_impl": "values", "_unsafe_index_put": "values", "put": "source"}.get(
        work.name, "src" if "src" in work.step.given else "source"
    )
    once = _times(work, name)
    made = _together(work, target, new, lambda into, part: _put(work, into, part, name))
    return made._replace(codes=torch.where(once > 1, LOST, made.codes).to(torch.int32))


def _times(work: Work, name: str) -> Tensor:
    """Count how often each element of the target is written to."""
    zeros = torch.zeros(work.shape, dtype=torch.float64, device=work.device)
    given = {
        key: work.step.contents.get(key, value) for key, value in work.step.given.items() if key not in ("self", name, "out")
    }
    value = work.get(name)
    shape = work.facts(value).shape if isinstance(value, Node) else ()
    ones = torch.ones(shape, dtype=torch.float64, device=work.device)
    packet = getattr(torch.ops.aten, work.name)
    if work.name in ("index_put", "_index_put_impl", "_unsafe_index_put", "put"):
        given["accumulate"] = True
    if work.name == "scatter_reduce":
        given |= {"reduce": "sum"}
    if work.name == "scatter":
        packet = torch.ops.aten.scatter_add
        given.pop("reduce", None)
    counts: Tensor = packet(zeros, **{**given, name: ones})
    return counts


def _of(work: Work, value: Any) -> Places:  # noqa: ANN401
    """Return the places of a value that is written: a tensor, or a number. Zeros belong nowhere."""
    if isinstance(value, Node):
        return work.places(value)
    code = PADDING if value == 0 else LEARNED
    return Places("learned", torch.full((), code, dtype=torch.int32, device=work.device))


def _together(work: Work, target: Places, new: Places, put: Any) -> Places:  # noqa: ANN401
    """Write the codes of a value into those of a target, rows and columns alike."""
    pairs = [places for places in (target, new) if places.columns is not None]
    if pairs and not all(places.columns is not None or not places.placed for places in (target, new)):
        raise Unproven(work.name)
    if pairs and new.columns is None and target.columns is not None:
        return target  # constants among scores: each element still belongs to its pair
    codes = put(target.codes, new.codes)
    columns = None
    if pairs:
        columns = put(
            target.codes if target.columns is None else target.columns, new.codes if new.columns is None else new.columns
        )
    copies = None
    if target.copies is not None or new.copies is not None:
        zero = torch.zeros((), dtype=torch.int32, device=work.device)
        first, second = (zero.expand(x.shape) if x.copies is None else x.copies for x in (target, new))
        copies = put(first, second)
    there = new if new.placed else target
    kind = "placed" if target.placed or new.placed else target.kind if target.kind == new.kind else there.kind
    if not (target.placed or new.placed) and "lost" in (target.kind, new.kind):
        kind = "lost"
    return there._replace(
        kind=kind,
        codes=codes,
        columns=columns,
        copies=copies,
        behind=later(target.behind, new.behind),
        mixture=target.mixture or new.mixture,
        leaning=target.leaning or new.leaning,
        others=None,
    )


def _put(work: Work, into: Tensor, part: Tensor, name: str) -> Tensor:
    """Run the writing operation on codes."""
    op = work.step.op
    assert op is not None  # noqa: S101 - a step of the model
    given = {
        key: work.step.contents.get(key, value)
        for key, value in work.step.given.items()
        if key not in ("self", name, "value", "out")
    }
    for key in ("accumulate", "reduce", "include_self"):
        given.pop(key, None)
    value = work.get(name)
    shape = work.facts(value).shape if isinstance(value, Node) else ()
    part = part.expand(shape).contiguous()
    base = into.expand(work.shape).contiguous()
    plain = {
        "scatter_add": "scatter",
        "scatter_reduce": "scatter",
        "index_add": "index_copy",
        "index_reduce": "index_copy",
        "_index_put_impl": "index_put",
        "_unsafe_index_put": "index_put",
    }.get(work.name, work.name)
    given.pop("alpha", None)
    given.pop("unsafe", None)
    if plain == "index_fill":
        made: Tensor = torch.ops.aten.index_copy(
            base, given["dim"], given["index"], part.reshape(()).expand(_selected(base, given)).contiguous()
        )
        return made
    if plain == "scatter" and not isinstance(value, Node):
        part = part.reshape(()).expand(given["index"].shape).contiguous()
    written_name = {"scatter": "src", "index_copy": "source"}.get(plain, name)
    result: Tensor = getattr(torch.ops.aten, plain)(base, **{**given, written_name: part})
    return result


def _selected(base: Tensor, given: dict[str, Any]) -> list[int]:
    shape = list(base.shape)
    shape[given["dim"]] = given["index"].numel()
    return shape
