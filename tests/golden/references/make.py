"""Generate the golden arrays: outputs of published implementations on small random models.

Run `python -m tests.golden.references.make NAME CHECKOUT`, where CHECKOUT is a git checkout of the reference at the commit in
`REFERENCES`. It writes `NAME.npz` (the arrays), `NAME.json` (their origin and meaning) and, if a test runs the model itself, its weights as
safetensors. The reference's own code runs in double precision on the CPU; none of it is copied here. Besides the toolkit's own
dependencies, the script needs einops, matplotlib, requests, ttach, scikit-learn and open_clip_torch 2.23.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from tests import tiny
from tests.nn.golden import image, maps, waves
from tests.oracles import maps as oracles

HERE = Path(__file__).parent
VIT: dict[str, Any] = {"img_size": [32, 48], "patch_size": 16, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 4}
VIT["mlp_ratio"] = 1.0
VIT_WEIGHTS = "vit.safetensors"
VIT_SETTINGS: dict[str, Any] = {
    "class": "timm.models.vision_transformer.VisionTransformer",
    "arguments": VIT,
    "weights": VIT_WEIGHTS,
    "precision": "weights and pixels are float32 numbers, the forward is float64",
}


class Golden(NamedTuple):
    """Output of one reference: arrays, settings with which a test builds the model, and weights by file name."""

    arrays: dict[str, Any]
    settings: dict[str, Any]
    weights: Mapping[str, dict[str, Tensor]] = types.MappingProxyType({})


class Reference(NamedTuple):
    """A published implementation, a description of its method, and the meaning of each array (by name or pattern)."""

    repository: str
    commit: str
    license: str
    packages: tuple[str, ...]
    make: Callable[[Path], Golden]
    method: str
    arrays: dict[str, str]


# environment of the references


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Make new tensors float64, and keep them on the CPU if a reference moves them to a GPU.

    Do not draw random float32 numbers in this context; they would differ.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """Record every call of a function, with its arguments and its result."""
    calls: list[tuple[Any, Any]] = []
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        calls.append((arguments, result))
        return result

    with mock.patch.object(owner, name, call):
        yield calls


def load(file: Path) -> Any:
    """Import one file of a reference as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Watched(nn.Module):
    """A timm vision transformer that provides attention maps and their gradients under the names that the references use."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit, self.blocks = vit, vit.blocks
        for block in vit.blocks:
            self._watch(block.attn)

    @staticmethod
    def _watch(attention: Any) -> None:
        kept: dict[str, Tensor] = {}

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            kept["map"] = output
            output.register_hook(lambda gradient: kept.update(gradient=gradient))

        attention.fused_attn = False
        attention.attn_drop.register_forward_hook(keep)
        attention.get_attention_map = lambda: kept["map"]
        attention.get_attn_gradients = lambda: kept["gradient"]

    def forward(self, pixels: Tensor, register_hook: bool = True) -> Any:
        return self.vit(pixels)

    def maps(self) -> list[Tensor]:
        """Return the attention `(batch, heads, N, N)` of each block."""
        return [block.attn.get_attention_map().detach() for block in self.blocks]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last backward pass, in the format of `maps`."""
        return [block.attn.get_attn_gradients() for block in self.blocks]


def vit(**options: Any) -> Any:
    """Build the random model with peaked attention, in double precision."""
    assert torch.get_default_dtype() is torch.float32
    return tiny.vit(**VIT | options).double()


def stack(tensors: Iterable[Tensor]) -> Any:
    return np.stack([oracles.array(tensor) for tensor in tensors])


def float32(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.float().contiguous() for name, weight in model.state_dict().items()}


def shapes(model: nn.Module) -> dict[str, str]:
    """Return the shapes of the state dict, in its order."""
    return {name: "x".join(map(str, value.shape)) for name, value in model.state_dict().items()}


def stacked(cases: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack the arrays of all cases by name."""
    rows = list(cases)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


# the references


def vit_explain(checkout: Path) -> Golden:
    rollout: Any = load(checkout / "vit_rollout.py")
    grad_rollout: Any = load(checkout / "vit_grad_rollout.py")
    category, pixels = 2, tiny.pixels(1, (64, 64)).double()
    watched = Watched(vit(img_size=[64, 64]))
    arrays: dict[str, Any] = {}
    with double():
        published = grad_rollout.VITAttentionGradRollout(watched.vit)
        published(pixels, category)
        maps, gradients, collected = watched.maps(), watched.gradients(), published.attention_gradients
        arrays |= {"attention": stack(maps), "gradient": stack(gradients), "collected": stack(collected)}
        rows = mock.patch.object(torch.Tensor, "sum", functools.partialmethod(torch.Tensor.sum, keepdim=True))
        for suffix, normalization in (("", contextlib.nullcontext()), ("_rows", rows)):
            for ratio in (0.0, 0.9):
                with normalization:
                    for fusion in ("mean", "max", "min"):
                        arrays[f"rollout_{fusion}_{ratio}{suffix}"] = rollout.rollout(maps, ratio, fusion)
                    for name, given in (("paired", gradients), ("reversed", gradients[::-1]), ("collected", collected)):
                        arrays[f"grad_rollout_{name}_{ratio}{suffix}"] = grad_rollout.grad_rollout(maps, given, ratio)
    return Golden(arrays, {"grid": [4, 4], "prefix": 1, "category": category})


def mm_explainability(checkout: Path) -> Golden:
    arrays = {f"vit_{name}": array for name, array in _mm_vit(checkout).items()}
    cases = ((0, 1, 0), (5, 3, 3), (10, 4, 1), (1, 0, 2), (4, 0, 0))
    arrays |= {f"detr_{name}": array for name, array in stacked(_mm_detr(checkout, *case) for case in cases).items()}
    arrays |= {f"lxmert_{name}": array for name, array in stacked(_mm_lxmert(checkout, seed) for seed in range(2)).items()}
    settings = {"vit": VIT_SETTINGS, "detr": {"grid": [4, 5], "queries": 6}, "lxmert": {"text tokens": 5, "image tokens": 6}}
    return Golden(arrays, settings, {VIT_WEIGHTS: float32(vit())})


def _mm_vit(checkout: Path) -> dict[str, Any]:
    notebook = json.loads((checkout / "Transformer_MM_explainability_ViT.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    names: dict[str, Any] = {"torch": torch, "np": np}
    exec(next(cell for cell in cells if "def generate_relevance" in cell), names)
    watched, pixels, relevance, gradients = Watched(vit()), tiny.pixels(), [], []
    with double():
        for category in range(VIT["num_classes"]):
            relevance.append(names["generate_relevance"](watched, pixels.double(), category))
            gradients.append(stack(watched.gradients()))
        logits = oracles.array(watched(pixels.double()))
    found = {"pixels": pixels.numpy(), "logits": logits, "attention": stack(watched.maps())}
    return found | {"gradient": np.array(gradients), "relevance": stack(relevance)}


class Detector(nn.Module):
    """A tiny DETR: the reference's transformer between random features and a linear head."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.queries = nn.Parameter(torch.randn(6, 16))
        self.place = nn.Parameter(torch.randn(1, 16, 4, 5))
        self.head = nn.Linear(16, 4 + 1)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        mask = torch.zeros(1, *features.shape[-2:], dtype=torch.bool)
        decoded = self.transformer(features, mask, self.queries, self.place)[0]
        return {"pred_logits": self.head(decoded[-1])}


def _mm_detr(checkout: Path, seed: int, query: int, category: int) -> dict[str, Any]:
    package = types.ModuleType("DETR.models")  # the package's own __init__ needs a torchvision of 2020
    package.__path__ = [str(checkout / "DETR" / "models")]
    sys.modules["DETR.models"] = package
    sys.path.insert(0, str(checkout))
    transformer: Any = importlib.import_module("DETR.models.transformer").Transformer
    module: Any = importlib.import_module("DETR.modules.ExplanationGenerator")
    found: dict[str, Any] = {"case": (seed, query, category)}
    with double(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Detector(transformer(16, 2, 2, 3, 32, return_intermediate_dec=True))
        features = torch.randn(1, 16, 4, 5)
        generator = module.Generator(model)
        explain = functools.partial(generator.generate_ours, features, query, category, use_lrp=False)
        found["relevance_unnormalized"] = oracles.array(explain(normalize_self_attention=False)[0, 0])
        with recorded(torch, "isnan") as calls:
            found["relevance"] = oracles.array(explain()[0, 0])
    encoder, decoder = model.transformer.encoder.layers, model.transformer.decoder.layers
    parts = {"encoder": [layer.self_attn for layer in encoder], "decoder": [layer.self_attn for layer in decoder]}
    for name, attention in (parts | {"cross": [layer.multihead_attn for layer in decoder]}).items():
        found[f"{name}_attention"] = stack(part.get_attn() for part in attention)
        found[f"{name}_gradient"] = stack(part.get_attn_gradients() for part in attention)
    relevance = {"R_ii": generator.R_i_i, "R_qq": generator.R_q_q, "R_qi": generator.R_q_i[0]}
    found |= {name: oracles.array(matrix) for name, matrix in relevance.items()}
    return found | {"nan": [bool(result.any()) for _, result in calls]}


def _mm_lxmert(checkout: Path, seed: int) -> dict[str, Any]:
    module: Any = load(checkout / "lxmert" / "lxmert" / "src" / "ExplanationGenerator.py")
    numbers = torch.Generator().manual_seed(seed)
    layers: dict[str, list[Any]] = {}

    def attention(name: str, queries: int, keys: int) -> Names:
        scores, gradient = torch.randn(2, 1, 2, queries, keys, generator=numbers, dtype=torch.float64)
        weights = scores.softmax(-1)
        layers.setdefault(f"{name}_attention", []).append(oracles.array(weights[0]))
        layers.setdefault(f"{name}_gradient", []).append(oracles.array(gradient[0]))
        return Names(get_attn=lambda: weights, get_attn_gradients=lambda: gradient)

    def crossing() -> Names:
        return Names(
            visual_attention=Names(att=attention("cross_text_image", 5, 6)),
            visual_attention_copy=Names(att=attention("cross_image_text", 6, 5)),
            lang_self_att=Names(self=attention("cross_text", 5, 5)),
            visn_self_att=Names(self=attention("cross_image", 6, 6)),
        )

    encoder = Names(
        layer=[Names(attention=Names(self=attention("text", 5, 5))) for _ in range(2)],
        r_layers=[Names(attention=Names(self=attention("image", 6, 6))) for _ in range(2)],
        x_layers=[crossing() for _ in range(3)],
    )
    model = Names(device="cpu", zero_grad=lambda: None, lxmert=Names(encoder=encoder))
    output = Names(question_answering_score=torch.zeros(1, 3, requires_grad=True))
    generator = module.GeneratorOurs(Names(model=model, text_len=5, image_boxes_len=6, forward=lambda _: output))
    found: dict[str, Any] = {name: np.array(each) for name, each in layers.items()}
    for suffix, normalized in (("", True), ("_unnormalized", False)):
        with double():
            generator.generate_ours(None, 0, use_lrp=False, normalize_self_attention=normalized)
        for name in ("tt", "ti", "ii", "it"):
            found[f"R_{name}{suffix}"] = oracles.array(getattr(generator, f"R_{name[0]}_{name[1]}"))
    assert not any(np.isnan(array).any() for array in found.values())
    return found


def legrad(checkout: Path) -> Golden:
    sys.path.insert(0, str(checkout))
    clip: Any = importlib.import_module("open_clip.model")
    wrapper: Any = importlib.import_module("legrad.wrapper")
    vision = {"layers": 4, "width": 16, "head_width": 8, "mlp_ratio": 2.0, "patch_size": 4, "image_size": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        words = clip.CLIPTextCfg(context_length=4, vocab_size=8, width=16, heads=2, layers=1)
        model = clip.CLIP(16, clip.CLIPVisionCfg(**vision), words).eval()
        with torch.no_grad():
            for name, parameter in model.visual.named_parameters():
                if name.endswith("in_proj_weight"):
                    parameter.copy_(torch.randn(parameter.shape) * 0.5)
        pixels, texts = torch.randn(1, 3, 16, 16), nn.functional.normalize(torch.randn(2, 16).double(), dim=-1)
    weights = {"legrad.safetensors": float32(model.visual)}
    found: list[dict[str, Any]] = []
    for text in texts:
        row: dict[str, Any] = {}
        for start in (-2, 0):
            wrapped = wrapper.LeWrapper(model.double(), layer_index=start)
            with double(), recorded(wrapper, "min_max") as scaled, recorded(torch.autograd, "grad") as calls:
                heat = wrapped.compute_legrad_clip(text[None], pixels.double())
            row |= {f"raw_{start}": oracles.array(scaled[0][0][0][0, 0]), f"heat_{start}": oracles.array(heat[0, 0])}
        row |= {"score": stack(given[0] for given, _ in calls), "gradient": stack(result[0] for _, result in calls)}
        attention = stack(given[1][0] for given, _ in calls)
        found.append(row)
    arrays = stacked(found) | {"attention": attention, "pixels": pixels.numpy(), "texts": oracles.array(texts)}
    settings = {
        "class": "open_clip.model.CLIP, of which the visual tower is kept; the names of the weights are without 'visual.'",
        "arguments": {"embed_dim": 16, "vision_cfg": vision},
        "weights": "legrad.safetensors",
        "the same in timm": "VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=4, num_heads=2, mlp_ratio=2, pre_norm=True, "
        "norm_layer=LayerNorm with eps 1e-5, num_classes=16) with the weights as its checkpoint_filter_fn converts them",
        "grid": [4, 4],
        "prefix": 1,
    }
    return Golden(arrays, settings, weights)


def transition_attention_maps(checkout: Path) -> Golden:
    sys.path.insert(0, str(checkout))
    transformer: Any = importlib.import_module("baselines.ViT.ViT_new").VisionTransformer
    methods: Any = load(checkout / "baselines" / "ViT" / "interpret_methods.py")
    same, pixels, classes, steps = vit(), tiny.pixels(2), [1, 3], 20
    with double():
        model = transformer(**VIT, qkv_bias=True, norm_layer=functools.partial(nn.LayerNorm, eps=1e-6))
        model.load_state_dict(same.state_dict())
        logits = model(pixels.double())
        assert torch.allclose(logits, same(pixels.double()), rtol=0, atol=1e-12), "the reference's model is not timm's"
        maps = [block.attn.get_attention_map() for block in model.blocks]
        interpreter = methods.InterpretTransformer(model)
        tam = functools.partial(interpreter.transition_attention_maps, pixels.double(), classes, steps=steps)
        with recorded(model.blocks[-1].attn, "save_attn_gradients") as calls:
            found = {"tam_0": tam(start_layer=0)}
        found |= {"tam_1": tam(start_layer=1), "tam_0_gradient": tam(start_layer=0, with_integral=False)}
        found |= {"tam_0_last": tam(start_layer=0, first_state=True)}
    arrays = {name: oracles.array(value) for name, value in found.items()}
    arrays |= {"pixels": pixels.numpy(), "logits": oracles.array(logits), "attention": stack(maps)}
    arrays["gradient"] = stack(given[0][:, :, 0] for given, _ in calls[1:])
    assert len(arrays["gradient"]) == steps
    return Golden(arrays, {"vit": VIT_SETTINGS, "classes": classes, "steps": steps}, {VIT_WEIGHTS: float32(same)})


def grad_cam(checkout: Path) -> Golden:
    sys.path.insert(0, str(checkout))
    package: Any = importlib.import_module("pytorch_grad_cam")
    target: Any = importlib.import_module("pytorch_grad_cam.utils.model_targets").ClassifierOutputTarget
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU())
        cnn = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        resnet = torchvision.models.resnet18(num_classes=4)
    transformer = vit()

    def patches(tokens: Any) -> Any:
        """Return the patch tokens on their grid, channels first."""
        return tokens[:, 1:].unflatten(1, (2, 3)).movedim(-1, 1)

    arrays: dict[str, Any] = {}
    for name, model, layer, transform, pixels, classes in (
        ("vit", transformer, transformer.blocks[-1].norm1, patches, tiny.pixels(2), [1, 3]),
        ("resnet18", resnet.double(), resnet.layer4, None, tiny.pixels(1, (64, 96)), [2]),
        ("cnn", cnn.double(), cnn[1], None, tiny.pixels(2, (18, 26)), [0, 2]),
    ):
        for method in ("GradCAM", "HiResCAM", "LayerCAM", "XGradCAM", "GradCAMPlusPlus"):
            with double(), getattr(package, method)(model, [layer], transform) as cam, recorded(cam, "get_cam_image") as calls:
                cam(pixels.double(), [target(category) for category in classes])
            (_, _, _, activation, gradient, *_), arrays[f"{name}_{method}"] = calls[0]
        arrays |= {f"{name}_activation": activation, f"{name}_gradient": gradient}
        if name != "resnet18":
            arrays |= {f"{name}_pixels": pixels.numpy(), f"{name}_logits": oracles.array(model(pixels.double()))}
    settings = {
        "vit": VIT_SETTINGS | {"layer": "blocks[-1].norm1, the patch tokens on their grid", "classes": [1, 3]},
        "resnet18": {"class": "torchvision.models.resnet18, random", "layer": "layer4", "classes": [2]},
        "cnn": {
            "class": "Sequential: " + ", ".join(map(str, cnn)),
            "weights": "cnn.safetensors",
            "layer": "[1]",
            "classes": [0, 2],
        },
    }
    return Golden(arrays, settings, {VIT_WEIGHTS: float32(transformer), "cnn.safetensors": float32(cnn)})


def dino(checkout: Path) -> Golden:
    sys.path.insert(0, str(checkout))
    module: Any = importlib.import_module("vision_transformer")
    arguments: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "qkv_bias": True}
    height, width, patch = 32, 48, 8

    def build(patch_size: int, num_classes: int) -> Any:
        options = arguments | {"norm_layer": functools.partial(nn.LayerNorm, eps=1e-6), "img_size": [48]}
        return module.VisionTransformer(patch_size=patch_size, num_classes=num_classes, **options)

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        random = build(patch, 0)
        with torch.no_grad():
            for name, parameter in random.named_parameters():
                if name.endswith(("qkv.weight", "cls_token", "pos_embed")):
                    parameter.copy_(torch.randn(parameter.shape) * (0.15 if "qkv" in name else 1))
        weights, photo, script = Path(folder) / "weights.pth", Path(folder) / "photo.png", checkout / "visualize_attention.py"
        torch.save(random.state_dict(), weights)
        Image.fromarray(torch.randint(256, (height, width, 3), dtype=torch.uint8).numpy()).save(photo)
        options = f"--arch vit_tiny --patch_size {patch} --threshold 0.6 --image_size {height} {width} --output_dir {folder}"
        given = [str(script), *options.split(), "--pretrained_weights", str(weights), "--image_path", str(photo)]
        with double(), mock.patch.object(module, "vit_tiny", build), mock.patch.object(sys, "argv", given):
            ran = runpy.run_path(str(script), run_name="__main__")
            model, pixels = ran["model"], ran["img"]
            attention = model.get_last_selfattention(pixels)[0]
            place = model.interpolate_pos_encoding(torch.zeros(1, 1 + 4 * 6, 32), height, width)
    arrays = {"pixels": oracles.array(pixels), "attention": oracles.array(attention)}
    arrays |= {"heads": ran["attentions"][:, ::patch, ::patch], "masks": ran["th_attn"][:, ::patch, ::patch] > 0}
    settings = {
        "class": "timm.models.vision_transformer.VisionTransformer",
        "arguments": arguments | {"img_size": [height, width], "patch_size": patch, "num_classes": 0},
        "weights": "dino.safetensors; pos_embed as the reference interpolates it to this input's 4 x 6 grid, in float64",
    }
    return Golden(arrays, settings, {"dino.safetensors": float32(model) | {"pos_embed": place}})


def transformer_explainability(checkout: Path) -> Golden:
    module: Any = load(checkout / "baselines" / "ViT" / "ViT_explanation_generator.py")
    watched, pixels = Watched(vit()), tiny.pixels(2).double()
    with double():
        rollout = functools.partial(module.Baselines(watched).generate_rollout, pixels)
        arrays = {f"rollout_{start}": oracles.array(rollout(start_layer=start)) for start in (0, 1)}
    return Golden(arrays | {"attention": stack(watched.maps())}, {"grid": [2, 3], "prefix": 1})


def attention_module(checkout: Path) -> Golden:
    sys.path.insert(0, str(checkout))
    models = {name: importlib.import_module(f"MODELS.{name}") for name in ("bam", "cbam", "model_resnet")}
    vars(models["bam"])["gate_activation"] = None  # the module reads this name but never sets it
    networks: Any = models["model_resnet"]
    arrays: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name in ("CBAM", "BAM"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated names in torch
            parts = {
                name.lower(): getattr(models[name.lower()], name)(32),
                f"resnet18_{name.lower()}": networks.ResidualNet("ImageNet", 18, 5, name),
            }
            for key, module in parts.items():
                module.load_state_dict(waves(module.state_dict()))
                x = maps(5) if key == name.lower() else image(224)
                with torch.no_grad():
                    arrays[key] = oracles.array(module.double().eval()(x))
                tensors[key] = shapes(module)
    return Golden(arrays, {"tensors": tensors})


def senet(checkout: Path) -> Golden:
    module = load(checkout / "senet" / "se_module.py").SELayer(32)
    module.load_state_dict(waves(module.state_dict()))
    with torch.no_grad():
        output = module.double().eval()(maps())
    return Golden({"se": oracles.array(output)}, {"tensors": {"se": shapes(module)}})


_LAYERS = "(cases, layers, heads, queries, keys)"
REFERENCES = {
    "vit_explain": Reference(
        "jacobgil/vit-explain",
        "15a81d355a5aa6128ea4e71bbd56c28888d0f33b",
        "MIT",
        (),
        vit_explain,
        "Per layer: fuse the heads; set the int(N * N * ratio) lowest entries of the fused matrix to 0 (rollout spares entry [0, 0], "
        "grad_rollout does not); a = (fused + I) / 2; divide COLUMN j by the sum of row j, because the sum loses its dimension; "
        "multiply from the left onto the product so far, which begins as I. The class row without its first entry, divided by its "
        "maximum. grad_rollout fuses by the mean over heads of attention * gradient, negative means set to 0. One image, square grid.",
        {
            "attention": "(layers, batch, heads, N, N), first block first; a class token and 4 x 4 patches",
            "gradient": "of the category's logit with respect to `attention`, first block first",
            "collected": "what the published class VITAttentionGradRollout takes for the gradients, in its order, last block first: "
            "in evaluation mode they are gradients with respect to the scores before the softmax, not to the attention",
            "grad_rollout_*_rows": "as the name without _rows, with every row divided by its own sum (the sum keeps its dimension)",
            "rollout_*_rows": "as the name without _rows, with every row divided by its own sum (the sum keeps its dimension)",
            "rollout_*": "rollout(attention, discard_ratio, head_fusion) of that fusion and ratio: (4, 4)",
            "grad_rollout_paired_*": "grad_rollout(attention, `gradient`, discard_ratio), each block with its own: (4, 4)",
            "grad_rollout_reversed_*": "grad_rollout(attention, `gradient` last block first, discard_ratio), the published pairing: (4, 4)",
            "grad_rollout_collected_*": "grad_rollout(attention, `collected`, discard_ratio), what the published class returns: (4, 4)",
        },
    ),
    "mm_explainability": Reference(
        "hila-chefer/Transformer-MM-Explainability",
        "58eaea85ac9c34aff052f368514b35d2e4c8dd3c",
        "MIT",
        (),
        mm_explainability,
        "C is the mean over heads of max(gradient * attention, 0); nothing is scaled at the end. ViT: R = I; first block first "
        "R = R + C R; the class row without its first entry. DETR, use_lrp=False: R_ii over the encoder likewise; R_qq = I, R_qi = 0; per "
        "decoder layer, both from the state before, R_qq += C_qq R_qq and R_qi += C_qq R_qi; then R_qi += norm(R_qq)^T C_qi norm(R_ii), "
        "where norm(R) divides each row of R - I by its sum and adds I. NaN in the summand is set to 0: one row of R_qq - I or of "
        "R_ii - I without relevance drops the layer's whole summand. LXMERT, use_lrp=False: first the language layers (R_tt += C R_tt, "
        "R_ti += C R_ti), then the object layers (R_ii, R_it likewise); per cross layer four summands from the state before: "
        "R_ti += norm(R_tt)^T C_ti norm(R_ii), R_tt += C_ti R_it, R_it += norm(R_ii)^T C_it norm(R_tt), R_ii += C_it R_ti; then "
        "self-attention of text, then of image. The last cross layer has its text half only. NaN stays. At the end R_tt[0, 0] = 0.",
        {
            "vit_pixels": "the input (1, 3, 32, 48)",
            "vit_logits": "the model's output (1, classes)",
            "vit_attention": "(layers, 1, heads, N, N)",
            "vit_gradient": "of each logit with respect to the attention: (classes, layers, 1, heads, N, N)",
            "vit_relevance": "generate_relevance of each class: (classes, patches)",
            "detr_case": "seed, object query, class of each case: (cases, 3)",
            "detr_nan": "whether NaN occurred in each decoder layer, whose cross-attention is dropped then: (cases, decoder layers)",
            "detr_encoder_attention": f"self-attention of the 4 x 5 image tokens: {_LAYERS}",
            "detr_decoder_attention": f"self-attention of the 6 object queries: {_LAYERS}",
            "detr_cross_attention": f"attention of the object queries to the image tokens: {_LAYERS}",
            "detr_*_gradient": f"of the case's logit, of that query and class, with respect to that attention: {_LAYERS}",
            "detr_R_ii": "image to image relevance after the encoder: (cases, 20, 20)",
            "detr_R_qq": "query to query relevance at the end: (cases, 6, 6)",
            "detr_R_qi": "relevance of image tokens to queries at the end: (cases, 6, 20)",
            "detr_relevance": "generate_ours(use_lrp=False), the query's row of R_qi: (cases, 20)",
            "detr_relevance_unnormalized": "the same with normalize_self_attention=False",
            "lxmert_text_attention": f"random self-attention in the language layers: {_LAYERS}",
            "lxmert_image_attention": f"random self-attention in the object layers: {_LAYERS}",
            "lxmert_cross_text_image_attention": f"cross layers, text attends to image: {_LAYERS}",
            "lxmert_cross_image_text_attention": f"cross layers, image attends to text; the last layer's is not read: {_LAYERS}",
            "lxmert_cross_text_attention": f"cross layers, self-attention of text after the cross-attention: {_LAYERS}",
            "lxmert_cross_image_attention": f"cross layers, self-attention of image after it; the last layer's is not read: {_LAYERS}",
            "lxmert_*_gradient": f"random numbers instead of the gradient with respect to that attention: {_LAYERS}",
            "lxmert_R_*_unnormalized": "as the name without _unnormalized, with normalize_self_attention=False",
            "lxmert_R_*": "relevance at the end, t text, i image, explained tokens first: (cases, rows, columns); NaN nowhere",
        },
    ),
    "legrad": Reference(
        "WalBouss/LeGrad",
        "a9edb031422d5f5829d9e6238a1e21feb1972c92",
        "MIT",
        ("open_clip_torch", "einops"),
        legrad,
        "Per layer from layer_index on: the block's output is averaged over ALL tokens, class token included, then last layer norm, "
        "projection, division by its length; its product with the text embedding is the layer's score, without a temperature. The "
        "gradient of the score with respect to the same layer's attention weights, negative entries set to 0, is averaged over heads, "
        "then over all query rows, class row included; the class column is left out. Each map is upsampled bilinearly "
        "(align_corners=False) by the patch size; the layers are summed; each text's map is scaled by its minimum and maximum.",
        {
            "pixels": "the input (1, 3, 16, 16)",
            "texts": "text embeddings of length 1: (texts, 16)",
            "attention": "of the image: (layers, heads, N, N); a class token and 4 x 4 patches",
            "score": "each layer's own score: (texts, layers)",
            "gradient": "of each layer's own score with respect to its attention, with its negative entries: (texts, layers, heads, N, N)",
            "raw_0": "layer_index=0, the sum over layers before the scaling: (texts, 16, 16)",
            "heat_0": "layer_index=0, what compute_legrad_clip returns: (texts, 16, 16)",
            "raw_-2": "layer_index=-2 (the default: the last two layers), the sum over layers before the scaling: (texts, 16, 16)",
            "heat_-2": "layer_index=-2 (the default: the last two layers), what compute_legrad_clip returns: (texts, 16, 16)",
        },
    ),
    "transition_attention_maps": Reference(
        "XianrenYty/Transition_Attention_Maps",
        "8329327179f6dcf76df29e03ae519cd594595678",
        "Apache-2.0",
        ("einops",),
        transition_attention_maps,
        "With A the mean over heads of a block's attention: s is the class row of the last block's A; for the blocks before it down to "
        "start_layer, s = s A + s. w is the mean over heads of max(G, 0) in the class row, where G sums the gradients of the class logit "
        "with respect to the last block's attention at the input times 0, 1/19, ..., 1, and divides by 20 (with_integral=False: the "
        "gradient at the whole input). The map is s * w without the class token; nothing is scaled. first_state=True: s is the class "
        "row alone.",
        {
            "pixels": "the input (batch, 3, 32, 48)",
            "logits": "the model's output (batch, classes)",
            "attention": "(layers, batch, heads, N, N)",
            "gradient": "the class row of the gradient with respect to the last block's attention at each step: (steps, batch, heads, N)",
            "tam_0": "transition_attention_maps(start_layer=0, steps=20): (batch, patches)",
            "tam_1": "transition_attention_maps(start_layer=1, steps=20): (batch, patches)",
            "tam_0_gradient": "start_layer=0, with_integral=False: (batch, patches)",
            "tam_0_last": "start_layer=0, steps=20, first_state=True: (batch, patches)",
        },
    ),
    "grad_cam": Reference(
        "jacobgil/pytorch-grad-cam",
        "084273b3f30b54ad0c64cf8020a4337d979a66e0",
        "MIT",
        ("torchvision", "ttach", "scikit-learn"),
        grad_cam,
        "a is the activation, g the gradient of the class logit; the map is the sum over channels of weight * a. GradCAM: weight is the "
        "mean of g over positions. HiResCAM: g. LayerCAM: max(g, 0). XGradCAM: the sum over positions of g * a / (sum of a + 1e-7). "
        "GradCAM++: the sum over positions of max(g, 0) * g^2 / (2 g^2 + (sum of a) g^3 + 1e-6), 0 where g is 0. In a transformer the "
        "positions are the patch tokens alone. What follows is not in these arrays: negative values to 0, minimum to 0, maximum to 1, "
        "resizing.",
        {
            "*_pixels": "the input (batch, 3, height, width)",
            "*_logits": "the model's output (batch, classes)",
            "*_activation": "the layer's output: (batch, channels, rows, columns)",
            "*_gradient": "of the image's class logit with respect to the layer's output: (batch, channels, rows, columns)",
            "*": "what get_cam_image of that class returns, signed and not scaled: (batch, rows, columns)",
        },
    ),
    "dino": Reference(
        "facebookresearch/dino",
        "7c446df5b9f45747937fb0d72314eb9f7b66930a",
        "Apache-2.0",
        ("torchvision",),
        dino,
        "The class row of the last block's attention without its first entry, per head, not scaled. Mask: the row is sorted, smallest "
        "first, and divided by its sum; a patch is kept where the cumulative sum up to and including it exceeds 1 - 0.6.",
        {
            "pixels": "the input (1, 3, 32, 48), as the script normalized it",
            "attention": "of the last block: (heads, N, N); a class token and 4 x 6 patches",
            "heads": "the script's maps before nearest upsampling: (heads, 4, 6)",
            "masks": "the script's masks at --threshold 0.6, before nearest upsampling: (heads, 4, 6)",
        },
    ),
    "transformer_explainability": Reference(
        "hila-chefer/Transformer-Explainability",
        "c3e578f76b954e8528afeaaee26de3f07e3fe559",
        "MIT",
        (),
        transformer_explainability,
        "A is the mean over heads; each row of A + I is divided by its sum; the product of the blocks from start_layer on, later blocks "
        "on the left; the class row without its first entry, not scaled.",
        {
            "attention": "(layers, batch, heads, N, N)",
            "rollout_0": "generate_rollout(start_layer=0): (batch, patches)",
            "rollout_1": "generate_rollout(start_layer=1): (batch, patches)",
        },
    ),
    "attention_module": Reference(
        "Jongchan/attention-module",
        "459efad0e05ee7dde50c41ca10a3d0800bc3792a",
        "MIT",
        (),
        attention_module,
        "CBAM(32) and BAM(32), and ResNet-18 with either in evaluation mode, float64, with the numbers of tests.nn.golden.waves in their "
        "state dicts; given maps(5) and image(224) of the same file. bam.py reads a name gate_activation that it nowhere sets; it is set "
        "to None.",
        {
            "cbam": "what CBAM gives: (2, 32, 5, 5)",
            "bam": "what BAM gives: (2, 32, 5, 5)",
            "resnet18_*": "ResidualNet('ImageNet', 18, 5, ...): class scores (1, 5)",
        },
    ),
    "senet": Reference(
        "moskomule/senet.pytorch",
        "8cb2669fec6fa344481726f9199aa611f08c3fbd",
        "MIT",
        (),
        senet,
        "SELayer(32) in evaluation mode, float64, with the numbers of tests.nn.golden.waves in its state dict, given maps() of that file.",
        {"se": "what it gives: (2, 32, 5, 7)"},
    ),
}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout without modified files; files may be missing."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True).stdout.strip()

    assert not git("diff", "--name-only", "--no-renames", "--diff-filter=AMT", "HEAD"), f"{checkout} has changes"
    return git("rev-parse", "HEAD")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.references.make")
    parser.add_argument("name", choices=REFERENCES)
    parser.add_argument("checkout", type=Path)
    given = parser.parse_args()
    reference = REFERENCES[given.name]
    found = commit(given.checkout)
    assert found == reference.commit, f"{given.checkout} is at {found}, not {reference.commit}"
    golden = reference.make(given.checkout.resolve())
    packages = ("torch", "timm", "numpy", *reference.packages)
    about = {
        "repository": reference.repository,
        "commit": reference.commit,
        "license": reference.license,
        "versions": {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        "command": f"python -m tests.golden.references.make {given.name} CHECKOUT",
        "method": reference.method,
        "settings": golden.settings,
        "arrays": {
            name: next(words for pattern, words in reference.arrays.items() if fnmatch.fnmatchcase(name, pattern))
            for name in sorted(golden.arrays)
        },
    }
    np.savez_compressed(HERE / f"{given.name}.npz", **{name: golden.arrays[name] for name in sorted(golden.arrays)})
    (HERE / f"{given.name}.json").write_text(json.dumps(about, indent=1) + "\n")
    for name, weights in golden.weights.items():
        (HERE / name).write_bytes(safetensors.torch.save(weights))


if __name__ == "__main__":
    main()
