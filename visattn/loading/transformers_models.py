"""Models of Hugging Face transformers: from the hub, its cache, or a local folder.

`hf:google/vit-base-patch16-224` selects a repository, `hf:google/vit-base-patch16-224@v1` a revision of it, `hf:folder` a folder that
`save_pretrained` wrote. No code of a repository is run: weights must be safetensors, and the class must be one of the library.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visattn._support.checks import first_line, printable
from visattn._support.extras import need
from visattn._support.files import is_file, is_folder
from visattn.errors import UnsupportedModel, WeightsError
from visattn.loading.downloads import Missing, Unreachable, hub_file
from visattn.loading.weights import check_finite, digest, read_checkpoint
from visattn.provenance import Provenance

PREFIX = "hf:"
CONFIG = "config.json"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PROCESSORS = "preprocessor_config.json", "processor_config.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
)
_REPOSITORY = r"[\w.-]+(/[\w.-]+)?"
_FIX = "pass a folder that has the model's files, hf:FOLDER, or try again with a network"


def load(name: str, weights: str | Path, seed: int, _img_size: tuple[int, int] | None) -> tuple[nn.Module, Provenance]:
    """Load a model in evaluation mode; the class is the one that its configuration names.

    Args:
        name: `hf:` and a repository, with or without `@revision`, or a folder.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.

    Returns:
        The model, and the origin of its weights.

    Raises:
        MissingExtra: If transformers is not installed.
        UnsupportedModel: If there is no such folder, or its class is not in transformers or takes no pixels.
        WeightsError: If a file cannot be reached or is damaged, or weights are missing or not safetensors.
    """
    need("transformers", "hf", f"model {printable(name)}")
    source = _Source.of(name)
    settings = _read_json(source.config)
    kind = _class_of(settings, source)
    config = _config(source)
    if weights == "none":
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            model: nn.Module = kind(config)
        warning = "the weights are random; the map shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    words = _TOKENIZERS if "input_ids" in inspect.signature(kind.forward).parameters else ()
    for file in (*_PROCESSORS, *words):  # beside the weights, where they are looked for
        with suppress(Unreachable):
            source.find(file)
    files: Sequence[Path]
    if isinstance(weights, Path):
        files, origin = [weights], printable(weights.name)
        model, info = _from(kind, None, name, config=config, state_dict=read_checkpoint(weights))
    else:
        files, origin = _safetensors(source), source.origin
        model, info = _from(kind, source.config.parent, name, config=config, use_safetensors=True, local_files_only=True)
    if missing := [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"{printable(name)}: the weights have no values for {sorted(missing)[0]}{more} of {kind.__name__}; "
            "pass the weights of this class."
        )
    check_finite(model.state_dict(), printable(name))
    unused = len(info["unexpected_keys"])
    notes: tuple[str, ...] = (f"{unused} tensors of the weights are not used by {kind.__name__}",) if unused else ()
    notes += (f"weights are in {len(files)} files; the digest is that of the first",) if len(files) > 1 else ()
    return model.eval(), Provenance(model=name, weights=origin, weights_sha256=digest(files[0]), notes=notes)


def holds_model(place: str) -> bool:
    """Check whether a folder has a model of transformers."""
    file = Path(place) / CONFIG
    if not is_file(file):
        return False
    with suppress(WeightsError):
        return "model_type" in _read_json(file)
    return False


@dataclass(frozen=True)
class _Source:
    """Place of a model's files: a folder, or a repository of the hub at a revision."""

    name: str
    place: str
    revision: str | None
    config: Path = Path()

    @classmethod
    def of(cls, name: str) -> _Source:
        """Find the configuration for a name; all other files then come from the same commit."""
        place, _, revision = name.removeprefix(PREFIX).partition("@")
        folder = Path(name.removeprefix(PREFIX)).expanduser()
        if is_folder(folder):
            source = cls(name, str(folder), None)
        elif not re.fullmatch(_REPOSITORY, place):
            raise UnsupportedModel(
                f"{printable(name)}: there is no such folder, and it is not the name of a repository (OWNER/NAME)."
            )
        else:
            source = cls(name, place, revision or None)
        file = source.find(CONFIG)
        if file is None:
            raise UnsupportedModel(f"{printable(name)}: has no {CONFIG}, so it is no model of transformers.")
        return replace(source, config=file, revision=None if is_folder(folder) else file.parent.name)

    @property
    def origin(self) -> str:
        """Name of the folder, or repository and commit."""
        return printable(self.place) if self.revision is None else f"{self.place}@{self.revision[:12]}"

    def find(self, *filenames: str) -> Path | None:
        """Return the first of these files that is there, or None."""
        if self.revision is None and is_folder(Path(self.place)):
            return next((Path(self.place, file) for file in filenames if is_file(Path(self.place, file))), None)
        try:
            return hub_file(printable(self.name), self.place, filenames, revision=self.revision, fix=_FIX)
        except Missing:
            return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{printable(str(file))}: cannot be read as JSON ({first_line(error)}); download it again.") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{printable(str(file))}: is not a configuration; download it again.")
    return found


def _class_of(settings: Mapping[str, Any], source: _Source) -> Any:  # noqa: ANN401
    """Return the class that a configuration names.

    Raises:
        UnsupportedModel: If the library does not have it, or it takes no pixels.
    """
    transformers, name = import_module("transformers"), printable(source.name)
    named = next(iter(settings.get("architectures") or ()), None)
    kind = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        if settings.get("auto_map"):
            raise UnsupportedModel(
                f"{name}: needs Python code of its repository, which is not run. If you trust that code, load the model in a file of "
                "yours with trust_remote_code=True, and pass FILE.py:FUNCTION."
            )
        which = f"no class {printable(named)}" if isinstance(named, str) else "no class, since its config.json names none,"
        raise UnsupportedModel(f"{name}: transformers {transformers.__version__} has {which} for it. Upgrade transformers.")
    forward: Any = getattr(kind, "forward", None)
    if not any("pixel" in parameter for parameter in inspect.signature(forward).parameters):
        raise UnsupportedModel(f"{name}: {kind.__name__} takes no pixels. Pass a model that reads images.")
    return kind


def _config(source: _Source) -> Any:  # noqa: ANN401
    auto = import_module("transformers").AutoConfig
    try:
        return auto.from_pretrained(source.config.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of the library, for values of the file
        cause = f"its {CONFIG} cannot be used ({type(error).__name__}: {first_line(error)})"
        raise UnsupportedModel(f"{printable(source.name)}: {cause}; check the file, or upgrade transformers.") from error


def _safetensors(source: _Source) -> Sequence[Path]:
    """Return the weight files of a model.

    Raises:
        WeightsError: If they are not safetensors, or one is missing.
    """
    name, file = printable(source.name), source.find(_WHOLE, _INDEX)
    if file is None:
        raise WeightsError(
            f"{name}: has no {_WHOLE}, and other formats can run code when loaded; convert it with save_pretrained(FOLDER), and pass "
            "hf:FOLDER."
        )
    if file.name == _WHOLE:
        return [file]
    parts: dict[str, Path | None] = {str(part): None for part in sorted(set(_read_json(file).get("weight_map", {}).values()))}
    for part in parts:
        parts[part] = source.find(part)
        if parts[part] is None:
            raise WeightsError(f"{name}: lacks {printable(part)}, a part of its weights; download it again.")
    return [part for part in parts.values() if part is not None]


def _from(kind: Any, folder: Path | None, name: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:  # noqa: ANN401
    try:
        with _quiet():
            model, info = kind.from_pretrained(
                folder, **options, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # of the library, for damaged or foreign files
        raise WeightsError(
            f"{printable(name)}: {kind.__name__} cannot be loaded ({type(error).__name__}: {first_line(error)}); check its files."
        ) from error
    return model, info


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages and progress bars of transformers."""
    logging = import_module("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
