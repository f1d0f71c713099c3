"""Table of operations: for each operation of PyTorch, the rule that says where the elements of its results come from.

An operation is looked up by its name in `torch.ops.aten`, without the underscore of its in-place form; what it writes to is in its
schema. Elementwise operations are those that PyTorch tags so. An operation that is not in the table loses the places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._ops import OpOverload

from visattn.capturing.placing import creation, moves, pointwise, products, reductions, windows, writes
from visattn.capturing.placing.work import Rule


class Row(NamedTuple):
    """Row of the table.

    Attributes:
        rule: Rule of the operation.
        contents: Arguments whose values choose elements.
        makes: Whether it makes a tensor from numbers, so that tensors among its arguments give only shape and type.
    """

    rule: Rule
    contents: tuple[str, ...] = ()
    makes: bool = False


def _rows(names: str, rule: Rule, *contents: str, makes: bool = False) -> dict[str, Row]:
    return {name: Row(rule, contents, makes) for name in names.split()}


ROWS: dict[str, Row] = {
    # --- views and copies
    **_rows("view _unsafe_view reshape _reshape_alias flatten unflatten", moves.shaped),
    **_rows(
        "permute transpose t squeeze unsqueeze select slice narrow split split_with_sizes unbind chunk unsafe_split "
        "unsafe_split_with_sizes unsafe_chunk tensor_split unfold diagonal movedim swapaxes flip roll rot90 adjoint numpy_T "
        "matrix_H mH mT pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle",
        moves.moved,
    ),
    **_rows(
        "alias detach clone contiguous _to_copy to _conj _neg_view _conj_physical conj resolve_conj resolve_neg "
        "real imag positive tril triu to_dense requires_grad_ _fw_primal _local_scalar_dense _pin_memory",
        moves.same,
    ),
    **_rows("expand broadcast_to", moves.expanded),
    **_rows("repeat", moves.repeated),
    **_rows("as_strided", moves.strided),
    **_rows("index _unsafe_index", moves.indexed, "indices"),
    **_rows("index_select gather take", moves.indexed, "index"),
    **_rows("masked_select", moves.indexed, "mask"),
    **_rows("constant_pad_nd", moves.padded_by),
    **_rows(
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d", moves.mirrored
    ),
    **_rows("view_as_complex", moves.as_complex),
    **_rows("view_as_real", moves.as_real),
    **_rows("cat stack", moves.joined_by),
    # --- the same places: activations, dropout, normalizations
    **_rows(
        "native_dropout dropout alpha_dropout feature_dropout prelu _prelu_kernel rrelu rrelu_with_noise log_sigmoid_forward "
        "log_sigmoid bernoulli fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "fake_quantize_per_tensor_affine_cachemask special_psi special_ndtr special_expit special_erf special_exp2 special_expm1 "
        "hardswish special_log1p special_logit special_round special_sinc special_i0 special_gammaln special_polygamma special_erfc fix",
        moves.same,
    ),
    **_rows(
        "native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "miopen_batch_norm native_group_norm _fused_rms_norm _batch_norm_with_update _batch_norm_no_update _softmax _log_softmax "
        "_safe_softmax softmax log_softmax renorm",
        reductions.normalized,
    ),
    # --- elementwise, beside those that are tagged
    **_rows(
        "floor_divide polar complex logaddexp float_power isclose __and__ __or__ multiply subtract divide not_equal greater "
        "greater_equal less less_equal arctan2 special_xlogy special_gammainc special_gammaincc rsub",
        pointwise.combined,
    ),
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
    **_rows(
        "mean sum amax amin nansum nanmean logsumexp linalg_vector_norm norm std var std_mean var_mean prod all any count_nonzero "
        "median nanmedian aminmax max min",
        reductions.reduced,
    ),
    **_rows(
        "argmax argmin sort msort argsort topk kthvalue mode cummax cummin cumsum cumprod logcumsumexp quantile nanquantile",
        reductions.reordered,
    ),
    # --- products
    **_rows("mm bmm addmm baddbmm", products.multiplied),
    **_rows("mv dot vdot", products.by_vector),
    **_rows("linear mkldnn_linear _grouped_mm", products.linear),
    # --- maps
    **_rows("convolution _convolution mkldnn_convolution cudnn_convolution", windows.convolved),
    **_rows(
        "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d max_pool2d max_pool3d avg_pool1d "
        "max_pool1d",
        windows.pooled,
    ),
    **_rows(
        "_adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d _adaptive_avg_pool3d adaptive_max_pool3d adaptive_avg_pool1d "
        "adaptive_max_pool1d mkldnn_adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d "
        "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d upsample_linear1d "
        "_upsample_nearest_exact1d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d _upsample_lanczos2d_aa",
        windows.adapted,
    ),
    **_rows("im2col", windows.unfolded),
    **_rows("col2im", windows.folded),
    **_rows("grid_sampler_2d grid_sampler", windows.sampled),
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
}
_POINTWISE = Row(pointwise.combined)
_found: dict[OpOverload, tuple[str, Row | None]] = {}


def row_of(op: OpOverload) -> tuple[str, Row | None]:
    """Return the name of an operation, and its row; None if it has none. Only PyTorch's own operations have one."""
    found = _found.get(op)
    if found is None:
        library, _, full = op._schema.name.partition("::")
        name = full.removeprefix("_foreach_")
        if name.endswith("_") and not name.endswith("__"):
            name = name.rstrip("_") if name != "_" else name
        if name.endswith("_copy") and name not in ("_to_copy", "index_copy"):
            name = name.removesuffix("_copy")
        if name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__invert__"):
            name = f"__{name[3:]}"
        row = None
        if library == "aten":
            row = ROWS.get(name)
            if torch.Tag.pointwise in op.tags and name not in ("clone",):
                row = _POINTWISE
            if name in ("max", "min", "pow") and torch.Tag.pointwise not in op.tags:
                row = ROWS.get(name, _POINTWISE)
            if row is None and any(
                torch.Tag.pointwise in getattr(packet, one).tags
                for packet in [getattr(torch.ops.aten, name, None)]
                if packet is not None
                for one in packet.overloads()
            ):
                row = _POINTWISE
        found = _found[op] = name, row
    return found


def contents_of(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments whose values choose elements."""
    row = row_of(op)[1]
    return () if row is None else row.contents
