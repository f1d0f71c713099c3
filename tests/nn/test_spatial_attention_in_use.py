"""Attention over positions in use: weights, start, borders, capture, compilation, export and formats."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import visattn
from tests.nn.cases import PLACES
from tests.oracles.arithmetic import example, ready
from visattn._support.publish import listening
from visattn._support.types import Role
from visattn.errors import OptionError, ShapeError
from visattn.nn import (
    ATTENTION,
    AttentionAugmentedConv2d,
    DrawRead,
    DrawWrite,
    ExternalAttention,
    GlobalContext,
    NonLocal,
    Retina,
    SelfAttention2d,
    SpatialTransformer,
    StandAloneSelfAttention,
)

# weights

SHAPES: dict[str, tuple[int, ...]] = {
    "GC": (2, 1, 1, 35),
    "GC scale": (2, 1, 1, 35),
    "NL": (2, 1, 35, 35),
    "NL gaussian": (2, 1, 35, 35),
    "NL dot": (2, 1, 35, 35),
    "NL concat": (2, 1, 35, 35),
    "NL pooled, without norm": (2, 1, 35, 6),
    "SAGAN": (2, 1, 35, 35),
    "SAGAN official": (2, 1, 35, 6),
    "SASA": (2, 2, 5, 7, 3, 3),
    "augmented": (2, 2, 35, 35),
    "augmented with offsets": (2, 2, 35, 35),
    "external": (2, 1, 35, 6),
    "external official": (2, 1, 35, 6),
    "DRAW read": (2, 1, 9, 35),
}


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("name", list(SHAPES))
def test_need_weights_does_not_change_the_output(name: str, dtype: torch.dtype, atol: float) -> None:
    build, inputs = PLACES[name]
    module = build().to(dtype).eval() if dtype == torch.float32 else ready(build())
    given = [x.to(dtype) for x in inputs()]
    y, weights = module(*given, need_weights=True)
    torch.testing.assert_close(y, module(*given), rtol=0, atol=atol)
    assert weights.shape == SHAPES[name]
    rows = weights.flatten(4).sum(-1) if name == "SASA" else weights.sum(-1)
    if name not in ("NL dot", "NL concat", "DRAW read"):
        rounded = 1e-6 if name.startswith("external") else atol  # 1e-9 is added to the divisor of a row
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=rounded)


def test_positions_outside_the_image_have_no_weight() -> None:
    module = ready(StandAloneSelfAttention(4, kernel_size=5, num_heads=2))
    weights = module(example(4, 3, 4), need_weights=True)[1]  # (B, heads, H, W, 5, 5)
    for i in range(3):
        for j in range(4):
            inside = torch.zeros(5, 5, dtype=torch.bool)
            inside[max(0, 2 - i) : 5 - i, max(0, 2 - j) : 6 - j] = True
            assert bool((weights[:, :, i, j, ~inside] == 0).all())
            assert bool((weights[:, :, i, j, inside] > 0).all())


def test_weights_index_query_then_key() -> None:
    module = SelfAttention2d(2, 1)
    for layer in (module.query, module.key):
        layer.weight.data = torch.eye(2)[:, :, None, None]
    x = torch.tensor([[[[4.0, 0.0]], [[3.0, 5.0]]]])  # two positions, (4, 3) and (0, 5)
    expected = torch.tensor([[25.0, 15.0], [15.0, 25.0]]).softmax(1)
    torch.testing.assert_close(module(x, need_weights=True)[1][0, 0], expected)


# the start


@pytest.mark.parametrize(
    "name", ["GC", "NL", "NL gaussian", "NL dot", "NL concat", "NL pooled, without norm", "SAGAN", "SAGAN official"]
)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_module_starts_as_the_identity(name: str, training: bool) -> None:
    build, inputs = PLACES[name]
    module, (x,) = build().train(training), inputs()
    assert torch.equal(module(x), x)


def test_global_context_with_scale_fusion_starts_by_halving_its_input() -> None:
    (x,) = PLACES["GC scale"][1]()
    assert torch.equal(GlobalContext(8, fusion="scale")(x), x / 2)


@pytest.mark.parametrize("attention", [False, True], ids=["affine", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spatial_transformer_starts_as_the_identity(attention: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 37, 53)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = SpatialTransformer(3, attention=attention)(x)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-4)


def test_spatial_transformer_starts_as_the_identity_up_to_rounding() -> None:
    x = example(3, 37, 53)
    torch.testing.assert_close(SpatialTransformer(3).double()(x), x, rtol=0, atol=1e-12)


def test_only_gamma_learns_in_the_first_step() -> None:
    module = SelfAttention2d(8)
    module(PLACES["SAGAN"][1]()[0]).square().sum().backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is not None and parameter.grad.any()] == [
        "gamma"
    ]


# the borders

ONE_CHANNEL: dict[str, nn.Module] = {
    "GC": GlobalContext(1),
    "NL": NonLocal(1),
    "NL dot": NonLocal(1, variant="dot"),
    "NL concat": NonLocal(1, variant="concat"),
    "SAGAN": SelfAttention2d(1),
    "SASA": StandAloneSelfAttention(1, 2, kernel_size=3, num_heads=1),
    "augmented": AttentionAugmentedConv2d(1, 3, num_heads=1, size=(5, 5)),
    "external": ExternalAttention(1),
    "STN": SpatialTransformer(1),
}


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 2)], ids=str)
@pytest.mark.parametrize("name", list(ONE_CHANNEL))
def test_one_channel_and_few_positions_are_enough(name: str, size: tuple[int, int]) -> None:
    module, x = ready(copy.deepcopy(ONE_CHANNEL[name])), example(1, *size, batch=1)
    y = module(x)
    assert y.shape[2:] == size
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("name", list(PLACES))
def test_images_of_a_batch_are_independent(name: str) -> None:
    build, inputs = PLACES[name]
    module, given = ready(build()), [x.double() for x in inputs()]
    alone = torch.cat([module(*(x[i : i + 1] for x in given)) for i in range(2)])
    torch.testing.assert_close(module(*given), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["kernel", "written out"])
@pytest.mark.parametrize("build", [lambda: NonLocal(8, norm=False), lambda: SelfAttention2d(8, 1)], ids=["NL", "SAGAN"])
def test_scores_beyond_float16_stay_finite(build: Any, weights: bool, dtype: torch.dtype) -> None:
    module = ready(build()).to(dtype)
    x = (example(8) * 100).to(dtype)
    query, key = (layer(x).double().flatten(2) for layer in (module.query, module.key))
    with torch.no_grad():
        assert float((query.mT @ key).abs().max()) > 65504
        y = module(x, need_weights=True)[0] if weights else module(x)
        exact = module.double()(x.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=float(x.abs().max()) * 0.02)


def test_means_of_dot_products_beyond_float16_stay_finite() -> None:
    module, x = ready(NonLocal(8, variant="dot", norm=False)).half(), (example(8) * 100).half()
    weights = module(x, need_weights=True)[1]
    assert bool(weights.isfinite().all())


def test_external_attention_of_distant_scores_stays_finite_in_float16() -> None:
    module, x = ready(ExternalAttention(8, slots=2)).half(), (example(8) * 30).half()
    y, weights = module(x, need_weights=True)
    assert bool(y.isfinite().all())
    assert bool((weights.sum(3) < 0.5).any())  # a position with no weight on any slot: in float16 this would be 0 / 0


def test_global_context_with_few_channels_depends_on_distant_positions() -> None:
    module, x = ready(GlobalContext(8)), example(8)
    changed = x.clone()
    changed[..., 0, 0] += 1
    assert bool((module(changed)[..., 1, 1] != module(x)[..., 1, 1]).any())


# formats and tools

OF_EACH_CLASS = ["GC", "NL pooled, without norm", "SAGAN official", "SASA", "augmented with offsets", "external official", "STN"]
OF_EACH_CLASS += ["retina", "DRAW read", "DRAW write"]


def given_to(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    build, inputs = PLACES[name]
    torch.manual_seed(0)
    module, given = build().eval(), inputs()
    with torch.no_grad():
        for parameter in module.parameters():  # so that nothing is the identity, and windows stay on the image
            parameter.add_(torch.randn_like(parameter) * (0.03 if name.startswith("STN") else 0.2))
        return module, given, module(*given)


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_module_compiles_in_one_graph(name: str) -> None:
    module, given, expected = given_to(name)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(*given), expected)


def test_module_with_weights_compiles_in_one_graph() -> None:
    module, given, _ = given_to("NL")
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(module, backend="eager", fullgraph=True)(*given, need_weights=True)
        torch.testing.assert_close(found, module(*given, need_weights=True))


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_module_is_exported(name: str) -> None:
    module, given, expected = given_to(name)
    torch.testing.assert_close(torch.export.export(module, given).module()(*given), expected)


@pytest.mark.parametrize("name", [name for name in PLACES if name not in ("retina", "DRAW read", "DRAW write")])
def test_module_is_traced_as_a_submodule(name: str) -> None:
    module, given, expected = given_to(name)
    torch.testing.assert_close(fx.symbolic_trace(nn.Sequential(module))(*given), expected)


@pytest.mark.parametrize("name", list(PLACES))
def test_module_is_copied_and_stored(name: str) -> None:
    module, given, expected = given_to(name)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    memory = io.BytesIO()
    torch.save(module.state_dict(), memory)
    memory.seek(0)
    copies.append(PLACES[name][0]().eval())
    copies[-1].load_state_dict(torch.load(memory, weights_only=True))
    with torch.no_grad():
        assert all(torch.equal(each(*given), expected) for each in copies)


@pytest.mark.parametrize("name", list(PLACES))
def test_module_runs_under_autocast(name: str) -> None:
    module, given, expected = given_to(name)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(*given)
        others = [module(*given, need_weights=True)[0]] if name in SHAPES else []
    for each in (found, *others):
        assert float((each - expected).norm() / expected.norm()) < (0.2 if name == "STN" else 0.08)  # its window moves a little


@pytest.mark.parametrize("name", list(PLACES))
def test_gradients_reach_every_parameter_and_input(name: str) -> None:
    module, given, _ = given_to(name)
    given = tuple(x.clone().requires_grad_() for x in given)
    module(*given).square().sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (*module.parameters(), *given))


@pytest.mark.parametrize("name", [name for name in PLACES if not name.startswith("DRAW")])
def test_channels_last_is_kept(name: str) -> None:
    module, (x, *others), expected = given_to(name)
    found = module.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last), *others)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous()
    torch.testing.assert_close(found, expected)


# captured


def network(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), module, nn.Conv2d(8, 4, 3)).eval()


CAPTURED = ["NL", "NL gaussian", "NL pooled, without norm", "SAGAN", "SAGAN official", "GC", "augmented with offsets"]


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_weights_lie_on_the_image(name: str) -> None:
    module, pixels = given_to(name)[0], torch.randn(2, 3, 10, 14)
    model = network(module) if name != "augmented with offsets" else network(module)[:2]
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    (record,) = recording
    with torch.no_grad():
        weights = module(model[0](pixels), need_weights=True)[1]
    pooled = weights.shape[-1] == 6
    assert (record.layer, record.reason) == ("1", None)
    assert record.kind == ("pool" if name == "GC" else "cross" if pooled else "self")
    assert (record.queries.grid, record.keys.grid) == (() if name == "GC" else (5, 7), (2, 3) if pooled else (5, 7))
    assert tuple(record.keys.box) == ((0, 0, 8, 12) if pooled else (0, 0, 10, 14))
    torch.testing.assert_close(record.operator.dense(), weights, rtol=0, atol=1e-6)


def test_captured_neighborhoods_lie_on_the_image() -> None:
    module, pixels = given_to("SASA")[0], torch.randn(2, 3, 10, 14)
    model = network(module)[:2]
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    (record,) = recording
    assert (record.kind, record.queries.grid, record.keys.grid) == ("self", (5, 7), (5, 7))
    with torch.no_grad():
        weights = module(model[0](pixels), need_weights=True)[1]
    whole = torch.zeros(2, 2, 35, 7, 9)  # with zero padding around the image
    for i in range(5):
        for j in range(7):
            whole[:, :, i * 7 + j, i : i + 3, j : j + 3] = weights[:, :, i, j]
    torch.testing.assert_close(record.operator.dense(), whole[..., 1:6, 1:8].flatten(3), rtol=0, atol=1e-6)


# published

PUBLISHED: dict[str, tuple[Role, tuple[int, ...]]] = {
    "GC scale": ("channel_gate", (2, 8, 1, 1)),
    "STN": ("transform", (2, 2, 3)),
    "STN attention": ("transform", (2, 2, 3)),
    "retina": ("glimpse", (2, 2, 4)),
    "DRAW read": ("glimpse", (2, 1, 4)),
    "DRAW write": ("window", (2, 1, 6)),
}


@pytest.mark.parametrize("name", list(PLACES))
def test_only_gates_and_spatial_maps_are_published(name: str) -> None:
    module, given, _ = given_to(name)
    heard: list[tuple[nn.Module, Role, Tensor, Tensor | None]] = []
    with listening(lambda *shown: heard.append(shown)):
        y = module(*given)
    assert [(role, value.shape) for _, role, value, _ in heard] == ([PUBLISHED[name]] if name in PUBLISHED else [])
    if name == "GC scale":
        torch.testing.assert_close(given[0] * heard[0][2], y)


# errors

REFUSED: dict[str, tuple[Any, str]] = {
    "GC of width 1": (lambda: GlobalContext(64, width=1), "width of the bottleneck must be a whole number of at least 2, got 1"),
    "GC fusion": (lambda: GlobalContext(64, fusion="mul"), "unknown fusion of GlobalContext 'mul'"),  # type: ignore[arg-type]
    "NL kind": (lambda: NonLocal(8, variant="dots"), "unknown variant of NonLocal 'dots'; did you mean 'dot'"),  # type: ignore[arg-type]
    "NL scale": (lambda: NonLocal(8, scale="d"), "unknown scale of NonLocal 'd'"),  # type: ignore[arg-type]
    "NL scaled dot": (lambda: NonLocal(8, variant="dot", scale="width"), "scale must be None for variant 'dot', got 'width'"),
    "NL width": (lambda: NonLocal(8, width=0), "must be a whole number of at least 1, got 0"),
    "SAGAN variant": (lambda: SelfAttention2d(8, variant="port"), "unknown variant of SelfAttention2d"),  # type: ignore[arg-type]
    "SASA kernel": (lambda: StandAloneSelfAttention(8, kernel_size=4), "kernel_size must be odd, got 4"),
    "SASA heads": (lambda: StandAloneSelfAttention(8), "multiple of 2 x 8 heads, got 8"),
    "augmented kernel": (lambda: AttentionAugmentedConv2d(8, 8, kernel_size=2), "kernel_size must be odd, got 2"),
    "augmented widths": (lambda: AttentionAugmentedConv2d(8, 8, num_heads=2, key_dim=3), "multiples of num_heads=2, got 3 and 2"),
    "augmented values": (lambda: AttentionAugmentedConv2d(8, 8, num_heads=2, value_dim=10), "at most out_channels=8, got 10"),
    "external slots": (lambda: ExternalAttention(8, slots=0), "slots must be a whole number of at least 1, got 0"),
    "external variant": (lambda: ExternalAttention(8, variant="block"), "unknown variant of ExternalAttention"),  # type: ignore[arg-type]
    "STN features": (lambda: SpatialTransformer(8, features=0), "features must be a whole number of at least 1, got 0"),
    "STN size": (lambda: SpatialTransformer(8, size=(0, 4)), "height must be a whole number of at least 1, got 0"),
    "retina factor": (lambda: Retina(8, 2, scale_factor=0), "scale_factor must be a whole number of at least 1, got 0"),
    "DRAW glimpse": (lambda: DrawWrite(1, 4, patch_size=0), "patch_size must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_options_are_refused(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        build()


MAPS = torch.zeros(2, 8, 5, 7)
MISFITS: dict[str, tuple[nn.Module, tuple[Tensor, ...], str]] = {
    "NL channels": (NonLocal(6), (MAPS,), r"NonLocal must be given \(B, 6, H, W\), got \(2, 8, 5, 7\)"),
    "NL pooled": (NonLocal(8, pool=True), (MAPS[:, :, :1],), "NonLocal must be given 2 x 2 positions or more .* got 1 x 7"),
    "NL norm": (NonLocal(8), (MAPS[:1, :, :1, :1],), "cannot train on one value per channel"),
    "SAGAN pooled": (SelfAttention2d(8, variant="official"), (MAPS[..., :1],), "2 x 2 positions or more .* got 5 x 1"),
    "external norm": (ExternalAttention(8, variant="official"), (MAPS[:1, :, :1, :1],), "cannot train on one value per channel"),
    "augmented size": (AttentionAugmentedConv2d(8, 8, num_heads=1, size=(5, 6)), (MAPS,), "at most 5 x 6, got 5 x 7"),
    "STN features": (
        SpatialTransformer(8, localization=nn.Flatten(), features=9),
        (MAPS,),
        r"localization must return \(B, 9\), got \(2, 280\)",
    ),
    "retina locations": (Retina(4, 1), (MAPS, torch.zeros(1, 2)), r"locations must be \(2, 2\), .* got \(1, 2\)"),
    "DRAW state": (DrawRead(4), (MAPS, torch.zeros(2, 5)), r"state must be \(B, 4\), got \(2, 5\)"),
    "DRAW canvas": (DrawWrite(1, 4), (MAPS, torch.zeros(2, 4)), r"DrawWrite must be given \(B, 1, H, W\)"),
}


@pytest.mark.parametrize("name", list(MISFITS))
def test_shapes_are_refused(name: str) -> None:
    module, given, message = MISFITS[name]
    with pytest.raises(ShapeError, match=message):
        module(*given)


def test_corners_refuse_what_is_not_a_batch_of_transforms() -> None:
    with pytest.raises(ShapeError, match=r"theta must be \(B, 2, 3\), got \(2, 3\)"):
        SpatialTransformer.corners(torch.zeros(2, 3))


@pytest.mark.parametrize(("name", "kind"), [("gc", GlobalContext), ("nl", NonLocal), ("sagan", SelfAttention2d)])
def test_names_build_modules_from_the_number_of_channels(name: str, kind: type[nn.Module]) -> None:
    assert ATTENTION[name] is kind
    module = ATTENTION[name](8)
    assert torch.equal(module(MAPS), MAPS)
