"""Models of Hugging Face transformers: preprocessing and class names, from the files that they were loaded from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from huggingface_hub import try_to_load_from_cache
from torch import nn

from visattn._support.checks import first_line
from visattn._support.files import is_file
from visattn._support.types import Task
from visattn.errors import OptionError
from visattn.families import custom
from visattn.families.custom import cam_layer, describe, head
from visattn.families.spec import STATED, InputSpec

__all__ = ["cam_layer", "describe", "head", "input_spec", "labels", "owns", "tokenizer_of"]

_FILES = ("preprocessor_config.json", "processor_config.json")
_processors: WeakKeyDictionary[nn.Module, tuple[str, Any]] = WeakKeyDictionary()


def owns(model: nn.Module) -> bool:
    """Check whether `model` is a model of transformers with its configuration."""
    return hasattr(model, "config") and any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the size that the configuration states, with the image processor that was saved beside the weights, if there is one."""
    spec = replace(custom.input_spec(model, asked), keyword=_keyword(model))
    origin = str(getattr(model.config, "_name_or_path", "") or "")
    if _processors.get(model, ("", None))[0] != origin:
        _processors[model] = origin, _saved_processor(origin)
    processor = _processors.get(model, ("", None))[1]
    if processor is None or asked is not None:
        return spec
    mean, std = (tuple(getattr(processor, f"image_{name}", None) or getattr(spec, name)) for name in ("mean", "std"))
    return replace(spec, processor=processor, sources=dict.fromkeys(STATED, "model"), mean=mean, std=std)


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes, or None if the configuration has only numbers (`LABEL_0`)."""
    named: Any = getattr(model.config, "id2label", None) or {}
    names = tuple(str(named[index]) for index in sorted(named))
    return names if names and not all(name == f"LABEL_{index}" for index, name in enumerate(names)) else None


def task(model: nn.Module) -> Task | None:
    """Return what the outputs are, if the configuration states it."""
    stated: Mapping[str, Task] = {
        "single_label_classification": "classes",
        "multi_label_classification": "multi_label",
        "regression": "regression",
    }
    return stated.get(str(getattr(model.config, "problem_type", "")))


def tokenizer_of(model: Any, remedy: str) -> Any:  # noqa: ANN401
    """Load the tokenizer that was saved beside the weights.

    Args:
        model: A model of transformers.
        remedy: What to do if there is none.

    Returns:
        The tokenizer.

    Raises:
        OptionError: If there is none.
    """
    origin = str(getattr(model.config, "_name_or_path", "") or "")
    auto = import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(origin, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of the library
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise OptionError(f"{type(model).__name__}: the tokenizer is not beside its weights ({cause}). {remedy}") from error


def _saved_processor(origin: str) -> Any:  # noqa: ANN401
    """Load the image processor from the folder or the cached repository that a model was loaded from; None if there is none."""
    folder = Path(origin)
    if not any(is_file(folder / name) for name in _FILES):
        cached: list[str] = []
        with suppress(ValueError):  # not the name of a repository
            cached = [file for name in _FILES if isinstance(file := try_to_load_from_cache(origin, name), str)]
        if not cached:
            return None
        folder = Path(cached[0]).parent
    auto = import_module("transformers").AutoImageProcessor
    return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _keyword(model: nn.Module) -> str:
    """Return the name of the parameter that takes the pixels; models of images and words take the words first."""
    taken = list(inspect.signature(model.forward).parameters)
    return next((name for name in taken[1:] if name == "pixel_values"), "")
