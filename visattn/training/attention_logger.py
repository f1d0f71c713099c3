"""Attention maps of the same few images while any loop trains, and no trace of it in the training."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, distributed, nn

from visattn._support.checks import between
from visattn._support.files import check_output, write_whole
from visattn._support.modes import evaluating
from visattn.drawing.overlays import painted
from visattn.drawing.pages import Bar, Cell, sheet
from visattn.drawing.pictures import Picture, carrying, to_png
from visattn.drawing.style import PAGE, PageOptions, Style
from visattn.errors import OptionError, VisattnWarning
from visattn.families import input_spec
from visattn.geometry import Geometry
from visattn.maps import AttentionMap, value_range
from visattn.methods import METHODS
from visattn.methods.gate_maps import PLACES
from visattn.methods.method import Method
from visattn.pipeline.captures import capture
from visattn.pipeline.inputs import Prepared
from visattn.pipeline.question import ask
from visattn.pipeline.recordings import layer_of_cam, recorded
from visattn.pipeline.targets import Of, Target
from visattn.pipeline.tensors import prepare_tensor
from visattn.provenance import Provenance
from visattn.records import Recording
from visattn.training.wrappers import unwrapped

_AUTO = ("relevance", "attention", "gates", "gradcam")  # the first that applies


_FROM_ONE_PASS = {"attention", "gradients", "gates", "glimpses", "features", "cam layer"}  # what methods drawn here may need


_PANEL = 160  # pixels


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
    gradients, buffers, random streams (of the CPU and CUDA), autocast and compiled code are afterward what they were, so a training
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
        method: str = "auto",
        target: Of | Tensor = None,
        labels: Sequence[str] | None = None,
        tag: str = "attention",
        style: PageOptions | None = None,
        **parameters: Any,  # noqa: ANN401 - the method's own
    ) -> None:
        """Draw one page for trial, which goes nowhere, so that what does not apply is told before the training.

        Args:
            model: The model, an average of it, or a wrapper of either.
            images: `(B, C, H, W)` as the model takes them, or what `visattn.prepare_batch` or `prepare_tensor` gave, which also say how
                the images are shown. Of a tensor the model's normalization is undone.
            every: Steps from one page to the next.
            to: A folder, which gets `step_00000100.png` and so on; a `SummaryWriter`, or what has its `add_image`; a function of the
                step and the picture; or several of these.
            method: A name of `visattn.methods.METHODS` that needs one pass. `auto` is the first that applies of relevance, attention
                of the last layer, gates of places (of each grid size the last), and Grad-CAM; it stays the same for all steps.
            target: The class that is explained, by index or name, for all images or each, such as their labels; None: the top class at
                that step; or a function from the model's output to a number for each image.
            labels: Names of the classes.
            tag: What a board calls the page.
            style: Options of `visattn.drawing.Style`, as a dictionary, and `panel`, the width of a panel in pixels; by default `opacity`
                is 0.6, `interpolation` is `nearest` and `panel` is 160.
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
        seen = images if isinstance(images, Prepared) else prepare_tensor(images, self._model)
        self._seen = replace(seen, pixels=seen.pixels.detach().cpu().clone())
        options: dict[str, Any] = {"panel": _PANEL, **PAGE, **(style or {})}
        self._panel, self._style = round(between(options.pop("panel"), 32, 2000, "panel")), Style(**options)
        self._question = ask(method, parameters, Target(_classes(target), labels=labels))
        if self._question.method is not None and not _drawable(self._question.method):
            known = ", ".join(name for name, each in METHODS.items() if _drawable(each))
            raise OptionError(f"method '{method}' is not drawn during a training. Choose auto or one of: {known}.")
        several = [to] if isinstance(to, (str, os.PathLike)) or not isinstance(to, Sequence) else to
        self._destinations = [_destination(one, tag) for one in several]
        if self._question.method is None:
            with _untouched(self._model):
                name = self._chosen()
            self._question = replace(self._question, name=name, method=METHODS[name])
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
        prepared = self._prepared()
        try:
            layer = layer_of_cam(self._model, prepared, self._question.parameters)
        except OptionError:
            layer = ""
        known = [layer] if layer and layer in dict(self._model.named_modules()) else "none"
        with torch.no_grad(), capture(self._model, features=known) as recording:
            output = self._model(prepared.pixels)
        logits = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1 and input_spec(self._model).classifier
        classes = logits or callable(self._question.target.of)
        for name in _AUTO:
            method = METHODS[name]
            fits = set(self._question.parameters) <= set(method.parameters)
            if fits and (classes or not method.targeted) and method.accepts(recording) is None:
                return name
        raise OptionError(
            f"{type(self._model).__name__}: no method applies by itself. Pass target=a function of its output, or method='eigencam'."
        )

    def _recorded(self) -> tuple[Recording, tuple[str, ...]]:
        """One pass with all that the method needs, and the class of each image with its probability, where it explains one."""
        question, found = recorded(self._model, self._prepared(), self._question)
        assert question.method is not None  # noqa: S101 - it was chosen before the first page
        if reason := question.method.accepts(found.recording):
            raise OptionError(f"{type(self._model).__name__}: the method does not apply: {reason}")
        told = () if found.resolved is None else zip(found.resolved.names, found.resolved.shares, strict=True)
        return found.recording, tuple(f"{name}, {share:.0%}" for name, share in told)

    def _maps(self, recording: Recording) -> list[tuple[str, AttentionMap]]:
        """A map with the axis `batch` for each row, by what is written beside it; all are signed or none, for one bar explains them."""
        method = self._question.method
        assert method is not None  # noqa: S101 - it was chosen before the first page
        layers = [self._question.parameters]
        if method is METHODS["gates"] and "layer" not in layers[0]:
            placed = [each for each in recording.features if each.role in PLACES and each.layout is not None]
            layers = [{"layer": name} for name in {each.layout: each.layer for each in placed}.values()] or layers
        rows = []
        for parameters in layers:
            found = method.function(recording, **parameters)
            found = found.mean("head") if "head" in found.axes else found
            names = found.labels.get("layer", ())
            each = [(name, found.at(layer=i)) for i, name in enumerate(names)]
            rows += each or [(found.facts.layer or found.meaning, found)]
        return [(label, replace(found, signed=any(other.signed for _, other in rows))) for label, found in rows]

    def _prepared(self) -> Prepared:
        """The images, copied to where and to what the model's parameters are."""
        like = next((each for each in self._model.parameters() if each.is_floating_point()), self._seen.pixels)
        return replace(self._seen, pixels=self._seen.pixels.to(like, copy=True))


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


def _classes(target: Of | Tensor) -> Of:
    """A tensor of classes as a list."""
    if isinstance(target, Tensor):
        return [int(one) for one in target] if target.ndim else int(target)
    return target


def _name(step: int) -> str:
    return f"step_{step:08d}.png"


def _drawable(method: Method) -> bool:
    return method.needs <= _FROM_ONE_PASS and ("features" not in method.needs or "cam layer" in method.needs)


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
