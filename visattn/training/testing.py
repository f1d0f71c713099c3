"""Tests of a model in training on all images of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visattn.core.families.trained import evaluation_transform
from visattn.data import ImageDataset
from visattn.training.batches import Batch, InOrder, Samples, loader
from visattn.training.tasks.task import Measured, Task
from visattn.training.trainer import Trainer


@torch.no_grad()
def tested(task: Task, learner: Trainer, images: ImageDataset, note: Callable[[Sequence[Batch]], None]) -> Measured:
    """Measure the answers for images, across all processes.

    Args:
        task: Task of the run.
        learner: Trainer, whose `tested` module is tested.
        images: Images of the task.
        note: Called with each batch, which states the images that could not be read.

    Returns:
        Sums over the images that could be read; the outcomes of all of them, if the task has any.
    """
    model, group, config = learner.tested, learner.group, learner.config
    transform = evaluation_transform(task.blueprint)
    samples = Samples(images, transform, mode=task.mode, seed=config.seed, replace=False, targets=task.targets)
    size = max(1, config.batch_size // (group.world * config.accumulate))
    order = InOrder(len(images), size, group.rank, group.world)
    group.share(model.buffers())  # on CPUs, each process has its own batch norm statistics
    model.eval()
    right = loss = total = 0.0
    outcomes: list[Tensor] = []
    for batch in loader(samples, order, config.workers, group.device):
        note([batch])
        if not len(batch.pixels):
            continue
        pixels = batch.pixels.to(group.device, memory_format=learner.layout)
        with learner.autocast():
            told = task.measure(model, pixels, tuple(target.to(group.device) for target in batch.targets))
        right, loss, total = right + told.right, loss + told.loss, total + told.total
        outcomes += [] if told.outcomes is None else [told.outcomes]
    right, loss, total = group.sum(right, loss, total)
    each = [part for parts in group.gather(outcomes) for part in parts]
    return Measured(right, loss, total, torch.cat(each) if each else None)
