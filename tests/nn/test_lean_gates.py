"""Gates whose backward pass keeps the map alone: results, gradients and gradients of gradients are those of single operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from visattn._support.publish import listening
from visattn.nn import CBAM, SCSE, lean
from visattn.nn.spatial import cbam, scse

FUNCTIONS: dict[str, Any] = {
    "pooled places": (lean.PooledPlaces, [(3, 4, 5, 6)]),
    "pooled channels": (lean.PooledChannels, [(3, 4, 5, 6), (3, 4, 1, 1)]),
    "gated": (lean.Gated, [(3, 4, 5, 6), (3, 4, 1, 1), (3, 1, 5, 6)]),
    "larger gated": (lean.LargerGated, [(3, 4, 5, 6), (3, 4, 1, 1), (3, 1, 5, 6)]),
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = tuple(drawn(*shape, seed=number) for number, shape in enumerate(shapes))
    # what follows an output may change its gradient in place, as a later part of the module does with the map's
    assert gradcheck(lambda *given: tuple(out * 1 for out in _tuple(function.apply(*given))), inputs)
    assert gradgradcheck(lambda *given: tuple(out * 1 for out in _tuple(function.apply(*given))), inputs)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def plainly(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        for file in (cbam, scse):
            patch.setattr(file, "is_lean", lambda _: False)
        return run()


def has_ties(x: Tensor) -> Tensor:
    return x.detach().mul(2).round().relu().requires_grad_()


@pytest.mark.parametrize("of_images", [1, 3, 40])
@pytest.mark.parametrize("change", [lambda x: x, has_ties], ids=["", "with ties"])
@pytest.mark.parametrize(
    "build", [partial(CBAM, variant="official"), partial(CBAM, variant="paper"), SCSE], ids=["CBAM", "CBAM of the paper", "scSE"]
)
def test_modules_train_as_with_single_operations(
    build: Any, change: Callable[[Tensor], Tensor], of_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = build(16, 4).double(), change(drawn(of_images, 16, 9, 10))
    slope = drawn(of_images, 16, 9, 10, seed=1).detach()
    calls: list[str] = []
    monkeypatch.setattr(lean, "_IN_CACHE", 2 * 16 * 90 // torch.get_num_threads())  # two images at a time

    def run() -> list[Tensor]:
        y = module(x)
        calls.append(type(y.grad_fn).__name__)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], slope)]

    for fast, single in zip(run(), plainly(monkeypatch, run), strict=True):
        assert torch.allclose(fast, single, rtol=1e-9, atol=1e-12)
    assert calls == (["LargerGatedBackward", "MaximumBackward0"] if build is SCSE else ["GatedBackward", "MulBackward0"])


@pytest.mark.parametrize("build", [CBAM, SCSE])
def test_gradients_of_gradients_are_those_of_single_operations(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = build(8, 2).double(), drawn(2, 8, 4, 5)

    def run() -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()])

    for fast, single in zip(run(), plainly(monkeypatch, run), strict=True):
        assert torch.allclose(fast, single, rtol=1e-9, atol=1e-12)


def kept(module: nn.Module, x: Tensor) -> int:
    """Return the number of values that a forward pass keeps for the backward pass, without the input's."""
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    assert y.shape == x.shape
    return sum(tensor.untyped_storage().nbytes() // 4 for address, tensor in storages.items() if address != x.data_ptr())


@pytest.mark.parametrize("build", [CBAM, SCSE])
def test_no_further_map_is_kept(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build(64), drawn(4, 64, 28, 28, dtype=torch.float32)
    assert kept(module, x) < 0.2 * x.numel()
    assert plainly(monkeypatch, lambda: kept(module, x)) > 0.9 * x.numel()


def test_a_cpu_works_on_some_images_at_once_and_other_devices_on_all() -> None:
    x = torch.empty(100, 64, 64, 64, device="meta")  # 2**18 numbers in an image
    assert lean._count(x) == 100
    assert lean._count(torch.empty(1, 1, 1, 1).expand(100, 64, 64, 64)) == torch.get_num_threads()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # dual numbers use it
@pytest.mark.parametrize("build", [CBAM, SCSE])
def test_forward_derivatives_are_those_of_single_operations(build: Any) -> None:
    module = build(8).eval()
    x, tangent = (drawn(2, 8, 4, 5, seed=seed, dtype=torch.float32).detach() for seed in (0, 1))
    dual: Any = forward_ad  # has no annotations
    with dual.dual_level():
        assert not lean.is_lean(dual.make_dual(x, tangent))
        slope = dual.unpack_dual(module(dual.make_dual(x, tangent))).tangent
    torch.testing.assert_close(slope, torch.func.jvp(module, (x,), (tangent,))[1])


def test_single_operations_run_where_something_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = CBAM(8, 2), drawn(2, 8, 4, 5, dtype=torch.float32)
    assert lean.is_lean(x)
    heard: list[str] = []
    with listening(lambda _module, role, _gate, _features: heard.append(role)):
        assert "Mul" in str(module(x).grad_fn)
    assert heard == ["channel_gate", "spatial_gate"]
    with torch.no_grad():
        assert not lean.is_lean(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not lean.is_lean(x)
    for other in (x.half(), x.to(memory_format=torch.channels_last), nn.Parameter(x.detach())):
        assert not lean.is_lean(other)
    assert torch.vmap(lambda one: torch.tensor(float(lean.is_lean(one))))(x).sum() == 0
