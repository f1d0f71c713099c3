"""Random number generators: seeds for the augmentation of each image, and generator states as tensors for checkpoints.

The augmentation of an image depends only on the seed, the epoch and the index of the image. It does not depend on the worker that loads
the image, on the order, or on interruptions. So no state of a worker needs to be saved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_WORDS = 624  # words in the state of MT19937


def seed_of(*numbers: int) -> int:
    """Derive a 64-bit seed from integers. Similar integers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """Seed the generators of PyTorch, NumPy and Python, which augmentations and models use."""
    torch.manual_seed(seed)  # also seeds the GPUs
    seed_cpu(seed)


@contextmanager
def restoring() -> Iterator[None]:
    """Restore all generators on exit. In data loader workers nothing is restored."""
    if get_worker_info() is not None:
        yield
        return
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def seed_cpu(seed: int) -> None:
    """Seed the generators of PyTorch on the CPU, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - timm uses the global generator
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's generators as tensors."""
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
    """Restore the states of this process's generators.

    Raises:
        ValueError: If a state is invalid.
    """
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    if not 0 <= position <= _WORDS:  # NumPy would read beyond the end of its keys
        raise ValueError(f"the position of a generator must be from 0 to {_WORDS}, got {position}")
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
    random.setstate((3, tuple(state["python"].tolist()), state["python_gauss"].item() if len(state["python_gauss"]) else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
