"""Targets of class-specific methods: a class by index or name, or a function of the model's output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from torch import Tensor

from visattn._support.checks import check_scores, one_of, whole_number
from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn._support.reprs import brief
from visattn._support.typed import check_types
from visattn._support.types import Space, Task
from visattn.core.families.timm import imagenet_classes
from visattn.core.pipeline.outputs import Meaning, tensor_of
from visattn.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from visattn._support import nested
else:
    nested = Later("visattn._support.nested")

__all__ = ["NoClasses", "Of", "ResolvedTarget", "Target", "TargetOptions"]

_NAMED = re.compile(r"\s*(\w+)\s*:(.*)", re.DOTALL)
KINDS = {  # files that complete targets which name something in the output
    **dict.fromkeys(("class", "label", "output", "text"), "output_numbers"),
    **dict.fromkeys(("pixel", "mask"), "output_places"),
    **dict.fromkeys(("box", "query"), "output_boxes"),
    "similar": "other_images",
}
Of = int | str | Sequence[int | str] | Callable[[Any], Tensor] | None
class_names, other_images = Later(f"{__package__}.class_names"), Later(f"{__package__}.other_images")


class TargetOptions(TypedDict, total=False):
    """Options of `Target` other than the class."""

    versus: int | str | None
    target_space: Space
    labels: Sequence[str] | Literal["imagenet"] | None
    prompt: str | None
    task: Task | None


class _Given(TargetOptions, total=False):
    """The same and the class, by the names that a caller uses."""

    target: Of


class NoClasses(OptionError):
    """The model's output has no class logits."""


@dataclass(frozen=True)
class Target:
    """Target of a class-specific method: the score to explain.

    Attributes:
        of: A class by index or name, or one for each image; None: the top class of each image; or a function of the model's output
            that returns one number per image. Texts such as `label:cat,dog`, `output:-0`, `pixel:X,Y`, `mask:K` and `box:N` name
            labels, numbers and places of an output.
        versus: Another class, whose score is subtracted.
        target_space: Score whose gradient is taken: `logit` (the output itself), `prob` (its probability) or `logprob`.
        labels: Names of the classes or outputs, if known; `imagenet` stands for the 1000 names of ImageNet.
        prompt: Text whose similarity to the image is explained, for models of images and texts; `versus` is then another text.
        task: What the outputs are: `classes`, of which one is true; `multi_label`, each true or not; `regression`; `embedding`. None: as
            the model, its weights, its outputs or `labels` tell.

    Raises:
        OptionError: If an attribute has the wrong type, or a class is given beside a prompt.
    """

    of: Of = None
    versus: int | str | None = None
    target_space: Space = "logit"
    labels: Sequence[str] | Literal["imagenet"] | None = None
    prompt: str | None = None
    task: Task | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        """Check types; classes and names are checked later, against the model's output.

        Raises:
            OptionError: If an attribute has the wrong type, or a class is given beside a prompt.
        """
        check_types(_Given, {"target" if name == "of" else name: value for name, value in vars(self).items()})
        if self.labels == "imagenet":
            object.__setattr__(self, "labels", imagenet_classes())
        named = self.named
        if named is not None and named[0] == "similar" and isinstance(self.of, str):
            object.__setattr__(self, "of", other_images.similar_to(named[1]))
        if self.prompt is not None and (self.of is not None or self.target_space != "logit" or isinstance(self.versus, int)):
            raise OptionError(
                f"{option('prompt')} is the target, and {option('versus')} another text. Leave out "
                f"{option('target')} and {option('target_space')}."
            )

    @property
    def given(self) -> bool:
        """True if anything but the top class was asked for."""
        return (self.of, self.versus, self.prompt, self.target_space) != (None, None, None, "logit")

    @property
    def named(self) -> tuple[str, str] | None:
        """Kind of what the target names in the output, such as `pixel` or `label`, and which it is; None if it is no such text."""
        if not isinstance(self.of, str):
            return getattr(self.of, "named_target", None)  # an image to compare with
        named = _NAMED.fullmatch(self.of)
        return None if named is None else (named[1], named[2].strip())

    @property
    def steps(self) -> tuple[str, ...]:
        """Files that turn the target into a function of the output before the model runs; that of an unknown kind tells which there are."""
        named = self.named
        return ("prompts",) * (self.prompt is not None) + (() if named is None else (KINDS.get(named[0], "class_names"),))

    def resolve(self, output: Any) -> ResolvedTarget:  # noqa: ANN401 - whatever the model returns
        """Resolve the target for the model's output on a batch.

        Raises:
            OptionError: If a class does not exist.
            ShapeError: If the number of classes differs from the number of images.
            NoClasses: If the output is not a tensor of logits `(B, classes)`.
            ModelError: If the score is NaN or infinite.
        """
        one_of(self.target_space, get_args(Space), "target space")
        output = _logits(output) if not callable(self.of) else output
        if callable(self.of):
            if self.versus is not None or self.target_space != "logit":
                raise OptionError("target is a function of the output, so versus and target_space do not apply. Leave them out.")
            of = self.of.settled(output) if hasattr(self.of, "settled") else self.of  # a place in the output, see `places`
            named = getattr(of, "described", "") or f"{getattr(of, '__name__', 'a function')} of the output"
            return ResolvedTarget(of, (named,))
        few = 1 if self.of is not None or self.task is not None else 2  # a single output is explained if it is asked for
        if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < few or not len(output):
            shape = tuple(output.shape) if isinstance(output, Tensor) else nested.described(output)
            is_single = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 1
            advice = f"Explain its only output: {option('target', '0')}." if is_single else _without_class()
            raise NoClasses(f"a class target needs outputs (B, classes), the model returned {shape}. {advice}")
        if not output.is_floating_point() or output.is_meta:
            got = "numbers of the device meta" if output.is_meta else output.dtype
            raise NoClasses(f"a class target needs floating-point outputs, the model returned {got}. {_without_class()}")
        classes = output.shape[1]
        if self.labels is not None and len(self.labels) < classes:
            raise OptionError(f"labels must name {classes} classes, got {len(self.labels)}. Give one name per line.")
        seen = output.detach().cpu()  # the only values that are read
        meaning = Meaning.of(seen, self.task, self.labels)
        top = seen.argmax(1)
        chosen = top if self.of is None else top.new_tensor(self._indices(self.of, len(top), classes))
        versus = None if self.versus is None else self._index(self.versus, classes)
        before, change = meaning.score(self.target_space)

        def score(output: Any) -> Tensor:  # noqa: ANN401
            values = change(_logits(output))
            picked: Tensor = values.gather(1, chosen.to(values.device).expand(len(values))[:, None])[:, 0]
            return picked if versus is None else picked - values[:, versus]

        chosen_scores, shares = score(seen), meaning.probabilities(seen)
        check_scores(chosen_scores)
        texts, scores = [], []
        for image, index in enumerate(chosen.tolist()):
            named = f"{before}{meaning.named(index)}" + ("" if versus is None else f" versus {meaning.named(versus)}")
            texts.append(meaning.told(seen[image], index, float(chosen_scores[image]), named, plain=versus is None))
            best = int(top[image])
            of_probability = (
                {}
                if shares is None
                else {"probability": float(shares[image, index]), "predicted_probability": float(shares[image, best])}
            )
            scores.append(
                {
                    "class": index,
                    "name": None if self.labels is None else meaning.called(index),
                    "versus": versus,
                    "target_space": self.target_space,
                    "score": float(chosen_scores[image]),
                    "predicted": best,
                    "outputs": meaning.kind,
                    **of_probability,
                }
            )
        names = tuple(meaning.called(index) for index in chosen.tolist())
        return ResolvedTarget(score, tuple(texts), names, tuple(scores))

    def _indices(self, of: int | str | Sequence[int | str], count: int, classes: int) -> list[int]:
        each = [of] * count if isinstance(of, (int, str)) else list(of)
        if len(each) != count:
            raise ShapeError(f"target must be one class, or {count} (one per image), got {len(each)}.")
        return [self._index(named, classes) for named in each]

    def _index(self, named: int | str, classes: int) -> int:
        number = whole_number(named.removeprefix("LABEL_")) if isinstance(named, str) else named  # as transformers counts
        noun = "label" if self.task == "multi_label" else "class"
        if number is None:
            index: int = class_names.index_of(str(named), self.labels, classes, noun)
            return index
        if not 0 <= number < classes:
            raise OptionError(f"target must be a {noun} from 0 to {classes - 1}, got {number}.")
        return number


@dataclass(frozen=True)
class ResolvedTarget:
    """Target, resolved for one output of a model.

    Attributes:
        score: Function from an output to one number per image. If it was resolved for a single image, it also takes outputs for any
            number of edited copies of that image.
        texts: Description of the target for each image; one for all images if the target is a function.
        names: Class name of each image; empty if the target is a function.
        scores: The class and its score of each image as values, see `Provenance`; empty if the target is a function.
    """

    score: Callable[[Any], Tensor]
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()
    scores: tuple[dict[str, Any], ...] = ()

    __repr__ = brief


def _logits(output: Any) -> Any:  # noqa: ANN401
    """Return the field `logits` of an output that has several fields, else the output itself."""
    logits = tensor_of(output, "logits")
    return output if logits is None else logits


def _without_class() -> str:
    return worded("Pass a function of its output as target.", "Choose a method that explains no class.")
