"""Calls behind a cut that are linear in its tokens, step by step, and where this part of the tape ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.capturing.behind import OPS, SIZE, TOKENS, Chain
from visattn.core.capturing.following.cut import Cut, Part
from visattn.core.capturing.following.tape_readouts import _is_linear_step, _linear, is_linear
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.tape import Attention
from visattn.core.records import TokenLayout

X, W, R = Node(0), Node(1), Node(2)
LAYOUT = TokenLayout("tokens", ("cls",), (), (0, 0, 1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "given", "of", "linear"),
    [
        (OPS.add.Tensor, {"self": X, "other": W}, "self", True),
        (OPS.add.Tensor, {"self": X, "other": X}, "self other", True),
        (OPS.mul.Tensor, {"self": X, "other": W}, "self", True),
        (OPS.mul.Tensor, {"self": X, "other": X}, "self other", False),
        (OPS.div.Tensor, {"self": X, "other": W}, "self", True),
        (OPS.div.Tensor, {"self": W, "other": X}, "other", False),
        (OPS.div.Tensor_mode, {"self": X, "other": W, "rounding_mode": None}, "self", True),
        (OPS.div.Tensor_mode, {"self": X, "other": W, "rounding_mode": "floor"}, "self", False),
        (OPS.addmm.default, {"self": X, "mat1": X, "mat2": W}, "self mat1", True),
        (OPS.addmm.default, {"self": W, "mat1": X, "mat2": X}, "mat1 mat2", False),
        (OPS.relu.default, {"self": X}, "self", False),
        (OPS.zeros_like.default, {"self": X}, "self", True),
        (OPS.rand_like.default, {"self": X}, "self", False),
        (OPS._fft_r2c.default, {"self": X}, "self", False),
        (OPS.as_strided.default, {"self": X}, "self", True),
        (None, {"read": X}, "read", False),
    ],
)
def test_a_step_is_linear_in_some_of_its_arguments(op: Any, given: dict[str, Any], of: str, linear: bool) -> None:
    assert _is_linear_step(Step(op, given, (R,)), set(of.split())) is linear


def test_a_step_that_overwrites_numbers_is_not_linear_but_one_that_only_changes_strides_is() -> None:
    written = ((X, R),)
    assert not _is_linear_step(Step(OPS.add_.Tensor, {"self": X, "other": W}, (R,), written), {"self"})
    assert _is_linear_step(Step(OPS.as_strided_.default, {"self": X}, (R,), written), {"self"})


def test_a_call_is_linear_if_each_step_that_reads_tokens_is() -> None:
    chain = Chain()
    x, mean, other, result = chain.tokens(), chain.lost(2, SIZE), chain.learned(SIZE), chain.lost(2, SIZE)

    def linear(*steps: Step, floating: bool = True) -> bool:
        made = chain.put(chain.shadows.of(result), floating=floating)
        return is_linear(chain.entry(steps, [int(x)], int(made), None), {int(x)})

    averaged = Step(OPS.mean.dim, {"self": x, "dim": [1]}, (mean,))
    activated = Step(OPS.relu.default, {"self": other}, (result,))  # of a parameter
    assert linear(averaged)
    assert linear(averaged, activated)
    assert linear(activated, averaged)
    assert not linear(averaged, Step(OPS.relu.default, {"self": mean}, (result,)))
    assert not linear(activated, averaged, Step(OPS.relu.default, {"self": mean}, (result,)))
    assert not linear(averaged, floating=False)
    joined = Step(OPS.cat.default, {"tensors": [other, x], "dim": 1}, (mean,))
    assert not linear(joined, Step(OPS.relu.default, {"self": mean}, (result,)))
    changed = Step(OPS.as_strided_.default, {"self": x}, (None,), ((x, mean),))
    assert not linear(changed, Step(OPS.relu.default, {"self": mean}, (result,)))


def test_a_call_without_steps_is_linear_only_if_it_returns_what_it_was_given() -> None:
    chain = Chain()
    x = int(chain.tokens())
    assert is_linear(chain.entry([], [x], x, before=(x,)), {x})
    assert not is_linear(chain.entry([], [x], x, before=(None,)), {x})
    assert not is_linear(chain.entry([], [x], x, x, before=(x, None)), {x})
    attention = Attention("attn", 0, 0, (), True, (2,), TOKENS, TOKENS)
    assert not is_linear(chain.entry([], [x], x, before=(x,), attention=attention), {x})


def cut(chain: Chain, part: Node, *outputs: Node, entries: tuple[int, ...] | None = None) -> Cut:
    numbers = tuple(range(len(chain.tape.entries))) if entries is None else entries
    return Cut((Part(int(part), None, LAYOUT),), numbers, tuple(map(int, outputs)))


def test_the_linear_part_ends_where_other_calls_read_it_and_at_outputs() -> None:
    chain = Chain()
    x, weight = chain.tokens(), chain.learned(SIZE, 3)
    chain.call(OPS.relu.default, chain.learned(3), self=chain.learned(3))  # reads no tokens
    mean = chain.call(OPS.mean.dim, chain.lost(2, SIZE), self=x, dim=[1])
    activated = chain.call(OPS.relu.default, chain.lost(2, SIZE), self=mean)
    product = chain.call(OPS.mm.default, chain.lost(2, 3), self=mean, mat2=weight)
    later = chain.call(OPS.mm.default, chain.lost(2, 3), self=activated, mat2=weight)
    total = chain.call(OPS.add.Tensor, chain.lost(2, 3), self=product, other=later)
    assert _linear(chain.tape, cut(chain, x, total)) == ((1, 3), (mean, product))
    assert _linear(chain.tape, cut(chain, x, total, product)) == ((1, 3), (mean, product))
    assert _linear(chain.tape, cut(chain, x, product, entries=(1, 3))) == ((1, 3), (product,))
    assert _linear(chain.tape, cut(chain, x, x, entries=())) == ((), (x,))
    assert _linear(chain.tape, cut(chain, x, total, entries=())) == ((), ())


def test_calls_that_write_end_the_linear_part_and_what_they_changed_is_read_later() -> None:
    chain = Chain()
    x = chain.tokens()
    mean = chain.call(OPS.mean.dim, chain.lost(2, SIZE), self=x, dim=[1])
    changed, view = chain.lost(2, SIZE), chain.lost(2, SIZE)
    step = Step(OPS.as_strided.default, {"self": mean}, (changed,))
    chain.entry([step], [mean], int(changed), writes=True, rewritten=((int(mean), int(view)),))
    total = chain.call(OPS.sum.dim_IntList, chain.lost(2), self=view, dim=[1])
    assert _linear(chain.tape, cut(chain, x, total)) == ((0,), (mean,))
    chain.tape.entries[1].writes = False
    assert _linear(chain.tape, cut(chain, x, total)) == ((0, 1, 2), (total,))
    nothing = chain.entry([Step(OPS.mean.dim, {"self": x, "dim": [1]}, (None,))], [x], None)
    assert _linear(chain.tape, cut(chain, x, total)) == ((0, 1, 2, 3), (total,))
    assert nothing.outs == (None,)
