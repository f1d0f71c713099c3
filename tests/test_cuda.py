"""Results on a GPU against those on the CPU. Without a GPU they are skipped; `VISATTN_TEST_DEVICE=cpu` runs the code of the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import visattn
from tests import tiny
from tests.batch import cluster
from tests.batch.kills import files_of
from tests.oracles import maps as oracles
from tests.training.small import begun, pictures, recipe
from visattn import explain, explain_batch
from visattn.batch import Batches, Journal, Ledger, run
from visattn.cli.commands import _run
from visattn.core.capturing.intercept.calls import FusedCall
from visattn.core.methods import METHODS
from visattn.core.operators import SoftmaxOperator
from visattn.core.operators.fused import LogSumExpReader
from visattn.errors import VisattnError, VisattnNote
from visattn.training import train

DEVICE = os.environ.get("VISATTN_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU: these tests compare its results with those of the CPU"
)
_SAME = 1e-4  # of a map's maximum; GPUs add in another order
_DRAWN = {"captum.smoothgrad", "captum.kernel_shap", "captum.lime"}  # random numbers of a GPU are others
_EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
random = np.random.default_rng(0)
PHOTOS = [Image.fromarray(random.integers(0, 256, (64, 96, 3), dtype=np.uint8)) for _ in range(3)]
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "vit": (tiny.vit, {}),
    "cnn": (lambda: visattn.load_model("visattn_cbam_resnet18", weights="none"), {"img_size": 64}),
}


@pytest.fixture(scope="module", autouse=True)
def _full_float32() -> Any:
    """Keep TF32 out of products and convolutions: its rounding is that of the hardware, not ours."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Give a model on the CPU, the same on the GPU, and options of its preprocessing."""
    build, options = MODELS[request.param]
    return build(), build().to(DEVICE), options


def worst(one: visattn.Explanation, other: visattn.Explanation) -> float:
    """Return the largest difference of two maps, relative to the largest value of the second."""
    here, there = (explanation.map.values.double().cpu().nan_to_num() for explanation in (one, other))
    return float((here - there).abs().max() / there.abs().max().clamp_min(1e-12))


@pytest.mark.parametrize("method", [name for name in METHODS if name not in _DRAWN])
def test_every_method_gives_what_it_gives_on_the_cpu(method: str, pair: tuple[nn.Module, nn.Module, dict[str, Any]]) -> None:
    on_cpu, on_gpu, options = pair
    options = options | ({"query": "patch:0,1"} if "query" in METHODS[method].required else {})
    if METHODS[method].targeted:
        options = options | {"target": 3}
    try:
        there = explain(on_cpu, PHOTOS[0], method=method, **options)
    except VisattnError as error:
        with pytest.raises(type(error)):
            explain(on_gpu, PHOTOS[0], method=method, **options)
        return
    here = explain(on_gpu, PHOTOS[0], method=method, **options)
    assert worst(here, there) <= _SAME
    assert worst(next(iter(explain_batch(on_gpu, PHOTOS, method=method, **options))), there) <= _SAME


@pytest.mark.parametrize("dtype", list(_EXACT), ids=str)
@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_recorded_attention_is_the_softmax_of_the_operands(kernel: str, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 100, 64, generator=torch.Generator().manual_seed(i)) * 2 for i in range(3))
    query, key, value = (part.to(DEVICE, dtype) for part in (query, key, value))
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, kernel)), LogSumExpReader() as reader:  # type: ignore[no-untyped-call]
        try:
            nn.functional.scaled_dot_product_attention(query, key, value)
        except RuntimeError as error:
            pytest.skip(f"this GPU has no such kernel for {dtype}: {str(error).splitlines()[0]}")
    call = FusedCall(query, key, value)
    if reader.lse is not None:
        call.know(reader.lse)
    if kernel != "MATH" and dtype == torch.float32 and DEVICE == "cuda":
        assert call.lse is not None, "the kernel's log-sum-exp was not used"
    operator = SoftmaxOperator(query, key, lse=call.lse)
    arrays = [oracles.array(part.float().cpu())[:, :, None] for part in (query, key)]
    known = torch.from_numpy(oracles.block_weights(arrays[0], arrays[1], None, 64**-0.5)[:, :, 0])
    assert float((operator.dense().double().cpu() - known).abs().max()) <= _EXACT[dtype]
    row = torch.rand(1, 2, 1, 100, device=DEVICE)
    assert float(((row @ operator).double().cpu() - row.double().cpu() @ known).abs().max()) <= 10 * _EXACT[dtype]


@pytest.mark.skipif(DEVICE == "cpu", reason="the memory of a CPU is not limited")
def test_a_batch_that_does_not_fit_runs_in_halves() -> None:
    model = visattn.load_model("vit_base_patch16_224", weights="random", device=DEVICE)
    photos = [PHOTOS[0].resize((224, 224))] * 64
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    torch.cuda.set_per_process_memory_fraction((used + 1.2e9) / total)
    try:
        with pytest.warns(VisattnNote, match="they run in halves"):
            found = list(explain_batch(model, photos, method="rollout", batch_size=64))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(found) == 64
    assert worst(found[0], explain(model, photos[0], method="rollout")) <= _SAME


def test_files_of_a_run_are_those_of_the_cpu(tmp_path: Path) -> None:
    items = cluster.photos(tmp_path / "photos", 2 * cluster.SIZE + 1)
    cluster.locally(items, tmp_path / "cpu")
    (tmp_path / "gpu").mkdir()
    with Journal(tmp_path / "gpu" / "journal.jsonl", {}) as journal:
        run(tiny.vit().to(DEVICE), Ledger(items, journal, Batches(cluster.SIZE)), cluster.work(tmp_path / "gpu"))
    assert cluster.differences(tmp_path / "gpu", tmp_path / "cpu")[1] <= 1
    assert len(files_of(tmp_path / "gpu")) == 4 * cluster.SIZE


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "scenes_vit", "--layer", "2", "--head", "1", "--matrix"),
        ("--model", "scenes_vit", "--layer", "all"),
        ("--model", "scenes_vit", "--stats", "--json"),
        ("--model", "scenes_cnn", "--method", "gates"),
        ("--model", "scenes_cnn", "--method", "gates", "--stats"),
    ],
    ids=lambda options: " ".join(options[2:]),
)
def test_figures_of_heads_are_drawn(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(["heads", "scene:1", *options, "--device", DEVICE], debug=False) == 0


def test_a_training_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    settings = recipe(pictures(tmp_path / "photos"), device=DEVICE)
    train(settings, begun(settings, tmp_path / "run"))
    loaded = visattn.load_model(str(tmp_path / "run" / "final"), device=DEVICE)
    assert next(loaded.parameters()).device.type == DEVICE
