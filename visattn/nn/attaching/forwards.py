"""Tracing of a forward pass: output shapes, channel axes, ends of residual branches, and skip connections.

Nothing depends on the names of blocks. Additions and concatenations are traced while they run, so unknown models work too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from visattn.nn.attaching.skips import ADDITIONS, Skips
from visattn.nn.attaching.trail import Layout, Shape, Trail

_LAYERS = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "matmul", "bmm", "einsum"})
_RESIZES = frozenset({"split", "chunk", "tensor_split", "split_with_sizes", "unbind", "interpolate", "upsample"})
_FIRST = frozenset({"conv2d", "conv_transpose2d", "batch_norm", "group_norm", "instance_norm", "max_pool2d", "avg_pool2d"})
_LAST = frozenset({"linear", "layer_norm", "rms_norm"})
_TURNS: dict[tuple[int, ...], tuple[Layout, Layout]] = {(0, 3, 1, 2): ("NHWC", "NCHW"), (0, 2, 3, 1): ("NCHW", "NHWC")}
_MOVES = frozenset({"transpose", "movedim", "swapaxes", "reshape", "view", "flatten", "unflatten"})
_PASSING = re.compile("Identity|Drop|StochasticDepth|Permute|LayerScale|Scale$")  # classes that only move or scale values
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


class Flow(TorchFunctionMode):
    """Tracer of one forward pass.

    Attributes:
        outputs: Output shapes of each run of a module, by module name; None for an output that is not a tensor.
        normed: Name of the norm that takes the output of a convolution, by the name of the convolution.
        skips: The skip connections.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Build a tracer for `modules`, by name."""
        super().__init__()
        self.outputs: dict[str, list[Shape | None]] = defaultdict(list)
        self.normed: dict[str, str] = {}
        self.skips = Skips()
        self._modules = modules
        self._ended: dict[str, int] = defaultdict(int)
        self._layouts: dict[str, Layout | None] = {}
        self._given: dict[Shape, set[Layout]] = defaultdict(set)  # layouts in which layers returned each shape
        self._sizes: set[Shape] = set()  # heights and widths of layer outputs
        self._trails: MutableMapping[Tensor, Trail] = WeakIdKeyDictionary()
        self._running: list[int] = []  # per running module, the newest tensor when it began
        self._sums: dict[int, tuple[int, str | None]] = {}  # per addition: start of its module, and the branch's end
        self._layer_bits = 0
        self._parents = [0]  # per tensor, one bit for each of its inputs

    @property
    def ends(self) -> list[str]:
        """Modules that end a residual branch, in the order of execution.

        Modules that also run elsewhere, such as a ReLU shared by a whole block, are left out: attention there would run several times.
        """
        return [name for name, times in self._ended.items() if times == len(self.outputs[name])]

    def layout_of(self, name: str, channels: int | None) -> Layout | None:
        """Determine the channel axis of a module's output; return None if it is ambiguous."""
        shape, layout = self.outputs[name][0], self._layouts.get(name)
        if layout is not None or shape is None:
            return layout
        first, last = shape[2:] in self._sizes, shape[1:3] in self._sizes
        evidence: tuple[set[Layout | None], ...] = (
            {*self._given.get(shape, ())},
            {"NCHW" if first else None, "NHWC" if last else None},
            {"NCHW" if shape[1] == channels else None, "NHWC" if shape[-1] == channels else None},
        )
        certain = (known.pop() for seen in evidence if len(known := seen - {None}) == 1)
        return next(certain, None)

    def follow(self, call: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run `call` and trace what is computed from the tensors in its arguments."""
        handles = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(module.register_forward_hook(self._leave(name)))
            for tensor in _tensors((args, kwargs)):
                self._trails[tensor] = self._made([])
            self._running = [len(self._parents) - 1]
            with self:
                call(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - the function's result
        """Run the function and record the inputs of its result."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        sources = [(tensor, self._trails[tensor]) for tensor in _tensors((args, kwargs)) if tensor in self._trails]
        if not sources or name == "__get__":
            return func(*args, **kwargs)
        adds = name in ADDITIONS and len(sources) == 2
        end = self._branch(*sources) if adds else None
        trails, size = [trail for _, trail in sources], sources[0][0].numel()
        result = func(*args, **kwargs)
        for tensor in _tensors(args[0] if name == "__setitem__" else result):
            same = len(sources) == 1 and tensor.numel() == size
            made = self._made(trails)
            made = replace(
                made,
                end=trails[0].end if same and name not in _LAYERS else None,
                inner=trails[0].inner if same and name not in _LAYERS else None,
                layout=_layout(name, args, kwargs, trails) if tensor.ndim == 4 else None,
                resized=name in _RESIZES,
            )
            made = self.skips.made(name, made, sources, tensor)
            self._trails[tensor] = made
            if name in _LAYERS:
                self._layer_bits |= 1 << made.serial
            if made.layout is not None and name in _FIRST | _LAST:
                self._given[tuple(tensor.shape)].add(made.layout)
                self._sizes.add(tuple(tensor.shape[2:] if made.layout == "NCHW" else tensor.shape[1:3]))
            if adds:
                self._sums[made.serial] = (self._running[-1], end)
        return result

    def _made(self, sources: list[Trail]) -> Trail:
        past, parents, serial = 0, 0, len(self._parents)
        for trail in sources:
            past |= trail.past
            parents |= 1 << trail.serial
        self._parents.append(parents)
        return Trail(past | 1 << serial)

    def _begin(self, tensors: int) -> int:
        """Return the tensors outside a set from which the set was computed."""
        begin, left = 0, tensors
        while left:
            serial = left.bit_length() - 1
            begin |= self._parents[serial]
            left ^= 1 << serial
        return begin & ~tensors

    def _branch(self, one: tuple[Tensor, Trail], two: tuple[Tensor, Trail]) -> str | None:
        """Return the name of the module that ends the residual branch if this addition closes a residual block, else None.

        The branch is computed inside the module that adds. It is added to its own input, or to a shortcut computed from the same tensor
        with fewer layers.
        """
        if one[0].ndim != 4 or one[0].shape != two[0].shape or self._of_three(one[1], two[1]):
            return None
        outside = (2 << self._running[-1]) - 1
        for (_, branch), (_, shortcut) in ((one, two), (two, one)):
            alone, beside = branch.past & ~shortcut.past, shortcut.past & ~branch.past
            if branch.resized or branch.end is None or not alone or alone & outside or not self._fits(branch.end, one[0]):
                continue
            if beside:
                work, less = ((bits & self._layer_bits).bit_count() for bits in (alone, beside))
                fork = self._begin(beside)
                if shortcut.resized or work < 2 or work <= less or fork.bit_count() != 1 or not fork & self._begin(alone):
                    continue
            self._ended[branch.end] += 1
            return branch.end
        return None

    def _of_three(self, one: Trail, two: Trail) -> bool:
        """Check whether a third tensor is added to a sum in the same module: parallel branches, as in RepVGG."""
        for total, other in ((one, two), (two, one)):
            began, end = self._sums.get(total.serial, (None, None))
            if began == self._running[-1] and not other.past >> total.serial & 1:
                if end is not None:
                    self._ended[end] -= 1
                return True
        return False

    def _fits(self, name: str, tensor: Tensor) -> bool:
        """Check whether a module returned maps of this shape, in either layout."""
        shape = self.outputs[name][-1]
        return shape is not None and len(shape) == 4 and sorted(shape) == sorted(tensor.shape)

    def _enter(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(len(self._parents) - 1)
            self.skips.begun(name, module)
            trail = self._trails.get(args[0]) if isinstance(module, _NORMS) and args else None
            if trail is not None and trail.end is not None:
                self.normed.setdefault(trail.end, name)

        return enter

    def _leave(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            span = self._running.pop(), len(self._parents) - 1
            self.outputs[name].append(tuple(output.shape) if isinstance(output, Tensor) else None)
            trail = self._trails.get(output) if isinstance(output, Tensor) else None
            if not isinstance(output, Tensor) or trail is None:
                return
            self._layouts.setdefault(name, trail.layout)
            self.skips.gave(name, span, output, trail)
            passes = _PASSING.match(type(module).__name__)
            if not passes or trail.end is None or not self._fits(trail.end, output):
                inner = None if any(True for _ in module.parameters()) else trail.inner or trail.end
                self._trails[output] = replace(trail, end=name, inner=inner)

        return leave


def _layout(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], trails: list[Trail]) -> Layout | None:
    """Determine the channel axis of a function's result from the function and its inputs; None if unknown."""
    if name in _FIRST:
        return "NCHW"
    if name in _LAST:
        return "NHWC"
    if name in _MOVES:
        return None
    known = {trail.layout for trail in trails} - {None}
    layout = known.pop() if len(known) == 1 else None
    if name == "permute":
        order = args[1:] or (kwargs.get("dims", ()),)
        order = order[0] if len(order) == 1 else order
        before, after = _TURNS.get(tuple(order), (None, None))
        return after if layout == before else None
    return layout


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
