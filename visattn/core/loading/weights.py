"""Checkpoints: read them, and report damaged ones."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from visattn._support.checks import first_line, printable
from visattn._support.files import regular
from visattn._support.shortages import lacks_memory
from visattn.core.loading.stand_ins import standing_in
from visattn.core.loading.translation import as_float32, shapes_of, unwrap
from visattn.core.loading.weight_formats import START, foreign, is_archive, is_pickle, is_safetensors
from visattn.errors import ResourceError, WeightsError

__all__ = ["FACTS", "WEIGHTS", "digest", "state_digest", "unbounded_buffers"]

WEIGHTS, FACTS = "model.safetensors", "model.json"  # files of a model folder, see `visattn.loading.folders`

_DAMAGED = (  # errors that torch.load raises for damaged files and other formats
    *(RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile, struct.error),
    *(LookupError, AttributeError, TypeError, AssertionError, ArithmeticError),
)


def read_checkpoint(path: Path) -> Any:  # noqa: ANN401 - whatever was saved
    """Load a safetensors file, or a `torch.save` file that needs no code, onto the CPU.

    The content decides, not the name, except that the ending of safetensors promises that no pickle is read. Values
    beside the tensors are dropped, see `visattn.loading.stand_ins`.

    Raises:
        WeightsError: If the file is missing or damaged, is not a checkpoint, or contains code; the message names the cause.
        ResourceError: If there is not enough memory.
    """
    name = printable(str(path))
    start, size = _start(path, name)
    reason = None if is_safetensors(start) else foreign(path, start)
    if reason:
        raise WeightsError(f"{name}: {reason}")
    safe = is_safetensors(start) or (path.suffix == ".safetensors" and not is_pickle(start))
    if path.suffix == ".safetensors" and not safe:
        raise WeightsError(
            f"{name}: is a file of torch.save, not safetensors as its name says; give it the ending .pth, and pass it as weights."
        )
    try:
        if safe:
            return safetensors.torch.load_file(path)
        with standing_in():
            return torch.load(path, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, MemoryError, *_DAMAGED) as error:
        if lacks_memory(error):
            raise ResourceError(f"out of memory for the {size:,} bytes of {name}; choose a smaller model.") from error
        raise WeightsError(f"{name}: {_unreadable(path, start, size, error, safe)}") from error


def _unreadable(path: Path, start: bytes, size: int, error: Exception, safe: bool) -> str:
    """Say what is seen of a file that is no checkpoint, or no whole one."""
    if is_pickle(start) and isinstance(error, pickle.UnpicklingError) and (reason := _refused(str(error), printable(str(path)))):
        return reason
    if is_archive(start) and not zipfile.is_zipfile(path):
        return f"truncated: an archive without its end ({size:,} bytes); download it again."
    what = "safetensors" if safe else "a checkpoint"
    return f"cannot be read as {what} ({size:,} bytes; {first_line(error)}); check the file, or download it again."


def _start(path: Path, name: str) -> tuple[bytes, int]:
    """Return the first bytes of a file and its size in bytes.

    Raises:
        WeightsError: If it cannot be read, is empty, or is a text in place of the file.
    """
    try:
        with regular(path).open("rb") as stream:
            start, size = stream.read(START), path.stat().st_size
    except OSError as error:
        raise WeightsError(f"{name}: cannot be read ({(error.strerror or str(error)).lower()}); check the file.") from error
    if not start:
        raise WeightsError(f"{name}: empty file; download it again.")
    if start.startswith(b"version https://git-lfs"):
        raise WeightsError(f"{name}: is a git-lfs pointer, not the weights; run git lfs pull.")
    if start.lstrip()[:1] == b"<" and not is_safetensors(start):
        shown = printable(start.lstrip()[:15].decode("utf-8", "replace"))
        raise WeightsError(
            f"{name}: not a checkpoint, starts with '{shown}', like a web page or XML; pass the checkpoint itself."
        )
    return start, size


def _refused(error: str, name: str) -> str | None:
    """Return which object of a pickle was refused, and the lines that save the tensors alone; None if the file is damaged."""
    refused = re.search(r"GLOBAL (\S{1,100})", error) or re.search(r"unrecognized function (.{1,100})", error)
    if refused:
        held = f"refused, because loading it would run code: it holds {printable(refused[1])}"
    elif "must be imported to load" in error:
        return "holds tensors that are spread over processes; gather them with full_tensor(), and save plain tensors."
    elif "Unsupported operand" in error:
        held = "its pickle is damaged, or has operations of a protocol above 2, which PyTorch does not read without running code"
    else:
        return None
    lines = (
        f"import torch; loaded = torch.load({name!r}, map_location='cpu', weights_only=False); "
        "tensors = lambda held: tensors(held.state_dict()) if isinstance(held, torch.nn.Module) else "
        "{key: tensors(one) for key, one in held.items() if isinstance(one, (dict, torch.Tensor, torch.nn.Module))} "
        "if isinstance(held, dict) else held; torch.save(tensors(loaded), 'tensors.pth')"
    )
    return f"{held}; if you trust the file, save its tensors alone: {lines}."


def read_tensors(file: Path, model: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the tensors of a checkpoint that fit a model, as float32; they are finite, except where buffers of the model are not.

    Args:
        file: The checkpoint.
        model: The model, whose parameters need no values.

    Returns:
        Tensors by name, and a note on each choice and conversion.

    Raises:
        WeightsError: If the file is damaged, has no tensors, or has tensors that cannot be used; the message names the cause.
    """
    name = printable(str(file))
    tensors, notes = unwrap(read_checkpoint(file), shapes_of(model), name)
    tensors, cast = as_float32(tensors, name)
    check_finite(tensors, name, unbounded_buffers(model))
    return tensors, notes + cast


def unbounded_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that have NaN or infinite values, such as masks of minus infinity."""
    return {
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if not buffer.is_meta and not bool(buffer.isfinite().all())
    }


def check_finite(weights: Mapping[str, Tensor], name: str, but: Container[str] = ()) -> None:
    """Check that weights have no NaN or infinite values.

    Args:
        weights: Tensors by name.
        name: Name of the file, for the message.
        but: Names of tensors that may have some.

    Raises:
        WeightsError: If another tensor has some; the message names it.
    """
    for key, tensor in weights.items():
        if (
            key in but or not tensor.is_floating_point() or math.isfinite(float(tensor.detach().sum()))
        ):  # one pass; NaN and infinity remain in a sum
            continue
        if not bool(tensor.isfinite().all()):  # a sum of finite values may overflow
            bad = int((~tensor.isfinite()).sum())
            raise WeightsError(f"{name}: {key} has {bad} NaN or infinite values in float32; pass finite weights.")


def digest(path: Path) -> str:
    """Compute the sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def state_digest(model: nn.Module) -> str:
    """Return a sha256 of the names and values of all weights of a model."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {getattr(value, 'dtype', '')} {tuple(getattr(value, 'shape', ()))}\n".encode())
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
