"""Every class of transformers that reads an image, at a tiny size, with inputs that fit it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
import transformers.models.auto.modeling_auto as auto
from torch import Tensor, nn

from libraries.shrinking import change, shrunk

TASKS = """
    IMAGE_CLASSIFICATION IMAGE OBJECT_DETECTION SEMANTIC_SEGMENTATION INSTANCE_SEGMENTATION UNIVERSAL_SEGMENTATION IMAGE_SEGMENTATION
    DEPTH_ESTIMATION NORMAL_ESTIMATION VIDEO_CLASSIFICATION ZERO_SHOT_IMAGE_CLASSIFICATION ZERO_SHOT_OBJECT_DETECTION
    VISUAL_QUESTION_ANSWERING MASK_GENERATION MASKED_IMAGE_MODELING IMAGE_TEXT_TO_TEXT
"""
MORE = "CLIPVisionModel", "GroupViTModel", "SegGptForImageSegmentation", "Siglip2VisionModel"  # in no automatic mapping of these
WORDS = 6
BATCH = 2
# classes that a tiny configuration does not build, or that take no pixels, and why
LEFT_OUT = {
    "DinatForImageClassification": "needs natten, a compiled package",
    "DinatModel": "needs natten, a compiled package",
    "ImageGPTForImageClassification": "takes indices of colors, not pixels",
    "ImageGPTModel": "takes indices of colors, not pixels",
    "EvollaForProteinText2Text": "takes proteins, not pixels",
    "Mistral4ForCausalLM": "takes words only",
    "DiffusionGemmaForBlockDiffusion": "takes words only",
}
# settings that a tiny model of a class needs, by path in its configuration
_SAM = {"prompt_encoder_config.image_size": 256, "prompt_encoder_config.image_embedding_size": 16}
_SAM2 = {
    "vision_config.backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
    "vision_config.backbone_config.image_size": [256, 256],
    "prompt_encoder_config.image_size": 256,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config.num_attention_heads": 16},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "EomtForUniversalSegmentation": {"num_hidden_layers": 6},
    "EomtDinov3ForUniversalSegmentation": {"num_hidden_layers": 6},
    "Florence2ForConditionalGeneration": {"vision_config.projection_dim": 64},
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 49},
    "OwlViTForObjectDetection": {"projection_dim": 64, "text_config.max_position_embeddings": 16},
    "Owlv2ForObjectDetection": {"projection_dim": 64, "text_config.max_position_embeddings": 16},
    "PaliGemmaForConditionalGeneration": {"projection_dim": 64, "vision_config.projection_dim": 64},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "Qwen2VLForConditionalGeneration": {"vision_config.hidden_size": 64},
    "Sam2Model": _SAM2,
    "SamHQModel": _SAM,
    "SamModel": _SAM,
    "ShieldGemma2ForImageClassification": {"mm_tokens_per_image": 49},
    "TimmBackbone": {"backbone": "vit_tiny_patch16_224"},
}
ALONE = "ViTMAE", "Vilt"  # drop patches at random, others in each image of a batch
IMAGE_TOKEN = 95  # where a configuration names none
PACKED = 4, 6  # rows and columns of patches of each image in a packed sequence
TILES = {
    "Idefics": 1,
    "SmolVLM": 1,
    "LlavaNext": 3,
    "LlavaOnevision": 3,
    "Inkling": 1,
    "PerceptionLM": 1,
}  # images of each sample
TILES_OF_MLLAMA = 4
PLAIN = "LlavaForC", "InternVL", "Aya", "Qianfan"  # take `image_sizes` for one of their image towers only
CLIPS = {"VideoMAE": 16, "Vivit": 32, "Timesformer": 8}  # frames, by beginning of the class's name


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
    config = shrunk(_encoder_and_decoder() if name == "VisionEncoderDecoderModel" else kind.config_class())
    for path, value in SETTINGS.get(name, {}).items():
        change(config, path, value)
    _enlarge_vocabulary(config)
    model: Any = kind(config).eval()
    for parameter in model.parameters():  # experts are not initialized
        if parameter.numel() and not float(parameter.detach().abs().max()) < 100:
            nn.init.normal_(parameter, std=0.02)
    inputs = _pixels(name, model, config)
    if name.startswith(ALONE):
        inputs = {key: value[:1] for key, value in inputs.items()}
    if name == "VisionEncoderDecoderModel":
        inputs["decoder_input_ids"] = _some_words(WORDS)
    if "input_ids" in inspect.signature(model.forward).parameters:
        inputs |= _words(model, config, inputs)
    return model, inputs


def _encoder_and_decoder() -> Any:  # noqa: ANN401
    decoder = transformers.GPT2Config(add_cross_attention=True)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(), decoder)


def _image_token(config: Any) -> int | None:  # noqa: ANN401
    names = "image_token_id", "image_token_index"
    return next((x for x in (getattr(config, key, None) for key in names) if isinstance(x, int)), None)


def _enlarge_vocabulary(config: Any) -> None:  # noqa: ANN401
    """Let the language model know the image token; some defaults do not."""
    if getattr(config, "image_token_id", 0) is None:
        config.image_token_id = IMAGE_TOKEN
    token, text = _image_token(config), getattr(config, "text_config", None)
    if token is not None and text is not None and getattr(text, "vocab_size", token + 1) <= token:
        text.vocab_size = token + 8


def side(config: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the height and width of the image that a configuration, or one within it, declares."""
    for part in (config, *(value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig))):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, (list, tuple)):
            return int(size[-2]), int(size[-1])
        if isinstance(size, dict):
            return size["height"], size["width"]
    return 224, 224


def _pixels(name: str, model: Any, config: Any) -> dict[str, Any]:  # noqa: ANN401
    taken = inspect.signature(model.forward).parameters
    if "image_grid_thw" in taken:
        return _packed(config)
    size = side(config)
    frames = next((count for start, count in CLIPS.items() if name.startswith(start)), 0)
    tiles = next((count for start, count in TILES.items() if name.startswith(start)), 0)
    inputs: dict[str, Any] = {}
    if "pixel_values" in taken:
        inputs["pixel_values"] = _random(BATCH, *([frames or tiles] if frames or tiles else []), 3, *size)
    elif "pixel_values_videos" in taken:
        frames = getattr(config, "frames_per_clip", getattr(config, "num_frames", 8))
        inputs["pixel_values_videos"] = _random(BATCH, frames, 3, *size)
    if "image_sizes" in inspect.signature(getattr(model, "get_image_features", model.forward)).parameters and not name.startswith(
        PLAIN
    ):
        inputs["image_sizes"] = torch.tensor([size] * BATCH)
    if "aspect_ratio_ids" in taken:  # tiles of one image
        inputs["pixel_values"] = _random(BATCH, 1, TILES_OF_MLLAMA, 3, *size)
        inputs["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
        inputs["aspect_ratio_mask"] = torch.ones(BATCH, 1, TILES_OF_MLLAMA, dtype=torch.long)
    if "qformer_input_ids" in taken:
        inputs["qformer_input_ids"] = _some_words(3)
    return inputs


def _packed(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the patches of images in one sequence, and the grid of each image."""
    vision: Any = next((x for x in (getattr(config, key, None) for key in ("vision_config", "vision_tower_config")) if x), config)
    patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1) or 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3) or 3
    rows, columns = PACKED
    patches = _random(rows * columns, channels * frames * patch * patch)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _words(model: Any, config: Any, inputs: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return words, with as many image tokens among them as the model makes of its image."""
    token = _image_token(config)
    batch = 1 if "image_grid_thw" in inputs else len(next(iter(inputs.values()), range(BATCH)))
    count = 0
    if token is not None and hasattr(model, "get_image_features"):
        taken = inspect.signature(model.get_image_features).parameters
        with torch.no_grad():
            count = _rows(model.get_image_features(**{key: value for key, value in inputs.items() if key in taken})) // batch
    words = _some_words(WORDS)[:batch]
    if token is not None and count:
        words = torch.cat([words[:, :2], torch.full((batch, count), token), words[:, 2:]], 1)
    given: dict[str, Any] = {"input_ids": words}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = _some_words(3)[:batch]
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = words.eq(-1 if token is None else token).long()
    return given


def _some_words(count: int) -> Tensor:
    return torch.randint(7, 90, (BATCH, count), generator=torch.Generator().manual_seed(2))


def _rows(features: Any) -> int:  # noqa: ANN401
    """Count the image tokens in the features of a batch."""
    if not isinstance(features, (Tensor, list, tuple)) or hasattr(features, "pooler_output"):
        features = getattr(features, "pooler_output", None)
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(map(_rows, features)) if isinstance(features, (list, tuple)) else 0


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
