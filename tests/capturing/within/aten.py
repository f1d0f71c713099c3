"""Calls of `torch.ops.aten`, whose arguments are built from the schemas."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within.model import TOKENS, Program, called, planes, quietly, wide

# not called: they crash on wrong arguments, change settings, need other devices, or are the gradient of something
_WORDS = """
_backward backward_ cudnn miopen mkldnn mps_ cuda xpu vulkan sparse csr quantiz qint q_ fbgemm choose_qparams fake_quant set_
resize record_stream from_file storage pin_memory is_pinned _debug _assert sym_ _nested nested_ segment_reduce _cufft _fused
_dirichlet _sobol _weight _embedding _pack _pad_packed _ctc ctc_loss _lstm _thnn rnn lstm gru _test _transform_bias
_scaled_mm _mixed_dtypes _int_mm _convert _grouped _validate _flash _efficient _native_multi _transformer _triton _jagged
_padded_dense _fill_mem _make_ _new_zeros _coalesce _values _indices _nnz _dim[IV] hspmm sspaddmm _reshape_from _spdiags
_spsolve _fw_primal _make_dual _unpack_dual _version _shape_as _propagate _use_ _has_ _is_ is_ _cslt _linalg_check _amp
_foobar _local_scalar retain_grad requires_grad output_nr detach_ rename names align_ refine random normal uniform bernoulli
exponential geometric cauchy poisson binomial multinomial dropout rrelu rand gamma empty nonzero_static unsafe_masked
_unsafe_masked _compute_linear data _print _cdist _pdist histogramdd _histogramdd stft istft _safe_softmax _philox _wrapped
_dyn_quant _addmm_activation _batch_norm _chunk_cat lift _lu_with_info _trilinear wait item tril_indices
"""
LEFT_OUT = _WORDS.split()
TRIES = 48
FILE = Path(__file__).with_suffix(".txt")


def _tensors(name: str, first: bool) -> list[Callable[[Tensor], Any]]:
    """Return tensors for an argument, by its name."""
    if name in ("index", "indices", "idx"):
        return [
            lambda t: torch.arange(TOKENS).flip(0),
            lambda t: wide(torch.arange(TOKENS).flip(0), t),
            lambda t: torch.arange(t.numel()).view_as(t).flip(1),
        ]
    if name in ("mask", "condition"):
        return [lambda t: torch.arange(TOKENS)[None, :, None] % 5 > 0, lambda t: t > -9]
    if name in ("weight", "mat2", "batch2", "vec2", "B"):
        return [
            lambda t: torch.eye(WIDTH),
            lambda t: torch.eye(WIDTH)[None],
            lambda t: t,
            lambda t: torch.eye(WIDTH)[:, :, None, None],
            lambda t: torch.ones(WIDTH),
        ]
    if name in ("grid",):
        return [lambda t: torch.zeros(1, *GRID, 2)]
    if first:
        return [lambda t: t, planes, lambda t: t[0], lambda t: t.mT, lambda t: (t * 100).int(), lambda t: t.sigmoid()]
    return [
        lambda t: t.flip(1),
        lambda t: torch.full((1, 1, WIDTH), 0.5),
        lambda t: torch.tensor(0.5),
        lambda t: t[0].flip(0),
        lambda t: torch.ones(WIDTH),
        lambda t: torch.tensor(2),
        lambda t: (t * 100).int().flip(1),
    ]


def _candidates(argument: Any, first: bool) -> list[Callable[[Tensor], Any]] | None:
    """Return possible values of an argument; None if its type has none."""
    kind, name = str(argument.type), argument.name
    if kind.startswith("Optional") or (argument.has_default_value() and not first):
        return [lambda t: ...]  # left out
    if kind == "Tensor":
        return _tensors(name, first)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        if name in ("indices",):
            return [lambda t: [None, torch.arange(TOKENS).flip(0)], lambda t: [torch.tensor([0]), torch.arange(TOKENS).flip(0)]]
        if first:
            return [lambda t: [t[:, 48:], t[:, :48]], lambda t: [t.flip(1), t], lambda t: [t[0]]]
        return [lambda t: [t[:, :48], t[:, 48:]], lambda t: [t, t.flip(1)], lambda t: [torch.ones(1), torch.ones(1)]]
    if kind == "int":
        low = [1, 2, 0, 3, -1, 48] if name in ("dim", "dim0", "dim1", "axis", "axis0", "axis1") else [1, 2, 48, 5, 0, -1, TOKENS]
        return [lambda t, n=n: n for n in low]
    if kind in ("number", "Scalar", "float"):
        return [lambda t: 0.5, lambda t: 2]
    if kind == "bool":
        return [lambda t: False, lambda t: True]
    if kind == "List[int]":
        sizes = [
            [1],
            [2],
            [1, TOKENS, WIDTH],
            [WIDTH],
            [1, 2],
            [2, 2],
            list(GRID),
            [5],
            [0, 2, 1],
            [0, 0, 3, -3],
            [2, 3],
            [48, 48],
            [1, 1],
        ]
        return [lambda t, n=n: list(n) for n in sizes]
    if kind == "List[float]":
        return [lambda t: [1.0, 1.0]]
    if kind == "str":
        return [lambda t: "mean"]
    return None


Build = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


class Operation:
    """One overload, with what its schema says."""

    def __init__(self, name: str) -> None:
        packet, overload = name.split(".")
        self.name, self.op = name, getattr(getattr(torch.ops.aten, packet), overload)
        arguments = self.op._schema.arguments
        self.outs = [argument.name for argument in arguments if argument.is_out]
        self.wanted = [argument for argument in arguments if not argument.is_out]
        first = self.wanted[0] if self.wanted else None
        self.usable = first is not None and "Tensor" in str(first.type)
        self.writes = not self.outs and first is not None and first.alias_info is not None and first.alias_info.is_write

    def choices(self) -> list[list[Callable[[Tensor], Any]]] | None:
        every = [_candidates(argument, place == 0) for place, argument in enumerate(self.wanted)]
        found = [one for one in every if one is not None]
        return found if len(found) == len(every) else None

    def combinations(self) -> Iterator[tuple[int, ...]]:
        """Yield combinations of arguments: all, or the first choices and then others in a fixed random order."""
        choices = self.choices()
        if choices is None:
            return
        if math.prod(map(len, choices)) <= TRIES:
            yield from itertools.product(*(range(len(choice)) for choice in choices))
            return
        draw = random.Random(self.name)
        yield tuple(0 for _ in choices)
        for _ in range(TRIES):
            yield tuple(draw.randrange(len(choice)) for choice in choices)

    def build(self, combination: tuple[int, ...]) -> Build:
        """Return a function from tokens to the arguments of a combination."""
        picked = [choice[i] for choice, i in zip(self.choices() or (), combination, strict=True)]

        def build(t: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args, named, left_out = [], {}, False
            for argument, pick in zip(self.wanted, picked, strict=True):
                value = pick(t)
                if value is ...:
                    left_out = True
                elif argument.kwarg_only or left_out:
                    named[argument.name] = value
                else:
                    args.append(value)
            return tuple(args), named

        return build


def _call(operation: Operation, build: Build, how: int) -> Callable[[Tensor], Any]:
    """Return a call: positional or by keyword, into a prepared slice, or in place through a view."""

    op, outs = operation.op, operation.outs

    def call(t: Tensor) -> Any:
        args, named = build(t)
        if outs:
            room = torch.zeros(1, TOKENS + 1, WIDTH)
            room[:, :1] = 0.5
            targets = [room[:, 1:] if how else torch.empty(0), *(torch.empty(0, dtype=torch.long) for _ in outs[1:])]
            op(*args, **named, **dict(zip(outs, targets, strict=True)))
            return room if how else targets[0]
        if operation.writes:
            target = args[0]
            if isinstance(target, list):
                target = [x.clone() for x in target]
                op(target, *args[1:], **named)
                return torch.cat(target, 1)
            if how:
                room = torch.zeros(target.shape[0], target.shape[1] + 1, *target.shape[2:])
                view = room[:, 1:]
                view.copy_(target)
                op(view, *args[1:], **named)
                return room
            target = target.clone()
            op(target, *args[1:], **named)
            return target
        if how:
            names = [argument.name for argument in op._schema.arguments]
            result = op(**dict(zip(names, args, strict=False)), **named)
        else:
            result = op(*args, **named)
        return _joined(result) if isinstance(result, (list, tuple)) and len(result) > 1 else result

    return call


def _joined(parts: Any) -> Any:
    """Return parts of tokens one after the other; other results as they are."""
    if not all(isinstance(x, Tensor) and x.ndim == 3 and x.shape[2] == parts[0].shape[2] for x in parts):
        return parts
    return torch.cat(list(parts), 1) if sum(x.shape[1] for x in parts) <= 2 * TOKENS else parts


def _tokens(call: Callable[[Tensor], Any], t: Tensor) -> Tensor | None:
    tokens = called(call, lambda t: (t,), t)
    return tokens if tokens is not None and bool(tokens.isfinite().all()) else None


def _depends(call: Callable[[Tensor], Any], t: Tensor) -> Tensor | None:
    """Return the tokens that a call makes, if each run makes the same and they depend on the tokens."""
    try:
        one, again, other = (quietly(_tokens, call, x) for x in (t, t, t.roll(1, 0) * 1.5 + 0.3))
    except Exception:
        return None
    if one is None or again is None or other is None or one.shape != other.shape or one.shape[1] < 4:
        return None
    return one if torch.equal(one, again) and not torch.equal(one, other) else None


def overloads() -> Iterator[str]:
    for name in dir(torch.ops.aten):
        if name.startswith("__") or name in ("name", "_dir"):
            continue
        if any(part in name for part in LEFT_OUT) or (name.startswith("_") and not name.startswith("_foreach")):
            continue
        for overload in getattr(torch.ops.aten, name).overloads():
            if not any(part in overload for part in ("backward", "names", "generator", "dimname")):
                yield f"{name}.{overload}"


def _found(name: str) -> Iterator[str]:
    """Yield a line for up to two calls of an overload with different results."""
    t, met = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(6)), list[Tensor]()
    operation = Operation(name)
    if not operation.usable:
        return
    for how in (1, 0):
        for combination in operation.combinations():
            tokens = _depends(_call(operation, operation.build(combination), how), t)
            if tokens is None or any(x.shape == tokens.shape and torch.equal(x, tokens) for x in met):
                continue
            met.append(tokens)
            yield f"{name} {how} {','.join(map(str, combination))}"
            break


def search() -> list[str]:
    """Find the calls that make tokens, each overload in a process of its own: some end it."""
    lines = list[str]()
    for name in overloads():
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(20)
            with os.fdopen(writing, "w") as stream:
                stream.write("".join(f"{line}\n" for line in _found(name)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            lines += stream.read().splitlines()
        os.waitpid(child, 0)
    return lines


def calls_of_aten(each: int = 2) -> Iterator[Program]:
    """Yield some of the calls of each operation that `search` found."""
    met = Counter[str]()
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name, how, combination = line.split(" ")
        packet = name.split(".")[0]
        met[packet] += 1
        if met[packet] > each or not hasattr(torch.ops.aten, packet):  # it may be another version of torch
            continue
        operation = Operation(name)
        build = operation.build(tuple(map(int, combination.split(","))))
        yield _program(
            name, _call(operation, build, int(how)), f"{line}, {'by keyword or through a view' if how == '1' else 'plain'}"
        )


def _program(name: str, call: Callable[[Tensor], Any], told: str) -> Program:
    family = "foreach" if name.startswith("_foreach") else "aten"
    return Program(family, told, lambda _, t: called(call, lambda t: (t,), t), attention=1 + ("attention" in name), written=False)


if __name__ == "__main__":  # python -m tests.capturing.within.aten
    FILE.write_text("".join(f"{line}\n" for line in search()), encoding="utf-8")
