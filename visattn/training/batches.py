"""Batches of images: their order, their augmentation, and the handling of unreadable images.

Training reads one long stream: permutation after permutation of all images, cut into batches of `batch_size`. Batches may cross the
end of an epoch. So every image occurs exactly once per epoch and every batch is full. To resume, only the number of images seen must
be stored, whatever the number of processes or workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms

from visattn._support.checks import first_line, printable
from visattn._support.language import option
from visattn.core.families.trained import InputFacts, evaluation_transform
from visattn.data import ImageDataset
from visattn.errors import DataError, ImageError, OptionError, ResourceError
from visattn.training.config import Recipe
from visattn.training.run.randomness import restoring, seed_cpu, seed_of

Transform = Callable[[Image.Image], Tensor]
_PATIENCE = (
    45  # seconds without a batch before a worker counts as hung; torch loses the death of a worker if a destructor is running
)


class Targets(Protocol):
    """Conversion of annotations (labels, captions) to the target tensors of a batch."""

    def one(self, known: Any) -> Any:  # noqa: ANN401
        """Return the target of one image. It may be random: the generators are seeded per image and epoch."""
        ...

    def batch(self, targets: list[Any]) -> tuple[Tensor, ...]:
        """Collate targets into tensors whose first axis is the batch. The list may be empty."""
        ...


class Labels:
    """Targets for classification: class indices, unchanged."""

    def one(self, known: int) -> int:
        """Return the class index unchanged."""
        return known

    def batch(self, targets: list[int]) -> tuple[Tensor, ...]:
        """Return the class indices as a tensor `(B,)`."""
        return (torch.tensor(targets, dtype=torch.long),)


class Ticket(NamedTuple):
    """Epoch and index of an image. Together with the seed they determine its augmentation."""

    epoch: int
    number: int


class Sample(NamedTuple):
    """Preprocessed image, its target (None if it could not be read), its index, and messages about unreadable images."""

    pixels: Tensor
    target: Any
    number: int
    bad: tuple[str, ...]


class Batch(NamedTuple):
    """`pixels (B, C, H, W)`, targets, indices of the images, and messages about unreadable images."""

    pixels: Tensor
    targets: tuple[Tensor, ...]
    numbers: list[int]
    bad: tuple[str, ...]


class Samples(Dataset[Sample]):
    """Dataset of images, each loaded, augmented and preprocessed on access."""

    def __init__(
        self,
        pictures: ImageDataset,
        transform: Transform,
        *,
        mode: str,
        seed: int,
        replace: bool,
        targets: Targets | None = None,
    ) -> None:
        """Create the dataset without reading any image.

        Args:
            pictures: Images with their annotations.
            transform: Function from an image to pixels. Its random numbers are seeded per image and epoch.
            mode: PIL mode to which images are converted, `L` or `RGB`.
            seed: Seed of the run.
            replace: Whether to replace an unreadable image by the next readable one. Otherwise it is left out.
            targets: Conversion of annotations to targets; `Labels` by default.
        """
        self.pictures, self.transform, self.mode, self.seed, self.replace = pictures, transform, mode, seed, replace
        self.targets = targets or Labels()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pictures)

    def __getitem__(self, ticket: Ticket) -> Sample:
        """Load and preprocess the image of a ticket.

        Raises:
            DataError: If no image can be read.
        """
        return self.__getitems__([ticket])[0]

    def __getitems__(self, tickets: Sequence[Ticket]) -> list[Sample]:
        """Load and preprocess the images of several tickets. PyTorch's loaders call this, so that generators are restored once."""
        with restoring():
            return [self._sample(ticket) for ticket in tickets]

    def _sample(self, ticket: Ticket) -> Sample:
        bad: list[str] = []
        for ahead in range(len(self.pictures) if self.replace else 1):
            index = (ticket.number + ahead) % len(self.pictures)
            seed_cpu(seed_of(self.seed, ticket.epoch, index))
            try:
                picture, known = self.pictures[index]
            except ImageError as error:
                bad.append(str(error))
                continue
            pixels = self.transform(picture.convert(self.mode))
            return Sample(pixels, self.targets.one(known), index, tuple(bad))
        if self.replace:
            raise DataError(f"no image can be read: {bad[0]}")
        blank = self.transform(Image.new(self.mode, (64, 64)))
        return Sample(blank, None, ticket.number, tuple(bad))

    def collate(self, samples: list[Sample]) -> Batch:
        """Collate samples into a batch, without the images that were left out."""
        kept = [sample for sample in samples if sample.target is not None]
        pixels = torch.stack([sample.pixels for sample in kept or samples[:1]])[: len(kept)]
        targets = self.targets.batch([sample.target for sample in kept])
        bad = tuple(text for sample in samples for text in sample.bad)
        return Batch(pixels, targets, [sample.number for sample in kept], bad)


class Stream(Sampler[list[Ticket]]):
    """Batch sampler of one process: yields its tickets, one micro-batch at a time.

    A batch of the whole run is `batch` consecutive tickets. Process `rank` of `world` takes the `rank`-th share of each batch, split
    into `parts` micro-batches.
    """

    def __init__(
        self, count: int, batch: int, seen: int, steps: int, *, seed: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> None:
        """Create a sampler of `steps` batches over a dataset of `count` images, starting after `seen` images."""
        self.count, self.batch, self.seen, self.steps = count, batch, seen, steps
        self.seed, self.rank, self.world, self.parts = seed, rank, world, parts
        self._epoch, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return self.steps * self.parts

    def __iter__(self) -> Iterator[list[Ticket]]:
        """Yield micro-batches in the order of the run."""
        piece = self.batch // self.world
        size = piece // self.parts
        for step in range(self.steps):
            first = self.seen + step * self.batch + self.rank * piece
            for part in range(self.parts):
                yield [self.ticket(first + part * size + i) for i in range(size)]

    def ticket(self, position: int) -> Ticket:
        """Return the ticket at a position of the stream."""
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return Ticket(epoch, int(self._order[place]))


class InOrder(Sampler[list[Ticket]]):
    """Batch sampler that yields every image once, in dataset order. Process `rank` of `world` takes every `world`-th image."""

    def __init__(self, count: int, batch: int, rank: int, world: int) -> None:
        """Create a sampler of `count` images."""
        self.mine, self.batch = range(rank, count, world), batch

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        return -(-len(self.mine) // self.batch)

    def __iter__(self) -> Iterator[list[Ticket]]:
        """Yield batches. The last may be smaller."""
        for start in range(0, len(self.mine), self.batch):
            yield [Ticket(0, index) for index in self.mine[start : start + self.batch]]


def check_batch(config: Recipe, count: int, world: int, *, in_pairs: bool) -> None:
    """Check that the batch size fits the number of images and can be divided among processes and micro-batches.

    Raises:
        DataError: If a batch is larger than the dataset.
        OptionError: If a micro-batch would not be a whole number of images, or an odd number where images are mixed in pairs.
    """
    batch, pieces = config.batch_size, world * config.accumulate
    if batch > count:
        raise DataError(
            f"{config.data}: a batch of {batch} is more than the {count} images. Choose a smaller {option('batch_size')}."
        )
    if batch % pieces or (in_pairs and batch // pieces % 2):
        raise OptionError(
            f"batch_size must be a multiple of processes x accumulate ({world} x {config.accumulate}), "
            f"and each micro-batch even for mixup and cutmix, got {batch}."
        )


def loader(samples: Samples, order: Sampler[list[Ticket]], workers: int, device: torch.device) -> DataLoader[Any]:
    """Return a PyTorch `DataLoader` whose workers use one thread each."""
    return DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=samples.collate,
        pin_memory=device.type == "cuda",
        timeout=_PATIENCE if workers else 0,
        worker_init_fn=_apart,
        generator=torch.Generator(),  # else each loader draws from the global generator, and a resumed run creates one more
    )


@contextmanager
def patient() -> Iterator[None]:
    """Turn the death or hang of a loader's worker into one clear error.

    PyTorch reports a dead worker from a signal handler, so the error may appear anywhere in the body.

    Raises:
        ResourceError: If a worker dies or hangs.
        RuntimeError: If the body raises one for another reason; it is passed on unchanged.
    """
    try:
        yield
    except (ConnectionError, EOFError) as error:  # the worker died while it handed over a batch
        with suppress(RuntimeError):  # the signal handler reports the same death a moment later: here, not in other code
            time.sleep(1)
        died = _died(error)
        raise died from error
    except RuntimeError as error:
        if not str(error).startswith("DataLoader "):
            raise
        died = _died(error)
        raise died from error


def _died(error: Exception) -> ResourceError:
    cause = (str(error) or type(error).__name__).splitlines()[0]
    return ResourceError(
        f"a data loader worker died or hangs ({cause}). Most often memory ran out: lower "
        f"{option('workers')} or {option('batch_size')}. Run the same command again to resume."
    )


def training_transform(config: Recipe, blueprint: InputFacts) -> Transform:
    """Build the training transform: flips and crops, then changes of color and policies of timm, then pixels and random erasing.

    Raises:
        OptionError: If timm does not know the policy `auto_augment`.
    """
    usual = 0.4 if blueprint.channels == 3 else 0.0
    try:
        crops, changes, ends = transforms_imagenet_train(
            blueprint.size,
            interpolation="bilinear",
            mean=blueprint.mean,
            std=blueprint.std,
            scale=config.crop_scale,
            ratio=config.crop_ratio,
            auto_augment=config.auto_augment or None,
            re_prob=config.reprob,
            color_jitter=config.jitter if config.jitter != -1 else usual if config.augment == "imagenet" else None,
            force_color_jitter=config.jitter > 0,  # timm leaves it out beside a policy
            separate=True,
        )
    except Exception as error:  # of timm's parser, whatever the text is
        if not config.auto_augment:
            raise
        raise OptionError(
            f"unknown auto_augment '{printable(config.auto_augment)}' ({first_line(error)}). Pass for example rand-m9-mstd0.5 or original."
        ) from error
    if config.augment != "imagenet":
        plain = evaluation_transform(blueprint).transforms
        last = next(i for i, step in enumerate(plain) if type(step).__name__ in ("MaybeToTensor", "ToTensor"))
        crops = transforms.Compose([*plain[:last], *_moves(config.augment, blueprint.size)])
    combined: Transform = transforms.Compose([*crops.transforms, *changes.transforms, *ends.transforms])
    return combined


def _moves(augment: str, size: tuple[int, int]) -> list[Any]:
    """Return the flips, turns and shifts of an augmentation."""
    if augment == "none":
        return []
    shifts = [transforms.RandomCrop(size, padding=max(size) // 8)] if augment == "crop" else []
    turns = [_Turn()] if augment == "turn" else []
    return [*shifts, transforms.RandomHorizontalFlip(), *turns]


class _Turn:
    """Random rotation by 0, 90, 180 or 270 degrees."""

    def __call__(self, picture: Image.Image) -> Image.Image:
        quarters = int(torch.randint(4, ()))
        return picture.transpose(Image.Transpose(quarters + 1)) if quarters else picture  # ROTATE_90 is 2


def moments(pictures: ImageDataset, mode: str, count: int = 1000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation of each channel, for pixels in [0, 1].

    At least `count` evenly spaced images are used, or all if there are fewer. Unreadable ones are left out.

    Raises:
        DataError: If none of them can be read.
    """
    step = max(1, len(pictures) // count)
    sums, squares, pixels, reason = torch.zeros(0), torch.zeros(0), 0, ""
    for index in range(0, len(pictures), step):
        try:
            picture = pictures[index][0].convert(mode)
        except ImageError as error:
            reason = reason or str(error)
            continue
        values = transforms.functional.pil_to_tensor(picture).double().flatten(1) / 255
        sums = values.sum(1) + (sums if pixels else 0)
        squares = values.square().sum(1) + (squares if pixels else 0)
        pixels += values.shape[1]
    if not pixels:
        raise DataError(f"no image can be read: {reason}")
    mean = sums / pixels
    deviation = (squares / pixels - mean.square()).clamp(min=1e-4).sqrt()
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in deviation.tolist())


def _apart(_worker: int) -> None:
    torch.set_num_threads(1)
    os.setpgrp()  # Ctrl-C reaches the whole group, but the last step before the save still needs the workers
