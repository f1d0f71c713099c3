"""Tokens traced by the operations inside each call: moves that are found or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH, Moving, image, judged
from visattn.core.capturing.placing.nodes import Nodes
from visattn.core.capturing.placing.operation_table import ROWS, contents_of, row_of
from visattn.core.capturing.placing.steps import Recorder

Change = Callable[[Any, Tensor], Tensor]
COUNT = GRID[0] * GRID[1]
BACK = torch.arange(COUNT - 1, -1, -1)
FIRST = torch.tensor([[0]])
MATRIX = torch.eye(COUNT)[BACK]


def reversed_index(t: Tensor) -> Tensor:
    return BACK[None, :, None].expand_as(t)


def numbers(t: Tensor) -> list[float]:
    return [float(t[0, i, 0]) for i in BACK.tolist()]


def buffer(_: Tensor, write: Callable[[Tensor], Any], *, learned: bool = False) -> Tensor:
    """Return a buffer with one more token, which a function has written into."""
    z = torch.ones(1, COUNT + 1, WIDTH) if learned else torch.zeros(1, COUNT + 1, WIDTH)
    write(z)
    return z[:, 1:]


def shared_before(_: Any, t: Tensor) -> Tensor:
    z = torch.zeros(1, COUNT, WIDTH)
    first, second = z.numpy(), z[:, :48].numpy()
    first[:, 48:] = t.flip(1)[:, 48:].numpy()
    second[:] = t.flip(1)[:, :48].numpy()
    return t * 0.01 + z


WRITES: dict[str, Change] = {
    "scatter_add_ into zeros": lambda _, t: buffer(t, lambda z: z[:, 1:].scatter_add_(1, reversed_index(t), t)),
    "index_add_ into zeros": lambda _, t: buffer(t, lambda z: z[:, 1:].index_add_(1, BACK, t)),
    "index_put_ that adds": lambda _, t: buffer(t, lambda z: z[:, 1:].index_put_((FIRST, BACK[None]), t, accumulate=True)),
    "scatter_ with keywords": lambda _, t: buffer(t, lambda z: z[:, 1:].scatter_(dim=1, index=reversed_index(t), src=t)),
    "out= of a view": lambda _, t: buffer(t, lambda z: torch.add(t, 1.0, out=z[:, 1:]), learned=True),
    "out= of a view, turned": lambda _, t: buffer(t, lambda z: torch.mul(t.flip(1), 2.0, out=z[:, 1:])),
    "foreach": lambda _, t: buffer(t, lambda z: torch._foreach_add_([z[:, 1:]], [t.flip(1)])),
    "a base that is written after its view": lambda _, t: (z := t.clone(), v := z[:, :], z.copy_(t.flip(1)), v)[-1],
}
OTHERS: dict[str, Change] = {
    "mixed by conv1d": lambda _, t: 0.001 * t + F.conv1d(t, MATRIX[:, :, None]),
    "mixed by a sum of products": lambda _, t: 0.001 * t + (t[:, None] * MATRIX[None, :, :, None]).sum(2),
    "mixed by a 1 x 1 convolution": lambda _, t: 0.001 * t + F.conv2d(t[..., None], MATRIX[:, :, None, None])[..., 0],
    "numbers through Python": lambda _, t: 0.01 * t + torch.stack([torch.full((WIDTH,), one) for one in numbers(t)])[None],
    "numbers in tensors": lambda _, t: 0.01 * t + torch.stack([torch.tensor(one) for one in numbers(t)])[None, :, None],
    "memory of numpy": shared_before,
    "copies by broadcasting": lambda _, t: (t[None] + torch.ones(2, 1, 1, 1)).flatten(0, 1),
    "copies by an index": lambda _, t: t[[0, 0]],
    "copies by index_select": lambda _, t: t.index_select(0, torch.tensor([0, 0])),
}
PLACED: dict[str, Change] = {
    "rolled by a number in a tensor": lambda _, t: t.roll(int(torch.tensor(3)), 1),
    "narrowed by a number in a tensor": lambda _, t: torch.narrow(t, 1, torch.tensor(0), COUNT),
    "indexed by a range": lambda _, t: t[:, range(COUNT - 1, -1, -1)],
    "broadcast_tensors": lambda _, t: torch.broadcast_tensors(t, torch.zeros(1, 1, WIDTH))[0],  # type: ignore[no-untyped-call]
    "copied into a slice of zeros": lambda _, t: buffer(t, lambda z: z[:, 1:].copy_(t)),
    "out= of a view": WRITES["out= of a view"],
    "scatter_add_ into zeros": WRITES["scatter_add_ into zeros"],
    "index_add_ into zeros": WRITES["index_add_ into zeros"],
}


@pytest.mark.parametrize("name", [*WRITES, *OTHERS])
def test_moves_within_one_pass_are_right_or_refused(name: str) -> None:
    found = judged(Moving((WRITES | OTHERS)[name]), image())
    assert not found.startswith("wrong"), found


@pytest.mark.parametrize("name", list(PLACED))
def test_moves_that_can_be_proven_are_placed(name: str) -> None:
    assert judged(Moving(PLACED[name]), image()) == "right"


def test_every_operation_of_the_table_exists() -> None:
    missing = {name for name in ROWS if not any(hasattr(torch.ops.aten, form) for form in (name, f"{name}_", f"{name}_copy"))}
    is_older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
    assert missing <= ({"_upsample_lanczos2d_aa"} if is_older else set())


def test_an_operation_without_a_rule_has_none() -> None:
    assert row_of(torch.ops.aten.linalg_inv_ex.default)[1] is None


@pytest.mark.parametrize("inference", [False, True])
def test_steps_name_arguments_and_what_is_written(inference: bool) -> None:
    with torch.inference_mode(inference):
        x, z = torch.zeros(2, 3), torch.zeros(4, 3)
        recorder = Recorder(Nodes(lambda _: None), contents_of)
        with recorder:
            torch.add(x, 1, out=z[1:3])
            F.linear(x, torch.ones(5, 3))
    names = [step.op._schema.name for step in recorder.taken() if step.op is not None]
    assert names[:2] == ["aten::slice", "aten::add"]
    assert names[-1] in ("aten::mm", "aten::addmm", "aten::linear")
