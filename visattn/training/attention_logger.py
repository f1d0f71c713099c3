"""Logging of attention maps from any training loop: the same few images each time, without any effect on the training."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, distributed, nn

from visattn._support.checks import between
from visattn._support.modes import evaluating
from visattn._support.notes import warn
from visattn._support.whole_files import check_output, write_whole
from visattn.core.drawing.overlays import on_scale
from visattn.core.drawing.pages import Bar, Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying, to_png
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, PageOptions
from visattn.core.families import input_spec
from visattn.core.families.wrappers import unwrapped
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap, Heatmap, value_range
from visattn.core.maps.scaling import names_of, range_words, shows_nothing
from visattn.core.methods import METHODS
from visattn.core.methods.gate_maps import PLACES, numbered
from visattn.core.methods.method import Method
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import name_of, noun_of
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.recordings import layer_of_cam, recorded
from visattn.core.pipeline.targets import NoClasses, Of, ResolvedTarget, Target
from visattn.core.pipeline.tensors import prepare_tensor
from visattn.core.provenance import Provenance
from visattn.core.records import Recording, split_call
from visattn.errors import OptionError

_AUTO = ("relevance", "attention", "gates", "gradcam")  # `auto` takes the first that applies


_FROM_ONE_PASS = {"attention", "gradients", "gates", "glimpses", "features", "cam layer"}  # a method may need these and no others


_PANEL = 160  # pixels


_ACROSS = 8  # images per row


_FLAT = 1e-30  # a map with a smaller range counts as constant


_Send = Callable[[int, Picture], object]


class Board(Protocol):
    """Object that accepts images as TensorBoard's `SummaryWriter` does."""

    def add_image(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Add an image. It is called as `add_image(tag, array, step, dataformats="HWC")`."""


_EXPLAINS = "each map explains what is named under its image, with its value at this step"

Destination = str | os.PathLike[str] | Board | Callable[[int, Image.Image], object]


class AttentionLogger:
    """Callable that draws attention maps of the same images every few training steps.

    >>> logger = AttentionLogger(model, images, every=100, to="maps")
    >>> for step, batch in enumerate(loader):
    ...     train_on(batch)
    ...     logger(step)

    The model runs in evaluation mode and in the precision of its parameters. Parallel, compiled and averaging wrappers are removed
    first. Module flags, gradients, buffers, random number generators (CPU and CUDA), autocast and compiled code are restored
    afterward. So training with a logger is bit-identical to training without one. Your own hooks on the model do run on the images.
    In distributed training only the main process draws, and it does not wait for the others.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor | Prepared,
        every: int = 100,
        *,
        to: Destination | Sequence[Destination],
        method: MethodName | str = "auto",  # editors complete the names
        target: Of | Tensor = None,
        labels: Sequence[str] | None = None,
        tag: str = "attention",
        style: PageOptions | None = None,
        **parameters: Any,  # noqa: ANN401 - the method's own
    ) -> None:
        """Check the arguments by drawing one figure, which is discarded. Errors appear before the training starts.

        Args:
            model: The model, an average of it, or a wrapper of either.
            images: `(B, C, H, W)`, preprocessed for the model, or the output of `visattn.prepare_batch` or `prepare_tensor`. To draw a
                tensor, the model's normalization is undone. The prepared forms store the original images to draw on.
            every: Number of steps between figures.
            to: Destination, or a list of several: a folder, which receives `step_00000100.png` and so on; a `SummaryWriter` or any
                object with its `add_image`; or a function of the step and the image.
            method: A name in `visattn.methods.METHODS` that needs a single pass. `auto` takes the first that applies: relevance,
                attention of the last layer, spatial gates (the last one of each grid size), Grad-CAM. The choice is kept for all steps.
            target: Class to explain, as an index or a name; one for all images, or one for each, such as the labels. None: the top
                class at that step. Or a function from the model's output to one number for each image.
            labels: Names of the classes.
            tag: Name of the figure in TensorBoard.
            style: Dictionary with options of `visattn.drawing.Style`, and `panel`, the width of a panel in pixels. Defaults: `opacity`
                0.6, `interpolation` `nearest`, `panel` 160.
            parameters: Parameters of the method, such as `layer`; and `task`, what the outputs are if neither the model nor `labels` tell.

        Raises:
            OptionError: If an option is unknown or out of range, or the method does not apply to the model.
            ShapeError: If the numbers of images, photos and targets differ, or images have another shape.
            OutputError: If the folder cannot be written.
            UnsupportedModel: If the parameters are sharded across processes.
            VisattnError: If `visattn.capture` or the method raises one.
        """
        if not isinstance(every, int) or every < 1:
            raise OptionError(f"every must be a whole number of steps, 1 or more, got {every!r}.")
        self.every, self._count = every, 0
        self._model = unwrapped(model)
        seen = images if isinstance(images, Prepared) else prepare_tensor(images, self._model)
        self._seen = replace(seen, pixels=seen.pixels.detach().cpu().clone())
        options: dict[str, Any] = {"panel": _PANEL, **PAGE, **(style or {})}
        self._panel, self._style = round(between(options.pop("panel"), 32, 2000, "panel")), Style(**options).opaque()
        task = parameters.pop("task", None)
        self._question = ask(method, parameters, Target(_classes(target), labels=labels, task=task))
        if self._question.target.steps not in ((), ("class_names",)):
            raise OptionError(
                f"target '{target}' is not available during training. Pass a class, one for each image, or a function."
            )
        if self._question.method is not None and not _drawable(self._question.method):
            known = ", ".join(name for name, each in METHODS.items() if _drawable(each))
            raise OptionError(f"method '{method}' is not available during training. Choose auto or one of: {known}.")
        several = [to] if isinstance(to, (str, os.PathLike)) or not isinstance(to, Sequence) else to
        self._destinations = [_destination(one, tag) for one in several]
        if self._question.method is None:
            with _untouched(self._model):
                name = self._chosen()
            self._question = replace(self._question, name=name, method=METHODS[name])
        self.draw(0)

    def __call__(self, step: int) -> None:
        """Draw and send a figure if one is due at this step. If that fails, issue a `VisattnWarning` and let the training continue."""
        if step % self.every or not _first_process():
            return
        with _going_on(f"step {step}: attention maps were not drawn"):
            page = self.draw(step)
            for send in self._destinations:
                with _going_on(f"step {step}: attention maps were not written"):
                    send(step, page)

    def step(self) -> None:
        """Call the logger with its own step counter, for loops without one. The first call is step 0."""
        step, self._count = self._count, self._count + 1
        self(step)

    def draw(self, step: int) -> Picture:
        """Draw and return the current figure without sending it. `step` appears in the title.

        Raises:
            VisattnError: If `visattn.capture` or the method raises one.
        """
        with _untouched(self._model):
            recording, texts = self._recorded()
            made = Provenance(model=recording.provenance.model, weights=f"in training, step {step}", target=texts)
            rows = self._maps(replace(recording, provenance=made))
        meaning, facts = rows[0][1].meaning, rows[0][1].provenance
        count, cells, labels = len(self._seen.photos), [], []
        drawn = [[self._heat(found, image) for image in range(count)] for _, found in rows]
        grids = [np.stack([heat.grid for heat in heats]) for heats in drawn]
        scales = [value_range(grid, self._style.normalize, rows[0][1].signed, holes=True) for grid in grids]
        texts = texts if len(texts) == count else ("",) * count
        for start in range(0, count, _ACROSS):
            images = range(start, min(start + _ACROSS, count))
            labels += ["photo", *(label for label, _ in rows)]
            cells.append([Cell(self._small(image)[0], texts[image]) for image in images])
            cells += [
                [self._cell(heats[image], image, scale) for image in images] for heats, scale in zip(drawn, scales, strict=True)
            ]
        notes = (
            [_EXPLAINS if self._targeted else "under each image: its label, with the label's probability at this step"]
            if any(texts)
            else []
        )
        notes += [f"scale of {label}: {range_words(*scale)}" for (label, _), scale in zip(rows, scales, strict=True)]
        notes += [text for _, found in rows for text in (*found.provenance.notes, *found.provenance.warnings)]
        signed = rows[0][1].signed
        names = names_of(self._style.normalize, grids, signed)
        page = sheet(
            cells,
            panel=self._panel,
            title=f"{facts.model}, step {step}: {meaning}",
            notes=[*dict.fromkeys(notes)],
            row_labels=labels,
            bar=Bar(
                self._style.colors(signed),
                ("row minimum", "row maximum") if names == "minmax" else ("low end", "high end"),
                f"{meaning}, {names}, one scale for each row (range of each panel below it)",
            ),
        )
        drawing = self._style.facts(signed) | {"interpolation": self._style.interpolation}
        return carrying(page, facts.but(normalization=f"{names}, one scale for each row", drawing=drawing))

    def _small(self, image: int) -> tuple[Image.Image, Geometry]:
        """Resize an image to the panel size. Return it with the geometry of the model's input on it."""
        photo = self._seen.photos[image]
        size = max(1, round(photo.height * self._panel / photo.width)), self._panel
        how = Image.Resampling.BOX if photo.width > self._panel else Image.Resampling.BICUBIC
        return photo.resize(size[::-1], how), self._seen.geometries[image].resized(size)

    def _heat(self, found: AttentionMap, image: int) -> Heatmap:
        return found.at(batch=image).to_heatmap(self._small(image)[1], self._style.interpolation)

    def _cell(self, heat: Heatmap, image: int, scale: tuple[float, float]) -> Cell:
        """Draw a map over its image. One that is constant or nearly even leaves the image unchanged: colors would show noise."""
        photo, _ = self._small(image)
        low, high = float(np.nanmin(heat.grid)), float(np.nanmax(heat.grid))
        if high - low < _FLAT:
            return Cell(photo, f"constant {low:.3g}")
        if not heat.signed and shows_nothing(self._style.normalize, low, high):
            return Cell(photo, f"nearly even, {range_words(low, high)}")
        return Cell(on_scale(photo, heat, *scale, self._style), range_words(low, high))

    def _chosen(self) -> str:
        """Return the first method of `auto` that applies to the model and accepts the given parameters."""
        prepared = self._prepared()
        try:
            layer = layer_of_cam(self._model, prepared, self._question.parameters)
        except OptionError:
            layer = ""
        layer, _ = split_call(layer)
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
            f"{type(self._model).__name__}: no method applies automatically. Pass target=a function of its output, or method='eigencam'."
        )

    def _recorded(self) -> tuple[Recording, tuple[str, ...]]:
        """Run one recorded pass. Return the recording and, if a class is explained, each image's class with its probability."""
        question, found = recorded(self._model, self._prepared(), self._question)
        self._question = question  # a layer given by number may be the name of a module
        assert question.method is not None  # noqa: S101 - chosen before the first figure
        if reason := question.method.accepts(found.recording):
            raise OptionError(f"{type(self._model).__name__}: the method does not apply: {reason}")
        resolved = found.resolved if question.method.targeted else self._labeled()
        return found.recording, () if resolved is None else tuple(map(self._told, resolved.scores))

    def _labeled(self) -> ResolvedTarget | None:
        """Resolve the labels of the images for a method that explains no class; None if there are none, or the model has no classes."""
        if not isinstance(self._question.target.of, (list, tuple)):
            return None
        with evaluating(self._model), torch.no_grad(), suppress(NoClasses):
            return self._question.target.resolve(self._model(self._prepared().pixels))
        return None

    @property
    def _targeted(self) -> bool:
        return self._question.method is not None and self._question.method.targeted

    def _told(self, score: Mapping[str, Any]) -> str:
        """Return the explained class with its probability, and the predicted class if it is another one."""
        own, best = (
            name_of(score[key], self._question.target.labels, noun_of(score["outputs"])) for key in ("class", "predicted")
        )
        probability = score.get("probability")
        value = f"{own}: {score['score']:.3g}" if probability is None else f"{own}, {probability:.0%}"
        return value + ("" if own == best else f"\n{'largest' if probability is None else 'predicted'}: {best}")

    def _maps(self, recording: Recording) -> list[tuple[str, AttentionMap]]:
        """Return the label and the map (with axis `batch`) of each row. All are signed or none, because they share one color bar."""
        method = self._question.method
        assert method is not None  # noqa: S101 - chosen before the first figure
        layers = [self._question.parameters]
        if method is METHODS["gates"] and "layer" not in layers[0]:
            placed = [(name, each.layout) for name, each in numbered(recording, PLACES).items() if each.layout is not None]
            layers = [{"layer": name} for name in {layout: name for name, layout in placed}.values()] or layers
        rows = []
        for parameters in layers:
            found = method.function(recording, **parameters)
            found = found.mean("head") if "head" in found.axes else found
            names = found.labels.get("layer", ())
            each = [(name, found.at(layer=i)) for i, name in enumerate(names)]
            rows += each or [(found.facts.layer or found.meaning, found)]
        return [(label, replace(found, signed=any(other.signed for _, other in rows))) for label, found in rows]

    def _prepared(self) -> Prepared:
        """Return the images, copied to the device and dtype of the model's parameters."""
        like = next((each for each in self._model.parameters() if each.is_floating_point()), self._seen.pixels)
        return replace(self._seen, pixels=self._seen.pixels.to(like, copy=True))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode and full precision, then restore its flags, buffers and all random number generators."""
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
    except Exception as error:  # no failure of the logger may stop the training
        text = f"{what}, training continues: {type(error).__name__}: {error}"
        warn(text)


def _destination(to: Destination, tag: str) -> _Send:
    """Return a function that sends a figure to a destination.

    Raises:
        OptionError: If the destination is of an unknown kind.
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
    raise OptionError(f"to must be a folder, a SummaryWriter or a function, or a list of these, got {type(to).__name__}.")


def _classes(target: Of | Tensor) -> Of:
    """Convert a tensor of class indices to a list."""
    if isinstance(target, Tensor):
        return [int(one) for one in target] if target.ndim else int(target)
    return target


def _name(step: int) -> str:
    return f"step_{step:08d}.png"


def _drawable(method: Method) -> bool:
    return method.needs <= _FROM_ONE_PASS and ("features" not in method.needs or "cam layer" in method.needs)


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
