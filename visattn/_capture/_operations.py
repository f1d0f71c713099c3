"""What each operation of torch does to the places of its operands, by name."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# moves numbers: done to the codes as to the numbers
REARRANGE = _words("""
    view reshape view_as reshape_as permute transpose swapaxes swapdims movedim moveaxis flatten unflatten squeeze unsqueeze
    expand expand_as broadcast_to repeat repeat_interleave tile roll flip chunk split split_with_sizes tensor_split unbind narrow
    select __getitem__ index_select gather T mT t rot90 pixel_shuffle pixel_unshuffle channel_shuffle
""")
# leaves each number where it is; a normalization along channels or tokens too
SAME = _words("""
    contiguous clone detach to float half bfloat16 double type type_as cuda cpu requires_grad
    dropout dropout1d dropout2d alpha_dropout feature_dropout
    relu relu6 gelu silu mish elu celu selu leaky_relu prelu sigmoid hardsigmoid hardswish hardtanh tanh softplus softsign
    logsigmoid threshold tanhshrink softshrink hardshrink
    exp exp2 log log1p sqrt rsqrt square abs neg __neg__ reciprocal pow __pow__ clamp clip clamp_min clamp_max sign sin cos erf
    round floor nan_to_num masked_fill
    layer_norm native_layer_norm rms_norm batch_norm group_norm instance_norm normalize softmax log_softmax
""")
# number by number of several operands
COMBINE = _words("""
    add __add__ __radd__ __iadd__ sub __sub__ __rsub__ __isub__ rsub mul __mul__ __rmul__ __imul__ multiply
    div __truediv__ __rtruediv__ __itruediv__ true_divide maximum minimum where lerp addcmul addcdiv
""")
REDUCE = _words("mean sum amax amin max min logsumexp norm std var")
# convolutions, and what makes another grid
RESAMPLE = _words("""
    conv1d conv2d conv3d conv_transpose2d avg_pool2d max_pool2d max_pool2d_with_indices lp_pool2d adaptive_avg_pool2d
    adaptive_max_pool2d interpolate upsample
""")
JOIN = _words("cat concat concatenate stack")
PRODUCT = _words("matmul __matmul__ bmm")
# what data turns into a number of Python, which may then choose tokens
DECIDE = _words("item tolist __bool__ __int__ __float__ __index__")
# numbers written over others
WRITE = _words("__setitem__ copy index_copy index_put index_fill scatter masked_scatter fill zero")
