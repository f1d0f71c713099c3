"""Inputs that fit a class of transformers: pixels as its image processor gives them, and words with its image tokens among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

BATCH = 2
WORDS = 6
ALONE = "ViTMAE", "Vilt"  # drop patches at random, others in each image of a batch
PACKED = 4, 6  # rows and columns of patches of each image in a packed sequence
PADDING = 8  # patches that fill up the sequence of an image that has fewer than others
CLIPS = {"VideoMAE": 4, "Vivit": 4, "Timesformer": 4, "InstructBlipVideo": 4}  # frames, by beginning of the class's name
TILES = {
    "Idefics": 1,
    "SmolVLM": 1,
    "LlavaNext": 3,
    "LlavaOnevision": 3,
    "Granite4Vision": 3,
    "GraniteDocling": 2,
    "PerceptionLM": 1,
}  # images of each sample
DENSE = (
    "Emu3",
    "VJEPA2",
    "MobileViT",
    "ZoeDepth",
    "Tipsv2Dpt",
    "CHMv2",
    "DetrForSeg",
    "MaskFormer",
    "Mask2Former",
    "OneFormer",
    "Swin2SR",
)  # any size will do
TILES_OF_MLLAMA = 4
WHOLE = 6  # of Mllama, the aspect ratio of two by two tiles
PLAIN = "LlavaForC", "InternVL", "Aya", "Qianfan"  # take `image_sizes` for one of their image towers only
UNFLAT = "PaddleOCR", "Kimi"  # take packed patches as small images
MASKED = "Blip2ForImageText", "Udop"  # need a mask of the words
ANSWERS = "BlipForQuestion"  # need the words of an answer, though they are not marked as encoder and decoder

Given = dict[str, Any]


def inputs_of(name: str, model: Any, config: Any, *, wide: bool = False) -> Given:  # noqa: ANN401
    """Return inputs of a model: pixels, words, and what else its forward requires; images half as wide again as they are high."""
    taken = inspect.signature(model.forward).parameters
    given = _pixels(name, model, config, taken, wide)
    given |= {key: make(config, given) for key, make in WITH_PIXELS.items() if key in taken}
    if name.startswith(ALONE):
        given = {key: value[:1] for key, value in given.items()}
    if name == "VisionEncoderDecoderModel":
        given["decoder_input_ids"] = _some_words(WORDS)
    if "input_ids" in taken:
        given |= _words(name, model, config, given, taken)
    return given | {key: make(config, given) for key, make in WITH_WORDS.items() if key in taken}


def image_token(config: Any) -> int | None:  # noqa: ANN401
    """Return the token that stands for a piece of the image."""
    names = "image_token_id", "image_token_index", "video_token_index"
    return next((x for x in (getattr(config, key, None) for key in names) if isinstance(x, int)), None)


def _side(config: Any) -> tuple[int, int]:  # noqa: ANN401
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


def _of_images(model: Any) -> Callable[..., Any] | None:  # noqa: ANN401
    """Return the method that makes tokens of the pixels, of a model or of the one within it."""
    parts = [part for part in (model, getattr(model, "model", None)) if part is not None]
    found = (getattr(part, name, None) for name in ("get_image_features", "get_video_features") for part in parts)
    return next((method for method in found if method is not None), None)


def _pixels(name: str, model: Any, config: Any, taken: Mapping[str, Any], wide: bool) -> Given:  # noqa: ANN401
    features = inspect.signature(_of_images(model) or model.forward).parameters
    for key, make in BY_PATCHES.items():
        if key in taken or key in features:
            return make(name, config)
    if name.startswith("InklingFor"):  # pieces of an image, each twice as it has no time
        vision = config.vision_config
        return {"pixel_values": _random(PACKED[0] * PACKED[1], vision.temporal_patch_size, *[vision.patch_size] * 2, 3)}
    height, width = _side(config)
    if name.startswith(DENSE):
        height, width = min(height, 128), min(width, 128)
    size = height, width + width // 64 * 32 if wide else width
    frames = next((count for start, count in (CLIPS | TILES).items() if name.startswith(start)), 0)
    given: Given = {}
    if "pixel_values" in taken:
        given["pixel_values"] = _random(BATCH, *([frames] if frames else []), 3, *size)
    elif "pixel_values_videos" in taken:
        clip = config if hasattr(config, "frames_per_clip") or hasattr(config, "num_frames") else _vision(config)
        frames = getattr(clip, "frames_per_clip", getattr(clip, "num_frames", 8))
        given["pixel_values_videos"] = _random(BATCH, frames, 3, *size)
    if "image_sizes" in features and not name.startswith(PLAIN):
        given["image_sizes"] = torch.tensor([size] * BATCH)
    if "aspect_ratio_ids" in taken:  # tiles of one image
        given["pixel_values"] = _random(BATCH, 1, TILES_OF_MLLAMA, 3, *size)
        given["aspect_ratio_ids"] = torch.full((BATCH, 1), WHOLE)
        given["aspect_ratio_mask"] = torch.ones(BATCH, 1, TILES_OF_MLLAMA, dtype=torch.long)
    if "pixel_attention_mask" in taken and name.startswith("GraniteDocling"):
        given["pixel_attention_mask"] = torch.ones(given["pixel_values"].shape[:2], dtype=torch.bool)
    return given


def _vision(config: Any) -> Any:  # noqa: ANN401
    found = (getattr(config, key, None) for key in ("vision_config", "vision_tower_config"))
    return next((part for part in found if part), config)


def _packed(name: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of images in one sequence, and the grid of each image."""
    vision = _vision(config)
    patch = vision.patch_size
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1)) or 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3) or 3
    rows, columns = PACKED
    shape = (channels, patch, patch) if name.startswith(UNFLAT) else (channels * frames * patch * patch,)
    if name.startswith("Inkling2"):  # whose patches are merged already, with the colors last
        side = vision.spatial_merge_size * patch
        shape = (side, side, channels)
    return {"pixel_values": _random(rows * columns, *shape), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _packed_flat(name: str, config: Any) -> Given:  # noqa: ANN401
    """Return packed patches whose grid has no frames."""
    given = _packed(name, config)
    return {"pixel_values": given["pixel_values"], "image_grid_hw": given["image_grid_thw"][:, 1:]}


def _padded(_: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of each image and some of padding, with the mask and the grid of each image."""
    vision, count = _vision(config), PACKED[0] * PACKED[1]
    patches = _random(BATCH, count, 3 * vision.patch_size**2)
    return {
        "pixel_values": torch.cat([patches, patches.new_zeros(BATCH, PADDING, patches.shape[-1])], 1),
        "pixel_attention_mask": torch.cat([torch.ones(BATCH, count), torch.zeros(BATCH, PADDING)], 1).long(),
        "spatial_shapes": torch.tensor([PACKED] * BATCH),
    }


def _positioned(name: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of each image with the column and row of each."""
    vision = _vision(config)
    side = vision.pooling_kernel_size  # of the blocks that become one token
    patch = vision.patch_size * (side if name.startswith("Gemma4Unified") else 1)
    rows, columns = (2 * side, 3 * side) if patch == vision.patch_size else PACKED
    where = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    patches = _random(BATCH, rows * columns, 3 * patch * patch).sigmoid()
    padding = side * side
    return {
        "pixel_values": torch.cat([patches, patches.new_zeros(BATCH, padding, patches.shape[-1])], 1),
        "image_position_ids": torch.cat([where, where.new_full((padding, 2), -1)]).expand(BATCH, -1, -1).clone(),
    }


def _strip(_: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of an image side by side, and its grid."""
    patch, (rows, columns) = _vision(config).patch_size, (4, 8)
    return {
        "pixel_values": _random(1, 3, patch, rows * columns * patch),
        "target_sizes": torch.tensor([[rows, columns]], dtype=torch.int32),
    }


def _pooled(_: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of an image, whole and as two crops side by side, and for each token the patches that it pools."""
    vision = config.vision_config
    rows, columns = (side // vision.patch_size for side in vision.image_size)
    whole, left, right = torch.arange(3 * rows * columns).view(3, rows, columns)
    pooled = [grid.view(rows // 2, 2, -1, 2).transpose(1, 2).reshape(-1, 4) for grid in (whole, torch.cat([left, right], dim=1))]
    return {
        "pixel_values": _random(3, rows * columns, 3 * vision.patch_size**2),
        "image_token_pooling": torch.cat(pooled),
        "image_grids": torch.tensor([[rows // 2, columns // 2, rows // 2, columns]]),
        "image_num_crops": torch.tensor([3]),
    }


def _flattened(_: str, config: Any) -> Given:  # noqa: ANN401
    """Return the patches of each image after the row and column of each, which count from 1, and the mask of the padding."""
    count = PACKED[0] * PACKED[1]
    where = torch.cartesian_prod(*(torch.arange(1, side + 1) for side in PACKED)).float().expand(BATCH, -1, -1)
    patches = torch.cat([where, _random(BATCH, count, config.vision_config.patch_embed_hidden_size)], -1)
    return {
        "flattened_patches": torch.cat([patches, patches.new_zeros(BATCH, PADDING, patches.shape[-1])], 1),
        "attention_mask": torch.cat([torch.ones(BATCH, count), torch.zeros(BATCH, PADDING)], 1),
        "decoder_input_ids": _some_words(WORDS),
    }


def _prompts(_: str, config: Any) -> Given:  # noqa: ANN401
    """Return images, and the image and mask of the example that is put above each."""
    height, width = config.image_size
    kinds = "pixel_values", "prompt_pixel_values", "prompt_masks"
    return {kind: _random(BATCH, 3, height // 2, width, seed=seed) for seed, kind in enumerate(kinds, 1)}


# how pixels are given where the model or its method takes this argument
BY_PATCHES: dict[str, Callable[[str, Any], Given]] = {
    "image_grid_thw": _packed,
    "image_grid_hw": _packed_flat,
    "spatial_shapes": _padded,
    "image_position_ids": _positioned,
    "target_sizes": _strip,
    "image_token_pooling": _pooled,
    "flattened_patches": _flattened,
    "prompt_masks": _prompts,
}


def _boxes(_: Any, given: Given) -> Tensor:  # noqa: ANN401
    """Return the box of each word on the page, in parts of its sides."""
    corner = torch.rand(*given["input_ids"].shape, 2, generator=torch.Generator().manual_seed(3)) * 0.8
    return torch.cat([corner, corner + 0.1], -1)


# what else is required, by name of the argument
WITH_PIXELS: dict[str, Callable[[Any, Given], Any]] = {
    "high_res_pixel_values": lambda config, _: _random(BATCH, 3, *[config.high_res_vision_config.image_size] * 2),
    "image_merge_sizes": lambda _, given: torch.ones(len(given["image_grid_thw"]), dtype=torch.long),
    "qformer_input_ids": lambda *_: _some_words(3),
    "task_inputs": lambda config, _: _some_words(config.task_seq_len),
    "classes_input_ids": lambda *_: _some_words(3).repeat(2, 1),
    "classes_attention_mask": lambda *_: torch.ones(2 * BATCH, 3, dtype=torch.long),
    "classes_structure": lambda *_: torch.full((BATCH,), 2),
    "tasks_input_ids": lambda *_: _some_words(WORDS),
    "tasks_attention_mask": lambda *_: torch.ones(BATCH, WORDS, dtype=torch.long),
}
WITH_WORDS: dict[str, Callable[[Any, Given], Any]] = {
    "bbox": _boxes,
    "cross_attention_mask": lambda _, given: torch.ones(*given["input_ids"].shape, 1, TILES_OF_MLLAMA, dtype=torch.long),
    "image_attention_mask": lambda _, given: torch.ones(*given["input_ids"].shape, 1, dtype=torch.long),
}


def _words(name: str, model: Any, config: Any, given: Given, taken: Mapping[str, Any]) -> Given:  # noqa: ANN401
    """Return words, with as many image tokens among them as the model makes of its image."""
    token, features = image_token(config), _of_images(model)
    shown = len(next(iter(given.values()), range(BATCH)))
    batch = shown if shown == BATCH else 1  # all patches are of one sample where they are packed
    count = 0
    if token is not None and features is not None:
        known = inspect.signature(features).parameters
        with torch.no_grad():
            count = _rows(features(**{key: value for key, value in given.items() if key in known})) // batch
    words = _some_words(WORDS)[:batch]
    if "image_embeds_position_mask" in taken:  # states the places of the image instead of a token
        token, count = IMAGE_TOKEN, config.latent_query_num
    if token is not None and count:
        words = torch.cat([words[:, :2], torch.full((batch, count), token), words[:, 2:]], 1)
    found: Given = {"input_ids": words}
    if name.startswith(MASKED):
        found["attention_mask"] = torch.ones_like(words)
    if "decoder_input_ids" in taken and (model.config.is_encoder_decoder or name.startswith(ANSWERS)):
        found["decoder_input_ids"] = _some_words(3)[:batch]
    placed = words.eq(-1 if token is None else token).long()
    return found | {key: placed for key in ("mm_token_type_ids", "image_embeds_position_mask") if key in taken}


IMAGE_TOKEN = 95  # where a configuration names none


def _rows(features: Any) -> int:  # noqa: ANN401
    """Count the image tokens in the features of a batch."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if type(features) in (list, tuple):
        return sum(map(_rows, features))
    deep = getattr(features, "deepstack_features", None)
    for found in (getattr(features, "pooler_output", None), deep and deep[0][1], getattr(features, "last_hidden_state", None)):
        if found is not None:
            return _rows(found)
    return 0


def _some_words(count: int) -> Tensor:
    return torch.randint(7, 90, (BATCH, count), generator=torch.Generator().manual_seed(2))


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
