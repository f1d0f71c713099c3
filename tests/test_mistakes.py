"""Typical calls and command lines: what is meant is understood, and mistakes and words of other libraries get one line with the fix.

Each row is a call or a command line, and a pattern of the note or of the error. Networks are the shipped ones, so nothing is downloaded.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import visattn
from visattn.cli.commands import main
from visattn.errors import VisattnError, VisattnNote


@cache
def vit() -> nn.Module:
    return visattn.load_model("scenes_vit")


@cache
def cnn() -> nn.Module:
    return visattn.load_model("scenes_cnn")


@cache
def found() -> visattn.Explanation:
    return visattn.explain(vit(), "scene:7", method="attention")


def explain(model: Callable[[], Any] = vit, image: Any = "scene:7", **options: Any) -> visattn.Explanation:
    explanation: visattn.Explanation = visattn.explain(model(), image, **options)
    return explanation


def facts(**options: Any) -> Any:
    return explain(**options).provenance


def scene() -> np.ndarray[Any, Any]:
    return np.asarray(visattn.load_image("scene:7"))


@cache
def _recording() -> visattn.Recording:
    model = vit()
    with visattn.capture(model) as recording:
        model(visattn.prepare("scene:7", model).pixels)
    return recording


class Branchless(nn.Module):
    """A network without residual branches, whose last layer gives no maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


class Sized(nn.Module):
    """A network of one size, which no list of usual sizes has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 5), nn.Linear(2 * 36 * 67, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().flatten(1))


class Broken(nn.Module):
    """A model whose forward pass fails."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)))


# a call, what it must return, and the note; an empty note: the form is a documented one
UNDERSTOOD: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "the mean as a head": (
        lambda: facts(method="attention", head="mean").parameters["fusion"],
        "mean",
        "understood as fusion 'mean'",
    ),
    "a class as transformers counts": (lambda: facts(target="LABEL_2").scores[0]["class"], 2, ""),
    "mean and std as one number": (lambda: facts(mean=0.5, std=0.5).preprocessing["mean"]["value"], [0.5] * 3, ""),
    "record by name": (lambda: _recording()["blocks.1.attn"].layer, "blocks.1.attn", ""),
    "a part of nn.Sequential by number": (
        lambda: (
            explain(
                lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 62 * 62, 5)).eval(),
                layer=1,
                method="gradcam",
                img_size=64,
            ).map.facts.layer
        ),
        "1",
        "",
    ),
    "a function as method": (lambda: facts(method=visattn.methods.rollout).method, "rollout", ""),
    "alias of the paper": (lambda: facts(method="chefer").method, "relevance", ""),
    "pixel as a pair": (lambda: facts(method="attention", query=(60, 60)).parameters["query"], "patch:2,2", ""),
    "pixel as an array": (lambda: facts(method="attention", query=np.array([60, 60])).parameters["query"], "patch:2,2", ""),
    "pixel as text": (
        lambda: facts(method="attention", query="60, 60").parameters["query"],
        "patch:2,2",
        "understood as pixel:60,60",
    ),
    "weights of tokens": (
        lambda: facts(method="attention", query=np.eye(64)[9]).parameters["query"],
        "weights",
        "",
    ),
    "layer of a block": (lambda: facts(method="attention", layer="blocks.2").parameters["layer"], "blocks.2.attn", ""),
    "layer as a module": (
        lambda: facts(method="attention", layer=vit().get_submodule("blocks.1.attn")).parameters["layer"],
        "blocks.1.attn",
        "",
    ),
    "layer as Python code": (
        lambda: facts(method="attention", layer="model.blocks[-1].attn").parameters["layer"],
        "blocks.3.attn",
        r"model.blocks\[-1\].attn is understood as blocks.3.attn",
    ),
    "layer as a digit": (lambda: facts(method="attention", layer="2").parameters["layer"], "blocks.2.attn", "layer '2'"),
    "last layer": (lambda: facts(method="attention", layer="last").parameters["layer"], "blocks.3.attn", "understood as -1"),
    "numpy class": (lambda: facts(target=np.int64(4)).target[0][:13], "logit of star", ""),
    "class as a tensor": (lambda: facts(target=torch.tensor(4)).target[0][:13], "logit of star", ""),
    "a batch of one array": (lambda: explain(image=scene()[None]).photo.size, (224, 224), ""),
    "channels first": (lambda: explain(image=scene().transpose(2, 0, 1)).photo.size, (224, 224), ""),
    "BGR turned around": (lambda: explain(image=scene()[..., ::-1]).photo.size, (224, 224), ""),
    "a tensor in [0, 1]": (lambda: explain(image=torch.from_numpy(scene() / 255)).photo.size, (224, 224), ""),
    "a dictionary": (lambda: explain(image={"image": scene(), "label": 3}).photo.size, (224, 224), "taken from the key 'image'"),
    "a list of one": (lambda: explain(image=["scene:7"]).photo.size, (224, 224), ""),
    "size with channels": (lambda: explain(img_size=(3, 64, 64)).geometry.input, (64, 64), ""),
    "timm/ before the name": (
        lambda: visattn.load_model("timm/resnet18", weights="none") is not None,
        True,
        "model timm/resnet18 is understood as resnet18",
    ),
    "hf-hub: before the name": (
        lambda: visattn.load_model("hf-hub:timm/resnet18.a1_in1k", weights="none") is not None,
        True,
        "understood as resnet18.a1_in1k",
    ),
    "name on the hub": (
        lambda: visattn.families.provenance_of(visattn.load_model("facebook/dinov2-small", weights="none")).model,
        "vit_small_patch14_dinov2.lvd142m",
        "facebook/dinov2-small is understood as vit_small_patch14_dinov2.lvd142m",
    ),
    "name in the authors' code": (
        lambda: visattn.families.provenance_of(visattn.load_model("dinov2_vits14", weights="none")).model,
        "vit_small_patch14_dinov2.lvd142m",
        "dinov2_vits14 is understood as",
    ),
    "torchvision.models": (
        lambda: visattn.families.provenance_of(visattn.load_model("torchvision.models.resnet18", weights="none")).model,
        "tv:resnet18",
        "understood as tv:resnet18",
    ),
    "a compiled model": (lambda: facts(model=lambda: torch.compile(vit())).method, "relevance", ""),
    "a parallel model": (lambda: facts(model=lambda: nn.DataParallel(vit())).method, "relevance", ""),
}

# a call, and the error
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention module in capitals": (
        lambda: visattn.attach(nn.Sequential(nn.Conv2d(3, 16, 3)), "SE", where="0"),
        "unknown attention 'SE'; did you mean 'se'?",
    ),
    "method in capitals": (lambda: explain(method="Rollout"), "unknown method 'Rollout'; did you mean 'rollout'?"),
    "method in words": (lambda: explain(method="attention rollout"), "did you mean 'rollout'?"),
    "Grad-CAM++": (lambda: explain(model=cnn, method="Grad-CAM++"), "did you mean 'gradcam_plus_plus'?"),
    "method of another library": (lambda: explain(method="vanilla gradient"), "did you mean 'captum.saliency'?"),
    "another name of an alias": (lambda: explain(method="Chefer"), "did you mean 'relevance'?"),
    "target_layers": (
        lambda: explain(model=cnn, method="gradcam", target_layers=[cnn().get_submodule("layer2")]),
        "explain has no option target_layers; it is called layer",
    ),
    "class_idx": (lambda: explain(class_idx=4), "no option class_idx; it is called target"),
    "heads": (lambda: explain(heads=0, method="attention"), "no option heads; it is called head"),
    "alpha": (lambda: found().draw(alpha=0.3), "draw has no option alpha; it is called opacity"),
    "cmap": (lambda: found().overlay(cmap="jet"), "no option cmap; it is called colormap"),
    "norm": (lambda: found().draw(norm="percentile"), "no option norm; it is called normalize"),
    "color map in capitals": (lambda: found().draw(colormap="Viridis"), "unknown colormap 'Viridis'; did you mean 'viridis'?"),
    "color map of OpenCV": (lambda: found().draw(colormap=2), "unknown colormap '2'; did you mean 'jet'?"),
    "color map by OpenCV's name": (lambda: found().draw(colormap="COLORMAP_TURBO"), "did you mean 'turbo'?"),
    "diverging map of matplotlib": (lambda: found().draw(colormap="RdBu_r"), "did you mean 'blue-white-red'?"),
    "interpolation linear": (lambda: found().draw(interpolation="linear"), "did you mean 'bilinear'?"),
    "min-max": (lambda: found().draw(normalize="min-max"), "unknown normalization 'min-max'; did you mean 'minmax'?"),
    "image_size": (lambda: explain(image_size=64), "no option image_size; it is called img_size"),
    "class token": (lambda: explain(method="attention", query="[CLS]"), "unknown query '\\[CLS\\]'; did you mean 'cls'?"),
    "weights=False": (
        lambda: visattn.load_model("tf_efficientnet_lite0", weights=False),
        "weights must be 'auto' .* got False; did you mean 'none'?",
    ),
    "random weights": (lambda: visattn.load_model("resnet18", weights="random"), "got 'random'; did you mean 'none'?"),
    "pretrained": (
        lambda: visattn.load_model("resnet18", pretrained=False),  # type: ignore[call-arg]
        "load_model has no option pretrained; it is called weights",
    ),
    "several layers": (lambda: explain(layer=[0, 1]), r"layer must be a whole number .* got \[0, 1\]"),
    "a slice of layers": (lambda: explain(layer=slice(0, 3)), "layer must be a whole number"),
    "layers as text": (lambda: explain(layer="0,1"), "layer must be one layer, got 0,1. Explain one at a time"),
    "several heads": (lambda: explain(method="attention", head=[0, 1]), "head must be a whole number or 'all'"),
    "the mean as a head of a recording": (
        lambda: visattn.methods.attention(_recording(), head="mean"),  # type: ignore[arg-type]
        "The mean over heads is fusion='mean'",
    ),
    "parameter that auto lacks": (lambda: explain(signed=True), "Name the method: attention_gradient, captum.saliency"),
    "parameter of another method": (lambda: explain(method="rollout", head=1), "Methods with it: attention, contributions"),
    "no image": (lambda: visattn.explain(vit()), 'image is missing. .*explain\\(model, "photo:chelsea"\\)'),
    "a preprocessed image": (
        lambda: explain(image=visattn.prepare("scene:7", vit())),
        "explain\\(model, prepared.photo, pixels=",
    ),
    "a batch of inputs": (lambda: visattn.explain(vit(), pixels=torch.rand(2, 3, 64, 64)), "pixels must be one input"),
    "a color map of the picture": (lambda: explain(colormap="jet"), "colormap is an option of the picture: explain.*overlay"),
    "mean for 0 to 255": (
        lambda: explain(mean=[127.5] * 3, std=[127.5] * 3),
        "pixels in \\[0, 1\\], got mean 127.5.* Divide both by 255",
    ),
    "a standard deviation without end": (lambda: explain(std=[0.2, float("inf"), 0.2]), "std must be finite, got 0.2, inf, 0.2"),
    "a file name as geometry": (
        lambda: visattn.save_map(found().map, "x.npz"),  # type: ignore[arg-type]
        "geometry must be a Geometry, got 'x.npz'",
    ),
    "map and photo exchanged": (
        lambda: visattn.contact_sheet(found().map, found().photo, found().geometry),  # type: ignore[arg-type]
        "attention_map must be a AttentionMap",
    ),
    "a sheet of one panel": (lambda: found().at(head=0).contact_sheet(), "the map has one panel and no axes"),
    "a layer that was not recorded": (lambda: _recording()["blocks.99"], "layer must be one of blocks.0"),
    "an assumed size": (
        lambda: visattn.explain(Sized().eval(), "scene:7"),
        "was assumed. If it is another, pass it: img_size=\\(height, width\\)",
    ),
    "modules that cannot be sites": (
        lambda: visattn.attach(Branchless(), "cbam"),
        "such as 'conv'. *$|such as 'conv'\\.",
    ),
    "misspelled method": (lambda: explain(method="rolout"), "unknown method 'rolout'; did you mean 'rollout'?"),
    "no such method": (lambda: explain(method=3), "method must be a name in visattn.methods.METHODS, got 3"),
    "a number as query": (lambda: explain(method="attention", query=5), "query must be a pixel"),
    "a list as query": (lambda: explain(method="attention", query=[0.1, 0.2, 0.3]), "or a tensor with one weight per token"),
    "a pixel outside": (lambda: explain(method="attention", query=(900, 10)), "pixel 900,10 lies outside the photo of 224 x 224"),
    "misspelled layer": (lambda: explain(method="attention", layer="blocks.2.atn"), "Close matches: blocks.2.attn"),
    "layer with several": (lambda: explain(method="attention", layer="blocks"), "blocks has 4 layers with attention"),
    "module of another model": (
        lambda: explain(method="attention", layer=nn.Linear(2, 2)),
        "layer must be a module inside the model, got Linear",
    ),
    "part of a class name": (lambda: explain(target="st"), "unknown class 'st'. Close matches: star"),
    "class out of range": (lambda: explain(target=1000), "target must be a class from 0 to 5, got 1000"),
    "target for attention": (lambda: explain(method="attention", target=3), "does not depend on a class"),
    "misspelled option": (lambda: explain(methd="rollout"), "explain has no option methd; did you mean method?"),
    "bgr=True": (lambda: explain(bgr=True), r"images are RGB: pass image\[..., ::-1\]"),
    "cuda=True": (lambda: explain(cuda=True), "pass device='cuda'"),
    "threshold": (lambda: found().draw(threshold=0.5), "the outline of the region that holds 60 % of the map is mass=0.6"),
    "opacity in percent": (lambda: found().draw(opacity=50), "opacity must be a number from 0 to 1, got 50"),
    "unknown color map": (lambda: found().draw(colormap="hot"), "unknown colormap 'hot'"),
    "normalized tensor": (
        lambda: explain(image=torch.randn(3, 64, 64)),
        "a photo of float32 must lie in|of an image that was normalized for a model, pass the original",
    ),
    "a batch of two": (lambda: explain(image=np.zeros((2, 8, 8, 3), np.uint8)), "Pass one photo, not a batch"),
    "a missing file": (lambda: explain(image="dog.jpg"), "dog.jpg: no such file; check the path"),
    "a folder": (lambda: explain(image="."), "is a directory; pass an image file in it"),
    "no such photo": (lambda: explain(image="photo:chelse"), "did you mean photo:chelsea?"),
    "a dictionary without an image": (lambda: explain(image={"label": 3}), "a dictionary needs one of the keys image"),
    "weights=None": (
        lambda: visattn.load_model("resnet18", weights=None),
        "weights must be 'auto' .published., 'none' .random. or a file",
    ),
    "misspelled model": (lambda: visattn.load_model("resnet81"), "unknown model 'resnet81'. Close matches: resnet18"),
    "half a model name": (lambda: visattn.load_model("dinov2"), "unknown model 'dinov2'. Close matches: .*dinov2"),
    "a size that does not fit": (lambda: explain(img_size=96), "the model was trained at 64 x 64 pixels, got 96 x 96"),
    "mean for two channels": (lambda: explain(mean=[0.5, 0.5], std=[0.5]), "mean must have 1 value or 3"),
    "transform and size": (
        lambda: explain(transform=lambda image: image, img_size=64),
        "transform sets size, mean, std and resize itself",
    ),
    "transform without a tensor": (lambda: explain(transform=lambda image: image), "transform must return floats"),
    "pixels of another size": (
        lambda: explain(image=None, pixels=torch.rand(1, 3, 32, 32)),
        "the model takes pixels of size|fails for",
    ),
    "pixels of another photo": (
        lambda: explain(image="photo:coffee", pixels=torch.rand(1, 3, 64, 64)),
        "must show just what the image shows",
    ),
    "a model that fails": (
        lambda: explain(model=Broken, method="gradcam"),
        r"head fails for pixels \(1, 3, \d+, \d+\): RuntimeError: .*mat1 and mat2 shapes cannot be multiplied",
    ),
    "raw values without capture": (lambda: visattn.Recording().attention(), "the recording has no attention"),
    "values that were not kept": (lambda: _recording().values(), r"Use capture\(model, values=True\)"),
    "a picture as .bmp": (lambda: found().save("x.bmp"), "pictures are written as .png, .jpg, .jpeg, .webp"),
}

# a command line that works, and the note
COMMANDS = {
    "visattn overlay scene:7 --model scenes_vit -o folder": "",
    "visattn overlay scene:7 --model own.py:plain --layer 1 --method gradcam": "gradcam (layer 1)",
    "visattn list scenes": "",
    "visattn overlay scene:7 --model scenes_vit --method attention --query 60,60": "understood as pixel:60,60",
}

# a command line that fails, and its one line
FAILING = {
    "visattn overlay scene:7 --model scenes_vit --class star": "no such option --class; it is called --target",
    "visattn overlay scene:7 --model scenes_vit --cmap jet": "no such option --cmap; it is called --colormap",
    "visattn overlay scene:7 --model scenes_vit --output_dir .": "no such option --output_dir; it is called --output",
    "visattn overlay --image scene:7 --model scenes_vit": "no such option --image; images are given without an option",
    "visattn overlay scene:7 --model scenes_vit --target-category star": "no such option --target-category; it is called --target",
    "visattn overlay scene:7 --model scenes_cnn --method GradCAM": "unknown method 'GradCAM'; did you mean 'gradcam'?",
    "visattn heads scene:7 --model scenes_vit --image-size 64": "no such option --image-size; it is called --img-size",
    "visattn overlay scene:7 --model scenes_vit --target star --target ring": "--target was given 2 times, but takes one value",
    "visattn heads scene:7 --model scenes_vit --head mean": "--head mean needs --by-layer, --matrix or --steps.*--fusion mean",
    "visattn heads scene:7 --model scenes_vit --layer all --head 1": "--head 1 needs --by-layer, --matrix or --steps",
    "visattn heads scene:7 --model scenes_vit --by-layer --head 1,2": "--head must be all, mean or the index of one head, got 1,2",
    "visattn heads scene:7 --model scenes_vit --by-layer --layer 1": "--layer has no effect with --by-layer",
    "visattn overlay scene:7 scene:8 --model scenes_vit -o x.png": "-o names one file, x.png, but there are 2 images",
    "visattn overlay scene:7 --model own.py:sized": "was assumed. If it is another, pass it: --img-size HxW",
    "visattn caption scene:7 --checkpoint nowhere": "nowhere: no such folder",
    "visattn list no_such_network": "CNNs are not listed",
    "visattn overlay scene:7 --model scenes_vit --gpu 0": "pass --device cuda",
    "visattn overlay scene:7 --model scenes_vit --use-cuda": "pass --device cuda",
    "visattn overlay scene:7 --model scenes_vit --threshold 0.5": "--mass 0.6",
    "visattn overlay dog.jpg": "dog.jpg: no such file; check the path",
    "visattn overlay . --model scenes_vit": "is a directory",
    "visattn overlay scene:7 --model own.py:broken --method gradcam": "head fails for pixels",
    "visattn heads scene:7 --model own.py:broken": "head fails for pixels",
    "visattn inspect own.py:broken": "head fails for pixels",
    "visattn overlay scene:7 --model own.py:raises": "raises\\(\\) fails: KeyError: 'weights'",
    "visattn overlay scene:7 --model own.py:number": "number\\(\\) returns a int; return a torch.nn.Module",
    "visattn overlay scene:7 --model scenes_vit --img-size big": "'big' is not a side such as 224",
    "visattn overlay scene:7 --model own.py:plain --mean a,b,c": "'a,b,c' is not a list of numbers such as",
}
OWN = """
import torch
from torch import nn
from tests.test_mistakes import Broken as broken, Sized as sized

def raises():
    return {}["weights"]

def number():
    return 3

def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_spelling_is_understood(name: str) -> None:
    call, expected, note = UNDERSTOOD[name]
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        assert call() == expected
    notes = [str(one.message) for one in issued if isinstance(one.message, VisattnNote)]
    if note:
        assert any(matches(note, text) for text in notes), notes
    else:
        assert not notes


def test_a_path_is_a_file_whatever_its_name(tmp_path: Path) -> None:
    with pytest.raises(VisattnError, match="random: cannot be read"):
        visattn.load_model("resnet18", weights=tmp_path / "random")


@pytest.mark.parametrize("name", REFUSED)
def test_mistake_gets_one_line_with_the_fix(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(VisattnError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """Return a function that runs a command line in a folder with `own.py`, and returns the exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)

    def run(line: str) -> tuple[int, str]:
        with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
            main(shlex.split(line)[1:])
        return int(end.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line: str, typed: Callable[[str], tuple[int, str]]) -> None:
    code, told = typed(line)
    assert code == 0, told
    assert COMMANDS[line] in told


@pytest.mark.parametrize("line", FAILING)
def test_command_fails_with_one_line(line: str, typed: Callable[[str], tuple[int, str]]) -> None:
    code, told = typed(line)
    assert code in (2, 3, 4)
    assert matches(FAILING[line], told), told
    assert len([one for one in told.splitlines() if "error:" in one]) == 1
    assert "Traceback" not in told


def test_a_note_names_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        explain(head="mean", method="attention")
    assert [one.filename for one in issued if isinstance(one.message, VisattnNote)] == [__file__]


def matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None
