"""Texts as targets: the similarity of an image and a prompt, for models with an image tower and a text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.checks import first_line, printable
from visattn._support.language import worded
from visattn.core.families import provenance_of
from visattn.core.families.huggingface import tokenizer_of
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError

__all__ = ["tokenized"]

_OTHER = "Choose another model."
_CLIP = "clip:"
_VOCABULARY = 49408  # of the tokenizer that most models of open_clip use


def completed(model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Add the tokens of a prompt to the inputs, and make the similarity of image and prompt the target.

    Args:
        model: Model of transformers whose output has `logits_per_image`, or of open_clip.
        prepared: The preprocessed photo.
        target: Target with a prompt, and perhaps another text in `versus`, whose similarity is subtracted.

    Returns:
        The input with the tokens, and the target as a function of the output.

    Raises:
        OptionError: If the model has no text tower, or its tokenizer is not there.
    """
    texts = [text for text in (target.prompt, target.versus) if isinstance(text, str)]
    target = replace(target, of=Similarity(tuple(texts)), prompt=None, versus=None)
    return tokenized(model, texts).beside(prepared), target


class Tokenized(NamedTuple):
    """Tokens of several texts, padded to one length.

    Attributes:
        inputs: Inputs of the model by name, each `(texts, L)`.
        words: Each text's tokens as the tokenizer spells them, without padding.
    """

    inputs: dict[str, Tensor]
    words: tuple[tuple[str, ...], ...]

    def beside(self, prepared: Prepared, number: int | None = None) -> Prepared:
        """Return a photo with a text beside it as inputs of the model; None: with all texts."""
        some = slice(None) if number is None else slice(number, number + 1)
        given = {name: value[some].to(prepared.pixels.device) for name, value in self.inputs.items()}
        return replace(prepared, inputs={**prepared.inputs, **given})


def tokenized(model: nn.Module, texts: Sequence[str]) -> Tokenized:
    """Return the tokens of texts, for a model with a text tower.

    Raises:
        OptionError: If the model has no text tower, or its tokenizer is not there.
    """
    return _of_open_clip(model, texts) if hasattr(model, "encode_text") else _of_transformers(model, texts)


@dataclass(frozen=True)
class Similarity:
    """Logit of the first text for each image, minus that of the second if there is one."""

    texts: tuple[str, ...]

    @property
    def described(self) -> str:
        """The score in words."""
        return "similarity to " + " versus ".join(f"'{printable(text)}'" for text in self.texts)

    def __call__(self, output: Any) -> Tensor:  # noqa: ANN401
        """Return the score of each image, `(B,)`.

        Raises:
            OptionError: If the output has no similarities.
        """
        logits = _logits(output)
        return logits[:, 0] - logits[:, 1] if len(self.texts) > 1 else logits[:, 0]


def _logits(output: Any) -> Tensor:  # noqa: ANN401
    """Return the similarity of each image with each text, `(B, texts)`, with the model's own scale."""
    if isinstance(similarities := getattr(output, "logits_per_image", None), Tensor):
        return similarities
    if isinstance(output, tuple) and len(output) > 2:  # open_clip without names
        output = dict(zip(("image_features", "text_features", "logit_scale", "logit_bias"), output, strict=False))
    if isinstance(output, Mapping) and isinstance(texts := output.get("text_features"), Tensor):
        bias = output.get("logit_bias")
        scaled: Tensor = output["logit_scale"] * output["image_features"] @ texts.T
        return scaled if bias is None else scaled + bias
    raise OptionError(
        f"a prompt needs a model that compares images with texts, this one returned {type(output).__name__}. "
        + worded("Pass a function of its output as target.", "Choose a model such as CLIP.")
    )


def _of_transformers(model: Any, texts: Sequence[str]) -> Tokenized:  # noqa: ANN401
    if not hasattr(model, "get_text_features"):
        raise OptionError(
            f"{type(model).__name__} has no text tower, so a prompt cannot be its target. Pass a class, or a model such as CLIP."
        )
    tokenizer = tokenizer_of(model, worded("Pass inputs=tokenizer(...) and a function of the output as target.", _OTHER))
    padding = "max_length" if str(model.config.model_type).startswith("siglip") else True  # as in training
    encoded = tokenizer(list(texts), padding=padding, truncation=True, return_tensors="pt")
    inputs = {name: value for name, value in encoded.items() if name in ("input_ids", "attention_mask")}
    ids = encoded["input_ids"]
    real = encoded["attention_mask"].bool() if "attention_mask" in encoded else ids != tokenizer.pad_token_id
    return Tokenized(inputs, tuple(_spelled(tokenizer.decode, row[seen]) for row, seen in zip(ids, real, strict=True)))


def _spelled(decode: Callable[[list[int]], str], ids: Tensor) -> tuple[str, ...]:
    return tuple(decode([number]).strip() for number in ids.tolist())


def _of_open_clip(model: Any, texts: Sequence[str]) -> Tokenized:  # noqa: ANN401
    library = import_module("open_clip")
    name = provenance_of(model).model
    architecture = name.removeprefix(_CLIP).replace("/", ".").partition(".")[0] if name.startswith(_CLIP) else ""
    try:
        if architecture:
            tokenizer = library.get_tokenizer(architecture)
        elif model.vocab_size == _VOCABULARY:
            tokenizer = library.SimpleTokenizer(context_length=model.context_length)
        else:
            raise OptionError(f"its vocabulary has {model.vocab_size} words")
    except Exception as error:  # of the library; some tokenizers are files of a hub
        raise OptionError(
            f"{type(model).__name__}: its tokenizer is not known ({first_line(error)}). "
            + worded("Pass inputs={'text': tokens} and a function of the output as target.", _OTHER)
        ) from error
    ids = torch.as_tensor(tokenizer(list(texts)))
    own = getattr(tokenizer, "tokenizer", None)  # one of transformers
    ends = ids.argmax(1) + 1 if own is None else (ids != own.pad_token_id).sum(1)  # the last token of CLIP has the highest number
    decode = (own or tokenizer).decode
    return Tokenized({"text": ids}, tuple(_spelled(decode, row[:end]) for row, end in zip(ids, ends.tolist(), strict=True)))
