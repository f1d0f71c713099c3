"""Text that a model of transformers generates from an image, with the attention of each token to the image.

The model generates as it always does. The text is then scored once more in a single forward pass, with teacher forcing, and the attention
of this pass is shown: a causal decoder computes the same rows as step by step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.checks import first_line, printable
from visattn._support.language import option
from visattn._support.modes import evaluating, in_own_modes
from visattn._support.reprs import brief
from visattn.core.drawing.filmstrips import filmstrip
from visattn.core.drawing.pictures import Picture
from visattn.core.families.huggingface import tokenizer_of
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.methods import attention
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.passes import answer_of
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.tensors import prepare_inputs
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import ModelError, OptionError


@dataclass(frozen=True, eq=False)
class GeneratedText:
    """Text that a model generated from a photo, with an attention map for each token.

    Attributes:
        tokens: The generated tokens as text.
        ids: Their numbers, `(tokens,)`.
        map: Attention to the image of the query that each token was predicted from, averaged over heads, with the axes `("word",)`.
        photo: The photo.
        geometry: Position of the model's input on the photo.
    """

    tokens: tuple[str, ...]
    ids: Tensor
    map: AttentionMap
    photo: Image.Image
    geometry: Geometry

    __repr__ = brief

    @property
    def text(self) -> str:
        """The tokens as one text."""
        return "".join(self.tokens).strip()

    def filmstrip(self, **options: Any) -> Picture:  # noqa: ANN401 - those of `visattn.filmstrip`
        """Draw the photo and a panel for each token; see `visattn.filmstrip`."""
        return filmstrip(
            self.photo, self.map, self.geometry, **{"title": self.text, "notes": self.map.provenance.notes} | options
        )


@in_own_modes
def generate_text(
    model: nn.Module,
    image: Any,  # noqa: ANN401 - a source of `load_image`, a picture or an array
    *,
    inputs: Mapping[str, Any] | None = None,
    tokenizer: Any = None,  # noqa: ANN401 - of transformers
    max_new_tokens: int = 20,
    layer: int | str = -1,
    **options: Unpack[PreprocessingOptions],
) -> GeneratedText:
    """Generate text from a photo, greedily, with an attention map for each token.

    Args:
        model: Model of transformers that generates text from an image, for example BLIP, or a vision-language model.
        image: The photo; see `visattn.explain`.
        inputs: Other inputs by name, such as the words of a prompt, or all that a processor returns; see `visattn.explain`.
        tokenizer: Tokenizer or processor that turns numbers into text; None: the one saved beside the model's weights.
        max_new_tokens: Largest number of tokens.
        layer: Layer whose attention is shown, by index among the layers in which words attend to the image, or by name.
        options: See `visattn.prepare`.

    Returns:
        The tokens and their maps.

    Raises:
        OptionError: If the model does not generate, its tokenizer is not known, or no layer shows where words look.
        ModelError: If generation fails.
        VisattnError: Any error of `load_image`, `prepare` and `capture`.
    """
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise OptionError(f"{type(model).__name__} generates no text. Pass a model of transformers that has generate().")
    how = Preprocessing(**options)
    photo = read(image, how)
    prepared = prepare_with([photo], model, how) if inputs is None else prepare_inputs(inputs, photo, model, how)
    with evaluating(model, frozen=True), torch.no_grad():
        ids = _generated(model, prepared, max_new_tokens)
        first, scored = _to_be_scored(model, prepared, ids)
        with capture(model, gates=False) as recording:
            answer_of(model, scored.pixels, scored)
    record = _chosen(model, recording, layer)
    numbers = [number for number in range(first, ids.shape[1]) if f"word{number - 1}" in record.queries.prefix]
    if not numbers:
        raise OptionError(f"{record.layer}: the generated tokens are not among its queries. Choose another layer.")
    maps = [attention(recording, layer=record.layer, call=record.call, fusion="mean", query=f"word:{at - 1}") for at in numbers]
    decode = _decoder(model, tokenizer)
    tokens = tuple(printable(decode(ids[0, at : at + 1])) for at in numbers)
    found = replace(
        maps[0],
        values=torch.stack([one.values for one in maps], 1),
        axes=("batch", "word"),
        labels={"word": tokens},
        facts=replace(maps[0].facts, query=""),
        provenance=prepared.noted(maps[0].provenance.but(notes=("each token was scored with teacher forcing",))),
    )
    return GeneratedText(tokens, ids[0, numbers].cpu(), found.at(batch=0), prepared.photo, prepared.geometry)


def _generated(model: Any, prepared: Prepared, count: int) -> Tensor:  # noqa: ANN401
    """Generate greedily; return the numbers of all tokens `(1, tokens)`, those of the prompt included."""
    keyword = prepared.spec_of(model).keyword or next(iter(inspect.signature(model.forward).parameters))
    try:
        ids: Tensor = model.generate(
            **{keyword: prepared.pixels}, **prepared.inputs, do_sample=False, num_beams=1, max_new_tokens=count
        )
    except Exception as error:  # of the model's own code
        raise ModelError(
            f"{type(model).__name__}: generate() fails: {type(error).__name__}: {first_line(error)}. "
            f"Check that it runs without visattn and with {option('max_new_tokens', count)}."
        ) from error
    prompt = prepared.inputs.get("input_ids")
    if isinstance(prompt, Tensor) and not model.config.is_encoder_decoder and not _begins(ids, prompt):
        ids = torch.cat([prompt, ids], 1)
    return ids


def _begins(ids: Tensor, prompt: Tensor) -> bool:
    return ids.shape[1] > prompt.shape[1] and torch.equal(ids[:, : prompt.shape[1]], prompt)


def _to_be_scored(model: Any, prepared: Prepared, ids: Tensor) -> tuple[int, Prepared]:  # noqa: ANN401
    """Return the index of the first generated token, and inputs with all tokens but the last."""
    given, prompt = dict(prepared.inputs), prepared.inputs.get("input_ids")
    if model.config.is_encoder_decoder:
        return 1, replace(prepared, inputs={**given, "decoder_input_ids": ids[:, :-1]})
    first = prompt.shape[1] if isinstance(prompt, Tensor) else 1
    for name, value in given.items():  # masks and types of the words cover the new ones too
        if isinstance(prompt, Tensor) and isinstance(value, Tensor) and value.shape == prompt.shape and name != "input_ids":
            fill = 1 if "mask" in name else 0
            given[name] = torch.cat([value, value.new_full((1, ids.shape[1] - 1 - first), fill)], 1)
    return first, replace(prepared, inputs={**given, "input_ids": ids[:, :-1]})


def _chosen(model: nn.Module, recording: Recording, layer: int | str) -> AttentionRecord:
    """Return a layer in which words attend to cells of the image."""
    found = [
        record for record in recording if record.keys.grid and any(name.startswith("word") for name in record.queries.prefix)
    ]
    named = [record for record in found if record.layer == layer] if isinstance(layer, str) else found
    at = -1 if isinstance(layer, str) else layer
    if not -len(named) <= at < len(named):
        known = ", ".join(record.layer for record in found) or "none"
        raise OptionError(
            f"{type(model).__name__}: words attend to the image in no layer {layer}. Layers in which they do: {known}."
        )
    return named[at]


def _decoder(model: Any, tokenizer: Any) -> Any:  # noqa: ANN401
    """Return a function from numbers of tokens to text."""
    if tokenizer is None:
        tokenizer = tokenizer_of(model, "Pass tokenizer=.")
    return getattr(tokenizer, "tokenizer", tokenizer).decode
