"""Prompts as targets: relevance of an image tower against dense attention and autograd, and the models that take none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

import visattn
from visattn.errors import OptionError

WORDS = ["[UNK]", "[PAD]", "<s>", "</s>", "a", "dog", "cat", "of", "photo"]
TOWER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def saved(folder: Path, attention: str = "sdpa") -> Any:
    """Save a small CLIP with its tokenizer and image processor, and load it."""
    if not folder.exists():
        config = transformers.CLIPConfig(
            text_config={**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": 3},
            vision_config={**TOWER, "image_size": 32, "patch_size": 8},
            projection_dim=16,
        )
        torch.manual_seed(0)
        model: Any = transformers.CLIPModel(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj.weight" in name or "k_proj.weight" in name:
                    parameter *= 20  # attention that is far from uniform
        model.save_pretrained(folder)
        known = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        known.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
        )
        fast: Any = transformers.PreTrainedTokenizerFast
        fast(tokenizer_object=known, pad_token="[PAD]").save_pretrained(folder)
        size = {"height": 32, "width": 32}
        transformers.CLIPImageProcessor(size=size, do_center_crop=False).save_pretrained(folder)
    loaded: Any = transformers.CLIPModel.from_pretrained(folder, attn_implementation=attention)
    return loaded.eval()


def by_autograd(model: Any, pixels: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """Compute the relevance of the patches with dense attention matrices and loops."""
    out = model(pixel_values=pixels, **tokens, output_attentions=True)
    logits = out.logits_per_image
    score = logits[0, 0] - logits[0, 1] if logits.shape[1] > 1 else logits[0, 0]
    layers = out.vision_model_output.attentions
    gradients = torch.autograd.grad(score, layers)
    count = layers[0].shape[-1]
    total = torch.eye(count)
    for weights, gradient in zip(layers, gradients, strict=True):
        each = torch.zeros(count, count)
        for head in range(weights.shape[1]):
            each += (weights[0, head] * gradient[0, head]).clamp(min=0) / weights.shape[1]
        total = total + each.detach() @ total
    return total[0, 1:]


@pytest.mark.parametrize("versus", [None, "a photo of a cat"])
def test_relevance_of_a_prompt_equals_autograd_through_dense_attention(versus: str | None, tmp_path: Path) -> None:
    model = saved(tmp_path / "clip")
    seen = visattn.explain(model, "photo:chelsea", method="relevance", prompt="a dog", versus=versus)
    dense = saved(tmp_path / "clip", "eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "clip")
    tokens = tokenizer([text for text in ("a dog", versus) if text], padding=True, return_tensors="pt")
    pixels = visattn.prepare("photo:chelsea", model).pixels
    expected = by_autograd(dense, pixels, {name: tokens[name] for name in ("input_ids", "attention_mask")})
    assert float(expected.max()) > 0
    assert torch.allclose(seen.map.values.flatten(), expected, atol=1e-5 * float(expected.max()))
    named = "similarity to 'a dog'" + (" versus 'a photo of a cat'" if versus else "")
    assert seen.provenance.target == (named,)


def test_prompt_of_a_loaded_folder(tmp_path: Path) -> None:
    saved(tmp_path / "clip")
    model = visattn.load_model(f"hf:{tmp_path / 'clip'}")
    seen = visattn.explain(model, "photo:chelsea", prompt="a dog")
    assert seen.provenance.method == "relevance"


def test_words_may_be_given_with_the_pixels(tmp_path: Path) -> None:
    model = saved(tmp_path / "clip")
    photo = visattn.load_image("photo:chelsea")
    pixels = visattn.prepare(photo, model).pixels
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "clip")(["a dog"], return_tensors="pt")
    inputs = {"pixel_values": pixels, "input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}
    similarity = lambda out: out.logits_per_image[:, 0]  # noqa: E731
    seen = visattn.explain(model, photo, inputs=inputs, method="relevance", target=similarity)
    same = visattn.explain(model, photo, method="relevance", prompt="a dog")
    assert torch.allclose(seen.map.values, same.map.values, rtol=1e-4)
    assert seen.geometry == same.geometry
    with pytest.raises(OptionError, match="must show just what the image shows"):
        visattn.explain(model, "photo:coffee", inputs=inputs, method="relevance", target=similarity)


def test_model_of_images_and_words_says_that_it_reads_words(tmp_path: Path) -> None:
    with pytest.raises(visattn.errors.ModelError, match=r"also reads words\. Pass them: inputs=processor"):
        visattn.explain(saved(tmp_path / "clip"), "photo:chelsea")


def test_open_clip_compares_with_its_own_similarity() -> None:
    torch.manual_seed(0)
    model: Any = open_clip.create_model("ViT-S-32-alt", pretrained=None, output_dict=True).eval()
    seen = visattn.explain(model, "photo:chelsea", method="relevance", prompt="a dog", versus="a cat")
    texts = open_clip.get_tokenizer("ViT-S-32-alt")(["a dog", "a cat"])

    def difference(out: Any) -> Tensor:
        logits: Tensor = out["logit_scale"] * out["image_features"] @ model.encode_text(texts, normalize=True).T
        return logits[:, 0] - logits[:, 1]

    by_hand = visattn.explain(model, "photo:chelsea", method="relevance", target=difference)
    assert float(seen.map.values.max()) > 0
    assert torch.allclose(seen.map.values, by_hand.map.values, rtol=1e-3)


def test_model_without_a_text_tower_takes_no_prompt() -> None:
    model = visattn.load_model("vit_tiny_patch16_224", weights="none")
    with pytest.raises(OptionError, match="has no text tower, so a prompt cannot be its target"):
        visattn.explain(model, "photo:chelsea", prompt="a dog")


@pytest.mark.parametrize("options", [{"target": 3}, {"target_space": "prob"}, {"versus": 3}])
def test_prompt_excludes_a_class(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="prompt is the target, and versus another text"):
        visattn.explain("vit_tiny_patch16_224", "photo:chelsea", weights="none", prompt="a dog", **options)
