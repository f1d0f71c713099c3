"""Table of operations: for each operation of PyTorch, the rule that says where the elements of its results come from.

An operation is looked up by its name in `torch.ops.aten`, without the underscore of its in-place form; what it writes to is in its
schema. Elementwise operations are those that PyTorch tags so. An operation that is not in the table loses the places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._ops import OpOverload

from visattn.core.capturing.placing import (
    constants as creation,
    mixing,
    moves,
    pointwise,
    products,
    reductions,
    samples,
    windows,
    writes,
)
from visattn.core.capturing.placing.mixing import Effect, Linear, Mixes, but, in_one, in_one_and_term, in_self, together
from visattn.core.capturing.placing.work import Rule
from visattn.core.capturing.tokens.points import POINTS


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        rule: Rule of the operation.
        contents: Arguments whose values choose elements.
        makes: Whether it makes a tensor from numbers, so that tensors among its arguments give only shape and type.
        mixes: Function that returns the axes it mixes; None if it may mix tokens.
        linear: Function that returns whether it is linear in some arguments; None if it is in none.
        effect: What else it does to each token.
    """

    rule: Rule
    contents: tuple[str, ...] = ()
    makes: bool = False
    mixes: Mixes | None = None
    linear: Linear | None = None
    effect: Effect = ""


def _rows(
    names: str,
    rule: Rule,
    *contents: str,
    makes: bool = False,
    mixes: Mixes | None = None,
    linear: Linear | None = None,
    effect: Effect = "",
) -> dict[str, Row]:
    """Return one row of the table for several operations, whose names are separated by spaces."""
    return dict.fromkeys(names.split(), Row(rule, contents, makes, mixes, linear, effect))


ROWS: dict[str, Row] = {
    # --- views and copies
    **_rows("view _unsafe_view reshape _reshape_alias flatten unflatten", moves.shaped, linear=together),
    **_rows(
        "permute transpose t squeeze unsqueeze select slice narrow split split_with_sizes unbind chunk unsafe_split "
        "unsafe_split_with_sizes unsafe_chunk tensor_split unfold diagonal movedim swapaxes flip roll rot90 adjoint numpy_T "
        "matrix_H mH mT pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle",
        moves.moved,
        linear=together,
    ),
    **_rows("alias clone contiguous _to_copy to", moves.same, linear=together),
    **_rows("detach tril triu", moves.same, linear=together, effect="uneven"),
    **_rows(
        "_conj _neg_view _conj_physical conj resolve_conj resolve_neg real imag to_dense requires_grad_ _fw_primal "
        "_local_scalar_dense _pin_memory",
        moves.same,
    ),
    **_rows("expand broadcast_to", moves.expanded, linear=together),
    **_rows("repeat", moves.repeated, linear=together),
    **_rows("as_strided", moves.strided, linear=together),
    **_rows("index _unsafe_index", moves.indexed, "indices", linear=in_self),
    **_rows("index_select gather take", moves.indexed, "index", linear=in_self),
    **_rows("masked_select", moves.indexed, "mask", linear=in_self),
    **_rows("constant_pad_nd", moves.padded_by, linear=together),
    **_rows(
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d", moves.mirrored
    ),
    **_rows("view_as_complex", moves.as_complex),
    **_rows("view_as_real", moves.as_real),
    **_rows("cat stack", moves.joined_by, linear=together),
    # --- the same places: activations, dropout, normalizations
    **_rows(
        "native_dropout dropout alpha_dropout feature_dropout rrelu rrelu_with_noise log_sigmoid_forward "
        "log_sigmoid fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "fake_quantize_per_tensor_affine_cachemask special_psi special_ndtr special_expit special_erf special_exp2 special_expm1 "
        "hardswish special_log1p special_logit special_round special_sinc special_i0 special_gammaln special_polygamma special_erfc fix",
        moves.same,
    ),
    **_rows(
        "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm _batch_norm_no_update",
        reductions.normalized,
        mixes=mixing.in_batch,
    ),
    **_rows("_native_batch_norm_legit _batch_norm_with_update native_group_norm renorm", reductions.normalized),
    **_rows("native_layer_norm _fused_rms_norm", reductions.normalized, mixes=mixing.in_layer),
    **_rows("_softmax _log_softmax _safe_softmax softmax log_softmax", reductions.normalized, mixes=mixing.along),
    # --- elementwise, beside those that are tagged
    **_rows(
        "prelu _prelu_kernel "
        "floor_divide polar complex logaddexp float_power isclose __and__ __or__ multiply subtract divide not_equal greater "
        "greater_equal less less_equal arctan2 special_xlogy special_gammainc special_gammaincc",
        pointwise.combined,
    ),
    **_rows("add sub rsub subtract", pointwise.combined, linear=together, effect="adds"),
    **_rows("neg positive", pointwise.combined, linear=together),
    **_rows("mul", pointwise.combined, linear=in_one),
    **_rows("div masked_fill", pointwise.combined, linear=in_self),
    **_rows("lerp", pointwise.combined, linear=but("weight")),
    **_rows("where", pointwise.combined, linear=but("condition"), effect="uneven"),
    **_rows("nan_to_num", pointwise.combined, effect="uneven"),
    **_rows("pow square exp exp2 expm1 log log2 log1p abs", pointwise.combined, effect="power"),
    # --- writes
    **_rows("copy", writes.copied),
    **_rows("fill", writes.filled),
    **_rows("zero", creation.nothing, makes=True),
    **_rows("index_put _index_put_impl _unsafe_index_put", writes.written, "indices"),
    **_rows("index_copy index_fill scatter put", writes.written, "index"),
    **_rows("masked_scatter", writes.written, "mask"),
    **_rows("select_scatter slice_scatter diagonal_scatter", writes.written),
    **_rows("index_add scatter_add scatter_reduce index_reduce", writes.added, "index"),
    # --- merges and orders
    **_rows("mean sum", reductions.reduced, mixes=mixing.over, linear=together, effect="statistic"),
    **_rows("amax linalg_vector_norm norm var_mean var std", reductions.reduced, mixes=mixing.over, effect="statistic"),
    **_rows(
        "amin nansum nanmean logsumexp std_mean prod all any count_nonzero median nanmedian aminmax max min", reductions.reduced
    ),
    **_rows("cumsum", reductions.reordered, linear=together),
    **_rows(
        "argmax argmin sort msort argsort topk kthvalue mode cummax cummin cumprod logcumsumexp quantile nanquantile",
        reductions.reordered,
    ),
    # --- products
    **_rows("mm bmm", products.multiplied, mixes=mixing.by_product, linear=in_one),
    **_rows("addmm baddbmm", products.multiplied, mixes=mixing.by_product, linear=in_one_and_term),
    **_rows("mv dot", products.by_vector, linear=in_one),
    **_rows("vdot", products.by_vector),
    **_rows("linear", products.linear, mixes=mixing.by_product, linear=in_one),
    **_rows("mkldnn_linear _grouped_mm", products.linear, mixes=mixing.by_product),
    # --- maps
    **_rows("convolution", windows.convolved, mixes=mixing.by_kernel, linear=in_one),
    **_rows("_convolution mkldnn_convolution cudnn_convolution", windows.convolved, mixes=mixing.by_kernel),
    **_rows("avg_pool1d avg_pool2d avg_pool3d", windows.pooled, linear=together),
    **_rows("max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d max_pool1d max_pool2d max_pool3d", windows.pooled),
    **_rows(
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
        "upsample_linear1d",
        windows.adapted,
        linear=together,
    ),
    **_rows(
        "adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d mkldnn_adaptive_avg_pool2d "
        "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d _upsample_nearest_exact1d "
        "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d _upsample_lanczos2d_aa",
        windows.adapted,
    ),
    **_rows("im2col", windows.unfolded),
    **_rows("col2im", windows.folded),
    **_rows("grid_sampler_2d grid_sampler", samples.sampled, POINTS),
    # --- constants
    **_rows("zeros zeros_like new_zeros", creation.nothing, makes=True),
    **_rows(
        "lift_fresh lift ones ones_like new_ones full full_like new_full arange linspace logspace eye scalar_tensor "
        "tril_indices triu_indices randperm rand rand_like randn randn_like randint randint_like normal uniform "
        "random hann_window hamming_window "
        "exponential cauchy log_normal geometric",
        creation.constant,
        makes=True,
    ),
    **_rows("empty empty_like new_empty empty_strided new_empty_strided empty_permuted", creation.uninitialized, makes=True),
    **_rows("embedding", creation.embedded, "indices"),
    **_rows("bernoulli", moves.same, effect="uneven"),
}
SOFTMAXES = frozenset(name for name, row in ROWS.items() if row.mixes is mixing.along)
_POINTWISE = Row(pointwise.combined)
_found: dict[OpOverload, tuple[str, Row | None]] = {}


def row_of(op: OpOverload) -> tuple[str, Row | None]:
    """Return the name of an operation, such as `add` for `add_`, and its row in the table; None if it has none.

    Only PyTorch's own operations have one.
    """
    known = _found.get(op)
    if known is not None:
        return known
    library, _, full_name = op._schema.name.partition("::")
    name = _plain_name(full_name)
    row = _row_of_torch(op, name) if library == "aten" else None
    _found[op] = name, row
    return name, row


def _plain_name(name: str) -> str:
    """Return the name of the operation that computes the same: without an ending for in-place or copying forms, as of `add_`."""
    name = name.removeprefix("_foreach_")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place:
        name = name.rstrip("_") if name != "_" else name
    is_copying_view = name.endswith("_copy") and name not in ("_to_copy", "index_copy")
    if is_copying_view:
        name = name.removesuffix("_copy")
    is_in_place_operator = name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__invert__")
    return f"__{name[3:]}" if is_in_place_operator else name


def _row_of_torch(op: OpOverload, name: str) -> Row | None:
    """Return the row of one of PyTorch's own operations; those that PyTorch tags as elementwise need none of their own."""
    row = ROWS.get(name)
    is_elementwise = torch.Tag.pointwise in op.tags
    if is_elementwise and name != "clone":
        row = row if row is not None and row.rule is pointwise.combined else _POINTWISE
    if name == "bernoulli" and op._schema.overload_name in ("float", "p"):  # random numbers, not those of probabilities
        row = ROWS["uniform"]
    if name in ("max", "min", "pow") and not is_elementwise:
        row = ROWS.get(name, _POINTWISE)
    packet = getattr(torch.ops.aten, name, None) if row is None else None
    if packet is None:
        return row
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return _POINTWISE if any(torch.Tag.pointwise in overload.tags for overload in overloads) else None


def contents_of(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments whose values choose elements."""
    _, row = row_of(op)
    return () if row is None else row.contents
