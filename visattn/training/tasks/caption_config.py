"""The recipe of a captioner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from visattn._support.checks import between
from visattn.errors import OptionError
from visattn.models.show_attend_tell import ATTENTIONS, Cost, Estimator, Objective
from visattn.nn.decoder.soft_hard import Reduction
from visattn.training.config import AUGMENTATIONS, Recipe, setting

_USUAL = Objective()
_HARD = {"attention": "hard"}
_DRAWN = _HARD | {"estimator": "reinforce"}


@dataclass(frozen=True)
class CaptionConfig(Recipe):
    """The recipe of a captioner; its own defaults are those of the authors' script for COCO, where there is one.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str] = "caption"

    data: str = setting(
        "scenes",
        "JSONL, Karpathy's or COCO's JSON, Flickr's token file, a folder with one of them, or scenes, scenes-new, scenes-any.",
    )
    root: str = setting("", "Folder of the pictures.", free=True)
    model: str = setting(
        "visattn_local_features",
        "The encoder: a name of timm, tv:NAME of torchvision, or file.py:factory; its feature map is used.",
    )
    weights: str = setting("none", "Of the encoder. none: random; auto: published ones; or a FILE.")
    batch_size: int = setting(64, "Pictures a step, over all processes and accumulated parts; each with one of its captions.")
    opt: str = setting("adam", "Optimizer, a name of timm.")
    lr: float = setting(4e-4, "Learning rate at its highest.")
    weight_decay: float = setting(0.0, "Weight decay; not of norms and biases.")
    clip_grad: float = setting(5.0, "Largest norm of the gradient; 0: any.")
    augment: str = setting(
        "none", "As for classifiers; but a flip turns left into right, which captions may tell.", choices=AUGMENTATIONS
    )
    attention: str = setting("soft", "soft, hard, or uniform: a baseline that cannot choose.", choices=ATTENTIONS)
    layer: str = setting("", "Feature map of the encoder: a dotted name, or a number of timm's; the last by default.")
    freeze: bool = setting(False, "Leave the encoder as it is, as the paper does.")
    coordinates: bool = setting(False, "Add learned coordinates to the features; for features that see a small part each.")
    embedding: int = setting(512, "Width of a word.")
    state: int = setting(512, "Width of the LSTM's state.")
    width: int = setting(0, "Width of the hidden layer of the attention's scores; 0: that of the features.")
    dropout: float = setting(0.5, "Before the last layer.")
    word_dropout: float = setting(0.0, "Probability that the word before is hidden: what is said next must then be seen.")
    gray: float = setting(0.0, "Probability that a picture is made gray.")
    min_count: int = setting(1, "Words that occur less often are unknown.")
    longest: int = setting(50, "Most words of a caption; longer ones are left out.")
    regularizer: float = setting(_USUAL.regularizer, "Weight of the doubly stochastic term: look at every place equally often.")
    reduction: str = setting(_USUAL.reduction, "Its normalization.", choices=get_args(Reduction))
    estimator: str = setting(
        _USUAL.estimator, "How hard attention learns where to look.", choices=get_args(Estimator), only=_HARD
    )
    semi_sampling: float = setting(
        _USUAL.semi_sampling, "Hard: share of batches that take the expected context, not a draw.", only=_HARD
    )
    reward: float = setting(_USUAL.reward, "Hard: weight of REINFORCE, the paper's lambda_r.", only=_DRAWN)
    entropy: float = setting(_USUAL.entropy, "Hard: weight of the entropy, the paper's lambda_e.", only=_HARD)
    decay: float = setting(_USUAL.decay, "Hard: of the running mean of costs that is the baseline.", only=_DRAWN)
    cost: str = setting(
        _USUAL.cost, "Hard: the mean over the longest caption's steps, or the sum.", choices=get_args(Cost), only=_DRAWN
    )
    temperature: float = setting(1.0, "Hard: of Gumbel draws.", only=_HARD | {"estimator": "gumbel"})

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("embedding", "state", "min_count", "longest"):
            between(getattr(self, name), 1, 2**15, name)
        between(self.width, 0, 2**15, "width")
        for name in ("dropout", "word_dropout", "gray", "semi_sampling", "decay"):
            between(getattr(self, name), 0, 1, name)
        for name in ("regularizer", "reward", "entropy"):
            between(getattr(self, name), 0, 1e9, name)
        if not 0 < self.temperature <= 1e9:
            raise OptionError(f"temperature must be a finite number above 0, at most 1e9, got {self.temperature}.")
        if self.reduction != _USUAL.reduction and not self.regularizer:
            raise OptionError(f"reduction is of the regularizer, which is 0, got {self.reduction}. Leave one out.")

    @property
    def objective(self) -> Objective:
        """The constants of the loss."""
        return Objective(**{name: getattr(self, name) for name in Objective.__dataclass_fields__})
