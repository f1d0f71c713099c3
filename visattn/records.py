"""What a forward pass leaves behind: attention as operators, features as tensors, and where their tokens lie.

In: what `capture` met. Out: a `Recording`, the only thing that methods read. No model in it, and no picture.
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

__all__ = ["AttentionRecord", "FeatureRecord", "Recording", "Source", "TokenLayout", "Unseen"]


@dataclass(frozen=True)
class TokenLayout:
    """Where tokens lie: first the prefix tokens by name, then the grid in raster order.

    Attributes:
        space: Name of the token set; two layouts of one model are the same set only if they are equal.
        prefix: Names of the tokens before the grid: `cls`, `distillation`, `register0`, `query0`.
        grid: `()`, `(rows, columns)` or `(frames, rows, columns)`.
        box: The input pixels that the grid covers.
        holes: Cells of the grid, numbered in raster order, of which there is no token: the model dropped it.
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
        """The cell of each grid token, numbered in raster order."""
        dropped = set(self.holes)
        return tuple(cell for cell in range(self.cells + len(self.holes)) if cell not in dropped)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.prefix) + self.cells

    def on_grid(self, values: Tensor) -> Tensor:
        """Values of the grid tokens, `(..., cells)`, as `(..., *grid)`; NaN in the holes."""
        lead = values.shape[:-1]
        if not self.holes:
            return values.reshape(*lead, *self.grid)
        whole = values.new_full((*lead, math.prod(self.grid)), math.nan)
        whole[..., list(self.present)] = values
        return whole.view(*lead, *self.grid)

    def patch(self, row: int, column: int) -> int:
        """The token of a grid cell.

        Raises:
            OptionError: If the cell lies outside the grid, or the model dropped its token.
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
        """The token of the grid cell that covers a pixel of the model's input.

        Raises:
            OptionError: If none does.
        """
        rows, columns = self.grid if len(self.grid) == 2 else (0, 0)
        row, column = (y - self.box.top) / self.box.height * rows, (x - self.box.left) / self.box.width * columns
        if not (0 <= row < rows and 0 <= column < columns):
            raise OptionError(f"no token covers the input pixel {y:g},{x:g}; the grid covers {tuple(self.box)}.")
        return self.patch(int(row), int(column))

    def cell(self, token: int) -> tuple[int, int] | None:
        """Row and column of a grid token of an image; None for a prefix token."""
        index = token - len(self.prefix)
        return None if index < 0 else divmod(self.present[index], self.grid[-1])


class Source(NamedTuple):
    """A tensor of the model's graph, and what becomes of its gradient."""

    tensor: Tensor
    gradient: Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One attention call of one forward pass.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Which call of that module in this forward.
        forward: Which forward pass of the recording.
        kind: `self`; `cross` (keys are other tokens than queries: pooled, or of another branch); `pool` (a few learned queries);
            `channel` (no tokens); `unplaced` (where the tokens lie is not known, see `reason`).
        operator: `A`, of shape `(B, heads, Q, K)`.
        queries: Layout of the Q tokens.
        keys: Layout of the K tokens.
        value: `(B, heads, K, d)`, where kept.
        output_weight: `(D, heads * d)` of the projection behind the heads, where it follows at once, with the block's layer scale.
        residual: `(B, Q, D)` what the result is added to, in the order of `queries`; where values are kept and it is known.
        follows: Layer and call of the attention whose result flowed into this one last; ("", 0) for none, None if not followed.
        reason: Why it cannot be put on the image; None where it can.
        source: What gradients are made from, where `capture(model, gradients=True)` kept it.
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
        """Check that the layouts count the operator's tokens.

        Raises:
            LayoutError: If they do not; a map would be shifted.
        """
        expected = len(self.queries), len(self.keys)
        if self.operator.shape[2:] != expected:
            raise LayoutError(
                f"{self.layer}: the layout counts {expected[0]} queries and {expected[1]} keys, the model used "
                f"{self.operator.shape[2]} and {self.operator.shape[3]}. The grid or the prefix tokens are not what was expected."
            )

    @property
    def probability(self) -> bool:
        """Whether rows are distributions (non-negative, sum 1)."""
        return self.operator.probability

    def error(self) -> float:
        """How far `A V` is from what the model's own kernel gave: the largest difference over the largest value.

        Weights that the model wrote out are kept as they were: then it is 0.

        Raises:
            OptionError: If the recording was made without `gradients=True`, which keeps what the kernel gave.
        """
        if self.source is None:
            raise OptionError("the kernel's own result was not kept. Use capture(model, gradients=True).")
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
        layer: Dotted name of the module that gave it.
        forward: Which forward pass of the recording.
        role: `tokens`: `(B, N, D)`; `activation`: `(B, C, H, W)`; gates that features are multiplied by: `channel_gate`, `(B, C)`,
            `spatial_gate`, `(B, 1, H, W)`, `gate`, `(B, C, H, W)`, and `branch_gate`, `(B, branches, C)`, over branches that are
            summed; `transform`, `(B, 2, 3)`, the affine map of a spatial transformer, from output to input in `[-1, 1]`; `glimpse`,
            `(B, scales, 4)`, top, left, bottom and right of the patches of a retina in pixels of its image; `mix`, `(1, 1)`, the share
            of what the attention inside a module does that is used.
        value: The activation, detached.
        gradient: Its gradient, where one was asked for; gates have none.
        layout: Where the tokens lie, or the cells of a map, or of the map that is transformed or looked at; None where that is not
            known, and for gates of channels.
        source: The activation in the model's graph, where `capture(model, gradients=True)` kept it.
    """

    layer: str
    forward: int
    role: Role
    value: Tensor
    gradient: Tensor | None = None
    layout: TokenLayout | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        """Check that the layout counts the tokens.

        Raises:
            ShapeError: If it does not.
        """
        if self.layout is None:
            return
        shape = tuple(self.value.shape)
        if self.role == "tokens" and shape[1] != len(self.layout):
            raise ShapeError(f"{self.layer}: tokens must be (B, {len(self.layout)}, D) by the layout, got {shape}.")
        if self.role not in ("tokens", "transform", "glimpse") and shape[2:] != self.layout.grid:
            raise ShapeError(f"{self.layer}: a map must be (B, C, *{self.layout.grid}) by the layout, got {shape}.")


class Unseen(NamedTuple):
    """An attention that could not be recorded.

    Attributes:
        layer: Dotted name of the module that made it.
        forward: Which forward pass of the recording.
        how: What it does.
    """

    layer: str
    forward: int
    how: str


@dataclass(eq=False)
class Recording(Sequence[AttentionRecord]):
    """What one `capture` saw: attention records in the order of the calls, and features.

    Attributes:
        records: Attention records in the order of the calls.
        features: Feature records likewise.
        input_size: `(height, width)` of the model's input.
        readout: What is known of the model beforehand: the query that stands for the whole image, as in `reads`; empty for nothing.
        captured: Glob of the layers whose attention was kept; `*` is all of them.
        provenance: The model and its weights.
        unseen: Attention that could not be recorded; methods that multiply layers refuse it.
        readouts: By forward: the query that its output was read from, where that was followed; empty where it was not.
    """

    records: list[AttentionRecord] = field(default_factory=list)
    features: list[FeatureRecord] = field(default_factory=list)
    input_size: tuple[int, int] = (0, 0)
    readout: str = "cls"
    captured: str = "*"
    provenance: Provenance = field(default_factory=Provenance)
    unseen: list[Unseen] = field(default_factory=list)
    readouts: dict[int, str] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> AttentionRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionRecord]: ...
    def __getitem__(self, index: int | slice) -> AttentionRecord | list[AttentionRecord]:
        """Record(s) by position."""
        return self.records[index]

    def __len__(self) -> int:
        """Number of attention records."""
        return len(self.records)

    def __iter__(self) -> Iterator[AttentionRecord]:
        """Records in the order of the calls."""
        return iter(self.records)

    @property
    def layers(self) -> list[str]:
        """Names of the layers with attention, first call first."""
        return list(dict.fromkeys(record.layer for record in self.records))

    @property
    def forwards(self) -> list[int]:
        """Numbers of the recorded forward passes."""
        return sorted({record.forward for record in self.records} | {feature.forward for feature in self.features})

    @property
    def reads(self) -> str:
        """The query that the output is read from: `cls`, `cls+distillation`, `mean`, `all`, `cls+mean` or `pool`.

        As it was followed in the forward; else what is known of the model; else, where there is the gradient of a score, the tokens
        behind the last attention on which it depends. Empty where nothing says.
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
        """A recording of the records that match; features are kept unless they belong to another forward.

        Args:
            kind: Kind of attention.
            space: Name of the token set of both queries and keys.
            layer: Position among `layers` (negative from the end), a dotted name, or several of either.
            forward: Number of the forward pass; negative from the end.

        Returns:
            A new recording.

        Raises:
            OptionError: If a layer or forward is not in the recording.
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
        """The same recording with the gradient of a score: `dA` of every record, by tile, and of every feature.

        Args:
            score: A number that the model computed inside the capture, such as `logits[0, 3]`; `(B,)` or more are summed. Several
                scores take one call each. Parameters' own gradients are not touched. A score for each layer by name gives each
                record the gradient of its own, and features none.

        Returns:
            A new recording. What the score does not depend on has gradient zero.

        Raises:
            OptionError: If gradients were not kept, the score does not depend on what was recorded, or a layer has none.
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
                    f"scores must be given for every layer, {missing} has none. Pass one for each of recording.layers."
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
            raise OptionError(f"forward must be one of {len(numbers)} recorded, got {forward}. Run the model inside the capture.")
        return numbers[forward]


def _read_by_score(records: Sequence[AttentionRecord]) -> str:
    """The query that a score is read from: the tokens of the last attention on which it depends."""
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
    """What becomes of the score's gradient at the source of each item."""
    sources = [item.source for item in items if item.source is not None]
    if not items or len(sources) < len(items):
        raise OptionError("no gradients were kept. Use capture(model, gradients=True).")
    elsewhere = "the score does not depend on the recorded forward. Pass a value of the model's own output."
    if not score.requires_grad:
        raise OptionError(elsewhere)
    wanted = [source.tensor for source in sources if source.tensor.requires_grad]  # a part may be cut off from the graph
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
