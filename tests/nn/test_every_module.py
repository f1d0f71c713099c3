"""Requirements on every module: dtypes, memory formats, compilers, copies and minimal inputs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from tests.nn.cases import GATES, PLACES, TOKENS, Case, with_nonzero_parameters
from tests.samples import sampled
from visattn import nn as ours
from visattn.errors import ShapeError, VisattnError

EVERY = {**GATES, **PLACES, **TOKENS}
MAPS = {**GATES, **PLACES}
ATTACHED = sorted(ours.ATTENTION)


def built(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a module in evaluation mode with fixed nonzero parameters, and its input."""
    make, given = case
    return with_nonzero_parameters(make), given()


def outputs(result: object) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]


def close(one: object, other: object, tolerance: float = 1e-5) -> bool:
    pairs = list(zip(outputs(one), outputs(other), strict=True))
    return bool(pairs) and all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in pairs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", list(EVERY))
def test_every_parameter_and_input_gets_a_finite_gradient(name: str) -> None:
    module, given = built(EVERY[name])
    given = tuple(x.requires_grad_() for x in given)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(0)
    sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs(module(*given))).backward()  # type: ignore[union-attr]
    for what, tensor in (*module.named_parameters(), *((f"input {i}", x) for i, x in enumerate(given))):
        if tensor.grad is None:
            assert (name, what) in UNUSED, what
        else:
            assert torch.isfinite(tensor.grad).all(), what


UNUSED = {("location score", "input 1")}  # it does not use the keys


@pytest.mark.parametrize("name", list(EVERY))
def test_autocast_to_bfloat16_stays_near_float32(name: str) -> None:
    module, given = built(EVERY[name])
    with torch.no_grad():
        torch.manual_seed(0)
        exact = outputs(module(*given))
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            rough = outputs(module(*given))
    for one, other in zip(exact, rough, strict=True):
        assert torch.isfinite(other).all()
        assert float((one - other.float()).norm()) <= 0.03 * float(one.norm())


@pytest.mark.parametrize("name", list(MAPS))
def test_channels_last_gives_the_same_output_and_is_kept(name: str) -> None:
    module, given = built(MAPS[name])
    last = tuple(x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in given)
    with torch.no_grad():
        expected, found = module(*given), module(*last)
    assert close(expected, found)
    if name != "DRAW read":  # its glimpses go to linear layers
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x in outputs(found) if x.ndim == 4)


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(EVERY, 3))
def test_compiled_in_one_graph_gives_the_same_output(name: str) -> None:
    module, given = built(EVERY[name])
    with torch.no_grad():
        assert close(torch.compile(module, backend="eager", fullgraph=True)(*given), module(*given))


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(EVERY, 3))
def test_exported_module_gives_the_same_output(name: str) -> None:
    module, given = built(EVERY[name])
    with torch.no_grad():
        assert close(torch.export.export(module, given).module()(*given), module(*given))


@pytest.mark.parametrize("name", ATTACHED)
def test_module_traced_by_fx_gives_the_same_output(name: str) -> None:
    module, given = built((lambda: nn.Sequential(ours.ATTENTION[name](8)), GATES["SE"][1]))
    with torch.no_grad():
        assert close(fx.symbolic_trace(module)(*given), module(*given))


@pytest.mark.parametrize("name", list(EVERY))
def test_copies_give_the_same_output(name: str) -> None:
    module, given = built(EVERY[name])
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    with torch.no_grad():
        assert close(copy.deepcopy(module)(*given), module(*given))
        assert close(loaded(*given), module(*given))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 5, 7), (1, 8, 1, 1), (2, 3, 1, 9), (1, 64, 3, 2)])
@pytest.mark.parametrize("name", ATTACHED)
def test_smallest_feature_maps_give_finite_outputs(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = ours.ATTENTION[name](shape[1]).eval(), torch.randn(shape)
    with torch.no_grad():
        out = module(x)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ATTACHED)
def test_a_single_value_in_training_works_or_is_refused_in_one_line(name: str) -> None:
    module, single = ours.ATTENTION[name](8).train(), torch.randn(1, 8, 1, 1)
    normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    if normed and name != "coord":  # its norm gets a row and a column
        with pytest.raises(ShapeError, match="cannot train on one value per channel"):
            module(single)
    else:
        assert torch.isfinite(module(single)).all()


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "other channels": (lambda: torch.randn(2, 6, 5, 7), r"must be given \(B, 8, H, W\), got \(2, 6, 5, 7\)\. Build it for"),
    "channels last": (
        lambda: torch.randn(2, 5, 7, 8),
        r"got \(2, 5, 7, 8\)\. Channels come last here: pass x\.permute\(0, 3, 1, 2\)",
    ),
    "no batch": (lambda: torch.randn(8, 5, 7), r"got \(8, 5, 7\)\. Pass a batch of feature maps, channels first"),
}


@pytest.mark.parametrize("wrong", list(REFUSED))
@pytest.mark.parametrize("name", [name for name in ATTACHED if name not in ("simam", "triplet", "ge")])
def test_wrong_shape_is_refused(name: str, wrong: str) -> None:
    make, message = REFUSED[wrong]
    with pytest.raises(ShapeError, match=message):
        ours.ATTENTION[name](8)(make())


@pytest.mark.parametrize("channels", [0, -3])
@pytest.mark.parametrize("name", ATTACHED)
def test_width_below_one_is_refused(name: str, channels: int) -> None:
    with pytest.raises(VisattnError, match=r"must be .*at least 1|at least 1"):
        ours.ATTENTION[name](channels)


def test_every_public_module_is_among_the_cases() -> None:
    met = {type(part) for case in EVERY.values() for part in built(case)[0].modules()}
    public = {value for name in ours.__all__ if isinstance(value := getattr(ours, name), type) and issubclass(value, nn.Module)}
    assert public - met == {ours.WithAttention}  # it wraps other modules
