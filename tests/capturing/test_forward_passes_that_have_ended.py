"""What is known of a forward pass once it has ended: places by a rule, tokens of tensors, projections, vectors, kept tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.watched import Model, Seen, image, tokens, watched
from visattn.core.capturing.forward import Forward, Inputs, placed
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError

ROWS = TokenLayout("tokens", (), (2, 3), Box(0, 0, 2, 3))
KEYS = TokenLayout("keys", (), (2, 3), Box(0, 0, 2, 3))


def attend(x: Tensor) -> Tensor:
    q = tokens(x)
    return F.scaled_dot_product_attention(q, q, q)


def written(x: Tensor) -> Tensor:
    q = tokens(x)
    return (q @ q.mT).softmax(-1) @ q


def doubtful(x: Tensor) -> Tensor:
    q = tokens(x)
    return ((q @ q.mT).softmax(-1)[..., None] * q[..., None, :, :]).sum(-2)


class Rule:
    """Rule that places the tokens, and what it was asked."""

    def __init__(self, fits: bool = True) -> None:
        self.asked: list[Any] = []
        self.fits = fits

    def __call__(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if not self.fits:
            raise LayoutError("tokens do not fit")
        return "cross", ROWS, KEYS


# --- places


@pytest.mark.parametrize("early", [False, True])
def test_rule_is_asked_for_the_places_of_a_call(early: bool) -> None:
    rule, found = Rule(), []
    seen: Seen | None = None

    def replace(_layer: str, owner: nn.Module, call: Any, attention: Any, _compute: Any) -> None:
        if early and seen is not None:
            found.append(seen.watch.arranged(call, attention, owner))

    model = Model(lambda x: F.scaled_dot_product_attention(tokens(x)[:, :, :4], tokens(x)[:, :, :5], tokens(x)[:, :, :5]))
    seen = Seen(model, replace, facts={"place": rule})
    with seen.watch.watching():
        model(image())
    if not early:
        (_, owner, call, attention) = seen.calls[0]
        found.append(seen.forwards[0].arrangement(call, attention, owner))
    (located,) = found
    assert located is not None
    assert located[1] is None
    assert (located[0].kind, located[0].queries, located[0].keys) == ("cross", ROWS, KEYS)
    assert rule.asked == [(model.attn, 4, 5, (2, 3))]
    assert seen.forwards[0].conclusions() is None


@pytest.mark.parametrize(("run", "is_gate"), [(attend, False), (written, False), (doubtful, True)])
def test_only_a_doubtful_call_may_have_no_places(run: Any, is_gate: bool) -> None:
    rule = Rule(fits=False)
    seen, _ = watched(run, image(), facts={"place": rule})
    _, owner, call, attention = seen.calls[0]
    inputs = Inputs((8, 9), 2)
    if is_gate:
        assert placed(rule, call, attention, owner, inputs) is None
    else:
        with pytest.raises(LayoutError, match="do not fit"):
            placed(rule, call, attention, owner, inputs)
    assert [asked[1:] for asked in rule.asked] == [(6, 6, (8, 9))]


def test_places_are_concluded_from_the_tape_without_a_rule() -> None:
    seen, _ = watched(attend, image())
    _, owner, call, attention = seen.calls[0]
    forward = seen.forwards[0]
    located = forward.arrangement(call, attention, owner)
    assert located is not None
    assert (located[0].kind, located[0].queries.grid) == ("self", (2, 3))
    conclusions = forward.conclusions()
    assert conclusions is not None
    assert conclusions.calls[attention] is located


def test_tokens_of_a_tensor_are_known_if_they_were_asked_for() -> None:
    slots: list[int | None] = []
    seen: Seen | None = None

    def run(x: Tensor) -> Tensor:
        assert seen is not None
        y = tokens(x)[:, 0] * 2
        slots.append(seen.watch.want(y))
        return y + attend(x)[:, 0]

    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        assert seen.watch.want(image()) is None
        model(image())
        assert seen.watch.want(image()) is None
        slot = slots[0]
        assert isinstance(slot, int)
        assert seen.watch._slots == {slot}
        found = seen.forwards[0].tokens(slot)
        assert found is not None
        assert found.layout.grid == (2, 3)
        assert seen.forwards[0].tokens(None) is None


def test_tokens_are_unknown_if_a_rule_places_them() -> None:
    seen, _ = watched(attend, image(), facts={"place": Rule()})
    assert seen.forwards[0].tokens(0) is None


# --- what is behind and before a call


def weights_behind(run: Any, **options: Any) -> tuple[Seen, list[Any]]:
    """Run a model twice; return the weight behind the heads of its only call, as it is found at the end of each forward pass."""
    found: list[Any] = []
    seen: Seen | None = None

    def finish(forward: Forward) -> None:
        assert seen is not None
        seen.forwards.append(forward)
        _, owner, call, attention = seen.calls[-1]
        located = forward.arrangement(call, attention, owner)
        assert located is not None
        found.append(forward.output_weight(call, attention, located[0]))

    model = Model(run)
    model.attn.layer = LINEAR
    seen = Seen(model, finish=finish, **options)
    with torch.no_grad(), seen.watch.watching():
        for _ in range(2):
            model(image())
    return seen, found


LINEAR = nn.Linear(3, 3)


def test_weight_behind_the_heads_is_found() -> None:
    for run in (attend, written):
        seen, found = weights_behind(lambda x, run=run: LINEAR(run(x).transpose(1, 2).flatten(2)) + tokens(x)[:, 0])
        assert all(weight is not None and torch.equal(weight, LINEAR.weight) for weight in found)
        assert seen.tape(0).projections is seen.tape(1).projections is not None
    turned = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    _, found = weights_behind(lambda x: LINEAR(attend(x).transpose(1, 2).flatten(2) @ turned) + tokens(x)[:, 0])
    assert found == [None, None]


def test_weight_behind_the_heads_is_unknown_if_a_rule_places_tokens() -> None:
    seen, found = weights_behind(
        lambda x: LINEAR(attend(x).transpose(1, 2).flatten(2)) + tokens(x)[:, 0], facts={"place": Rule()}
    )
    assert (found, seen.tape().projections) == ([None, None], None)


def test_weight_behind_points_is_unknown() -> None:
    seen, _ = watched(attend, image())
    sampled: Any = type("Sampled", (), {"kind": "sampled"})
    _, _, call, attention = seen.calls[0]
    assert seen.forwards[0].output_weight(call, attention, sampled) is None


def test_queries_and_keys_are_found_among_the_operands_of_the_scores() -> None:
    seen, _ = watched(written, image(), vectors=True)
    forward = seen.forwards[0]
    vectors = forward.vectors(seen.attention)
    assert vectors is not None
    assert forward.vectors(seen.attention) is vectors
    assert list(seen.tape().vectors.values()) == [vectors]
    query, key = (vector.of(seen.call.scored) for vector in vectors)
    assert torch.equal(query, tokens(image()))
    assert torch.equal(key, tokens(image()))
    fused, _ = watched(attend, image(), vectors=True)
    assert fused.forwards[0].vectors(fused.attention) is None


def test_kept_tensors_are_known_by_their_slots() -> None:
    seen, (out,) = watched(lambda x: attend(x) * 2, image(), gradients=True)
    (slot,) = seen.tape().output
    kept: Any = Forward(3, Inputs(), seen.tape(), None, set(), {}, {slot: out})
    assert kept.kept(slot) is out
    assert kept.kept(slot + 1) is None
    assert (kept.number, tuple(kept.inputs)) == (3, ((0, 0), 0))
