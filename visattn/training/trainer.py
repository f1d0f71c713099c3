"""Trainer: a network with its optimizer, learning rate schedule and weight average, and the state of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from visattn._support import norm_gradients
from visattn._support.language import option
from visattn._support.notes import warn
from visattn.core.loading.weights import unbounded_buffers
from visattn.errors import OptionError, TrainingError
from visattn.training.batches import Batch
from visattn.training.config import Recipe
from visattn.training.optimizing import optimizer_of, rate_of, schedule_of
from visattn.training.run.checkpoints import Tensors, pack, unpack
from visattn.training.run.processes import Processes
from visattn.training.run.randomness import seed_all, seed_of
from visattn.training.tasks.task import Task

_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NORMS = nn.modules.batchnorm._BatchNorm


class Trainer:
    """Network in training. `learn` takes one optimizer step; `tested` is the module to test and save."""

    def __init__(self, task: Task, steps: int, steps_an_epoch: float, group: Processes) -> None:
        """Build the network, optimizer and schedule for `steps` steps.

        Raises:
            OptionError: If settings are incompatible.
            UnsupportedModel: If the network cannot be built.
            WeightsError: If published weights are requested but not available.
        """
        config = task.config
        if config.amp == "float16" and group.device.type != "cuda":
            raise OptionError(f"float16 needs a GPU, where gradients are scaled. Choose {option('amp', 'bfloat16')}, or none.")
        self.task, self.config, self.group = task, config, group
        seed_all(seed_of(config.seed))
        model = task.build()
        self._unbounded = unbounded_buffers(model)
        self.layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model = _for_several(model, group).to(device=group.device, memory_format=self.layout)  # type: ignore[call-overload]
        self.forward = self._wrapped()
        self.optimizer = optimizer_of(self.model, config, task.groups)
        self.schedule = schedule_of(self.optimizer, config, steps, steps_an_epoch)
        self.average = ModelEmaV3(self.model, decay=config.ema, use_warmup=True) if config.ema else None
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=config.amp == "float16")
        seed_all(seed_of(config.seed, group.rank))  # from here on, each process has its own random numbers

    def _wrapped(self) -> Any:  # noqa: ANN401 - a module, or a compiled one
        forward: nn.Module = self.model
        if self.group.world > 1:
            devices = [self.group.device.index] if self.group.device.type == "cuda" else None
            forward = DistributedDataParallel(forward, device_ids=devices)
        self._parallel = forward
        return torch.compile(forward) if self.config.compile else forward

    @property
    def tested(self) -> nn.Module:
        """Module to test and save: the moving average of the network if there is one, else the network."""
        module: nn.Module = self.average.module if self.average is not None else self.model
        return module

    @property
    def rate(self) -> float:
        """Learning rate of the last step, without the factors of `layer_decay` and `head_lr`."""
        return rate_of(self.optimizer)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the forward pass."""
        kind = _PRECISION.get(self.config.amp)
        return torch.autocast(self.group.device.type, dtype=kind, enabled=kind is not None)

    def learn(self, parts: Sequence[Batch], step: int, stepping: AbstractContextManager[None]) -> Tensor:
        """Take optimizer step number `step` on this process's share of a batch. Return the mean loss, still on the device.

        The optimizer, which first reads its restored state here, runs inside the context `stepping`.

        With `nonfinite="skip"`, a step whose gradients are not finite is skipped.
        """
        self.model.train()
        for name in self.task.still:
            self.model.get_submodule(name).eval()
        self.schedule.step_update(step)
        total = torch.zeros((), device=self.group.device)
        kept = [buffer.clone() for buffer in self.model.buffers()] if self.config.nonfinite == "skip" else []
        for number, batch in enumerate(parts, start=1):
            pixels = batch.pixels.to(self.group.device, non_blocking=True, memory_format=self.layout)
            targets = tuple(target.to(self.group.device, non_blocking=True) for target in batch.targets)
            with self._waiting(number < len(parts)):
                with self.autocast():
                    loss = self.task.loss(self.forward, pixels, targets) / len(parts)
                if len(pixels) == 1:
                    norm_gradients.set_right(loss)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._usable():
            with stepping:
                self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.average is not None:
                self.average.update(self.model, step)
        else:
            self.scaler.update()
            for buffer, before in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(before)  # undo what the skipped batch changed, such as batch norm statistics
        self.optimizer.zero_grad()
        return total

    def _usable(self) -> bool:
        """Clip the gradients. Return False if this step must be skipped because they are not finite."""
        skip = self.config.nonfinite == "skip"
        if not self.config.clip_grad and not skip:
            return True
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad or torch.inf)
        return not skip or bool(norm.isfinite())

    def _waiting(self, more: bool) -> AbstractContextManager[object]:
        """Return a context that delays the all-reduce of gradients if more micro-batches follow."""
        if more and isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensors]]:
        """Return the training state to save: JSON values and groups of tensors.

        Raises:
            TrainingError: If a weight is NaN or infinite, which was not so at the start. Earlier checkpoints are better then.
        """
        tensors = self.model.state_dict().items()
        broken = next((name for name, tensor in tensors if name not in self._unbounded and not tensor.isfinite().all()), None)
        if broken:
            raise TrainingError(
                f"{broken}: must hold finite numbers, got NaN or infinity although the loss was finite. {calmer(self.config)}"
            )
        optimizer, moments = pack(self.optimizer.state_dict())
        groups = {"model": self.model.state_dict(), "optimizer": moments}
        if self.average is not None:
            groups["ema"] = self.average.module.state_dict()
        return {"optimizer": optimizer, "scaler": self.scaler.state_dict()}, groups

    def restore(self, facts: dict[str, Any], groups: dict[str, Tensors]) -> None:
        """Restore the training state returned by `state`."""
        self.model.load_state_dict(groups["model"])
        options = [{key: value for key, value in part.items() if key != "params"} for part in self.optimizer.param_groups]
        self.optimizer.load_state_dict(unpack(facts["optimizer"], groups["optimizer"]))
        for part, own in zip(self.optimizer.param_groups, options, strict=True):
            part.update(
                own
            )  # options of the current settings, which `force` may have changed; the schedule sets the learning rate
        self.scaler.load_state_dict(facts["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(groups.get("ema", groups["model"]))


def calmer(config: Recipe) -> str:
    """Say which settings keep a training finite."""
    skip = "" if config.nonfinite == "skip" else f", or pass {option('nonfinite', 'skip')}"
    return f"Lower {option('lr')}{',' if skip else ' or'} set {option('clip_grad')}{skip}."


def _for_several(model: nn.Module, group: Processes) -> nn.Module:
    """Synchronize batch norm over processes, if there are several on GPUs. On CPUs, warn that this is not possible."""
    if group.world == 1 or not any(isinstance(part, _NORMS) for part in model.modules()):
        return model
    if group.device.type == "cuda":
        synchronized: nn.Module = convert_sync_batchnorm(
            model
        )  # PyTorch's version drops the activation inside timm's norm layers
        return synchronized
    if group.first:
        warn(
            "batch norms use only the images of their own process, because PyTorch synchronizes them on GPUs only. Results depend on "
            "the number of processes"
        )
    return model
