"""Weight files: find them in the cache or download them, read checkpoints, and report damaged ones."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import math
import pickle
import re
import struct
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor
from tqdm import tqdm

from visattn._support.checks import printable
from visattn._support.files import is_file, regular, write_whole
from visattn.errors import OutputError, WeightsError
from visattn.loading.translation import Shapes, as_float32, unwrap

WEIGHTS, FACTS = "model.safetensors", "model.json"  # files of a model folder, see `visattn.loading.folders`

_FIX = (
    "pass a checkpoint as weights=FILE (--weights FILE), or weights='none' (--weights none) for random weights; the default model, a ViT, "
    "and tf_efficientnet_lite0, a CNN, also come through the package index"
)
_DAMAGED = (  # errors that torch.load raises for damaged files and other formats
    *(RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile, struct.error),
    *(LookupError, AttributeError, TypeError, AssertionError, ArithmeticError),
)
_SECONDS = 3  # timeout for the hub's first answer; short and without retries, so that users without network need not wait
_STALLED = 60  # timeout in seconds for a running download
_PIECE = 1 << 20


class Unreachable(WeightsError):
    """Weights are not cached, and the server that has them cannot be reached."""


def hub_file(name: str, repository: str | None, filename: str | None = None, *, download: bool = True) -> Path:
    """Return the weights file of a model from the local cache; download it from the Hugging Face Hub if necessary.

    Args:
        name: Name of the model, for messages.
        repository: Repository of the model on the hub.
        filename: File in the repository, if not the usual one; a safetensors file of the same name is preferred.
        download: Whether to download the file. If False, only check that it could be downloaded.

    Returns:
        Path of the file in the hub's own cache, or its address if it was only checked.

    Raises:
        Unreachable: If the hub cannot be reached.
        WeightsError: If the model has no published weights.
    """
    if not repository:
        raise WeightsError(f"{name}: has no published weights; {_FIX}.")
    usual = filename or "pytorch_model.bin"
    candidates = dict.fromkeys([usual.replace("pytorch_model.bin", "model.safetensors"), usual])
    for candidate in candidates:
        if isinstance(cached := try_to_load_from_cache(repository, candidate), str):
            return Path(cached)
    for candidate in candidates:
        try:
            found = get_hf_file_metadata(hf_hub_url(repository, candidate), timeout=_SECONDS)
            return Path(hf_hub_download(repository, candidate)) if download else Path(found.location)
        except EntryNotFoundError:
            continue
        except Exception as error:  # the hub's client raises errors of several libraries
            cause = f"weights are not cached and the hub cannot be reached ({type(error).__name__})"
            raise Unreachable(f"{name}: {cause}; {_FIX}.") from error
    raise WeightsError(f"{name}: its repository {repository} has none of {', '.join(candidates)}; {_FIX}.")


def url_file(name: str, url: str) -> Path:
    """Return the weights file at a URL from torch's cache; download it into the cache if necessary.

    Args:
        name: Name of the model, for messages.
        url: Address of the file. Its name may contain the start of the sha256, as torch's do: `resnet18-f37072fd.pth`.

    Returns:
        Path of the file in the folder that `torch.hub` uses, too.

    Raises:
        WeightsError: If the URL cannot be reached, the file is damaged, or the cache cannot be written.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if is_file(path):
        return path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
        bar = tqdm(desc=path.name, total=size or None, unit="B", unit_scale=True, disable=None)
        with bar, urllib.request.urlopen(url, timeout=_STALLED) as answer:
            content = bytearray()
            while piece := answer.read(_PIECE):
                content += piece
                bar.update(len(piece))
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        host = urllib.parse.urlsplit(url).netloc
        cause = f"weights are not cached and {host} cannot be reached ({type(error).__name__})"
        raise WeightsError(f"{name}: {cause}; save {url} in {printable(str(path.parent))}, or {_FIX}.") from error
    expected = re.search(r"-([0-9a-f]{8,})\.", path.name)
    if expected and not hashlib.sha256(content).hexdigest().startswith(expected[1]):
        raise WeightsError(f"{name}: the file from {url} is damaged ({len(content):,} bytes); try again, or {_FIX}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, bytes(content))
    except (OSError, OutputError) as error:
        where = printable(str(path.parent))
        raise WeightsError(
            f"{name}: {where} cannot be written; set TORCH_HOME to a writable folder, or pass weights=FILE (--weights FILE)."
        ) from error


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
