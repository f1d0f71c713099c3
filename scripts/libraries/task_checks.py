"""Maps by hand: the same scalar of the output, and the same layer, with hooks and gradients of PyTorch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Size = tuple[int, int]
CLIP = "image_features", "text_features", "logit_scale"


def dense_of(output: Any) -> Any:  # noqa: ANN401
    """Return a dense output `(B, classes, h, w)`."""
    for name in ("out", "logits", "predicted_depth"):
        found = output[name] if isinstance(output, dict) and name in output else getattr(output, name, None)
        output = found if isinstance(found, Tensor) else output
    return output[:, None] if output.ndim == 3 else output


def commonest(output: Any) -> int:  # noqa: ANN401
    """Return the class that most pixels have."""
    return int(dense_of(output)[0].argmax(0).flatten().mode().values)


def scalar(model: nn.Module, target: str, output: Any, photo: Size) -> Any:  # noqa: ANN401
    """Return the number that a target names; `photo` is the height and width of the photo."""
    kind, _, which = target.partition(":")
    if kind in ("class", "label", "output"):
        logits = output if isinstance(output, Tensor) else output.logits
        return -logits[0, int(which[1:])] if which.startswith("-") else logits[0, int(which)]
    if kind == "text":
        image, words, scale = output[:3] if isinstance(output, tuple) else [output[name] for name in CLIP]
        return scale * (image[0] * words[0]).sum()
    if kind == "pixel":
        return _at(dense_of(output)[0], [float(part) for part in which.split(",")], photo)
    if kind == "mask":
        return _over_mask(output, int(which))
    if isinstance(output, list):
        return output[0]["scores"][int(which)]
    return _of_query(model, kind, int(which), output)


def cosine(embedding: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of the angle between two embeddings `(1, d)`."""
    one, two = embedding[0], other[0]
    return (one * two).sum() / ((one * one).sum() * (two * two).sum()).sqrt()


def _at(dense: Tensor, point: Sequence[float], photo: Size) -> Tensor:
    x, y = point
    row, column = int(y / photo[0] * dense.shape[1]), int(x / photo[1] * dense.shape[2])
    best = max(range(len(dense)), key=lambda index: float(dense[index, row, column]))
    return dense[best, row, column]


def _over_mask(output: Any, index: int) -> Any:  # noqa: ANN401
    masks = getattr(output, "masks_queries_logits", None)
    if masks is not None:
        values = masks[0, index]
        return values[values > 0].mean()
    dense = dense_of(output)[0]
    if len(dense) > 1:
        return dense[index][dense.argmax(0) == index].mean()
    values = dense[0]
    is_share = float(values.min()) >= 0 and float(values.max()) <= 1
    return values[values > (0.5 if is_share else 0)].mean()


def _of_query(model: Any, kind: str, which: int, output: Any) -> Any:  # noqa: ANN401
    logits, classes = output.logits[0], model.config.num_labels
    chances = logits.softmax(-1) if logits.shape[1] == classes + 1 else logits.sigmoid()
    best = [int(row[:classes].argmax()) for row in chances]
    order = sorted(range(len(best)), key=lambda query: -float(chances[query, best[query]]))
    query = which if kind == "query" else order[which]
    return logits[query, best[query]]


def gradcam(
    model: nn.Module, run: Callable[[], Any], score: Callable[[Any], Tensor], layer: str, grid: Size, first: int | None
) -> Tensor:
    """Return the Grad-CAM of a score at a layer, `(rows, columns)`.

    Args:
        model: The model.
        run: Function that runs it.
        score: Function from its output to one number.
        layer: Name of the module, with `#` and the index of its call if there are several.
        grid: Rows and columns of the map.
        first: Index of the first patch among tokens; None: the patches come last.
    """
    name, _, call = layer.partition(" #")
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
        tensor = output if isinstance(output, Tensor) else output[0]
        outputs.append(tensor)
        if isinstance(output, Tensor):
            return tensor.clone()
        return (tensor.clone(), *output[1:])

    norms = [part for part in model.modules() if isinstance(part, (_BatchNorm, _InstanceNorm))]
    handles = [part.register_forward_hook(_like_its_input) for part in norms]
    handles.append(model.get_submodule(name).register_forward_hook(keep))
    with torch.enable_grad():
        number = score(run())
    for handle in handles:
        handle.remove()
    feature = outputs[int(call) if call else -1]
    (slope,) = torch.autograd.grad(number, [feature])
    values, slopes = (_by_position(tensor[0].double(), grid, first) for tensor in (feature.detach(), slope))
    return (values * slopes.mean(0)).sum(1).clamp_min(0).view(*grid)


def _like_its_input(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """Let the gradient of a norm lie in memory as its input does; else PyTorch computes a wrong one for a single image on the CPU."""
    if output.requires_grad:
        output.register_hook(lambda slope: torch.empty_like(args[0]).copy_(slope))  # type: ignore[no-untyped-call]


def _by_position(tensor: Tensor, grid: Size, first: int | None) -> Tensor:
    """Return the values of an image as `(positions, channels)`."""
    cells = grid[0] * grid[1]
    if tensor.ndim == 2:
        start = len(tensor) - cells if first is None else first
        return tensor[start : start + cells]
    is_channels_first = tuple(tensor.shape[1:]) == grid
    return tensor.flatten(1).T if is_channels_first else tensor.flatten(0, 1)


def attention(model: Any, pixels: Tensor, query: str, grid: Size) -> Any:  # noqa: ANN401
    """Return the mean over heads of the weights of a query in the last layer, `(rows, columns)`."""
    cells = grid[0] * grid[1]
    with torch.no_grad():
        if hasattr(model, "config"):
            eager = copy.deepcopy(model)
            eager.set_attn_implementation("eager")
            output = eager(pixels, output_attentions=True)
            _, _, number = query.partition(":")
            weights = output.cross_attentions[-1][0, :, int(number)] if number else output.attentions[-1][0, :, 0]
        else:
            weights = _of_timm(model, pixels)
    return weights.double().mean(0)[-cells:].view(*grid)


def _of_timm(model: Any, pixels: Tensor) -> Tensor:  # noqa: ANN401
    """Return the weights `(heads, tokens)` of the class token in the last block, from its input."""
    inputs: list[Tensor] = []
    part = model.blocks[-1].attn
    handle = part.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    model(pixels)
    handle.remove()
    tokens, heads = inputs[0][0], part.num_heads
    query, key, _ = (part.qkv(tokens)).chunk(3, -1)
    of_head = [
        (q[0] @ k.T * q.shape[1] ** -0.5).softmax(0) for q, k in zip(query.chunk(heads, 1), key.chunk(heads, 1), strict=True)
    ]
    return torch.stack(of_head)
