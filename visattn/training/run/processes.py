"""Processes of a run: a single one, or several started by `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from visattn._support.checks import printable, whole_number
from visattn.core.loading.models import try_device
from visattn.errors import OptionError, VisattnError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process, its device, and its rank among all processes of the run."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """True for the main process, which writes files and messages."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum values over all processes (all-reduce)."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device if self.device.type == "cuda" else "cpu")
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Gather a value from every process, ordered by rank, on every process (all-gather)."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from the main process, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def from_first(self, value: Any) -> Any:  # noqa: ANN401
        """Broadcast a value from the main process and return it."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def by_first(self, act: Callable[[], Result]) -> Result:
        """Call a function in the main process and return its result in every process.

        Raises:
            VisattnError: If the function raises one. It is raised in every process.
        """
        told: tuple[Any, VisattnError | None] = None, None
        if self.first:
            try:
                told = act(), None
            except VisattnError as error:
                if self.world == 1:
                    raise
                told = None, error
        made, refused = self.from_first(told)
        if refused is not None:
            raise refused
        return made  # type: ignore[no-any-return]


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join the process group if `torchrun` started several processes, and leave it on exit.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`. With several processes and `auto` or `cuda`, each takes the GPU of its local rank.

    Yields:
        This process.

    Raises:
        OptionError: If the name of the device or an environment variable of `torchrun` is invalid, or the processes cannot connect.
        ModelError: If the device does not work on this machine.
        ResourceError: If its memory is full.
    """
    world = _told("WORLD_SIZE", "1", 1, 2**16)
    rank = _told("RANK", "0", 0, world - 1)
    place = _device(device, _told("LOCAL_RANK", "0", 0, world - 1) if world > 1 else None)
    if world == 1:
        yield Processes(place)
        return
    joined = dist.is_initialized()  # the caller has joined already
    if not joined:
        try:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as error:
            cause = printable(str(error).splitlines()[0])
            raise OptionError(
                f"cannot connect to the other {world - 1} processes ({cause}). Start all of them with torchrun."
            ) from error
    try:
        yield Processes(place, rank, world)
    finally:
        if not joined:
            dist.destroy_process_group()


def _told(name: str, usual: str, low: int, high: int) -> int:
    """Read an integer that `torchrun` sets in the environment.

    Raises:
        OptionError: If the value is no integer, or out of range.
    """
    text = os.environ.get(name, usual)
    number = whole_number(text)
    if number is None or not low <= number <= high:
        raise OptionError(
            f"{name} must be a whole number from {low} to {high}, got '{printable(text)}'. Start the processes with torchrun, or unset it."
        )
    return number


def _device(name: str, local: int | None) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"unknown device '{printable(name)}'. Choose auto, cpu, cuda or cuda:N.") from error
    if name == "cuda" and local is not None:
        place = torch.device("cuda", local)
    try_device(place)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return place
