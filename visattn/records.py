"""Records of a forward pass: attention as operators, features as tensors, and the layout of their tokens.

`capture` fills a `Recording`, which is all that methods read. It holds neither the model nor a picture.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from visattn._support.types import Kind, Role
from visattn.errors import LayoutError, OptionError, ShapeError
from visattn.geometry import Box
from visattn.operators import Operator, OuterGradient
from visattn.provenance import Provenance

__all__ = ["AttentionRecord", "FeatureRecord", "Recording", "Source", "TokenLayout", "UnseenAttention"]


@dataclass(frozen=True)
class TokenLayout:
    """Layout of a token sequence: first the named prefix tokens, then the grid tokens in raster order.

    Attributes:
        space: Name of the token set. Two layouts of one model describe the same set only if they are equal.
        prefix: Names of the tokens before the grid: `cls`, `distillation`, `register0`, `query0`.
        grid: `()`, `(rows, columns)` or `(frames, rows, columns)`.
        box: The input pixels that the grid covers.
        holes: Grid cells whose token the model dropped, as indices in raster order.
    """

    space: str
    prefix: tuple[str, ...]
    grid: tuple[int, ...]
    box: Box
    holes: tuple[int, ...] = ()

    @property
    def cells(self) -> int:
        """Number of grid tokens."""
        return (math.prod(self.grid) if self.grid else 0) - len(self.holes)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """Cell of each grid token, as an index in raster order."""
        dropped = set(self.holes)
        return tuple(cell for cell in range(self.cells + len(self.holes)) if cell not in dropped)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.prefix) + self.cells

    def on_grid(self, values: Tensor) -> Tensor:
        """Reshape values of the grid tokens from `(..., cells)` to `(..., *grid)`; holes become NaN."""
        lead = values.shape[:-1]
        if not self.holes:
            return values.reshape(*lead, *self.grid)
        whole = values.new_full((*lead, math.prod(self.grid)), math.nan)
        whole[..., list(self.present)] = values
        return whole.view(*lead, *self.grid)

    def patch(self, row: int, column: int) -> int:
        """Return the index of the token of a grid cell.

        Raises:
            OptionError: If the cell lies outside the grid or the model dropped its token.
        """
        if len(self.grid) != 2 or not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise OptionError(
                f"patch {row},{column} lies outside the grid of {' x '.join(map(str, self.grid))} (ROW,COL from 0)."
            )
        cell = row * self.grid[1] + column
        before = bisect_left(self.holes, cell)
        if cell in self.holes[before : before + 1]:
            raise OptionError(f"patch {row},{column} is a hole: the model dropped its token. Choose another.")
        return len(self.prefix) + cell - before

    def token_at(self, y: float, x: float) -> int:
        """Return the index of the token whose grid cell covers a pixel of the model's input.

        Raises:
            OptionError: If no token covers the pixel.
        """
        rows, columns = self.grid if len(self.grid) == 2 else (0, 0)
        row, column = (y - self.box.top) / self.box.height * rows, (x - self.box.left) / self.box.width * columns
        if not (0 <= row < rows and 0 <= column < columns):
            raise OptionError(f"no token covers the input pixel {y:g},{x:g}; the grid covers {tuple(self.box)}.")
        return self.patch(int(row), int(column))

    def cell(self, token: int) -> tuple[int, int] | None:
        """Return the row and column of a grid token of an image, or None for a prefix token."""
        index = token - len(self.prefix)
        return None if index < 0 else divmod(self.present[index], self.grid[-1])


class Source(NamedTuple):
    """A tensor of the autograd graph, and a function that converts its gradient for the record."""

    tensor: Tensor
    gradient: Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One attention call of one forward pass.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Index of the call among this module's calls in this forward pass.
        forward: Index of the forward pass in the recording.
        kind: `self`; `cross` (keys and queries are different tokens, for example pooled ones or those of another branch); `pool` (a
            few learned queries); `channel` (channels attend to channels); `unplaced` (token positions unknown, see `reason`).
        operator: `A`, of shape `(B, heads, Q, K)`.
        queries: Layout of the Q tokens.
        keys: Layout of the K tokens.
        value: `(B, heads, K, d)` value vectors, if they were kept.
        output_weight: `(D, heads * d)` weight of the output projection, including the block's layer scale. None if the projection
            does not follow directly.
        residual: `(B, Q, D)` input of the residual connection around the attention, in the order of `queries`. None if it is not
            known or values were not kept.
        follows: Layer and call of the last attention whose result reached this one; ("", 0) for none, None if not traced.
        reason: Why the attention cannot be mapped onto the image; None if it can.
        source: Tensor from which gradients are computed, if captured with `capture(model, gradients=True)`.
    """

    layer: str
    call: int
    forward: int
    kind: Kind
    operator: Operator
    queries: TokenLayout
    keys: TokenLayout
    value: Tensor | None = None
    output_weight: Tensor | None = None
    residual: Tensor | None = None
    follows: tuple[str, int] | None = None
    reason: str | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        """Check that the layouts and the operator have the same number of tokens.

        Raises:
            LayoutError: If the numbers differ, which would shift the map.
        """
        expected = len(self.queries), len(self.keys)
        if self.operator.shape[2:] != expected:
            raise LayoutError(
                f"{self.layer}: the layout has {expected[0]} queries and {expected[1]} keys, but the model used "
                f"{self.operator.shape[2]} and {self.operator.shape[3]}. Check the grid and the prefix tokens."
            )

    @property
    def probability(self) -> bool:
        """True if rows are distributions: non-negative with sum 1."""
        return self.operator.probability

    def error(self) -> float:
        """Return the error of the rebuilt weights: the largest difference between `A V` and the model's own output.

        The difference is divided by the largest output value. If the model computed its weights explicitly, they are stored
        unchanged and the error is 0.

        Raises:
            OptionError: If the recording was made without `gradients=True`, which stores the model's own output.
        """
        if self.source is None:
            raise OptionError("the output of the attention kernel was not kept. Use capture(model, gradients=True).")
        kept = self.source.gradient(self.source.tensor.detach())
        if not isinstance(kept, OuterGradient):
            return 0.0
        worst = 0.0
        for block in range(kept.out.shape[2]):
            weights = self.operator.block(block).to(kept.value.dtype)
            worst = max(worst, float((weights @ kept.value[:, :, block] - kept.out[:, :, block]).abs().max()))
        return worst / float(kept.out.abs().max())


@dataclass(frozen=True, eq=False)
class FeatureRecord:
    """An activation of one forward pass.

    Attributes:
        layer: Dotted name of the module that computed it.
        forward: Index of the forward pass in the recording.
        role: What the tensor is. Features: `tokens`, `(B, N, D)`, or `activation`, `(B, C, H, W)`. Gates that multiply features:
            `channel_gate`, `(B, C)`; `spatial_gate`, `(B, 1, H, W)`; `gate`, `(B, C, H, W)`; `branch_gate`, `(B, branches, C)`, for
            branches that are summed. `transform`, `(B, 2, 3)`: affine map of a spatial transformer, from output to input in
            `[-1, 1]`. `glimpse`, `(B, scales, 4)`: top, left, bottom and right of a retina's patches, in pixels of its image.
            `mix`, `(1, 1)`: learned weight of an attached attention module.
        value: The activation, detached.
        gradient: Gradient of a score with respect to the activation, if it was computed; gates have none.
        layout: Layout of the tokens or of the map's cells; for `transform` and `glimpse`, of the map that is sampled. None for
            channel gates and if the positions are not known.
        source: The activation in the autograd graph, if captured with `capture(model, gradients=True)`.
    """

    layer: str
    forward: int
    role: Role
    value: Tensor
    gradient: Tensor | None = None
    layout: TokenLayout | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        """Check that the layout fits the shape of the activation.

        Raises:
            ShapeError: If it does not fit.
        """
        if self.layout is None:
            return
        shape = tuple(self.value.shape)
        if self.role == "tokens" and shape[1] != len(self.layout):
            raise ShapeError(f"{self.layer}: tokens must be (B, {len(self.layout)}, D) according to the layout, got {shape}.")
        if self.role not in ("tokens", "transform", "glimpse") and shape[2:] != self.layout.grid:
            raise ShapeError(f"{self.layer}: a map must be (B, C, *{self.layout.grid}) according to the layout, got {shape}.")


class UnseenAttention(NamedTuple):
    """An attention call that could not be recorded.

    Attributes:
        layer: Dotted name of the module that made the call.
        forward: Index of the forward pass in the recording.
        reason: What the module does that prevents recording, as a predicate.
    """

    layer: str
    forward: int
    reason: str


@dataclass(eq=False)
class Recording(Sequence[AttentionRecord]):
    """Everything that one `capture` recorded: attention records in call order, and features.

    Attributes:
        records: Attention records in call order.
        features: Feature records in call order.
        input_size: `(height, width)` of the model's input.
        readout: Readout query that the model's family declares, spelled as in `reads`; empty if unknown.
        captured: Glob of the layers whose attention was kept; `*` keeps all.
        provenance: The model and its weights.
        unseen: Attention calls that could not be recorded. Methods that multiply layers refuse recordings with such calls.
        readouts: Readout query of each forward pass, by index, as traced from the tokens to the output; empty if not traced.
    """

    records: list[AttentionRecord] = field(default_factory=list)
    features: list[FeatureRecord] = field(default_factory=list)
    input_size: tuple[int, int] = (0, 0)
    readout: str = "cls"
    captured: str = "*"
    provenance: Provenance = field(default_factory=Provenance)
    unseen: list[UnseenAttention] = field(default_factory=list)
    readouts: dict[int, str] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> AttentionRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionRecord]: ...
    def __getitem__(self, index: int | slice) -> AttentionRecord | list[AttentionRecord]:
        """Return one record, or a list for a slice."""
        return self.records[index]

    def __len__(self) -> int:
        """Return the number of attention records."""
        return len(self.records)

    def __iter__(self) -> Iterator[AttentionRecord]:
        """Iterate over the records in call order."""
        return iter(self.records)

    @property
    def layers(self) -> list[str]:
        """Names of the layers with attention, in the order of their first calls."""
        return list(dict.fromkeys(record.layer for record in self.records))

    @property
    def forwards(self) -> list[int]:
        """Indices of the recorded forward passes."""
        return sorted({record.forward for record in self.records} | {feature.forward for feature in self.features})

    @property
    def reads(self) -> str:
        """Readout query, from which the output is computed: `cls`, `cls+distillation`, `mean`, `all`, `cls+mean` or `pool`.

        This is the query traced in the forward pass. If none was traced, it is the one that the model's family declares. Otherwise,
        if there is a gradient, it is the tokens of the last attention on which the score depends. Empty if none of these is known.
        """
        followed = {self.readouts.get(number, "") for number in self.forwards} - {""}
        return followed.pop() if len(followed) == 1 else self.readout or _read_by_score(self.records)

    def select(
        self,
        *,
        kind: Kind | None = None,
        space: str | None = None,
        layer: int | str | Iterable[int | str] | None = None,
        forward: int | None = None,
    ) -> Recording:
        """Return a recording of the matching records. Features are kept unless they belong to another forward pass.

        Args:
            kind: Kind of attention.
            space: Name of the token set of both queries and keys.
            layer: Index into `layers` (negative counts from the end), dotted name, or several of either.
            forward: Index of the forward pass; negative counts from the end.

        Returns:
            A new recording.

        Raises:
            OptionError: If a layer or forward pass is not in the recording.
        """
        records, features = self.records, self.features
        if forward is not None:
            number = self._forward(forward)
            records = [record for record in records if record.forward == number]
            features = [feature for feature in features if feature.forward == number]
        if kind is not None:
            records = [record for record in records if record.kind == kind]
        if space is not None:
            records = [record for record in records if record.queries.space == space == record.keys.space]
        if layer is not None:
            names = list(dict.fromkeys(record.layer for record in records))
            chosen = {_layer_name(item, names) for item in ([layer] if isinstance(layer, (int, str)) else layer)}
            records = [record for record in records if record.layer in chosen]
        unseen = [one for one in self.unseen if forward is None or one.forward == number]
        return replace(self, records=records, features=features, unseen=unseen)

    def gradients(self, score: Tensor | Mapping[str, Tensor]) -> Recording:
        """Return the recording with the gradients of a score: `dA` of every record, tile by tile, and of every feature.

        The parameters' own `grad` is not touched. Call it once for each score.

        Args:
            score: Scalar that the model computed inside the capture, such as `logits[0, 3]`; tensors with more elements are summed.
                A mapping from layer names to scores gives each record the gradient of its own layer's score. Features then get none.

        Returns:
            A new recording. Gradients are zero where the score does not depend on the record.

        Raises:
            OptionError: If gradients were not kept, a layer has no score, or the score does not depend on what was recorded.
        """
        if isinstance(score, Tensor):
            graded = [feature for feature in self.features if feature.role in ("tokens", "activation")]
            filled = _slopes(score, [*self.records, *graded])
            slopes, of_features = filled[: len(self.records)], dict(zip(graded, filled[len(self.records) :], strict=True))
            features = [replace(feature, gradient=of_features.get(feature)) for feature in self.features]
        else:
            missing = next((layer for layer in self.layers if layer not in score), None)
            if missing is not None:
                raise OptionError(
                    f"scores must be given for every layer, but {missing} has none. Pass one for each of recording.layers."
                )
            slopes = [_slopes(score[record.layer], [record])[0] for record in self.records]
            features = [replace(feature, gradient=None) for feature in self.features]
        records = [
            replace(record, operator=record.operator.with_gradient(slope))
            for record, slope in zip(self.records, slopes, strict=True)
        ]
        return replace(self, records=records, features=features)

    def _forward(self, forward: int) -> int:
        numbers = self.forwards
        if not -len(numbers) <= forward < len(numbers):
            raise OptionError(
                f"forward must be one of {len(numbers)} recorded passes, got {forward}. Run the model inside the capture."
            )
        return numbers[forward]


def _read_by_score(records: Sequence[AttentionRecord]) -> str:
    """Return the readout query of a score: the tokens of the last attention on which it depends."""
    last = next((record for record in reversed(records) if record.kind == "self" and record.queries.grid), None)
    if last is None or last.operator.gradient is None:
        return ""
    read = torch.zeros(len(last.queries), dtype=torch.bool, device=last.operator.device)
    for tile in last.operator.pieces():
        if tile.grad is not None:
            read[tile.queries] |= (tile.grad != 0).any(-1).flatten(0, 1).any(0)
    prefix = [name for i, name in enumerate(last.queries.prefix) if read[i]]
    patches = read[len(last.queries.prefix) :]
    if bool(patches.all()) and not prefix:
        return "mean"
    return "" if bool(patches.any()) else "+".join(prefix)


def _slopes(score: Tensor, items: Sequence[AttentionRecord | FeatureRecord]) -> list[Any]:
    """Return the gradient of the score at the source tensor of each item."""
    sources = [item.source for item in items if item.source is not None]
    if not items or len(sources) < len(items):
        raise OptionError("no gradients were kept. Use capture(model, gradients=True).")
    elsewhere = "the score does not depend on the recorded forward pass. Pass a value of the model's own output."
    if not score.requires_grad:
        raise OptionError(elsewhere)
    wanted = [source.tensor for source in sources if source.tensor.requires_grad]  # some may be detached from the graph
    given = iter(torch.autograd.grad(score.sum(), wanted, retain_graph=True, allow_unused=True) if wanted else ())
    found = [next(given) if source.tensor.requires_grad else None for source in sources]
    if all(gradient is None for gradient in found):
        raise OptionError(elsewhere)
    return [
        source.gradient(torch.zeros_like(source.tensor) if gradient is None else gradient)
        for source, gradient in zip(sources, found, strict=True)
    ]


def _layer_name(layer: int | str, names: list[str]) -> str:
    if isinstance(layer, str):
        if layer in names:
            return layer
        raise OptionError(f"layer must be one of {', '.join(names)}, got {layer!r}.")
    if not -len(names) <= layer < len(names):
        raise OptionError(
            f"layer must lie in [{-len(names)}, {len(names) - 1}], got {layer}: {len(names)} layers have attention."
        )
    return names[layer]
