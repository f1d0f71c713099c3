"""Proof that a model which was not loaded here has published weights: they are compared with the file that its library has cached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlparse

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from torchvision import models

from visattn._support.files import is_file
from visattn._support.memory import OfWeights
from visattn._support.modes import in_own_modes

_COMPARED = 8  # tensors of the body whose values are compared; of all others the shape


class Match(NamedTuple):
    """Parts of a model that are those of a published file.

    Attributes:
        body: Whether everything but the classifier is.
        head: Whether the classifier is, too.
        source: Entry of the library whose weights these are.
    """

    body: bool = False
    head: bool = False
    source: Any = None


_timm: OfWeights[Match] = OfWeights()
_torchvision: OfWeights[Match] = OfWeights()


def of_timm(model: nn.Module, config: Any) -> Match:  # noqa: ANN401 - timm's PretrainedCfg, or a mapping
    """Compare a timm model with the cached file of its configuration."""
    settings = config if isinstance(config, Mapping) else vars(config)
    files = tuple(file for file in _cached_by_timm(settings) if is_file(file))

    def compared() -> Match:
        head = settings.get("classifier") or ()
        return next((match for file in files if (match := _match(model, file, head, config)).body), Match())

    return _timm.of(model, files, compared) if files else Match()


def of_torchvision(model: nn.Module, head: str) -> Match:
    """Compare a torchvision classifier, whose last layer is named `head`, with all cached files of torchvision's classifiers."""
    folder = _cached("")
    files = tuple(sorted(folder.iterdir())) if folder.is_dir() else ()

    def compared() -> Match:
        every = _entries()
        candidates = [(every[file.name], file) for file in files if file.name in every]
        return next((match for entry, file in candidates if (match := _match(model, file, head, entry)).body), Match())

    return _torchvision.of(model, files, compared) if files else Match()


@cache
def _entries() -> dict[str, Any]:
    """Return torchvision's entries of published weights by the names of their files."""
    every = (entry for name in models.list_models(module=models) for entry in models.get_model_weights(name))
    return {_cached(entry.url).name: entry for entry in every}


def _cached_by_timm(told: Mapping[str, Any]) -> Iterator[Path]:
    if told.get("hf_hub_id"):
        for name in (told.get("hf_hub_filename"), "model.safetensors", "pytorch_model.bin"):
            cached = try_to_load_from_cache(told["hf_hub_id"], name) if name else None
            if isinstance(cached, str):
                yield Path(cached)
    if told.get("url"):
        yield _cached(told["url"])


def _cached(url: str) -> Path:
    """Return where torch.hub keeps the file of an address."""
    return _in_hub(torch.hub.get_dir(), url)


@lru_cache(64)
def _in_hub(folder: str, url: str) -> Path:
    return Path(folder) / "checkpoints" / Path(urlparse(url).path).name


@in_own_modes
def _match(model: nn.Module, file: Path, head: str | Collection[str], source: Any) -> Match:  # noqa: ANN401
    """Compare a model with a file: all names and shapes, and the values of some tensors."""
    classifiers = (head,) if isinstance(head, str) else tuple(head)
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    of_head = [name for name in own if name.rpartition(".")[0] in classifiers]
    body = [name for name in own if name not in of_head and own[name].is_floating_point()]
    try:
        with _opened(file) as stored:
            if not body or not all(name in stored.shapes and stored.shapes[name] == own[name].shape for name in body):
                return Match()
            chosen = {*body[:: max(len(body) // _COMPARED, 1)], body[-1]}
            if not all(_same(own[name], stored.tensor(name)) for name in chosen):
                return Match()
            same_head = all(
                stored.shapes.get(name) == own[name].shape and _same(own[name], stored.tensor(name)) for name in of_head
            )
            return Match(body=True, head=bool(of_head) and same_head, source=source)
    except Exception:
        return Match()


def _same(own: Tensor, stored: Tensor) -> bool:
    return torch.equal(own.cpu(), stored.to(own.dtype))


class _Stored(Protocol):
    """Tensors of a file."""

    shapes: Mapping[str, torch.Size]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        ...


class _Safetensors:
    def __init__(self, opened: Any) -> None:  # noqa: ANN401
        self._opened = opened
        self.shapes: Mapping[str, torch.Size] = {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._opened.get_tensor(name)
        return found


class _Pickled:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        self.shapes: Mapping[str, torch.Size] = {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


@contextmanager
def _opened(file: Path) -> Iterator[_Stored]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            yield _Safetensors(opened)
        return
    loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    yield _Pickled(next((loaded[key] for key in ("model", "state_dict") if isinstance(loaded.get(key), Mapping)), loaded))
