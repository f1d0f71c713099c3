"""Places where a capture can stand: what a function mode, a dispatch mode, and one inside the other see of a forward pass.

Prints, for small models with random weights, how many calls and how many operations there are, under how many names; whether results
stay equal to the bit, with autograd and under inference mode; whether each tensor that a call receives or returns is the very object
that its operations saw; and the time as a multiple of the plain pass. Then what a dispatch mode alone cannot do. Takes a minute.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from visattn._support.tables import to_text
from visattn.core.capturing.placing.nodes import Nodes
from visattn.core.capturing.placing.steps import Recorder

MODELS = (
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "maxvit_nano_rw_256",
    "crossvit_tiny_240",
    "levit_128s",
    "volo_d1_224",
    "botnet26t_256",
    "resnet50",
)
ROUNDS = 3


class Calls(TorchFunctionMode):
    """Function mode that counts calls, and opens a dispatch mode inside each."""

    def __init__(self, inside: bool) -> None:
        """Start without counts; `inside`: whether to open the dispatch mode."""
        super().__init__()
        self.calls, self.operations, self.strangers = Counter[str](), Counter[str](), 0
        self._recorder = Recorder(Nodes(lambda _: None), lambda _: ()) if inside else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        self.calls[str(getattr(func, "__name__", func))] += 1
        recorder = self._recorder
        if recorder is None or isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        with recorder:
            out = func(*args, **kwargs)
        recorder.nodes.settle()
        steps = recorder.taken()
        self.operations.update(step.op._schema.name for step in steps if step.op is not None)
        known = len(recorder.nodes.facts)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and steps:
                recorder.nodes.of(tensor)
        self.strangers += len(recorder.nodes.facts) - known
        return out


class Replacing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that doubles the result of a softmax."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten._softmax.default else out


def main() -> None:
    """Print both parts."""
    torch.set_num_threads(1)
    names: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    print(to_text([_row(name, names) for name in MODELS]))
    print(f"{len(names[0])} names of functions, {len(names[1])} names of operations in these models")
    print(f"numbers that reach Python unseen by a dispatch mode: {', '.join(_unseen())}")
    print(f"gradient through a result that a dispatch mode has replaced: {_gradient():.2f} of the right one")


def _row(name: str, names: tuple[Counter[str], Counter[str]]) -> dict[str, object]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    pixels = torch.randn(1, *model.default_cfg["input_size"])
    row: dict[str, object] = {"model": name}
    for label, context in (("autograd", torch.enable_grad), ("inference", torch.inference_mode)):
        with context():
            plain = model(pixels)
            mode = Calls(True)
            with mode:
                row[f"equal, {label}"] = "yes" if torch.equal(model(pixels), plain) else "no"
    row |= {"calls": mode.calls.total(), "operations": mode.operations.total(), "strangers": mode.strangers}
    names[0].update(mode.calls)
    names[1].update(mode.operations)
    with torch.inference_mode():
        alone = _seconds(model, pixels, None)
        row["function mode"] = f"{_seconds(model, pixels, False) / alone:.2f} x"
        row["both"] = f"{_seconds(model, pixels, True) / alone:.2f} x"
    return row


def _seconds(model: nn.Module, pixels: Tensor, inside: bool | None) -> float:
    """Return the shortest time of a pass: plain for None, under the function mode, or with the dispatch mode inside."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        if inside is None:
            model(pixels)
        else:
            with Calls(inside):
                model(pixels)
        times.append(time.perf_counter() - start)
    return min(times)


def _unseen() -> list[str]:
    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        names: list[str] = []  # noqa: RUF012 - of this one use

        def __torch_dispatch__(
            self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:  # noqa: ANN401
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    found = []
    for name in ("item", "tolist", "numpy", "data_ptr"):
        tensor = torch.ones(1)
        Seen.names.clear()
        with Seen():  # type: ignore[no-untyped-call]
            getattr(tensor, name)()
        if not set(Seen.names) - {"aten::detach"}:
            found.append(name)
    return found


def _gradient() -> float:
    """Return the gradient of a doubled softmax, as a share of the right one."""
    scores = torch.tensor([0.1, 0.7], requires_grad=True)
    with Replacing():  # type: ignore[no-untyped-call]
        weights = scores.softmax(0)
    (replaced,) = torch.autograd.grad(weights[0], scores)
    (right,) = torch.autograd.grad(2 * scores.softmax(0)[0], scores)
    return float(replaced[0] / right[0])


if __name__ == "__main__":
    main()
