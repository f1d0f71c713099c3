"""Calls of every operation that function modes can intercept, applied to tokens, or the reason why there is no call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions, resolve_name

from tests.capturing.moving import GRID, WIDTH

Arguments = Callable[[Tensor], tuple[Any, ...]]
Call = tuple[Callable[..., Any], Arguments]

# not called: they end the process, access files, need other devices, or do not compute numbers
SKIPPED = {
    "of other devices": "cuda xpu mps ipu npu pin_memory is_pinned cudnn miopen fbgemm mkldnn record_stream to_mkldnn share_memory",
    "of the graph": "backward register_hook register_post_accumulate_grad_hook retain_grad grad_fn is_leaf requires_grad_ detach_",
    "of Python": "__reduce_ex__ __setstate__ __deepcopy__ __dir__ __torch_dispatch__ __hash__ apply_ map_ map2_ module_load __iter__",
    "of storage": "set_ resize_ resize_as_ resize resize_as_sparse_ data_ptr storage untyped_storage _typed_storage new stft istft",
    "of quantized, sparse and distributed tensors": "quantize dequantize q_ int_repr sparse fake_quantize choose_qparams embedding",
}
NEAR = [
    lambda t: (t,),
    lambda t: (t, t),
    lambda t: (t, 1),
    lambda t: (t, -1),
    lambda t: (t, 0.5),
    lambda t: (t, 2, 1),
    lambda t: (t, t, t),
    lambda t: (t, (1, 2)),
    lambda t: (t, (WIDTH,)),
    lambda t: (t, 0, 1, 2),
    lambda t: (t, 1, torch.arange(96).flip(0)),
    lambda t: (t, 1, torch.arange(96)[None, :, None].expand_as(t)),
    lambda t: (t, torch.arange(96 * WIDTH).view_as(t)),
    lambda t: (t, t > 0, t),
    lambda t: (t, t > 0, 1.0),
    lambda t: (t > 0, t, t),
    lambda t: (t, torch.eye(WIDTH)),
    lambda t: (t, torch.eye(WIDTH)[None]),
    lambda t: (t, torch.eye(WIDTH), torch.ones(WIDTH)),
    lambda t: (t, WIDTH, None, None),
    lambda t: ([t, t],),
    lambda t: ([t[:, :48], t[:, 48:]], 1),
    lambda t: (t, (2, 3), (1, 2)),
    lambda t: (t, 1, 1, t[:, :1]),
    lambda t: (t.mT, torch.eye(96)[:, :, None]),
    lambda t: (1, t),
    lambda t: (t.sigmoid(),),
    lambda t: (t.sigmoid() + 1,),
    lambda t: (t.sigmoid(), t.sigmoid() + 1),
    lambda t: (t, 2, True),
    lambda t: ([t.sigmoid()],),
]


# created in each call: a tensor from a global would count as coming from code that is not intercepted
def _back() -> Tensor:
    return torch.arange(96).flip(0)


def _eye() -> Tensor:
    return torch.eye(WIDTH)


def _maps(t: Tensor) -> Tensor:
    return t.mT.reshape(len(t), -1, *GRID)


def _turned() -> Tensor:
    """Return a `grid_sample` grid that flips an image upside down."""
    rows, columns = torch.linspace(1, -1, GRID[0]), torch.linspace(-1, 1, GRID[1])
    return torch.stack([columns[None].expand(GRID), rows[:, None].expand(GRID)], -1)[None]


def _whole(t: Tensor) -> Tensor:
    return (t * 100).int()


def _recurrent(t: Tensor, gates: int) -> tuple[Any, ...]:
    state = torch.zeros(1, 1, WIDTH)
    return (
        t,
        (state, state) if gates == 4 else state,
        [torch.eye(WIDTH).repeat(gates, 1), torch.eye(WIDTH).repeat(gates, 1)],
        False,
        1,
        0.0,
        False,
        False,
        True,
    )


def _norms() -> tuple[Tensor, ...]:
    """Return scale, shift, mean and variance of an identity normalization."""
    return torch.ones(WIDTH), torch.zeros(WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)


# operations that need their own arguments; by the last part of the name, or the last two
PARTICULAR: dict[str, Arguments] = {
    "addbmm addbmm_": lambda t: (t[0], t, _eye()[None]),
    "addmm addmm_": lambda t: (t[0], t[0], _eye()),
    "addr addr_": lambda t: (t[0], torch.ones(96), torch.ones(WIDTH)),
    "as_strided_scatter": lambda t: (t, t[:, :48].flip(1), (1, 48, WIDTH), (96 * WIDTH, WIDTH, 1)),
    "baddbmm baddbmm_": lambda t: (t, t, _eye()[None]),
    "torch.batch_norm": lambda t: (_maps(t), *_norms(), False, 0.1, 1e-5, False),
    "functional.batch_norm": lambda t: (_maps(t), torch.zeros(WIDTH), torch.ones(WIDTH)),
    "native_batch_norm": lambda t: (_maps(t), *_norms(), False, 0.1, 1e-5),
    "torch.instance_norm": lambda t: (_maps(t), None, None, None, None, True, 0.1, 1e-5, False),
    "functional.instance_norm": lambda t: (_maps(t),),
    "native_group_norm": lambda t: (_maps(t), None, None, 1, WIDTH, 96, 4, 1e-5),
    "native_layer_norm": lambda t: (t, [WIDTH], None, None, 1e-5),
    "bilinear": lambda t: (t, t, torch.ones(WIDTH, WIDTH, WIDTH)),
    "binary_cross_entropy": lambda t: (t.sigmoid(), t.sigmoid(), None, None, None, "none"),
    "bitwise_and bitwise_and_ bitwise_or bitwise_or_ bitwise_xor bitwise_xor_ gcd gcd_ lcm lcm_": lambda t: (
        _whole(t),
        _whole(t),
    ),
    "bitwise_left_shift bitwise_left_shift_ bitwise_right_shift bitwise_right_shift_": lambda t: (_whole(t), torch.tensor(1)),
    "bitwise_not bitwise_not_ __invert__": lambda t: (_whole(t),),
    "__and__ __or__ __xor__ __iand__ __ior__ __ixor__ __rand__ __ror__ __rxor__": lambda t: (_whole(t), 7),
    "__lshift__ __rshift__ __ilshift__ __irshift__": lambda t: (_whole(t), torch.tensor(1)),
    "broadcast_to expand expand_copy": lambda t: (t, (1, 96, WIDTH)),
    "bucketize": lambda t: (t, torch.linspace(-1, 1, 9)),
    "chain_matmul": lambda t: (t[0], _eye()),
    "multi_dot": lambda t: ([t[0], _eye()],),
    "conv2d": lambda t: (_maps(t), torch.ones(WIDTH, WIDTH, 3, 3), None, 1, 1),
    "conv_transpose1d": lambda t: (t.mT, _eye()[:, :, None]),
    "conv_transpose2d": lambda t: (_maps(t), _eye()[:, :, None, None]),
    "torch.convolution": lambda t: (_maps(t), _eye()[:, :, None, None], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "corrcoef cov": lambda t: (t[0],),
    "cross": lambda t: (t[..., :3], t[..., :3].flip(-1)),
    "diagonal_scatter": lambda t: (t, t[:, :WIDTH, 0], 0, 1, 2),
    "dropout alpha_dropout feature_dropout feature_alpha_dropout": lambda t: (t, 0.5, False),
    "native_dropout": lambda t: (t, 0.0, False),
    "einsum": lambda t: ("bnd->bnd", t),
    "fill_diagonal_": lambda t: (t[0], 0.0),
    "float_power_": lambda t: (t.double(), 2.0),
    "functional.fold": lambda t: (t.mT, GRID, 1),
    "functional.unfold": lambda t: (_maps(t), 1),
    "foreach.addcdiv foreach.addcdiv_ foreach.addcmul foreach.addcmul_ foreach.lerp foreach.lerp_": lambda t: ([t], [t], [t]),
    "gradient": lambda t: (t[0],),
    "functional.grid_sample": lambda t: (_maps(t), _turned()),
    "grid_sampler grid_sampler_2d": lambda t: (_maps(t), _turned(), 0, 0, True),
    "matrix_power": lambda t: (t[:, :WIDTH], 2),
    "matrix_exp inverse inv inv_ex": lambda t: (t[:, :WIDTH] + 9 * _eye(),),
    "mm spmm": lambda t: (t[0], _eye()),
    "solve_ex": lambda t: (torch.eye(96).flip(0), t[0]),
    "max_pool3d": lambda t: (t[None], 1),
    "huber_loss": lambda t: (t, t.flip(1), "none"),
    "l1_loss mse_loss smooth_l1_loss": lambda t: (t, t.flip(1), None, None, "none"),
    "binary_cross_entropy_with_logits": lambda t: (t, t.sigmoid(), None, None, None, "none"),
    "rot90": lambda t: (t, 2, (1, 2)),
    "Tensor.unfold unfold_copy": lambda t: (t, 2, WIDTH, 1),
    "tensordot": lambda t: (t, _eye(), 1),
    "select select_copy": lambda t: (t, 0, 0),
    "as_strided as_strided_ as_strided_copy": lambda t: (t, (1, 96, WIDTH), (96 * WIDTH, WIDTH, 1)),
    "stack row_stack vstack": lambda t: ([t[0]],),
    "quantile nanquantile": lambda t: (t, 0.5, 2, True),
    "kthvalue": lambda t: (t, 2, 2, True),
    "conv1d": lambda t: (t.mT, _eye()[:, :, None]),
    "functional.adaptive_avg_pool2d": lambda t: (_maps(t), GRID),
    "foreach.copy_": lambda t: ([t[0]], [t[0].flip(0)]),
    "gaussian_nll_loss": lambda t: (t, t, t.abs() + 1, False, 1e-6, "none"),
    "lstm": lambda t: _recurrent(t, 4),
    "gru": lambda t: _recurrent(t, 3),
    "rnn_relu rnn_tanh": lambda t: _recurrent(t, 1),
    "index_add index_add_ index_copy index_copy_": lambda t: (t, 1, _back(), t.clone()),
    "index_fill index_fill_": lambda t: (t, 1, _back()[:48], 0.0),
    "index_put index_put_": lambda t: (t, (torch.zeros(96, dtype=torch.long), _back()), t[0].clone()),
    "index_reduce index_reduce_": lambda t: (t, 1, _back(), t.clone(), "amax"),
    "masked_select": lambda t: (t, torch.ones_like(t, dtype=torch.bool)),
    "narrow narrow_copy": lambda t: (t, 1, 0, 48),
    "outer ger": lambda t: (t[0, :, 0], torch.ones(WIDTH)),
    "permute permute_copy": lambda t: (t, (0, 1, 2)),
    "poisson": lambda t: (t.exp(),),
    "prelu": lambda t: (t, torch.full((1,), 0.5)),
    "put put_": lambda t: (t, torch.arange(96 * WIDTH).flip(0), t.flatten().clone()),
    "renorm renorm_": lambda t: (t, 2, 2, 1.0),
    "reshape view_copy": lambda t: (t, (1, 96, WIDTH)),
    "scatter scatter_ scatter_add scatter_add_": lambda t: (t, 1, _back()[None, :, None].expand(1, 96, WIDTH), t.clone()),
    "scatter_reduce scatter_reduce_": lambda t: (t, 1, _back()[None, :, None].expand(1, 96, WIDTH), t.clone(), "sum"),
    "select_scatter": lambda t: (t, t[:, 3], 1, 0),
    "solve": lambda t: (torch.eye(96).flip(0), t[0]),
    "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes": lambda t: (t, (48, 48), 1),
    "t t_ t_copy": lambda t: (t[0].mT,),
    "unflatten": lambda t: (t[0], 0, (1, 96)),
    "view_as_complex view_as_complex_copy": lambda t: (t.reshape(1, 96, -1, 2),),
    "imag": lambda t: (torch.complex(t, t.flip(1)),),
    "torch.where": lambda t: (t > 0, t, t),
    "std var": lambda t: (t, 2, True, True),
    "sum mean nanmean nansum amax amin logsumexp prod": lambda t: (t, 2, True),
}


def _particular(name: str) -> Arguments | None:
    name = name.removesuffix(".__get__")
    for words, call in PARTICULAR.items():
        if any(f".{name}".endswith(f".{word}") for word in words.split()):
            return call
    return None


def functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the name of each function, the function, and the reason why it is not called (empty if it is)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for overridable in get_overridable_functions().values():
            for func in overridable:
                name = resolve_name(func) or repr(func)
                last = name.rsplit(".", 1)[-1]
                reason = next((why for why, words in SKIPPED.items() if any(word in name for word in words.split())), "")
                if last.startswith("_") and not last.startswith("__") and last != "__get__":
                    reason = "private"
                yield name, func, reason


def made(func: Callable[..., Any], arguments: Arguments, t: Tensor) -> Tensor | None:
    """Call a function on tokens and return its result as tokens; None if the result cannot be tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        out = func(*arguments(t.clone()))
    if isinstance(out, (tuple, list)):
        out = next((x for x in out if isinstance(x, Tensor)), None)
    if not isinstance(out, Tensor) or out.layout != torch.strided or out.is_meta:
        return None
    out = (out.real if out.is_complex() else out).float()
    if out.ndim == 4 and out.shape[0] == 1 and out.shape[2:] == GRID:
        return out.flatten(2).mT
    if out.ndim != 3:
        out = out.squeeze()
    if out.ndim == 2 and len(out) == 96:
        return out[None]
    if out.ndim == 1 and len(out) == 96 * WIDTH:
        return out.view(1, 96, WIDTH)
    return out if out.ndim == 3 and len(out) == 1 and out.shape[1] > 1 and out.shape[2] > 0 else None


class Listed(NamedTuple):
    """Functions with a call that returns tokens, and the reasons why others have none."""

    calls: dict[str, Call]
    without: dict[str, str]


@cache
def listed() -> Listed:
    """Find the first call of each function that returns tokens."""
    found, without = dict[str, Call](), dict[str, str]()
    t = torch.randn(1, 96, WIDTH, generator=torch.Generator().manual_seed(5))
    for name, func, reason in functions():
        if reason or name in found:
            without[name] = reason or "called under this name already"
            continue
        without[name] = "raises on each generic call"
        particular = _particular(name)
        for arguments in NEAR if particular is None else [particular]:
            try:
                tokens = made(func, arguments, t)
            except Exception:
                continue
            if tokens is not None and bool(tokens.isfinite().all()):
                found[name] = func, arguments
                break
            without[name] = "makes no tokens of tokens" if tokens is None else "makes NaN or infinite numbers"
    return Listed(found, {name: reason for name, reason in without.items() if name not in found})
