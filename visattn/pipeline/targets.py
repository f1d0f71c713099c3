"""What a class-specific method explains: a class by index or name, or a function of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, get_args

from torch import Tensor

from visattn._support.checks import one_of, printable, suggest, whole_number
from visattn._support.files import regular
from visattn._support.typed import check_types
from visattn._support.types import Space
from visattn.errors import OptionError, ShapeError

Of = int | str | Sequence[int | str] | Callable[[Any], Tensor] | None


class TargetOptions(TypedDict, total=False):
    """Options of `Target` beside the class itself."""

    versus: int | str | None
    target_space: Space
    labels: Sequence[str] | None


class NoClasses(OptionError):
    """There are no logits that a class could be taken from."""


@dataclass(frozen=True)
class Target:
    """What is explained.

    Attributes:
        of: A class by index or name, or one for each image; None: the top class of each image; or a function of the model's output
            that gives a number for each image.
        versus: Another class, whose score is subtracted.
        target_space: Whose gradient is taken: `logit`, `prob` (after softmax) or `logprob`.
        labels: Names of the classes, where they are known.

    Raises:
        OptionError: If one is of another type.
    """

    of: Of = None
    versus: int | str | None = None
    target_space: Space = "logit"
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check types; classes and names are looked up in what the model gives.

        Raises:
            OptionError: If one is of another type.
        """
        check_types(type(self), {"target" if name == "of" else name: value for name, value in vars(self).items()})

    def resolve(self, output: Any) -> Resolved:  # noqa: ANN401 - whatever the model gives
        """The classes that are meant, of what the model gave for a batch.

        Raises:
            OptionError: If a class does not exist.
            ShapeError: If classes are not as many as images.
            NoClasses: If the output is no table of logits.
        """
        one_of(self.target_space, get_args(Space), "target space")
        output = _logits(output) if not callable(self.of) else output
        if callable(self.of):
            if self.versus is not None or self.target_space != "logit":
                raise OptionError(
                    "target is a function of the output, so versus and the target space have no place. Leave them out."
                )
            return Resolved(self.of, (f"{getattr(self.of, '__name__', 'a function')} of the output",))
        if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise NoClasses(f"a class needs logits (B, classes), the model gave {shape}. Pass target=a function of its output.")
        if not output.is_floating_point():
            raise NoClasses(
                f"a class needs logits of floating point, the model gave {output.dtype}. Pass target=a function of its output."
            )
        classes = output.shape[1]
        if self.labels is not None and len(self.labels) < classes:
            raise OptionError(f"labels must name {classes} classes, got {len(self.labels)}. Give one name a line.")
        top = output.argmax(1)
        chosen = top if self.of is None else top.new_tensor(self._indices(self.of, len(top), classes))
        versus = None if self.versus is None else self._index(self.versus, classes)

        def score(output: Any) -> Tensor:  # noqa: ANN401
            logits = _logits(output)
            values = {"logit": lambda x: x, "prob": lambda x: x.softmax(-1), "logprob": lambda x: x.log_softmax(-1)}[
                self.target_space
            ](logits)
            picked: Tensor = values.gather(1, chosen.expand(len(values))[:, None])[:, 0]
            return picked if versus is None else picked - values[:, versus]

        found, shares = score(output.detach()), output.detach().softmax(-1)
        texts = []
        for image, index in enumerate(chosen.tolist()):
            text = f"{self.target_space} of {self._name(index)}" + ("" if versus is None else f" versus {self._name(versus)}")
            best = int(top[image])
            predicted = "which is the predicted class" if best == index else f"predicted is {self._name(best)}"
            texts.append(f"{text} = {float(found[image]):.3g}; {predicted}, with probability {float(shares[image, best]):.1%}")
        names = tuple(self._called(index) for index in chosen.tolist())
        return Resolved(score, tuple(texts), names, tuple(shares.gather(1, chosen[:, None])[:, 0].tolist()))

    def _name(self, index: int) -> str:
        return self._called(index) + (f" (class {index})" if self.labels is not None else "")

    def _called(self, index: int) -> str:
        return f"class {index}" if self.labels is None else printable(self.labels[index].split(",")[0])

    def _indices(self, of: int | str | Sequence[int | str], count: int, classes: int) -> list[int]:
        each = [of] * count if isinstance(of, (int, str)) else list(of)
        if len(each) != count:
            raise ShapeError(f"target must be one class or {count}, one for each image, got {len(each)}.")
        return [self._index(one, classes) for one in each]

    def _index(self, named: int | str, classes: int) -> int:
        if isinstance(named, str) and (number := whole_number(named)) is not None:
            named = number
        if isinstance(named, int):
            if not 0 <= named < classes:
                raise OptionError(f"target must be a class from 0 to {classes - 1}, got {named}.")
            return named
        if self.labels is None:
            raise OptionError(
                f"the names of the classes are not known, so '{printable(named)}' cannot be found. Pass an index or labels."
            )
        wanted = named.strip().lower()
        known = [{label.lower(), *(part.strip().lower() for part in label.split(","))} for label in self.labels[:classes]]
        found = [index for index, names in enumerate(known) if wanted in names]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{index} ({printable(self.labels[index])})" for index in found)
            raise OptionError(f"'{printable(named)}' names several classes: {several}. Pass an index.")
        near = ", ".join(suggest(wanted, sorted(set().union(*known)))) or "none is near"
        raise OptionError(
            f"no class is called '{printable(named)}'; did you mean: {near}? Or pass an index from 0 to {classes - 1}."
        )


@dataclass(frozen=True)
class Resolved:
    """A target, of one output.

    Attributes:
        score: From an output to a number for each image; of a single image also from outputs of any number of its edited copies.
        texts: What is explained, for each image; one for all where a function was given.
        names: The class of each image; none where a function was given.
        shares: Its probability.
    """

    score: Callable[[Any], Tensor]
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()


def _logits(output: Any) -> Any:  # noqa: ANN401
    """Class scores of an output that has more fields than these."""
    return getattr(output, "logits", output)


def read_labels(path: Path) -> tuple[str, ...]:
    """Names of classes, one a line.

    Raises:
        OptionError: If the file cannot be read as text.
    """
    try:
        lines = regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{printable(str(path))}: labels must be a text file with one name a line; {error}.") from error
    return tuple(line.strip() for line in lines if line.strip())
