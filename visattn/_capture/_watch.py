"""Watching the forwards of a model: when one begins, which call is made, where its tokens lie."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visattn._capture._anatomy import Anatomy
from visattn._capture._arrange import Arrangement, Tokens, arrange_tokens
from visattn._capture._call import Call
from visattn._capture._eager import uncompiled
from visattn._capture._follow import Follower
from visattn._capture._locate import by_rule, locate
from visattn._capture._mode import CaptureMode, Receive, Replace
from visattn._capture._remember import Way, drop, key_of, remember, sizes_of, way_of
from visattn._capture._script import OTHERWISE, Reader, Script, Writer, free
from visattn._types import Kind
from visattn.errors import CaptureError, UnsupportedModel


class Watch:
    """What is known of the running forward."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        receive: Receive,
        replace: Replace | None = None,
        keeps: Callable[[str], bool] | None = None,
    ) -> None:
        """Prepare to watch; nothing is put on the model.

        `receive` and `replace` are those of `CaptureMode`. With `keeps`, which says of a layer whether its operands are wanted,
        `receive` may be called at the end of the forward, of calls that kept nothing else: Python is several times faster there
        than between two large operations, which leave nothing of it in the caches.

        Raises:
            UnsupportedModel: If the model is none, or runs outside Python.
        """
        if not isinstance(model, nn.Module):
            hint = ". Pass its .module()" if isinstance(model, torch.export.ExportedProgram) else ""  # type: ignore[unreachable]
            raise UnsupportedModel(f"a model must be a torch.nn.Module, got {type(model).__name__}{hint}.")
        if isinstance(model, torch.jit.ScriptModule):
            raise UnsupportedModel("a TorchScript model runs outside Python and shows no attention. Use the original module.")
        self.forward, self.input_size = -1, (0, 0)
        self.needs_gradients = False
        self.tokens_of: list[str] = []  # modules that `tokens` is asked about
        self._model, self._anatomy = model, anatomy
        self._mode = CaptureMode(model, self._made, replace)
        self._receive, self._keeps = receive, keeps
        self._waiting: list[tuple[str, nn.Module, Call]] = []  # calls to be received at the end of the forward
        self._thread = threading.get_ident()
        self._calls: Counter[str] = Counter()
        self._inside = False
        self._images = 0
        self._key: Hashable = None  # of this forward, where it is to be remembered
        self._known: Way | None = None  # from an earlier forward
        self._way = Way()  # of this one

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the forwards inside the `with`; all hooks are gone afterwards."""
        model = self._model
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            stack.callback(model.register_forward_hook(self._leave, always_call=True).remove)
            for child in model.children():
                stack.callback(child.register_forward_pre_hook(self._enter_part).remove)
            stack.enter_context(uncompiled())
            stack.enter_context(self._mode)
            for name in ("_mode", "_receive", "_keeps"):  # which refer back to this: nothing waits for the garbage collector
                stack.callback(self.__dict__.pop, name)
            stack.callback(self._close_script)
            yield

    def running(self) -> bool:
        """Whether a hook runs in a forward of ours."""
        return not self._elsewhere() and self.forward >= 0

    def _elsewhere(self) -> bool:
        """Whether this is another thread, or a backward pass that computes layers again."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0

    def number(self, layer: str) -> int:
        """Which call this is of a layer in the running forward.

        Raises:
            CaptureError: If no forward was begun.
        """
        if self.forward < 0:
            raise CaptureError(f"{layer} ran before the model saw an image. Call the whole model inside the capture.")
        self._calls[layer] += 1
        return self._calls[layer] - 1

    def arranged(self, layer: str, number: int, owner: nn.Module, call: Call) -> tuple[Arrangement, tuple[str, int] | None]:
        """Where a call's tokens lie, and the layer and call that it follows."""
        if self._anatomy.place is not None:
            placement = self._anatomy.place(owner, call.rows, call.columns, self.input_size)
            return by_rule(placement, call, self._images), None
        follower = self._mode.follower
        if follower is None:
            assert self._known is not None  # noqa: S101 - one of the two is there
            return self._known.recall(layer, number, call)
        arrangement, follows = locate(follower, call, self._anatomy.answers_at_keys(owner))
        self._way.calls[layer, number] = sizes_of(call), arrangement, follows
        return arrangement, follows

    def passed(self, layer: str, number: int, kind: Kind, call: Call) -> None:
        """Take note that the call was made, for those that follow it; channels mix no tokens."""
        if self._mode.follower is not None and kind != "channel" and call.out is not None:
            self._mode.follower.passed(call.out, layer, number)

    def tokens(self, layer: str, output: Tensor) -> Tokens | None:
        """Where the tokens of a module's output lie."""
        number = self.number(f"tokens of {layer}")
        follower = self._mode.follower
        if follower is not None:
            places = follower.of(output)
            with torch._C.DisableTorchFunction():  # a hook runs under the mode, which must not follow this
                self._way.tokens[layer, number] = None if places is None else arrange_tokens(follower.planes, places.codes)
        return (self._known or self._way).tokens.get((layer, number))

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """A forward of the whole model begins."""
        if self._elsewhere():
            return None
        pixels = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4), None)
        if pixels is None:
            raise CaptureError("the model was given no images. Pass pixels of shape (B, C, H, W).")
        self._inside = True
        key = key_of(self._mode.owners.modules, pixels, (args, kwargs, self.tokens_of, self.needs_gradients))
        given = self._watched(pixels, way_of(self._model, key))
        self._start(given, key)
        if given is pixels:
            return None
        return tuple(given if x is pixels else x for x in args), {k: given if x is pixels else x for k, x in kwargs.items()}

    def _enter_part(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """A part runs; if the model as a whole does not, it may be the first, as in `model.forward_features(pixels)`."""
        if self._inside or self._elsewhere() or not args or self._anatomy.place is not None:
            return
        new = isinstance(args[0], Tensor) and args[0].ndim == 4 and args[0].shape[1] <= 4
        if new and (self._mode.follower is None or self._mode.follower.of(args[0]) is None):
            self._start(args[0], None)

    def _made(self, layer: str, owner: nn.Module, call: Call) -> None:
        if self._keeps is None or not isinstance(self._mode.script, Reader):
            self._receive(layer, owner, call)
        else:
            call.keep(self._keeps(layer))
            self._waiting.append((layer, owner, call))

    def _start(self, pixels: Tensor, key: Hashable) -> None:
        self._close_script()
        self.forward += 1
        self._calls.clear()
        self._waiting.clear()
        self.input_size = int(pixels.shape[-2]), int(pixels.shape[-1])
        self._images, self._key, self._way, self._known, self._mode.follower = len(pixels), key, Way(), None, None
        if self._anatomy.place is None:
            self._known = None if key is None else way_of(self._model, key)
            self._mode.follower = Follower(self._model, pixels) if self._known is None else None
        if self._known is not None and self._known.fixed and free(self._mode):
            modules, steps = self._mode.owners.modules, self._known.steps
            self._mode.script = (
                Writer(modules, self._elsewhere) if steps is None else Reader(steps, self._mode, modules, self._elsewhere)
            )

    def _close_script(self) -> None:
        """See everything again."""
        if self._mode.script is not None:
            self._mode.script.close()
            self._mode.script = None

    def _watched(self, pixels: Tensor, known: Way | None) -> Tensor:
        """Pixels that need gradients, where frozen parameters would not give a graph to every attention."""
        if not self.needs_gradients:
            return pixels
        if not torch.is_grad_enabled():
            raise CaptureError("gradients were asked for, but the model runs under no_grad or inference_mode. Run it without.")
        if known is not None and not known.calls:  # features then begin a graph of their own
            return pixels
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if not (trained and all(trained)) and pixels.is_floating_point() and not pixels.requires_grad:
            return pixels.detach().requires_grad_()
        return pixels

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        """A forward of the whole model ends; it gives nothing where it failed."""
        if self._elsewhere():
            return
        self._inside = False
        while self._waiting and output is not None:
            self._receive(*self._waiting.pop(0))
        script: Script | None = self._mode.script
        follower, self._mode.follower = self._mode.follower, None
        self._close_script()
        key, self._key = self._key, None
        if self._known is not None:
            missing = self._known.missing(self._calls)
            if output is None or missing:
                drop(self._model, key)
            elif isinstance(script, Writer):
                self._known.steps = script.steps
            if output is not None and missing:
                raise CaptureError(OTHERWISE.format(missing))
        elif follower is not None and not follower.chosen_by_data and key is not None and output is not None:
            self._way.fixed = not any(map(_varies, self._mode.owners.modules))
            remember(self._model, key, self._way)


def _varies(module: nn.Module) -> bool:
    """Whether layers may be left out at random, or another way be taken when no mode is on."""
    return module.training or isinstance(module, nn.TransformerEncoder)
