"""Terms of the output of a forward pass, from what `LinearMode` noted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from visattn.core.capturing.linear.mode import Noted
from visattn.core.capturing.linear.plan import Plan
from visattn.core.records.terms import Part, ScoreTerms, Term, TermKind


def terms_of(plan: Plan, noted: Sequence[Noted], forward: int, modules: Mapping[str, nn.Module]) -> ScoreTerms:
    """Return the terms of a forward pass."""
    parts, constants = dict[int, list[Noted]](), defaultdict[int | None, list[Noted]](list)
    for note in noted:
        if note.action is None:
            parts[0] = [note]
        elif note.action.kind in ("begin", "attention"):
            assert note.action.summand is not None  # noqa: S101 - it begins one
            parts.setdefault(note.action.summand, []).append(note)
        else:
            constants[note.action.summand].append(note)
    terms = [_term(plan, number, notes, constants[number], forward, modules) for number, notes in parts.items()]
    terms.append(Term("", forward, "bias", constants=_parts(constants[None])))
    return ScoreTerms(tuple(terms), _frozen(plan))


def _frozen(plan: Plan) -> tuple[str, ...]:
    """Return what is frozen, by the names of the modules that ran."""
    texts = {"norm": "statistics of", "pool": "attention weights of", "freeze": "a factor in", "follow": "a mask or choice in"}
    frozen = [(texts[action.kind], plan.layers[number]) for number, action in plan.actions.items() if action.freezes]
    return tuple(dict.fromkeys(f"{text} {layer or 'the model itself'}" for text, layer in frozen))


def _term(
    plan: Plan, number: int, notes: Sequence[Noted], constants: Sequence[Noted], forward: int, modules: Mapping[str, nn.Module]
) -> Term:
    summand = plan.summands[number]
    attention, hidden = summand.attention, plan.hidden_behind(number)
    kind: TermKind = "attention" if attention is not None else "branch" if summand.bypassed else "embedding"
    layer = attention.layer if attention is not None else _branch(notes[0].layer, modules)
    return Term(
        layer,
        forward,
        kind,
        0 if attention is None else attention.call,
        hides=tuple(dict.fromkeys(each.layer for each in hidden)),
        parts=_parts(notes),
        constants=_parts(constants),
        operation=notes[0].func,
    )


def _branch(layer: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the module that a layer belongs to: of an activation the one around it."""
    module = modules.get(layer)
    is_single = module is not None and next(module.children(), None) is None
    return layer.rpartition(".")[0] if is_single else layer


def _parts(notes: Sequence[Noted]) -> tuple[Part, ...]:
    return tuple(Part(note.at, note.value) for note in notes)
