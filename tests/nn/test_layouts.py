"""Checkpoints of other implementations: they load strictly, and outputs equal those of the original code."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import cbam, coord_attn, eca, global_context, non_local_attn, selective_kernel, squeeze_excite
from timm.models import cait, swin_transformer, vision_transformer, xcit
from torch import Tensor, nn

import visattn
from tests.conftest import Figures
from tests.nn import official_blocks as official
from tests.nn.golden import image, maps, tokens, waves
from visattn import nn as ours
from visattn.errors import OptionError, WeightsError
from visattn.models import resnet18
from visattn.nn import load_checkpoint, translate
from visattn.nn.attaching.checkpoint_layouts import LAYOUTS

FOLDER = Path(__file__).parents[1] / "golden" / "references"
BOUND = 1e-6
BY_NAME = {layout.name: layout for layout in LAYOUTS}
State = dict[str, Tensor]
Case = tuple[Callable[[], nn.Module], State, Tensor, Tensor]  # our builder, their checkpoint, input, their output


def recorded(reference: str, name: str) -> tuple[State, Tensor]:
    """Return the authors' checkpoint, and the recorded output of their code."""
    facts = json.loads((FOLDER / f"{reference}.json").read_text())["settings"]["tensors"][name]
    empty = {
        key: torch.zeros(
            [int(side) for side in size.split("x")] if size else [], dtype=torch.int64 if "batches" in key else torch.float64
        )
        for key, size in facts.items()
    }
    return waves(empty), torch.from_numpy(np.load(FOLDER / f"{reference}.npz")[name])


def of_authors(reference: str, name: str, build: Callable[[], nn.Module], given: Tensor) -> Case:
    state, expected = recorded(reference, name)
    return build, state, given, expected


def live(
    theirs: Any, build: Callable[[], nn.Module], given: Tensor, run: Callable[[Any, Tensor], Any] = lambda module, x: module(x)
) -> Case:
    """Build a case from installed code, with our numbers as weights."""
    theirs.load_state_dict(
        {key: value for key, value in waves(theirs.state_dict()).items() if value.is_floating_point()}, strict=False
    )
    state = {key: value.clone() for key, value in theirs.state_dict().items()}
    with torch.no_grad():
        return build, state, given, run(theirs.double().eval(), given)


def windows(module: Any, x: Tensor) -> Tensor:
    """Run torchvision's module, which takes a grid; here it is one window."""
    return module(torch.unflatten(x, 1, (7, 7))).flatten(1, 2)  # type: ignore[no-any-return]


def attended(module: Any, x: Tensor) -> Tensor:
    return module(x, x, x)[0]  # type: ignore[no-any-return]


def non_local_cases(theirs: str, variant: Any, pools: bool) -> list[Case]:
    return [
        live(
            official.NonLocalBlock(32, theirs, pools=pools, norm=norm),
            partial(ours.NonLocal, 32, variant=variant, pool=pools, norm=norm),
            maps(),
        )
        for norm in (True, False)
    ]


PROOFS: dict[str, Callable[[], list[Case]]] = {
    "attention-module.CBAM": lambda: [of_authors("attention_module", "cbam", lambda: ours.CBAM(32), maps(5))],
    "attention-module.BAM": lambda: [of_authors("attention_module", "bam", lambda: ours.BAM(32), maps(5))],
    "senet.pytorch.SELayer": lambda: [of_authors("senet", "se", lambda: ours.SqueezeExcite(32, bias=False), maps())],
    "timm.CbamModule": lambda: [
        live(cbam.CbamModule(32), lambda: ours.CBAM(32, variant="paper"), maps()),
        live(cbam.CbamModule(32, spatial_kernel_size=3, mlp_bias=True), lambda: ours.CBAM(32, kernel_size=3), maps()),
    ],
    "timm.SEModule": lambda: [
        live(squeeze_excite.SEModule(32, rd_channels=4), lambda: ours.SqueezeExcite(32, width=4), maps()),
        live(squeeze_excite.SEModule(32, rd_channels=4, bias=False), lambda: ours.SqueezeExcite(32, width=4, bias=False), maps()),
    ],
    "timm.SqueezeExciteCl": lambda: [
        live(
            squeeze_excite.SqueezeExciteCl(32),
            lambda: ours.SqueezeExcite(32, width=8),
            maps(),
            lambda module, x: module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        )
    ],
    "torchvision.SqueezeExcitation": lambda: [
        live(torchvision.ops.SqueezeExcitation(32, 2), lambda: ours.SqueezeExcite(32), maps())
    ],
    "timm.EcaModule": lambda: [live(eca.EcaModule(kernel_size=5), lambda: ours.ECA(32, kernel_size=5), maps())],
    "timm.CoordAttn": lambda: [
        live(coord_attn.CoordAttn(32, rd_channels=8, bias=True), lambda: ours.CoordinateAttention(32), maps())
    ],
    "timm.GlobalContext(fuse_add)": lambda: [
        live(
            global_context.GlobalContext(32, fuse_add=True, fuse_scale=False),
            lambda: ours.GlobalContext(32, 8, eps=1e-6),
            maps(),
        )
    ],
    "timm.GlobalContext(fuse_scale)": lambda: [
        live(global_context.GlobalContext(32), lambda: ours.GlobalContext(32, 8, fusion="scale", eps=1e-6), maps())
    ],
    "GCNet.ContextBlock(channel_add)": lambda: [
        live(official.ContextBlock(32, 8, adds=True), lambda: ours.GlobalContext(32, width=8), maps())
    ],
    "GCNet.ContextBlock(channel_mul)": lambda: [
        live(official.ContextBlock(32, 8, adds=False), lambda: ours.GlobalContext(32, width=8, fusion="scale"), maps())
    ],
    "segmentation_models_pytorch.SCSEModule": lambda: [
        live(official.SmpSCSE(32, 2), lambda: ours.SCSE(32, width=2, fusion="add"), maps())
    ],
    "squeeze_and_excitation.ChannelSpatialSELayer": lambda: [live(official.AuthorsSCSE(32), lambda: ours.SCSE(32), maps())],
    "triplet-attention.TripletAttention": lambda: [
        live(theirs, lambda: ours.TripletAttention(32), maps())
        for theirs in (official.Triplet(), official.Triplet(("ChannelGateH", "ChannelGateW", "SpatialGate"), "spatial"))
    ],
    **{
        f"Non-local_pytorch.{theirs}(sub_sample={pools})": partial(non_local_cases, theirs, variant, pools)
        for theirs, variant in (("embedded_gaussian", "embedded_gaussian"), ("dot_product", "dot"), ("gaussian", "gaussian"))
        for pools in (True, False)
    },
    "timm.NonLocalAttn(use_scale=True)": lambda: [
        live(non_local_attn.NonLocalAttn(32), lambda: ours.NonLocal(32, width=8, scale="channels"), maps())
    ],
    "timm.NonLocalAttn(use_scale=False)": lambda: [
        live(non_local_attn.NonLocalAttn(32, use_scale=False), lambda: ours.NonLocal(32, width=8), maps())
    ],
    "timm.SelectiveKernel(split_input=False)": lambda: [
        live(
            selective_kernel.SelectiveKernel(32, split_input=False, groups=groups, rd_channels=8),
            partial(ours.SelectiveKernel, 32, width=8, groups=groups),
            maps(),
        )
        for groups in (1, 4)
    ],
    "torch.MultiheadAttention": lambda: [
        live(nn.MultiheadAttention(32, 4, batch_first=True), lambda: ours.MultiHeadAttention(32, 4), tokens(), attended)
    ],
    "timm.Attention": lambda: [
        live(vision_transformer.Attention(32, 4, qkv_bias=bias), partial(ours.MultiHeadAttention, 32, 4, qkv_bias=bias), tokens())
        for bias in (True, False)
    ],
    "timm.ClassAttn": lambda: [live(cait.ClassAttn(32, 4), lambda: ours.ClassAttention(32, 4), tokens())],
    "timm.TalkingHeadAttn": lambda: [live(cait.TalkingHeadAttn(32, 4), lambda: ours.TalkingHeadsAttention(32, 4), tokens())],
    "timm.XCA": lambda: [live(xcit.XCA(32, 4), lambda: ours.CrossCovarianceAttention(32, 4), tokens())],
    "timm.WindowAttention": lambda: [
        live(swin_transformer.WindowAttention(32, 4, window_size=7), lambda: ours.WindowAttention(32, 4), tokens())
    ],
    "torchvision.ShiftedWindowAttention": lambda: [
        live(
            torchvision.models.swin_transformer.ShiftedWindowAttention(32, [7, 7], [0, 0], 4),
            lambda: ours.WindowAttention(32, 4),
            tokens(),
            windows,
        )
    ],
}
UNLIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "timm.LightCbamModule": (lambda: cbam.LightCbamModule(32), lambda: ours.CBAM(32, variant="paper")),
    "timm.SelectiveKernel(split_input=True)": (
        lambda: selective_kernel.SelectiveKernel(32, rd_channels=8),
        lambda: ours.SelectiveKernel(32, width=8, groups=1),
    ),
}


def given_to(module: nn.Module, x: Tensor) -> Tensor:
    arguments = ((7, 7),) if isinstance(module, ours.WindowAttention) else ()
    with torch.no_grad():
        return module.double().eval()(x, *arguments)  # type: ignore[no-any-return]


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def test_every_layout_has_a_test_case() -> None:
    assert set(PROOFS) == {layout.name for layout in LAYOUTS if not layout.lacks}
    assert set(UNLIKE) == {layout.name for layout in LAYOUTS if layout.lacks}


@pytest.mark.parametrize("name", list(PROOFS))
def test_a_checkpoint_of_other_code_loads_and_gives_the_output_of_that_code(name: str, figures: Figures) -> None:
    for build, state, x, expected in PROOFS[name]():
        module = build()
        assert type(module) is BY_NAME[name].module
        load_checkpoint(module, state, name)
        worst = difference(given_to(module, x), expected)
        figures(f"checkpoint of {name}", worst, f"{BOUND:g}")
        assert worst <= BOUND
        assert difference(given_to(build(), x), expected) > 1e-3, "it shows nothing: other numbers give the same"


SHARED = "NonLocal", "SelectiveKernel", "embedded_gaussian", "dot_product"  # names that say nothing of an option


@pytest.mark.parametrize("name", [name for name in PROOFS if not any(part in name for part in SHARED)])
def test_layout_is_found_from_names_and_shapes(name: str) -> None:
    for build, state, x, expected in PROOFS[name]():
        module = build()
        load_checkpoint(module, state)
        assert difference(given_to(module, x), expected) <= BOUND


@pytest.mark.parametrize("name", list(UNLIKE))
def test_a_layout_that_no_option_computes_is_refused(name: str) -> None:
    theirs, build = UNLIKE[name]
    with pytest.raises(WeightsError, match=rf"cannot load a checkpoint of {re.escape(name)}: {BY_NAME[name].lacks}\. No option"):
        load_checkpoint(build(), theirs().state_dict())


AMBIGUOUS: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "NonLocal": (
        non_local_attn.NonLocalAttn(32),
        ours.NonLocal(32, width=8, scale="channels"),
        r"timm\.NonLocalAttn\(use_scale=True\) and timm\.NonLocalAttn\(use_scale=False\)",
    ),
    "SelectiveKernel": (
        selective_kernel.SelectiveKernel(32, groups=2, rd_channels=8),
        ours.SelectiveKernel(32, width=8, groups=4),
        r"timm\.SelectiveKernel\(split_input=False\) and timm\.SelectiveKernel\(split_input=True\)",
    ),
}


@pytest.mark.parametrize("name", list(AMBIGUOUS))
def test_an_ambiguous_layout_must_be_given(name: str) -> None:
    theirs, module, which = AMBIGUOUS[name]
    with pytest.raises(WeightsError, match=rf"^the layout of {name} is ambiguous: names and shapes fit {which}\. Pass layout="):
        load_checkpoint(module, theirs.state_dict())


@pytest.mark.parametrize("pools", [True, False])
def test_names_of_a_non_local_block_tell_pooling_but_not_its_similarity(pools: bool) -> None:
    theirs = official.NonLocalBlock(32, "embedded_gaussian", pools=pools)
    both = rf"embedded_gaussian\(sub_sample={pools}\) and Non-local_pytorch\.dot_product\(sub_sample={pools}\)\. Pass layout="
    with pytest.raises(WeightsError, match=both):
        load_checkpoint(ours.NonLocal(32, pool=pools), theirs.state_dict())


OTHERWISE: dict[str, tuple[nn.Module, Callable[[], State], str | None, str]] = {
    "CBAM": (ours.CBAM(32, variant="paper"), lambda: recorded("attention_module", "cbam")[0], None, r'variant="official"'),
    "BAM": (ours.BAM(32, variant="paper"), lambda: recorded("attention_module", "bam")[0], None, r'variant="official"'),
    "dilation": (ours.BAM(32, dilation=2), lambda: recorded("attention_module", "bam")[0], None, "dilation=4"),
    "eps": (
        ours.GlobalContext(32, 8, fusion="scale"),
        lambda: dict(global_context.GlobalContext(32).state_dict()),
        None,
        "eps=1e-6",
    ),
    "fusion": (
        ours.GlobalContext(32, 8, eps=1e-6),
        lambda: dict(global_context.GlobalContext(32).state_dict()),
        None,
        'fusion="scale"',
    ),
    "scale": (
        ours.NonLocal(32, width=8),
        lambda: dict(non_local_attn.NonLocalAttn(32).state_dict()),
        "timm.NonLocalAttn(use_scale=True)",
        'scale="channels"',
    ),
    "sum": (
        ours.SCSE(32, width=2),
        lambda: dict(official.SmpSCSE(32, 2).state_dict()),
        None,
        'fusion="add"',
    ),
    "maximum": (ours.SCSE(32, fusion="add"), lambda: dict(official.AuthorsSCSE(32).state_dict()), None, 'fusion="max"'),
    "added": (
        ours.GlobalContext(32, width=8, fusion="scale"),
        lambda: dict(official.ContextBlock(32, 8, adds=True).state_dict()),
        None,
        'fusion="add"',
    ),
    "similarity": (
        ours.NonLocal(32),
        lambda: dict(official.NonLocalBlock(32, "dot_product", pools=False).state_dict()),
        "Non-local_pytorch.dot_product(sub_sample=False)",
        'variant="dot"',
    ),
    "pooled": (
        ours.NonLocal(32),
        lambda: dict(official.NonLocalBlock(32, "embedded_gaussian", pools=True).state_dict()),
        "Non-local_pytorch.embedded_gaussian(sub_sample=True)",
        "pool=True",
    ),
    "pool": (
        ours.NonLocal(32, width=8, pool=True),
        lambda: dict(non_local_attn.NonLocalAttn(32).state_dict()),
        "timm.NonLocalAttn(use_scale=False)",
        "pool=False",
    ),
}


@pytest.mark.parametrize("name", list(OTHERWISE))
def test_a_module_that_computes_something_else_is_refused(name: str) -> None:
    module, state, layout, option = OTHERWISE[name]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(WeightsError, match=rf"must be built with {re.escape(option)} to match ") as caught:
        load_checkpoint(module, state(), layout)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def authors_cbam(**changes: Tensor | None) -> dict[str, Any]:
    state: dict[str, Any] = recorded("attention_module", "cbam")[0]
    state |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in state.items() if value is not None}


WRONG: dict[str, tuple[nn.Module, Callable[[], Any], str]] = {
    "missing": (
        ours.CBAM(32),
        lambda: authors_cbam(ChannelGate__mlp__1__bias=None),
        r"CBAM, got 1 missing: fc1\.bias\. Build it",
    ),
    "missing, of a norm": (
        ours.CBAM(32),
        lambda: authors_cbam(SpatialGate__spatial__bn__weight=None),
        r"1 missing: norm\.weight\.",
    ),
    "no spatial gate": (
        ours.CBAM(32),
        lambda: {key: value for key, value in authors_cbam().items() if "Spatial" not in key},
        r"missing: conv\.weight, norm\.weight",
    ),
    "unexpected": (ours.CBAM(32), lambda: authors_cbam(stray=torch.ones(1)), r"got 1 unexpected: stray\. Build it"),
    "another width": (
        ours.CBAM(32, 8),
        authors_cbam,
        r"CBAM must be given fc1\.weight of 4x32x1x1, got 2x32 \(and 2 more\)\. Build",
    ),
    "wrapped": (
        ours.CBAM(32),
        lambda: {f"module.{key}": value for key, value in authors_cbam().items()},
        r"9 missing: fc1\.weight, .*; 10 unexpected: module\.ChannelGate",
    ),
    "no tensors": (
        ours.CBAM(32),
        lambda: {"state_dict": {}},
        r"must map names to tensors, got dict as 'state_dict'\. Pass the result",
    ),
    "a file": (ours.CBAM(32), lambda: "cbam.pth", r"must map names to tensors, got str\. Pass the result"),
    "without a bias": (
        ours.MultiHeadAttention(32, 4),
        lambda: nn.MultiheadAttention(32, 4, bias=False).state_dict(),
        r"2 missing: qkv\.bias, proj\.bias",
    ),
    "keys of another width": (
        ours.MultiHeadAttention(32, 4),
        lambda: nn.MultiheadAttention(32, 4, kdim=16).state_dict(),
        r"1 missing: qkv\.weight; 3 unexpected: q_proj_weight, k_proj_weight, v_proj_weight",
    ),
    "two fusions": (
        ours.GlobalContext(32, width=8),
        lambda: {
            **official.ContextBlock(32, 8, adds=True).state_dict(),
            **official.ContextBlock(32, 8, adds=False).state_dict(),
        },
        r"6 unexpected: channel_mul_conv\.0\.weight",
    ),
    "mean instead of attention": (
        ours.GlobalContext(32, width=8),
        lambda: {key: value for key, value in official.ContextBlock(32, 8, adds=True).state_dict().items() if "mask" not in key},
        r"2 missing: score\.weight, score\.bias",
    ),
    "two of three gates": (
        ours.TripletAttention(32),
        lambda: official.Triplet(("cw", "hc")).state_dict(),  # type: ignore[arg-type]
        r"missing: convs\.0\.weight",
    ),
    "another window": (
        ours.WindowAttention(32, 4),
        lambda: {
            **torchvision.models.swin_transformer.ShiftedWindowAttention(32, [7, 7], [0, 0], 4).state_dict(),
            "relative_position_index": torch.zeros(49 * 49, dtype=torch.int64),
        },
        r"1 unexpected: relative_position_index",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line_with_names(name: str) -> None:
    module, state, message = WRONG[name]
    with pytest.raises(WeightsError, match=message) as caught:
        load_checkpoint(module, state())
    assert "\n" not in str(caught.value)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown layout 'timm\.CbamModul'; did you mean 'timm\.CbamModule'\?"):
        load_checkpoint(ours.CBAM(32), {}, "timm.CbamModul")


def test_loading_into_a_class_is_refused() -> None:
    with pytest.raises(OptionError, match=r"module must be a torch\.nn\.Module, got type\. Pass the module to load into"):
        load_checkpoint(ours.CBAM, {})  # type: ignore[arg-type]


def test_our_checkpoints_load_unchanged() -> None:
    for layout in LAYOUTS:
        module = layout.module(32)
        state = module.state_dict()
        same = translate(module, state)
        assert list(same) == list(state)
        assert all(same[key] is state[key] for key in state)
        load_checkpoint(layout.module(32), state)


def test_old_checkpoints_without_num_batches_tracked_load() -> None:
    state = {key: value for key, value in recorded("attention_module", "bam")[0].items() if "batches" not in key}
    load_checkpoint(ours.BAM(32), state)


# whole networks


@pytest.mark.parametrize("name", ["cbam", "bam"])
def test_a_network_of_the_authors_loads_and_gives_the_output_of_their_code(name: str, tmp_path: Path, figures: Figures) -> None:
    state, expected = recorded("attention_module", f"resnet18_{name}")
    model: nn.Module = resnet18(attention=name, num_classes=5)
    load_checkpoint(model, state)
    worst = difference(given_to(model, image(224)), expected)
    figures(f"authors' ResNet-18 with {name}", worst, f"{BOUND:g}")
    assert worst <= BOUND
    file = tmp_path / f"{name}.pth"
    torch.save({"epoch": 1, "state_dict": {f"module.{key}": value for key, value in state.items()}}, file)
    loaded = visattn.load_model(f"visattn_{name}_resnet18", weights=file)
    assert difference(given_to(loaded, image(224)), expected) <= BOUND


@pytest.mark.parametrize(("block", "attention"), [("seresnet18", "se"), ("resnet18", "cbam")])
def test_a_network_of_timm_loads_under_any_name_of_its_attention(block: str, attention: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(block, num_classes=5, zero_init_last=False, block_args={"attn_layer": attention}).eval()
    make: Any = {
        "se": lambda channels: ours.SqueezeExcite(channels, width=max(8, channels // 16)),
        "cbam": lambda channels: ours.CBAM(channels, variant="paper"),
    }
    model = resnet18(attention=make[attention], num_classes=5).eval()
    load_checkpoint(model, theirs.state_dict())
    x = image(64).float()
    with torch.no_grad():
        assert difference(model(x), theirs(x)) <= 1e-5  # in float32


def test_attached_attention_loads_the_attention_of_its_block() -> None:
    state, expected = recorded("attention_module", "resnet18_cbam")
    model = torchvision.models.resnet18(num_classes=5)
    visattn.attach(model, "cbam", where="layer*.*.bn2", init="paper")
    load_checkpoint(model, state)
    assert difference(given_to(model, image(224)), expected) <= BOUND


def test_two_modules_with_renamed_keys_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = ours.CBAM(32), ours.CBAM(32)

    state = {f"{name}.{key}": value for name in ("first", "second") for key, value in authors_cbam().items()}
    with pytest.raises(WeightsError, match=r"18 missing: one\.fc1\.weight, .*; 20 unexpected: first\.ChannelGate"):
        load_checkpoint(Two(), state)
    load_checkpoint(Two(), {key.replace("first", "one").replace("second", "two"): value for key, value in state.items()})


# the documentation


def test_table_of_the_documentation_is_the_registry() -> None:
    rows = [
        [
            f"`{layout.name}`",
            f"`{layout.module.__name__}`",
            f"does not load: {layout.lacks}" if layout.lacks else ", ".join(f"`{option}`" for option in layout.options),
            layout.note,
        ]
        for layout in LAYOUTS
    ]
    header = ["layout", "into", "built with", "given"]
    with (Path(__file__).parents[2] / "docs" / "modules" / "checkpoints.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [header, *rows]
