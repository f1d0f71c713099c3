"""One question: what comes back, and whether the caller's modes, flags, hooks and random numbers are as they were."""

from __future__ import annotations

import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import visattn
from tests.contexts.models import SIDE
from visattn.errors import VisattnError

METHODS = (
    *("auto", "gradcam", "eigencam", "captum.saliency"),
    *("attention", "rollout", "relevance", "attention_gradient"),
)
SIZES = (96, 80), (64, 64), (70, 110)
PHOTOS = tuple(
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    for seed, size in enumerate(SIZES)
)
SHORT: dict[str, dict[str, Any]] = {"attention": {"fusion": "mean"}}  # one map


class Answer(NamedTuple):
    """Answer to a question, or refusal.

    Attributes:
        kind: `answered`, `refused`, or `raw` for an error that is none of visattn's.
        map: Values of the map.
        words: What is said of it: target, scores, parameters, preprocessing, notes and warnings; or the text of the refusal.
        left: What is not as it was before.
    """

    kind: str
    map: NDArray[np.float64] | None
    words: tuple[str, ...]
    left: tuple[str, ...]


def ask(model: nn.Module, method: str, photo: int) -> Answer:
    """Explain a photo; compare the state of the program before and after."""
    before = state(model)
    values: NDArray[np.float64] | None = None
    words: tuple[str, ...]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = visattn.explain(model, PHOTOS[photo], method=method, img_size=SIDE, **SHORT.get(method, {}))
        except VisattnError as error:
            kind, words = "refused", (f"{type(error).__name__}: {error}",)
        except Exception as error:
            kind, words = "raw", (f"{type(error).__name__}: {error}",)
        else:
            kind, values = "answered", found.map.values.detach().double().cpu().numpy()
            words = words_of(found)
    own = tuple(
        str(one.message) for one in told if issubclass(one.category, (visattn.errors.VisattnWarning, visattn.errors.VisattnNote))
    )
    after = state(model)
    return Answer(kind, values, (*words, *own), tuple(name for name in before if before[name] != after[name]))


def words_of(found: visattn.Explanation) -> tuple[str, ...]:
    """Return all that is said of a map, but for what differs between two runs of one program."""
    facts = found.provenance.to_dict()
    return (found.map.meaning, *(f"{name}: {facts[name]}" for name in sorted(facts) if name != "geometry"))


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a call must leave as it was."""
    modules = [*model.modules()] if not isinstance(model, torch.jit.ScriptModule) else []
    parameters = [*model.parameters(), *model.buffers()]
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "training": [module.training for module in modules],
        "hooks": [
            len(hooks)
            for module in modules
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            if (hooks := vars(module).get(name)) is not None
        ],
        "requires_grad": [one.requires_grad for one in parameters],
        "values": [one.detach().double().sum().item() for one in parameters],
        ".grad": [one.grad is None for one in parameters],
        "checkpointing": [
            vars(module).get(name) for module in modules for name in ("grad_checkpointing", "gradient_checkpointing")
        ],
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": str(np.random.get_state()),  # noqa: NPY002
        "PyTorch's random numbers": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
