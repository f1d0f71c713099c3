"""Models of open_clip by name: `clip:ViT-B-32.openai`, an architecture and the tag of its weights."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.checks import first_line, printable, suggest
from visattn._support.extras import need
from visattn.core.loading.downloads import hub_file, url_file
from visattn.core.loading.initial_values import without_initial_values
from visattn.core.loading.prefixes import OPEN_CLIP
from visattn.core.loading.weights import check_finite, digest, read_tensors
from visattn.core.provenance import Provenance
from visattn.errors import UnsupportedModel, WeightsError

_PREPROCESSING = "mean", "std", "interpolation", "resize_mode"  # what a tag states of its input


def load(name: str, weights: str | Path, seed: int, img_size: tuple[int, int] | None) -> tuple[nn.Module, Provenance]:
    """Build a model with image tower and text tower, in evaluation mode; it returns a dictionary.

    Args:
        name: `clip:`, an architecture, and a dot and the tag of its weights.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.
        img_size: Input size to build for.

    Returns:
        The model, and the origin of its weights.

    Raises:
        MissingExtra: If open_clip is not installed.
        UnsupportedModel: If open_clip has no such architecture or tag, or its text tower needs files of a hub.
        WeightsError: If the weights cannot be reached, are damaged, or belong to another model.
    """
    need("open_clip", "clip", f"model {printable(name)}")
    architecture, tag = _known(name, tagged=weights == "auto")
    stated = import_module("open_clip").get_pretrained_cfg(architecture, tag) if tag else {}
    options = {
        "force_quick_gelu": bool(stated.get("quick_gelu")),  # the activation that the weights were trained with
        "force_preprocess_cfg": {key: stated[key] for key in _PREPROCESSING if stated.get(key) is not None},
        "force_image_size": img_size,
    }
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _built(name, architecture, **options)
        warning = "the weights are random; the map shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    file = _file_of(printable(name), stated) if weights == "auto" else Path(weights)
    with without_initial_values():
        model = _built(name, architecture, **options)
    notes: tuple[str, ...] = ()
    try:
        if file.suffix in (".npz", ".npy"):  # weights of SigLIP's authors, arrays that the library translates
            import_module("open_clip").load_checkpoint(model, str(file), strict=True, weights_only=True)
        else:
            tensors, notes = read_tensors(file, model)
            with _read_already(tensors):
                import_module("open_clip").load_checkpoint(model, str(file), strict=True, weights_only=True)
    except WeightsError:
        raise
    except Exception as error:  # of the library, for damaged or foreign files
        cause = f"is no checkpoint of {architecture} ({type(error).__name__}: {first_line(error)})"
        raise WeightsError(f"{printable(str(file))}: {cause}; pass the weights of this architecture.") from error
    check_finite(model.state_dict(), printable(str(file)))
    origin = f"{architecture}.{tag}" if weights == "auto" else printable(file.name)
    return model.eval(), Provenance(model=name, weights=origin, weights_sha256=digest(file), notes=notes)


def _known(name: str, *, tagged: bool) -> tuple[str, str]:
    """Split a name into architecture and tag, and check both.

    Raises:
        UnsupportedModel: If there is no such architecture or tag, or a tag is needed and none is given.
    """
    library = import_module("open_clip")
    architecture, _, tag = name.removeprefix(OPEN_CLIP).replace("/", ".").partition(".")
    if architecture not in library.list_models():
        near = ", ".join(f"{OPEN_CLIP}{one}" for one in suggest(architecture, library.list_models())) or "none"
        raise UnsupportedModel(f"unknown model '{printable(name)}'. Close matches: {near}.")
    tags = library.list_pretrained_tags_by_model(architecture)
    if (tag or tagged) and tag not in tags:
        wrong = f"unknown weights '{printable(tag)}'" if tag else "no weights are named"
        choices = ", ".join(f"{OPEN_CLIP}{architecture}.{one}" for one in tags) or "none; pass a checkpoint file as weights"
        raise UnsupportedModel(f"{wrong} for {OPEN_CLIP}{architecture}; available: {choices}.")
    return architecture, tag


def _built(name: str, architecture: str, **options: Any) -> nn.Module:  # noqa: ANN401
    try:
        with _quiet():
            model: nn.Module = import_module("open_clip").create_model(
                architecture, pretrained=None, pretrained_text=False, output_dict=True, **options
            )
    except Exception as error:  # some text towers read files of a hub
        raise UnsupportedModel(
            f"{printable(name)}: open_clip cannot build it ({type(error).__name__}: {first_line(error)}); if its text tower needs "
            "files of a hub, connect to it once."
        ) from error
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence messages to the root logger, which would also get a handler by them."""
    root, silent, level = logging.getLogger(), logging.NullHandler(), logging.root.manager.disable
    root.addHandler(silent)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        root.removeHandler(silent)


_giving = threading.Lock()


@contextmanager
def _read_already(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let the library translate tensors that were read already, in this thread; it would read fewer layouts of checkpoints.

    Its translation of names and sizes is part of a function that reads the file, through `load_state_dict` of its module.
    """
    factory, mine = import_module("open_clip.factory"), threading.get_ident()
    with _giving:
        original: Callable[..., Any] = factory.load_state_dict

        def give(*given: Any, **options: Any) -> Any:  # noqa: ANN401
            return dict(tensors) if threading.get_ident() == mine else original(*given, **options)

        factory.load_state_dict = give  # type: ignore[attr-defined]
        try:
            yield
        finally:
            factory.load_state_dict = original  # type: ignore[attr-defined]


def _file_of(name: str, stated: dict[str, Any]) -> Path:
    """Return the published weights of a tag, a safetensors file if there is one."""
    if not stated.get("hf_hub"):
        return url_file(name, stated["url"])
    repository, filename = os.path.split(stated["hf_hub"])
    usual = filename or "open_clip_pytorch_model.bin"
    safe = "open_clip_model.safetensors" if not filename else str(Path(filename).with_suffix(".safetensors"))
    return hub_file(name, repository, (safe, usual))
