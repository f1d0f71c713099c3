"""Settings that decide the files of a run: the fields of its request, and the structure and weights of its model."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visattn._support.checks import printable
from visattn.core.families import input_spec
from visattn.core.loading.weights import state_digest
from visattn.core.provenance import processor, versions

DECIDES_NOTHING = {"decides": False}  # metadata of a field on which no file depends
NUMBERS = "modules."  # prefix of the entries with numbers that modules keep
ALL = "all modules"  # entry with the digest of all
_LONGEST = 400  # letters of a value; of a longer one, the digest is kept
_ADDRESS = re.compile(r" at 0x\w+")
_PLAIN = (bool, int, float, str, type(None))


def settings_of(request: Any, model: nn.Module, name: str, batch_size: int) -> dict[str, Any]:  # noqa: ANN401 - any dataclass
    """Return what decides the files of a run, as plain values for JSON.

    A field that is added to the request, or to anything in it, is among the settings without being named here.

    Args:
        request: Dataclass with all that the user asked for.
        model: The model.
        name: Its name.
        batch_size: Images in a batch.
    """
    spec = input_spec(model)
    return {
        "visattn": versions()["visattn"],
        **plain(request),
        "batch_size": batch_size,
        "model": printable(name),
        "weights": state_digest(model),
        "buffers": _buffers(model),
        "input": {
            **plain(spec.stated()),
            "interpolation": plain(spec.interpolation),
            "steps": plain([*spec.transform, spec.processor]),
        },
        "modules": structure_of(model),
    }


def maker(model: nn.Module) -> dict[str, str]:
    """Return what may change results without being asked for: versions, processor, device, and numbers that modules keep.

    A number such as `scale` decides what a model computes, another is a time or a counter; so a difference is not refused but compared
    (see `same`).
    """
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    facts = {**versions(), "python": platform.python_version(), "processor": processor(), "device": device}
    return facts | {f"{NUMBERS}{name}": text for name, text in _grouped(model, _attributes).items() if text}


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return a value as plain values for JSON; of dataclasses, all fields but those that decide nothing."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if is_dataclass(value) and not isinstance(value, type):
        named = (field.name for field in fields(value) if field.metadata.get("decides", True))
        return {name: plain(getattr(value, name)) for name in named}
    if isinstance(value, Mapping):
        return _brief({str(key): plain(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return _brief([plain(part) for part in value])
    return value if isinstance(value, _PLAIN) else _brief(_without_addresses(value))


def structure_of(model: nn.Module) -> dict[str, str]:
    """Return what each module of a model is: its class and its own `repr`, which names `eps`, sizes and strides.

    Modules whose names differ by numbers alone, such as `blocks.3.norm1`, are one entry if they are alike.
    """
    every = "\n".join(f"{name}: {_described(module)}" for name, module in model.named_modules())
    digest = hashlib.sha256(every.encode("utf-8", "surrogatepass")).hexdigest()
    return {**_grouped(model, _described), ALL: digest}


def _grouped(model: nn.Module, facts_of: Callable[[nn.Module], str]) -> dict[str, str]:
    alike: dict[str, dict[str, None]] = {}
    for name, module in model.named_modules():
        alike.setdefault(re.sub(r"\d+", "*", name), {})[facts_of(module)] = None
    return {name: _brief(" | ".join(filter(None, texts))) for name, texts in alike.items()}


def _described(module: nn.Module) -> str:
    try:
        own = module.extra_repr()
    except Exception:  # of a foreign class
        own = ""
    return f"{type(module).__qualname__}({_ADDRESS.sub('', own)})"


def _attributes(module: nn.Module) -> str:
    facts = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return " ".join(f"{name}={value!r}" for name, value in sorted(facts.items()) if _is_numeric(value))


def _buffers(model: nn.Module) -> str:
    """Return a digest of the buffers that are not among the weights."""
    digest, saved = hashlib.sha256(), model.state_dict().keys()
    for name, value in model.named_buffers():
        if name not in saved:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_numeric(value: Any) -> bool:  # noqa: ANN401
    return all(map(_is_numeric, value)) if isinstance(value, (tuple, list)) else isinstance(value, (bool, int, float))


def _without_addresses(value: Any) -> str:  # noqa: ANN401
    return _ADDRESS.sub("", repr(value))


def _brief(value: Any) -> Any:  # noqa: ANN401
    """Return a value, or the digest of a long one."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= _LONGEST or isinstance(value, Mapping):
        return value
    what = f"{len(value)} values" if isinstance(value, Sequence) and not isinstance(value, str) else f"{text[: _LONGEST // 4]}..."
    return f"{what}, sha256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


_INSIDE = re.compile(r"^(asked\.)?(question\.|how\.|wanted\.)?")  # parts of names that a user has not seen


def differences(before: Any, now: Any, name: str = "") -> list[str]:  # noqa: ANN401 - JSON
    """Return what differs between two settings, each as `NAME BEFORE -> NOW`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = {**before, **now}
        return [text for key in keys for text in differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))]
    title = "method" if name == "asked.question.name" else _INSIDE.sub("", name)
    return [] if before == now else [f"{title} {_told(before)} -> {_told(now)}"]


def _told(value: Any) -> str:  # noqa: ANN401 - JSON
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 100 else f"{text[:100]}..."
