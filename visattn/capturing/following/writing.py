"""Rules for operations that overwrite elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.mixing import Mixing
from visattn.capturing.following.places import Places, later
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import PADDING
from visattn.capturing.trace.tape import Entry, Ref

# index of the written value among the arguments
_VALUE = {
    "index_copy": 3,
    "index_fill": 3,
    "index_put": 2,
    "masked_scatter": 2,
    "put": 2,
    "scatter": 3,
    "select_scatter": 1,
    "slice_scatter": 1,
    "diagonal_scatter": 1,
}
_MAY_ADD = frozenset({"index_put", "put", "scatter"})  # with one more argument they accumulate
_LOSING = frozenset({"index_add", "scatter_add", "scatter_reduce", "masked_scatter", "set", "resize", "resize_as"})
_OVER = _LOSING | {"__setitem__", "copy", "set data"}


class Writing(Mixing):
    """Rules for writing operations, applied to the known statuses."""

    @staticmethod
    def _writes(entry: Entry) -> bool:
        name = entry.operation.name
        return name in _VALUE or (entry.operation.writes and name in _OVER)

    def _written(self, name: str, entry: Entry) -> Places | None:
        known, target = self._known, entry.args[0]
        value = entry.args[_VALUE.get(name, -1)]
        new, old = self._of(value), self._of(target) or known.members.get(target.slot)
        shape = known.shapes[target.slot]
        if isinstance(value, Ref) and value.slot in known.lost:
            known.culprit = known.lost[value.slot]
            return None
        if name in ("copy", "set data"):
            return new and new.each(lambda codes: codes.expand(shape))
        zero = isinstance(value, (int, float)) and value == 0  # zeros are padding
        if name == "masked_scatter" and new is not None and old is not None:
            return self._scattered(_contents(entry, entry.args[1]), new, old, shape)
        if name in _LOSING or (new is None and (old is None or not zero)):
            return None
        if target.slot in known.lost or (target.slot in known.foreign and old is None):
            return None
        there = [places for places in (new, old) if places is not None]
        if any((places.columns is None) != (there[0].columns is None) for places in there):
            return None
        rows = self._over(name, entry, shape, None if old is None else old.codes, None if new is None else new.codes)
        columns = None
        if there[0].columns is not None:
            columns = self._over(name, entry, shape, None if old is None else old.columns, None if new is None else new.columns)
        if rows is None:
            return None
        behind, copies = later(*(places.behind for places in there)), any(places.copies for places in there)
        mixture = any(places.mixture for places in there)
        return there[0]._replace(codes=rows, columns=columns, behind=behind, copies=copies, mixture=mixture)

    @staticmethod
    def _scattered(mask: Tensor, new: Places, old: Places, shape: torch.Size) -> Places | None:
        """Return the tokens of a sequence in which those under a mask are replaced, such as image tokens among words."""
        mask = mask.expand(shape)
        if not all(same_along(x, -1) for x in (mask, new.codes, old.codes)) or new.columns is not None or old.columns is not None:
            return None
        rows = old.codes.expand(shape)[..., 0].masked_scatter(mask[..., 0], new.codes[..., 0])
        return new._replace(codes=rows[..., None].expand(shape), behind=later(new.behind, old.behind))

    def _over(self, name: str, entry: Entry, shape: torch.Size, before: Tensor | None, codes: Tensor | None) -> Tensor | None:
        """Write codes into other codes; either counts as padding if it is None."""
        made = torch.full(shape, PADDING, dtype=torch.int32, device=self._known.device) if before is None else before.clone()
        value: Any = PADDING if codes is None else codes
        if name == "__setitem__":
            made[_contents(entry, entry.args[1])] = value
            return made
        given = [_contents(entry, one) if i not in (0, _VALUE[name]) else one for i, one in enumerate(entry.args)]
        if entry.kwargs or (name in _MAY_ADD and len(given) > _VALUE[name] + 1):
            return None
        given[0], given[_VALUE[name]] = made, value
        result: Tensor = getattr(torch, name)(*given)
        return result


def _contents(entry: Entry, value: Any) -> Any:  # noqa: ANN401
    """Replace the references in an argument by the recorded values of their tensors."""
    if isinstance(value, Ref):
        return entry.contents[value.slot]
    return type(value)(_contents(entry, item) for item in value) if type(value) in (tuple, list) else value
