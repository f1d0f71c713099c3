"""Recording of attention and features while forward passes run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.publish import listening
from visattn._support.types import Role
from visattn.capturing.description import ModelDescription
from visattn.capturing.finite import Sums
from visattn.capturing.following.conclusions import Conclusions
from visattn.capturing.following.readouts import APART, VALUES
from visattn.capturing.forward import Forward
from visattn.capturing.gates import telling
from visattn.capturing.hooks import with_first
from visattn.capturing.intercept.calls import Call, own
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.trace.tape import Attention
from visattn.capturing.watching import Watch
from visattn.errors import CaptureError, NoAttentionCaptured, OptionError
from visattn.records import AttentionRecord, FeatureRecord, Readout, Recording, Source, TokenLayout, UnseenAttention

Features = str | Sequence[str]  # "last", "all", "none", or globs of module names


@contextmanager
def record(
    model: nn.Module,
    description: ModelDescription,
    *,
    layers: str,
    values: bool,
    features: Features,
    gradients: bool,
    remember: bool = True,
) -> Iterator[Recording]:
    """Record the forward passes of `model` inside the `with` block; see `visattn.capture`."""
    session = _Session(model, description, layers, values, gradients, remember)
    tokens, activations = _chosen(model, description, features)
    session.keeps_last = features == "last"
    modules = session.watch.modules
    for name, module in session.streams():
        modules.before.setdefault(id(module), []).append(session.keep_stream(name))
    for name, module in tokens.items():
        modules.after.setdefault(id(module), []).append(session.keep_tokens(name))
    for name, module in activations.items():
        modules.after.setdefault(id(module), []).append(session.keep_activation(name))
    with ExitStack() as stack:
        telling(session.watch.names, modules, session.keep_gate)
        stack.enter_context(session.watch.watching())
        stack.enter_context(listening(session.keep_gate))
        yield session.recording
    session.finish()


def _chosen(
    model: nn.Module, description: ModelDescription, features: Features
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules whose tokens are kept and the modules whose activations are kept, by name."""
    known = dict(description.tokens)
    if features in ("last", "all", "none"):
        ends = description.ends or tuple(known)[-1:]
        return ({} if features == "none" else {name: known[name] for name in ends} if features == "last" else known), {}
    patterns = [features] if isinstance(features, str) else list(features)
    found = {name: part for name, part in model.named_modules() if name and any(fnmatchcase(name, one) for one in patterns)}
    if not found:
        raise OptionError(f"no module's name matches {printable(', '.join(patterns))!r}. See model.named_modules().")
    return {}, found


class _Session:
    """Recording in progress. Tensors are copied during a forward pass; records are built from the copies at its end."""

    def __init__(
        self, model: nn.Module, description: ModelDescription, layers: str, values: bool, gradients: bool, remember: bool
    ) -> None:
        self.recording = Recording(readout=description.readout, captured=layers, provenance=description.provenance)
        self.watch = Watch(
            model,
            description,
            self._receive,
            finish=self._ended,
            drop=self._drop,
            remember=remember,
            gradients=gradients,
            vectors=values,
        )
        self._model, self._description, self._layers, self._values, self._gradients = (
            model,
            description,
            layers,
            values,
            gradients,
        )
        self.keeps_last = False  # of the token features of a forward pass, only those of the last branch with a grid
        self._sums = Sums()
        self._passed_by: dict[str, None] = {}  # layers that the glob excludes, in order
        self._wanted = False  # whether features were requested by name, or a gate was found
        self._names = self.watch.names
        self._calls: list[tuple[nn.Module, Call, Attention, _Stream | None]] = []
        self._features: list[Callable[[Forward], None]] = []
        self._stream: dict[str, _Stream] = {}  # last input of each module that attention is added to

    def _drop(self) -> None:
        """Discard the copies of a forward pass."""
        self._calls.clear()
        self._features.clear()
        self._stream.clear()

    def _receive(self, layer: str, owner: nn.Module, call: Call, attention: Attention) -> None:
        if self._gradients and not torch.is_grad_enabled():
            raise CaptureError(
                f"gradients were requested, but {layer or type(owner).__name__} runs where autograd records no graph: under no_grad, "
                "in a torch.autograd.Function, or in a reentrant checkpoint. Avoid that, or capture without gradients."
            )
        wanted = self._matches(layer)
        stream = self._stream.pop(self._description.adds_to(owner) or "", None) if self._values else None
        call.keep(wanted, values=self._values or self._gradients, graph=self._gradients)
        if wanted:
            self._sums.add(call.sources())
        self._calls.append((owner, call, attention, stream))

    def _ended(self, forward: Forward) -> None:
        """Build the records of a forward pass."""
        self.recording.input_size, self.recording.images = forward.inputs
        calls, features = list(self._calls), list(self._features)
        self._drop()
        while calls:
            self._record(forward, *calls.pop(0))
        for make in features:
            make(forward)
        if self.keeps_last:
            self._keep_last(forward)
        conclusions = forward.conclusions()
        unseen = {} if conclusions is None else dict(conclusions.unseen)
        if self.watch.hidden:  # these layers already explain the tensors of unknown origin
            unseen.pop("", None)
        unseen.update(self.watch.hidden)
        self.recording.unseen.extend(UnseenAttention(layer, forward.number, reason) for layer, reason in unseen.items())
        if conclusions is not None and not self._description.stated:
            self.recording.readouts[forward.number] = self._read(forward, conclusions)

    def _read(self, forward: Forward, conclusions: Conclusions) -> Readout:
        """Return what the output of this forward pass is computed from."""
        cut, readouts = conclusions.cut, conclusions.readouts
        if cut is None or readouts is None:
            return Readout()
        known = readouts.shares() if cut.pools else None
        pools = {call[0].queries for call in conclusions.calls.values() if call is not None and call[0].kind == "pool"}
        made = []
        for number, part in enumerate(cut.parts):
            tensor = forward.kept(part.slot)
            readout = Readout(
                "" if cut.pools else self._description.readout,
                part.layout,
                shares=None if known is None else known[number],
                reason=(VALUES if cut.pools else APART) if known is None else "",
                pools=part.layout in pools,
                source=None if tensor is None else Source(tensor, partial(part.take, images=readouts.images)),
            )
            made.append(readout.named())
        alike = len({readout.query for readout in made}) == 1
        return made[-1] if alike else Readout(reason="the output is computed from several sets of tokens")

    def _record(self, forward: Forward, owner: nn.Module, call: Call, attention: Attention, stream: _Stream | None) -> None:
        layer = attention.layer
        matches = self._matches(layer)
        located = forward.arrangement(call, attention, owner) if matches or attention.doubtful else None
        if not matches and (located is not None or not attention.doubtful):
            self._passed_by[layer] = None
        if not matches or located is None:
            return
        arrangement, follows = located
        operator = call.operator(arrangement, forward.vectors(attention) if self._values else None)
        self.recording.records.append(
            AttentionRecord(
                layer=layer,
                call=attention.call,
                forward=forward.number,
                kind=arrangement.kind,
                operator=operator,
                queries=arrangement.queries,
                keys=arrangement.keys,
                value=call.values(arrangement) if self._values else None,
                output_weight=self._output_weight(forward, owner, call, attention, arrangement),
                residual=self._residual(forward, stream, arrangement.queries),
                follows=follows,
                reason=arrangement.why,
                source=call.source(arrangement) if self._gradients else None,
            )
        )

    def _output_weight(
        self, forward: Forward, owner: nn.Module, call: Call, attention: Attention, arrangement: Arrangement
    ) -> Tensor | None:
        known = self._description.output_weight(owner)
        return known if known is not None or not self._values else forward.output_weight(call, attention, arrangement)

    def _keep_last(self, forward: Forward) -> None:
        """Keep, of the token features of this forward pass, the last that lie on a grid, or the last of all if none do."""
        kept = self.recording.features
        here = [feature for feature in kept if feature.role == "tokens" and feature.forward == forward.number]
        located = [feature for feature in here if feature.layout is not None and feature.layout.grid]
        dropped = set(map(id, here)) - set(map(id, (located or here)[-1:]))
        self.recording.features = [feature for feature in kept if id(feature) not in dropped]

    def _matches(self, layer: str) -> bool:
        return self._layers == "*" or fnmatchcase(layer, self._layers)

    def streams(self) -> list[tuple[str, nn.Module]]:
        """Return the modules whose input attention is added to (residual connections); none if values are not kept."""
        if not self._values or self._description.place is not None:
            return []
        parts = {name: module for module, name in self._names.items()}
        names = dict.fromkeys(filter(None, map(self._description.adds_to, self._names)))
        return [(name, parts[name]) for name in names]

    def keep_stream(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return a callback that keeps the input tokens of a module."""

        def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.watch.running() and args and isinstance(args[0], Tensor):
                self._stream[name] = _Stream(_owned(args[0]), self.watch.want(args[0]))

        return keep

    def _residual(self, forward: Forward, stream: _Stream | None, queries: TokenLayout) -> Tensor | None:
        tokens = None if stream is None else forward.tokens(stream.slot)
        return tokens.take(stream.value) if stream is not None and tokens is not None and tokens.layout == queries else None

    def keep_tokens(self, layer: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Return a callback that keeps the output tokens of a module."""

        def keep(_module: nn.Module, _args: object, given: Any) -> Any:  # noqa: ANN401
            first = _first(given)
            if not self.watch.running() or not isinstance(first, Tensor):
                return None
            slot = self.watch.want(first)
            output = self._begun(first)
            value = _owned(output)

            def make(forward: Forward) -> None:
                tokens = forward.tokens(slot)
                if tokens is not None:
                    self._keep(forward, layer, "tokens", output, value, tokens.take, tokens.layout)

            self._features.append(make)
            return None if output is first else with_first(given, output)

        return keep

    def keep_activation(self, layer: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Return a callback that keeps a module's output: as tokens if it is `(B, N, D)` and could be traced. Maps are channels first."""
        self._wanted = True

        def keep(_module: nn.Module, _args: object, given: Any) -> Any:  # noqa: ANN401
            first = _first(given)
            if not self.watch.running() or not isinstance(first, Tensor):
                return None
            slot = self.watch.want(first) if first.ndim in (3, 4) else None
            output = self._begun(first)
            value = _owned(output)

            def make(forward: Forward) -> None:
                tokens = forward.tokens(slot)
                if tokens is not None and first.ndim == 3:
                    self._keep(forward, layer, "tokens", output, value, tokens.take, tokens.layout)
                elif tokens is not None and tokens.order is None and len(tokens.layout.grid) == 2:
                    self._keep(forward, layer, "activation", output, value, tokens.maps, tokens.layout)
                else:
                    self._keep(forward, layer, "activation", output, value, torch.Tensor.detach)

            self._features.append(make)
            # the clone keeps its gradient if the model then writes into the output in place, as torchvision's DenseNet does
            return with_first(given, output.clone()) if self._gradients else None

        return keep

    def _begun(self, output: Tensor) -> Tensor:
        """Return `output`; if gradients are needed and it has no graph, detach it and start one here."""
        return output.detach().requires_grad_() if self._gradients and not output.requires_grad else output

    def keep_gate(self, module: nn.Module, role: Role, gate: Tensor, features: Tensor | None) -> None:
        """Keep the gate that a module multiplies its input by."""
        if module not in self._names or not self.watch.running():
            return
        self._wanted = True
        layer = self._names[module]
        if role == "gate" and gate.shape[2:] == (1, 1):  # a module that can also weight locations
            role = "channel_gate"
        axes = {"channel_gate": 1, "branch_gate": 2}.get(role)
        value = _owned(gate if axes is None else gate.flatten(axes))
        placed = role in ("spatial_gate", "gate", "transform", "glimpse")
        slot = self.watch.want(gate if features is None else features) if placed else None
        whole, size = role in ("transform", "glimpse"), gate.shape[2:]

        def make(forward: Forward) -> None:
            tokens = forward.tokens(slot)
            layout = tokens.layout if tokens is not None and tokens.order is None else None
            layout = layout if layout is not None and (whole or layout.grid == size) else None
            self.recording.features.append(FeatureRecord(layer, forward.number, role, value, layout=layout))

        self._features.append(make)

    def _keep(
        self,
        forward: Forward,
        layer: str,
        role: Role,
        output: Tensor,
        value: Tensor,
        take: Callable[[Tensor], Tensor],
        layout: TokenLayout | None = None,
    ) -> None:
        source = Source(output, take) if self._gradients else None
        kept = take(value)
        kept = kept if kept.is_contiguous() else kept.contiguous()
        self.recording.features.append(FeatureRecord(layer, forward.number, role, kept, layout=layout, source=source))

    def finish(self) -> None:
        """Check that the recording is neither empty nor holds NaN or infinite values.

        Raises:
            CaptureError: If the model was not run, received no image, or gave NaN or infinite values.
            NoAttentionCaptured: If no attention was recorded, and neither features nor gates.
        """
        if self.watch.forward < 0:
            raise CaptureError("the model was not run inside the capture. Call model(pixels) inside the with block.")
        if not self.watch.images:
            part = next((record.layer for record in self.recording), "a part of the model")
            what = "the model was given no images" if self.watch.whole else f"{part} ran before the model received an image"
            raise CaptureError(f"{what}. Call the whole model with pixels of shape (B, C, H, W) inside the capture.")
        if not self.recording.records and not self._wanted:
            raise NoAttentionCaptured(_why_nothing(self._model, self._layers, list(self._passed_by), self.recording.unseen))
        self._sums.check(self.recording)


class _Stream(NamedTuple):
    """Input of a module, and its slot."""

    value: Tensor
    slot: int | None


def _owned(tensor: Tensor) -> Tensor:
    """Return a detached copy, hidden from function modes."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return own(tensor)


def _first(given: Any) -> Any:  # noqa: ANN401
    """Return a module's output, or the first part of it."""
    return given[0] if isinstance(given, (tuple, list)) and given else given


def _why_nothing(model: nn.Module, layers: str, passed_by: list[str], unseen: Sequence[UnseenAttention]) -> str:
    if passed_by:
        return f"no attention captured: no layer name matches {printable(layers)!r}. The model's attention layers: {', '.join(passed_by)}."
    kinds = _kinds_without_matrix(model)
    if unseen:
        return f"no attention captured: {unseen[0].layer or type(model).__name__} {unseen[0].reason}, which cannot be recorded{kinds}."
    return (
        f"no attention captured: no layer of {type(model).__name__} multiplied a softmax with values{kinds}, both computed from the image. "
        "Use method 'gradcam', or 'eigencam' where there is no class."
    )


def _kinds_without_matrix(model: nn.Module) -> str:
    """Name classes that are called attention but compute no attention matrix: linear, additive or bilinear attention, channel gates."""
    kinds = dict.fromkeys(
        type(module).__name__
        for module in model.modules()
        if any(part in type(module).__name__ for part in ("Att", "MSA", "MLA"))
    )
    return f"; its {', '.join(kinds)} weigh tokens without a query x key matrix" if kinds else ""
