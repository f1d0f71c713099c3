"""Memory of the model that other code holds since before the forward pass: what that code writes there is never taken for a constant.

Each program writes its tokens, turned, into such memory, where no operation shows it. It is judged by lighting patches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import visattn
from tests.capturing.moving import WIDTH
from tests.capturing.test_earned import REFUSED, outcome
from tests.capturing.within.model import TOKENS, Mover, Program, made, quietly

SHAPE = 1, TOKENS, WIDTH
Share = Callable[[Any], np.ndarray]  # gives the model `held`; returns an array in the same memory


def room() -> Tensor:
    return torch.zeros(SHAPE)


def of_buffer(m: Any) -> np.ndarray:
    m.register_buffer("held", room())
    return m.held.numpy()  # type: ignore[no-any-return]


def of_parameter(m: Any) -> np.ndarray:
    m.held = nn.Parameter(room())
    return m.held.detach().numpy()  # type: ignore[no-any-return]


def of_frozen_parameter(m: Any) -> np.ndarray:
    m.held = nn.Parameter(room(), requires_grad=False)
    return m.held.data.numpy()  # type: ignore[no-any-return]


def of_attribute(m: Any) -> np.ndarray:
    m.held = room()
    return m.held.numpy()  # type: ignore[no-any-return]


def of_container(m: Any) -> np.ndarray:
    m.kept = {"a": [room()]}
    m.held = m.kept["a"][0][:]
    return m.kept["a"][0].numpy()  # type: ignore[no-any-return]


def from_array(m: Any) -> np.ndarray:
    array = np.zeros(SHAPE, np.float32)
    m.register_buffer("held", torch.from_numpy(array))
    return array


def from_part_of_an_array(m: Any) -> np.ndarray:
    array = np.zeros((1, TOKENS + 1, WIDTH), np.float32)
    m.register_buffer("held", torch.from_numpy(array)[:, 1:])
    return array[:, 1:]


def from_bytes(m: Any) -> np.ndarray:
    content = bytearray(4 * TOKENS * WIDTH)
    m.register_buffer("held", torch.frombuffer(content, dtype=torch.float32).view(SHAPE))
    return np.frombuffer(content, np.float32).reshape(SHAPE)


def by_dlpack(m: Any) -> np.ndarray:
    m.register_buffer("held", room())
    return writable(np.from_dlpack(m.held))


def by_dlpack_of_a_part(m: Any) -> np.ndarray:
    m.register_buffer("held", room())
    return writable(np.from_dlpack(m.held[:, :]))


def by_dlpack_of_a_parameter(m: Any) -> np.ndarray:
    m.held = nn.Parameter(room())
    return writable(np.from_dlpack(m.held.detach()))


def writable(array: np.ndarray) -> np.ndarray:
    """Return an array over the same memory; older versions of NumPy make what comes by DLPack read-only."""
    content = (ctypes.c_float * array.size).from_address(array.ctypes.data)
    setattr(content, "owner", array)  # noqa: B010 - keeps the array alive
    return np.ctypeslib.as_array(content).reshape(array.shape)


def by_torch(m: Any) -> np.ndarray:
    array = np.zeros((1, TOKENS + 1, WIDTH), np.float32)
    m.register_buffer("held", torch.from_numpy(array[:, 1:]))
    m.beside = [torch.from_numpy(array)]
    return array[:, 1:]


SHARED: dict[str, Share] = {
    name.__name__: name
    for name in (
        of_buffer,
        of_parameter,
        of_frozen_parameter,
        of_attribute,
        of_container,
        from_array,
        from_part_of_an_array,
        from_bytes,
        by_dlpack,
        by_dlpack_of_a_part,
        by_dlpack_of_a_parameter,
    )
}
LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.detach().numpy(),
    "tolist": lambda t: np.array(t.tolist()),
    "asarray": lambda t: np.asarray(t.detach()),
    "dlpack": lambda t: np.from_dlpack(t.detach()),
    "item": lambda t: float(t[0, 5, 0].item()) * np.ones(SHAPE),
    "float": lambda t: float(t[0, 5, 0]) * np.ones(SHAPE),
}


def put(m: Any, values: Any) -> None:
    m.array[0][:] = np.ascontiguousarray(np.asarray(values)[:, ::-1])


def written(leave: Callable[[Tensor], Any], use: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def change(m: Any, t: Tensor) -> Tensor:
        put(m, leave(t))
        return use(m, t)

    return change


def after_a_use(leave: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def change(m: Any, t: Tensor) -> Tensor:
        _before = m.held * 2
        put(m, leave(t))
        return t + m.held  # type: ignore[no-any-return]

    return change


def prepared(share: Share) -> Callable[[Any], None]:
    def prepare(m: Any) -> None:
        m.array = [share(m)]

    return prepare


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("share", SHARED)
def test_what_other_code_writes_is_no_constant(share: str, leave: str) -> None:
    change = written(LEAVES[leave], lambda m, t: t + m.held)
    assert outcome(change, prepared(SHARED[share])) in REFUSED


@pytest.mark.parametrize("share", SHARED)
def test_what_other_code_writes_after_a_use_is_no_constant(share: str) -> None:
    assert outcome(after_a_use(LEAVES["tolist"]), prepared(SHARED[share])) in REFUSED


@pytest.mark.parametrize("share", SHARED)
def test_a_view_of_what_other_code_writes_is_no_constant(share: str) -> None:
    change = written(LEAVES["tolist"], lambda m, t: t + m.held[:, :].view(SHAPE))
    assert outcome(change, prepared(SHARED[share])) in REFUSED


def test_what_torch_writes_beside_a_tensor_in_the_same_array_is_no_constant() -> None:
    def change(m: Any, t: Tensor) -> Tensor:
        m.beside[0][:, 1:].copy_(t.flip(1))
        return t + m.held  # type: ignore[no-any-return]

    assert outcome(change, prepared(by_torch)) in REFUSED


def test_what_torch_writes_by_out_beside_a_tensor_is_no_constant() -> None:
    def change(m: Any, t: Tensor) -> Tensor:
        torch.mul(t.flip(1), 2, out=m.beside[0][:, 1:])
        return t + m.held  # type: ignore[no-any-return]

    assert outcome(change, prepared(by_torch)) in REFUSED


@pytest.mark.parametrize("share", SHARED)
def test_shared_memory_that_nobody_writes_stays_a_constant(share: str) -> None:
    def change(m: Any, t: Tensor) -> Tensor:
        t.sum().item()
        return t.flip(1) + m.held  # type: ignore[no-any-return]

    assert outcome(change, prepared(SHARED[share])) == "right"


@pytest.mark.parametrize("share", SHARED)
def test_a_known_tape_notices_what_other_code_writes(share: str) -> None:
    writes: list[bool] = []

    def change(m: Any, t: Tensor) -> Tensor:
        values = t.tolist()
        if writes:
            put(m, values)
        return t + m.held  # type: ignore[no-any-return]

    model = Mover(Program("", "", change, prepare=prepared(SHARED[share])))

    def reason() -> str | None:
        with visattn.capture(model) as recording:
            quietly(model, made("image", 0, 1))
        return recording[0].reason

    assert [reason(), reason()] == [None, None]
    writes.append(True)
    assert reason() is not None
    writes.clear()
    m: Any = model
    m.array[0][:] = 0
    assert reason() is None


def test_a_cast_hands_no_number_to_other_code() -> None:
    assert outcome(lambda _, t: t.double().float().flip(1) + torch.full((1, 1, WIDTH), 0.5)) == "right"
