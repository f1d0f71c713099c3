"""Attention maps of the same few images while any loop trains, and no trace of it in the training."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, distributed, nn

from visattn._support.checks import between, printable
from visattn._support.files import check_output, write_whole
from visattn._support.modes import evaluating
from visattn.drawing.overlays import painted
from visattn.drawing.pages import Bar, Cell, sheet
from visattn.drawing.pictures import Picture, carrying, to_png
from visattn.drawing.style import PAGE, Style, StyleOptions
from visattn.errors import OptionError, VisattnWarning
from visattn.families import cam_layer, input_spec
from visattn.families.feature_maps import last_feature_map
from visattn.geometry import Geometry
from visattn.maps import AttentionMap, value_range
from visattn.methods import METHODS
from visattn.methods.gate_maps import PLACES
from visattn.methods.method import Method
from visattn.methods.table import method_of
from visattn.pipeline.captures import capture
from visattn.pipeline.inputs import Prepared
from visattn.pipeline.question import ask
from visattn.pipeline.targets import Target
from visattn.provenance import Provenance
from visattn.records import Recording
from visattn.training.logged_images import prepared_images, targets_of, unwrapped

_AUTO = ("relevance", "attention", "gates", "gradcam")  # the first that applies


_FROM_ONE_PASS = {"attention", "gradients", "gates", "glimpses", "features", "cam layer"}  # what methods drawn here may need


_ACROSS = 8  # images in a row


_FLAT = 1e-30  # a range below it is drawn as a constant map


_Send = Callable[[int, Picture], object]


class Board(Protocol):
    """What takes pictures as TensorBoard's `SummaryWriter` does."""

    def add_image(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Called as `add_image(tag, array, step, dataformats="HWC")`."""


Destination = str | os.PathLike[str] | Board | Callable[[int, Image.Image], object]


class AttentionLogger:
    """Draws where a model looks in the same images, every so many steps of its training.

    >>> logger = AttentionLogger(model, images, every=100, to="maps")
    >>> for step, batch in enumerate(loader):
    ...     train_on(batch)
    ...     logger(step)

    The model is run in evaluation mode, in its parameters' precision, without its parallel, compiled or averaging wrapper. Flags,
    gradients, buffers, random streams (of the CPU and CUDA), autocast and compiled code are afterwards what they were, so a training
    with a logger ends with the same bits as one without. Hooks of your own on the model do see the images. Of several processes only
    the first draws, and it waits for no other.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor | Prepared,
        every: int = 100,
        *,
        to: Destination | Sequence[Destination],
        photos: Sequence[Image.Image] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        method: str = "auto",
        target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None = None,
        classes: Sequence[str] | None = None,
        tag: str = "attention",
        panel: int = 160,
        style: StyleOptions | None = None,
        **parameters: Any,  # noqa: ANN401 - the method's own
    ) -> None:
        """Draw one page for trial, which goes nowhere, so that what does not apply is told before the training.

        Args:
            model: The model, an average of it, or a wrapper of either.
            images: `(B, C, H, W)` as the model takes them, or what `visattn.prepare_batch` gave.
            every: Steps from one page to the next.
            to: A folder, which gets `step_00000100.png` and so on; a `SummaryWriter`, or what has its `add_image`; a function of the
                step and the picture; or several of these.
            photos: What is shown of the images, each whole. By default the images, their normalisation undone.
            mean: Mean of each channel in that normalisation, of pixels in [0, 1]; by default the model's own. Images that lie in
                [0, 1] are shown as they are.
            std: Deviation likewise.
            method: A name of `visattn.methods.METHODS` that needs one pass. `auto` is the first that applies of relevance, attention
                of the last layer, gates of places (of each grid size the last), and Grad-CAM; it stays the same for all steps.
            target: The class that is explained, by index, for all images or each, such as their labels; None: the top class at that
                step; or a function from the model's output to a number for each image.
            classes: Names of the classes.
            tag: What a board calls the page.
            panel: Width of a panel in pixels.
            style: Options of `visattn.drawing.Style`, as a dictionary; by default `opacity` is 0.6 and `interpolation` is `nearest`.
            parameters: Parameters of the method, such as `layer`.

        Raises:
            OptionError: If an option is unknown or out of range, or the method does not apply to the model.
            ShapeError: If images, photos and targets are not as many, or images have another shape.
            OutputError: If the folder cannot be written.
            UnsupportedModel: If the parameters are split among processes.
            VisattnError: As `visattn.capture` and the method raise.
        """
        if not isinstance(every, int) or every < 1:
            raise OptionError(f"every must be a whole number of steps, 1 or more, got {every!r}.")
        self.every, self._count = every, 0
        self._model = unwrapped(model)
        self._seen = prepared_images(images, photos, mean, std, self._model)
        self._target, self._classes = targets_of(target, len(self._seen.pixels)), classes
        self._panel, self._style = round(between(panel, 32, 2000, "panel")), Style(**PAGE | (style or {}))
        self._parameters = parameters
        ask(method, parameters)
        if method != "auto" and not _drawable(method_of(method)):
            known = ", ".join(name for name, each in METHODS.items() if _drawable(each))
            raise OptionError(f"method '{method}' is not drawn during a training. Choose auto or one of: {known}.")
        several = [to] if isinstance(to, (str, os.PathLike)) or not isinstance(to, Sequence) else to
        self._destinations = [_destination(one, tag) for one in several]
        if method == "auto":
            with _untouched(self._model):
                method = self._chosen()
        self._method = method_of(method)
        self.draw(0)

    def __call__(self, step: int) -> None:
        """Draw a page if it is due at this step; a page that fails costs a `VisattnWarning`, never the training."""
        if step % self.every or not _first_process():
            return
        with _going_on(f"step {step}: attention maps were not drawn"):
            page = self.draw(step)
            for send in self._destinations:
                with _going_on(f"step {step}: attention maps were not written"):
                    send(step, page)

    def step(self) -> None:
        """The same for loops that do not count: the first call is step 0."""
        step, self._count = self._count, self._count + 1
        self(step)

    def draw(self, step: int) -> Picture:
        """The page of now, which goes nowhere; `step` is its title.

        Raises:
            VisattnError: As `visattn.capture` and the method raise.
        """
        with _untouched(self._model):
            recording, texts = self._recorded()
            made = Provenance(model=recording.provenance.model, weights=f"in training, step {step}", target=texts)
            rows = self._maps(replace(recording, provenance=made))
        meaning, facts = rows[0][1].meaning, rows[0][1].provenance
        count, cells, labels = len(self._seen.photos), [], []
        texts = texts if len(texts) == count else ("",) * count
        for start in range(0, count, _ACROSS):
            images = range(start, min(start + _ACROSS, count))
            labels += ["photo", *(label for label, _ in rows)]
            cells.append([Cell(self._small(image)[0], texts[image]) for image in images])
            cells += [[self._cell(found, image) for image in images] for _, found in rows]
        notes = ["a map explains the class under its photo, whose probability at this step is beside it"] if any(texts) else []
        notes += [text for _, found in rows for text in (*found.provenance.notes, *found.provenance.warnings)]
        signed = rows[0][1].signed
        page = sheet(
            cells,
            panel=self._panel,
            title=f"{facts.model}, step {step}: {meaning}",
            notes=[*dict.fromkeys(notes)],
            row_labels=labels,
            bar=Bar(
                self._style.colors(signed),
                ("panel's lowest", "panel's highest"),
                f"{meaning}, each panel on its own scale (written under it)",
            ),
        )
        drawing = self._style.facts(signed) | {"interpolation": self._style.interpolation}
        return carrying(
            page, facts.but(normalization=f"{self._style.scale(signed)}, each panel on its own scale", drawing=drawing)
        )

    def _small(self, image: int) -> tuple[Image.Image, Geometry]:
        """A photo at the size of a panel, and where the model's input lies on it."""
        photo = self._seen.photos[image]
        size = max(1, round(photo.height * self._panel / photo.width)), self._panel
        how = Image.Resampling.BOX if photo.width > self._panel else Image.Resampling.BICUBIC
        return photo.resize(size[::-1], how), self._seen.geometries[image].resized(size)

    def _cell(self, found: AttentionMap, image: int) -> Cell:
        """A map over its photo; the photo as it is under a constant one."""
        photo, place = self._small(image)
        heat = found.at(batch=image).to_heatmap(place, self._style.interpolation)
        low, high = value_range(heat.grid, self._style.normalize, heat.signed, holes=True)
        if high - low < _FLAT:
            return Cell(photo, f"constant {low:.3g}")
        digits = next((few for few in range(2, 7) if f"{low:.{few}g}" != f"{high:.{few}g}"), 7)  # early maps are nearly constant
        return Cell(painted(photo, heat, self._style), f"{low:.{digits}g} to {high:.{digits}g}")

    def _chosen(self) -> str:
        """The first method of `auto` that applies to the model and has the parameters."""
        layer = self._cam_layer()
        known = [layer] if layer is not None and layer in dict(self._model.named_modules()) else "none"
        with torch.no_grad(), capture(self._model, features=known) as recording:
            output = self._model(self._pixels())
        logits = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1 and input_spec(self._model).classifier
        classes = logits or callable(self._target)
        for name in _AUTO:
            method = METHODS[name]
            fits = set(self._parameters) <= set(signature(method.function).parameters)
            if fits and (classes or not method.targeted) and method.accepts(recording) is None:
                return name
        raise OptionError(
            f"{type(self._model).__name__}: no method applies by itself. Pass target=a function of its output, or method='eigencam'."
        )

    def _recorded(self) -> tuple[Recording, tuple[str, ...]]:
        """One pass with all that the method needs, and what it explains of each image."""
        method, layer = self._method, self._cam_layer() if "cam layer" in self._method.needs else None
        if layer is None and "cam layer" in method.needs:
            raise OptionError(f"{type(self._model).__name__}: which layer should be read is not known. Name it: layer='...'.")
        with (
            torch.set_grad_enabled(method.targeted),
            capture(self._model, features="none" if layer is None else [layer], gradients=method.targeted) as recording,
        ):
            output = self._model(self._pixels())
        if reason := method.accepts(recording):
            raise OptionError(f"{type(self._model).__name__}: the method does not apply: {reason}")
        if not method.targeted:
            return recording, ()
        with torch.enable_grad():
            score, texts = self._score(output)
        return recording.gradients(score), texts

    def _score(self, output: Any) -> tuple[Tensor, tuple[str, ...]]:  # noqa: ANN401 - whatever the model gives
        """A number for each image, and the class with its probability, where it is one."""
        if callable(self._target):
            return self._target(output), ()
        if not input_spec(self._model).classifier:
            raise OptionError(f"{type(self._model).__name__} has no classification head. Pass target=a function of its output.")
        Target(labels=self._classes).resolve(output)  # refuses what is no table of logits, and names that are too few
        index = output.argmax(1) if self._target is None else torch.tensor(self._target, device=output.device)
        if int(index.min()) < 0 or int(index.max()) >= output.shape[1]:
            raise OptionError(f"target must be a class from 0 to {output.shape[1] - 1}, got {index.tolist()}.")
        shares = output.detach().float().softmax(1).gather(1, index[:, None])[:, 0]
        names = [f"class {one}" if self._classes is None else printable(self._classes[one]) for one in index.tolist()]
        texts = tuple(f"{name}, {share:.0%}" for name, share in zip(names, shares.tolist(), strict=True))
        return output.gather(1, index[:, None])[:, 0], texts

    def _maps(self, recording: Recording) -> list[tuple[str, AttentionMap]]:
        """A map with the axis `batch` for each row, by what is written beside it; all are signed or none, for one bar explains them."""
        layers = [self._parameters]
        if self._method is METHODS["gates"] and "layer" not in self._parameters:
            placed = [each for each in recording.features if each.role in PLACES and each.layout is not None]
            layers = [{"layer": name} for name in {each.layout: each.layer for each in placed}.values()] or layers
        rows = []
        for parameters in layers:
            found = self._method.function(recording, **parameters)
            found = found.mean("head") if "head" in found.axes else found
            names = found.labels.get("layer", ())
            each = [(name, found.at(layer=i)) for i, name in enumerate(names)]
            rows += each or [(str(found.provenance.parameters.get("layer", found.meaning)), found)]
        return [(label, replace(found, signed=any(other.signed for _, other in rows))) for label, found in rows]

    def _pixels(self) -> Tensor:
        """A copy of the images, where and how the model's parameters are."""
        like = next((each for each in self._model.parameters() if each.is_floating_point()), self._seen.pixels)
        return self._seen.pixels.to(like, copy=True)

    def _cam_layer(self) -> str | None:
        """The layer that class activation maps read: the one that was named, else the last map that the model makes."""
        layer = self._parameters.get("layer", -1)
        if layer != -1:
            return layer if isinstance(layer, str) else None
        _, channels, height, width = self._seen.pixels.shape
        return cam_layer(self._model) or last_feature_map(self._model, channels, (height, width))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and full precision inside; its flags, buffers and all random streams are put back."""
    devices = {torch.device("cpu"), *(tensor.device for tensor in (*model.parameters(), *model.buffers()))}
    buffers = [
        (module._buffers, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the stream that models and loaders share
        stack.enter_context(torch.inference_mode(False))
        for kind in {device.type for device in devices}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(evaluating(model, frozen=True))
        try:
            yield
        finally:
            for place, name, buffer, version, value in buffers:
                place[name] = buffer
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever fails here, the training is worth more
        text = f"{what}, the training goes on: {type(error).__name__}: {error}"
        warnings.warn(text, VisattnWarning, stacklevel=4)  # the loop's own line


def _destination(to: Destination, tag: str) -> _Send:
    """How a page is sent there.

    Raises:
        OptionError: If it is none of the known kinds.
        OutputError: If it is a folder that cannot be written.
    """
    if isinstance(to, (str, os.PathLike)):
        folder = Path(to)
        if _first_process():
            check_output(folder / _name(0), overwrite=True)
        return lambda step, page: write_whole(folder / _name(step), to_png(page))
    if hasattr(to, "add_image"):
        return lambda step, page: to.add_image(tag, np.array(page), step, dataformats="HWC")
    if callable(to):
        return to
    raise OptionError(f"to must be a folder, a SummaryWriter or a function, got {type(to).__name__}. Or several in a list.")


def _name(step: int) -> str:
    return f"step_{step:08d}.png"


def _drawable(method: Method) -> bool:
    return method.needs <= _FROM_ONE_PASS and ("features" not in method.needs or "cam layer" in method.needs)


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
