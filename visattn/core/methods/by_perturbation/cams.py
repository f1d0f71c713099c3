"""Class activation maps with measured weights, which take one forward pass per channel. The package grad-cam computes them.

The inputs are the features of one layer and a `ScoredImages`. The package replaces modules of its model. It therefore
receives a wrapper that returns these features and evaluates the score, instead of the model itself.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.extras import need
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.result import to_map
from visattn.core.methods.scored import CountingScore, Score, ScoredImages
from visattn.core.methods.taps import cam_method, feature_of, over_positions, placed
from visattn.core.records import Recording, TokenLayout
from visattn.errors import OptionError, ShapeError


@in_own_modes
def scorecam(recording: Recording, *, scored: ScoredImages, layer: int | str = -1, batch_size: int = 16) -> AttentionMap:
    """Compute Score-CAM: each channel is weighted by the score of the image masked by that channel.

    Every channel is upsampled to the input size, scaled to [0, 1] and multiplied by the pixels. The weights `w` are the softmax of the
    resulting scores over the channels, and the map is `(sum_k w_k A_k)^+`. This takes one forward pass per channel and holds all masked
    images in memory at once.

    Args:
        recording: Recording with the features of the layer for one image.
        scored: Image and its score function.
        layer: See `visattn.methods.gradcam`.
        batch_size: Number of images per forward pass.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features do not exist or `batch_size` is out of range.
        MissingExtra: If the package grad-cam is not installed.

    Reference:
        Wang et al., "Score-CAM", CVPR Workshops 2020, arXiv:1910.01279. As in the package grad-cam, the score of a baseline
        is not subtracted, which the softmax would cancel. The score is that of the target, by default a logit.
    """
    made = _Made("scorecam", recording, scored, layer, batch_size)
    values = made.values(made.package.ScoreCAM(made.parts, []))
    return made.map(values, "Score-CAM")


@in_own_modes
def ablationcam(recording: Recording, *, scored: ScoredImages, layer: int | str = -1, batch_size: int = 16) -> AttentionMap:
    """Compute Ablation-CAM: each channel is weighted by the share of the score that is lost without it.

    Channel `k` is set to 0 at every position except prefix tokens. The weights are `w_k = (y - y_k) / |y|`, and the map is
    `(sum_k w_k A_k)^+`. This takes one forward pass per channel.

    Args:
        recording: Recording with the features of the layer for one image.
        scored: Image, its score function, and the model.
        layer: See `visattn.methods.gradcam`.
        batch_size: Number of images per forward pass.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features do not exist or cannot be put back into the model, the score is 0, or `batch_size` is out of
            range.
        MissingExtra: If the package grad-cam is not installed.

    Reference:
        Desai & Ramaswamy, "Ablation-CAM", WACV 2020. Computed by the package grad-cam, with two differences. Channels are
        set to 0 as in the paper, where the package uses -1e7 or less if a feature is negative. The loss of score is divided by the
        magnitude of the score, so that a negative score does not invert the map.
    """
    batch_size = min(batch_size, 1) if scored.alone else batch_size  # the edits of a layer are those of a batch
    made = _Made("ablationcam", recording, scored, layer, batch_size)
    zero: type[Any] = type("Zero", (made.package.ablation_layer.AblationLayer,), {"__call__": _zeroed})
    with torch.no_grad():
        whole = float(made.parts.score(scored.pixels))
    if not whole:
        raise OptionError("the score is 0, so the lost share of it is undefined. Use method 'scorecam'.")
    cam = made.package.AblationCAM(made.parts, [made.parts.layer], ablation_layer=zero(), batch_size=batch_size)
    with scored.editing(made.feature.layer, made.put_back, call=made.feature.call, calls=made.feature.calls):
        values = made.values(cam)
    return made.map(values if whole > 0 else -values, "Ablation-CAM")


def _zeroed(ablation: Any, _pixels: Tensor) -> Tensor:  # noqa: ANN401 - the package's layer
    made: Tensor = ablation.activations
    made[range(len(made)), ablation.indices[: len(made)]] = 0
    return made


class _Parts(nn.Module):
    """Wrapper that the package uses as model: `layer` returns fixed features for any pixels; the output is the score, `(N, 1)`."""

    def __init__(self, features: Tensor, score: Score) -> None:
        super().__init__()
        self.layer, self.score, self.given = _Given(features), CountingScore(score), features
        self.place = nn.Parameter(features.new_empty(0), requires_grad=False)  # from which the package reads the device

    def forward(self, pixels: Tensor) -> Tensor:
        self.given = self.layer(pixels)
        return self.score(pixels)[:, None]


class _Given(nn.Module):
    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features

    def forward(self, _pixels: Tensor) -> Tensor:
        return self.features


class _Made:
    """Steps that both methods share before and after calling the package."""

    def __init__(self, method: str, recording: Recording, scored: ScoredImages, layer: int | str, batch_size: int) -> None:
        need("pytorch_grad_cam", "cam", method)
        if batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, got {batch_size}.")
        if len(scored.pixels) != 1:
            raise ShapeError(
                f"this method takes one image at a time, got a batch of {len(scored.pixels)}. Explain the images one by one."
            )
        self.feature = feature = feature_of(recording, layer)
        self.layout: TokenLayout = placed(feature)
        if self.layout.holes:
            raise OptionError(
                f"{feature.layer}: the model dropped {len(self.layout.holes)} tokens, but this method needs complete feature maps."
            )
        features = over_positions(feature.value, self.layout).float()
        self.features = features.reshape(*features.shape[:2], *self.layout.grid)
        self.parts = _Parts(self.features, scored.score)
        self.package: Any = import_module("pytorch_grad_cam")
        self.layer, self._pixels, self._batch = feature.name, scored.pixels, batch_size
        self._method, self._recording = method, recording

    def put_back(self, output: Tensor) -> Tensor:
        """Return the layer's output with its features replaced by the edited features that `parts` received last."""
        given, prefix = self.parts.given, len(self.layout.prefix)
        if output.ndim == 3:
            made = torch.cat([output[:, :prefix], given.flatten(2).mT], 1)
        else:
            made = given if output.shape[1:] == given.shape[1:] else given.movedim(1, -1)
        same = given is not self.features or torch.allclose(made, output, rtol=1e-3, atol=1e-3)
        if made.shape != output.shape or not same:
            raise OptionError(f"{self.layer}: its features cannot be put back into the model. Use method 'scorecam'.")
        return made

    def values(self, cam: Any) -> Tensor:  # noqa: ANN401 - of the package
        """Compute the weighted sum of the channels, `(1, *grid)`, without showing the package's progress bars."""
        cam.batch_size = self._batch
        targets = [lambda scores: scores[0]]
        with redirect_stderr(io.StringIO()):
            found = cam.get_cam_image(self._pixels, self.parts.layer, targets, self.features.cpu().numpy(), None)
        return torch.from_numpy(found)

    def map(self, values: Tensor, meaning: str) -> AttentionMap:
        """Build the map from the positive part of the values."""
        notes = (f"{self.parts.score.count} evaluations of the model",)
        values = values.clamp(min=0)
        return to_map(
            self._recording, self._method, meaning, values, self.layout, {"layer": self.layer}, notes=notes, package="grad-cam"
        )


METHODS = {
    "scorecam": cam_method(scorecam, "score-cam", weights="score"),
    "ablationcam": cam_method(ablationcam, "ablation-cam", weights="score"),
}
