"""Titles of models: names as people say them, and no name is lost where no rule fits."""

from __future__ import annotations

import pytest
import timm

from visattn._support.names import model_title


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("vit_small_patch14_dinov2.lvd142m", "DINOv2 ViT-S/14"),
        ("vit_small_patch14_reg4_dinov2.lvd142m", "DINOv2 ViT-S/14 with 4 registers"),
        ("vit_base_patch16_224", "ViT-B/16"),
        ("vit_base_patch16_siglip_224", "SigLIP ViT-B/16"),
        ("vit_base_patch16_clip_224.openai", "CLIP ViT-B/16"),
        ("deit_small_distilled_patch16_224", "DeiT-S/16"),
        ("swin_tiny_patch4_window7_224", "Swin-T"),
        ("swinv2_tiny_window8_256", "Swin V2-T"),
        ("tv:resnet50", "ResNet-50"),
        ("visattn_resnet14", "ResNet-14"),
        ("seresnet50", "SE-ResNet-50"),
        ("tf_efficientnet_lite0", "EfficientNet-Lite0"),
        ("efficientnet_b0", "EfficientNet-B0"),
        ("no_such_model", "no_such_model"),
        ("my_model.py:build", "my_model.py:build"),
        ("", ""),
    ],
)
def test_model_title_is_readable(name: str, title: str) -> None:
    assert model_title(name) == title


def test_every_name_of_timm_has_a_title() -> None:
    titles = {name: model_title(name) for name in timm.list_models()}
    assert all(title and "None" not in title and not title.endswith("-") for title in titles.values())
    assert sum(title != name for name, title in titles.items()) > 150


def test_models_of_different_size_have_different_titles() -> None:
    names = [
        f"vit_{size}_patch{patch}_{tag}" for size in ("small", "base", "large") for patch in (14, 16) for tag in ("224", "dinov2")
    ]
    assert len({model_title(name) for name in names}) == len(names)
