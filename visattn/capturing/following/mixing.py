"""Rules for operations that mix elements: channels, cells or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.places import Behind, Places, Statuses, later
from visattn.capturing.tokens.codes import Geometry2d, aligned, covered, equal, geometry_of, kernel_of, same_along
from visattn.capturing.tokens.equations import Equation
from visattn.capturing.tokens.planes import compact
from visattn.capturing.trace.tape import Entry, Ref

Located = Places | list[Any] | None


class Mixing:
    """Rules for mixing operations, applied to the known statuses."""

    def __init__(self, known: Statuses) -> None:
        """Store the known statuses."""
        self._known = known
        self._choices: dict[int, Tensor] = {}  # indices of tokens that were picked by their content, by number of the choice

    def _of(self, value: Any) -> Places | None:  # noqa: ANN401
        return self._known.places.get(value.slot) if isinstance(value, Ref) else None

    def _factor(self, value: Any) -> Places | None:  # noqa: ANN401
        """Return the locations of an operand of a product."""
        return self._of(value)

    def _through(self, codes: Tensor, dim: int, shape: Sequence[int]) -> Tensor | None:
        """Return codes behind a layer that mixes all of `dim`; None if the merged cells form no grid."""
        if same_along(codes, dim):
            return codes if tuple(codes.shape) == tuple(shape) else codes.narrow(dim, 0, 1).expand(shape)
        merged = self._known.planes.merge(codes, dim)
        return None if merged is None else merged.expand(shape)

    def _linear(self, places: Places, shape: torch.Size) -> Places | None:
        if places.columns is not None and not same_along(places.codes, -1):
            return None
        if len(shape) < places.codes.ndim:  # product with a vector
            merged = places.each(lambda codes: self._through(codes, -1, [*codes.shape[:-1], 1]))
            return merged and merged.each(lambda codes: codes.squeeze(-1))
        if places.columns is not None and not same_along(places.columns, -1):  # keys are mixed
            return None
        found = places.each(lambda codes: self._through(codes, -1, shape))
        mixed = found is not None and shape[-1] > 1 and not found.mixture and not same_along(places.codes, -1)
        return found._replace(mixture=True) if found is not None and mixed else found

    def _resampled(
        self, codes: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, shape: torch.Size
    ) -> Tensor | None:
        if codes.ndim != len(shape):
            return None
        if name == "convolution":
            name = f"conv{codes.ndim - 2}d"
        spatial = codes.ndim - 2 if name in ("interpolate", "upsample") else 1 if "1d" in name else 3 if "3d" in name else 2
        channels = codes.ndim - spatial - 1
        convolved = name.startswith("conv")
        whole = self._through(codes, channels, [*codes.shape[:channels], 1, *codes.shape[channels + 1 :]]) if convolved else None
        if not convolved and same_along(codes, channels):
            whole = codes.narrow(channels, 0, 1)
        geometry = geometry_of(name, args, kwargs, self._weight(name, args, kwargs))
        if codes.shape[channels + 1 :] == shape[channels + 1 :] and (geometry is None or _stays(geometry)):
            return None if convolved and whole is None else whole.expand(shape) if convolved and whole is not None else codes
        if spatial == 3 and codes.ndim == 5 and whole is not None:
            return self._resampled_clip(whole[:, 0], args, kwargs, name, shape)
        if spatial != 2 or codes.ndim != 4 or whole is None:
            return None
        plane, before = self._known.planes.raster(whole[:, 0])
        if plane is None and geometry is not None:
            plane, before = self._known.planes.bordered(whole[:, 0], geometry.reach, geometry.stride)
        if plane is None:
            return self._tiled(whole[:, 0], shape, geometry)
        image, _ = self._known.planes.split(whole[:, 0].flatten(1).amax(1), plane)
        rows, columns = shape[-2:]
        box = covered(plane, before, rows, columns, geometry)
        made = self._known.planes.codes(self._known.planes.grid(rows, columns, box, plane.frames)).view(-1, rows, columns)
        return made[image.long()][:, None].expand(shape)

    def _resampled_clip(
        self, codes: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, shape: torch.Size
    ) -> Tensor | None:
        """Return the codes after a convolution or pooling of clips, from codes `(B, T, H, W)`."""
        planes, (frames, rows, columns) = self._known.planes, shape[2:]
        kernel = kernel_of(name, args, kwargs, weight := self._weight(name, args, kwargs))
        if kernel is None:
            return None
        geometry, step = geometry_of(name, args, kwargs, weight), kernel.stride[0]
        if (frames, rows, columns) == (1, 1, 1) and kernel.reach == codes.shape[1:]:  # a patch of its own
            merged = self._through(codes.flatten(1), 1, (len(codes), 1))
            return None if merged is None else merged.view(-1, 1, 1, 1, 1).expand(shape)
        plane, before = planes.raster(codes.flatten(0, 1))
        if plane is None or codes.shape[1] != plane.frames or not (frames - 1) * step < plane.frames <= frames * step:
            return None
        frame, _ = planes.split(codes.flatten(2).amax(2), plane)
        if bool((frame % plane.frames != torch.arange(plane.frames, device=codes.device)).any()):
            return None
        new = planes.grid(rows, columns, covered(plane, before, rows, columns, geometry), frames)
        return planes.codes(new)[(frame[:, 0] // plane.frames).long()][:, None].expand(shape)

    def _weight(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Size | None:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        return self._known.shapes.get(weight.slot) if name.startswith("conv") and isinstance(weight, Ref) else None

    def _tiled(self, codes: Tensor, shape: torch.Size, geometry: Geometry2d | None) -> Tensor | None:
        """Return codes after a strided kernel within windows, where `(groups, rows, columns)` codes are not one image."""
        rows, columns = shape[-2:]
        if geometry is None or (rows * geometry.stride[0], columns * geometry.stride[1]) != codes.shape[1:]:
            return None
        tiles = codes.reshape(-1, rows, geometry.stride[0], columns, geometry.stride[1]).transpose(2, 3).flatten(3)
        merged = self._known.planes.merge(tiles, 3)
        return None if merged is None else merged[:, None, :, :, 0].expand(shape)

    def _reordered(self, places: Places | None, args: Sequence[Any], kwargs: Mapping[str, Any], entry: Entry) -> Located:
        """Return places after a sort. Elements sorted within a token keep its location; sorted tokens are lost."""
        name, outs = entry.operation.name, [made for made in entry.outs if made is not None]
        place = 2 if name in ("topk", "kthvalue", "quantile", "nanquantile") else 1
        last = 0 if name == "msort" else -1
        dim = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis", last))
        if isinstance(dim, bool):  # a flag of sort or argsort; dim is a keyword
            dim = kwargs.get("dim", last)
        if places is None or places.columns is not None or not isinstance(dim, int) or not same_along(places.codes, dim):
            return None
        alike = places.codes.narrow(dim, 0, 1)
        found = [
            places._replace(codes=(alike if len(made.shape) == alike.ndim else alike.squeeze(dim)).expand(made.shape))
            for made in outs
        ]
        return found if len(found) > 1 else found[0]

    def _reduced(self, places: Places, args: Sequence[Any], kwargs: Mapping[str, Any], entry: Entry) -> Located:
        made = next(made for made in entry.outs if made is not None)
        dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if entry.operation.name in ("norm", "vector_norm"):
            dims = args[2] if len(args) > 2 else kwargs.get("dim")
        ndim = places.codes.ndim
        if isinstance(dims, Ref) or dims == ():
            dims = None
        chosen = sorted(
            {d % ndim for d in (range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims)}, reverse=True
        )
        if dims is None and made.shape.numel() > 1:
            return None
        if places.columns is not None:
            return self._reduced_scores(places, chosen, made.shape)
        codes: Tensor | None = places.codes
        for dim in chosen:
            codes = None if codes is None else self._through(codes, dim, [*codes.shape[:dim], 1, *codes.shape[dim + 1 :]])
        if codes is None:
            return None
        for dim in chosen if codes.ndim != len(made.shape) else []:
            codes = codes.squeeze(dim)
        # copies of the image that were stacked and summed again are one image
        one = ndim > 3 and chosen[-1] < 2 and same_along(places.codes, chosen[-1]) and len(codes) == self._known.images
        result = places._replace(codes=codes, copies=places.copies and not one)
        return result if len(entry.outs) == 1 else [result]

    @staticmethod
    def _reduced_scores(places: Places, dims: Sequence[int], shape: torch.Size) -> Places | None:
        """Return the locations of summed scores: sums over keys lie at the query, sums over queries at the key."""
        assert places.columns is not None  # noqa: S101
        for codes in (places.codes, places.columns):
            if all(same_along(codes, dim) for dim in dims):
                for dim in dims:
                    codes = codes.narrow(dim, 0, 1)
                return places._replace(codes=codes.reshape(shape), columns=None)
        return None

    # --- tokens that the model chooses by their content

    def _chosen(self, name: str, entry: Entry, places: Places) -> Places | None:
        """Return tokens that were picked from several grids by their content, such as the object queries of two-stage detectors.

        They lie elsewhere in each image, so they form a set of their own.
        """
        known, made = self._known, next(made for made in entry.outs if made is not None)
        index = entry.args[2] if len(entry.args) > 2 else entry.kwargs.get("index")
        if name not in ("gather", "take_along_dim") or not isinstance(index, Ref) or places.columns is not None:
            return None
        by_content = index.slot in known.places or index.slot in known.lost
        if not by_content or len(made.shape) != 3 or len([p for p in known.planes.of(places.codes) if p.grid]) < 2:
            return None
        picked = entry.contents[index.slot][..., 0]
        if entry.choice is None:
            entry.choice = self._choice(picked)
        self._choices.setdefault(entry.choice, picked)
        plane = known.planes.set_of(f"query#{entry.choice}", made.shape[1])
        codes = known.planes.codes(plane)[..., None] if made.shape[0] == known.images else None
        return None if codes is None else places._replace(codes=codes.expand(made.shape))

    def _choice(self, picked: Tensor) -> int:
        """Return the number of a choice: the same for the same tokens."""
        return next((number for number, known in self._choices.items() if equal(known, picked)), len(self._choices))

    def _sampled(self, args: Sequence[Any], kwargs: Mapping[str, Any], shape: torch.Size) -> Places | None:
        """Return the locations of sampled values `(N, C, rows, columns)`: those of the tokens that chose their points."""
        image, points = ((*args, *(kwargs[key] for key in ("input", "grid") if key in kwargs))[i] for i in (0, 1))
        values, asking = self._of(image), self._of(points) or self._known.members.get(points.slot)
        if asking is None or asking.columns is not None or not same_along(asking.codes, -1):
            return None
        codes = asking.codes[..., 0]
        if values is not None:
            owner = self._known.planes.images_of(compact(values.codes)).flatten(1).amax(1)
            codes = self._known.planes.given(codes, owner.view(-1, 1, 1))
        return asking._replace(codes=codes[:, None].expand(shape))

    # --- products

    def _multiplied(self, args: Sequence[Any], shape: torch.Size) -> Places | None:
        left, right = args[:2]
        sides = [len(self._known.shapes[ref.slot]) for ref in (left, right)]
        lead = "abcdefghijklm"[: max(*sides, 2) - 2]
        names = [
            "y" if side == 1 else lead[len(lead) + 2 - side :] + axes for side, axes in zip(sides, ("xy", "yz"), strict=True)
        ]
        result = lead + ("x" if sides[0] > 1 else "") + ("z" if sides[1] > 1 else "")
        return self._contracted(Equation([left, right], names, result), shape)

    def _edited(self, args: Sequence[Any], shape: torch.Size) -> Places | None:
        """Return the locations of edited weights, from query and key or from the weights that the model computed."""
        if len(args) == 2:
            return self._of(args[1])
        letters = "abcdefghijklm"[: len(shape) - 2]
        names = [
            letters[len(letters) + 2 - len(self._known.shapes[ref.slot]) :] + axes
            for ref, axes in zip(args[1:], ("xd", "yd"), strict=True)
        ]
        return self._contracted(Equation(list(args[1:]), names, letters + "xy"), shape)

    def _contracted(self, equation: Equation | None, shape: torch.Size) -> Places | None:
        """Return the locations of an einsum. Query-key products have rows and columns; products of weights and values lie at queries."""
        if equation is None:
            return None
        operands, letters, result = equation
        sides = [(places, names) for x, names in zip(operands, letters, strict=True) if (places := self._factor(x)) is not None]
        known = self._known
        learned = [x for x in operands if isinstance(x, Ref) and (x.slot in known.learned or x.slot in known.members)]
        alone = len(sides) == 1 and len(learned) == len(operands) - 1
        behind: Behind = later(*(places.behind for places, _ in sides))
        copies = any(places.copies for places, _ in sides)
        base = sides[0][0]._replace(columns=None, behind=behind, copies=copies, others=None)
        found: list[Tensor] = []
        at = self._at_windows(sides, result, shape)
        if at is not None:
            return sides[0][0]._replace(codes=at, behind=behind)
        for places, names in sorted(sides, key=lambda side: side[0].columns is None):  # weights set the location
            row = aligned(places.codes, names, result, shape)
            if places.columns is None:
                if row is None and alone:  # a sum over a part of the image
                    row = self._merged(places.codes, names, result, shape)
                    base = base._replace(mixture=True)
                if row is None:
                    return None
                found.append(row)
                continue
            column = aligned(places.columns, names, result, shape)
            if row is not None and column is not None:  # heads are mixed
                return places._replace(codes=row, columns=column) if alone else None
            one = row if row is not None else column
            return None if one is None else base._replace(codes=one)
        if not found:
            return None
        if len(found) == 1 or all(equal(found[0], other) for other in found[1:]):  # all operands have the same locations
            sets = [
                (x, names) for x, names in zip(operands, letters, strict=True) if x in learned and len(known.shapes[x.slot]) > 2
            ]
            others = None
            if alone and len(sets) == 1 and (members := known.members.get(sets[0][0].slot)) is not None:
                others = aligned(members.codes, sets[0][1], result, shape)
                base = base._replace(behind=later(behind, members.behind))
            return base._replace(codes=found[0], asked=base.asked or (alone and bool(sets)), others=others)
        if len(found) > 2:
            return None
        one_stream = sides[0][0].stream == sides[1][0].stream
        return base._replace(codes=found[0], columns=found[1], one_stream=one_stream, copies=sides[0][0].copies)

    def _at_windows(self, sides: Sequence[tuple[Places, str]], result: str, shape: torch.Size) -> Tensor | None:
        """Return codes of a weighted mean over windows whose weights come from their own cell (outlook attention): those of that cell."""
        if len(sides) != 2 or any(places.columns is not None for places, _ in sides):
            return None
        (weights, w), (values, v) = sides
        at = aligned(weights.codes, w, result, shape)
        summed = [dim for dim, letter in enumerate(v) if letter not in result]
        if at is None or len(summed) != 1 or w[-1] != v[summed[0]] or same_along(values.codes, summed[0]):
            return None
        planes = self._known.planes
        cells = aligned(
            weights.codes,
            w,
            v.replace(v[summed[0]], ""),
            torch.Size([s for d, s in enumerate(values.codes.shape) if d not in summed]),
        )
        if cells is None:
            return None
        low, high = planes.boxes(values.codes)
        low, high = (
            part.nan_to_num(bad).amin(summed[0]) if bad > 0 else part.nan_to_num(bad).amax(summed[0])
            for part, bad in ((low, 1e9), (high, -1e9))
        )
        start, stop = planes.boxes(cells.expand(low.shape[:-1]))
        middle = (start + stop) / 2
        return at if bool(((middle >= low - 1e-6) & (middle <= high + 1e-6)).all()) else None

    def _folded(self, codes: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
        """Return codes of windows `(images, channels x taps, windows)` folded back into an image; each must lie at its own cell."""
        given = dict(zip(["input", "output_size", "kernel_size", "dilation", "padding", "stride"], args, strict=False)) | dict(
            kwargs
        )
        kernel, stride, padding, size = (
            (value, value) if isinstance(value := given.get(name, default), int) else tuple(value)
            for name, default in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("output_size", 0))
        )
        grids = [plane for plane in self._known.planes.of(compact(codes)) if plane.grid]
        if codes.ndim != 3 or not same_along(codes, 1) or len(grids) != 1 or given.get("dilation", 1) not in (1, (1, 1)):
            return None
        plane, windows = grids[0], codes[:, 0]
        columns = (size[1] + 2 * padding[1] - kernel[1]) // stride[1] + 1
        number = torch.arange(windows.shape[1], device=codes.device)
        place = torch.stack([number // columns, number % columns], -1)
        steps, taps, before = (torch.tensor(value, device=codes.device) for value in (stride, kernel, padding))
        scale = torch.tensor([plane.box.height / size[0], plane.box.width / size[1]], dtype=torch.float64, device=codes.device)
        origin = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=codes.device)
        middle = (place * steps - before + taps / 2) * scale + origin
        start, stop = self._known.planes.boxes(windows)
        if not bool(((middle >= start - 1e-6) & (middle <= stop + 1e-6)).all()):
            return None
        image = self._known.planes.images_of(windows)[:, 0].long()
        made = self._known.planes.codes(self._known.planes.grid(size[0], size[1], plane.box))
        return made[image][:, None].expand(shape)

    def _merged(self, codes: Tensor, names: str, result: str, shape: torch.Size) -> Tensor | None:
        """Merge codes along the summed axes and align them with the result."""
        summed = [dim for dim, letter in enumerate(names) if letter not in result]
        for dim in summed:
            through = self._through(codes, dim, [*codes.shape[:dim], 1, *codes.shape[dim + 1 :]])
            if through is None:
                return None
            codes = through
        return aligned(codes, names, result, shape)

    def _attended(self, query: Places | None, value: Places | None, shape: torch.Size) -> Places | None:
        behind = later(*(places.behind for places in (query, value) if places))
        copies = any(places.copies for places in (query, value) if places)
        for places, dim in ((query, -1), (value, -2)):  # tokens against tokens, or channels against channels
            if places is None or places.columns is not None:
                continue
            alike = places.codes.narrow(dim, 0, 1)
            if same_along(places.codes, dim) and alike.numel() > 1:
                return places._replace(codes=alike.expand(shape), behind=behind, copies=copies)
        return None


def _stays(geometry: Geometry2d) -> bool:
    """Check whether a kernel has stride 1 and is centered on its cell to within half a cell, so that the grid stays the same."""
    return all(
        stride == 1 and abs(reach / 2 - padding - 0.5) <= 0.5 + 1e-6
        for reach, stride, padding in zip(geometry.reach, geometry.stride, geometry.padding, strict=True)
    )
