"""Programs that read numbers of tokens through Python or share memory with other libraries, and constants from closures."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.capturing.moving import WIDTH
from tests.capturing.within.model import TOKENS, Change, Program, programs

KEPT = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(9))
PLACES = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(10))


def _built(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows)[None]


def _filled(t: Tensor, read: Callable[[Tensor], float]) -> Tensor:
    out = torch.empty_like(t)
    for i in range(8):  # the rest stays in place
        for j in range(WIDTH):
            out[0, i, j].fill_(read(t[0, 95 - i, j]))
    out[:, 8:] = t[:, 8:]
    return out


def _assigned(t: Tensor, read: Callable[[Tensor], Any]) -> Tensor:
    out = t.clone()
    for i in range(8):
        for j in range(WIDTH):
            out[0, i, j] = read(t[0, 95 - i, j])
    return out


def _first(t: Tensor, made: Callable[[float], Tensor]) -> Tensor:
    """Put a token of one number in front."""
    return torch.cat([made(float(t[0, 3, 0])).view(1, 1, WIDTH), t], 1)


NUMBERS: dict[str, Change] = {
    "list of all": lambda _, t: torch.tensor(t.flip(1).tolist()),
    "list in place": lambda _, t: torch.tensor(t.tolist()),
    "list of rows": lambda _, t: _built([row.tolist() for row in t[0].flip(0)]),
    "float of each of some": lambda _, t: _filled(t, float),
    "item of each of some": lambda _, t: _filled(t, lambda x: x.item()),
    "float assigned": lambda _, t: _assigned(t, float),
    "item assigned": lambda _, t: _assigned(t, Tensor.item),
    "tolist assigned": lambda _, t: _assigned(t, Tensor.tolist),
    "__float__ assigned": lambda _, t: _assigned(t, lambda x: x.__float__()),
    "format assigned": lambda _, t: _assigned(t, lambda x: float(f"{x.item():.8f}")),
    "text assigned": lambda _, t: _assigned(t, lambda x: float(f"{x:.8f}")),
    "complex assigned": lambda _, t: _assigned(t, lambda x: complex(x).real),
    "int assigned": lambda _, t: _assigned(t, lambda x: int(x * 1e6) / 1e6),
    "index assigned": lambda _, t: _assigned(t, lambda x: range(10**9)[(x.abs() * 1e6).long()] / 1e6),
    "sum of a list": lambda _, t: t + sum(t[0, 3].tolist()),
    "full": lambda _, t: _first(t, lambda x: torch.full((WIDTH,), x)),
    "full_like": lambda _, t: _first(t, lambda x: torch.full_like(torch.zeros(WIDTH), x)),
    "new_full": lambda _, t: _first(t, lambda x: t.new_full((WIDTH,), x)),
    "fill_": lambda _, t: _first(t, lambda x: torch.empty(WIDTH).fill_(x)),
    "linspace": lambda _, t: _first(t, lambda x: torch.linspace(x, x + 1, WIDTH)),
    "logspace": lambda _, t: _first(t, lambda x: torch.logspace(x, x + 0.1, WIDTH)),
    "arange": lambda _, t: _first(t, lambda x: torch.arange(x, x + WIDTH - 0.5)),
    "scalar_tensor": lambda _, t: _first(t, lambda x: torch.scalar_tensor(x).expand(WIDTH)),
    "zeros and a number": lambda _, t: _first(t, lambda x: torch.zeros(WIDTH) + x),
    "ones times a number": lambda _, t: _first(t, lambda x: torch.ones(WIDTH) * x),
    "a parameter times a number": lambda m, t: _first(t, lambda x: m.cls * x),
    "a clamp by a number": lambda m, t: _first(t, lambda x: m.cls.clamp(min=x)),
    "an eye times a number": lambda _, t: _first(t, lambda x: torch.eye(WIDTH)[0] * x),
    "normal_ around a number": lambda _, t: _first(t, lambda x: torch.empty(WIDTH).normal_(x, 0.01)),
    "as_tensor": lambda _, t: _first(t, lambda x: torch.as_tensor([x] * WIDTH)),
    "stacked tensors": lambda _, t: _first(t, lambda x: torch.stack([torch.tensor(x)] * WIDTH)),
    "addition of a python number": lambda _, t: t + float(t[0, 3, 0]),
    "each row a full": lambda _, t: torch.stack([torch.full((WIDTH,), float(row[0])) for row in t[0].flip(0)])[None],
    "each row a fill_": lambda _, t: torch.stack([torch.empty(WIDTH).fill_(row[0].item()) for row in t[0].flip(0)])[None],
    "each row a linspace": lambda _, t: torch.stack([torch.linspace(float(r[0]), float(r[1]), WIDTH) for r in t[0].flip(0)])[
        None
    ],
    "each row a tensor": lambda _, t: torch.stack([torch.tensor(row.tolist()) for row in t[0].roll(5, 0)])[None],
    "each row a product": lambda m, t: torch.cat([m.cls * float(row[0]) for row in t[0].flip(0)], 1),
    "a bias of a row": lambda _, t: torch.stack([row + 50 * float(o[0]) for row, o in zip(t[0], t[0].flip(0), strict=True)])[
        None
    ],
    "a power": lambda m, t: torch.cat([m.cls.abs() ** float(row[0]) for row in t[0].flip(0)], 1),
    "a shift by a number": lambda _, t: t.roll(int(t[0, 3, 0].abs() * 100), 1),
    "a choice by a number": lambda _, t: t.flip(1) if float(t[0, 3, 0]) > -100 else t,
    "an order by numbers": lambda _, t: t[:, sorted(range(96), key=t[0, :, 0].tolist().__getitem__)],
    "deepcopy": lambda _, t: copy.deepcopy(t.flip(1)),
    "saved and loaded": lambda _, t: _saved(t.flip(1)),
    "reduced": lambda _, t: torch.frombuffer(bytearray(t.flip(1).contiguous().numpy().tobytes()), dtype=t.dtype).view_as(t),
}


def _saved(t: Tensor) -> Tensor:
    stream = io.BytesIO()
    torch.save(t, stream)
    stream.seek(0)
    return torch.load(stream)


def _moved(t: Tensor) -> Any:
    return np.ascontiguousarray(t.numpy()[:, ::-1])


def _through(t: Tensor, write: Callable[[Any, Any], Any]) -> Tensor:
    """Let numpy write turned tokens into the memory of a copy."""
    out = t.contiguous().clone()
    write(out.numpy(), _moved(t))
    return out


def _by_memoryview(out: Any, new: Any) -> None:
    np.frombuffer(memoryview(out), np.float32)[:] = new.ravel()


def _bytes(t: Tensor) -> Tensor:
    numbers = t.flip(1).contiguous().view(torch.uint8).flatten().tolist()
    return torch.tensor(numbers, dtype=torch.uint8).view(torch.float32).view_as(t)


def _pointer(t: Tensor) -> Tensor:
    out, source = torch.zeros_like(t), t.flip(1).contiguous()
    ctypes.memmove(out.data_ptr(), source.data_ptr(), source.numel() * 4)
    return out


def _beside(m: Any, t: Tensor) -> Tensor:
    out = torch.zeros(1, 97, WIDTH)
    array = out.numpy()
    out[:, :1] = m.cls
    array[:, 1:] = _moved(t)
    return out


def _two_views(m: Any, t: Tensor) -> Tensor:
    out = t.clone()
    one, other = out[:, :48].numpy(), out[:, 48:].numpy()
    kept = one.copy()
    one[:] = other
    other[:] = kept
    return out


def _late(m: Any, t: Tensor) -> Tensor:
    out = torch.empty_like(t)
    array = out.numpy()
    out.copy_(t)
    array[:] = array[:, ::-1].copy()
    return out


def _overwritten(m: Any, t: Tensor) -> Tensor:
    out = t.clone()
    array = out.numpy()
    array[:] = 0
    out.copy_(t.flip(1))
    return out


NUMPY: dict[str, Change] = {
    "from_numpy": lambda _, t: torch.from_numpy(_moved(t)),
    "from_numpy in place": lambda _, t: torch.from_numpy(t.numpy()),
    "as_tensor": lambda _, t: torch.as_tensor(_moved(t)),
    "tensor": lambda _, t: torch.tensor(_moved(t)),
    "asarray": lambda _, t: torch.asarray(np.asarray(t)[:, ::-1].copy()),
    "array": lambda _, t: torch.from_numpy(np.array(t)[:, ::-1].copy()),
    "array interface": lambda _, t: torch.from_numpy(np.array(t.__array__())[:, ::-1].copy()),
    "a function of numpy": lambda _, t: torch.from_numpy(np.flip(t.numpy(), 1).copy()),
    "a sort of numpy": lambda _, t: torch.from_numpy(np.sort(t, 1)),
    "an order of numpy": lambda _, t: t[:, torch.from_numpy(np.argsort(t[0].sum(-1).numpy()))],
    "a constant order of numpy": lambda _, t: t[:, np.arange(96)[::-1].copy()],
    "a constant mask of numpy": lambda _, t: t[:, np.arange(96) % 2 == 0],
    "written by slice": lambda _, t: _through(t, lambda out, new: out.__setitem__(slice(None), new)),
    "written by copyto": lambda _, t: _through(t, np.copyto),
    "written by put": lambda _, t: _through(t, lambda out, new: np.put(out, np.arange(new.size), new)),
    "written by add out": lambda _, t: _through(t, lambda out, new: np.add(new, 0, out=out)),
    "written by memoryview": lambda _, t: _through(t, _by_memoryview),
    "written by flat": lambda _, t: _through(t, lambda out, new: out.flat.__setitem__(slice(None), new.ravel())),
    "written through a dlpack view": lambda _, t: torch.from_dlpack(t.clone()).copy_(t.flip(1)),
    "dlpack of numpy": lambda _, t: torch.from_dlpack(_moved(t)),
    "frombuffer": lambda _, t: torch.frombuffer(bytearray(_moved(t).tobytes()), dtype=torch.float32).view_as(t),
    "frombuffer of numpy": lambda _, t: torch.frombuffer(_moved(t), dtype=torch.float32).view_as(t),
    "pointer": lambda _, t: _pointer(t),
    "beside a class token": _beside,
    "two views that are exposed": _two_views,
    "exposed before it is written": _late,
    "exposed and then written by torch": _overwritten,
    "storage copied": lambda _, t: _stored(t),
    "storage shared": lambda _, t: torch.empty(0).set_(t.flip(1).contiguous().untyped_storage(), 0, t.shape),
    "storage of a list": lambda _, t: _bytes(t),
}


def _stored(t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    out.untyped_storage().copy_(t.flip(1).contiguous().untyped_storage())
    return out


def _shared(m: Any) -> None:
    """Give a model buffers whose memory numpy shares since before the forward pass."""
    m.array = np.zeros((1, 97, WIDTH), np.float32)
    m.register_buffer("room", torch.from_numpy(m.array))
    m.register_buffer("kept", torch.zeros(1, 97, WIDTH))
    m.whole, m.part_of_it = m.kept.numpy(), m.kept[:, 1:].numpy()
    m.list = [m.kept[:, i : i + 1].numpy() for i in range(97)]


def _room(m: Any, t: Tensor) -> Tensor:
    m.room[:, :1] = m.cls
    m.array[:, 1:] = _moved(t)
    return m.room.clone()


def _room_by_torch(m: Any, t: Tensor) -> Tensor:
    m.room[:, :1] = m.cls
    m.room[:, 1:] = t.flip(1)
    return torch.from_numpy(m.array) + 0


def _whole_and_part(m: Any, t: Tensor) -> Tensor:
    m.whole[:, :1] = m.cls.detach().numpy()
    m.part_of_it[:] = _moved(t)
    return m.kept.clone()


def _many_views(m: Any, t: Tensor) -> Tensor:
    m.kept.copy_(m.table)
    for i, row in enumerate(_moved(t).swapaxes(0, 1)):
        m.list[i + 1][:] = row
    return m.kept * 1


def _over_torch(m: Any, t: Tensor) -> Tensor:
    m.kept[:, 1:] = t
    m.part_of_it[:] = m.part_of_it[:, ::-1].copy()
    return m.kept[:, 1:].clone()


def _half(m: Any, t: Tensor) -> Tensor:
    m.kept[:, 1:] = t
    m.part_of_it[:, :48] = m.part_of_it[:, 48:][:, ::-1]
    m.part_of_it[:, 48:] = 0
    return m.kept[:, 1:] + 0


def _scratch(m: Any, t: Tensor) -> Tensor:
    torch.add(t.flip(1), m.pos, out=m.room[:, 1:])
    m.array[:, :1] = 1
    return m.room + 0


SHARED: dict[str, Change] = {
    "a buffer that numpy writes": _room,
    "a buffer that torch writes and numpy reads": _room_by_torch,
    "a buffer with two views": _whole_and_part,
    "a buffer with a view of each row": _many_views,
    "a buffer that both write": _over_torch,
    "a buffer that both write in part": _half,
    "a buffer with a number": _scratch,
}


def _closures() -> Iterator[tuple[str, Change]]:
    order, list_, matrix, shift = PLACES.clone(), PLACES.tolist(), torch.eye(96)[PLACES], torch.tensor(5)
    halves, mask = [PLACES[:48], PLACES[48:]], torch.arange(96) % 2 == 0
    holder = {"order": order}
    yield "order of a closure", lambda _, t: t[:, order]
    yield "list of a closure", lambda _, t: t[:, list_]
    yield "matrix of a closure", lambda _, t: matrix @ t
    yield "shift of a closure", lambda _, t: t.roll(int(shift), 1)
    yield "halves of a closure", lambda _, t: torch.cat([t[:, half] for half in halves], 1)
    yield "mask of a closure", lambda _, t: torch.cat([t[:, mask], t[:, ~mask]], 1)
    yield "dict of a closure", lambda _, t: t.index_select(1, holder["order"])
    yield "default argument", lambda _, t, order=order: t.take_along_dim(order[None, :, None], 1)
    yield "global tensor", lambda _, t: torch.cat([KEPT, t.flip(1)], 1)
    yield "global added", lambda _, t: t.flip(1) + KEPT
    yield "global order", lambda _, t: t[:, PLACES]
    yield "inverse of a closure", lambda _, t: t[:, order][:, order.argsort()]
    yield "scatter by a closure", lambda _, t: torch.zeros_like(t).scatter_(1, order[None, :, None].expand_as(t), t)
    yield "written into a clone of a global", lambda _, t: torch.cat([KEPT.clone().mul_(2), t.roll(9, 1)], 1)
    yield "attribute of a function", _attributed
    yield "sorted by a closure", lambda _, t: t[:, order.sort().indices]
    yield "buffer order", lambda m, t: t[:, m.order]
    yield "buffer matrix", lambda m, t: m.mix @ t
    yield "parameter cast", lambda m, t: (m.mix.double() @ t.double()).float()
    yield "matrix made of the order", lambda m, t: torch.nn.functional.one_hot(m.order, 96).float() @ t
    yield "matrix made of ranges", lambda m, t: (torch.arange(96)[:, None] == torch.arange(95, -1, -1)).float() @ t


def _attributed(_: Any, t: Tensor) -> Tensor:
    return t[:, _attributed.order]


_attributed.order = PLACES.flip(0)


def of_python() -> Iterator[Program]:
    yield from programs("numbers", NUMBERS)
    yield from programs("numpy", NUMPY)
    yield from programs("numpy", SHARED, prepare=_shared)
    yield from programs("constants", _closures())
