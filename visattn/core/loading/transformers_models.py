"""Models of Hugging Face transformers: from the hub, its cache, or a local folder.

`hf:google/vit-base-patch16-224` selects a repository, `hf:google/vit-base-patch16-224@v1` a revision of it, `hf:folder` a folder that
`save_pretrained` wrote. No code of a repository is run: weights must be safetensors, and the class must be one of the library.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.checks import first_line, printable
from visattn._support.extras import need
from visattn._support.files import is_file, is_folder
from visattn.core.loading.configurations import harmless, read_json
from visattn.core.loading.downloads import Missing, Unreachable, hub_file
from visattn.core.loading.limits import buildable, no_larger_than
from visattn.core.loading.prefixes import TRANSFORMERS
from visattn.core.loading.weights import check_finite, digest, read_checkpoint, read_tensors
from visattn.core.provenance import Provenance
from visattn.errors import UnsupportedModel, WeightsError

CONFIG = "config.json"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GENERATION = "generation_config.json"
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
    shown = printable(name)
    settings = read_json(source.config)
    kind = _class_of(settings, source)
    settings = harmless(settings, shown)
    config = _config(settings, source)
    if weights == "none":
        _built(kind, config, shown, torch.device("meta"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _built(kind, config, shown, torch.device("cpu"))
        warning = "the weights are random; the map shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    words = _TOKENIZERS if "input_ids" in inspect.signature(kind.forward).parameters else ()
    for file in (*_PROCESSORS, *words):  # beside the weights, where they are looked for
        with suppress(Unreachable):
            found = source.find(file)
            if found and file.endswith("_config.json"):
                harmless(read_json(found), printable(str(found)), sizes=False)
    files: Sequence[Path]
    notes: tuple[str, ...] = ()
    if isinstance(weights, Path):
        files, origin, fix = [weights], printable(weights.name), "pass the weights of this model"
        tensors, notes = read_tensors(weights, _built(kind, config, shown, torch.device("meta")))
    else:
        files, origin, fix = _safetensors(source), source.origin, "check its files"
        tensors = {key: tensor for file in files for key, tensor in read_checkpoint(file).items()}
    model, info = _filled(kind, config, tensors, _generation(settings, source), shown, fix)
    if others := sorted(info["mismatched_keys"]):
        key, given, own = others[0]
        sizes = f"{_size(given)} in the weights and {_size(own)} by {CONFIG}"
        more = f", and {len(others) - 1} more tensors differ" if len(others) > 1 else ""
        raise WeightsError(f"{shown}: {printable(key)} is {sizes}{more}; {fix}.")
    if missing := [*info["missing_keys"]]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"{shown}: the weights have no values for {sorted(missing)[0]}{more} of {kind.__name__}; pass the weights of this class."
        )
    check_finite(model.state_dict(), shown)
    unused = len(info["unexpected_keys"])
    notes += (f"{unused} tensors of the weights are not used by {kind.__name__}",) if unused else ()
    notes += (f"weights are in {len(files)} files; the digest is that of the first",) if len(files) > 1 else ()
    return model.eval(), Provenance(model=name, weights=origin, weights_sha256=digest(files[0]), notes=notes)


def holds_model(place: str) -> bool:
    """Check whether a folder has a model of transformers."""
    file = Path(place) / CONFIG
    if not is_file(file):
        return False
    with suppress(WeightsError):
        return "model_type" in read_json(file)
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
        place, _, revision = name.removeprefix(TRANSFORMERS).partition("@")
        folder = Path(name.removeprefix(TRANSFORMERS)).expanduser()
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


def _class_of(settings: Mapping[str, Any], source: _Source) -> Any:  # noqa: ANN401
    """Return the class that a configuration names.

    Raises:
        UnsupportedModel: If the library does not have it, or it takes no pixels.
    """
    transformers, name = import_module("transformers"), printable(source.name)
    architectures = settings.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        if settings.get("auto_map"):
            raise UnsupportedModel(
                f"{name}: needs Python code of its repository, which is not run. If you trust that code, load the model in a file of "
                "yours with trust_remote_code=True, and pass FILE.py:FUNCTION."
            )
        if isinstance(named, str):
            here = f"transformers {transformers.__version__} has no class {printable(named)}"
            raise UnsupportedModel(f"{name}: {here}. Upgrade transformers if a newer version has it.")
        other = settings.get("architecture")
        known = isinstance(other, str) and import_module("timm").is_model(other)
        fix = f"It is the model {other} of timm: pass {other}." if known else 'Name it there: "architectures": ["CLASS"].'
        raise UnsupportedModel(f"{name}: its {CONFIG} names no class of transformers. {fix}")
    forward: Any = getattr(kind, "forward", None)
    if not any("pixel" in parameter for parameter in inspect.signature(forward).parameters):
        raise UnsupportedModel(f"{name}: {kind.__name__} has no input pixel_values. Pass a model that has one.")
    return kind


def _config(settings: dict[str, Any], source: _Source) -> Any:  # noqa: ANN401
    """Make a configuration of settings that were checked; the library itself may read another file than ours."""
    kinds = import_module("transformers").CONFIG_MAPPING
    try:
        with _quiet():
            config = kinds[settings.get("model_type")].from_dict(copy.deepcopy(settings), name_or_path=str(source.config.parent))
            complete = config.to_dict()
    except Exception as error:  # of the library, for values of the file
        cause = f"its {CONFIG} cannot be used ({type(error).__name__}: {first_line(error)})"
        raise UnsupportedModel(f"{printable(source.name)}: {cause}; check the file, or upgrade transformers.") from error
    harmless(complete, printable(source.name))  # also what the library added
    return config


def _generation(settings: dict[str, Any], source: _Source) -> Any:  # noqa: ANN401
    """Return the settings with which the model writes text, from their own file or else from the configuration; None if they are odd."""
    with suppress(Unreachable):
        if file := source.find(_GENERATION):
            settings = harmless(read_json(file), printable(str(file)), sizes=False)
    with suppress(Exception):  # of the library; only models that write text need them
        return import_module("transformers").GenerationConfig.from_dict(copy.deepcopy(settings))
    return None


def _built(kind: Any, config: Any, name: str, place: torch.device) -> nn.Module:  # noqa: ANN401
    """Build a network on a device; on `meta` it has no values, so that its size is known before any memory is taken.

    Raises:
        UnsupportedModel: If it is too large, or the library cannot build it.
    """
    try:
        with _quiet(), buildable(name), place:
            model: nn.Module = kind(copy.deepcopy(config))
    except UnsupportedModel:
        raise
    except Exception as error:  # of the library, for values of the file
        cause = f"{kind.__name__} cannot be built ({type(error).__name__}: {first_line(error)})"
        raise UnsupportedModel(f"{name}: {cause}; {_remedy(error, f'check its {CONFIG}')}.") from error
    return model


def _remedy(error: Exception, fix: str) -> str:
    return "install the package that it names" if isinstance(error, ImportError) else fix


def _safetensors(source: _Source) -> Sequence[Path]:
    """Return the weight files of a model.

    Raises:
        WeightsError: If they are not safetensors, or one is missing.
    """
    name, file = printable(source.name), source.find(_WHOLE, _INDEX)
    if file is None:
        raise WeightsError(
            f"{name}: has no {_WHOLE}, the only weights that are loaded. Add it, or save the model and its image processor with "
            "save_pretrained(FOLDER), and pass hf:FOLDER."
        )
    if file.name == _WHOLE:
        return [file]
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not places or not all(_is_part(part) for part in places.values()):
        raise WeightsError(f"{name}: its {_INDEX} names no files beside it for the tensors; download it again.")
    parts = {part: source.find(part) for part in sorted(set(places.values()))}
    if lacking := [part for part, place in parts.items() if place is None]:
        raise WeightsError(f"{name}: lacks {printable(lacking[0])}, a part of its weights; download it again.")
    return [part for part in parts.values() if part is not None]


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _is_part(part: object) -> bool:
    """Check whether a value is the name of a safetensors file, without a folder."""
    return isinstance(part, str) and bool(re.fullmatch(r"[\w.-]+\.safetensors", part))


def _filled(
    kind: Any,  # noqa: ANN401
    config: Any,  # noqa: ANN401
    tensors: dict[str, Tensor],
    generation: Any,  # noqa: ANN401
    name: str,
    fix: str,
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model of the library and fill it with tensors; no file is given to the library, so it looks for none.

    The result names the tensors whose shape differs. `fix` says what to do if the model cannot be filled.

    Raises:
        UnsupportedModel: If the configuration asks for a far larger network.
        WeightsError: If the library cannot do it.
    """
    place = config._name_or_path
    try:
        with _quiet(), no_larger_than(tensors, name, fix):
            model, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                generation_config=generation,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # of the library, for damaged or foreign files
        raise WeightsError(
            f"{name}: {kind.__name__} cannot be loaded ({type(error).__name__}: {first_line(error)}); {_remedy(error, fix)}."
        ) from error
    model.config._name_or_path = place  # where its processor and its tokenizer are looked for
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
