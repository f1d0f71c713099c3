"""Recording of forward passes: everything that `capture` keeps and methods read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from visattn._support.checks import printable, shown
from visattn._support.faces import Later
from visattn._support.modes import in_own_modes
from visattn._support.notes import warn
from visattn._support.reprs import in_pixels
from visattn._support.types import Kind
from visattn.core.operators.softmax import unblocked
from visattn.core.provenance import Provenance
from visattn.core.records.entries import AttentionRecord, FeatureRecord, UnseenAttention
from visattn.core.records.readouts import Readout, probes_of
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.records.terms import ScoreTerms

_norm_gradients: Any = Later("visattn._support.norm_gradients")
_LARGE = 1e9  # bytes of attention weights, above which `Recording.attention` warns


@dataclass(eq=False, repr=False)
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
        readouts: What the output of each forward pass is computed from, by index; none if it is unknown where the model reads its tokens.
        images: Images in the model's input, in the last forward pass; 0 if unknown.
        normalizes: Whether batch or instance norms ran, whose gradients PyTorch may get wrong for one image.
        terms: Terms that the output is the sum of, if they were asked for.
    """

    records: list[AttentionRecord] = field(default_factory=list)
    features: list[FeatureRecord] = field(default_factory=list)
    input_size: tuple[int, int] = (0, 0)
    readout: str = "cls"
    captured: str = "*"
    provenance: Provenance = field(default_factory=Provenance)
    unseen: list[UnseenAttention] = field(default_factory=list)
    readouts: dict[int, Readout] = field(default_factory=dict)
    images: int = 0
    normalizes: bool = False
    terms: ScoreTerms | None = None

    @overload
    def __getitem__(self, index: int) -> AttentionRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionRecord]: ...
    @overload
    def __getitem__(self, index: str) -> AttentionRecord: ...
    def __getitem__(self, index: int | slice | str) -> AttentionRecord | list[AttentionRecord]:
        """Return one record by number or by the name of its layer, or a list for a slice."""
        return self.record(index) if isinstance(index, str) else self.records[index]

    def __len__(self) -> int:
        """Return the number of attention records."""
        return len(self.records)

    def __iter__(self) -> Iterator[AttentionRecord]:
        """Iterate over the records in call order."""
        return iter(self.records)

    def __repr__(self) -> str:
        """Return the model, the layers and the input size."""
        known = self.layers
        named = ", ".join(known if len(known) < 4 else [known[0], "…", known[-1]])
        features = f", {len(self.features)} features" if self.features else ""
        size = in_pixels(self.input_size)
        model = printable(self.provenance.model)[:80]
        return f"<Recording of {model}: {len(self)} attention calls ({named[:150]}){features}, input {size}>"

    def image(self, number: int) -> Recording:
        """Return the recording of one image of the batch, on the same memory, as if the model had seen this image alone.

        Args:
            number: Index of the image.

        Returns:
            The recording, without the autograd graph.

        Raises:
            OptionError: If the batch has no such image.
        """
        batch = self.batch
        if not 0 <= number < batch:
            raise OptionError(f"image must lie in [0, {batch - 1}], got {number}.")
        made = self.provenance
        told = {
            name: value[number : number + 1]
            for name in ("target", "scores", "sinks")
            if len(value := getattr(made, name)) == batch
        }
        return replace(
            self,
            records=[record.image(number, batch) for record in self.records],
            images=1,
            features=[feature.image(number, batch) for feature in self.features],
            readouts={forward: readout.image(number, batch) for forward, readout in self.readouts.items()},
            provenance=made.but(**told),
        )

    @property
    def batch(self) -> int:
        """Number of images of the batch; 0 if nothing was recorded."""
        if self.images:
            return self.images
        if self.records:
            return self.records[0].operator.shape[0]
        return max((len(feature.value) for feature in self.features), default=0)

    @in_own_modes
    def attention(self, layer: int | str = -1, *, call: int = 0) -> Tensor:
        """Return the attention weights of a layer as one tensor, with tokens in the order of the record's layouts.

        Its memory grows with the square of the number of tokens; `record.operator` computes with the weights in blocks instead.

        Args:
            layer: Index or name of the layer, see `select`.
            call: Index of the call, for layers that call their attention several times.

        Returns:
            `(B, heads, Q, K)`.

        Raises:
            OptionError: If there is no such layer or call, or the recording holds several forward passes.
        """
        operator = self.record(layer, call=call).operator
        size = math.prod(operator.shape) * 4
        if size > _LARGE:
            text = (
                f"the weights of layer {layer} take {size / 1e9:.1f} GB; recording[index].operator computes with them in blocks"
            )
            warn(text)
        return operator.dense()

    def queries(self, layer: int | str = -1, *, call: int = 0) -> Tensor:
        """Return the query vectors of a layer, `(B, heads, Q, d)`, in the order of the record's layout; see `attention`.

        Where the model writes its attention out, they are the operand of the product behind the softmax, before biases are added and
        heads are mixed. A scale that the model applies to its queries is included.

        Raises:
            OptionError: If they were not kept; attention that is written out needs `capture(model, values=True)`.
        """
        return self.record(layer, call=call).operator.queries()

    def keys(self, layer: int | str = -1, *, call: int = 0) -> Tensor:
        """Return the key vectors of a layer, `(B, heads, K, d)`, in the order of the record's layout; see `attention`."""
        return self.record(layer, call=call).operator.keys()

    def values(self, layer: int | str = -1, *, call: int = 0) -> Tensor:
        """Return the value vectors of a layer, `(B, heads, K, d)`, in the order of the record's layout; see `attention`.

        Raises:
            OptionError: If values were not kept.
        """
        record = self.record(layer, call=call)
        if record.value is None:
            raise OptionError("values were not kept. Use capture(model, values=True).")
        index = record.operator.key_index
        return record.value if index is None else unblocked(record.value, index, len(record.keys))

    def record(self, layer: int | str = -1, *, call: int = 0) -> AttentionRecord:
        """Return the record of one call of a layer; see `attention`.

        Raises:
            OptionError: If there is no such layer or call, or the recording holds several forward passes.
        """
        if len(self.forwards) > 1:
            raise OptionError(
                f"the recording holds {len(self.forwards)} forward passes. Choose one: recording.select(forward=0)."
            )
        if not self.records:
            raise OptionError("the recording has no attention. Run the model inside the with block, then use it.")
        found = self.select(layer=layer).records
        if not 0 <= call < len(found):
            raise OptionError(
                f"call must lie in [0, {len(found) - 1}], got {call}: {found[0].layer} calls its attention {len(found)} times."
            )
        return found[call]

    @property
    def layers(self) -> list[str]:
        """Names of the layers with attention, in the order of their first calls."""
        return list(dict.fromkeys(record.layer for record in self.records))

    @property
    def forwards(self) -> list[int]:
        """Indices of the recorded forward passes."""
        return sorted({record.forward for record in self.records} | {feature.forward for feature in self.features})

    @property
    def reading(self) -> Readout:
        """Readout of the output, or of the score of `gradients`: traced in the forward pass, or as the model's family declares."""
        traced = [self.readouts[number] for number in self.forwards if number in self.readouts]
        if not traced:
            return Readout(self.readout)
        return (
            traced[0] if len({readout.query for readout in traced}) == 1 else Readout(reason="it differs between forward passes")
        )

    @property
    def reads(self) -> str:
        """Query from which the output is computed: `cls`, `cls+distillation`, `mean`, `all`, `cls+mean` or `pool`.

        `read` if the shares of the tokens are known, but have no such name; empty if they are unknown. See `Readout`.
        """
        return self.reading.query

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
            layer: Index into `layers` (negative counts from the end), dotted name of the layer or of a module with this one layer, or
                several of these.
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

    @in_own_modes
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
        if self.normalizes:
            _norm_gradients.set_right(*([score] if isinstance(score, Tensor) else score.values()))
        if isinstance(score, Tensor):
            graded = [feature for feature in self.features if feature.role in ("tokens", "activation")]
            _check_kept([*self.records, *graded])
            read = {number: readout for number, readout in self.readouts.items() if readout.source is not None}
            slopes = _slopes(score, [*self.records, *graded, *read.values()], needed=self.terms is None)
            of_features = dict(zip(graded, slopes[len(self.records) :], strict=False))
            of_tokens = zip(read.items(), slopes[len(self.records) + len(graded) :], strict=True)
            readouts = self.readouts | {number: readout.measured(slope) for (number, readout), slope in of_tokens}
            slopes = slopes[: len(self.records)]
            features = [replace(feature, gradient=of_features.get(feature)) for feature in self.features]
            terms = None if self.terms is None else self.terms.of(score)
        else:
            missing = next((layer for layer in self.layers if layer not in score), None)
            if missing is not None:
                raise OptionError(
                    f"scores must be given for every layer, but {missing} has none. Pass one for each of recording.layers."
                )
            slopes = [_slopes(score[record.layer], [record])[0] for record in self.records]
            features, readouts = [replace(feature, gradient=None) for feature in self.features], self.readouts
            terms = None
        records = [
            replace(record, operator=record.operator.with_gradient(slope))
            for record, slope in zip(self.records, slopes, strict=True)
        ]
        return replace(self, records=records, features=features, readouts=readouts, terms=terms)

    @in_own_modes
    def read_by(self, output: Tensor) -> Recording:
        """Return the recording with what an output is computed from, measured by its gradients; see `Readout`.

        Args:
            output: `(B, ...)` tensor that the model computed inside the capture, such as all logits. If it has more than 16 numbers for
                an image, 16 random sums of them stand for all.

        Returns:
            A new recording.

        Raises:
            OptionError: If gradients were not kept, or the output does not depend on what was recorded.
        """
        if self.normalizes:
            _norm_gradients.set_right(output)
        probes = [probe.to(output).view_as(output) for probe in probes_of(len(output), output[0].numel())]
        readouts = {
            number: readout.measured(*(_slopes(output, [readout], probe)[0] for probe in probes))
            for number, readout in self.readouts.items()
            if readout.source is not None
        }
        return replace(self, readouts=self.readouts | readouts)

    def without_graph(self) -> Recording:
        """Return the recording without the autograd graph, whose memory is then free; it can have no other gradients."""
        return replace(
            self,
            records=[replace(record, source=None) for record in self.records],
            features=[replace(feature, source=None) for feature in self.features],
            readouts={number: replace(readout, source=None) for number, readout in self.readouts.items()},
        )

    def _forward(self, forward: int) -> int:
        numbers = self.forwards
        if not -len(numbers) <= forward < len(numbers):
            raise OptionError(
                f"forward must be one of {len(numbers)} recorded passes, got {forward}. Run the model inside the capture."
            )
        return numbers[forward]


def _check_kept(items: Sequence[AttentionRecord | FeatureRecord | Readout]) -> None:
    if all(item.source is None for item in items):
        raise OptionError("no gradients were kept. Use capture(model, gradients=True).")


class NoGradient(OptionError):
    """PyTorch has no gradient of a score with respect to what was recorded."""


_NO_GRADIENT = (
    "PyTorch has no gradient of the score with respect to what was recorded. Pass a number that the model computed in this forward pass, "
    "by operations that have a gradient."
)


def _slopes(
    score: Tensor,
    items: Sequence[AttentionRecord | FeatureRecord | Readout],
    weights: Tensor | None = None,
    *,
    needed: bool = True,
) -> list[Any]:
    """Return the gradient of the sum of all scores at the source tensor of each item; None for items without one (sampled attention).

    `weights`, of the shape of the scores, makes it a weighted sum. If none is `needed`, all may be zero.

    Raises:
        OptionError: If gradients were not kept.
        NoGradient: If the score does not depend on what was recorded, by operations with gradients.
    """
    _check_kept(items)
    sources = [item.source for item in items if item.source is not None]
    if not score.requires_grad:
        raise NoGradient(_NO_GRADIENT)
    start = torch.ones_like(score) if weights is None else weights
    wanted = [source.tensor for source in sources if source.tensor.requires_grad]  # some may be detached from the graph
    given = iter(torch.autograd.grad(score, wanted, start, retain_graph=True, allow_unused=True) if wanted else ())
    found = [next(given) if source.tensor.requires_grad else None for source in sources]
    if needed and all(gradient is None for gradient in found):
        raise NoGradient(_NO_GRADIENT)
    slopes = iter(
        [
            source.gradient(torch.zeros_like(source.tensor) if gradient is None else gradient)
            for source, gradient in zip(sources, found, strict=True)
        ]
    )
    return [None if item.source is None else next(slopes) for item in items]


def _layer_name(layer: int | str, names: list[str]) -> str:
    if isinstance(layer, str):
        if layer in names:
            return layer
        inside = [name for name in names if name.startswith(f"{layer}.")]
        if len(inside) == 1:
            return inside[0]
        if inside:
            raise OptionError(
                f"{printable(layer)} has {len(inside)} layers with attention: {', '.join(inside)}. Name one of them."
            )
        raise OptionError(f"layer must be one of {', '.join(names)}, got {shown(layer)}.")
    if not -len(names) <= layer < len(names):
        raise OptionError(
            f"layer must lie in [{-len(names)}, {len(names) - 1}], got {layer}: {len(names)} layers have attention."
        )
    return names[layer]
