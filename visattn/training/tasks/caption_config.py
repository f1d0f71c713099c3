"""Settings for training a captioner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from visattn._support.checks import between
from visattn.errors import OptionError
from visattn.models.show_attend_tell import ATTENTIONS, FIRSTS, Cost, Estimator, Objective
from visattn.nn import Reduction
from visattn.training.config import AUGMENTATIONS, Recipe, setting

_USUAL = Objective()
_HARD = {"attention": "hard"}
_DRAWN = _HARD | {"estimator": "reinforce"}


@dataclass(frozen=True)
class CaptionConfig(Recipe):
    """Settings for training a captioner. Defaults follow the authors' script for COCO where it has a counterpart.

    Raises:
        OptionError: If a value is unknown or out of range.
    """

    command: ClassVar[str] = "caption"

    data: str = setting(
        "scenes",
        "Dataset: a JSONL file, Karpathy's or COCO's JSON, Flickr's token file, a folder with one of these, scenes, scenes-new or "
        "scenes-any.",
    )
    root: str = setting("", "Folder of the images.", free=True)
    model: str = setting(
        "visattn_local_features",
        "Encoder, of which a feature map is used: a timm name, tv:NAME for torchvision, or FILE.py:FUNCTION.",
    )
    weights: str = setting("none", "Initial weights of the encoder. none: random; auto: published weights; or a file.")
    batch_size: int = setting(
        64, "Images per optimizer step, summed over all processes and micro-batches; each with one of its captions."
    )
    opt: str = setting("adam", "Optimizer, by its timm name.")
    lr: float = setting(4e-4, "Peak learning rate.")
    weight_decay: float = setting(0.0, "Weight decay. Not applied to norm parameters and biases.")
    clip_grad: float = setting(5.0, "Clip the gradient to this norm; 0: no clipping.")
    augment: str = setting(
        "none",
        "Data augmentation. flip: horizontal; turn: flip and rotations by 90 degrees; crop: flip and shifts by up to an eighth of "
        "the side; imagenet: random resized crop, flip and color jitter. Avoid flips if captions mention left or right.",
        choices=AUGMENTATIONS,
    )
    attention: str = setting(
        "soft",
        "Attention of the decoder: soft, hard, local (soft in a window around a predicted cell), or uniform (a baseline with equal weights "
        "everywhere).",
        choices=ATTENTIONS,
    )
    radius: int = setting(
        2, "Half width of the window of local attention, in cells. Only for --attention local.", only={"attention": "local"}
    )
    layer: str = setting(
        "", "Feature map of the encoder: a module name, or an index of timm's intermediate feature maps; by default the last."
    )
    freeze: bool = setting(False, "Keep the encoder fixed, including its batch norm statistics, as in the paper.")
    coordinates: bool = setting(
        False, "Add learned row and column embeddings to the features; useful if their receptive field is small."
    )
    first: str = setting(
        "mean",
        "Initial state of the decoder. mean: from the mean of the features, as in the paper; learned: the same for every image, so that "
        "all it knows of an image comes from where it looks.",
        choices=FIRSTS,
    )
    embed_dim: int = setting(512, "Dimension of the word embeddings.")
    hidden_dim: int = setting(512, "Dimension of the LSTM's hidden state.")
    attention_dim: int = setting(0, "Dimension of the hidden layer that computes attention scores; 0: the same as the features.")
    dropout: float = setting(0.5, "Dropout before the output layer.")
    word_dropout: float = setting(
        0.0, "Probability of hiding the previous word in training, so that the decoder must use the image."
    )
    grayscale: float = setting(0.0, "Probability of converting a training image to gray.")
    min_count: int = setting(1, "Replace words that occur less often than this by <unknown>.")
    max_length: int = setting(50, "Longest caption, in words. Longer captions are left out of the training.")
    regularizer: float = setting(
        _USUAL.regularizer, "Weight of the doubly stochastic term, which rewards attending to every location equally."
    )
    reduction: str = setting(
        _USUAL.reduction,
        "Normalization of the doubly stochastic term. paper: sum over locations, mean over the batch; arctic (the authors' code): mean "
        "over locations, sum over the batch; mean: mean over both.",
        choices=get_args(Reduction),
    )
    estimator: str = setting(
        _USUAL.estimator,
        "Gradient estimator of hard attention. Only for --attention hard.",
        choices=get_args(Estimator),
        only=_HARD,
    )
    semi_sampling: float = setting(
        _USUAL.semi_sampling,
        "Share of batches in which hard attention uses the expected context instead of a sample. Only for --attention hard.",
        only=_HARD,
    )
    reward: float = setting(
        _USUAL.reward,
        "Weight of the REINFORCE term, the paper's lambda_r. Only for --attention hard and --estimator reinforce.",
        only=_DRAWN,
    )
    entropy: float = setting(
        _USUAL.entropy, "Weight of the entropy term, the paper's lambda_e. Only for --attention hard.", only=_HARD
    )
    decay: float = setting(
        _USUAL.decay,
        "Decay of the running mean that is the REINFORCE baseline. Only for --attention hard and --estimator reinforce.",
        only=_DRAWN,
    )
    cost: str = setting(
        _USUAL.cost,
        "REINFORCE cost of a caption: sum over its words, or mean over the steps of the batch's longest one. Only for "
        "--attention hard and --estimator reinforce.",
        choices=get_args(Cost),
        only=_DRAWN,
    )
    temperature: float = setting(
        1.0,
        "Temperature of Gumbel samples. Only for --attention hard and --estimator gumbel.",
        only=_HARD | {"estimator": "gumbel"},
    )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("embed_dim", "hidden_dim", "min_count", "max_length"):
            between(getattr(self, name), 1, 2**15, name)
        between(self.attention_dim, 0, 2**15, "attention_dim")
        between(self.radius, 1, 2**15, "radius")
        for name in ("dropout", "word_dropout", "grayscale", "semi_sampling", "decay"):
            between(getattr(self, name), 0, 1, name)
        for name in ("regularizer", "reward", "entropy"):
            between(getattr(self, name), 0, 1e9, name)
        if not 0 < self.temperature <= 1e9:
            raise OptionError(f"temperature must be a finite number above 0, at most 1e9, got {self.temperature}.")
        if self.reduction != _USUAL.reduction and not self.regularizer:
            raise OptionError(f"reduction needs a regularizer other than 0, got {self.reduction}. Change one of them.")

    @property
    def objective(self) -> Objective:
        """Constants of the loss."""
        return Objective(**{name: getattr(self, name) for name in Objective.__dataclass_fields__})
