"""Functions of PyTorch that a model calls: which hand memory or numbers to other code, choose by content, or may be attention.

What a call does to places is told by the operations that it consists of, not by its name; see `visattn.capturing.placing`. Only
PyTorch's own functions are looked up: a function `softmax` of another library counts as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def words(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


JOIN = words("cat concat concatenate stack hstack vstack dstack column_stack row_stack")
PRODUCT = words("matmul __matmul__ __rmatmul__ bmm mm mv inner baddbmm addmm addbmm")
SOFTMAX = words("softmax log_softmax softmin gumbel_softmax")
MULTIPLY = words("mul multiply __mul__ __rmul__ __imul__")
SQUASH = words("sigmoid hardsigmoid expit tanh relu6 hardtanh clamp clip")  # bound all elements, as those of a gate
# selects or writes elements by the content of an index tensor or a boolean mask
CHOOSE = words("""
    __getitem__ index index_select gather take_along_dim take repeat_interleave masked_select __setitem__ index_put index_copy
    index_add index_fill put scatter scatter_add scatter_reduce masked_scatter select_scatter slice_scatter tensor_split
""")
READ = words("__getitem__ index index_select gather take_along_dim take masked_select")  # choose elements of their first operand
# exposes memory to code whose writes cannot be intercepted
EXPOSE = words(
    "numpy __array__ __dlpack__ data_ptr untyped_storage storage const_data_ptr mutable_data_ptr __cuda_array_interface__"
)
TELL = words("item tolist __float__ __int__ __index__ __complex__")  # hands numbers to other code
# changes the shape or flags of a tensor in place, not its elements
REFORM = words("unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ t_ detach_ requires_grad_ resolve_conj_")

# queries metadata that the tape stores for every tensor; returns no tensor
LENGTHS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "nbytes")),
        *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, torch.numel),
    }
)  # hand lengths to Python
ASK = frozenset(
    {getattr(Tensor, name).__get__ for name in ("ndim", "dtype", "device", "layout", "is_cuda", "requires_grad", "is_leaf")}
) | {
    Tensor.dim,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    torch.is_floating_point,
    *LENGTHS,
}

EDITED = "edited_weights"

_TORCH = str(Path(torch.__file__).parent) + os.sep
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
        tells: Whether it hands numbers of its operand to other code.
        inplace: Position of the argument `inplace`, as of `F.hardtanh`; -1 if it has none.
    """

    name: str
    own: bool
    writes: bool
    reforms: bool
    exposes: bool
    tells: bool
    inplace: int


_operations: dict[Any, Operation] = {}  # by function


def operation_of(func: Callable[..., Any]) -> Operation:
    """Return the properties of a function of PyTorch: its name, whether it writes into its argument, and so on; they are cached."""
    operation = _operations.get(func)
    if operation is None:
        operation = _operations[func] = _properties(func)
    return operation


def _properties(func: Any) -> Operation:  # noqa: ANN401
    """Return the properties of a function, most of which its name tells: `add_` and `__iadd__` write into their argument.

    The name loses underscores and the name of its library, so that `add_` is `add`, and `linalg_vecdot` is `vecdot`.
    """
    full_name, own, mutable = _name_of(func)
    is_special = full_name.startswith("__")
    name = full_name if is_special else full_name.strip("_")
    for library in ("special_", "linalg_", "fft_", "foreach_"):
        name = name.removeprefix(library)
    if own and name not in (
        "copy",
        "index_copy",
    ):  # `view_copy` returns new memory, but is otherwise the same operation as `view`
        name = name.removesuffix("_copy")
    reforms = full_name in REFORM
    exposes = name.strip("_") in _EXPOSE
    is_in_place = full_name.endswith("_") and not full_name.endswith("__") and not reforms
    is_like_augmented = full_name.startswith("__i") and full_name.endswith("__")  # `__iadd__` is `+=`
    is_augmented = is_like_augmented and full_name not in ("__int__", "__index__", "__invert__", "__iter__")
    is_setter = full_name == "__setitem__" or full_name.startswith("set ")
    return Operation(
        name,
        own,
        writes=is_in_place or is_augmented or is_setter or mutable,
        reforms=reforms,
        exposes=exposes,
        tells=exposes or full_name in TELL,
        inplace=_position_of_inplace(func) if own else -1,
    )


def _position_of_inplace(func: Any) -> int:  # noqa: ANN401
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else -1


def overwrites(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call says that it writes into its first operand, or into tensors given as `out`."""
    operation = operation_of(func)
    if operation.writes or "out" in kwargs or kwargs.get("inplace") is True:
        return True
    return 0 <= operation.inplace < len(args) and args[operation.inplace] is True


_EXPOSE = frozenset(name.strip("_") for name in EXPOSE)


def _name_of(func: Any) -> tuple[str, bool, bool]:  # noqa: ANN401
    """Return a function's name, whether it is PyTorch's own, and whether its schema marks it as writing to an argument.

    For attributes of tensors, as `tensor.T`, the function is a method of a descriptor; the name is that of the attribute.
    """
    schema = getattr(func, "_schema", None)
    if schema is not None:
        library, _, name = schema.name.partition("::")
        return name, library in ("aten", "prims"), bool(schema.is_mutable)
    if func is edited_weights:
        return EDITED, True, False
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):  # a tensor attribute
        attribute = func.__self__
        attribute_of_tensor = getattr(Tensor, getattr(attribute, "__name__", ""), None)
        prefix = "set " if name == "__set__" else ""
        return prefix + str(attribute.__name__), attribute_of_tensor is attribute, False
    file = getattr(getattr(func, "__code__", None), "co_filename", "")
    is_own = file.startswith(_TORCH) or any(getattr(home, name, None) is func for home in _HOMES)
    return name, is_own, False


def edited_weights(weights: Tensor, *operands: Tensor) -> Tensor:
    """Return `weights` unchanged; the call tells a capture that they replace attention weights, computed from these operands.

    The operands are query and key, or the original weights. Function modes receive the call, as they do for functions of PyTorch.
    """
    if has_torch_function((weights, *operands)):
        edited: Tensor = handle_torch_function(edited_weights, (weights, *operands), weights, *operands)
        return edited
    return weights
