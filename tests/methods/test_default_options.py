"""Options of methods: how they are given, their documented defaults, and what a method explains."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from visattn.core.methods import METHODS

DEFAULTS: dict[str, dict[str, Any]] = {
    "attention": {"layer": -1, "head": "all", "fusion": None, "sinks": "keep", "query": "auto", "call": 0},
    "similarity": {"of": "tokens", "layer": -1, "image": 0},
    "pca": {"layer": -1, "components": 3},
    "rollout": {
        "fusion": "mean",
        "weights_by": "attention",
        "residual": 0.5,
        "discard": 0.0,
        "discard_over": "row",
        "start_layer": 0,
        "sinks": "keep",
        "query": "auto",
        "implementation": "tiles",
    },
    "norm_attention": {"layer": -1, "keep_heads": False, "add_residual": False, "query": "auto"},
    "attention_flow": {"residual": 0.5, "start_layer": 0, "query": "auto"},
    "relevance": {"start_layer": 0, "query": "auto"},
    "legrad": {"last_layers": None},
    "gradient_rollout": {"discard": 0.9, "discard_over": "layer", "start_layer": 0, "query": "auto"},
    "attention_gradient": {"layer": "all", "head": "all", "signed": False, "query": "auto"},
    "transition_attention": {"steps": 20, "start_layer": 4, "query": "auto"},
    "gradcam": {"layer": -1},
    "gradcam_plus_plus": {"layer": -1, "epsilon": 1e-06},
    "xgradcam": {"layer": -1},
    "hirescam": {"layer": -1},
    "layercam": {"layer": -1},
    "cam": {"layer": -1},
    "eigencam": {"layer": -1},
    "scorecam": {"layer": -1, "batch_size": 16},
    "ablationcam": {"layer": -1, "batch_size": 16},
    "gates": {"layer": -1},
    "glimpses": {"layer": -1},
    "captum.saliency": {"signed": False},
    "captum.input_x_gradient": {"segments": "pixels", "grid_size": None, "num_segments": 196},
    "captum.integrated_gradients": {
        "baseline": "blur",
        "segments": "pixels",
        "grid_size": None,
        "num_segments": 196,
        "steps": 50,
        "batch_size": 16,
    },
    "captum.smoothgrad": {"noise": 0.15, "samples": 50, "batch_size": 16, "seed": 0},
    "captum.occlusion": {"baseline": "blur", "segments": "grid", "grid_size": None, "num_segments": 196, "batch_size": 16},
    "captum.kernel_shap": {
        "baseline": "blur",
        "segments": "grid",
        "grid_size": None,
        "num_segments": 25,
        "samples": 500,
        "batch_size": 16,
        "seed": 0,
    },
    "captum.lime": {
        "baseline": "blur",
        "segments": "grid",
        "grid_size": None,
        "num_segments": 50,
        "l1": 0.001,
        "samples": 500,
        "batch_size": 16,
        "seed": 0,
    },
}
TARGETED = {
    "relevance",
    "legrad",
    "gradient_rollout",
    "attention_gradient",
    "transition_attention",
    "gradcam",
    "gradcam_plus_plus",
    "xgradcam",
    "hirescam",
    "layercam",
    "cam",
    "scorecam",
    "ablationcam",
    "captum.saliency",
    "captum.input_x_gradient",
    "captum.integrated_gradients",
    "captum.smoothgrad",
    "captum.occlusion",
    "captum.kernel_shap",
    "captum.lime",
}
WITH_SINKS = {
    "attention",
    "rollout",
    "attention_flow",
    "relevance",
    "gradient_rollout",
    "attention_gradient",
    "transition_attention",
}


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_options_have_the_documented_defaults_and_are_given_by_name(name: str) -> None:
    known = inspect.signature(METHODS[name].function).parameters.values()
    found = {option.name: option.default for option in known if option.default is not option.empty}
    assert found.pop("dtype", torch.float32) is torch.float32
    assert found == DEFAULTS[name]
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in DEFAULTS[name].items()}
    assert [option.name for option in known if option.kind is option.POSITIONAL_OR_KEYWORD] == ["recording"]
    assert not [option.name for option in known if option.kind is option.POSITIONAL_ONLY]


def test_every_method_is_among_the_defaults() -> None:
    assert set(DEFAULTS) == set(METHODS)
    assert len(METHODS) == len(DEFAULTS)


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_what_a_method_explains_is_told_by_its_facts(name: str) -> None:
    assert METHODS[name].targeted is (name in TARGETED)
    assert METHODS[name].sinks is (name in WITH_SINKS)
