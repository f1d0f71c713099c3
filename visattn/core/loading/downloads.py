"""Weight files from a hub or a server: find them in the cache or download them, and report what is missing."""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tqdm import tqdm

from visattn._support.checks import printable
from visattn._support.files import is_file
from visattn._support.language import option
from visattn._support.whole_files import write_whole
from visattn.errors import OutputError, WeightsError

_SECONDS = 3  # timeout for the hub's first answer; short and without retries, so that users without network need not wait
_STALLED = 60  # timeout in seconds for a running download
_PIECE = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".npz")  # endings of files with weights


class Unreachable(WeightsError):
    """Weights are not cached, and the server that has them cannot be reached."""


class Missing(WeightsError):
    """A repository has none of the files that are looked for."""


def weights_file(name: str, repository: str | None, filename: str | None = None, *, download: bool = True) -> Path:
    """Return the weights file of a model; see `hub_file`.

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
        raise WeightsError(f"{name}: has no published weights; {_fix()}.")
    usual = filename or "pytorch_model.bin"
    return hub_file(name, repository, (usual.replace("pytorch_model.bin", "model.safetensors"), usual), download=download)


def hub_file(
    name: str,
    repository: str,
    filenames: Sequence[str],
    *,
    revision: str | None = None,
    download: bool = True,
    fix: str | None = None,
) -> Path:
    """Return the first of several files that a repository has, from the local cache or from the Hugging Face Hub.

    Args:
        name: Name of the model, for messages.
        repository: Repository on the hub.
        filenames: Files, the preferred one first.
        revision: Branch, tag or commit; None: the main branch.
        download: Whether to download the file. If False, only check that it could be downloaded.
        fix: What the user can do if the hub cannot be reached, for messages.

    Returns:
        Path of the file in the hub's own cache, or its address if it was only checked.

    Raises:
        Unreachable: If the hub cannot be reached.
        Missing: If the repository has none of the files.
        WeightsError: If there is no such repository or revision, or it asks for a login.
    """
    candidates = tuple(dict.fromkeys(filenames))
    for candidate in candidates:
        if isinstance(cached := try_to_load_from_cache(repository, candidate, revision=revision), str):
            return Path(cached)
    shown = printable(repository)
    for candidate in candidates:
        try:
            found = get_hf_file_metadata(hf_hub_url(repository, candidate, revision=revision), timeout=_SECONDS)
            return Path(hf_hub_download(repository, candidate, revision=revision)) if download else Path(found.location)
        except EntryNotFoundError:
            continue
        except GatedRepoError as error:
            raise WeightsError(
                f"{name}: {shown} is gated; accept its terms on its page, log in with `hf auth login`, and try again."
            ) from error
        except RepositoryNotFoundError as error:
            raise WeightsError(
                f"{name}: the hub has no repository {shown}, or it is private; check the name, or log in with `hf auth login`."
            ) from error
        except RevisionNotFoundError as error:
            raise WeightsError(f"{name}: {shown} has no revision {printable(str(revision))}; check its name.") from error
        except Exception as error:  # the hub's client raises errors of several libraries
            what = "weights" if candidate.endswith(_WEIGHTS) else candidate
            cause = (
                f"{what} {'are' if what == 'weights' else 'is'} not cached and the hub cannot be reached ({type(error).__name__})"
            )
            raise Unreachable(f"{name}: {cause}; {fix or _fix()}.") from error
    raise Missing(f"{name}: its repository {shown} has none of {', '.join(candidates)}; {fix or _fix()}.")


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
        host = urllib.parse.urlsplit(url).netloc
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            answer = printable(f"{error.code} {error.reason}")
            raise WeightsError(f"{name}: weights are not cached and {host} answers {answer}; {_fix()}.") from error
        cause = f"weights are not cached and {host} cannot be reached ({type(error).__name__})"
        raise WeightsError(f"{name}: {cause}; save {url} in {printable(str(path.parent))}, or {_fix()}.") from error
    expected = re.search(r"-([0-9a-f]{8,})\.", path.name)
    if expected and not hashlib.sha256(content).hexdigest().startswith(expected[1]):
        raise WeightsError(f"{name}: the file from {url} is damaged ({len(content):,} bytes); try again, or {_fix()}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, bytes(content))
    except (OSError, OutputError) as error:
        where = printable(str(path.parent))
        fix = "call torch.hub.set_dir with" if getattr(torch.hub, "_hub_dir", None) else "set TORCH_HOME to"
        raise WeightsError(
            f"{name}: {where} cannot be written; {fix} a writable folder, or pass {option('weights', 'FILE')}."
        ) from error


def _fix() -> str:
    return (
        f"pass a checkpoint as {option('weights', 'FILE')}, or {option('weights', 'none')} for random weights; the default model, a ViT, "
        "and tf_efficientnet_lite0, a CNN, also come through the package index"
    )
