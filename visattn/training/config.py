"""Training settings: one flat record of plain values, from a TOML file, from command line options, or from Python."""

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
from visattn.loading.blueprints import INITS, check_attention, shared_model
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
    """Return a dataclass field for a setting, with its help text.

    Args:
        default: Default value, or a function that makes it.
        help: Help text, for `--help`.
        free: Whether the value may change when a run is resumed, because it does not change results.
        choices: All allowed values; empty if any value is allowed.
        only: Values that other settings must have for this one to take effect. Otherwise a value other than the default is refused.
    """
    metadata = {"help": help, "free": free, "choices": choices, "only": only or {}}
    return field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """Settings shared by all trainings. Each has a default, and its help text in the field's metadata.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str]  # after `visattn train`

    data: str = setting(
        "fashion-mnist",
        "Dataset: a folder, fashion-mnist, fashion-mnist-cluttered, cifar10, cifar100, scenes, scenes-shortcut, scenes-conflict or "
        "scenes-ground.",
    )
    root: str = setting(
        "",
        "Folder with the files of a published dataset (fashion-mnist and its cluttered variant, cifar10, cifar100).",
        free=True,
    )
    train_count: int = setting(0, "Train on a random subset of this many images; 0: all.")
    test_count: int = setting(0, "Test on a random subset of this many images; 0: all.")
    img_size: int = setting(0, "Side of the input in pixels; 0: the size of the images, or 224 if their sizes differ.")
    model: str = setting(
        "visattn_resnet20",
        "Model: a timm name, tv:NAME for torchvision, FILE.py:FUNCTION, or a visattn model such as visattn_resnet14.",
    )
    model_kwargs: dict[str, Any] = setting(dict, "KEY=VALUE passed to the function that builds the model; repeat it for several.")
    weights: str = setting("none", "Initial weights. none: random; auto: published weights with a new last layer; or a file.")
    epochs: float = setting(10.0, "Number of epochs; fractions are allowed.")
    batch_size: int = setting(128, "Images per optimizer step, summed over all processes and micro-batches.")
    accumulate: int = setting(1, "Gradient accumulation: micro-batches per step and process. Saves memory.")
    opt: str = setting("sgd", "Optimizer, by its timm name.")
    lr: float = setting(0.1, "Peak learning rate.")
    momentum: float = setting(0.9, "Momentum, for optimizers that have one, such as SGD.")
    weight_decay: float = setting(5e-4, "Weight decay. Not applied to norm parameters and biases.")
    warmup_epochs: float = setting(
        1.0, "Epochs of linear warmup. The learning rate then follows a cosine that starts at step 0, as in timm."
    )
    min_lr: float = setting(0.0, "Final learning rate.")
    clip_grad: float = setting(0.0, "Clip the gradient to this norm; 0: no clipping.")
    augment: str = setting(
        "flip",
        "Data augmentation. flip: horizontal; turn: flip and rotations by 90 degrees; crop: flip and shifts by up to an eighth of "
        "the side; imagenet: random resized crop, flip and color jitter.",
        choices=AUGMENTATIONS,
    )
    auto_augment: str = setting(
        "",
        "AutoAugment or RandAugment policy, as timm writes it, for example rand-m9-mstd0.5. Only for augment=imagenet.",
        only={"augment": "imagenet"},
    )
    reprob: float = setting(0.0, "Probability of random erasing. Only for augment=imagenet.", only={"augment": "imagenet"})
    ema: float = setting(0.0, "Decay of an exponential moving average of the weights, which is then tested and saved; 0: off.")
    amp: str = setting("none", "Autocast precision of the forward pass; float16 needs a GPU.", choices=PRECISIONS)
    channels_last: bool = setting(False, "Use the channels-last (NHWC) memory format, for faster convolutions.")
    compile: bool = setting(False, "Use torch.compile: a slow first step, then faster ones.")
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", free=True)
    workers: int = setting(0, "Data loader workers; 0: load in the main process. Results do not depend on it.", free=True)
    seed: int = setting(0, "Random seed for initial weights, data order and augmentation.")
    log_every: int = setting(50, "Steps between rows of the log.")
    save_every: int = setting(500, "Steps between checkpoints. One is also saved at the end of each epoch.", free=True)
    maps_every: int = setting(0, "Steps between figures of attention maps; 0: none.", free=True)
    max_unreadable: float = setting(0.001, "Stop if more than this share of the images is unreadable.", free=True)
    license: str = setting("", "License of the weights, written into the model card.", free=True)
    nonfinite: str = setting(
        "stop",
        "If the loss is NaN or infinite: stop the run, or skip the step. More than 10 in a row always stop it.",
        free=True,
        choices=POLICIES,
    )

    def __post_init__(self) -> None:
        """Validate the settings."""
        for item in fields(self):
            object.__setattr__(self, item.name, _of_type(item, getattr(self, item.name), item.name))
        self._check_ranges()
        for item in fields(self):
            self._check_effect(item)

    def _check_ranges(self) -> None:
        """Check ranges and choices.

        Raises:
            OptionError: If a value is unknown or out of range.
        """
        for name in ("train_count", "test_count", "workers", "maps_every", "seed"):
            between(getattr(self, name), 0, 2**31, name)
        between(self.img_size, 0, LARGEST, "img_size")
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            between(getattr(self, name), 1, 2**31, name)
        for name in ("clip_grad", "weight_decay", "warmup_epochs", "min_lr"):
            between(getattr(self, name), 0, 1e9, name)
        for name in ("reprob", "ema", "momentum", "max_unreadable"):
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
                    f"model_kwargs must be numbers, strings, booleans or lists of these, got {printable(str(key))}={shown(value)}."
                )

    def _check_effect(self, item: Field[Any]) -> None:
        """Check that a setting other than its default takes effect.

        Raises:
            OptionError: If another setting makes it a no-op.
        """
        for name, value in item.metadata["only"].items():
            if getattr(self, item.name) != item.default and getattr(self, name) != value:
                raise OptionError(
                    f"{item.name} needs {_flag(name)} {value}, got {_flag(name)} {getattr(self, name)}. Change one of them."
                )

    def digest(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def shared(self) -> Self:
        """Return a copy that can be published: paths are reduced to base names, which do not reveal the user."""
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
        """Return the settings as a TOML file for `read_config`."""
        lines = [f"{name} = {_toml(value)}" for name, value in asdict(self).items() if not isinstance(value, dict)]
        lines += ["", "[model_kwargs]", *(f"{_toml(key)} = {_toml(value)}" for key, value in self.model_kwargs.items())]
        return "\n".join(lines) + "\n"


Kind = TypeVar("Kind", bound=Recipe)


@dataclass(frozen=True)
class Config(Recipe):
    """Settings for training a classifier.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str] = "classify"

    attention: str = setting("none", "Attention module to insert: none, se, eca, cbam and others; see visattn.nn.ATTENTION.")
    attention_init: str = setting(
        "auto",
        "Start of the attention, see visattn.nn.attach: paper, identity, zero_last or two_sigmoid. auto: paper in visattn networks, "
        "identity in others.",
        choices=INITS,
    )
    widths: tuple[int, ...] = setting((), "Channels of each stage, for visattn ResNets only; repeat it for each stage.")
    split: float = setting(
        0.0,
        "For a folder that holds CLASS/image.png: share of each class to test on, chosen by the seed; 0: it has train/ and test/.",
    )
    label_smoothing: float = setting(0.1, "Label smoothing, from 0 (off) to 1.")
    mixup: float = setting(0.0, "Mixup alpha; 0: off.")
    cutmix: float = setting(0.0, "CutMix alpha; 0: off.")

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("mixup", "cutmix"):
            between(getattr(self, name), 0, 1e9, name)
        between(self.label_smoothing, 0, 1, "label_smoothing")
        between(self.split, 0, 0.9, "split")
        if self.split and self.data in KNOWN:
            raise OptionError(
                f"split applies to a folder, and {self.data} has a test split of its own. Leave split (--split) out."
            )
        for width in self.widths:
            between(width, 1, 2**15, "widths")
        check_attention(self.attention)
        if self.attention == "none" and self.attention_init != "auto":
            raise OptionError(
                f"attention_init needs an attention (--attention), got {self.attention_init} without one. Leave it out."
            )


def read_config(path: Path, kind: type[Recipe] = Config) -> dict[str, Any]:
    """Read settings from a TOML file.

    Raises:
        OptionError: If the file cannot be read, is not valid TOML, or has an unknown key. The message names the line or key.
    """
    name = printable(str(path))
    try:
        values = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"{name}: cannot be read ({(error.strerror or str(error)).lower()}). Check the path (--config)."
        ) from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number with thousands of digits
        raise OptionError(f"{name}: is not valid TOML: {error}. See docs/training.md for an example.") from error
    return checked(values, name, kind)


def _of_type(item: Field[Any], value: Any, name: str) -> Any:  # noqa: ANN401
    """Convert a value to its setting's type. Integers are accepted as floats, and lists as tuples.

    Raises:
        OptionError: If the value has another type, or is text that cannot be encoded as UTF-8.
    """
    wanted = type(item.default_factory() if item.default is MISSING else item.default)  # type: ignore[operator] # one of both is set
    if wanted is float and (isinstance(value, float) or (type(value) is int and abs(value) < 2**53)):
        value = float(value)  # also converts NumPy scalars, which TOML would write differently
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    fits = isinstance(value, wanted) and (wanted is not int or type(value) is int)
    if not fits or (wanted is tuple and not all(type(one) is int for one in value)):
        raise OptionError(f"{name} must be of type {wanted.__name__}, got {shown(value)}.")
    if wanted is str and not _encodable(value):
        raise OptionError(f"{name} must be text that can be encoded as UTF-8, got '{printable(value)}'. Rename the file.")
    return value


def _encodable(text: str) -> bool:
    """Check whether text can be encoded as UTF-8. Names of files may be arbitrary bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked(values: dict[str, Any], source: str, kind: type[Recipe] = Config) -> dict[str, Any]:
    """Check the keys of a dictionary of settings, and convert its values to the settings' types.

    Raises:
        OptionError: If a key is unknown or a value has another type.
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
    """List the settings that affect results and differ from recorded ones, as `lr 0.1 -> 0.05`."""
    now = config.digest()
    before = {"attention_init": "auto"} | before  # older runs do not state it
    ruling = [item.name for item in fields(config) if not item.metadata["free"]]
    return [f"{name} {told(before.get(name))} -> {told(now[name])}" for name in ruling if before.get(name) != now[name]]


def override(config: Kind, **values: Any) -> Kind:  # noqa: ANN401
    """Return a copy with other values, after checking them."""
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
        return "".join(c if printable(c) == c else f"\\U{ord(c):08x}" for c in quoted)  # the file is also printed to the terminal
    return repr(value)


def _plain(value: Any, depth: int = 4) -> bool:  # noqa: ANN401
    """Check whether TOML can store a value. `depth` limits the nesting of lists."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_plain(one, depth - 1) for one in value)
    if isinstance(value, str):
        return _encodable(value)
    return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63)
