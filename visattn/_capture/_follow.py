"""Following the tokens of an image through a forward, operation by operation, from the pixels to each attention.

Beside each tensor goes a tensor of the same shape that says which place each number stands for: views, windows, shifts and padding do
to the codes what they do to the numbers; layers that mix channels leave them; pooling and strides merge them. So the layout of a call
is what the model did, not a guess. An operation that is not known here loses the places, and the attention behind it is not put on
the image.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from visattn._capture._arrange import Arrangement
from visattn._capture._codes import Geometry2d, aligned, compact, covered, equal, flat, geometry_of, name_of, padded, same_along
from visattn._capture._operations import COMBINE, DECIDE, JOIN, PRODUCT, REARRANGE, REDUCE, RESAMPLE, SAME, WRITE
from visattn._capture._planes import PADDING, Planes

Behind = tuple[int, str, int] | None  # its number in the forward, the layer, which call of that layer


@dataclass(frozen=True, eq=False)
class Places:
    """Which place each number of a tensor stands for; a matrix of scores has one for its row and one for its column.

    Attributes:
        codes: As the tensor; of the rows, where there are `columns`.
        columns: As the tensor, for scores and weights.
        behind: The last attention that flowed in, by layer and call.
    """

    codes: Tensor
    columns: Tensor | None = None
    behind: Behind = None

    def each(self, change: Callable[[Tensor], Tensor | None]) -> Places | None:
        """The same change to both."""
        codes = change(self.codes)
        columns = None if self.columns is None else change(self.columns)
        if codes is None or (columns is None) != (self.columns is None):
            return None
        return Places(codes, columns, self.behind)


class Follower:
    """Places of the tensors of one forward; `see` must be told every function call with its result."""

    def __init__(self, model: nn.Module, pixels: Tensor) -> None:
        """Start at the pixels `(B, C, H, W)`."""
        self.planes = Planes(len(pixels), (pixels.shape[-2], pixels.shape[-1]), pixels.device)
        self._places: MutableMapping[Tensor, Places] = WeakTensorKeyDictionary()
        self._lost: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        for name, stored in (*model.named_parameters(), *model.named_buffers()):
            self._names[stored] = name.rsplit(".", 1)[-1]
        rows, columns = (int(side) for side in pixels.shape[-2:])
        plane = self.planes.grid(rows, columns, self.planes.input)
        self._places[pixels] = Places(self.planes.codes(plane)[:, None].expand(pixels.shape))
        self._passed = 0
        self.arrangements: dict[Hashable, Arrangement] = {}  # by the codes of a call, for others that have the same
        self.chosen_by_data = False

    def of(self, tensor: object) -> Places | None:
        """Where the numbers of a tensor belong, if that is known."""
        return self._places.get(tensor) if isinstance(tensor, Tensor) else None

    def lost(self, tensor: Tensor) -> str | None:
        """The operation behind which the places of a tensor are not known, or of what it was multiplied with."""
        return self._lost.get(tensor)

    def learned(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from parameters alone."""
        return tensor in self._names

    def passed(self, out: Tensor, layer: str, call: int) -> None:
        """State that `out` is the result of an attention."""
        self._passed += 1
        places = self.of(out)
        if places is not None:
            self._places[out] = Places(places.codes, places.columns, (self._passed, layer, call))

    def see(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        """Take over the places of a call's arguments to its result."""
        if name_of(func) in DECIDE:
            self.chosen_by_data = True
        if name_of(func) in WRITE:
            self._written(name_of(func), args)
            return
        if isinstance(out, Tensor):
            if out.dtype in (torch.bool, torch.int64) or not out.ndim:
                return
        elif not isinstance(out, (tuple, list)):
            return
        tensors = [x for x in flat(args) if isinstance(x, Tensor)] + [x for x in kwargs.values() if isinstance(x, Tensor)]
        lost = next((self._lost[tensor] for tensor in tensors if tensor in self._lost), None)
        placed = [tensor for tensor in tensors if tensor in self._places]
        if not placed and lost is None:
            self._keep_name(tensors, out)
            return
        name, found = name_of(func), None
        if placed:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                found = self._rule(name, func, list(args), dict(kwargs), out)
        if name not in PRODUCT and name != "einsum" and any(tensor not in self._lost for tensor in placed):
            lost = None  # what is added to known places belongs there
        results = [out] if isinstance(out, Tensor) else out
        for tensor, places in zip_longest(results, found if isinstance(found, list) else [found]):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            self._places.pop(tensor, None)  # an in-place result keeps no stale places
            self._lost.pop(tensor, None)
            if isinstance(places, Places) and places.codes.shape == tensor.shape:
                self._places[tensor] = places
                if lost is not None:
                    self._lost[tensor] = lost
            else:
                self._lost[tensor] = lost or name

    def _written(self, name: str, args: Sequence[Any]) -> None:
        """Numbers were written over others, and into whatever shares their memory."""
        target, value = args[0], args[-1]
        new, old = self.of(value), self.of(target)
        if torch._C._functorch.is_batchedtensor(target):  # inside vmap nothing is followed
            return
        memory = target.untyped_storage().data_ptr()
        for tensor in [x for x in self._places if x is target or x.untyped_storage().data_ptr() == memory]:
            del self._places[tensor]
            self._lost[tensor] = name
        with torch._C.DisableTorchFunction(), torch.no_grad():
            places = self._overwritten(name, args, new, old)
        if places is not None:
            self._places[target] = places
            self._lost.pop(target, None)

    def _overwritten(self, name: str, args: Sequence[Any], new: Places | None, old: Places | None) -> Places | None:
        target, value = args[0], args[-1]
        if name == "copy":
            return new and new.each(lambda codes: codes.expand(target.shape))
        zero = isinstance(value, (int, float)) and value == 0  # zeros are padding
        if name != "__setitem__" or (new is None and (old is None or not zero)):
            return None

        def written(codes: Tensor | None, over: Tensor | None) -> Tensor:
            made = torch.full(target.shape, PADDING, dtype=torch.int32, device=target.device) if over is None else over.clone()
            made[args[1]] = PADDING if codes is None else codes
            return made

        known = [places for places in (new, old) if places is not None]
        if any((places.columns is None) != (known[0].columns is None) for places in known):
            return None
        rows = written(None if new is None else new.codes, None if old is None else old.codes)
        columns = None
        if known[0].columns is not None:
            columns = written(None if new is None else new.columns, None if old is None else old.columns)
        return Places(rows, columns, later(*(places.behind for places in known)))

    def _keep_name(self, tensors: list[Tensor], out: Any) -> None:  # noqa: ANN401
        """A learned token is still that after it was expanded or had its position added."""
        name = next((self._names[tensor] for tensor in tensors if tensor in self._names), None)
        if name is not None and isinstance(out, Tensor):
            self._names[out] = name

    def _rule(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ANN401
        """Places of the result: one, a list for several results, or None."""
        first = self.of(args[0]) if args else None
        if name == "unfold" and func is F.unfold:
            return first and first.each(lambda codes: F.unfold(codes.double() + 1, *args[1:], **kwargs).int() - 1)
        if name in REARRANGE or name == "unfold":
            return first and self._rearranged(func, first, args, kwargs, out)
        if name in SAME:
            return first
        if name in COMBINE:
            return self._combined([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], out.shape)
        if name in JOIN:
            return self._joined(name, args, kwargs, out)
        if name == "pad":
            return first and first.each(lambda codes: padded(codes, args[1:], kwargs))
        if name == "linear":
            return first and first.each(lambda codes: self._through(codes, -1, out.shape))
        if name in RESAMPLE:
            out = out[0] if isinstance(out, tuple) else out
            return first and first.each(lambda codes: self._resampled(codes, args, kwargs, name, out.shape))
        if name in REDUCE:
            return first and first.columns is None and self._reduced(first, args, kwargs, out)
        if name in PRODUCT:
            return self._multiplied(args, out)
        if name == "baddbmm":  # scores with their mask
            return self._multiplied(args[1:], out)
        if name == "einsum":
            operands = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            return self._contracted(args[0], operands, out)
        if name == "scaled_dot_product_attention":
            value = args[2] if len(args) > 2 else kwargs["value"]
            return self._attended(first, self.of(value), out)
        return None

    def _rearranged(self, func: Any, places: Places, args: list[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ANN401
        shape_of = name_of(func).endswith("_as")  # of another tensor the shape alone
        if not shape_of and any(isinstance(x, Tensor) for x in flat([*args[1:], *kwargs.values()])):
            self.chosen_by_data = True
        if name_of(func) in ("view", "reshape") and args[1:] and isinstance(args[1], torch.dtype):
            return None
        if name_of(func) in ("view", "reshape", "view_as", "reshape_as"):
            return places.each(lambda codes: codes.reshape(out.shape))
        if isinstance(out, Tensor):
            return places.each(lambda codes: func(codes, *args[1:], **kwargs))
        rows = func(places.codes, *args[1:], **kwargs)
        columns = None if places.columns is None else func(places.columns, *args[1:], **kwargs)
        return [Places(row, None if columns is None else columns[i], places.behind) for i, row in enumerate(rows)]

    def _combined(self, tensors: list[Tensor], shape: torch.Size) -> Places | None:
        """Sums and products number by number: of two that disagree, as where a pooled gate meets its image, the finer counts."""
        best: Places | None = None
        behind: Behind = None
        for tensor in tensors:
            places = self.of(tensor)
            if places is None:
                continue
            behind = later(behind, places.behind)
            wide = places.each(lambda codes: codes.expand(shape))
            if best is None:
                best = wide
            elif wide is not None:
                best = self._finer(best, wide)
                if best is None:
                    return None
        return None if best is None else Places(best.codes, best.columns, behind)

    def _finer(self, a: Places, b: Places) -> Places | None:
        if (a.columns is None) != (b.columns is None):
            return a if b.columns is None else b
        if equal(a.codes, b.codes) and (a.columns is None or b.columns is None or equal(a.columns, b.columns)):
            return a
        cells = [max((plane.cells for plane in self.planes.of(compact(x.codes))), default=0) for x in (a, b)]
        return None if cells[0] == cells[1] else a if cells[0] > cells[1] else b

    def _joined(self, name: str, args: list[Any], kwargs: dict[str, Any], out: Tensor) -> Places | None:
        tensors = list(args[0] if args else kwargs["tensors"])
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
        found = [self.of(tensor) for tensor in tensors]
        known = next(places for places in found if places is not None)
        if any(places is not None and (places.columns is None) != (known.columns is None) for places in found):
            return None
        if name == "stack":
            tensors = [tensor.unsqueeze(dim) for tensor in tensors]
            found = [places and places.each(lambda codes: codes.unsqueeze(dim)) for places in found]
            known = known.each(lambda codes: codes.unsqueeze(dim)) or known
        parts = []
        for tensor, places in zip(tensors, found, strict=True):
            if places is None:
                places = self._learned(tensor, known, dim) if known.columns is None else None
                if places is None:
                    return None
            parts.append(places)
        columns = None if known.columns is None else torch.cat([places.columns for places in parts], dim)  # type: ignore[misc]
        return Places(torch.cat([places.codes for places in parts], dim), columns, later(*(places.behind for places in parts)))

    def _learned(self, tensor: Tensor, beside: Places, dim: int) -> Places | None:
        """Tokens that come from no pixel, put beside some that do: the class token, registers. Channels of no place take theirs."""
        codes = beside.codes
        alike = codes.narrow(dim, 0, 1)
        if codes.shape[dim] > 1 and same_along(codes, dim):
            return Places(alike.expand(tensor.shape))
        name = self._names.get(tensor, "token")
        images = codes.flatten(1)[:, 0]
        planes = self.planes.of(images)
        if dim == 0 or len(planes) != 1:
            return None
        image, _ = self.planes.split(images, planes[0])
        count = tensor.shape[dim]
        bases = torch.tensor([self.planes.learned(f"{name}:{i}").base for i in range(count)], device=codes.device)
        made = (bases + image[:, None]).to(torch.int32)  # (groups, count)
        shape = [1] * tensor.ndim
        shape[0], shape[dim] = len(image), count
        return Places(made.view(shape).expand(tensor.shape))

    def _through(self, codes: Tensor, dim: int, shape: torch.Size) -> Tensor | None:
        """Codes behind a layer that mixes all of `dim`."""
        alike = codes.narrow(dim, 0, 1)
        if not same_along(codes, dim):
            merged = self.planes.merge(codes, dim)
            if merged is None:
                return None
            alike = merged
        return alike.expand(shape)

    def _resampled(self, codes: Tensor, args: list[Any], kwargs: dict[str, Any], name: str, shape: torch.Size) -> Tensor | None:
        if codes.ndim != len(shape):
            return None
        spatial = codes.ndim - 2 if name in ("interpolate", "upsample") else {"conv1d": 1, "conv3d": 3}.get(name, 2)
        channels = codes.ndim - spatial - 1
        alike = codes.narrow(channels, 0, 1)
        one_place = same_along(codes, channels)
        if codes.shape[channels + 1 :] == shape[channels + 1 :]:
            return codes if not name.startswith("conv") else alike.expand(shape) if one_place else None
        if spatial != 2 or codes.ndim != 4 or not one_place:
            return None
        plane, before = self.planes.raster(alike[:, 0])
        if plane is None:
            return self._tiled(alike[:, 0], shape, geometry_of(name, args, kwargs))
        image, _ = self.planes.split(alike[:, 0].flatten(1).amax(1), plane)
        rows, columns = shape[-2:]
        made = self.planes.codes(
            self.planes.grid(rows, columns, covered(plane, before, rows, columns, geometry_of(name, args, kwargs)))
        )
        return made[image.long()][:, None].expand(shape)

    def _tiled(self, codes: Tensor, shape: torch.Size, geometry: Geometry2d | None) -> Tensor | None:
        """Strides within windows: `(groups, rows, columns)` codes that are not one image."""
        rows, columns = shape[-2:]
        if geometry is None or (rows * geometry.stride[0], columns * geometry.stride[1]) != codes.shape[1:]:
            return None
        tiles = codes.reshape(-1, rows, geometry.stride[0], columns, geometry.stride[1]).transpose(2, 3).flatten(3)
        merged = self.planes.merge(tiles, 3)
        return None if merged is None else merged[:, None, :, :, 0].expand(shape)

    def _reduced(self, places: Places, args: list[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ANN401
        dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if dims is None or isinstance(dims, Tensor):
            return None
        codes: Tensor | None = places.codes
        chosen = sorted({d % places.codes.ndim for d in ([dims] if isinstance(dims, int) else dims)}, reverse=True)
        for dim in chosen:
            assert codes is not None  # noqa: S101
            codes = self._through(codes, dim, torch.Size([*codes.shape[:dim], 1, *codes.shape[dim + 1 :]]))
            if codes is None:
                return None
        assert codes is not None  # noqa: S101
        result = out if isinstance(out, Tensor) else out[0]
        for dim in chosen if codes.ndim != result.ndim else []:
            codes = codes.squeeze(dim)
        made = Places(codes, behind=places.behind)
        return made if isinstance(out, Tensor) else [made]

    def _multiplied(self, args: list[Any], out: Tensor) -> Places | None:
        left, right = args[:2]
        if left.ndim < 2 or right.ndim < 2:
            return None
        lead = "abcdefghijklm"[: max(left.ndim, right.ndim) - 2]
        equation = f"{lead[len(lead) + 2 - left.ndim :]}xy,{lead[len(lead) + 2 - right.ndim :]}yz->{lead}xz"
        return self._contracted(equation, [left, right], out)

    def _contracted(self, equation: str, operands: Sequence[Any], out: Tensor) -> Places | None:
        """An einsum. Queries times keys give scores, with a row and a column; weights times values lie where the queries do."""
        inputs, _, result = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        if len(operands) != 2 or "." in equation or not result:
            return None
        sides = [(self.of(x), names) for x, names in zip(operands, letters, strict=True)]
        behind = later(*(places.behind for places, _ in sides if places))
        found: list[Tensor] = []
        for places, names in sorted(sides, key=lambda side: side[0] is None or side[0].columns is None):  # weights tell where to
            if places is None:
                continue
            row = aligned(places.codes, names, result, out.shape)
            if places.columns is None:
                if row is None:
                    return None
                found.append(row)
                continue
            column = aligned(places.columns, names, result, out.shape)
            if row is not None and column is not None:  # heads are mixed
                return Places(row, column, behind) if any(other is None for other, _ in sides) else None
            one = row if row is not None else column
            return None if one is None else Places(one, behind=behind)
        if len(found) == 1 or equal(found[0], found[1]):  # both sides of a product made at each place
            return Places(found[0], behind=behind)
        return Places(found[0], found[1], behind)

    def _attended(self, query: Places | None, value: Places | None, out: Tensor) -> Places | None:
        behind = later(*(places.behind for places in (query, value) if places))
        for places, dim in ((query, -1), (value, -2)):  # tokens against tokens, or channels against channels
            if places is None or places.columns is not None:
                continue
            alike = places.codes.narrow(dim, 0, 1)
            if same_along(places.codes, dim) and alike.numel() > 1:
                return Places(alike.expand(out.shape), behind=behind)
        return None


def later(*behind: Behind) -> Behind:
    """The last of several attentions."""
    return max((one for one in behind if one is not None), default=None)
