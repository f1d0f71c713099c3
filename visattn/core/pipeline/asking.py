"""What is asked of each image: the question, and how images are prepared; and the model that it is asked of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from visattn._support.faces import Later
from visattn.core.families.wrappers import unwrapped
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.arguments import target_of
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import Question, ask
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core import loading
else:
    loading = Later("visattn.core.loading")

__all__ = ["Asked", "asked_of", "model_of"]


class Asked(NamedTuple):
    """Question that is asked of each image.

    Attributes:
        question: Method, parameters and target.
        how: Preprocessing.
        seed: Seed of methods that draw samples.
    """

    question: Question
    how: Preprocessing
    seed: int = 0


def asked_of(method: MethodName | str, target: Of, options: Mapping[str, Any], seed: int) -> Asked:
    """Return the question that options of preprocessing, target and method ask, see `explain`.

    Raises:
        OptionError: If one is unknown or out of range.
    """
    of_photos, of_target = (
        {name: options[name] for name in kind.__annotations__ if name in options}
        for kind in (PreprocessingOptions, TargetOptions)
    )
    rest = {name: value for name, value in options.items() if name not in {**of_photos, **of_target}}
    return Asked(ask(method, rest, Target(_of_all(target_of(target)), **of_target)), Preprocessing(**of_photos), seed)


def _of_all(of: Of) -> Of:
    """Return the target, which may be in a list of its own.

    Raises:
        OptionError: If there are several.
    """
    if isinstance(of, Sequence) and not isinstance(of, str):
        if len(of) != 1:
            more = "A sum of labels is 'label:A,B'; one for each image is a target of explain_batch."
            raise OptionError(f"target must be one, got {len(of)}. {more}")
        return of[0]
    return of


def model_of(
    model: nn.Module | str,
    how: Preprocessing,
    *,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model without its wrappers, loaded if it is given by name, and notes on wrappers that change how it runs.

    Raises:
        VisattnError: Any error of `load_model`.
    """
    if isinstance(model, str):
        model = loading.load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    compiled = isinstance(getattr(model, "_orig_mod", None), nn.Module)
    return unwrapped(model), ("the model is compiled, and ran without that",) if compiled else ()
