"""Checkpoints: read them, and report damaged ones."""

from __future__ import annotations

import argparse
import hashlib
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.files import regular
from visattn.errors import WeightsError
from visattn.loading.translation import Shapes, as_float32, unwrap

WEIGHTS, FACTS = "model.safetensors", "model.json"  # files of a model folder, see `visattn.loading.folders`

_DAMAGED = (  # errors that torch.load raises for damaged files and other formats
    *(RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile, struct.error),
    *(LookupError, AttributeError, TypeError, AssertionError, ArithmeticError),
)


def read_checkpoint(path: Path) -> Any:  # noqa: ANN401 - whatever was saved
    """Load a safetensors file, or a `torch.save` file that needs no code, onto the CPU.

    Raises:
        WeightsError: If the file is missing or damaged, is not a checkpoint, or contains code; the message names the cause.
    """
    name = printable(str(path))
    try:
        with regular(path).open("rb") as stream:
            start = stream.read(256)
    except OSError as error:
        raise WeightsError(
            f"{name}: cannot be read ({(error.strerror or str(error)).lower()}); check the file (--weights)."
        ) from error
    if not start:
        raise WeightsError(f"{name}: empty file; download it again.")
    if start.startswith(b"version https://git-lfs"):
        raise WeightsError(f"{name}: is a git-lfs pointer, not the weights; run git lfs pull.")
    if start.lstrip()[:1] == b"<":
        shown = printable(start.lstrip()[:15].decode("utf-8", "replace"))
        raise WeightsError(f"{name}: not a checkpoint, starts with '{shown}'; this is a web page, download the file itself.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # training scripts save their options beside the weights
            return torch.load(path, map_location="cpu", weights_only=True)
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{name}: truncated or not a safetensors file ({error}); download it again.") from error
    except pickle.UnpicklingError as error:
        if "nsupported global" in str(error) or "GLOBAL" in str(error):
            raise WeightsError(f"{name}: refused, because loading it would run code; save its tensors as safetensors.") from error
        raise WeightsError(
            f"{name}: truncated or not a checkpoint ({path.stat().st_size:,} bytes); download it again."
        ) from error
    except _DAMAGED as error:
        raise WeightsError(
            f"{name}: truncated or not a checkpoint ({path.stat().st_size:,} bytes); download it again."
        ) from error


def read_tensors(file: Path, wanted: Shapes) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the tensors of a checkpoint that fit a model, as finite float32.

    Args:
        file: The checkpoint.
        wanted: Names and shapes of the model's tensors.

    Returns:
        Tensors by name, and a note on each choice and conversion.

    Raises:
        WeightsError: If the file is damaged, has no tensors, or has tensors that cannot be used; the message names the cause.
    """
    name = printable(str(file))
    tensors, notes = unwrap(read_checkpoint(file), wanted, name)
    tensors, cast = as_float32(tensors, name)
    check_finite(tensors, name)
    return tensors, notes + cast


def check_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Check that weights have no NaN or infinite values.

    Raises:
        WeightsError: If a tensor has some; the message names it.
    """
    for key, tensor in weights.items():
        if not tensor.is_floating_point() or math.isfinite(
            float(tensor.detach().sum())
        ):  # one pass; NaN and infinity remain in a sum
            continue
        if not bool(tensor.isfinite().all()):  # a sum of finite values may overflow
            bad = int((~tensor.isfinite()).sum())
            raise WeightsError(f"{name}: {key} has {bad} NaN or infinite values; the checkpoint is damaged, download it again.")


def digest(path: Path) -> str:
    """Compute the sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def state_digest(model: nn.Module) -> str:
    """Return a sha256 of the names and values of all weights of a model."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
