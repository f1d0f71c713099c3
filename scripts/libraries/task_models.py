"""Models of other libraries with the targets that are natural for them: classes, labels, numbers, texts, boxes, masks, pixels, queries.

A row is one line of `ROWS`. The weights are random; sizes are small where a library lets them be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import visattn

PHOTO = "photo:chelsea"
SMALL: Mapping[str, Any] = {"img_size": 64, "resize": "fit"}


@dataclass(frozen=True)
class Row:
    """A model and a question.

    Attributes:
        library: Where the model comes from.
        model: Its name there.
        build: Function that builds it.
        target: Target, as given to `explain`; `mask:*` stands for the class that most pixels have. Empty: none.
        method: Method of `explain`.
        options: Other options of `explain`.
        first: Index of the first patch among tokens; None: the patches come last.
    """

    library: str
    model: str
    build: Callable[[], nn.Module]
    target: str = ""
    method: str = "gradcam"
    options: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    first: int | None = None


def built(row: Row, seed: int) -> nn.Module:
    """Return the model of a row in evaluation mode, with weights drawn at a scale that keeps activations of one size."""
    torch.manual_seed(seed)
    model = row.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                last = any(part in name for part in ("class_labels_classifier", "class_predictor"))
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5 * (4 if last else 1))
    return model.eval()


class YoloLike(nn.Module):
    """Detector without anchors that returns `(B, 4 + classes, N)`: corners in pixels and class scores of the cells of two levels."""

    def __init__(self, classes: int = 3) -> None:
        """Build it with random weights."""
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(32, 32, 3, 2, 1), nn.SiLU())
        self.reach, self.scores = nn.Conv2d(32, 4, 1), nn.Conv2d(32, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return corners left, top, right, bottom, and a score of each class."""
        first = self.stem(x)
        return torch.cat([self._level(one, step) for one, step in ((first, 8), (self.down(first), 16))], 2)

    def _level(self, feature: Tensor, step: int) -> Tensor:
        rows, columns = (torch.arange(side) * step + step / 2 for side in feature.shape[2:])
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        reach = self.reach(feature).exp() * step
        corners = torch.stack([x - reach[:, 0], y - reach[:, 1], x + reach[:, 2], y + reach[:, 3]], 1)
        return torch.cat([corners, self.scores(feature).sigmoid()], 1).flatten(2)


class Listed(nn.Module):
    """Wrapper of a model that returns `(B, 4 + classes, N)`, which returns boxes, scores and labels of each image."""

    def __init__(self, inner: nn.Module, least: float = 0.5, count: int = 5) -> None:
        """Keep the model, the least score and the number of detections."""
        super().__init__()
        self.inner, self.least, self.count = inner, least, count

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        """Return the detections of each image, without those that overlap a better one."""
        detections = []
        for boxes, classes in zip(*self.inner(x).split([4, 3], 1), strict=True):
            scores, labels = classes.max(0)
            kept = torchvision.ops.batched_nms(boxes.T, scores, labels, 0.5)
            kept = kept[scores[kept] > self.least][: self.count]
            detections.append({"boxes": boxes.T[kept], "scores": scores[kept], "labels": labels[kept]})
        return detections


def embedding(model: Any) -> nn.Module:  # noqa: ANN401
    """Return a classifier of torchvision without its last layer."""
    model.fc = nn.Identity()
    return model  # type: ignore[no-any-return]


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    return lambda: timm.create_model(name, pretrained=False, **options)


def _classifier(name: str, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def _detector(name: str, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """Return a builder of a detector of torchvision that keeps five detections, however weak."""
    roi = "rcnn" in name
    most: dict[str, Any] = (
        {"box_detections_per_img": 5, "box_score_thresh": 0.0} if roi else {"detections_per_img": 5, "score_thresh": 0.0}
    )
    sides: dict[str, Any] = {} if "ssd" in name else {"min_size": 96, "max_size": 128}
    plain: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 2 if "keypoint" in name else 4}
    return lambda: torchvision.models.get_model(name, **plain | most | sides | options)


def _segmenter(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4)


def _smp(name: str, encoder: str = "resnet18", classes: int = 3, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    def build() -> nn.Module:
        library: Any = import_module("segmentation_models_pytorch")
        model: nn.Module = getattr(library, name)(encoder_name=encoder, encoder_weights=None, classes=classes, **options)
        return model

    return build


def _monai(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    def build() -> nn.Module:
        library: Any = import_module("monai.networks.nets")
        model: nn.Module = getattr(library, name)(*args, **options)
        return model

    return build


_NO_BACKBONE: dict[str, Any] = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False}
_DETR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 6,
    "num_labels": 4,
}
_RT: dict[str, Any] = {
    "encoder_hidden_dim": 16,
    "d_model": 16,
    "num_labels": 4,
    "num_queries": 6,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "decoder_attention_heads": 2,
    "encoder_attention_heads": 2,
    "num_denoising": 0,
    "decoder_in_channels": [16] * 3,
    "hidden_expansion": 0.5,
    "anchor_image_size": None,
}


def _config(name: str, **options: Any) -> Any:  # noqa: ANN401
    """Return a configuration of transformers, whose classes take more than their annotations say."""
    return getattr(transformers, name)(**options)


_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _resnet(*stages: str) -> Any:  # noqa: ANN401
    return _config(
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1] * 4,
        layer_type="basic",
        out_features=list(stages),
    )


def _rt_resnet() -> Any:  # noqa: ANN401
    return _config(
        "RTDetrResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1] * 4,
        layer_type="basic",
        out_features=_STAGES[1:],
    )


def _hgnet() -> Any:  # noqa: ANN401
    return _config(
        "HGNetV2Config",
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 24],
        stage_mid_channels=[8] * 4,
        stage_out_channels=[8, 16, 24, 32],
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[1] * 4,
        hidden_sizes=[8, 16, 24, 32],
        out_features=_STAGES[1:],
    )


def _convnext() -> Any:  # noqa: ANN401
    return _config("ConvNextConfig", hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, out_features=_STAGES)


def _swin() -> Any:  # noqa: ANN401
    return _config(
        "SwinConfig", embed_dim=16, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4, image_size=64, out_features=_STAGES
    )


_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 64,
    "patch_size": 16,
}
_DPT: dict[str, Any] = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}


def _hf(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """Return a builder of a model of transformers; options that are functions are called first."""

    def build() -> nn.Module:
        settings = {key: value() if callable(value) else value for key, value in options.items()}
        model: nn.Module = getattr(transformers, name)(_config(config, **settings))
        return model

    return build


def _of_detr(name: str, config: str) -> Callable[[], nn.Module]:
    return _hf(name, config, backbone_config=partial(_resnet, "stage4"), **_NO_BACKBONE, **_DETR)


_OBJECT: dict[str, Any] = {"img_size": (96, 128), "resize": "fit"}
_WIDE: dict[str, Any] = {"img_size": 128, "resize": "fit"}
_EXACT: dict[str, Any] = {"img_size": (64, 64), "resize": "fit"}
_OWN: dict[str, Any] = {"resize": "auto"}  # a size that the model states
_torchvision, _transformers, _monai_row, _smp_row = (
    partial(Row, name) for name in ("torchvision", "transformers", "MONAI", "segmentation_models_pytorch")
)
_own, _timm_row = partial(Row, "own"), partial(Row, "timm")

ROWS: tuple[Row, ...] = (
    _timm_row("resnet18", _timm("resnet18"), "class:3"),
    _timm_row("efficientnet_b0", _timm("efficientnet_b0"), "label:2", options={**SMALL, "task": "multi_label"}),
    _timm_row("convnext_atto", _timm("convnext_atto"), "output:-4"),
    _timm_row("resnet18, one number", _timm("resnet18", num_classes=1), "output:0", options={**SMALL, "task": "regression"}),
    _timm_row("mobilenetv3_small_050, embedding", _timm("mobilenetv3_small_050", num_classes=0), "output:5"),
    _timm_row("resnet18, embedding", _timm("resnet18", num_classes=0), "similar:photo:coffee"),
    _timm_row("vit_small_patch16_dinov3, embedding", _timm("vit_small_patch16_dinov3", num_classes=0), "similar:photo:coffee"),
    _timm_row("vit_tiny_patch16_224", _timm("vit_tiny_patch16_224"), "class:7", options=_OWN),
    _timm_row("vit_tiny_patch16_224, attention", _timm("vit_tiny_patch16_224"), "", "attention", _OWN),
    _timm_row("deit_tiny_distilled, attention", _timm("deit_tiny_distilled_patch16_224"), "", "attention", {"query": "cls"}),
    _torchvision("resnet50", _classifier("resnet50"), "class:5"),
    _torchvision("swin_t", _classifier("swin_t"), "class:5", options={"img_size": 64}),
    _torchvision("resnet50, embedding", lambda: embedding(_classifier("resnet50")()), "similar:photo:coffee"),
    _torchvision("fasterrcnn_resnet50_fpn", _detector("fasterrcnn_resnet50_fpn"), "box:0", options={}),
    _torchvision("fasterrcnn_mobilenet_v3_large_fpn", _detector("fasterrcnn_mobilenet_v3_large_fpn"), "box:1", options={}),
    _torchvision("maskrcnn_resnet50_fpn", _detector("maskrcnn_resnet50_fpn"), "box:0", options={}),
    _torchvision("keypointrcnn_resnet50_fpn", _detector("keypointrcnn_resnet50_fpn"), "box:0", options={}),
    _torchvision("retinanet_resnet50_fpn", _detector("retinanet_resnet50_fpn"), "box:0", options={}),
    _torchvision("retinanet_resnet50_fpn_v2", _detector("retinanet_resnet50_fpn_v2"), "box:2", options={}),
    _torchvision("fcos_resnet50_fpn", _detector("fcos_resnet50_fpn"), "box:0", options={}),
    _torchvision("ssd300_vgg16", _detector("ssd300_vgg16"), "box:0", options={}),
    _torchvision("ssdlite320_mobilenet_v3_large", _detector("ssdlite320_mobilenet_v3_large"), "box:0", options={}),
    _torchvision("deeplabv3_resnet50", _segmenter("deeplabv3_resnet50"), "mask:*"),
    _torchvision("deeplabv3_mobilenet_v3_large", _segmenter("deeplabv3_mobilenet_v3_large"), "pixel:200,120"),
    _torchvision("fcn_resnet50", _segmenter("fcn_resnet50"), "mask:*"),
    _torchvision("lraspp_mobilenet_v3_large", _segmenter("lraspp_mobilenet_v3_large"), "mask:*", options=_WIDE),
    _smp_row("Unet", _smp("Unet"), "mask:*"),
    _smp_row("Unet, sigmoid", _smp("Unet", classes=1, activation="sigmoid"), "mask:0"),
    _smp_row("Unet, softmax", _smp("Unet", activation="softmax2d"), "mask:*"),
    _smp_row("Unet, efficientnet-b0", _smp("Unet", "efficientnet-b0"), "pixel:100,50"),
    _smp_row("UnetPlusPlus", _smp("UnetPlusPlus"), "mask:*"),
    _smp_row("MAnet", _smp("MAnet"), "mask:*"),
    _smp_row("FPN", _smp("FPN"), "mask:*"),
    _smp_row("PSPNet", _smp("PSPNet"), "mask:*"),
    _smp_row("DeepLabV3", _smp("DeepLabV3"), "mask:*"),
    _smp_row("DeepLabV3Plus", _smp("DeepLabV3Plus"), "mask:*"),
    _smp_row("Linknet", _smp("Linknet"), "mask:*"),
    _smp_row("PAN", _smp("PAN"), "mask:*", options=_WIDE),
    _smp_row("UPerNet", _smp("UPerNet"), "mask:*"),
    _smp_row("Segformer", _smp("Segformer"), "mask:*"),
    _smp_row("DPT", _smp("DPT", "tu-vit_tiny_patch16_224", dynamic_img_size=True), "mask:*"),
    _monai_row("UNet", _monai("UNet", 2, 3, 3, (4, 8, 16, 32), (2, 2, 2), num_res_units=1), "mask:*"),
    _monai_row("AttentionUnet", _monai("AttentionUnet", 2, 3, 3, (4, 8, 16, 32), (2, 2, 2)), "mask:*"),
    _monai_row("SegResNet", _monai("SegResNet", 2, 8, 3, 3), "mask:*"),
    _monai_row("UNETR", _monai("UNETR", 3, 3, (64, 64), 8, 32, 32, 2, spatial_dims=2), "mask:*", options=_EXACT),
    _monai_row(
        "SwinUNETR",
        _monai("SwinUNETR", 3, 3, spatial_dims=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
        "mask:*",
        options=_EXACT,
    ),
    _monai_row("BasicUNet", _monai("BasicUNet", 2, 3, 3, (8, 8, 8, 16, 16, 8)), "mask:*"),
    _monai_row("BasicUNet, one channel", _monai("BasicUNet", 2, 3, 1, (8, 8, 8, 16, 16, 8)), "mask:0"),
    _monai_row("DynUNet", _monai("DynUNet", 2, 3, 3, [3, 3, 3], [1, 2, 2], [2, 2]), "mask:*"),
    _monai_row("FlexibleUNet", _monai("FlexibleUNet", 3, 3, "efficientnet-b0", spatial_dims=2), "mask:*", options=_WIDE),
    _transformers("Detr", _of_detr("DetrForObjectDetection", "DetrConfig"), "box:0", options=_OBJECT),
    _transformers(
        "Detr, cross-attention",
        _of_detr("DetrForObjectDetection", "DetrConfig"),
        "",
        "attention",
        {**_OBJECT, "query": "object:2", "layer": "model.decoder.layers.1.encoder_attn"},
    ),
    _transformers(
        "TableTransformer",
        _of_detr("TableTransformerForObjectDetection", "TableTransformerConfig"),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "ConditionalDetr",
        _of_detr("ConditionalDetrForObjectDetection", "ConditionalDetrConfig"),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "DeformableDetr",
        _hf(
            "DeformableDetrForObjectDetection",
            "DeformableDetrConfig",
            backbone_config=partial(_resnet, *_STAGES[1:]),
            num_feature_levels=3,
            **_NO_BACKBONE,
            **_DETR,
        ),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "Yolos",
        _hf("YolosForObjectDetection", "YolosConfig", **{**_VIT, "image_size": [96, 128]}, num_labels=4, num_detection_tokens=5),
        "query:3",
        options=_OBJECT,
        first=1,
    ),
    _transformers(
        "RTDetr",
        _hf("RTDetrForObjectDetection", "RTDetrConfig", backbone_config=_rt_resnet, encoder_in_channels=[16, 24, 32], **_RT),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "RTDetrV2",
        _hf("RTDetrV2ForObjectDetection", "RTDetrV2Config", backbone_config=_rt_resnet, encoder_in_channels=[16, 24, 32], **_RT),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "DFine",
        _hf("DFineForObjectDetection", "DFineConfig", backbone_config=_hgnet, encoder_in_channels=[16, 24, 32], **_RT),
        "box:0",
        options=_OBJECT,
    ),
    _transformers(
        "Segformer",
        _hf(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[8, 16, 24, 32],
            depths=[1] * 4,
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16,
            num_labels=4,
        ),
        "mask:*",
    ),
    _transformers(
        "UperNet, ConvNeXt",
        _hf(
            "UperNetForSemanticSegmentation",
            "UperNetConfig",
            backbone_config=_convnext,
            hidden_size=16,
            use_auxiliary_head=False,
            num_labels=4,
        ),
        "mask:*",
        options=_WIDE,
    ),
    _transformers(
        "DPT",
        _hf("DPTForSemanticSegmentation", "DPTConfig", num_labels=4, use_auxiliary_head=False, **_VIT, **_DPT),
        "mask:*",
        options=_EXACT,
    ),
    _transformers("DPT, depth", _hf("DPTForDepthEstimation", "DPTConfig", **_VIT, **_DPT), "pixel:225,150", options=_EXACT),
    _transformers(
        "Mask2Former",
        _hf(
            "Mask2FormerForUniversalSegmentation",
            "Mask2FormerConfig",
            backbone_config=_swin,
            feature_size=64,
            mask_feature_size=64,
            hidden_dim=64,
            encoder_feedforward_dim=32,
            encoder_layers=1,
            decoder_layers=2,
            dim_feedforward=32,
            num_attention_heads=2,
            num_queries=5,
            num_labels=4,
        ),
        "mask:0",
    ),
    _transformers("ViT, attention", _hf("ViTForImageClassification", "ViTConfig", **_VIT), "", "attention", {"query": "cls"}),
    _transformers("ViT", _hf("ViTForImageClassification", "ViTConfig", num_labels=4, **_VIT), "class:2", options={}),
    Row("open_clip", "RN50", lambda: visattn.load_model("clip:RN50", weights="none"), "text:a cat", options={}),
    _own("YoloLike, wrapped", lambda: Listed(YoloLike()), "box:0"),
    _own("YoloLike, as it is", YoloLike, "box:0"),
)
