"""One capture from start to end: hooks for the pixels and the features, the interception for the attention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from visattn._capture._anatomy import Anatomy
from visattn._capture._arrange import Arrangement, arrange_tokens
from visattn._capture._call import Call, own
from visattn._capture._eager import uncompiled
from visattn._capture._finite import Sums, sums_to_one
from visattn._capture._follow import Follower
from visattn._capture._locate import by_rule, locate
from visattn._capture._mode import CaptureMode
from visattn._capture._remember import Way, key_of, remember, sizes_of, way_of
from visattn._checks import printable
from visattn.errors import CaptureError, NoAttentionCaptured, UnsupportedModel
from visattn.records import AttentionRecord, FeatureRecord, Recording, Source

Features = str | Sequence[str]  # last, all, none, or globs of module names


@contextmanager
def record(
    model: nn.Module, anatomy: Anatomy, *, layers: str, values: bool, features: Features, gradients: bool
) -> Iterator[Recording]:
    """Record the forward passes of `model` inside the `with`; see `visattn.capture`."""
    if not isinstance(model, nn.Module):
        hint = (  # type: ignore[unreachable]
            ". Pass its .module()" if isinstance(model, torch.export.ExportedProgram) else ""
        )
        raise UnsupportedModel(f"a model must be a torch.nn.Module, got {type(model).__name__}{hint}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModel("a TorchScript model runs outside Python and shows no attention. Use the original module.")
    tokens, activations = _chosen(model, anatomy, features)
    with ExitStack() as stack:
        session = _Session(model, anatomy, layers, values, gradients)
        stack.callback(model.register_forward_pre_hook(session.enter, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(session.leave, always_call=True).remove)
        for child in model.children():
            stack.callback(child.register_forward_pre_hook(session.enter_part).remove)
        for name, module in tokens.items():
            stack.callback(module.register_forward_hook(session.keep_tokens(name)).remove)
        for name, module in activations.items():
            stack.callback(module.register_forward_hook(session.keep_activation(name)).remove)
        stack.enter_context(uncompiled())
        stack.enter_context(session.mode)
        yield session.recording
    session.finish()


def _chosen(model: nn.Module, anatomy: Anatomy, features: Features) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Modules whose tokens are kept, and modules whose activations are."""
    known = dict(anatomy.tokens)
    if features in ("last", "all", "none"):
        return ({} if features == "none" else dict(list(known.items())[-1:]) if features == "last" else known), {}
    patterns = [features] if isinstance(features, str) else list(features)
    found = {
        name: module for name, module in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns) and name
    }
    if not found:
        raise CaptureError(f"no module's name matches {printable(', '.join(patterns))!r}. See model.named_modules().")
    return {}, found


class _Session:
    """The state between the start and the end of a capture."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, layers: str, values: bool, gradients: bool) -> None:
        self.recording = Recording(readout=anatomy.readout, captured=layers, provenance=anatomy.provenance)
        self.mode = CaptureMode(model, self.receive)
        self._model, self._anatomy, self._layers, self._values, self._gradients = model, anatomy, layers, values, gradients
        self._thread = threading.get_ident()
        self._calls: Counter[str] = Counter()
        self._sums = Sums()
        self._tokens: list[str] = []  # layers whose tokens are kept
        self._passed_by: dict[str, None] = {}  # names of layers that were not to be kept, in order
        self._forward, self._inside = -1, False
        self._key: Hashable = None  # of this forward, where it is to be remembered
        self._known: Way | None = None  # from an earlier forward
        self._way = Way()  # of this one

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """A forward of the whole model begins."""
        if self._elsewhere():
            return None
        pixels = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4), None)
        if pixels is None:
            raise CaptureError("the model was given no images. Pass pixels of shape (B, C, H, W).")
        self._inside = True
        given = self._watched(pixels)
        self._start(given, key_of(self._model, pixels, (args, kwargs, self._tokens)))
        if given is pixels:
            return None
        return tuple(given if x is pixels else x for x in args), {k: given if x is pixels else x for k, x in kwargs.items()}

    def enter_part(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """A part runs; if the model as a whole does not, it may be the first, as in `model.forward_features(pixels)`."""
        if self._inside or self._elsewhere() or not args or self._anatomy.place is not None:
            return
        new = isinstance(args[0], Tensor) and args[0].ndim == 4 and args[0].shape[1] <= 4
        if new and (self.mode.follower is None or self.mode.follower.of(args[0]) is None):
            self._start(args[0], None)

    def _start(self, pixels: Tensor, key: Hashable) -> None:
        self._forward += 1
        self._calls.clear()
        self.recording.input_size = int(pixels.shape[-2]), int(pixels.shape[-1])
        self._key, self._way, self._known, self.mode.follower = key, Way(), None, None
        if self._anatomy.place is None:
            self._known = way_of(self._model, key) if key is not None else None
            self.mode.follower = Follower(self._model, pixels) if self._known is None else None

    def _watched(self, pixels: Tensor) -> Tensor:
        """Pixels that need gradients, where frozen parameters would not give a graph to every layer."""
        if not self._gradients:
            return pixels
        if not torch.is_grad_enabled():
            raise CaptureError("gradients were asked for, but the model runs under no_grad or inference_mode. Run it without.")
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if not (trained and all(trained)) and pixels.is_floating_point() and not pixels.requires_grad:
            return pixels.detach().requires_grad_()
        return pixels

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        """A forward of the whole model ends; it gives nothing where it failed."""
        if self._elsewhere():
            return
        self._inside = False
        follower, self.mode.follower = self.mode.follower, None
        if follower is not None and not follower.chosen_by_data and self._key is not None and output is not None:
            remember(self._model, self._key, self._way)
        self._key = None

    def receive(self, layer: str, owner: nn.Module, call: Call, out: Tensor) -> None:
        """An attention call was made."""
        if self._forward < 0:
            raise CaptureError(f"{layer} ran before the model saw an image. Call the whole model inside the capture.")
        number = self._calls[layer]
        self._calls[layer] += 1
        if self._gradients and not torch.is_grad_enabled():
            raise CaptureError(
                f"gradients were asked for, but {layer} runs under no_grad, as in a reentrant checkpoint. Run it without."
            )
        arrangement, follows = self._arranged(layer, number, owner, call, out)
        if not fnmatchcase(layer, self._layers):
            self._passed_by[layer] = None
            return
        operator = call.operator(arrangement)
        self._sums.add(operator)
        self.recording.records.append(
            AttentionRecord(
                layer=layer,
                call=number,
                forward=self._forward,
                kind=arrangement.kind,
                operator=operator,
                queries=arrangement.queries,
                keys=arrangement.keys,
                value=call.values(arrangement) if self._values else None,
                output_weight=self._anatomy.output_weight(owner),
                probability=sums_to_one(operator),
                follows=follows,
                reason=arrangement.reason,
                source=call.source(arrangement) if self._gradients else None,
            )
        )

    def _arranged(
        self, layer: str, number: int, owner: nn.Module, call: Call, out: Tensor
    ) -> tuple[Arrangement, tuple[str, int] | None]:
        if self._anatomy.place is not None:
            return by_rule(self._anatomy.place(owner, call.rows, call.columns, self.recording.input_size), call), None
        follower = self.mode.follower
        if follower is None:
            assert self._known is not None  # noqa: S101 - one of the two is there
            return self._known.recall(layer, number, call)
        arrangement, follows = locate(follower, call, self._anatomy.answers_at_keys(owner))
        if arrangement.kind != "channel":  # that mixes no tokens
            follower.passed(out, layer, number)
        self._way.calls[layer, number] = sizes_of(call), arrangement, follows
        return arrangement, follows

    def keep_tokens(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        """A hook that keeps the tokens that a module gives."""
        self._tokens.append(layer)

        def hook(_module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            if self._elsewhere() or self._forward < 0 or not isinstance(output, Tensor):
                return
            number = self._calls[f"tokens of {layer}"]
            self._calls[f"tokens of {layer}"] += 1
            follower = self.mode.follower
            if follower is not None:
                places = follower.of(output)
                with torch._C.DisableTorchFunction():  # a hook runs under the mode, which must not follow this
                    self._way.tokens[layer, number] = None if places is None else arrange_tokens(follower.planes, places.codes)
            tokens = (self._known or self._way).tokens.get((layer, number))
            if tokens is not None:
                value = own(tokens.take(output))
                self.recording.features.append(
                    FeatureRecord(
                        layer, self._forward, "tokens", value, layout=tokens.layout, source=self._source(output, tokens.take)
                    )
                )

        return hook

    def keep_activation(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        """A hook that keeps what a module gives."""

        def hook(_module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            output = output[0] if isinstance(output, (tuple, list)) and output else output
            if not self._elsewhere() and self._forward >= 0 and isinstance(output, Tensor):
                self.recording.features.append(
                    FeatureRecord(
                        layer, self._forward, "activation", own(output), source=self._source(output, torch.Tensor.detach)
                    )
                )

        return hook

    def _elsewhere(self) -> bool:
        """Whether a hook runs in no forward of ours: in another thread, or in a backward pass that computes layers again."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0

    def _source(self, output: Tensor, take: Callable[[Tensor], Tensor]) -> Source | None:
        return Source(output, take) if self._gradients else None

    def finish(self) -> None:
        """Refuse a recording that is empty or not finite."""
        if self._forward < 0:
            raise CaptureError("the model was not run inside the capture. Call model(pixels) inside the with block.")
        if not self.recording.records and not any(f.role == "activation" for f in self.recording.features):
            raise NoAttentionCaptured(_why_nothing(self._model, self._layers, list(self._passed_by)))
        self._sums.check(self.recording)


def _why_nothing(model: nn.Module, layers: str, passed_by: list[str]) -> str:
    if passed_by:
        return f"no attention captured: no layer's name matches {printable(layers)!r}; the model's are {', '.join(passed_by)}."
    return f"no attention captured: no layer of {type(model).__name__} multiplied a softmax with values{_kinds_without_matrix(model)}."


def _kinds_without_matrix(model: nn.Module) -> str:
    """Layers that are called attention but make no matrix: linear, additive and bilinear ones, and channel gates."""
    kinds = dict.fromkeys(
        type(module).__name__
        for module in model.modules()
        if any(part in type(module).__name__ for part in ("Att", "MSA", "MLA"))
    )
    return f"; its {', '.join(kinds)} weigh tokens without a query x key matrix" if kinds else ""
