"""Words of a model of transformers, as its tokenizer spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from visattn.core.families.huggingface import tokenizer_of
from visattn.core.families.owners import owner
from visattn.core.records import Recording
from visattn.errors import OptionError

_IDS = "input_ids"


def texts_of(model: nn.Module, inputs: Mapping[str, Any], recording: Recording) -> dict[str, str]:
    """Return the texts of the tokens `word0`, `word1` and so on of a recording, by name.

    Args:
        model: The model.
        inputs: Its inputs by name.
        recording: Recording of one image.

    Returns:
        Nothing if the tokenizer is not beside the weights, or if there are several texts, so that the numbers may be those of another.
    """
    ids = [name for name in inputs if name.endswith("_ids") and "input" in name]
    if ids != [_IDS] or not isinstance(inputs[_IDS], Tensor) or len(inputs[_IDS]) != 1 or owner(model) != "huggingface":
        return {}
    try:
        decode = tokenizer_of(model, "").decode
    except OptionError:
        return {}
    named = {name for record in recording for layout in (record.queries, record.keys) for name in layout.prefix}
    return {f"word{i}": decode([number]).strip() for i, number in enumerate(inputs[_IDS][0].tolist()) if f"word{i}" in named}
