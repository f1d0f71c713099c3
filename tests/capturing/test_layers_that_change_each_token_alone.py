"""Steps behind the last attention that change each token alone, and tensors in which tokens are mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capturing.behind import OPS, SIZE, TOKENS, Chain
from visattn.core.capturing.following.cut import _acts_alone, _mixed
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.operation_table import row_of
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.work import Work


def alone(chain: Chain, op: Any, args: list[Node], shape: Node | None = None, *, floating: bool = True, **step: Any) -> bool:
    """Check a step whose result has the places and shape of a node, by default of the first argument with tokens."""
    result = chain.put(chain.shadows.of(args[0] if shape is None else shape))
    given = step.pop("given")
    made = Step(op, given, (result,), **step)
    facts = chain.tape.facts[result]._replace(floating=floating)
    return _acts_alone(Work(made, "" if op is None else row_of(op)[0], chain.shadows, [facts]), args)


def test_an_activation_acts_alone_but_chance_unknown_code_and_triangles_do_not() -> None:
    chain = Chain()
    x = chain.tokens()
    assert alone(chain, OPS.relu.default, [x], given={"self": x})
    assert not alone(chain, OPS.relu.default, [x], given={"self": x}, floating=False)
    assert not alone(chain, OPS.native_dropout.default, [x], given={"input": x})
    assert not alone(chain, OPS.tril.default, [x], given={"self": x})
    assert not alone(chain, OPS._fft_r2c.default, [x], given={"self": x})
    assert not alone(chain, None, [x], given={"read": x})


def test_a_step_may_overwrite_its_own_argument_if_no_other_tensor_shares_it() -> None:
    chain = Chain()
    x, after, other = chain.tokens(), chain.tokens(), chain.tokens()
    assert alone(chain, OPS.relu_.default, [x], given={"self": x}, written=((x, after),))
    assert not alone(chain, OPS.relu_.default, [x], given={"self": x}, written=((x, after),), sharing=(other,))
    assert not alone(chain, OPS.relu.default, [x], given={"self": x}, written=((other, after),))
    assert not alone(chain, OPS.relu.default, [x], given={"self": x}, written=((x, after), (other, after)))
    assert alone(chain, OPS.relu.default, [x], given={"self": x}, sharing=(other,))


@pytest.mark.parametrize(
    ("shape", "added", "multiplied"),
    [((SIZE,), True, True), ((TOKENS, SIZE), True, False), ((1, TOKENS, 1), True, False), ((2, 1, SIZE), True, False)],
)
def test_a_sum_may_add_what_differs_from_token_to_token_but_a_product_may_not(
    shape: tuple[int, ...], added: bool, multiplied: bool
) -> None:
    chain = Chain()
    x, w = chain.tokens(), chain.learned(*shape)
    assert alone(chain, OPS.add.Tensor, [x], given={"self": x, "other": w}) is added
    assert alone(chain, OPS.sub.Tensor, [x], given={"self": w, "other": x}) is added
    assert alone(chain, OPS.mul.Tensor, [x], given={"self": x, "other": w}) is multiplied
    assert alone(chain, OPS.mul.Tensor, [x], given={"self": w, "other": x}) is multiplied


def test_all_operands_that_hold_tokens_differ_from_token_to_token() -> None:
    chain = Chain()
    x, y = chain.tokens(), chain.tokens()
    first = chain.tokens(chain.codes[:, :1])
    assert alone(chain, OPS.mul.Tensor, [x, y], given={"self": x, "other": y})
    assert alone(chain, OPS.add.Tensor, [x, y], given={"self": x, "other": y})
    assert not alone(chain, OPS.add.Tensor, [x, first], given={"self": x, "other": first})
    assert not alone(chain, OPS.mul.Tensor, [x, first], given={"self": x, "other": first})


def test_what_is_written_tells_the_axes_of_tokens_if_there_is_no_other_result() -> None:
    chain = Chain()
    x, after, w = chain.tokens(), chain.tokens(), chain.learned(TOKENS, SIZE)
    step = Step(OPS.mul_.Tensor, {"self": x, "other": w}, (None,), ((x, after),))
    work = Work(step, "mul", chain.shadows, [chain.tape.facts[after]])
    assert not _acts_alone(work, [x])
    step = Step(OPS.add_.Tensor, {"self": x, "other": w}, (None,), ((x, after),))
    assert _acts_alone(Work(step, "add", chain.shadows, [chain.tape.facts[after]]), [x])


def test_moves_keep_tokens_apart_unless_tokens_say_where_to() -> None:
    chain = Chain()
    x, y, table = chain.tokens(), chain.tokens(), chain.learned(9, SIZE)
    assert alone(chain, OPS.transpose.int, [x], given={"self": x, "dim0": 1, "dim1": 2})
    assert alone(chain, OPS.cat.default, [x, y], given={"tensors": [x, y], "dim": 1})
    assert alone(chain, OPS.cat.default, [y], given={"tensors": [table, y], "dim": 1})
    assert not alone(chain, OPS.gather.default, [y], given={"self": table, "dim": 0, "index": y})
    assert not alone(chain, OPS.gather.default, [x, y], given={"self": x, "dim": 1, "index": y})
    assert alone(chain, OPS.gather.default, [x], given={"self": x, "dim": 1, "index": table})


@pytest.mark.parametrize(
    ("op", "name", "axes"),
    [
        (OPS.mean.dim, "dim", {(2,): True, (-1,): True, (1,): False, (-2,): False, (1, 2): False, (0,): False}),
        (OPS._softmax.default, "dim", {2: True, -1: True, 1: False, 0: False}),
        (OPS.native_layer_norm.default, "normalized_shape", {(SIZE,): True, (TOKENS, SIZE): False}),
        (OPS.cumsum.default, "dim", {2: False, 1: False}),
    ],
)
def test_channels_may_be_mixed_and_tokens_may_not(op: Any, name: str, axes: dict[Any, bool]) -> None:
    chain = Chain()
    x = chain.tokens()
    key = "input" if op is OPS.native_layer_norm.default else "self"
    for value, expected in axes.items():
        given = {key: x, name: list(value) if isinstance(value, tuple) else value}
        assert alone(chain, op, [x], given=given) is expected, value


def test_a_product_mixes_channels_if_one_factor_alone_holds_tokens() -> None:
    chain = Chain()
    x = chain.put(Places("placed", chain.codes.flatten()[:, None].expand(12, SIZE)))
    y, w = chain.put(Places("placed", chain.codes[:1, :SIZE].mT.expand(SIZE, 3))), chain.learned(SIZE, 3)
    assert alone(chain, OPS.mm.default, [x], given={"self": x, "mat2": w})
    assert not alone(chain, OPS.mm.default, [x, y], given={"self": x, "mat2": y})


# --- which tensors are mixed


def test_a_tensor_behind_mixed_tokens_is_mixed() -> None:
    chain = Chain()
    x = chain.tokens()
    kept = chain.call(OPS.relu.default, chain.tokens(), self=x)
    chain.call(OPS.mul.Tensor, chain.learned(3), self=chain.learned(3), other=chain.learned(3))
    mixed = chain.call(OPS.cumsum.default, chain.tokens(), self=kept, dim=1)
    behind = chain.call(OPS.relu.default, chain.tokens(), self=mixed)
    beside = chain.call(OPS.relu.default, chain.tokens(), self=kept)
    nowhere = chain.put(chain.shadows.of(chain.learned(3)))
    chain.call(OPS.sum.dim_IntList, nowhere, self=behind, dim=[1, 2])
    last = chain.call(OPS.relu.default, chain.learned(3), self=nowhere)
    assert _mixed(chain.tape, 0, chain.shadows) == {mixed, behind, nowhere, last}
    assert _mixed(chain.tape, 3, chain.shadows) == {nowhere, last}
    assert _mixed(chain.tape, 6, chain.shadows) == set()
    assert int(beside) not in _mixed(chain.tape, 0, chain.shadows)


@pytest.mark.parametrize("kind", ["placed", "lost", "behind", "learned", "foreign"])
def test_tokens_may_be_in_tensors_from_the_image_of_unknown_origin_or_behind_attention(kind: str) -> None:
    chain = Chain()
    shape = 2, TOKENS, SIZE
    origin: Any = {
        "placed": chain.tokens,
        "lost": lambda: chain.lost(*shape),
        "behind": lambda: chain.learned(*shape, behind=(1, "attn", 0)),
        "learned": lambda: chain.learned(*shape),
        "foreign": lambda: chain.learned(*shape, kind="foreign"),
    }[kind]
    total = chain.call(OPS.cumsum.default, chain.learned(*shape), self=origin(), dim=1)
    assert (int(total) in _mixed(chain.tape, 0, chain.shadows)) is (kind in ("placed", "lost", "behind"))


def test_new_results_of_calls_that_were_not_taken_apart_are_mixed() -> None:
    chain = Chain()
    x, y, z = chain.tokens(), chain.tokens(), chain.tokens()
    chain.entry([], [x], int(x), int(y), None, before=(int(x), None, None))
    chain.entry([], [x], int(z), before=(int(x),))
    assert _mixed(chain.tape, 0, chain.shadows) == {y}


def test_a_power_counts_until_a_linear_layer_or_a_statistic_follows() -> None:
    chain = Chain()
    x, weight = chain.tokens(), chain.learned(SIZE, SIZE)
    square = chain.call(OPS.pow.Tensor_Scalar, chain.tokens(), self=x, exponent=2)
    scaled = chain.call(OPS.mul.Tensor, chain.tokens(), self=square, other=chain.learned(SIZE))
    cubed = chain.call(OPS.mul.Tensor, chain.tokens(), self=scaled, other=x)
    itself = chain.call(OPS.mul.Tensor, chain.tokens(), self=x, other=x)
    norm = chain.call(OPS.mean.dim, chain.tokens(size=1), self=square, dim=[-1], keepdim=True)
    divided = chain.call(OPS.div.Tensor, chain.tokens(), self=x, other=norm)
    flat = chain.put(Places("placed", chain.codes.flatten()[:, None].expand(12, SIZE)))
    squares = chain.call(OPS.pow.Tensor_Scalar, chain.put(chain.shadows.of(flat)), self=flat, exponent=2)
    layer = chain.call(OPS.mm.default, chain.put(chain.shadows.of(flat)), self=squares, mat2=weight)
    found = _mixed(chain.tape, 0, chain.shadows)
    assert found == {square, scaled, cubed, itself, squares}
    assert not found & {int(norm), int(divided), int(layer)}


def test_tensors_that_a_step_overwrites_are_results_too() -> None:
    chain = Chain()
    x, after = chain.tokens(), chain.tokens()
    chain.entry([Step(OPS.pow_.Scalar, {"self": x, "exponent": 2}, (None,), ((x, after),))], [x], None)
    assert _mixed(chain.tape, 0, chain.shadows) == {after}
    chain.entry([Step(OPS.pow.Tensor_Scalar, {"self": x, "exponent": 2}, (None,))], [x], None)
    assert _mixed(chain.tape, 0, chain.shadows) == {after}
    assert torch.equal(chain.shadows.of(x).codes, chain.shadows.of(after).codes)


def test_all_steps_of_a_call_are_looked_at() -> None:
    chain = Chain()
    x, w, made, mixed = chain.tokens(), chain.learned(SIZE), chain.learned(SIZE), chain.tokens()
    steps = Step(OPS.relu.default, {"self": w}, (made,)), Step(OPS.cumsum.default, {"self": x, "dim": 1}, (mixed,))
    chain.entry(steps, [x, w], int(mixed))
    assert _mixed(chain.tape, 0, chain.shadows) == {mixed}
