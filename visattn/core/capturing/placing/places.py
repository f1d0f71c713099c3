"""Origin of the elements of a tensor: a cell of the image, a member of a set, or one of four answers that name no place.

A set holds tokens that lie nowhere in the image, such as words, object queries or a class token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.tokens.codes import equal
from visattn.core.capturing.tokens.planes import PADDING, compact
from visattn.core.capturing.tokens.points import Drift

LEARNED, FOREIGN, LOST = -2, -3, -4  # codes beside those of planes; PADDING (-1) is a zero that nothing was written over

UNWATCHED = "a tensor of an earlier forward pass, or of code that is not intercepted"

Behind = tuple[int, str, int] | None  # index in the forward pass, layer, index of the call in that layer
Kind = Literal["placed", "learned", "foreign", "lost"]
Positions = Literal["", "given", "computed"]
_CODE = {"learned": LEARNED, "foreign": FOREIGN, "lost": LOST}


class Places(NamedTuple):
    """Origin of each element of a tensor. An element of a score matrix has two: that of its row (query) and of its column (key).

    Attributes:
        kind: `placed`: some elements come from the image, and `codes` says where from; `learned`: all come from parameters, buffers
            and constants; `foreign`: all come from these and from other inputs; `lost`: it is not proven where they come from.
        codes: Position codes in the shape of the tensor: an integer for each element that says which cell of the image it comes
            from; for scores and weights, those of the rows. Members of sets have codes, too.
        columns: Position codes of the columns of scores and weights; None for other tensors.
        copies: Number of the copy that an element belongs to, where one image was copied; None for no copies.
        name: Parameter or input, for `learned` and `foreign`; the operation behind which places are unknown, for `lost` elements.
        behind: Last attention call that flowed into the tensor.
        embedding: Node in which pixels became tokens.
        one_stream: Whether rows and columns come from the same tokens, behind the same attention call.
        mixture: Whether several cells were mixed into several outputs, each of which may stand for another part of the merged cell.
        crossed: Whether each element also depends on its whole row and column of the image, as the gates of strip pooling do.
        drift: How far the values may lie from there, because they were read at points that the model computes.
        others: Position codes of the other axis, if the tensor is a product with members of a set: those of its queries or keys.
        asked: Whether the tensor was multiplied by learned queries.
        of_channels: Whether it is a matrix between channels, which is lost: products of the same tokens, summed over all of them.
        weighted: Whether cells were multiplied one by one by numbers that do not come from the image, such as a mask.
        leaning: Whether cells were merged with such weights, so that the merged cell may hold one of them alone.
        positions: For a foreign tensor that comes from whole numbers and booleans only, such as masks and sizes: `given`, or
            `computed` from them. A table that is read with given numbers, such as words, is foreign.
        parts: Position codes before cells were merged, with the merged axis; for a gate that returns to its cells.
        summed: Whether a product of tokens was summed over tokens, without a softmax (linear attention), so that places are lost.
    """

    kind: Kind
    codes: Tensor
    columns: Tensor | None = None
    copies: Tensor | None = None
    name: str = ""
    behind: Behind = None
    embedding: int | None = None
    one_stream: bool = True
    mixture: bool = False
    crossed: bool = False
    drift: Drift = Drift()
    others: Tensor | None = None
    asked: bool = False
    parts: Tensor | None = None
    summed: bool = False
    of_channels: bool = False
    weighted: bool = False
    leaning: bool = False
    positions: Positions = ""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.codes.shape

    @property
    def placed(self) -> bool:
        """True if some elements come from the image."""
        return self.kind == "placed"

    @property
    def located(self) -> bool:
        """True if some elements have a code: they are placed, or members of a set."""
        return bool((compact(self.codes) >= 0).any())

    @property
    def stream(self) -> object:
        """Key that distinguishes these tokens from others at the same locations."""
        return self.behind, self.embedding

    def each(self, change: Callable[[Tensor], Tensor | None]) -> Places | None:
        """Apply a change, such as a reshape, to the position codes of rows and columns and to the numbers of copies.

        Return None if it gives None for one of them.
        """
        old_tensors = (self.codes, self.columns, self.copies)
        codes, columns, copies = new_tensors = [None if tensor is None else change(tensor) for tensor in old_tensors]
        if codes is self.codes and columns is self.columns and copies is self.copies:
            return self
        if any((new is None) != (old is None) for new, old in zip(new_tensors, old_tensors, strict=True)):
            return None
        assert codes is not None  # noqa: S101 - there always are codes
        others = change(self.others) if self.others is not None and self.others.shape == self.codes.shape else None
        return self._replace(codes=codes, columns=columns, copies=copies, others=others, parts=None)

    def after(self, behind: Behind) -> Places:
        """Return a copy that lies behind an attention call."""
        return self._replace(behind=behind)

    def same(self, other: Places) -> bool:
        """Check whether all elements come from the same cells of the image as those of `other`; of scores, in rows and columns."""
        if self.codes.shape != other.codes.shape or (self.columns is None) != (other.columns is None):
            return False
        if not equal(self.codes, other.codes):
            return False
        return self.columns is None or other.columns is None or equal(self.columns, other.columns)


def whole(kind: Kind, shape: Iterable[int], device: torch.device, name: str = "") -> Places:
    """Return the places of a tensor whose elements all are learned, foreign or lost."""
    return Places(kind, torch.full((), _CODE[kind], dtype=torch.int32, device=device).expand(tuple(shape)), name=name)


def zeros(shape: Iterable[int], device: torch.device) -> Places:
    """Return the places of a tensor of zeros."""
    return Places("learned", torch.full((), PADDING, dtype=torch.int32, device=device).expand(tuple(shape)))


def later(*behind: Behind) -> Behind:
    """Return the last of several attention calls; None if there is none."""
    return max((call for call in behind if call is not None), default=None)


def content(codes: Tensor) -> tuple[object, ...]:
    """Return a hashable key that is equal for equal codes."""
    stored = compact(codes)
    return tuple(codes.shape), tuple(stored.shape), stored.cpu().contiguous().numpy().tobytes()
