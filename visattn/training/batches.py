"""Pictures in batches: in which order, how augmented, and what happens to one that cannot be read.

Training runs over one long stream: permutation after permutation of all pictures, cut into batches of `batch_size` without regard to
where an epoch ends. So every picture is seen exactly once an epoch, every batch is full, and the number of pictures seen is all that
has to be remembered to go on, with any number of processes or workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import timm.data
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms

from visattn.data.pictures import Pictures
from visattn.errors import DataError, ImageError, OptionError, ResourceError
from visattn.families.trained import InputFacts, evaluation_transform
from visattn.training.config import Recipe
from visattn.training.run.randomness import seed_of, seeded

Transform = Callable[[Image.Image], Tensor]
_PATIENCE = 45  # seconds without a batch before a worker counts as hung: a death that torch tells inside a destructor is lost


class Targets(Protocol):
    """How what is known of pictures becomes tensors of a batch."""

    def one(self, known: Any) -> Any:  # noqa: ANN401
        """The target of one picture; it may be drawn at random, from streams that are seeded for picture and epoch."""
        ...

    def batch(self, targets: list[Any]) -> tuple[Tensor, ...]:
        """Targets as tensors, whose first axis is the batch; there may be none."""
        ...


class Labels:
    """The number of a class is its own target."""

    def one(self, known: int) -> int:
        """As it is."""
        return known

    def batch(self, targets: list[int]) -> tuple[Tensor, ...]:
        """`(B,)`."""
        return (torch.tensor(targets, dtype=torch.long),)


class Ticket(NamedTuple):
    """Which picture, in which epoch: what its augmentation is made from."""

    epoch: int
    number: int


class Sample(NamedTuple):
    """A picture as the model takes it, its target (None where it could not be read), its number, and what could not be read."""

    pixels: Tensor
    target: Any
    number: int
    bad: tuple[str, ...]


class Batch(NamedTuple):
    """`pixels (B, C, H, W)`, targets, the numbers of the pictures, and messages about those that could not be read."""

    pixels: Tensor
    targets: tuple[Tensor, ...]
    numbers: list[int]
    bad: tuple[str, ...]


class Samples(Dataset[Sample]):
    """Pictures prepared one by one."""

    def __init__(
        self,
        pictures: Pictures,
        transform: Transform,
        *,
        mode: str,
        seed: int,
        replace: bool,
        targets: Targets | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            pictures: The data.
            transform: From a picture to pixels; what it draws at random is seeded for each picture and epoch.
            mode: `L` or `RGB`: what pictures are converted to.
            seed: Of the run.
            replace: Whether the next picture that can be read takes the place of one that cannot; else it is left out.
            targets: What is learned; labels by default.
        """
        self.pictures, self.transform, self.mode, self.seed, self.replace = pictures, transform, mode, seed, replace
        self.targets = targets or Labels()

    def __len__(self) -> int:
        """How many."""
        return len(self.pictures)

    def __getitem__(self, ticket: Ticket) -> Sample:
        """The picture of a ticket.

        Raises:
            DataError: If no picture can be read.
        """
        bad: list[str] = []
        for ahead in range(len(self.pictures) if self.replace else 1):
            index = (ticket.number + ahead) % len(self.pictures)
            try:
                picture, known = self.pictures[index]
            except ImageError as error:
                bad.append(str(error))
                continue
            with seeded(seed_of(self.seed, ticket.epoch, index)):
                pixels = self.transform(picture.convert(self.mode))
                return Sample(pixels, self.targets.one(known), index, tuple(bad))
        if self.replace:
            raise DataError(f"no picture can be read: {bad[0]}")
        blank = self.transform(Image.new(self.mode, (64, 64)))
        return Sample(blank, None, ticket.number, tuple(bad))

    def collate(self, samples: list[Sample]) -> Batch:
        """Samples as a batch; pictures that were left out are not in it."""
        kept = [sample for sample in samples if sample.target is not None]
        pixels = torch.stack([sample.pixels for sample in kept or samples[:1]])[: len(kept)]
        targets = self.targets.batch([sample.target for sample in kept])
        bad = tuple(text for sample in samples for text in sample.bad)
        return Batch(pixels, targets, [sample.number for sample in kept], bad)


class Stream(Sampler[list[Ticket]]):
    """The tickets of this process, part by part, from some number of pictures seen to another.

    A batch of the whole run is `batch` tickets in a row. Process `rank` of `world` takes the `rank`-th piece of it, in `parts` parts.
    """

    def __init__(
        self, count: int, batch: int, seen: int, steps: int, *, seed: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> None:
        """`steps` batches, beginning after `seen` pictures of a data set of `count`."""
        self.count, self.batch, self.seen, self.steps = count, batch, seen, steps
        self.seed, self.rank, self.world, self.parts = seed, rank, world, parts
        self._epoch, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        """How many parts."""
        return self.steps * self.parts

    def __iter__(self) -> Iterator[list[Ticket]]:
        """Parts in the order of the run."""
        piece = self.batch // self.world
        size = piece // self.parts
        for step in range(self.steps):
            first = self.seen + step * self.batch + self.rank * piece
            for part in range(self.parts):
                yield [self.ticket(first + part * size + i) for i in range(size)]

    def ticket(self, position: int) -> Ticket:
        """The ticket at a place of the stream."""
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return Ticket(epoch, int(self._order[place]))


class InOrder(Sampler[list[Ticket]]):
    """Every picture once in its own order, in batches; process `rank` of `world` takes every `world`-th."""

    def __init__(self, count: int, batch: int, rank: int, world: int) -> None:
        """Of `count` pictures."""
        self.mine, self.batch = range(rank, count, world), batch

    def __len__(self) -> int:
        """How many batches."""
        return -(-len(self.mine) // self.batch)

    def __iter__(self) -> Iterator[list[Ticket]]:
        """Batches; the last may be smaller."""
        for start in range(0, len(self.mine), self.batch):
            yield [Ticket(0, index) for index in self.mine[start : start + self.batch]]


def check_batch(config: Recipe, count: int, world: int, *, in_pairs: bool) -> None:
    """Refuse a batch that cannot be cut out of so many pictures, or into pieces for so many processes.

    Raises:
        DataError: If it is more than the pictures.
        OptionError: If its pieces are no whole numbers, or odd where pictures are mixed in pairs.
    """
    batch, pieces = config.batch_size, world * config.accumulate
    if batch > count:
        raise DataError(
            f"{config.data}: a batch of {batch} is more than the {count} pictures; choose a smaller batch_size (--batch-size)."
        )
    if batch % pieces or (in_pairs and batch // pieces % 2):
        raise OptionError(
            f"batch_size must be a multiple of processes x accumulate ({world} x {config.accumulate}), and each piece even for mixup, "
            f"got {batch}."
        )


def loader(samples: Samples, order: Sampler[list[Ticket]], workers: int, device: torch.device) -> DataLoader[Any]:
    """A loader of torch, whose workers take one thread each."""
    return DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=samples.collate,
        pin_memory=device.type == "cuda",
        timeout=_PATIENCE if workers else 0,
        worker_init_fn=_apart,
        generator=torch.Generator(),  # else each loader draws from the global stream, and a run that goes on makes one more
    )


@contextmanager
def patient() -> Iterator[None]:
    """A worker that dies or hangs is one clear error, which torch raises wherever this process is at that moment.

    Raises:
        ResourceError: If one does.
        RuntimeError: Any other, as it is.
    """
    try:
        yield
    except (ConnectionError, EOFError) as error:  # it died while it handed over a batch
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
        f"a process that reads pictures died or hangs ({cause}); most often memory ran out: lower workers "
        "(--workers) or batch_size (--batch-size). Run the same command again to go on."
    )


def training_transform(config: Recipe, blueprint: InputFacts) -> Transform:
    """From a picture to pixels, augmented."""
    plain: Any = evaluation_transform(blueprint)
    if config.augment == "imagenet":
        made: Transform = timm.data.create_transform(
            (blueprint.channels, *blueprint.size),
            is_training=True,
            interpolation="bilinear",
            mean=blueprint.mean,
            std=blueprint.std,
            auto_augment=config.auto_augment or None,
            re_prob=config.reprob,
            color_jitter=0.4 if blueprint.channels == 3 else 0.0,
        )
        return made
    if config.augment == "none":
        return plain  # type: ignore[no-any-return]
    steps: list[Any] = [*plain.transforms]
    last = next(i for i, step in enumerate(steps) if type(step).__name__ in ("MaybeToTensor", "ToTensor"))
    side = max(blueprint.size) // 8
    shifted = [transforms.RandomCrop(blueprint.size, padding=side)] if config.augment == "crop" else []
    turned = [_Turn()] if config.augment == "turn" else []
    combined: Transform = transforms.Compose([*steps[:last], *shifted, transforms.RandomHorizontalFlip(), *turned, *steps[last:]])
    return combined


class _Turn:
    """A quarter, half or three quarters of a turn, or none."""

    def __call__(self, picture: Image.Image) -> Image.Image:
        quarters = int(torch.randint(4, ()))
        return picture.transpose(Image.Transpose(quarters + 1)) if quarters else picture  # ROTATE_90 is 2


def moments(pictures: Pictures, mode: str, count: int = 1000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels in [0, 1], over evenly spaced pictures that can be read.

    Raises:
        DataError: If none can be read.
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
        raise DataError(f"no picture can be read: {reason}")
    mean = sums / pixels
    deviation = (squares / pixels - mean.square()).clamp(min=1e-4).sqrt()
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in deviation.tolist())


def _apart(_worker: int) -> None:
    torch.set_num_threads(1)
    os.setpgrp()  # a signal for all of the group must not take the pictures that the last step before the save needs
