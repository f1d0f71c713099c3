"""A module followed by attention, which `attach` inserts instead of the original module.

It is a module, not a forward hook, so transformations of the model keep it. `torch.fx` traces it, and fusing convolutions with norms
keeps it, while it would silently drop hooks. For attribute access and checkpoints it behaves like the module inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.attaching.trail import Layout


class Company:
    """Shared state of the sites of one `attach` while a checkpoint loads.

    Each site reads only its own part of the checkpoint. If the checkpoint has none of the sites, it is of the original model and nothing is
    missing. If it has some of them, the others are missing.
    """

    def __init__(self) -> None:
        """Build the state before any load."""
        self._missing: list[str] | None = None  # torch's list for one load, shared by all sites
        self._waiting: list[str] = []  # keys that are missing if another site turns up
        self._met = False

    def note(self, missing: list[str], lacking: Iterable[str]) -> None:
        """Record the keys of one site that the checkpoint lacks; an empty `lacking` means that it has the site."""
        if self._missing is not missing:
            self._missing, self._waiting, self._met = missing, [], False
        self._waiting.extend(lacking)
        self._met |= not lacking
        if self._met:
            missing.extend(self._waiting)
            self._waiting = []


class WithAttention(nn.Module):
    """A module followed by attention on its output x: `y = A(x)`, or `y = x + g (A(x) - x)` with a learned scalar `g`.

    At `g = 0` the output is bit-identical to that of the module, if `A(x)` is finite.

    A checkpoint of the original model loads strictly, under its original names. If it has none of the sites of the `company`, their
    attention keeps its values and `supplied` lists the keys. A checkpoint that has other sites but lacks this one is incomplete. Unknown
    attributes are looked up in the module inside.

    Args:
        base: Original module.
        attention: Attention module, `(B, C, H, W)` to `(B, C, H, W)`.
        gate: Start value of `g`; None leaves it out.
        scale: Factor on `A(x)`, for attention that halves its input when its last layer is zero.
        layout: Axis order of the output of `base`: `NCHW` or `NHWC`.
        strict_attention: Whether to report a checkpoint without the attention as incomplete.
        company: State shared by the sites that were attached together; by default this site is alone.

    Shape:
        The inputs of `base` to the output shape of `base`.

    Publishes:
        `mix`, `(1, 1)`: `g`, if there is one. It scales the effect of the gates inside the attention.
    """

    supplied: tuple[str, ...]

    def __init__(
        self,
        base: nn.Module,
        attention: nn.Module,
        *,
        gate: Tensor | None = None,
        scale: float = 1.0,
        layout: Layout = "NCHW",
        strict_attention: bool = False,
        company: Company | None = None,
    ) -> None:
        """Build from both modules unchanged, with the training flag of `base`."""
        super().__init__()
        self.register_parameter("gate", None if gate is None else nn.Parameter(gate))  # before base, which may have its own
        self.base = base
        self.attention = attention
        self.scale, self.layout, self.strict_attention = scale, layout, strict_attention
        self.supplied = ()
        self.company = company or Company()
        self.training = base.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - arguments of the module
        """Run the module, then the attention."""
        x: Tensor = self.base(*args, **kwargs)
        last = self.layout == "NHWC"
        changed: Tensor = self.attention(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if last else self.attention(x)  # as x
        gate: Tensor | None = self.gate
        if gate is not None:
            publish(self, "mix", gate.reshape(1, 1))
            return _laid_out(x + gate * (changed - x), x)
        return changed if self.scale == 1 else changed * self.scale

    def added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the added parameters with their names in this module."""
        if self.gate is not None:
            yield "gate", self.gate
        yield from self.attention.named_parameters("attention")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the module
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (
                name == "base" or name.startswith("__") or "_modules" not in self.__dict__
            ):  # while unpickling, there is nothing inside yet
                raise
            return getattr(self.base, name)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Map the names of an original checkpoint to `base`, and keep the attention's values if it has none."""
        keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        members = {*self.base._modules, *self.base._parameters, *self.base._buffers}
        heads = {key: key.split(".") for key in keys}
        if not any(head[0] == "base" and head[1:2] and head[1] in members for head in heads.values()):
            for key in (key for key, head in heads.items() if head[0] in members):
                state_dict[f"{prefix}base.{key}"] = state_dict.pop(prefix + key)
        own = {key: value for key, value in self.state_dict(keep_vars=True).items() if not key.startswith("base.")}
        supply = not self.strict_attention and not any(prefix + key in state_dict for key in own)
        self.supplied = tuple(own) if supply else ()
        state_dict.update({prefix + key: own[key] for key in self.supplied})
        if own:
            self.company.note(missing_keys, [prefix + key for key in self.supplied])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs)


def _laid_out(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` with the strides of `x` along axes of length 1, so that the next layer chooses the same kernel for it."""
    if type(x) is not Tensor or type(y) is not Tensor or y.stride() == x.stride():
        return y
    long = [axis for axis, length in enumerate(x.shape) if length > 1]
    is_same = all(y.stride(axis) == x.stride(axis) for axis in long)
    return y.as_strided(x.shape, x.stride()) if is_same else y


class SequenceWithAttention(WithAttention):
    """`WithAttention` around a module with items, so that `model.layer4[-1]` is still its last block."""

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        return self.base[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.base)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, item: object) -> bool:
        return item in self.base  # type: ignore[operator]


def plug(base: nn.Module, attention: nn.Module, gate: float | None, like: Tensor | None, **options: Any) -> WithAttention:  # noqa: ANN401
    """Wrap a module with attention, on the device and in the dtype of `like`, with the training flag of the module."""
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    start = None if gate is None else torch.tensor(gate, device=device, dtype=dtype)
    kind = SequenceWithAttention if hasattr(type(base), "__len__") and hasattr(type(base), "__getitem__") else WithAttention
    return kind(base, attention.to(device, dtype).train(base.training), gate=start, **options)
