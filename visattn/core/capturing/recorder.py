"""Recording of attention and features while forward passes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.faces import Later
from visattn._support.parts import Parts
from visattn._support.publish import listening
from visattn._support.types import Role
from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.finite import are_finite, check_finite
from visattn.core.capturing.following.conclusions import Conclusions
from visattn.core.capturing.following.tape_readouts import APART, VALUES
from visattn.core.capturing.forward import Forward
from visattn.core.capturing.gates import telling
from visattn.core.capturing.hooks import with_first
from visattn.core.capturing.intercept.calls import Call, FusedCall, own
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.trace.call_tensors import transformed
from visattn.core.capturing.trace.tape import Attention
from visattn.core.capturing.trace.verdicts import Verdict, Verdicts
from visattn.core.capturing.watching import NO_IMAGES, Watch
from visattn.core.records import AttentionRecord, FeatureRecord, Readout, Recording, Source, TokenLayout, UnseenAttention
from visattn.errors import CaptureError, NoAttentionCaptured, OptionError

if TYPE_CHECKING:
    from visattn.core.capturing import no_attention
    from visattn.core.capturing.gating import finder as finding
    from visattn.core.capturing.linear import terms as terms_of
    from visattn.core.capturing.tokens import sharing
else:
    no_attention = Later("visattn.core.capturing.no_attention")
    terms_of = Later("visattn.core.capturing.linear.terms")
    finding, sharing = Later("visattn.core.capturing.gating.finder"), Later("visattn.core.capturing.tokens.sharing")

_OUTPUTS = "tokens", "activation"  # roles of the outputs of modules
Features = str | Sequence[str]  # "last", "all", "none", "positions", or globs of module names


@contextmanager
def record(
    model: nn.Module,
    description: ModelDescription,
    *,
    layers: str,
    values: bool,
    features: Features,
    gradients: bool,
    gates: bool,
    outputs: bool = False,
    remember: bool = True,
    terms: bool = False,
) -> Iterator[Recording]:
    """Record the forward passes of `model` inside the `with` block; see `visattn.capture`."""
    session = _Session(model, description, layers, values, gradients, remember, terms)
    session.keeps_outputs = outputs
    if gates:
        session.watch.gates = session.finder
    tokens, activations = _chosen(session.watch.parts, description, features)
    session.keeps_last, session.keeps_positions = features == "last", features == "positions"
    modules = session.watch.modules
    for name, module in session.streams():
        modules.before.setdefault(module, []).append(session.keep_stream(name))
    for name, module in tokens.items():
        modules.after.setdefault(module, []).append(session.keep_output(name, tokens_alone=True))
    for name, module in activations.items():
        modules.after.setdefault(module, []).append(session.keep_output(name, tokens_alone=False))
    with ExitStack() as stack:
        stack.callback(session.__dict__.pop, "_finder", None)  # which refers to the session
        telling(session.watch.parts, modules, session.keep_gate)
        stack.enter_context(session.watch.watching())
        stack.enter_context(listening(session.keep_gate))
        yield session.recording
    session.finish()


def _chosen(parts: Parts, description: ModelDescription, features: Features) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules whose tokens are kept and the modules whose activations are kept, by name."""
    token_modules = dict(description.tokens)
    if features in ("none", "positions"):
        return {}, {}
    if features == "all":
        return token_modules, {}
    if features == "last":
        last_names = description.ends or tuple(token_modules)[-1:]
        return {name: token_modules[name] for name in last_names}, {}
    patterns = (features,) if isinstance(features, str) else tuple(features)
    numbers = parts.fact(("features", patterns), partial(_matching, patterns))
    matching = {parts.names[number]: parts.modules[number] for number in numbers}
    if not matching:
        raise OptionError(f"no module's name matches {printable(', '.join(patterns))!r}. See model.named_modules().")
    return {}, matching


def _matching(patterns: Sequence[str], parts: Parts) -> list[int]:
    """Return the numbers of the modules whose names match one of the patterns."""
    named = [(number, name) for number, name in enumerate(parts.names) if name]
    return [number for number, name in named if any(fnmatchcase(name, pattern) for pattern in patterns)]


class _Session:
    """Recording in progress. Tensors are copied during a forward pass; records are built from the copies at its end."""

    _finder: finding.GateFinder | None = None

    def __init__(
        self,
        model: nn.Module,
        description: ModelDescription,
        layers: str,
        values: bool,
        gradients: bool,
        remember: bool,
        terms: bool = False,
    ) -> None:
        """Prepare to record; see `visattn.capture` for the choices."""
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
            linear=terms,
        )
        self._terms = terms
        self.watch.ask = self._ask
        self._model, self._description, self._layers = model, description, layers
        self._values, self._gradients = values, gradients
        self.keeps_positions = False  # the table of positions that is added to tokens
        self.keeps_outputs = False  # of attention calls
        self.keeps_last = False  # of the token features of a forward pass, only those of the last branch with a grid
        self._copies: list[Tensor] = []  # what was kept of the running forward pass
        self._finite: list[Verdict] = []  # whether that of each forward pass is finite
        self._passed_by: dict[str, None] = {}  # layers that the glob excludes, in order
        self._wanted = False  # whether features were requested by name, or a gate was found
        self._names = self.watch.names
        self._calls: list[tuple[nn.Module, Call, Attention, _Stream | None, bool]] = []
        self._features: list[Callable[[Forward], None]] = []
        self._stream: dict[str, _Stream] = {}  # last input of each module that attention is added to
        self._told: dict[nn.Module, list[Tensor]] = {}  # gates that modules have told

    def finder(self) -> finding.GateFinder:
        """Return the finder of gates that no module tells."""
        self._finder = self._finder or finding.GateFinder(self._names, self._told, self._keep_factor)
        return self._finder

    def _drop(self) -> None:
        """Discard the copies of a forward pass."""
        self._copies.clear()
        self._calls.clear()
        self._features.clear()
        self._stream.clear()
        if self._finder is not None:
            self._finder.clear()

    def _receive(self, layer: str, owner: nn.Module, call: Call, attention: Attention) -> None:
        """Copy the operands of an attention call that has just run, and the input of the block that it belongs to."""
        if self._gradients and not torch.is_grad_enabled():
            raise CaptureError(
                f"gradients were requested, but {layer or type(owner).__name__} runs where autograd records no graph: under no_grad, "
                "in a torch.autograd.Function, or in a reentrant checkpoint. Avoid that, or capture without gradients."
            )
        wanted = self._layers == "*" or self._matches(layer)
        stream = self._stream.pop(self._description.adds_to(owner) or "", None) if self._values else None
        may_share = attention.fused and call.rows != call.columns and sharing.may_share(call.lead, self.watch.inputs.batch)
        if wanted and self.keeps_outputs:
            call.keep_result()
        call.keep(wanted, values=self._values or self._gradients or may_share, graph=self._gradients)
        if wanted:
            self._copies += call.sources()
        self._calls.append((owner, call, attention, stream, may_share))

    def _ask(self, verdicts: Verdicts) -> None:
        """Ask whether all copies of a forward pass that has ended are finite."""
        if self._copies and not transformed(self._copies):
            self._finite.append(verdicts.on(are_finite(self._copies)))

    def _ended(self, forward: Forward) -> None:
        """Build the records of a forward pass."""
        self.recording.input_size, self.recording.images = forward.inputs
        self.recording.normalizes |= forward.normalizes
        conclusions = forward.conclusions()
        calls, features = list(self._calls), list(self._features)
        if self._terms:
            self._keep_terms(forward)
        self._drop()
        while calls:
            self._record(forward, *calls.pop(0))
        for keep_feature in features:
            keep_feature(forward)
        self._count_calls(forward)
        if self.keeps_last:
            self._keep_last(forward)
        if self.keeps_positions:
            self._keep_positions(forward)
        unseen = {} if conclusions is None else dict(conclusions.unseen)
        if self.watch.hidden:  # these layers already explain the tensors of unknown origin
            unseen.pop("", None)
        unseen.update(self.watch.hidden)
        self.recording.unseen.extend(UnseenAttention(layer, forward.number, reason) for layer, reason in unseen.items())
        if conclusions is not None and not self._description.stated:
            self.recording.readouts[forward.number] = self._read(forward, conclusions)

    def _read(self, forward: Forward, conclusions: Conclusions) -> Readout:
        """Return which tokens the output of this forward pass is computed from, such as the class token or the mean."""
        cut, readouts = conclusions.cut, conclusions.readouts
        if cut is None or readouts is None:
            return Readout()
        shares = readouts.shares(forward.readouts_fit) if cut.pools else None
        pooling_queries = {
            located[0].queries for located in conclusions.calls.values() if located is not None and located[0].kind == "pool"
        }
        why_unknown = VALUES if cut.pools else APART
        readings = []
        for number, part in enumerate(cut.parts):
            if number not in readouts.named:
                readouts.named[number] = Readout(
                    "" if cut.pools else self._description.readout,
                    part.layout,
                    shares=None if shares is None else shares[number],
                    reason=why_unknown if shares is None else "",
                    pools=part.layout in pooling_queries,
                ).named()
            tensor, readout = forward.kept(part.slot), readouts.named[number]
            source = None if tensor is None else Source(tensor, partial(part.take, images=readouts.images))
            readings.append(readout if source is None else replace(readout, source=source))
        have_one_name = len({readout.query for readout in readings}) == 1
        return readings[-1] if have_one_name else Readout(reason="the output is computed from several sets of tokens")

    def _record(
        self, forward: Forward, owner: nn.Module, call: Call, attention: Attention, stream: _Stream | None, may_share: bool
    ) -> None:
        """Add the record of an attention call, unless its layer is not wanted or it turns out to be a gate."""
        layer = attention.layer
        matches = self._layers == "*" or self._matches(layer)
        located = forward.arrangement(call, attention, owner) if matches or attention.doubtful else None
        is_attention = located is not None or not attention.doubtful
        if not matches and is_attention:
            self._passed_by[layer] = None
        if not matches or located is None:
            return
        arrangement, follows = located
        if may_share and isinstance(call, FusedCall):
            arrangement = sharing.merged(arrangement, call.key, call.value)
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
                output=call.output(arrangement) if self.keeps_outputs else None,
                output_weight=self._output_weight(forward, owner, call, attention, arrangement) if self._values else None,
                residual=self._residual(forward, stream, arrangement.queries),
                follows=follows,
                reason=arrangement.why,
                source=call.source(arrangement) if self._gradients else None,
            )
        )

    def _output_weight(
        self, forward: Forward, owner: nn.Module, call: Call, attention: Attention, arrangement: Arrangement
    ) -> Tensor | None:
        """Return the weight of the linear layer behind the heads of a call; None if the description and the tape have none."""
        described = self._description.output_weight(owner)
        return forward.output_weight(call, attention, arrangement) if described is None else described

    def _count_calls(self, forward: Forward) -> None:
        """Number the calls of modules that were called several times in this forward pass."""
        of_pass = Counter(
            feature.layer for feature in self.recording.features if feature.forward == forward.number and feature.role in _OUTPUTS
        )
        seen: Counter[str] = Counter()
        for number, feature in enumerate(self.recording.features):
            calls = of_pass[feature.layer]
            if calls > 1 and feature.forward == forward.number and feature.role in _OUTPUTS:
                self.recording.features[number] = replace(feature, call=seen[feature.layer], calls=calls)
                seen[feature.layer] += 1

    def _keep_terms(self, forward: Forward) -> None:
        """Keep the terms that the output of this forward pass is the sum of."""
        noted = self.watch.linear.noted
        modules = {name: module for module, name in self._names.items()}
        self.recording.terms = terms_of.terms_of(forward.plan(), noted, forward.number, modules)
        noted.clear()

    def _keep_last(self, forward: Forward) -> None:
        """Keep, of the token features of this forward pass, the last that lie on a grid, or the last of all if none do."""
        features = self.recording.features
        of_pass = [feature for feature in features if feature.role == "tokens" and feature.forward == forward.number]
        on_grid = [feature for feature in of_pass if feature.layout is not None and feature.layout.grid]
        last = (on_grid or of_pass)[-1:]
        dropped = set(map(id, of_pass)) - set(map(id, last))
        self.recording.features = [feature for feature in features if id(feature) not in dropped]

    def _keep_positions(self, forward: Forward) -> None:
        """Keep the table of positions that the model adds to its tokens, if there is one."""
        found = forward.positions()
        if found is not None:
            name, table, layout = found
            self.recording.features.append(FeatureRecord(name, forward.number, "positions", table, layout=layout))

    def _matches(self, layer: str) -> bool:
        """Check whether the user asked for this layer."""
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
        """Return the tokens that the result of a call is added to, in the order of its queries; None if they are unknown."""
        tokens = None if stream is None else forward.tokens(stream.slot)
        if stream is None or tokens is None or tokens.layout != queries:
            return None
        return tokens.take(stream.value)

    def keep_output(self, layer: str, *, tokens_alone: bool) -> Callable[[nn.Module, Any, Any], Any]:
        """Return a callback that keeps a module's output: as tokens if it is `(B, N, D)` and could be traced.

        Feature maps whose places were traced are kept with channels first, other outputs as they are. With `tokens_alone`, outputs of
        any shape are kept as tokens, or not at all.
        """
        self._wanted |= not tokens_alone

        def keep(_module: nn.Module, _args: object, result: Any) -> Any:  # noqa: ANN401
            """Copy the output; return another one for the model if gradients are needed here and it has no graph."""
            first = _first(result)
            if not self.watch.running() or not isinstance(first, Tensor):
                return None
            slot = self.watch.want(first) if tokens_alone or first.ndim in (3, 4) else None
            output = self._with_graph(first)
            value = _owned(output)
            self._copies.append(value)

            def keep_feature(forward: Forward) -> None:
                """Keep the copy, when the forward pass has ended and its tokens are located."""
                tokens = forward.tokens(slot)
                if tokens is not None and (tokens_alone or first.ndim == 3):
                    self._keep(forward, layer, "tokens", output, value, tokens.take, tokens.layout)
                elif tokens is not None and tokens.order is None and len(tokens.layout.grid) == 2:
                    self._keep(forward, layer, "activation", output, value, tokens.maps, tokens.layout)
                elif not tokens_alone:
                    self._keep(forward, layer, "activation", output, value, torch.Tensor.detach)

            self._features.append(keep_feature)
            if tokens_alone:
                return None if output is first else with_first(result, output)
            # the clone keeps its gradient if the model then writes into the output in place, as torchvision's DenseNet does
            return with_first(result, output.clone()) if self._gradients else None

        return keep

    def _with_graph(self, output: Tensor) -> Tensor:
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
        first_flattened_axis = {"channel_gate": 1, "branch_gate": 2}.get(role)
        value = _owned(gate if first_flattened_axis is None else gate.flatten(first_flattened_axis))
        self._copies.append(value)
        self._told.setdefault(module, []).append(value)
        has_places = role in ("spatial_gate", "gate", "transform", "glimpse", "window")
        slot = self.watch.want(gate if features is None else features) if has_places else None
        is_of_whole_map = role in ("transform", "glimpse")
        size = (features if role == "window" and features is not None else gate).shape[2:]

        def keep_feature(forward: Forward) -> None:
            """Add the gate to the recording, with the grid that its values lie on, if that was traced."""
            tokens = forward.tokens(slot)
            layout = tokens.layout if tokens is not None and tokens.order is None else None
            layout = layout if layout is not None and (is_of_whole_map or layout.grid == size) else None
            self.recording.features.append(FeatureRecord(layer, forward.number, role, value, layout=layout))

        self._features.append(keep_feature)

    def _keep_factor(self, factor: Tensor, product: Tensor, record: finding.Record) -> Tensor:
        """Copy a gate that features are multiplied by, to record it when the forward pass has ended; return the copy."""
        value, slot, self._wanted = _owned(factor), self.watch.want(product), True
        self._copies.append(value)
        self._features.append(lambda forward: self.recording.features.extend(record(forward, slot)))
        return value

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
        """Add a feature to the recording; `take` brings its copy `value` into the order of the layout."""
        source = Source(output, take) if self._gradients else None
        kept = take(value)
        kept = kept if kept.is_contiguous() else kept.contiguous()
        self.recording.features.append(FeatureRecord(layer, forward.number, role, kept, layout=layout, source=source))

    def finish(self) -> None:
        """Check that the recording is neither empty nor holds NaN or infinite values.

        Raises:
            CaptureError: If the model was not run, returned no output, received no image, or gave NaN or infinite values.
            NoAttentionCaptured: If no attention was recorded, and neither features nor gates.
        """
        if self.watch.forward < 0:
            raise CaptureError(
                "the model was not run inside the capture by this thread. Call model(pixels) inside the with block."
            )
        if not self.watch.images:
            part = next((record.layer for record in self.recording), "a part of the model")
            problem = f"the model was given {NO_IMAGES}" if self.watch.whole else f"{part} ran before the model received an image"
            raise CaptureError(f"{problem}. Call the whole model with floating-point pixels (B, C, H, W) inside the capture.")
        is_empty = not self.recording.records and not self._wanted
        if is_empty and not self.watch.ended:
            raise CaptureError(
                "no forward pass inside the capture returned an output. Mend the error that the model raises, or let it return its output."
            )
        if is_empty:
            raise NoAttentionCaptured(no_attention.why(self._model, self._layers, self._passed_by, self.recording.unseen))
        for is_finite in self._finite:
            if not is_finite():
                check_finite(self.recording)


class _Stream(NamedTuple):
    """Input of a module, and its slot."""

    value: Tensor
    slot: int | None


def _owned(tensor: Tensor) -> Tensor:
    """Return a detached copy, hidden from function modes."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return own(tensor)


def _first(result: Any) -> Any:  # noqa: ANN401
    """Return a module's output, or the first part of it."""
    return result[0] if isinstance(result, (tuple, list)) and result else result
