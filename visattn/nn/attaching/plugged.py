"""A module with attention after it, in the place of the module: what `attach` puts into a model.

It is a module and no forward hook, so whatever rewrites a model sees it: `torch.fx` traces it, and fusing convolutions with norms,
which silently drops what hooks do, keeps it. To whoever asks for attributes or loads a checkpoint it looks like the module inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.publish import publish
from visattn.nn.attaching.trail import Layout


class Company:
    """The sites of one `attach` while a checkpoint loads, which tell each other whether it has something of any of them.

    Each meets only its own part of the checkpoint. One without anything of any site is plain, and nothing is missing; of one that has
    some of them, the others are missing.
    """

    def __init__(self) -> None:
        """Begin without a load."""
        self._missing: list[str] | None = None  # torch's list of one load, the same for all sites
        self._waiting: list[str] = []  # keys that are missing if the checkpoint turns out not to be plain
        self._met = False

    def note(self, missing: list[str], lacking: Iterable[str]) -> None:
        """Take in what the checkpoint lacks of one site; an empty `lacking` says that it has the site."""
        if self._missing is not missing:
            self._missing, self._waiting, self._met = missing, [], False
        self._waiting.extend(lacking)
        self._met |= not lacking
        if self._met:
            missing.extend(self._waiting)
            self._waiting = []


class Plugged(nn.Module):
    """A module, then attention on what it gives: `y = A(x)`, or `y = x + g (A(x) - x)` with a learned number `g`.

    At `g = 0` it changes nothing, not by a bit, as long as `A(x)` is finite.

    A checkpoint of the model as it was before loads strictly: its names are understood, and if it has nothing of any site of the
    `company`, their attention keeps what it has, and `supplied` names the keys. One that has other sites and lacks this one is
    incomplete. Names that this class does not know are looked up in the module inside.

    Args:
        base: The module that was there.
        attention: `(B, C, H, W)` to the same.
        gate: What `g` begins with; None leaves it out.
        scale: What `A(x)` is multiplied with, for attention that halves what it sees when its last layer is zero.
        layout: Whether `base` gives `(B, C, H, W)` or `(B, H, W, C)`.
        strict_attention: Whether a checkpoint without the attention is reported as incomplete.
        company: Shared by the sites that were attached together; by default this one is alone.

    Shape:
        Whatever `base` takes, to whatever it gives.

    Publishes:
        `mix`, `(1, 1)`: `g`, where there is one. A gate of the attention inside acts by that share only.
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
        """Take both modules as they are, with the training flag of `base`."""
        super().__init__()
        self.register_parameter(
            "gate", None if gate is None else nn.Parameter(gate)
        )  # before base, which may have one of its own
        self.base = base
        self.attention = attention
        self.scale, self.layout, self.strict_attention = scale, layout, strict_attention
        self.supplied = ()
        self.company = company or Company()
        self.training = base.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - whatever the module takes
        """Run the module, then the attention."""
        x: Tensor = self.base(*args, **kwargs)
        last = self.layout == "NHWC"
        changed: Tensor = self.attention(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if last else self.attention(x)
        gate: Tensor | None = self.gate
        if gate is not None:
            publish(self, "mix", gate.reshape(1, 1))
            return x + gate * (changed - x)
        return changed if self.scale == 1 else changed * self.scale

    def added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that were not there before, with their names in this module."""
        if self.gate is not None:
            yield "gate", self.gate
        yield from self.attention.named_parameters("attention")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (
                name == "base" or name.startswith("__") or "_modules" not in self.__dict__
            ):  # what is unpickled has nothing inside yet
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
        """Take the names of a plain checkpoint for those of `base`, and supply the attention if it has none."""
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


class PluggedSequence(Plugged):
    """The same around a module with items, so that `model.layer4[-1]` still is its last block."""

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        return self.base[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.base)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, item: object) -> bool:
        return item in self.base  # type: ignore[operator]


def plug(base: nn.Module, attention: nn.Module, gate: float | None, like: Tensor | None, **options: Any) -> Plugged:  # noqa: ANN401
    """Put attention after a module, with the device and dtype of `like` and the training flag of the module."""
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    start = None if gate is None else torch.tensor(gate, device=device, dtype=dtype)
    kind = PluggedSequence if hasattr(type(base), "__len__") and hasattr(type(base), "__getitem__") else Plugged
    return kind(base, attention.to(device, dtype).train(base.training), gate=start, **options)
