"""Random states: of a picture's augmentation, made from what it is of; of a process, as tensors that a checkpoint keeps.

What happens to a picture is a function of the seed, the epoch and the picture. So it does not matter which worker reads it, in which
order, or how often a run was interrupted, and no worker has a state that would have to be saved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_WORDS = 624  # of the state of MT19937


def seed_of(*numbers: int) -> int:
    """A seed of 64 bits from some numbers; near numbers give seeds that have nothing in common."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """Seed what augmentations and models draw from: torch, numpy, Python."""
    torch.manual_seed(seed)  # of GPUs too
    _seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed inside, and the streams as they were afterward; those of a loader's worker are nobody's."""
    if get_worker_info() is not None:
        _seed(seed)
        yield
        return
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    _seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - timm draws from the global stream
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The streams of this process as tensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    _, python, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
        "python": torch.tensor(python, dtype=torch.int64),
        "python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put the streams of this process where they were.

    Raises:
        ValueError: If they were nowhere.
    """
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    if not 0 <= position <= _WORDS:  # numpy would read behind its keys
        raise ValueError(f"a stream must stand at one of its {_WORDS} words, got {position}")
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
    random.setstate((3, tuple(state["python"].tolist()), state["python_gauss"].item() if len(state["python_gauss"]) else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
