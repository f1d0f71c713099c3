"""Mutants, drawn with a seed from all that the operators of cosmic-ray make of some files.

Of the replacements of arithmetic and comparison, only those are used that run: `a << b` in place of `a + b` fails at once on floats, so any
test kills it, and hundreds of such mutants would hide the others. `==` and `is` are not exchanged, as they are the same for many values.
Operators that draw their own random numbers are left out too.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

from mutants.code import Code, Position

_BINARY = """
Add_Sub Add_Mul Sub_Add Sub_Mul Mul_Div Mul_Add Div_Mul Div_FloorDiv FloorDiv_Mul FloorDiv_Div Mod_FloorDiv Mod_Mul Pow_Mul
LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr
"""
_COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
_UNARY = "USub_UAdd Delete_USub Delete_Invert Delete_Not"
_OTHERS = """
AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue ReplaceContinueWithBreak
ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop
"""
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISON.split()),
    *(f"ReplaceUnaryOperator_{name}" for name in _UNARY.split()),
    *_OTHERS.split(),
)


@dataclass(frozen=True, order=True)
class Place:
    """One thing that one operator can do in one file: the `occurrence`-th, counted by cosmic-ray."""

    file: str
    start: Position
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Mutant:
    """A file with one fault.

    Attributes:
        place: What is changed.
        code: Lines that change, without indentation.
        change: What they become; empty if they are removed.
        text: Text of the whole file with the fault.
    """

    place: Place
    code: str
    change: str
    text: str

    @property
    def name(self) -> str:
        """Name that is the same in each run on one tree."""
        return f"{self.place.file}:{self.place.start[0]}:{self.place.start[1]}:{self.place.operator}:{self.place.occurrence}"

    def __str__(self) -> str:
        """Return file, line and change, in one line."""
        return f"{self.place.file}:{self.place.start[0]}: `{self.code}` -> `{self.change}`"


def drawn(root: Path, files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, uniformly over all that compile and differ from the source.

    Args:
        root: Folder of the project.
        files: Source files.
        count: How many; fewer are returned if there are no more.
        seed: Seed; the first mutants of a longer list are those of a shorter one.
    """
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    places = sorted(place for file, text in texts.items() for place in _places(file, text))
    random.Random(seed).shuffle(places)
    found: list[Mutant] = []
    for place in places:
        if len(found) == count:
            break
        if mutant := _mutant(place, texts[place.file]):
            found.append(mutant)
    return found


def _places(file: str, text: str) -> Iterator[Place]:
    code = Code(text)
    nodes = [
        node for node in ast_nodes(get_ast(text)) if not isinstance(node, (parso.python.tree.Name, parso.python.tree.String))
    ]
    for name in OPERATORS:
        operator = _operator(name)
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            if code.may_change(start, end):
                yield Place(file, start, name, occurrence)


def _mutant(place: Place, text: str) -> Mutant | None:
    """Return the mutant of a place, or None if its text is no Python or says the same."""
    changed = mutate_code(text, _operator(place.operator), place.occurrence)
    try:
        if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            return None
        compile(changed, place.file, "exec")
    except SyntaxError:
        return None
    removed: list[str] = []
    added: list[str] = []
    for line in difflib.ndiff(text.splitlines(), changed.splitlines()):
        kept = {"- ": removed, "+ ": added}.get(line[:2])
        if kept is not None:
            kept.append(line[2:].strip())
    return Mutant(place, " ".join(removed), " ".join(added), changed)


def _operator(name: str) -> Operator:
    made: Operator = get_operator(f"core/{name}")()
    return made
