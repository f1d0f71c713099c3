"""Configurations of transformers: read from JSON, and checked before the library sees them.

Some settings name code, files or repositories that transformers or timm would load. They are refused wherever they stand; those without
effect on the model are left out. Sizes are bounded, so that a small file cannot ask for a network that no machine can hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from visattn._support.checks import first_line, printable, shown, unreadable
from visattn._support.files import regular
from visattn._support.json_files import decoded
from visattn.errors import UnsupportedModel, WeightsError

_BYTES = 20_000_000  # of a file of JSON: ten times the largest that is known, an index of 1000 parts
_DEPTH = 20  # of nested values
_LAYERS, _COUNT, _SIDE = 10_000, 4_000_000, 2_000_000_000  # most layers, other things that are counted, and sizes
_LAYERED = r"(layer|depth|block|stage)s?$|num.*(layer|block|stage)|depth_mult|repeat"  # names of numbers of layers
_LABELS = ("label2id", "id2label", "label_names")  # whose keys and values are words of the user
_LOADS = {  # settings that name files or code
    *("checkpoint_path", "pretrained_cfg_overlay", "configuration_files", "gguf_file", "custom_generate"),
    *("use_kernels", "kernel_config"),
}
_REBUILDS = {"quantization_config", "compression_config"}  # settings that replace layers by those of other packages
_SOURCES = {"file", "url", "hf_hub_id", "hf_hub_filename", "state_dict"}  # of weights, in arguments of timm's create_model
_IN_ARGUMENTS = _SOURCES | {"pretrained", "pretrained_cfg", "pretrained_custom_load", "pretrained_filter_fn", "cache_dir"}
_ARGUMENTS = {"model_args", "backbone_kwargs"}
_UNUSED = {  # settings without effect on a model whose weights are given
    *("auto_map", "_name_or_path", "name_or_path", "_commit_hash", "use_pretrained_backbone", "pretrained_backbone"),
}
_NAMES = {"architecture", "backbone"}  # settings that name a model of timm
_ATTENTION = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
_ATTENTION |= {key.replace("attn", "experts") for key in _ATTENTION}
_TYPES = {"dtype", "torch_dtype"}


def read_json(file: Path) -> dict[str, Any]:
    """Read the values of a JSON file.

    Raises:
        WeightsError: If the file cannot be read, is too large or too deeply nested, or holds no dictionary.
    """
    name = printable(str(file))
    try:
        if regular(file).stat().st_size > _BYTES:
            raise WeightsError(f"{name}: has {file.stat().st_size:,} bytes, expected at most {_BYTES:,}; download it again.")
        content = file.read_bytes()
        return decoded(content, dict[str, Any], "it", lax=True)
    except PermissionError as error:
        raise WeightsError(unreadable(error, file)) from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{name}: cannot be read as a configuration ({first_line(error)}); download it again.") from error


def harmless(settings: Mapping[str, Any], name: str, *, sizes: bool = True) -> dict[str, Any]:
    """Return settings without those that have no effect here, after checking that none loads anything or has no bound.

    Args:
        settings: Values of a configuration.
        name: Name of the model or the file, for messages.
        sizes: Whether numbers are sizes of a network, which are checked.

    Raises:
        UnsupportedModel: If a setting names code, a file or a repository, or a size is out of range; the message names it.
    """
    return _checked(settings, (), name, sizes)  # type: ignore[no-any-return]


def _checked(value: Any, path: tuple[str, ...], name: str, sizes: bool, depth: int = 0) -> Any:  # noqa: ANN401 - of JSON
    if depth > _DEPTH:
        raise UnsupportedModel(f"{name}: its settings are nested deeper than {_DEPTH} levels; check the file.")
    key = path[-1] if path else ""
    if key in _LABELS:
        return value
    reason = (_loads(key, value, path[:-1]) if value else "") or (_odd(key, value) if sizes else "")
    if reason:
        raise UnsupportedModel(f"{name}: its setting {printable('.'.join(path))} {reason}.")
    if isinstance(value, Mapping):
        used = {inner: content for inner, content in value.items() if inner not in _UNUSED}
        return {inner: _checked(content, (*path, str(inner)), name, sizes, depth + 1) for inner, content in used.items()}
    if isinstance(value, list):
        return [_checked(content, path, name, sizes, depth + 1) for content in value]
    return value


def _loads(key: str, value: Any, outer: tuple[str, ...]) -> str:  # noqa: ANN401 - of JSON
    """Return why a setting that is not empty would load something, and what to do; `outer` are the keys around it."""
    inside = bool(_ARGUMENTS & {*outer})
    if key in _LOADS or (inside and key in _IN_ARGUMENTS) or ("pretrained_cfg" in outer and key in _SOURCES):
        return f"names code or a file, {shown(value)}, which is not loaded; remove it"
    if key in _REBUILDS:
        return "replaces layers by quantized ones; save the model without quantization"
    if key in _NAMES and isinstance(value, str) and not re.fullmatch(r"[\w.-]+", value):
        return f"names another place, {shown(value)}, which is not loaded; name an architecture of timm"
    if key in _ATTENTION and not (isinstance(value, str) and re.fullmatch(r"\w+", value)):
        return f"may name code of a hub, {shown(value)}, which is not run; remove it"
    return ""


def _odd(key: str, value: Any) -> str:  # noqa: ANN401 - of JSON
    """Return why a value is out of range, and what to do; empty if it is not."""
    layered, counted = re.search(_LAYERED, key), re.match(r"_?(num|n)_", key)
    most = _LAYERS if layered else _COUNT if counted else _SIDE
    if isinstance(value, list) and layered and max(len(value), total := sum(abs(x) for x in value if isinstance(x, int))) > most:
        return f"has {len(value):,} values with the sum {total:,}, at most {most:,} is supported; check the file"
    if isinstance(value, int) or (isinstance(value, float) and layered):
        return f"is {shown(value)[:20]}, at most {most:,} is supported; check the file" if abs(value) > most else ""
    if isinstance(value, str) and key in _TYPES and not isinstance(vars(torch).get(value.removeprefix("torch.")), torch.dtype):
        return f"is no type of numbers, {shown(value)}; check the file"
    return ""
