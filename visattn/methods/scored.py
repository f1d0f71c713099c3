"""A model as a function from pixels to a number, and what is said of values that explain this number.

In: prepared pixels, a score and a kernel, which gives each part of an image a value. Out: a map whose notes tell what the values sum
to, what the score is with and without the image, and how often the model was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn._support.opencv import cv2
from visattn.errors import ModelError, OptionError, ShapeError
from visattn.geometry import Box
from visattn.maps import AttentionMap, MapFacts
from visattn.methods import segments
from visattn.methods.result import to_map
from visattn.methods.segments import Parts, Segments
from visattn.records import Recording, TokenLayout

Baseline = Literal["mean", "black", "blur"]
Score = Callable[[Tensor], Tensor]

_BLUR = 16  # the shorter side of the input over the standard deviation of the blur: 14 pixels of 224
_RESIDUAL = 0.05  # share of the score's rise that a residual may reach without a warning
_ROUNDING = 1e-4  # of all values without their signs, likewise
_NOISE = 0.5  # standard error over the standard deviation of the values: from there on most differences are chance


@dataclass(frozen=True, eq=False)
class Scored:
    """What is asked: a number of each image.

    Attributes:
        pixels: `(B, C, H, W)`, as the model takes them; each image is explained by itself.
        score: From pixels `(N, C, H, W)`, any number of edited images, to `(N,)`.
        mean: What was subtracted from each channel of pixels in [0, 1].
        std: What they were divided by then.
        patch: Input pixels of one token, `(vertical, horizontal)`.
        model: The model behind the score, for methods that change what a layer gives.
    """

    pixels: Tensor
    score: Score
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    patch: tuple[int, int] = (1, 1)
    model: nn.Module | None = None

    @contextmanager
    def editing(self, layer: str, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside the `with`, a layer of the model gives `edit(what it gave)`.

        Raises:
            OptionError: If the model is not known or has no such layer.
        """
        module = dict(self.model.named_modules()).get(layer) if self.model is not None else None
        if module is None:
            raise OptionError(f"the model behind the score is not known, or has no layer {layer}. Use visattn.explain.")

        def hook(_module: nn.Module, _args: object, output: object) -> object:
            return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(cast(Tensor, output))

        handle = module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def baseline(self, kind: Baseline) -> Tensor:
        """Pixels `(B, C, H, W)` without content: `mean` (the color that was subtracted), `black`, or `blur` (each image, blurred).

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

    def parts(self, kind: Parts, cells: tuple[int, int] | None = None, count: int = 196) -> list[Segments]:
        """How each image is divided.

        Args:
            kind: `pixels`; `grid`, cells of whole patches where they can be; or `slic`, regions of like color.
            cells: Rows and columns of `grid`.
            count: About how many parts, where `cells` does not say.

        Returns:
            A division of each image.

        Raises:
            OptionError: If the kind is unknown or a number out of range.
            MissingExtra: If `slic` lacks scikit-image.
        """
        one_of(kind, get_args(Parts), "segments")
        size = self.pixels.shape[-2], self.pixels.shape[-1]
        if count < 2:
            raise OptionError(f"count must be at least 2 segments, got {count}.")
        if cells is not None and kind != "grid":
            raise OptionError(
                f"cells are rows and columns of segments='grid', got segments='{kind}'. Use count, or leave them out."
            )
        if kind == "slic":
            mean, std = (self.pixels.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
            found = [segments.slic((image * std + mean).clamp(0, 1), count) for image in self.pixels.detach()]
        else:
            rows, columns = size if kind == "pixels" else cells or segments.about(size, self.patch, count)
            found = [segments.grid(size, rows, columns)] * len(self.pixels)
        return [Segments(each.labels.to(self.pixels.device), each.grid, each.text) for each in found]


class Asked(NamedTuple):
    """What a kernel is asked: how much each part of one image does for the score.

    Attributes:
        score: The score; it counts how often it is asked.
        image: `(1, C, H, W)`.
        ground: The baseline of this image, likewise; the image itself where a method has none.
        parts: Which part each pixel belongs to.
        rise: By how much the score of the image is above that of the baseline.
    """

    score: Score
    image: Tensor
    ground: Tensor
    parts: Segments
    rise: float


class Found(NamedTuple):
    """What a kernel gives.

    Attributes:
        values: `(parts,)`.
        error: The standard error of a value, where values are estimated from samples.
    """

    values: Tensor
    error: float | None = None


def attributed(
    method: str,
    meaning: str,
    recording: Recording,
    scored: Scored,
    kernel: Callable[[Asked], Found],
    parts: list[Segments],
    *,
    baseline: Baseline | None,
    additive: bool = False,
    diverging: bool = True,
    **parameters: object,
) -> AttentionMap:
    """The map of every image.

    Args:
        method: Its name.
        meaning: What a value is.
        recording: For its provenance.
        scored: Pixels and their score.
        kernel: What gives the parts of an image their values.
        parts: The division of each image.
        baseline: What stands in the place of parts that are taken away; None where nothing is.
        additive: Whether values should sum to the score's rise from the baseline.
        diverging: Whether values have both signs.
        parameters: Of the method, for the provenance.

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
        image, score = scored.pixels[i : i + 1], Counted(scored.score)
        ground = image if grounds is None else grounds[i : i + 1]
        with torch.no_grad():
            top, bottom = (0.0, 0.0) if grounds is None else (float(score(image)), float(score(ground)))
        found = kernel(Asked(score, image, ground, part, top - bottom))
        said, warned = ([], []) if grounds is None else _balance(found.values, top, bottom, additive)
        if found.error is not None:
            spread = float(found.values.std())
            said.append(f"values spread by {spread:.2g}, each is uncertain by {found.error:.2g} (standard error)")
            warned += [f"{said[-1]}; raise evaluations, or take fewer segments"] if found.error > _NOISE * spread else []
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


def _balance(values: Tensor, top: float, bottom: float, additive: bool) -> tuple[list[str], list[str]]:
    """Notes: the score of the image and of the baseline, and how far the sum is from its rise; a warning where it should be there."""
    notes = [f"the score is {top:.4g}, {bottom:.4g} on the baseline"]
    total, rise = float(values.double().sum()), top - bottom
    residual = abs(total - rise)
    notes.append(f"values sum to {total:.4g}, the score rises by {rise:.4g} from the baseline: residual {residual:.2g}")
    missed = additive and residual > _RESIDUAL * abs(rise) + _ROUNDING * float(values.abs().sum())
    return notes, [f"{notes[-1]}; raise evaluations"] if missed else []


class Counted:
    """A score whose numbers are checked, and that counts the images it was asked of."""

    def __init__(self, score: Score) -> None:
        """Nothing is counted yet."""
        self._score, self.count = score, 0

    def __call__(self, pixels: Tensor) -> Tensor:
        """The score of `(B, C, H, W)` pixels, `(B,)`.

        Raises:
            ShapeError: If the score is not one number for each image.
            ModelError: If a number is NaN or infinite.
        """
        self.count += len(pixels)
        found = self._score(pixels)
        if tuple(found.shape) != (len(pixels),):
            raise ShapeError(f"the score must be one number for each of {len(pixels)} images, got {tuple(found.shape)}.")
        if not bool(found.isfinite().all()):
            raise ModelError("the score is NaN or infinite. Check the model's weights and input.")
        return found


def _described(baseline: Baseline | None, grounds: Tensor) -> str:
    values = ", ".join(f"{value:.3g}" for value in grounds[0, :, 0, 0].tolist())
    colors = {"mean": "the mean color of the training images", "black": "black"}
    return (
        f"baseline: {colors[baseline]}, {values} after normalization" if baseline in colors else "baseline: the photo, blurred"
    )
