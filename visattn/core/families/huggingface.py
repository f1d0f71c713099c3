"""Models of Hugging Face transformers: preprocessing and class names, from the files that they were loaded from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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
from visattn.core.families import custom
from visattn.core.families.custom import cam_layer, describe, head
from visattn.core.families.spec import STATED, InputSpec
from visattn.errors import OptionError

__all__ = ["cam_layer", "describe", "head", "input_spec", "labels", "tokenizer_of"]

_FILES = ("preprocessor_config.json", "processor_config.json")
_Saved = tuple[tuple[Path, int, int], ...]  # files of a processor, with time and length
_processors: WeakKeyDictionary[nn.Module, tuple[_Saved, Any]] = WeakKeyDictionary()


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the size that the configuration states, with the image processor that was saved beside the weights, if there is one."""
    spec = replace(custom.input_spec(model, asked), keyword=_keyword(model))
    processor = None if asked is not None else _saved_processor(model)
    if processor is None:
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


def _saved_processor(model: nn.Module) -> Any:  # noqa: ANN401
    """Return the image processor in the folder or the cached repository that a model was loaded from; None if there is none."""
    origin = str(getattr(model.config, "_name_or_path", "") or "")
    if not origin:  # an empty path would be the current folder
        return None
    files = [file for name in _FILES if is_file(file := Path(origin, name))] or _cached(origin)
    saved = tuple((file, (facts := file.stat()).st_mtime_ns, facts.st_size) for file in files)
    if not saved:
        return None
    if _processors.get(model, ((), None))[0] != saved:
        auto = import_module("transformers").AutoImageProcessor
        _processors[model] = saved, auto.from_pretrained(files[0].parent, local_files_only=True, trust_remote_code=False)
    return _processors[model][1]


def _cached(repository: str) -> list[Path]:
    try:
        cached = [try_to_load_from_cache(repository, name) for name in _FILES]
    except ValueError:  # not the name of a repository
        return []
    return [Path(file) for file in cached if isinstance(file, str)]


def _keyword(model: nn.Module) -> str:
    """Return the name of the parameter that takes the pixels; models of images and words take the words first."""
    taken = list(inspect.signature(model.forward).parameters)
    return next((name for name in taken[1:] if name == "pixel_values"), "")
