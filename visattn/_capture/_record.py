"""One capture from start to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from visattn._capture._anatomy import Anatomy
from visattn._capture._call import Call, own
from visattn._capture._finite import Sums
from visattn._capture._gates import telling
from visattn._capture._watch import Watch
from visattn._checks import printable
from visattn._publish import listening
from visattn._types import Role
from visattn.errors import CaptureError, NoAttentionCaptured, OptionError
from visattn.records import AttentionRecord, FeatureRecord, Recording, Source, TokenLayout

Features = str | Sequence[str]  # last, all, none, or globs of module names


@contextmanager
def record(
    model: nn.Module, anatomy: Anatomy, *, layers: str, values: bool, features: Features, gradients: bool
) -> Iterator[Recording]:
    """Record the forward passes of `model` inside the `with`; see `visattn.capture`."""
    session = _Session(model, anatomy, layers, values, gradients)
    tokens, activations = _chosen(model, anatomy, features)
    with ExitStack() as stack:
        for name, module in session.streams():
            stack.callback(module.register_forward_pre_hook(session.keep_stream(name)).remove)
        for name, module in tokens.items():
            stack.callback(module.register_forward_hook(session.keep_tokens(name)).remove)
        for name, module in activations.items():
            stack.callback(module.register_forward_hook(session.keep_activation(name)).remove)
        stack.enter_context(telling(model, session.keep_gate))
        stack.enter_context(listening(session.keep_gate))
        stack.enter_context(session.watch.watching())
        yield session.recording
    session.finish()


def _chosen(model: nn.Module, anatomy: Anatomy, features: Features) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Modules whose tokens are kept, and modules whose activations are."""
    known = dict(anatomy.tokens)
    if features in ("last", "all", "none"):
        return ({} if features == "none" else dict(list(known.items())[-1:]) if features == "last" else known), {}
    patterns = [features] if isinstance(features, str) else list(features)
    found = {name: part for name, part in model.named_modules() if name and any(fnmatchcase(name, one) for one in patterns)}
    if not found:
        raise OptionError(f"no module's name matches {printable(', '.join(patterns))!r}. See model.named_modules().")
    return {}, found


class _Session:
    """The recording and what fills it."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, layers: str, values: bool, gradients: bool) -> None:
        self.recording = Recording(readout=anatomy.readout, captured=layers, provenance=anatomy.provenance)
        whole = values or gradients  # more than operands
        self.watch = Watch(model, anatomy, self._receive, keeps=None if whole else self._matches)
        self.watch.needs_gradients = gradients
        self._model, self._anatomy, self._layers, self._values, self._gradients = model, anatomy, layers, values, gradients
        self._sums = Sums()
        self._passed_by: dict[str, None] = {}  # names of layers that were not to be kept, in order
        self._wanted = False  # whether features were asked for by name, or gates were met
        self._stream: dict[str, tuple[Tensor, TokenLayout]] = {}  # what last went into modules that attention is added to
        self._names = {module: name for name, module in model.named_modules()}

    def _receive(self, layer: str, owner: nn.Module, call: Call) -> None:
        number = self.watch.number(layer)
        if self._gradients and not torch.is_grad_enabled():
            raise CaptureError(
                f"gradients were asked for, but {layer} runs under no_grad, as in a reentrant checkpoint. Run it without."
            )
        arrangement, follows = self.watch.arranged(layer, number, owner, call)
        self.watch.passed(layer, number, arrangement.kind, call)
        if not self._matches(layer):
            self._passed_by[layer] = None
            return
        operator = call.operator(arrangement)
        self._sums.add(operator)
        self.recording.input_size = self.watch.input_size
        self.recording.records.append(
            AttentionRecord(
                layer=layer,
                call=number,
                forward=self.watch.forward,
                kind=arrangement.kind,
                operator=operator,
                queries=arrangement.queries,
                keys=arrangement.keys,
                value=call.values(arrangement) if self._values else None,
                output_weight=self._anatomy.output_weight(owner),
                residual=self._residual(owner, arrangement.queries) if self._values else None,
                follows=follows,
                reason=arrangement.reason,
                source=call.source(arrangement) if self._gradients else None,
            )
        )

    def _matches(self, layer: str) -> bool:
        return self._layers == "*" or fnmatchcase(layer, self._layers)

    def streams(self) -> list[tuple[str, nn.Module]]:
        """Modules to whose input attention is added; none where that is not wanted."""
        if not self._values or self._anatomy.place is not None:
            return []
        parts = dict(self._model.named_modules())
        names = dict.fromkeys(filter(None, map(self._anatomy.adds_to, parts.values())))
        return [(name, parts[name]) for name in names]

    def keep_stream(self, name: str) -> Callable[[nn.Module, Any], None]:
        """A hook that keeps the tokens that go into a module."""
        self.watch.tokens_of.append(f"into {name}")

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            tokens = self.watch.tokens(f"into {name}", args[0]) if self.watch.running() else None
            if tokens is not None:
                self._stream[name] = own(tokens.take(args[0])), tokens.layout

        return hook

    def _residual(self, owner: nn.Module, queries: TokenLayout) -> Tensor | None:
        stream, layout = self._stream.pop(self._anatomy.adds_to(owner) or "", (None, None))
        return stream if layout == queries else None

    def keep_tokens(self, layer: str) -> Callable[[nn.Module, Any, Any], Any]:
        """A hook that keeps the tokens that a module gives."""
        self.watch.tokens_of.append(layer)

        def hook(_module: nn.Module, _args: object, given: Any) -> Any:  # noqa: ANN401
            if not self.watch.running() or not isinstance(given, Tensor):
                return None
            output = self._begun(given)
            tokens = self.watch.tokens(layer, given)
            if tokens is not None:
                self._keep(layer, "tokens", output, tokens.take, tokens.layout)
            return None if output is given else output

        return hook

    def keep_activation(self, layer: str) -> Callable[[nn.Module, Any, Any], Any]:
        """A hook that keeps what a module gives: as tokens where it is `(B, N, D)` and could be followed, maps channels first."""
        self._wanted = True
        self.watch.tokens_of.append(layer)

        def hook(_module: nn.Module, _args: object, given: Any) -> Any:  # noqa: ANN401
            first = given[0] if isinstance(given, (tuple, list)) and given else given
            if not self.watch.running() or not isinstance(first, Tensor):
                return None
            output = self._begun(first)
            tokens = self.watch.tokens(layer, first) if first.ndim in (3, 4) else None
            if tokens is not None and first.ndim == 3:
                self._keep(layer, "tokens", output, tokens.take, tokens.layout)
            elif tokens is not None and tokens.order is None and len(tokens.layout.grid) == 2:
                self._keep(layer, "activation", output, tokens.maps, tokens.layout)
            else:
                self._keep(layer, "activation", output, torch.Tensor.detach)
            # the gradient is that of what was kept, also where the model writes over it, as torchvision's DenseNet does
            return _replaced(given, output.clone()) if self._gradients else None

        return hook

    def _begun(self, output: Tensor) -> Tensor:
        """`output`, with a graph that begins here where none leads to it and gradients are wanted."""
        return output.detach().requires_grad_() if self._gradients and not output.requires_grad else output

    def keep_gate(self, module: nn.Module, role: Role, gate: Tensor, features: Tensor | None) -> None:
        """Keep what a module's input is multiplied by."""
        if module not in self._names or not self.watch.running():
            return
        self._wanted = True
        layer, layout = self._names[module], None
        if role == "gate" and gate.shape[2:] == (1, 1):  # of a module that may also weigh places
            role = "channel_gate"
        self.recording.input_size = self.watch.input_size
        if role in ("spatial_gate", "gate", "transform", "glimpse"):
            tokens = self.watch.tokens(f"gate of {layer}", gate if features is None else features)
            layout = tokens.layout if tokens is not None and tokens.order is None else None
            whole = role in ("transform", "glimpse")
            layout = layout if layout is not None and (whole or layout.grid == gate.shape[2:]) else None
        axes = {"channel_gate": 1, "branch_gate": 2}.get(role)
        value = own(gate if axes is None else gate.flatten(axes))
        self.recording.features.append(FeatureRecord(layer, self.watch.forward, role, value, layout=layout))

    def _keep(
        self, layer: str, role: Role, output: Tensor, take: Callable[[Tensor], Tensor], layout: TokenLayout | None = None
    ) -> None:
        source = Source(output, take) if self._gradients else None
        self.recording.input_size = self.watch.input_size
        self.recording.features.append(
            FeatureRecord(layer, self.watch.forward, role, own(take(output)), layout=layout, source=source)
        )

    def finish(self) -> None:
        """Refuse a recording that is empty or not finite."""
        if self.watch.forward < 0:
            raise CaptureError("the model was not run inside the capture. Call model(pixels) inside the with block.")
        if not self.recording.records and not self._wanted:
            raise NoAttentionCaptured(_why_nothing(self._model, self._layers, list(self._passed_by)))
        self._sums.check(self.recording)


def _replaced(given: Any, output: Tensor) -> Any:  # noqa: ANN401
    """What a module gave, with its first tensor replaced."""
    if isinstance(given, Tensor):
        return output
    parts = output, *given[1:]
    return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)


def _why_nothing(model: nn.Module, layers: str, passed_by: list[str]) -> str:
    if passed_by:
        return f"no attention captured: no layer's name matches {printable(layers)!r}; the model's are {', '.join(passed_by)}."
    kinds = _kinds_without_matrix(model)
    return (
        f"no attention captured: no layer of {type(model).__name__} multiplied a softmax with values{kinds}. "
        "Use method 'gradcam', or 'eigencam' where there is no class."
    )


def _kinds_without_matrix(model: nn.Module) -> str:
    """Layers that are called attention but make no matrix: linear, additive and bilinear ones, and channel gates."""
    kinds = dict.fromkeys(
        type(module).__name__
        for module in model.modules()
        if any(part in type(module).__name__ for part in ("Att", "MSA", "MLA"))
    )
    return f"; its {', '.join(kinds)} weigh tokens without a query x key matrix" if kinds else ""
