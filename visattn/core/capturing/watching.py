"""Observation of forward passes: when each begins and ends, its attention calls, and the locations of their tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn._support.parts import Parts, parts_of
from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.following.conclusions import Conclusions, Located, concluded
from visattn.core.capturing.following.received import batch_of, packed_size
from visattn.core.capturing.forward import Forward, Inputs, placed
from visattn.core.capturing.hooks import ModuleCalls, keywords, running
from visattn.core.capturing.intercept.calls import Call
from visattn.core.capturing.intercept.mode import CaptureMode, Receive, Replace
from visattn.core.capturing.intercept.no_compile import uncompiled
from visattn.core.capturing.intercept.running_module import Owners
from visattn.core.capturing.placing.weak import exchanging
from visattn.core.capturing.trace.tape import TAPES, Attention, Tape
from visattn.core.capturing.trace.tracer import Tracer
from visattn.core.capturing.trace.verdicts import Verdict, Verdicts
from visattn.errors import CaptureError, UnsupportedModel

if TYPE_CHECKING:
    from visattn._support import nested
    from visattn.core.capturing.gating.finder import GateFinder
    from visattn.core.capturing.linear import mode as linear_mode
else:
    linear_mode = Later("visattn.core.capturing.linear.mode")
    nested = Later("visattn._support.nested")

# a TorchScript part that calls one of these may compute attention
_COMPOSED = ("softmax", "scaled_dot_product_attention", "bmm", "matmul")

PICTURE: ContextVar[Tensor | None] = ContextVar("the one of several images that tokens are traced from", default=None)

NO_IMAGES = "no floating-point tensor of shape (B, C, H, W) as argument"


class Watch:
    """State of the running forward pass.

    Attributes:
        forward: Index of the running forward pass; -1 before the first.
        ended: Whether any forward pass returned an output.
        images: Whether any forward pass received an image.
        inputs: Images that the latest forward pass received.
        whole: Whether the whole model was called, and not only a part of it.
        ask: Called when a forward pass has ended, to ask for values that are read together.
        gates: Returns the finder of gates, where there may be one; None if gates are not asked for.
        parts: Modules of the model.
        modules: Callbacks that run before and after module calls.
    """

    def __init__(
        self,
        model: nn.Module,
        description: ModelDescription,
        receive: Receive,
        replace: Replace | None = None,
        *,
        finish: Callable[[Forward], None] = lambda _: None,
        drop: Callable[[], None] = lambda: None,
        remember: bool = True,
        gradients: bool = False,
        vectors: bool = False,
        linear: bool = False,
    ) -> None:
        """Prepare to observe a model; the model itself is not modified.

        Args:
            model: Model to observe.
            description: Facts about the model.
            receive: See `CaptureMode`.
            replace: See `CaptureMode`.
            finish: Called when a forward pass has ended and its tape is complete.
            drop: Called when a forward pass has failed.
            remember: Whether a forward pass may reuse the conclusions of an earlier one with the same tape.
            gradients: Whether every attention call must have an autograd graph.
            vectors: Whether calls get the operands of their scores, where the model writes them out.
            linear: Whether the graph is linear, see `LinearMode`.

        Raises:
            UnsupportedModel: If `model` is not a `torch.nn.Module`, or runs outside Python.
        """
        if not isinstance(model, nn.Module):
            hint = ". Pass its .module()" if isinstance(model, torch.export.ExportedProgram) else ""  # type: ignore[unreachable]
            raise UnsupportedModel(f"a model must be a torch.nn.Module, got {type(model).__name__}{hint}.")
        if isinstance(model, torch.jit.ScriptModule):
            raise UnsupportedModel(
                "a TorchScript model runs outside Python, so nothing inside it can be captured. Use the original module."
            )
        self.forward, self.ended, self.images, self.whole = -1, False, False, False
        self.modules = ModuleCalls()
        self._model, self._description, self._finish, self._drop = model, description, finish, drop
        self._remember, self._gradients, self._linear = remember, gradients, linear
        self.parts = parts_of(model)
        self.ask: Callable[[Verdicts], None] | None = None
        self.gates: Callable[[], GateFinder] | None = None
        mode = linear_mode.LinearMode if linear else CaptureMode
        self._mode: CaptureMode = mode(Owners(self.parts), receive, replace, description.answers_at_keys, vectors=vectors)
        self._depth = 0
        self._part: nn.Module | None = None  # the part that was called directly, without the whole model
        self.inputs = Inputs()
        self._partial: Conclusions | None = None  # of the running forward pass, if layouts were needed before its end
        self._slots: set[int] = set()  # slots whose tokens were requested
        upper, scripted = self.parts.fact(_roles, _roles)
        self._parts = frozenset(map(self.parts.modules.__getitem__, upper))
        self._scripted = frozenset(map(self.parts.modules.__getitem__, scripted))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forward passes inside the `with` block, then remove every hook."""
        before, after, outside = self.modules.before, self.modules.after, self.modules.outside
        for module in (self._model, *self._scripted):
            before.setdefault(module, []).insert(0, self._begun)
        for part in self._parts - self._scripted:
            outside[part] = [self._begun]
        after.setdefault(self._model, []).append(self._left)
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.enter_context(uncompiled())
            stack.enter_context(exchanging(self._exchanged))
            stack.enter_context(self._mode)
            stack.enter_context(self.modules.watched())
            yield
            self._end(None)

    def _exchanged(self, tensor: Tensor) -> None:
        """Tell the tracer that a tensor was given other memory, as `torch.utils.swap_tensors` does."""
        tracer = self._mode.tracer
        if tracer is not None:
            tracer.exchanged(tensor)

    def _clear(self) -> None:
        """Break all reference cycles, so that nothing waits for the garbage collector."""
        self._mode.tracer = self._mode.twin = None
        for callbacks in (self.modules.before, self.modules.after, self.modules.outside):
            callbacks.clear()
        for name in ("_mode", "_finish", "_drop", "ask", "gates"):
            self.__dict__.pop(name, None)

    @property
    def linear(self) -> linear_mode.LinearMode:
        """The mode that intercepts the calls of a pass with a linear graph."""
        return cast("linear_mode.LinearMode", self._mode)

    def running(self) -> bool:
        """Check whether a forward pass of this model is running in this thread."""
        return not self.modules.elsewhere() and self._mode.tracer is not None

    @property
    def names(self) -> Mapping[nn.Module, str]:
        """Names of the model's modules."""
        return self._mode.owners.names

    @property
    def hidden(self) -> Mapping[str, str]:
        """Layers whose attention cannot be recorded, and why."""
        return self._mode.hidden

    def arranged(self, call: Call, attention: Attention, owner: nn.Module) -> Located | None:
        """Return the arrangement of a call that is about to run, and the layer and call that it follows; None if it is a gate.

        Raises:
            LayoutError: If the tokens are placed by a rule that does not fit.
        """
        if self._description.place is not None:
            return placed(self._description.place, call, attention, owner, self.inputs)
        tracer = self._mode.tracer
        assert tracer is not None  # noqa: S101 - a forward pass is running
        tracer.settle()
        if tracer.known:  # the same as that tape so far, and locations do not depend on later operations
            return concluded(tracer.tape, self._slots).calls[attention]
        if self._partial is None:
            self._partial = Conclusions(tracer.tape)
        with torch._C.DisableTorchFunction():
            return self._partial.of_call(tracer.tape, attention)

    def leave(self) -> None:
        """Let the rest of the running forward pass of the whole model run without interception, if it agrees with a known tape so far."""
        tracer = self._mode.tracer
        if tracer is not None and tracer.known and self._part is None:
            self._mode.tracer = self._mode.twin = None
            self._mode.held.clear()
            tracer.release()

    def want(self, tensor: Tensor) -> int | None:
        """Request the tokens of a tensor of the running forward pass; return its slot, the argument of `Forward.tokens`."""
        slot = None if self._mode.tracer is None else self._mode.tracer.slot_of(tensor)
        if slot is not None:
            self._slots.add(slot)
        return slot

    # --- begin and end of forward passes

    def _begun(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a forward pass when the whole model is called, or a part of it alone, such as `model.encoder(pixels)`.

        A part that is called with tensors of the running forward pass continues that one.
        """
        is_scripted = module in self._scripted and self._mode.tracer is not None
        if is_scripted and any(word in str(module.inlined_graph) for word in _COMPOSED):
            self._mode.hidden[self._name(module)] = "is compiled by TorchScript"
        if module is self._model:
            self._depth, self.whole = running(module), True
            if self._depth == 1:
                self._end(None)
                self._part = None
                self.modules.follow()
                self._start(args, keywords())
            return
        is_other_part = self._part is not None and self._part is not module
        if self._depth or module not in self._parts or is_other_part:
            return
        first = next((x for x in args if isinstance(x, Tensor)), None)
        tracer = self._mode.tracer
        if tracer is not None:
            if first is None or first.ndim != 4:
                return
            slot = tracer.slot_of(first)
            comes_from_image = slot is not None and slot in tracer.tape.descends
            if comes_from_image:
                return
        self._end(None)
        self._part = module
        self.modules.follow_part()
        self._start(args, keywords())

    def _name(self, module: nn.Module) -> str:
        """Return the name of a module; empty for the model itself."""
        return self.names.get(module, "")

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Start a forward pass with these arguments of the model: find the images among them, and trace from there."""
        inputs = [(name, x) for name, value in (*enumerate(args), *kwargs.items()) for x in _tensors(value)]
        packed = _packed(inputs)
        pixels, grids = (_pixels(inputs), ()) if packed is None else packed
        self.forward += 1
        self._mode.gates = self.gates
        self._mode.calls.clear()
        self._mode.hidden.clear()
        self._partial = self._mode.twin = None
        self._slots.clear()
        self.inputs = Inputs()
        candidates = TAPES.of(self._model) if self._remember else []
        candidates = candidates if self.gates is None else list(filter(attrgetter("gated"), candidates))
        if pixels is not None:
            self.images = True
            self.inputs = Inputs((int(pixels.shape[-2]), int(pixels.shape[-1])), len(pixels))
            if packed is not None:
                self.inputs = Inputs(packed_size(pixels.shape, grids), batch_of(pixels.shape))
            twin = self._with_gradients(pixels, candidates)
            if twin is not pixels:
                self._mode.twin = pixels, twin
                inputs, pixels = [(name, twin if x is pixels else x) for name, x in inputs], twin
        self._mode.tracer = Tracer(
            pixels,
            [(str(name), x) for name, x in inputs],
            self.names,
            self._layer,
            candidates,
            grids,
            keep=self._gradients,
        )

    def _layer(self) -> str:
        """Return the name of the module that runs now."""
        owner = self._mode.owners.current()
        return "" if owner is None else owner[0]

    def _with_gradients(self, pixels: Tensor, candidates: Sequence[Tape]) -> Tensor:
        """Return pixels that require gradients if some attention calls would have no graph because parameters are frozen."""
        if not self._gradients:
            return pixels
        if self._linear:
            return self.linear.begin(pixels)
        if not torch.is_grad_enabled():
            raise CaptureError(
                "gradients were requested, but the model runs under no_grad or inference_mode. Run it with autograd enabled."
            )
        # a model without attention: each feature starts its own graph
        if candidates and not self._attends(candidates[0]):
            return pixels
        require_gradients = [parameter.requires_grad for parameter in self.parts.parameters()]
        all_are_trained = bool(require_gradients) and False not in require_gradients
        if all_are_trained or pixels.requires_grad:
            return pixels
        return pixels.detach().requires_grad_()

    def _attends(self, tape: Tape) -> bool:
        """Check whether a forward pass computed attention, gates apart."""
        calls = [entry.attention for entry in tape.entries if entry.attention is not None]
        all_may_be_gates = all(attention.doubtful for attention in calls)
        if self._description.place is not None or not all_may_be_gates:
            return bool(calls)
        return any(concluded(tape, self._slots).calls.values())

    def _left(self, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        """End a forward pass of the whole model; `output` is None if it failed."""
        self._depth -= 1
        if not self._depth:
            self.modules.wait(after_failure=output is None)
            self._end(output)

    def _end(self, output: Any) -> None:  # noqa: ANN401
        """End the running forward pass, if there is one, and hand its tape over.

        `output` is what the model returned; None if it raised an error: then the forward pass is dropped. If only a part of the model
        was called, its output is not known, and a forward pass ends when the next one begins.
        """
        tracer, self._mode.tracer, self._mode.twin = self._mode.tracer, None, None
        self._mode.held.clear()
        if tracer is None:
            return
        if output is None and self._part is None:
            tracer.release()
            self._drop()
            return
        self.ended = True
        with torch._C.DisableTorchFunction(), torch.no_grad():
            answer = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
            known, readouts_fit = tracer.tape if tracer.known else None, self._asked(tracer)
            tape, place = tracer.finished(_tensors(answer)), self._description.place
            tape.gated |= self.gates is not None
            if place is None and self._partial is not None and not tracer.known:
                tape.conclusions = self._partial.completed(tape)
            if self._remember and tape.whole:
                TAPES.keep(self._model, tape)
            forward = Forward(self.forward, self.inputs, tape, place, self._slots, tracer.used, tracer.kept)
            forward.readouts_fit = readouts_fit if tape is known else None
            self._finish(forward)
            tracer.release()

    def _asked(self, tracer: Tracer) -> Verdict | None:
        """Ask for all values that must be known, which are read together; return whether the readouts of the known tape still fit."""
        verdicts = Verdicts()
        if self.ask is not None:
            self.ask(verdicts)
        if not tracer.known:
            return None
        tracer.comparison.ask(verdicts)
        readouts = getattr(tracer.tape.conclusions, "readouts", None)
        return None if readouts is None else readouts.ask(verdicts)


def _roles(parts: Parts) -> tuple[list[int], list[int]]:
    """Return the numbers of the parts that may be called alone, as `model.encoder` is, and of those that TorchScript runs."""
    upper, scripted = list[int](), list[int]()
    for number, (part, name) in enumerate(zip(parts.modules, parts.names, strict=True)):
        if name and name.count(".") < 2:
            upper.append(number)
        if isinstance(part, torch.jit.ScriptModule):
            scripted.append(number)
    return upper, scripted


def _pixels(inputs: Sequence[tuple[object, Tensor]]) -> Tensor | None:
    """Return the images `(B, C, H, W)` or clips `(B, T, C, H, W)` among the inputs; one that was chosen or is named so comes first."""
    picture = PICTURE.get()
    if picture is not None and any(x is picture for _, x in inputs):
        return picture
    candidates = [(name, x) for name, x in inputs if x.ndim in (4, 5) and x.is_floating_point()]
    named = [x for name, x in candidates if _IMAGES.search(str(name))]
    return next(iter((*named, *(x for _, x in candidates))), None)


def _packed(inputs: Sequence[tuple[object, Tensor]]) -> tuple[Tensor, tuple[tuple[int, ...], ...]] | None:
    """Return the patches of all images, and the grid of each image as the caller gives it; None if there are none.

    The patches come in one sequence, with `grid_thw` beside them, or in one padded sequence for each image, with `spatial_shapes`.
    """
    for name, sizes in inputs:
        if sizes.is_floating_point() or sizes.ndim != 2:
            continue
        if str(name).endswith("grid_thw"):
            grids = tuple(tuple(int(side) for side in size) for size in sizes.tolist())
            count = sum(map(math.prod, grids))
            fitting = (x for _, x in inputs if x.is_floating_point() and x.ndim in (2, 4) and len(x) == count)
        elif str(name).endswith("spatial_shapes"):
            grids = tuple((1, *(int(side) for side in size)) for size in sizes.tolist())
            longest = max(map(math.prod, grids))
            padded = (x for _, x in inputs if x.is_floating_point() and x.ndim == 3)
            fitting = (x for x in padded if len(x) == len(grids) and x.shape[1] >= longest)
        else:
            continue
        patches = next(fitting, None)
        if patches is not None:
            return patches, grids
    return None


_IMAGES = re.compile("pixel|image|video|clip")


def _tensors(value: Any) -> list[Tensor]:  # noqa: ANN401
    """Return the tensors in arguments or results, nested ones too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if is_dataclass(value):
        value = [x for _, x in nested.leaves(value)]
    return [x for item in value for x in _tensors(item)] if isinstance(value, (tuple, list)) else []
