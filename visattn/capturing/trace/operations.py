"""Tables of PyTorch operations by name, grouped by their effect on the locations of elements.

Only PyTorch's own functions are looked up: a function `roll` of another library counts as unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def words(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


# moves elements; position codes are moved in the same way
REARRANGE = words("""
    view reshape unsafe_view view_as reshape_as permute transpose swapaxes swapdims movedim moveaxis flatten ravel unflatten
    squeeze unsqueeze expand expand_as broadcast_to repeat repeat_interleave tile roll flip fliplr flipud chunk unsafe_chunk split
    unsafe_split split_with_sizes tensor_split hsplit vsplit dsplit unbind narrow select slice __getitem__
    index index_select gather take_along_dim T mT H mH t adjoint rot90 pixel_shuffle pixel_unshuffle channel_shuffle
    native_channel_shuffle diagonal take masked_select atleast_1d atleast_2d atleast_3d __reversed__ fft_fftshift
    fft_ifftshift fftshift ifftshift
""")
# leaves each element at its location; normalizations count here too
SAME = words("""
    contiguous clone detach alias lift_fresh data to float double half bfloat16 cfloat cdouble chalf type type_as cuda cpu requires_grad
    real imag conj resolve_conj resolve_neg positive retain_grad
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout
    relu relu6 gelu silu mish elu celu selu rrelu leaky_relu prelu sigmoid expit hardsigmoid hardswish hardtanh hardshrink
    tanh softplus softsign logsigmoid threshold tanhshrink softshrink
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs absolute neg negative __neg__ reciprocal
    pow __pow__ float_power clamp clip clamp_min clamp_max sign sgn sin cos tan asin acos atan arcsin arccos arctan
    sinh cosh asinh acosh atanh arcsinh arccosh arctanh sinc erf erfc erfinv logit lgamma digamma i0 deg2rad rad2deg
    round floor ceil trunc fix frac nan_to_num masked_fill heaviside signbit isnan isinf isfinite isposinf isneginf isreal
    angle conj_physical mvlgamma multigammaln frexp tril triu to_dense log_sigmoid gammaln psi digamma polygamma
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx i0e i1 i1e log_ndtr ndtr ndtri entr modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
    logical_not bitwise_not __invert__ bool int long short byte char
    layer_norm native_layer_norm rms_norm batch_norm native_batch_norm cudnn_batch_norm group_norm native_group_norm instance_norm
    local_response_norm normalize softmax log_softmax softmin gumbel_softmax fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine
""")
# elementwise operations of several operands
COMBINE = words("""
    add __add__ __radd__ __iadd__ sub subtract __sub__ __rsub__ __isub__ rsub mul multiply __mul__ __rmul__ __imul__
    div divide true_divide __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ floor_divide __floordiv__ __rfloordiv__
    remainder __mod__ __rmod__ fmod pow __pow__ __rpow__ __ipow__ float_power
    maximum minimum fmax fmin max min where lerp addcmul addcdiv atan2 arctan2 hypot copysign nextafter ldexp xlogy logaddexp
    logaddexp2 eq ne lt le gt ge not_equal less less_equal greater greater_equal __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    xlog1py chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w zeta polygamma gammainc gammaincc
    isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __iand__ __ior__ __ixor__
    clamp clip clamp_min clamp_max heaviside gcd lcm igamma igammac complex bitwise_left_shift bitwise_right_shift
    __lshift__ __rshift__ __ilshift__ __irshift__
""")
REDUCE = words("""
    mean nanmean sum nansum amax amin max min aminmax logsumexp norm vector_norm std var std_mean var_mean median nanmedian prod
    all any count_nonzero
""")
# convolutions and operations that change the grid
RESAMPLE = words("""
    conv1d conv2d conv3d convolution conv_transpose2d avg_pool2d max_pool2d max_pool2d_with_indices lp_pool2d adaptive_avg_pool2d
    adaptive_max_pool2d interpolate upsample avg_pool3d max_pool3d max_pool3d_with_indices
""")
# reorders or selects elements along an axis by their values
REORDER = words("sort msort argsort topk kthvalue mode cummax cummin cumsum cumprod logcumsumexp quantile nanquantile")
JOIN = words("cat concat concatenate stack hstack vstack dstack column_stack row_stack")
PRODUCT = words("matmul __matmul__ __rmatmul__ bmm mm mv inner baddbmm addmm addbmm")
SOFTMAX = words("softmax log_softmax softmin gumbel_softmax")
# selects or writes elements by the content of an index tensor or a boolean mask
CHOOSE = words("""
    __getitem__ index index_select gather take_along_dim take repeat_interleave masked_select __setitem__ index_put index_copy
    index_add index_fill put scatter scatter_add scatter_reduce masked_scatter select_scatter slice_scatter tensor_split
""")
READ = words("__getitem__ index index_select gather take_along_dim take masked_select")  # choose elements of their first operand
# takes the shape or type of its second operand
LIKE = words("type_as to view_as reshape_as expand_as")
# creates constants and random numbers; an operand gives only shape and type
MAKE = words("""
    zeros ones full empty zeros_like ones_like full_like empty_like rand randn randint rand_like randn_like randint_like new_zeros
    new_ones new_full new_empty arange linspace logspace eye tril_indices triu_indices randperm fill zero empty_strided
    new_empty_strided hann_window hamming_window
""")
# creates a tensor from Python numbers
FROM_PYTHON = words("tensor as_tensor asarray new_tensor")
# exposes memory to code whose writes cannot be intercepted
EXPOSE = words(
    "numpy __array__ __dlpack__ data_ptr untyped_storage storage const_data_ptr mutable_data_ptr __cuda_array_interface__"
)
# changes the shape or flags of a tensor in place, not its elements
REFORM = words("unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ t_ detach_ requires_grad_ resolve_conj_")

# queries metadata that the tape stores for every tensor; returns no tensor
ASK = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "requires_grad", "is_leaf")
    }
) | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    torch.is_floating_point,
}

EDITED = "edited_weights"

_TORCH = str(Path(torch.__file__).parent)
_HOMES = (
    Tensor,
    torch,
    F,
    torch._C._nn,
    torch._C,
    torch._VF,
    getattr(torch._C, "_special"),  # noqa: B009 - missing from its stubs
    getattr(torch._C, "_linalg"),  # noqa: B009
    getattr(torch._C, "_fft"),  # noqa: B009
    torch.functional,
)


class Operation(NamedTuple):
    """Properties of a function.

    Attributes:
        name: Name without leading and trailing underscores, except for special methods such as `__add__`.
        own: Whether it is PyTorch's own function; otherwise the name means nothing.
        writes: Whether it writes into its first operand.
        reforms: Whether it changes the shape or flags of its first operand in place.
        exposes: Whether other code may afterward write into its operand without being intercepted.
    """

    name: str
    own: bool
    writes: bool
    reforms: bool
    exposes: bool


_known: dict[Any, Operation] = {}


def operation_of(func: Callable[..., Any]) -> Operation:
    """Return the properties of a function; they are cached."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _looked_up(func)
    return found


def _looked_up(func: Any) -> Operation:  # noqa: ANN401
    full, own, mutable = _named(func)
    name = full if full.startswith("__") else full.strip("_")
    for library in ("special_", "linalg_", "fft_", "foreach_"):
        name = name.removeprefix(library)
    if own and name not in ("copy", "index_copy"):  # returns new memory, but is otherwise the same operation
        name = name.removesuffix("_copy")
    reforms = full in REFORM
    in_place = full.endswith("_") and not full.endswith("__")
    augmented = full.startswith("__i") and full.endswith("__") and full not in ("__int__", "__index__", "__invert__", "__iter__")
    setter = full == "__setitem__" or full.startswith("set ")
    return Operation(
        name,
        own,
        (in_place and not reforms) or augmented or setter or mutable,
        reforms,
        name.strip("_") in _EXPOSE or full in EXPOSE,
    )


_EXPOSE = frozenset(name.strip("_") for name in EXPOSE)


def _named(func: Any) -> tuple[str, bool, bool]:  # noqa: ANN401
    """Return a function's name, whether it is PyTorch's own, and whether its schema marks it as writing to an argument."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        library, _, name = schema.name.partition("::")
        return name, library in ("aten", "prims"), bool(schema.is_mutable)
    if func is edited_weights:
        return EDITED, True, False
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):  # a tensor attribute
        attribute = func.__self__
        home = getattr(Tensor, getattr(attribute, "__name__", ""), None)
        return ("set " if name == "__set__" else "") + str(attribute.__name__), home is attribute, False
    written = getattr(getattr(func, "__code__", None), "co_filename", "")
    return name, written.startswith(_TORCH) or any(getattr(home, name, None) is func for home in _HOMES), False


def edited_weights(weights: Tensor, *operands: Tensor) -> Tensor:
    """Return `weights` unchanged. The call marks them on a tape as the edited weights of these operands (query and key, or weights)."""
    if has_torch_function((weights, *operands)):
        edited: Tensor = handle_torch_function(edited_weights, (weights, *operands), weights, *operands)
        return edited
    return weights
