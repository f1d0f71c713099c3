"""Attribution of a model's score to parts of an image.

The model is treated as a function from pixels to a score, and a kernel assigns each part of the image a value. The resulting map has
notes on the sum of the values, the score of the image and of the baseline, and the number of model evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import check_scores, one_of
from visattn._support.language import option
from visattn._support.opencv import cv2
from visattn._support.reprs import brief
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods import segments
from visattn.core.methods.result import to_map
from visattn.core.methods.segments import Parts, Segments
from visattn.core.records import Recording, TokenLayout
from visattn.errors import OptionError, ShapeError

Baseline = Literal["mean", "black", "blur"]
Score = Callable[[Tensor], Tensor]

_BLUR = 16  # shorter side of the input over the standard deviation of the blur: 14 pixels for 224
_RESIDUAL = 0.05  # largest residual without a warning, as a share of the score's rise
_ROUNDING = 1e-4  # additional tolerance, as a share of the sum of absolute values
_NOISE = 0.5  # warn above this standard error over the standard deviation of values: most differences are then chance


@dataclass(frozen=True, eq=False)
class ScoredImages:
    """Images to explain, and the score function that is explained.

    Attributes:
        pixels: `(B, C, H, W)` normalized input of the model; each image is explained separately.
        score: Function from any number of edited images, `(N, C, H, W)`, to their scores, `(N,)`.
        mean: Mean that normalization subtracted from each channel of pixels in [0, 1].
        std: Standard deviation by which normalization divided each channel.
        patch: Size of one token in input pixels, `(vertical, horizontal)`.
        model: Model that computes the score, for methods that edit a layer's output.
        alone: Whether `score` runs the model on one image after the other, as it does not keep those of a batch apart.
    """

    pixels: Tensor
    score: Score
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    patch: tuple[int, int] = (1, 1)
    model: nn.Module | None = None
    alone: bool = False

    __repr__ = brief

    @contextmanager
    def editing(self, layer: str, edit: Callable[[Tensor], Tensor], *, call: int = 0, calls: int = 1) -> Iterator[None]:
        """Replace the output of a layer by `edit(output)` inside the `with` block; of a layer with several calls, that of one call.

        Raises:
            OptionError: If the model is not known or has no such layer.
        """
        module = dict(self.model.named_modules()).get(layer) if self.model is not None else None
        if module is None:
            raise OptionError(f"the model that computes the score is not known or has no layer {layer}. Use visattn.explain.")

        numbers = count()

        def hook(_module: nn.Module, _args: object, output: object) -> object:
            if next(numbers) % calls != call:
                return None
            return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(cast(Tensor, output))

        handle = module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def baseline(self, kind: Baseline) -> Tensor:
        """Return baseline images `(B, C, H, W)`: the `mean` color of the normalization, `black`, or a `blur` of each image.

        Raises:
            OptionError: If the kind is unknown.
        """
        one_of(kind, get_args(Baseline), "baseline")
        if kind == "blur":
            sigma = min(self.pixels.shape[-2:]) / _BLUR
            planes = self.pixels.detach().float().cpu().flatten(0, 1).numpy()
            blurred = torch.stack([torch.from_numpy(cv2.GaussianBlur(plane, (0, 0), sigma)) for plane in planes])
            return blurred.view(self.pixels.shape).to(self.pixels)
        black = [-mean / std if kind == "black" else 0.0 for mean, std in zip(self.mean, self.std, strict=True)]
        return self.pixels.new_tensor(black)[:, None, None].expand_as(self.pixels)

    def parts(self, kind: Parts, grid_size: tuple[int, int] | None = None, num_segments: int = 196) -> list[Segments]:
        """Divide each image into parts.

        Args:
            kind: `pixels`, `grid` (cells of whole patches if possible) or `slic` (regions of similar color).
            grid_size: Rows and columns of the `grid`.
            num_segments: Approximate number of parts, unless `grid_size` is given.

        Returns:
            The parts of each image.

        Raises:
            OptionError: If the kind is unknown or a number is out of range.
            MissingExtra: If `slic` is chosen and scikit-image is not installed.
        """
        one_of(kind, get_args(Parts), "segments")
        size = self.pixels.shape[-2], self.pixels.shape[-1]
        if num_segments < 2:
            raise OptionError(f"num_segments must be at least 2, got {num_segments}.")
        if grid_size is not None and kind != "grid":
            raise OptionError(
                f"{option('grid_size')} applies only to {option('segments', 'grid')}, got {option('segments', kind)}. Use "
                f"{option('num_segments')}, or leave both out."
            )
        if kind == "slic":
            mean, std = (self.pixels.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
            found = [segments.slic((image * std + mean).clamp(0, 1), num_segments) for image in self.pixels.detach()]
        else:
            rows, columns = size if kind == "pixels" else grid_size or segments.about(size, self.patch, num_segments)
            found = [segments.grid(size, rows, columns)] * len(self.pixels)
        return [Segments(each.labels.to(self.pixels.device), each.grid, each.text) for each in found]


class KernelInput(NamedTuple):
    """Input of a kernel, which computes the contribution of each part of one image to the score.

    Attributes:
        score: Score function, which counts its evaluations.
        image: `(1, C, H, W)` image.
        ground: `(1, C, H, W)` baseline of the image; the image itself for methods without a baseline.
        parts: Assignment of pixels to parts.
        rise: Score of the image minus score of the baseline.
    """

    score: Score
    image: Tensor
    ground: Tensor
    parts: Segments
    rise: float


class KernelOutput(NamedTuple):
    """Output of a kernel.

    Attributes:
        values: `(parts,)` contributions.
        error: Standard error of a value, if values are estimated from samples.
    """

    values: Tensor
    error: float | None = None


def attributed(
    method: str,
    meaning: str,
    recording: Recording,
    scored: ScoredImages,
    kernel: Callable[[KernelInput], KernelOutput],
    parts: list[Segments],
    *,
    baseline: Baseline | None,
    additive: bool = False,
    diverging: bool = True,
    **parameters: object,
) -> AttentionMap:
    """Apply a kernel to every image and build the map, with notes on the scores and warnings about large errors.

    Args:
        method: Name of the method.
        meaning: Quantity of the values.
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        kernel: Function that computes the values of the parts of one image.
        parts: Parts of each image.
        baseline: Image that replaces removed parts; None if nothing is removed.
        additive: Whether the values should sum to the score's rise from the baseline.
        diverging: Whether values have both signs.
        parameters: Parameters of the method, for the provenance.

    Returns:
        A map with the axis `batch`.
    """
    grounds = None if baseline is None else scored.baseline(baseline)
    maps: list[Tensor] = []
    known: dict[str, object] = {"segments": ", ".join(dict.fromkeys(part.text for part in parts))}
    notes: list[str] = []
    warnings: list[str] = []
    if grounds is not None:
        known["baseline"] = baseline
        notes.append(_described(baseline, grounds))
    for i, part in enumerate(parts):
        image, score = scored.pixels[i : i + 1], CountingScore(scored.score)
        ground = image if grounds is None else grounds[i : i + 1]
        with torch.no_grad():
            top, bottom = (0.0, 0.0) if grounds is None else (float(score(image)), float(score(ground)))
        with _telling_gradients():
            found = kernel(KernelInput(score, image, ground, part, top - bottom))
        said, warned = ([], []) if grounds is None else _balance(found.values, top, bottom, additive)
        if found.error is not None:
            spread = float(found.values.std())
            said.append(f"values have a standard deviation of {spread:.2g} and a standard error of {found.error:.2g}")
            warned += [f"{said[-1]}; increase samples, or use fewer segments"] if found.error > _NOISE * spread else []
        said.append(f"{score.count} evaluation{'s' * (score.count > 1)} of the model")
        where = f"image {i}: " if len(parts) > 1 else ""
        notes += [where + text for text in said]
        warnings += [where + text for text in warned]
        maps.append(part.spread(found.values))
    layout = TokenLayout("input", (), parts[0].grid, Box(0, 0, *scored.pixels.shape[-2:]))
    return to_map(
        recording,
        method,
        meaning,
        torch.stack(maps).detach().float(),
        layout,
        {**known, **parameters},
        signed=diverging,
        facts=MapFacts(pixelwise=known.get("segments") == "pixels"),
        notes=tuple(notes),
        warnings=tuple(warnings),
        package="captum",
    )


@contextmanager
def _telling_gradients() -> Iterator[None]:
    """Tell in plain words that the score has no gradient."""
    try:
        yield
    except RuntimeError as error:
        lacks = "not have been used in the graph", "does not require grad", "derivative for"  # or an operation that has none
        if not any(text in str(error) for text in lacks):
            raise
        raise OptionError(
            "PyTorch has no gradient of the score with respect to the pixels. Use a method without gradients, such as 'captum.occlusion'."
        ) from error


def _balance(values: Tensor, top: float, bottom: float, additive: bool) -> tuple[list[str], list[str]]:
    """Return notes on both scores and on the residual of the sum of values, and a warning if an additive method misses the rise."""
    notes = [f"the score is {top:.4g}, {bottom:.4g} on the baseline"]
    total, rise = float(values.double().sum()), top - bottom
    residual = abs(total - rise)
    notes.append(f"values sum to {total:.4g}, the score rises by {rise:.4g} from the baseline: residual {residual:.2g}")
    missed = additive and residual > _RESIDUAL * abs(rise) + _ROUNDING * float(values.abs().sum())
    return notes, [f"{notes[-1]}; increase steps or samples"] if missed else []


class CountingScore:
    """Score function that checks its results and counts the images it has evaluated."""

    def __init__(self, score: Score) -> None:
        """Wrap a score function, with a count of 0."""
        self._score, self.count = score, 0

    def __call__(self, pixels: Tensor) -> Tensor:
        """Compute the scores of `(B, C, H, W)` pixels, `(B,)`.

        Raises:
            ShapeError: If the score does not return one number per image.
            ModelError: If a score is NaN or infinite.
        """
        self.count += len(pixels)
        found = self._score(pixels)
        if tuple(found.shape) != (len(pixels),):
            raise ShapeError(f"the score must be one number for each of {len(pixels)} images, got {tuple(found.shape)}.")
        check_scores(found)
        return found


def _described(baseline: Baseline | None, grounds: Tensor) -> str:
    values = ", ".join(f"{value:.3g}" for value in grounds[0, :, 0, 0].tolist())
    colors = {"mean": "the mean color of the training images", "black": "black"}
    return f"baseline: {colors[baseline]}, {values} after normalization" if baseline in colors else "baseline: the blurred photo"
