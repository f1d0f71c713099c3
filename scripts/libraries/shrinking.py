"""Tiny configurations of transformers' classes: few layers, narrow language models, small images."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

LAYERS = 2
QUERIES = 100
_DEPTH = """
    num_hidden_layers num_layers encoder_layers decoder_layers depth n_layer n_layers num_self_attends_per_block resampler_depth
    num_spatial_layers num_temporal_layers decoder_num_hidden_layers num_auxiliary_layers
"""
_BY_LAYER = "layer_types mlp_layer_types layers_block_type no_rope_layers indexer_types"
_WIDE = 512  # width from which a language model is narrowed
_NARROW = {
    "hidden_size": 64, "d_model": 64, "word_embed_proj_dim": 64, "intermediate_size": 128, "ffn_dim": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def shrunk(config: Any) -> Any:  # noqa: ANN401 - any configuration of transformers
    """Shrink a configuration and those within it, in place; return it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrunk(value)
        elif isinstance(value, bool) or (name == "num_layers" and hasattr(config, "depths")):  # counts the stages
            continue
        elif name in _DEPTH.split() and isinstance(value, int) and value > LAYERS:
            setattr(config, name, LAYERS)
        elif name in _BY_LAYER.split() and isinstance(value, (list, tuple)) and len(value) > LAYERS:
            setattr(config, name, list(value)[-LAYERS:])
        elif name == "depths":
            setattr(config, name, [min(depth, LAYERS) for depth in value])
        elif name == "num_queries" and isinstance(value, int):
            config.num_queries = min(value, QUERIES)
        elif name == "num_kv_shared_layers":
            config.num_kv_shared_layers = 0
        elif name == "image_size" and isinstance(value, int) and value >= 384:
            patch = getattr(config, "patch_size", 16)
            patch = patch if isinstance(patch, int) else 16
            config.image_size = 16 * max(patch, 16) if patch <= 32 else value
        elif name == "image_size" and isinstance(value, (list, tuple)) and min(value) >= 384:
            config.image_size = [16 * 14] * len(value)
    _stages(config)
    if getattr(config, "vocab_size", 0) and (getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0) or 0) >= _WIDE:
        _narrow(config)
    text: Any
    vision: Any
    latents: Any
    text, vision, latents = (getattr(config, name, None) for name in ("text_config", "vision_config", "perceiver_config"))
    if text is not None and vision is not None and isinstance(getattr(vision, "out_hidden_size", None), int):
        vision.out_hidden_size = text.hidden_size
    if text is not None and hasattr(latents, "hidden_size"):
        latents.hidden_size = text.hidden_size
    return config


def _stages(config: Any) -> None:  # noqa: ANN401
    """Give a plain backbone, whose features are read after several layers, as many layers as are read."""
    if not isinstance(getattr(config, "num_hidden_layers", None), int) or hasattr(config, "depths"):
        return
    read = list(getattr(config, "_out_indices", None) or [])
    if len(read) > 1:
        config.num_hidden_layers = len(read)
        config.stage_names = ["stem", *(f"stage{i + 1}" for i in range(len(read)))]
        config._out_indices, config._out_features = list(range(1, len(read) + 1)), config.stage_names[1:]
    read = list(getattr(config, "backbone_out_indices", None) or [])
    if len(read) > 1:
        config.num_hidden_layers, config.backbone_out_indices = len(read), list(range(len(read)))


def _narrow(config: Any) -> None:  # noqa: ANN401
    known = vars(config)  # settings of each layer cannot be read as attributes
    shared = (known.get("num_key_value_heads") or 0) < (known.get("num_attention_heads") or 0)
    for name, value in _NARROW.items():
        if type(known.get(name)) is int:
            setattr(config, name, value if name != "num_key_value_heads" or shared else _NARROW["num_attention_heads"])
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in {*rope, *getattr(config, "ignore_keys_at_rope_validation", ())}:
        half = int(_NARROW["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]


def change(config: Any, path: str, value: Any) -> None:  # noqa: ANN401
    """Set an attribute of a configuration or of one within it, `vision_config.image_size`."""
    *inner, name = path.split(".")
    for part in inner:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)
