"""Linear layers and scales behind the heads of an attention call, and which call uses a tensor next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from visattn.core.capturing.following.projections import _in_order, _next_use, _projection, _scale, _weight
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Made, Outside, Ref, Tape

FEATURES = torch.arange(12).expand(2, 5, 12)


def called(*args: Any, outs: tuple[int | None, ...] = (), **kwargs: Any) -> Entry:
    results = tuple(None if slot is None else Made(slot, FEATURES.shape, True) for slot in outs)
    return Entry(F.linear, operation_of(F.linear), args, kwargs, results, "")


def with_weight(*shape: int, kind: str = "parameter") -> Tape:
    return Tape(outside={2: Outside(kind, "w", torch.Size(shape), True)})


def test_the_next_use_is_the_first_if_all_but_the_last_return_what_they_were_given() -> None:
    same, other, last = called(Ref(5), outs=(5, None)), called(Ref(5), outs=(6,)), called(Ref(5), outs=(7,))
    nothing = called(Ref(5), outs=(None, 5))

    def used(*entries: Entry, after: int = 0) -> int | None:
        tape = Tape([called(outs=(5,)), *entries])
        return _next_use(tape, 5, after, {5: range(1, len(tape.entries))})

    assert used() is None
    assert used(last) == 1
    assert used(same, last) == 1
    assert used(same, same, last) == 1
    assert used(other, last) is None
    assert used(same, other, last) is None
    assert used(other, same, last) is None
    assert used(nothing, last) is None
    assert used(other, same, last, after=1) == 2
    assert used(other, last, after=1) == 2
    assert used(last, after=1) is None
    assert _next_use(Tape(), 4, 0, {5: [1]}) is None


def test_a_linear_layer_reads_the_features_with_a_parameter() -> None:
    tape = with_weight(6, 12)
    assert _weight(tape, called(Ref(1), Ref(2)), 1, FEATURES) == 2
    assert _weight(tape, called(Ref(1), Ref(2), Ref(3)), 1, FEATURES) == 2
    assert _weight(tape, called(Ref(1), Ref(2), None), 1, FEATURES) == 2
    assert _weight(tape, called(Ref(1), weight=Ref(2)), 1, FEATURES) == 2
    for args in ((Ref(9), Ref(2)), (Ref(2), Ref(1)), (1.0, Ref(2)), (Ref(1),), (Ref(1), 2.0), (Ref(1), Ref(3)), (Ref(9),)):
        assert _weight(tape, called(*args), 1, FEATURES) is None
    assert _weight(tape, called(Ref(1), Ref(2)), 1, FEATURES.flip(-1)) is None
    assert _weight(with_weight(6, 12, kind="buffer"), called(Ref(1), Ref(2)), 1, FEATURES) is None
    assert _weight(with_weight(6, 11), called(Ref(1), Ref(2)), 1, FEATURES) is None
    assert _weight(with_weight(12, 6), called(Ref(1), Ref(2)), 1, FEATURES) is None


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((12,), True),
        ((1, 12), True),
        ((1, 1, 12), True),
        ((), True),
        ((1, 1), True),
        ((12, 1), False),
        ((5, 12), False),
        ((6,), False),
    ],
)
def test_a_scale_has_a_number_for_each_channel_or_one_for_all(shape: tuple[int, ...], found: bool) -> None:
    assert _scale(with_weight(*shape), called(Ref(1), Ref(2)), 1, FEATURES) == (2 if found else None)
    assert _scale(with_weight(*shape), called(Ref(2), Ref(1)), 1, FEATURES) == (2 if found else None)
    assert _scale(with_weight(*shape, kind="buffer"), called(Ref(1), Ref(2)), 1, FEATURES) is None
    assert _scale(with_weight(*shape), called(Ref(1), Ref(2), Ref(3)), 1, FEATURES) is None
    assert _scale(with_weight(*shape), called(Ref(1)), 1, FEATURES) is None
    assert _scale(with_weight(*shape), called(Ref(1), Ref(2)), 1, FEATURES.mT) is None


def test_features_are_in_order_if_each_token_has_all_from_zero_on() -> None:
    assert _in_order(FEATURES)
    assert _in_order(torch.tensor([0]))
    assert not _in_order(FEATURES + 1)
    assert not _in_order(torch.tensor([[0, 1], [1, 0]]))


def test_calls_without_a_tensor_as_their_first_result_have_no_projection() -> None:
    for outs in ((None, 5), (None,)):
        assert _projection(Tape([called(outs=outs)]), 0, FEATURES, {}) is None
    assert _projection(Tape([called(outs=(5,))]), 0, FEATURES[:1], {}) is None
    assert _projection(Tape([called(outs=(5, None)), called(Ref(5), outs=(None, 6))]), 0, FEATURES, {5: [1]}) is None
