"""What a training is: one flat record of plain values, read from TOML, from options, or written in Python."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from visattn._checks import between, one_of, printable, suggest
from visattn._files import regular
from visattn.errors import OptionError
from visattn.families.trained import check_attention

AUGMENTATIONS = ("none", "flip", "turn", "crop", "imagenet")
PRECISIONS = ("none", "bfloat16", "float16")
POLICIES = ("stop", "skip")


def setting(default: Any, help: str, *, free: bool = False, choices: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """A field with its help; a `free` one may differ when a run goes on, because it changes no result."""
    metadata = {"help": help, "free": free, "choices": choices}
    return field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """What every training has; every value has a default, and `help` in its field's metadata.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str]  # after `visattn train`

    data: str = setting(
        "fashion-mnist", "Folder, fashion-mnist, cifar10, cifar100, scenes, or scenes-shortcut, -conflict, -ground."
    )
    root: str = setting("", "Folder that holds the files of a named data set.", free=True)
    train_count: int = setting(0, "Train on a random subset of this size; 0: on all.")
    test_count: int = setting(0, "Test on a random subset of this size; 0: on all.")
    img_size: int = setting(0, "Input side in pixels; 0: the side of the pictures, 224 where they differ.")
    model: str = setting("visattn_resnet20", "A name of timm, tv:NAME of torchvision, file.py:factory, or visattn_resnet14, ...")
    model_kwargs: dict[str, Any] = setting(dict, "KEY=VALUE for the function that builds the model; may be repeated.")
    weights: str = setting("none", "none: random; auto: published ones, with a new last layer; or a FILE.")
    epochs: float = setting(10.0, "How often each picture is seen.")
    batch_size: int = setting(128, "Pictures a step, over all processes and accumulated parts.")
    accumulate: int = setting(1, "Parts in which a process takes its share of a batch, to save memory.")
    opt: str = setting("sgd", "Optimizer, a name of timm.")
    lr: float = setting(0.1, "Learning rate at its highest.")
    momentum: float = setting(0.9, "Momentum of SGD and its kin; optimizers with betas keep their own.")
    weight_decay: float = setting(5e-4, "Weight decay; not of norms and biases.")
    warmup_epochs: float = setting(
        1.0, "The learning rate rises linearly for this long, then follows a cosine that began at step 0 (timm's way)."
    )
    min_lr: float = setting(0.0, "Learning rate at the end.")
    clip_grad: float = setting(0.0, "Largest norm of the gradient; 0: any.")
    augment: str = setting(
        "flip",
        "flip: left to right; turn: the eight symmetries of a square; crop: shifted by up to an eighth, and flip; imagenet: a random "
        "part, colours, flip.",
        choices=AUGMENTATIONS,
    )
    auto_augment: str = setting("", "Policy of timm under imagenet, for example rand-m9-mstd0.5.")
    reprob: float = setting(0.0, "Probability of random erasing under imagenet.")
    ema: float = setting(0.0, "Decay of an average of the weights, which is then what is tested and kept; 0: off.")
    amp: str = setting("none", "Precision of the forward; float16 needs a GPU.", choices=PRECISIONS)
    channels_last: bool = setting(False, "Memory format NHWC: faster convolutions.")
    compile: bool = setting(False, "torch.compile: faster steps after a slow first one.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.", free=True)
    workers: int = setting(0, "Processes that read pictures; results do not depend on it.", free=True)
    seed: int = setting(0, "Of weights, order and augmentation.")
    log_every: int = setting(50, "Steps between rows of the log.")
    save_every: int = setting(500, "Steps between checkpoints; each epoch's end has one too.", free=True)
    maps_every: int = setting(0, "Steps between sheets of attention maps; 0: none.", free=True)
    max_bad: float = setting(0.001, "Largest share of pictures that may be unreadable.", free=True)
    licence: str = setting("", "Licence of the weights, for the model card.", free=True)
    nonfinite: str = setting("stop", "What to do where the loss is no number.", free=True, choices=POLICIES)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("train_count", "test_count", "img_size", "workers", "maps_every", "seed"):
            between(getattr(self, name), 0, 2**31, name)
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            between(getattr(self, name), 1, 2**31, name)
        for name in ("clip_grad", "weight_decay", "warmup_epochs", "min_lr"):
            between(getattr(self, name), 0, 1e9, name)
        for name in ("reprob", "ema", "momentum", "max_bad"):
            between(getattr(self, name), 0, 1, name)
        for name in ("epochs", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} must be a finite number above 0, got {getattr(self, name)}.")
        for item in fields(self):
            if item.metadata["choices"]:
                one_of(getattr(self, item.name), item.metadata["choices"], item.name)
        for key, value in self.model_kwargs.items():
            if not _plain(value):
                raise OptionError(f"model_kwargs must be numbers, texts, truth values or lists of them, got {key}={value!r}.")

    def digest(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def toml(self) -> str:
        """As a TOML file that `read` understands."""
        lines = [f"{name} = {_toml(value)}" for name, value in asdict(self).items() if not isinstance(value, dict)]
        lines += ["", "[model_kwargs]", *(f"{_toml(key)} = {_toml(value)}" for key, value in self.model_kwargs.items())]
        return "\n".join(lines) + "\n"


Kind = TypeVar("Kind", bound=Recipe)


@dataclass(frozen=True)
class Config(Recipe):
    """The recipe of a classifier.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str] = "classify"

    attention: str = setting("none", "none, or se, cbam, eca, ...: 'visattn.nn.ATTENTION'.")
    widths: tuple[int, ...] = setting((), "Channels of the stages of one of our ResNets.")
    smoothing: float = setting(0.1, "Label smoothing.")
    mixup: float = setting(0.0, "Alpha of mixup; 0: off.")
    cutmix: float = setting(0.0, "Alpha of CutMix; 0: off.")

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        super().__post_init__()
        for name in ("mixup", "cutmix"):
            between(getattr(self, name), 0, 1e9, name)
        between(self.smoothing, 0, 1, "smoothing")
        check_attention(self.attention)


def read_config(path: Path, kind: type[Recipe] = Config) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        OptionError: If it cannot be read, is no TOML, or has a key that no setting has; the message names line or key.
    """
    name = printable(str(path))
    try:
        values = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{name}: cannot be read ({(error.strerror or str(error)).lower()}); check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{name}: is no TOML: {error}; see docs/training.md for an example.") from error
    return checked(values, name, kind)


def checked(values: dict[str, Any], source: str, kind: type[Recipe] = Config) -> dict[str, Any]:
    """Values of a file or of a caller under their settings' types.

    Raises:
        OptionError: If a key is unknown or a value is of another type.
    """
    known = {item.name: item for item in fields(kind)}
    example = kind()
    found = {}
    for key, value in values.items():
        if key not in known:
            near = suggest(key, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise OptionError(f"{source}: unknown key '{printable(key)}'{hint} Known: {', '.join(known)}.")
        wanted = type(getattr(example, key))
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if wanted is tuple and isinstance(value, list) and all(isinstance(one, int) for one in value):
            value = tuple(value)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise OptionError(f"{source}: {key} must be of type {wanted.__name__}, got {value!r}.")
        found[key] = value
    return found


def differences(before: dict[str, Any], config: Recipe) -> list[str]:
    """How a recorded configuration differs from this one in what changes results, as `lr 0.1 -> 0.05`."""
    now = config.digest()
    ruling = [item.name for item in fields(config) if not item.metadata["free"]]
    return [f"{name} {before.get(name)} -> {now[name]}" for name in ruling if before.get(name) != now[name]]


def override(config: Kind, **values: Any) -> Kind:  # noqa: ANN401
    """The same with other values, checked."""
    return replace(config, **checked(values, "options", type(config)))


def _toml(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON writes some characters as TOML must not
    return repr(value)


def _plain(value: Any) -> bool:  # noqa: ANN401
    """Whether TOML can tell a value."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str))
