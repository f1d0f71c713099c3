"""Rules for each kind of operation: from the locations of its arguments to the locations of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.capturing.following.mixing import Located
from visattn.capturing.following.places import Places, later
from visattn.capturing.following.writing import Writing
from visattn.capturing.tokens.codes import along, equal, joined, padded, reshaped, same_along
from visattn.capturing.tokens.equations import Equation
from visattn.capturing.tokens.planes import compact
from visattn.capturing.trace.operations import COMBINE, EDITED, JOIN, PRODUCT, REARRANGE, REDUCE, REORDER, RESAMPLE, SAME
from visattn.capturing.trace.tape import Entry, Ref

_CHOOSES_ONE = frozenset({"where", "lerp"})  # choose one of two elements: both must have the same location
_SCALING = frozenset(
    {"mul", "multiply", "__mul__", "__rmul__", "__imul__", "div", "divide", "true_divide", "__truediv__", "__itruediv__"}
)
_EMBEDDING = RESAMPLE | REDUCE | PRODUCT | {"linear", "einsum"}
_FORMS = frozenset({"view", "reshape", "view_as", "reshape_as", "unsafe_view"})


class Rules(Writing):
    """Rules for all operations, applied to the known statuses."""

    def apply(self, entry: Entry) -> Located:
        """Return the locations of the result: one, a list for several results, or None if they are unknown."""
        found = self._found(entry)
        if isinstance(found, Places) and found.columns is None and entry.operation.name in _EMBEDDING:
            first = next((places for ref in entry.refs if (places := self._of(ref)) is not None), None)
            pixels = self._known.planes.pixels
            if first is not None and pixels.holds(first.codes) and not pixels.holds(found.codes):
                made = next(made for made in entry.outs if made is not None)
                found = found._replace(embedding=made.slot)
        return found

    def _found(self, entry: Entry) -> Located:
        name, args, kwargs = entry.operation.name, list(entry.args), dict(entry.kwargs)
        kwargs.pop("out", None)
        made = next(made for made in entry.outs if made is not None)
        first = self._of(args[0] if args else kwargs.get("input"))
        if self._writes(entry):
            return self._written(name, entry)
        if entry.operation.reforms:
            return first and first.each(lambda codes: getattr(Tensor, entry.func.__name__.rstrip("_"), _itself)(codes, *args[1:]))
        if name == "unfold" and entry.func is F.unfold:
            return first and first.each(lambda codes: F.unfold(codes.double() + 1, *args[1:], **kwargs).int() - 1)
        if name in REARRANGE or name == "unfold":
            return first and self._rearranged(entry, first, args, kwargs, made.shape)
        if name in REDUCE and not (name in COMBINE and _second(args, kwargs)):
            return first and self._reduced(first, args, kwargs, entry)
        if name in SAME and first is not None and not (name in COMBINE and _second(args, kwargs)):
            return first
        if name in COMBINE:
            return self._combined(name, entry, made.shape)
        if name in JOIN:
            return self._joined(name, args, kwargs, made.shape)
        # an operation on each tensor of a list
        if name in SAME and args and isinstance(args[0], (tuple, list)) and len(args[0]) == len(entry.outs):
            return [self._of(one) for one in args[0]]
        if name in ("pad", "constant_pad_nd"):
            return first and first.each(lambda codes: padded(codes, args[1:2] if name != "pad" else args[1:], kwargs))
        if name == "view_as_complex":
            return first and first.each(lambda codes: codes[..., 0] if same_along(codes, -1) else None)
        if name == "view_as_real":
            return first and first.each(lambda codes: codes[..., None].expand(made.shape))
        if name == "fold":
            return first and first.each(lambda codes: self._folded(codes, args, kwargs, made.shape))
        if name in REORDER:
            return self._reordered(first, args, kwargs, entry)
        if name in ("linear", "grouped_mm", "_grouped_mm"):  # the latter give each token to a linear layer of its own
            return first and self._linear(first, made.shape)
        if name in RESAMPLE:
            return first and first.each(lambda codes: self._resampled(codes, args, kwargs, name, made.shape))
        if name in PRODUCT:
            return self._multiplied(args[1:] if name in ("baddbmm", "addmm", "addbmm") else args, made.shape)
        if name == EDITED:
            return self._edited(args, made.shape)
        if name == "einsum":
            return self._contracted(Equation.of(args, lambda ref: len(self._known.shapes[ref.slot])), made.shape)
        if name == "grid_sample":
            return self._sampled(args, kwargs, made.shape)
        if name == "scaled_dot_product_attention":
            given = [args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("query", "key", "value"))]
            return self._attended(self._of(given[0]), self._of(given[2]), made.shape)
        return None

    # --- moving elements

    def _rearranged(
        self, entry: Entry, places: Places, args: Sequence[Any], kwargs: Mapping[str, Any], shape: torch.Size
    ) -> Located:
        name = entry.operation.name
        if name in _FORMS:
            if len(args) > 1 and isinstance(args[1], torch.dtype):
                return None
            return places.each(lambda codes: reshaped(codes, shape))
        if name in ("expand_as", "broadcast_to", "expand"):
            wide = places.each(lambda codes: codes.expand(shape))
            copied = (
                any(side == 1 < shape[dim] for dim, side in enumerate(places.codes.shape[:2])) or len(shape) > places.codes.ndim
            )
            gray = (
                self._known.planes.pixels.holds(places.codes)
                and len(shape) == places.codes.ndim == 4
                and places.codes.shape[0] == shape[0]
            )
            return wide and wide._replace(copies=places.copies or (copied and not gray))

        def real(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, Ref):
                return entry.contents[value.slot]
            if type(value) in (tuple, list):
                return type(value)(real(item) for item in value)
            return slice(real(value.start), real(value.stop), real(value.step)) if isinstance(value, slice) else value

        chosen = self._chosen(name, entry, places)
        if chosen is not None:
            return chosen
        others, named = [real(value) for value in args[1:]], {key: real(value) for key, value in kwargs.items() if key != "input"}
        axes = named.get("dims", others[1] if len(others) > 1 else None) if name == "roll" else None
        change = entry.func if axes is None else partial(along, entry.func, [axes] if isinstance(axes, int) else axes)
        moved = [change(codes, *others, **named) for codes in (places.codes, places.columns) if codes is not None]
        copies = places.copies or (name in ("repeat", "tile", "repeat_interleave") and _repeats_images(places, moved[0]))
        if isinstance(moved[0], Tensor):
            return places._replace(codes=moved[0], columns=moved[1] if len(moved) > 1 else None, copies=copies)
        return [
            places._replace(codes=part, columns=moved[1][i] if len(moved) > 1 else None, copies=copies)
            for i, part in enumerate(moved[0])
        ]

    # --- elementwise operations

    def _combined(self, name: str, entry: Entry, shape: torch.Size) -> Places | None:
        """Return the locations of an elementwise operation. If operands disagree (a pooled gate times its image), the finer one counts."""
        known = self._known
        refs = list(entry.refs)
        if name == "where":
            refs = [
                ref
                for value in (*entry.args[1:], *(entry.kwargs.get(key) for key in ("input", "self", "other")))
                for ref in _ref(value)
            ]
        best: Places | None = None
        for places in (self._of(ref) for ref in refs):
            if places is None:
                continue
            wide = places.each(lambda codes: codes.expand(shape))
            if best is not None and wide is not None and wide.mixture != best.mixture and wide.same(best):
                wide = best = wide._replace(mixture=True)
            if best is None or wide is None:
                best = best or wide
                continue
            behind, copies = later(best.behind, wide.behind), best.copies or wide.copies
            finer = self._finer(best, wide)
            if finer is None:
                return None
            best = finer._replace(behind=behind, copies=copies)
        if best is None:
            return None
        for ref in refs:
            mixed = self._of(ref)
            if mixed is not None and mixed.mixture and not best.mixture and not self._spread(known.shapes[ref.slot], best, False):
                return None
            strange = None if ref.slot in known.places else known.lost.get(ref.slot)
            if strange is None and name in _CHOOSES_ONE and ref.slot in known.foreign:
                strange = name
            if strange is not None and not self._spread(known.shapes[ref.slot], best, name in _SCALING):
                known.culprit = strange
                return None
        return best

    @staticmethod
    def _spread(shape: torch.Size, places: Places, scales: bool) -> bool:
        """Check that an operand without locations keeps those of the others: it is constant over locations, or scales whole vectors."""
        missing = places.codes.ndim - len(shape)
        if missing < 0:
            return False

        def apart(dim: int) -> bool:
            return not same_along(places.codes, dim) or (places.columns is not None and not same_along(places.columns, dim))

        channels = [dim for dim in range(1, places.codes.ndim) if places.codes.shape[dim] > 1 and not apart(dim)]
        if scales and channels and all(dim < missing or shape[dim - missing] == 1 for dim in channels):
            return True
        return all(side == 1 or not apart(missing + dim) for dim, side in enumerate(shape))

    def _finer(self, a: Places, b: Places) -> Places | None:
        if (a.columns is None) != (b.columns is None):
            pair, single = (b, a) if a.columns is None else (a, b)
            of_rows, of_columns = (x is not None and self._within(x, single.codes) for x in (pair.codes, pair.columns))
            return pair if of_rows or of_columns else None
        if a.same(b):
            return a
        if a.columns is not None:
            return None
        if self._known.planes.images > 1:
            a, b = (x._replace(codes=self._known.planes.met(x.codes, y.codes)) for x, y in ((a, b), (b, a)))
            if a.same(b):
                return a
        cells = [
            max((plane.cells if plane.grid else 1 for plane in self._known.planes.of(compact(x.codes))), default=0)
            for x in (a, b)
        ]
        if cells[0] == cells[1]:
            return self._evener(a, b)
        fine, coarse = (a, b) if cells[0] > cells[1] else (b, a)
        return fine if self._within(fine.codes, coarse.codes) else None

    def _evener(self, a: Places, b: Places) -> Places | None:
        """Choose the grid that ends with the image, of two grids with equally many cells; None if their cells do not match.

        Such grids come from a padded convolution and a pooling that overhangs. The centers of cells that meet may be at most half a
        cell apart.
        """
        planes = self._known.planes
        of = [planes.of(compact(x.codes)) for x in (a, b)]
        if any(len(met) != 1 or not met[0].grid for met in of) or of[0] == of[1] or of[0][0].grid != of[1][0].grid:
            return None
        both = self._met(a.codes, b.codes)
        (low, high), (start, stop) = (planes.boxes(both[:, i]) for i in (0, 1))
        images = [planes.images_of(both[:, i]) for i in (0, 1)]
        apart = ((low + high) - (start + stop)).abs() / 2
        if bool((apart > torch.minimum(high - low, stop - start) / 2 + 1e-6).any()) or bool((images[0] != images[1]).any()):
            return None
        box, image = of[0][0].box, planes.input
        return a if box.bottom <= image.bottom + 1e-6 and box.right <= image.right + 1e-6 else b

    @staticmethod
    def _met(a: Tensor, b: Tensor) -> Tensor:
        """Return each pair of codes that meet elementwise, `(pairs, 2)`, without padding."""
        wide = torch.broadcast_tensors(compact(a), compact(b))  # type: ignore[no-untyped-call]
        first, second = (x.flatten().long() for x in wide)
        both = (first >= 0) & (second >= 0)
        first, second = first[both], second[both]
        span = int(second.max()) + 1 if len(second) else 1
        pairs = torch.unique(first * span + second)  # one number for each pair: rows would be sorted far more slowly
        return torch.stack((pairs // span, pairs % span), 1)

    def _within(self, fine: Tensor, coarse: Tensor) -> bool:
        """Check whether the center of each cell lies in the coarser cell that it meets; padding and learned tokens may meet any cell."""
        if equal(fine, coarse):
            return True
        planes = self._known.planes
        both = self._met(fine, coarse)
        (low, high), (start, stop) = (planes.boxes(both[:, i]) for i in (0, 1))
        middle = (low + high) / 2
        slack = (high - low) / 2 + 1e-6
        inside = (middle >= start - slack) & (middle <= stop + slack)
        if planes.frames:
            (begin, end), (first, last) = (planes.times(both[:, i]) for i in (0, 1))
            now = (begin + end) / 2
            inside &= ((now >= first) & (now <= last)).unsqueeze(-1)
        images = [planes.images_of(both[:, i]) for i in (0, 1)]
        grid = ~middle.isnan().any(1) & ~start.isnan().any(1)
        return bool(inside[grid].all()) and bool((images[0] == images[1])[grid].all())

    # --- joining tensors

    def _joined(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: torch.Size) -> Places | None:
        known = self._known
        # torch ignores empty tensors
        refs = [ref for ref in (args[0] if args else kwargs["tensors"]) if known.shapes[ref.slot].numel()]
        dim = _join_axis(name, args, kwargs, [known.shapes[ref.slot] for ref in refs], len(shape))
        found: list[Places | None] = []
        shapes: list[torch.Size] = []
        for ref in refs:
            lead = len(shape) - len(known.shapes[ref.slot])

            def lifted(codes: Tensor, lead: int = lead) -> Tensor:
                return codes.unsqueeze(dim) if lead else codes

            places = self._of(ref)
            found.append(None if places is None else places.each(lifted))
            own = list(known.shapes[ref.slot])
            shapes.append(torch.Size([*own[:dim], 1, *own[dim:]] if lead else own))
            if places is None and ref.slot in known.lost:
                known.culprit = known.lost[ref.slot]
                return None
        there = next(places for places in found if places is not None)
        if any(places is not None and (places.columns is None) != (there.columns is None) for places in found):
            return None
        parts = []
        for ref, places, own_shape in zip(refs, found, shapes, strict=True):
            part = places if places is not None or there.columns is not None else self._beside(ref.slot, own_shape, there, dim)
            if part is None:
                return None
            parts.append(part)
        columns = None if there.columns is None else joined([part.columns for part in parts], dim)  # type: ignore[misc]
        codes = joined([part.codes for part in parts], dim)
        real = [places for places in found if places is not None]
        stacked = len(shape) > len(known.shapes[refs[0].slot])
        channels = self._known.planes.pixels.holds(there.codes)  # color channels of pixels are stacked
        doubled = (dim == 0 or (stacked and dim == 1 and not channels)) and len(real) > 1 and self._overlap(real)
        copies = doubled or any(places.copies for places in real)
        behind = later(*(part.behind for part in parts))
        return there._replace(codes=codes, columns=columns, behind=behind, copies=copies)

    def _overlap(self, parts: Sequence[Places]) -> bool:
        """Check whether several parts have cells in common."""
        held = [torch.unique(compact(part.codes)) for part in parts]
        every = torch.cat([codes[codes >= 0] for codes in held])
        for plane in self._known.planes.of(every):
            if not plane.grid:
                every = every[(every < plane.start) | (every >= plane.base + plane.cells * self._known.images)]
        return bool(len(torch.unique(every)) < len(every))

    def _beside(self, slot: int, shape: torch.Size, there: Places, dim: int) -> Places | None:
        """Return the locations of tokens from no pixel (a class token, registers) that are joined to image tokens.

        Channels without a location that are joined to the channels of tokens get the location of these tokens.
        """
        codes, known = there.codes, self._known
        alike = codes.narrow(dim, 0, 1)
        if codes.shape[dim] > 1 and same_along(codes, dim):
            return Places(alike.expand(shape))
        members = known.members.get(slot)
        if members is not None and members.columns is None:
            return members._replace(codes=members.codes.expand(shape))
        name = f"foreign {known.foreign[slot]}" if slot in known.foreign else known.learned.get(slot) or "token"
        form = [1] * len(shape)
        form[dim] = shape[dim]
        return Places(known.planes.members(known.planes.set_of(name, shape[dim])).view(form).expand(shape))


def _itself(codes: Tensor, *_: object) -> Tensor:
    return codes


def _second(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call has a second tensor operand."""
    return any(
        isinstance(value, Ref) for value in (*args[1:], *(kwargs[name] for name in kwargs if name not in ("input", "out")))
    )


def _ref(value: Any) -> list[Ref]:  # noqa: ANN401
    return [value] if isinstance(value, Ref) else []


def _join_axis(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[torch.Size], ndim: int) -> int:
    if name in ("cat", "concat", "concatenate", "stack"):
        given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        return int(given) % ndim
    one = max((len(shape) for shape in shapes), default=1) == 1
    return {"hstack": 0 if one else 1, "vstack": 0, "row_stack": 0, "dstack": 2, "column_stack": 1}[name]


def _repeats_images(before: Places, after: Tensor) -> bool:
    """Check whether images are repeated along the first axis."""
    return after.ndim == before.codes.ndim and after.shape[0] > before.codes.shape[0]
