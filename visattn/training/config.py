"""What a training is: one flat record of plain values, read from TOML, from options, or written in Python."""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from visattn._support.checks import between, one_of, printable, shown, suggest, told
from visattn._support.files import base_name, regular
from visattn.data.captions.pictures import SCENES
from visattn.data.labeled.readers import KNOWN
from visattn.errors import OptionError
from visattn.loading.blueprints import check_attention, shared_model
from visattn.loading.folders import LARGEST

AUGMENTATIONS = ("none", "flip", "turn", "crop", "imagenet")
PRECISIONS = ("none", "bfloat16", "float16")
POLICIES = ("stop", "skip")


def setting(
    default: Any,  # noqa: ANN401 - of the field's type
    help: str,
    *,
    free: bool = False,
    choices: tuple[str, ...] = (),
    only: dict[str, str] | None = None,
) -> Any:  # noqa: ANN401
    """Return a field with its help.

    Args:
        default: Its value where none is given, or a function that makes it.
        help: What it is.
        free: Whether it may differ when a run goes on, because it changes no result.
        choices: All values that it may have.
        only: Values that other settings must have; else it would be without effect, and another value than the default is refused.
    """
    metadata = {"help": help, "free": free, "choices": choices, "only": only or {}}
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
    momentum: float = setting(0.9, "Momentum of SGD and its kin, for no other optimizer.")
    weight_decay: float = setting(5e-4, "Weight decay; not of norms and biases.")
    warmup_epochs: float = setting(
        1.0, "The learning rate rises linearly for this long, then follows a cosine that began at step 0 (timm's way)."
    )
    min_lr: float = setting(0.0, "Learning rate at the end.")
    clip_grad: float = setting(0.0, "Largest norm of the gradient; 0: any.")
    augment: str = setting(
        "flip",
        "flip: left to right; turn: the eight symmetries of a square; crop: shifted by up to an eighth, and flip; imagenet: a random "
        "part, colors, flip.",
        choices=AUGMENTATIONS,
    )
    auto_augment: str = setting("", "Policy of timm, for example rand-m9-mstd0.5.", only={"augment": "imagenet"})
    reprob: float = setting(0.0, "Probability of random erasing.", only={"augment": "imagenet"})
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
    license: str = setting("", "License of the weights, for the model card.", free=True)
    nonfinite: str = setting("stop", "What to do where the loss is no number.", free=True, choices=POLICIES)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for item in fields(self):
            object.__setattr__(self, item.name, _of_type(item, getattr(self, item.name), item.name))
        self._check_ranges()
        for item in fields(self):
            self._check_effect(item)

    def _check_ranges(self) -> None:
        """Refuse values out of range, or unknown.

        Raises:
            OptionError: If there is one.
        """
        for name in ("train_count", "test_count", "workers", "maps_every", "seed"):
            between(getattr(self, name), 0, 2**31, name)
        between(self.img_size, 0, LARGEST, "img_size")
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            between(getattr(self, name), 1, 2**31, name)
        for name in ("clip_grad", "weight_decay", "warmup_epochs", "min_lr"):
            between(getattr(self, name), 0, 1e9, name)
        for name in ("reprob", "ema", "momentum", "max_bad"):
            between(getattr(self, name), 0, 1, name)
        for name in ("epochs", "lr"):
            if not 0 < getattr(self, name) <= 1e9:
                raise OptionError(f"{name} must be a finite number above 0, at most 1e9, got {getattr(self, name)}.")
        for item in fields(self):
            if item.metadata["choices"]:
                one_of(getattr(self, item.name), item.metadata["choices"], item.name)
        for key, value in self.model_kwargs.items():
            if not isinstance(key, str) or not _plain(value):
                raise OptionError(
                    f"model_kwargs must be numbers, texts, truth values or lists of them, got {printable(str(key))}={shown(value)}."
                )

    def _check_effect(self, item: Field[Any]) -> None:
        """Refuse a setting that another one leaves without effect.

        Raises:
            OptionError: If it is not at its default.
        """
        for name, value in item.metadata["only"].items():
            if getattr(self, item.name) != item.default and getattr(self, name) != value:
                raise OptionError(
                    f"{item.name} is for {_flag(name)} {value} alone, got {_flag(name)} {getattr(self, name)}. Leave one out."
                )

    def digest(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def shared(self) -> Self:
        """Return what others may see: of files and folders their own names alone, which do not tell whose they are."""
        data = base_name(self.data)
        return replace(
            self,
            data=f"./{data}" if data != self.data and data in (*KNOWN, *SCENES) else data,
            root=base_name(self.root),
            model=shared_model(self.model),
            weights=base_name(self.weights),
            model_kwargs={
                key: base_name(value) if isinstance(value, str) and Path(value).is_absolute() else value
                for key, value in self.model_kwargs.items()
            },
        )

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

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("mixup", "cutmix"):
            between(getattr(self, name), 0, 1e9, name)
        between(self.smoothing, 0, 1, "smoothing")
        for width in self.widths:
            between(width, 1, 2**15, "widths")
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
        raise OptionError(
            f"{name}: cannot be read ({(error.strerror or str(error)).lower()}); check the path (--config)."
        ) from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise OptionError(f"{name}: is no TOML: {error}; see docs/training.md for an example.") from error
    return checked(values, name, kind)


def _of_type(item: Field[Any], value: Any, name: str) -> Any:  # noqa: ANN401
    """Return a value under its setting's type; whole numbers count as others, lists as tuples.

    Raises:
        OptionError: If it is of another type, or text that no file can hold.
    """
    wanted = type(item.default_factory() if item.default is MISSING else item.default)  # type: ignore[operator] # one of both is there
    if wanted is float and (isinstance(value, float) or (type(value) is int and abs(value) < 2**53)):
        value = float(value)  # numpy's too, which a file would tell otherwise
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    fits = isinstance(value, wanted) and (wanted is not int or type(value) is int)
    if not fits or (wanted is tuple and not all(type(one) is int for one in value)):
        raise OptionError(f"{name} must be of type {wanted.__name__}, got {shown(value)}.")
    if wanted is str and not _encodable(value):
        raise OptionError(f"{name} must be text that UTF-8 can write, got '{printable(value)}'. Rename the file.")
    return value


def _encodable(text: str) -> bool:
    """Whether a file can hold a text; the name of a file may be bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked(values: dict[str, Any], source: str, kind: type[Recipe] = Config) -> dict[str, Any]:
    """Values of a file or of a caller under their settings' types.

    Raises:
        OptionError: If a key is unknown or a value is of another type.
    """
    known = {item.name: item for item in fields(kind)}
    found = {}
    for key, value in values.items():
        if key not in known:
            near = suggest(key, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise OptionError(f"{source}: unknown key '{printable(key)}'{hint} Known: {', '.join(known)}.")
        found[key] = _of_type(known[key], value, f"{source}: {key}")
    return found


def differences(before: dict[str, Any], config: Recipe) -> list[str]:
    """How a recorded configuration differs from this one in what changes results, as `lr 0.1 -> 0.05`."""
    now = config.digest()
    ruling = [item.name for item in fields(config) if not item.metadata["free"]]
    return [f"{name} {told(before.get(name))} -> {told(now[name])}" for name in ruling if before.get(name) != now[name]]


def override(config: Kind, **values: Any) -> Kind:  # noqa: ANN401
    """The same with other values, checked."""
    return replace(config, **checked(values, "options", type(config)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _toml(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(c if printable(c) == c else f"\\U{ord(c):08x}" for c in quoted)  # it is printed too
    return repr(value)


def _plain(value: Any, depth: int = 4) -> bool:  # noqa: ANN401
    """Whether TOML can tell a value; lists are not nested without end."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_plain(one, depth - 1) for one in value)
    if isinstance(value, str):
        return _encodable(value)
    return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63)
