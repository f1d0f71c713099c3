"""Every class of transformers that reads an image, at a tiny size, with inputs that fit it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
import transformers.models.auto.modeling_auto as auto
from torch import nn

from libraries.shrinking import change, shrunk
from libraries.transformers_inputs import IMAGE_TOKEN, WORDS, image_token, inputs_of

LIBRARY, VERSION = "transformers", transformers.__version__
TASKS = """
    IMAGE_CLASSIFICATION IMAGE OBJECT_DETECTION SEMANTIC_SEGMENTATION INSTANCE_SEGMENTATION UNIVERSAL_SEGMENTATION IMAGE_SEGMENTATION
    DEPTH_ESTIMATION NORMAL_ESTIMATION VIDEO_CLASSIFICATION ZERO_SHOT_IMAGE_CLASSIFICATION ZERO_SHOT_OBJECT_DETECTION
    VISUAL_QUESTION_ANSWERING MASK_GENERATION MASKED_IMAGE_MODELING IMAGE_TEXT_TO_TEXT
"""
MORE = "CLIPVisionModel", "GroupViTModel", "SegGptForImageSegmentation", "Siglip2VisionModel"  # in no automatic mapping of these
# classes that a tiny configuration does not build, or that take no pixels, and why
LEFT_OUT = {
    "DinatForImageClassification": "needs natten, a compiled package",
    "DinatModel": "needs natten, a compiled package",
    "ImageGPTForImageClassification": "takes indices of colors, not pixels",
    "ImageGPTModel": "takes indices of colors, not pixels",
    "EvollaForProteinText2Text": "takes proteins, not pixels",
    "Mistral4ForCausalLM": "takes words only",
    "DiffusionGemmaForBlockDiffusion": "takes words only",
    "PI0ForConditionalGeneration": "needs the state of a robot",
}
_LONG = {"long": 7, "mid": 5, "short": 3}  # kernels of blocks of PP-OCR
_PP_OCR: dict[str, Any] = {
    "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
    "intraclass_block_config": {
        **{f"vertical_long_to_small_conv_{key}ratio": [[n, 1], [1, 1], [n // 2, 0]] for key, n in _LONG.items()},
        **{f"horizontal_small_to_long_conv_{key}ratio": [[1, n], [1, 1], [0, n // 2]] for key, n in _LONG.items()},
        **{f"symmetric_conv_long_{key}ratio": [[n, n], [1, 1], [n // 2, n // 2]] for key, n in _LONG.items()},
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
    },
}
_CODES = 64  # of the tokenizers of images
# what a configuration is made with, where settings that follow from it could not be changed later
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": IMAGE_TOKEN,
            **{f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": 100 + code for code in range(_CODES)},
        },
        "vq_config": {"num_embeddings": _CODES, "base_channels": 32},
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": IMAGE_TOKEN,
            "<|extra_200|>": IMAGE_TOKEN + 1,
            **{f"<|visual token {code:06}|>": 100 + code for code in range(_CODES)},
        },
        "vq_config": {"codebook_size": _CODES, "base_channels": 32, "hidden_size": 128},
    },
    "Molmo2ForConditionalGeneration": {
        "vision_config": {"image_size": [224, 224]},
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "OmDetTurboForObjectDetection": {"image_size": 224},
    "PPOCRV5ServerDetForObjectDetection": _PP_OCR,
    "PPOCRV6MediumDetForObjectDetection": _PP_OCR,
    "PerceptionLMForConditionalGeneration": {
        "vision_config": {
            "architecture": "vit_pe_lang_large_patch14_448",
            "model_args": {"embed_dim": 192, "depth": 2, "num_heads": 3, "img_size": [224, 224], "global_pool": ""},
        }
    },
    "Sapiens2ForSemanticSegmentation": {
        "head_config": {
            "upsample_out_channels": [32, 32],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [32],
            "conv_kernel_sizes": [1],
        }
    },
}
ARGUMENTS["Sapiens2ForNormalEstimation"] = ARGUMENTS["Sapiens2ForSemanticSegmentation"]
# settings that a tiny model of a class needs, by path in its configuration
_SAM = {"prompt_encoder_config.image_size": 256, "prompt_encoder_config.image_embedding_size": 16}
_SAM2 = {
    "vision_config.backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
    "prompt_encoder_config.image_size": 256,
}
_DEPTH_PRO = {
    "image_size": 256,
    "patch_size": 64,
    "merge_padding_value": 1,
    "intermediate_hook_ids": [1, 0],
    "fusion_hidden_size": 32,
    "scaled_images_feature_dims": [64, 64, 32],
    "intermediate_feature_dims": [32, 32],
    **{f"{part}_model_config.image_size": 64 for part in ("image", "patch", "fov")},
}
_RF_DETR = {"backbone_config.image_size": 224, "num_queries": 30}
_LLAMA4 = {
    "image_size": 224,
    "intermediate_size": 3072,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
_MLLAMA = {"image_size": 224, "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 2560}
_MINICPM = {"insert_layer_id": 0, "vision_config.insert_layer_id": 0}
_SHORT_CLIP = {"num_frames": 4}
_VJEPA2 = {"frames_per_clip": 4, "pred_num_hidden_layers": 2}
_VIDEO_PRISM = {"num_frames": 4, "image_size": 144}
_FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "hidden_size": 192, "num_attention_heads": 3}
_SAME_WIDTH = {"text_config.hidden_size": 768, "text_config.num_attention_heads": 12}  # for two towers that are compared
SETTINGS: dict[str, dict[str, Any]] = {
    "AriaForConditionalGeneration": {
        "projector_patch_to_query_dict": {49: 16},
        "max_value_projector_patch_to_query_dict": 16,
    },
    "AyaVisionForConditionalGeneration": {"vision_config.num_attention_heads": 16},
    "BeitForSemanticSegmentation": _FOUR_LAYERS,
    "Data2VecVisionForSemanticSegmentation": _FOUR_LAYERS,
    "DeepseekVLHybridForConditionalGeneration": {"high_res_vision_config.global_attn_indexes": [1]},
    "DepthProForDepthEstimation": _DEPTH_PRO,
    "DepthProModel": _DEPTH_PRO,
    "DeepseekOcr2ForConditionalGeneration": {
        "vision_config.sam_config.downsample_channels": [512, 64],
        "vision_config.sam_config.global_attn_indexes": [1],
        "text_config.num_experts_per_tok": 2,
    },
    "EdgeTamModel": _SAM2 | {"vision_config.backbone_config.architecture": "repvit_m1"},
    "EfficientNetForImageClassification": {"image_size": 160},
    "EfficientNetModel": {"image_size": 160},
    "EomtForUniversalSegmentation": {"num_hidden_layers": 6, "image_size": 160, "num_queries": 50},
    "EomtDinov3ForUniversalSegmentation": {"num_hidden_layers": 6, "image_size": 160, "num_queries": 50},
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "FastVlmForConditionalGeneration": {"vision_config.model_args": {"inference_mode": True, "layers": [1, 1, 1, 2, 2]}},
    "Florence2ForConditionalGeneration": {"vision_config.projection_dim": 64},
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 49},
    "Granite4VisionForConditionalGeneration": {
        "vision_config.patch_size": 14,
        "image_grid_pinpoints": [[224, 448], [448, 224], [448, 448]],
        "downsample_rate": "4/8",
        "deepstack_layer_map": [(1, 0)],
        "spatial_target_layers": [1, 1, 1, 1],
        "qformer_config.hidden_size": 768,
        "qformer_config.num_attention_heads": 12,
    },
    "GroundingDinoForObjectDetection": {"max_text_len": WORDS},
    "HunYuanVLForConditionalGeneration": {"text_config.rope_parameters.alpha": 1.0},
    "Idefics3ForConditionalGeneration": {"vision_config.image_size": 256},
    "JanusForConditionalGeneration": {"vision_config.projection_dim": 64},
    "Kosmos2_5ForConditionalGeneration": {"latent_query_num": 16},
    "Kosmos2ForConditionalGeneration": {
        "text_config.layers": 2,
        "text_config.embed_dim": 64,
        "text_config.ffn_dim": 128,
        "text_config.attention_heads": 4,
    },
    "Llama4ForConditionalGeneration": {f"vision_config.{key}": value for key, value in _LLAMA4.items()},
    "Llama4VisionModel": _LLAMA4,
    "LlavaOnevisionForConditionalGeneration": {
        "vision_config.image_size": 224,
        "image_grid_pinpoints": [[224, 448], [448, 224], [448, 448]],
    },
    "LwDetrForObjectDetection": {
        "projector_scale_factors": [1.0],
        "projector_in_channels": [256],
        "num_feature_levels": 1,
        "num_queries": 30,
    },
    "MLCDVisionModel": {"image_size": 168},
    "MiniCPMOcrForConditionalGeneration": _MINICPM,
    "MiniCPMV4_6ForConditionalGeneration": _MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": _MINICPM,
    "MiniMaxM3SparseForConditionalGeneration": {"merged_hidden_size": 256},
    "MMGroundingDinoForObjectDetection": {"max_text_len": WORDS},
    "MllamaForConditionalGeneration": {f"vision_config.{key}": value for key, value in _MLLAMA.items()}
    | {"text_config.cross_attention_layers": [1]},
    "MllamaVisionModel": _MLLAMA,
    "OmDetTurboForObjectDetection": {"text_config.hidden_size": 512, "text_config.num_attention_heads": 8},
    "OwlViTForObjectDetection": {"projection_dim": 64, "text_config.max_position_embeddings": 16},
    "Owlv2ForObjectDetection": {"projection_dim": 64, "text_config.max_position_embeddings": 16},
    "PaliGemmaForConditionalGeneration": {"projection_dim": 64, "vision_config.projection_dim": 64},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PPDocLayoutV2ForObjectDetection": {"class_thresholds": [0.0] * 100, "class_order": [0] * 100},
    "PPOCRV6SmallDetForObjectDetection": {"layer_list_out_channels": [96, 192, 384, 384]},
    "PPFormulaNetForConditionalGeneration": {"vision_config.decoder_hidden_size": 64},
    "Qwen2VLForConditionalGeneration": {"vision_config.hidden_size": 64},
    "Qwen4ExpForConditionalGeneration": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 64,
        "text_config.indexer_compress_ratio": 4,
    },
    "RfDetrForInstanceSegmentation": _RF_DETR,
    "RfDetrForObjectDetection": _RF_DETR,
    "Sam2Model": _SAM2 | {"vision_config.backbone_config.image_size": [256, 256]},
    "Sam3TrackerModel": {
        "vision_config.backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
        "vision_config.backbone_config.image_size": 224,
        "vision_config.backbone_config.window_size": 8,
        "vision_config.backbone_config.global_attn_indexes": [1],
        "prompt_encoder_config.image_size": 224,
    },
    "SamHQModel": _SAM,
    "SamModel": _SAM,
    "SegGptForImageSegmentation": {
        "image_size": [224, 112],
        "num_hidden_layers": 4,
        "merge_index": 1,
        "intermediate_hidden_state_indices": [1, 2, 3],
    },
    "ShieldGemma2ForImageClassification": {"mm_tokens_per_image": 49},
    "SmolVLMForConditionalGeneration": {"vision_config.image_size": 256},
    "Step3p7ForConditionalGeneration": {"vision_config.image_size": 224, "text_config.sliding_window": 512},
    "Swin2SRForImageSuperResolution": {"image_size": 32},
    "Swin2SRModel": {"image_size": 32},
    "T5Gemma2ForConditionalGeneration": {"encoder.mm_tokens_per_image": 49},
    "TimesformerForVideoClassification": _SHORT_CLIP,
    "TimesformerModel": _SHORT_CLIP,
    "TimmBackbone": {"backbone": "vit_tiny_patch16_224"},
    "Tipsv2Model": _SAME_WIDTH,
    "VJEPA2ForVideoClassification": _VJEPA2,
    "VJEPA2Model": _VJEPA2,
    "VideoMAEForPreTraining": _SHORT_CLIP,
    "VideoMAEForVideoClassification": _SHORT_CLIP,
    "VideoMAEModel": _SHORT_CLIP,
    "VideoPrismClipModel": _SAME_WIDTH | {f"vision_config.{key}": value for key, value in _VIDEO_PRISM.items()},
    "VideoPrismForVideoClassification": _VIDEO_PRISM,
    "VideoPrismVisionModel": _VIDEO_PRISM,
    "VideomtForUniversalSegmentation": {"image_size": 96, "num_hidden_layers": 3, "num_frames": 2},
    "VipLlavaForConditionalGeneration": {"vision_feature_layer": [-1, -2]},
    "VivitForVideoClassification": _SHORT_CLIP,
    "VivitModel": _SHORT_CLIP,
    "YolosForObjectDetection": {"image_size": [160, 256]},
    "YolosModel": {"image_size": [160, 256]},
}


def names() -> dict[str, str]:
    """Return the classes of the automatic mappings for images, with the task of each."""
    found: dict[str, str] = {}
    for task in TASKS.split():
        for classes in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in classes if isinstance(classes, (list, tuple)) else [classes]:
                found.setdefault(name, task.lower().replace("_", " "))
    return found | dict.fromkeys(MORE, "other")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of a class in evaluation mode, and its inputs."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made = _encoder_and_decoder() if name == "VisionEncoderDecoderModel" else kind.config_class(**ARGUMENTS.get(name, {}))
    config = shrunk(made)
    for path, value in SETTINGS.get(name, {}).items():
        change(config, path, value)
    _enlarge_vocabulary(config)
    model: Any = kind(config).eval()
    for parameter in model.parameters():  # experts are not initialized
        if parameter.numel() and not float(parameter.detach().abs().max()) < 100:
            nn.init.normal_(parameter, std=0.02)
    return model, _that_fit(name, model, config)


def _that_fit(name: str, model: Any, config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return inputs with images that are wider than high if the model takes them, else square ones."""
    try:
        wide = inputs_of(name, model, config, wide=True)
        with torch.no_grad():
            model(**wide)
    except Exception:  # its positions are those of one size
        return inputs_of(name, model, config)
    return wide


def _encoder_and_decoder() -> Any:  # noqa: ANN401
    decoder = transformers.GPT2Config(add_cross_attention=True)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(), decoder)


def _enlarge_vocabulary(config: Any) -> None:  # noqa: ANN401
    """Let the language model know the image token; some defaults do not."""
    for key in ("image_token_id", "video_token_index"):
        if getattr(config, key, 0) is None:
            setattr(config, key, IMAGE_TOKEN)
    token, text = image_token(config), getattr(config, "text_config", None)
    if token is not None and text is not None and getattr(text, "vocab_size", token + 1) <= token:
        text.vocab_size = token + 8
