"""Training settings: one flat record of plain values, from a TOML file, from command line options, or from Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

from visattn._support.checks import between, one_of, printable, shown, suggest, told
from visattn._support.files import base_name, regular
from visattn._support.language import flag, option
from visattn._support.own_code import is_function
from visattn.core.loading.blueprints import shared_model
from visattn.core.loading.model_folders import LARGEST
from visattn.data.captions import SCENES
from visattn.data.labeled import KNOWN
from visattn.errors import OptionError
from visattn.nn import ATTENTION, Init
from visattn.training.values import check_range, of_type, storable, to_toml

AUGMENTATIONS = ("none", "flip", "turn", "crop", "imagenet")
PRECISIONS = ("none", "bfloat16", "float16")
POLICIES = ("stop", "skip")
KEPT = ("last", "best")
LOSSES = ("ce", "bce")
SCHEDULES = ("cosine", "linear", "step", "constant")


def setting(
    default: Any,  # noqa: ANN401 - of the field's type
    help: str,
    *,
    free: bool = False,
    choices: tuple[str, ...] = (),
    only: Mapping[str, str | tuple[str, ...]] | None = None,
    each: type = int,
) -> Any:  # noqa: ANN401
    """Return a dataclass field for a setting, with its help text.

    Args:
        default: Default value, or a function that makes it.
        help: Help text, for `--help`.
        free: Whether the value may change when a run is resumed, because it does not change results.
        choices: All allowed values; empty if any value is allowed.
        only: Values that other settings must have for this one to take effect. Otherwise a value other than the default is refused.
        each: Type of the items of a tuple. A tuple that is not empty by default keeps its length.
    """
    metadata = {"help": help, "free": free, "choices": choices, "only": only or {}, "each": each}
    return field(default_factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


_CROP: Mapping[str, str | tuple[str, ...]] = {"augment": "imagenet"}


@dataclass(frozen=True)
class Recipe:
    """Settings shared by all trainings. Each has a default, and its help text in the field's metadata.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str]  # after `visattn train`

    data: str = setting(
        "fashion-mnist",
        "Dataset: a folder, fashion-mnist, fashion-mnist-cluttered, fashion-mnist-turned, cifar10, cifar100, scenes, scenes-shortcut, "
        "scenes-conflict, scenes-ground, scenes-by-CAUSE, or FILE.py:FUNCTION, which returns the dataset of a split.",
    )
    root: str = setting(
        "",
        "Folder with the files of a published dataset (fashion-mnist and its variants, cifar10, cifar100).",
        free=True,
    )
    train_count: int = setting(0, "Train on a random subset of this many images; 0: all.")
    test_count: int = setting(0, "Test on a random subset of this many images; 0: all.")
    img_size: int = setting(
        0, "Side of the input in pixels; 0: of the weights it begins with, else the size of the images, at most 224."
    )
    model: str = setting(
        "visattn_resnet20",
        "Model: a timm name, tv:NAME for torchvision, FILE.py:FUNCTION, or a visattn model such as visattn_resnet14.",
    )
    model_kwargs: dict[str, Any] = setting(dict, "KEY=VALUE passed to the function that builds the model; repeat it for several.")
    weights: str = setting(
        "none",
        "Initial weights. none: random; auto: published weights; or a file, or the folder of a run, whose settings come with it.",
    )
    epochs: float = setting(10.0, "Number of epochs; fractions are allowed.")
    batch_size: int = setting(128, "Images per optimizer step, summed over all processes and micro-batches.")
    accumulate: int = setting(1, "Gradient accumulation: micro-batches per step and process. Saves memory.")
    opt: str = setting("sgd", "Optimizer, by its timm name.")
    lr: float = setting(0.1, "Peak learning rate.")
    momentum: float = setting(0.9, "Momentum, for optimizers that have one, such as SGD.")
    weight_decay: float = setting(5e-4, "Weight decay. Not applied to norm parameters and biases.")
    warmup_epochs: float = setting(
        1.0, "Epochs of linear warmup. The schedule also starts at step 0, as in timm; the warmup replaces its beginning."
    )
    schedule: str = setting(
        "cosine",
        "Learning rate after the warmup, as timm computes it. cosine and linear: down to min_lr; step: times decay_rate every "
        "decay_epochs; constant: the peak.",
        choices=SCHEDULES,
    )
    min_lr: float = setting(
        0.0, "Final learning rate. Only for --schedule cosine and linear.", only={"schedule": ("cosine", "linear")}
    )
    decay_epochs: float = setting(
        30.0, "Epochs between two decays of the learning rate. Only for --schedule step.", only={"schedule": "step"}
    )
    decay_rate: float = setting(
        0.1, "Factor of the learning rate at each decay. Only for --schedule step.", only={"schedule": "step"}
    )
    clip_grad: float = setting(0.0, "Clip the gradient to this norm; 0: no clipping.")
    augment: str = setting(
        "flip",
        "Data augmentation. flip: horizontal; turn: flip and rotations by 90 degrees; crop: flip and shifts by up to an eighth of "
        "the side; imagenet: random resized crop, flip and color jitter.",
        choices=AUGMENTATIONS,
    )
    auto_augment: str = setting(
        "",
        "AutoAugment, RandAugment or AugMix policy, as timm writes it, for example rand-m9-mstd0.5. Applied after the flips and crops.",
    )
    jitter: float = setting(
        -1.0,
        "Color jitter: brightness, contrast and saturation change by up to this share; 0: off. -1: 0.4 for --augment imagenet on color "
        "images without auto_augment, else off.",
    )
    reprob: float = setting(0.0, "Probability of random erasing, which fills a rectangle with the mean color.")
    crop_scale: tuple[float, ...] = setting(
        (0.08, 1.0), "Smallest and largest area of a random resized crop. Only for --augment imagenet.", only=_CROP, each=float
    )
    crop_ratio: tuple[float, ...] = setting(
        (0.75, 1.3333333333333333),
        "Smallest and largest ratio of width to height of a random resized crop. Only for --augment imagenet.",
        only=_CROP,
        each=float,
    )
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
    tensorboard: bool = setting(False, "Write the log to RUN/tensorboard too. Needs the extra tensorboard.", free=True)
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
            object.__setattr__(self, item.name, of_type(item, getattr(self, item.name), item.name))
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
        for name in ("reprob", "ema", "momentum", "max_unreadable", "decay_rate"):
            between(getattr(self, name), 0, 1, name)
        if self.jitter != -1:
            between(self.jitter, 0, 10, "jitter")
        check_range(self.crop_scale, 1.0, "crop_scale")
        check_range(self.crop_ratio, 100.0, "crop_ratio")
        for name in ("epochs", "lr", "decay_epochs"):
            if not 0 < getattr(self, name) <= 1e9:
                raise OptionError(f"{name} must be a finite number above 0, at most 1e9, got {getattr(self, name)}.")
        for item in fields(self):
            if item.metadata["choices"]:
                one_of(getattr(self, item.name), item.metadata["choices"], item.name)
        for key, value in self.model_kwargs.items():
            if not isinstance(key, str) or not storable(value):
                raise OptionError(
                    f"model_kwargs must be numbers, strings, booleans or lists of these, got {printable(str(key))}={shown(value)}."
                )

    def _check_effect(self, item: Field[Any]) -> None:
        """Check that a setting other than its default takes effect.

        Raises:
            OptionError: If another setting makes it a no-op.
        """
        for name, value in item.metadata["only"].items():
            fitting = value if isinstance(value, tuple) else (value,)
            if getattr(self, item.name) != item.default and getattr(self, name) not in fitting:
                raise OptionError(
                    f"{option(item.name)} needs {option(name)} {' or '.join(fitting)}, got {getattr(self, name)}. Change one of them."
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
        lines = [f"{name} = {to_toml(value)}" for name, value in asdict(self).items() if not isinstance(value, dict)]
        lines += ["", "[model_kwargs]", *(f"{to_toml(key)} = {to_toml(value)}" for key, value in self.model_kwargs.items())]
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
        choices=("auto", *get_args(Init)),
    )
    widths: tuple[int, ...] = setting((), "Channels of each stage, for visattn ResNets only; repeat it for each stage.")
    split: float = setting(
        0.0,
        "For a folder that holds CLASS/image.png: share of each class to test on, chosen by the seed; 0: it has train/ and test/.",
    )
    validation: float = setting(
        0.0,
        "Share of the training images of each class that is held out, chosen by the seed. These are then tested after each epoch, and the "
        "test images only once, at the end; 0: the test images after each epoch.",
    )
    keep: str = setting(
        "last",
        "Weights to test and save at the end. last: of the last step; best: of the epoch with the highest accuracy on the validation "
        "images, the first of equal ones.",
        choices=KEPT,
    )
    patience: int = setting(0, "Stop after this many epochs in a row without a higher validation accuracy; 0: never.")
    layer_decay: float = setting(
        1.0,
        "Peak learning rate of a group of layers, relative to the group after it, as timm groups layers; 1: the same for all.",
    )
    head_lr: float = setting(0.0, "Peak learning rate of the layer that outputs the classes; 0: lr.")
    freeze: tuple[str, ...] = setting(
        (),
        "Module to keep fixed, with its batch norm statistics, by its name; repeat it for several. backbone: all but the layer that "
        "outputs the classes and the inserted attention.",
        each=str,
    )
    loss: str = setting(
        "ce",
        "Loss. ce: cross-entropy; bce: binary cross-entropy of each class against the others, as timm computes it.",
        choices=LOSSES,
    )
    label_smoothing: float = setting(0.1, "Label smoothing, from 0 (off) to 1.")
    mixup: float = setting(0.0, "Mixup alpha; 0: off.")
    cutmix: float = setting(0.0, "CutMix alpha; 0: off.")

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("mixup", "cutmix"):
            between(getattr(self, name), 0, 1e9, name)
        for name in ("label_smoothing", "layer_decay"):
            between(getattr(self, name), 0, 1, name)
        for name in ("split", "validation"):
            between(getattr(self, name), 0, 0.9, name)
        between(self.patience, 0, 2**31, "patience")
        between(self.head_lr, 0, 1e9, "head_lr")
        if not self.validation and (self.keep == "best" or self.patience):
            name = "patience" if self.patience else "keep"
            raise OptionError(
                f"{option(name)} needs validation images, got none. Set {option('validation', 0.1)}, or leave {option(name)} out."
            )
        if self.loss == "bce" and self.label_smoothing == 1:
            raise OptionError(f"{option('label_smoothing')} must be below 1 for {option('loss', 'bce')}, got 1. Lower it.")
        if self.split and (self.data in KNOWN or is_function(self.data)):
            raise OptionError(
                f"{option('split')} applies to a folder, and {self.data} has a test split of its own. Leave {option('split')} out."
            )
        for width in self.widths:
            between(width, 1, 2**15, "widths")
        one_of(self.attention, ("none", *ATTENTION), "attention")
        if self.attention == "none" and self.attention_init != "auto":
            raise OptionError(
                f"{option('attention_init')} needs an {option('attention')}, got {self.attention_init} without one. Leave it out."
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
            f"{name}: cannot be read ({(error.strerror or str(error)).lower()}). Check the path{flag('config')}."
        ) from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number with thousands of digits
        raise OptionError(f"{name}: is not valid TOML: {error}. See docs/training.md for an example.") from error
    return checked(values, name, kind)


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
        found[key] = of_type(known[key], value, f"{source}: {key}")
    return found


def differences(before: dict[str, Any], config: Recipe) -> list[str]:
    """List the settings that affect results and differ from recorded ones, as `lr 0.1 -> 0.05`."""
    now = config.digest()
    before = type(config)().digest() | before  # older runs do not state the settings that came later, which start without effect
    ruling = [item.name for item in fields(config) if not item.metadata["free"]]
    return [f"{name} {told(before.get(name))} -> {told(now[name])}" for name in ruling if before.get(name) != now[name]]


def override(config: Kind, **values: Any) -> Kind:  # noqa: ANN401
    """Return a copy with other values, after checking them."""
    return replace(config, **checked(values, "options", type(config)))
