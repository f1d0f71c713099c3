"""Options of modules and functions of `visattn.nn`: how they are given, and their documented defaults."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from torch import nn

from visattn import nn as ours
from visattn.nn import Site
from visattn.nn.attaching.checkpoint_layouts import Layout
from visattn.nn.attaching.sites import Maps, Place
from visattn.nn.attaching.trail import Trail

MODULE = nn.Identity()

OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "BAM": (("channels", "reduction"), {"reduction": 16, "width": None, "dilation": 4, "variant": "official"}),
    "CBAM": (("channels", "reduction"), {"reduction": 16, "width": None, "kernel_size": 7, "variant": "official"}),
    "ECA": (("channels",), {"kernel_size": None, "gamma": 2, "b": 1}),
    "SCSE": (("channels", "reduction"), {"reduction": 2, "width": None, "fusion": "max"}),
    "AdditiveScore": (("query_dim", "key_dim"), {"attention_dim": None, "bias": True}),
    "AttentionAugmentedConv2d": (
        ("in_channels", "out_channels"),
        {"kernel_size": 3, "num_heads": 8, "key_dim": None, "value_dim": None, "size": None, "bias": True},
    ),
    "AttentionGate": (("channels", "reduction"), {"reduction": 2, "width": None, "gate_channels": None}),
    "ClassAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "qkv_bias": False}),
    "CoordinateAttention": (("channels", "reduction"), {"reduction": 32, "width": None}),
    "CosineScore": (("beta",), {"beta": 1.0, "learned": False}),
    "CrossCovarianceAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "qkv_bias": False}),
    "DrawRead": (("hidden_dim",), {"patch_size": 12}),
    "DrawWrite": (("channels", "hidden_dim"), {"patch_size": 5}),
    "ExternalAttention": (("channels",), {"slots": 64, "variant": "paper"}),
    "GatherExcite": (
        ("channels", "reduction"),
        {"reduction": 16, "width": None, "extent": 0, "variant": "theta-minus", "size": None},
    ),
    "GeneralScore": (("query_dim", "key_dim"), {}),
    "GlobalContext": (("channels", "reduction"), {"reduction": 16, "width": None, "fusion": "add", "eps": 1e-05}),
    "HardAttention": (("feature_dim", "hidden_dim"), {"attention_dim": None, "eval_mode": "expected", "temperature": 1.0}),
    "LocalMonotonic": (("radius",), {}),
    "LocalPredictive": (("query_dim", "radius"), {"axes": 2, "attention_dim": None, "renormalize": False, "truncate": True}),
    "LocationScore": (("query_dim", "num_locations"), {}),
    "MultiHeadAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "qkv_bias": True}),
    "NonLocal": (("channels",), {"width": None, "variant": "embedded_gaussian", "scale": None, "pool": False, "norm": True}),
    "Retina": (("patch_size", "num_scales", "scale_factor"), {"scale_factor": 2}),
    "SelectiveKernel": (
        ("channels", "reduction"),
        {"reduction": 16, "width": None, "out_channels": None, "branches": 2, "groups": None, "stride": 1},
    ),
    "SelfAttention2d": (("channels", "reduction"), {"reduction": 8, "width": None, "variant": "paper"}),
    "SimAM": (("channels",), {"regularization": 0.0001}),
    "SlidingWindowAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "dilation": 1, "global_tokens": 0, "qkv_bias": True}),
    "SoftAttention": (("feature_dim", "hidden_dim"), {"attention_dim": None}),
    "SpatialTransformer": (("channels",), {"localization": None, "features": 32, "attention": False, "size": None}),
    "SqueezeExcite": (("channels", "reduction"), {"reduction": 16, "width": None, "bias": True}),
    "StandAloneSelfAttention": (("in_channels", "out_channels"), {"out_channels": None, "kernel_size": 7, "num_heads": 8}),
    "TalkingHeadsAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "qkv_bias": False}),
    "TripletAttention": (("channels",), {"kernel_size": 7}),
    "WindowAttention": (("embed_dim", "num_heads"), {"num_heads": 8, "window_size": 7, "shift_size": 0, "qkv_bias": True}),
    "WithAttention": (
        ("base", "attention"),
        {"gate": None, "scale": 1.0, "layout": "NCHW", "strict_attention": False, "company": None},
    ),
    "attach": (
        ("model", "attention", "where"),
        {
            "where": "residual",
            "init": "identity",
            "layout": "auto",
            "example": None,
            "min_channels": 1,
            "strict_attention": False,
            "dry_run": False,
        },
    ),
    "attend": (("scores", "value", "mask"), {"mask": None}),
    "doubly_stochastic": (("alphas", "steps"), {"steps": None, "reduction": "paper"}),
    "load_checkpoint": (("module", "state", "layout"), {"layout": None}),
    "publish": (("module", "role", "gate", "features"), {"features": None}),
    "reinforce": (
        ("cost", "log_probability", "entropy"),
        {"baseline": 0.0, "steps": None, "strength": 1.0, "entropy_strength": 0.0},
    ),
    "translate": (("module", "state", "layout"), {"layout": None}),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_have_the_documented_defaults_and_the_first_may_be_given_by_place(name: str) -> None:
    by_place, defaults = OPTIONS[name]
    known = inspect.signature(getattr(ours, name)).parameters.values()
    found = {option.name: option.default for option in known if option.default is not option.empty}
    assert found == defaults
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in defaults.items()}
    assert tuple(option.name for option in known if option.kind is option.POSITIONAL_OR_KEYWORD) == by_place
    assert not [option.name for option in known if option.kind is option.POSITIONAL_ONLY]


def test_facts_of_sites_are_fixed_and_compared_by_value() -> None:
    for one, other, name in (
        (Maps(6, "NCHW"), Maps(6, "NCHW"), "channels"),
        (Trail(3, "a"), Trail(3, "a"), "past"),
        (Site("a", 6, (5, 7), "NCHW", MODULE, 3, None), Site("a", 6, (5, 7), "NCHW", MODULE, 3, None), "size"),
        (Place("a", MODULE, "a", MODULE), Place("a", MODULE, "a", MODULE), "key"),
    ):
        assert one == other
        assert hash(one) == hash(other)
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, None)
    trail = Trail(3)
    assert (trail.end, trail.inner, trail.layout, trail.turn, trail.scaled) == (None,) * 5
    assert (trail.resized, trail.grown) == (False, False)
    assert not hasattr(trail, "__dict__")
    layout: Any = Layout("x", nn.Identity, {})
    assert (layout.options, layout.note, layout.lacks) == ({}, "", "")
    assert layout.told(None, {}) is True
    assert layout.change(None, "a", trail) is trail
    with pytest.raises(FrozenInstanceError):
        layout.name = "y"
