"""Values in the page equal Python's, for every encoding and every kind of attention."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from playwright.sync_api import Page
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.viewer.conftest import Opened
from visattn.core.operators import MatrixOperator, SampledOperator, SoftmaxOperator
from visattn.errors import OptionError
from visattn.studies import Study
from visattn.viewer.encoding import ROWS_LIMIT, VECTORS_LIMIT, encoded

PHOTO = "photo:chelsea"
LIMITS = {"rows": ROWS_LIMIT, "softmax": VECTORS_LIMIT, "sampled": ROWS_LIMIT}


ROWS = """([v, r, asked, heads]) => {
  const one = viewer.page.views[v].attention[r];
  const whole = new Float32Array(asked.length * heads * one.keysCount);
  asked.forEach((q, i) => {
    for (let h = 0; h < heads; h++) whole.set(one.row(h, q), (i * heads + h) * one.keysCount);
  });
  const bytes = new Uint8Array(whole.buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return [one.how, btoa(text)];
}"""


def differences(page: Page, study: Study, tokens: int, seed: int = 0) -> dict[str, float]:
    """Return the largest difference of rows in the page from Python's, by encoding, for random queries of every layer and head."""
    chosen = np.random.default_rng(seed)
    worst: dict[str, float] = {}
    for number, view in enumerate(study):
        placed = [record for record in view.recording if record.reason is None]
        for index, record in enumerate(placed):
            heads, queries = record.operator.shape[1:3]
            asked = sorted(chosen.choice(queries, min(tokens, queries), replace=False).tolist())
            how, text = page.evaluate(ROWS, [number, index, asked, heads])
            shown = np.frombuffer(base64.b64decode(text), np.float32).reshape(len(asked), heads, -1).copy()
            rows: Tensor = record.operator.rows(torch.tensor(asked))[0].transpose(0, 1)  # (queries, heads, keys)
            found = float((torch.from_numpy(shown) - rows).abs().max())
            worst[how] = max(worst.get(how, 0.0), found)
            assert found <= page.evaluate("([v, r]) => viewer.page.views[v].attention[r].error", [number, index]) + 1e-6
    return worst


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, **options)
        return tiny.centered(model).eval()

    return made


def clip() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model: Any = transformers.CLIPVisionModel(config)
    made: nn.Module = model.eval()
    return made


class Custom(nn.Module):
    """Patches that attend to each other, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Conv2d(3, 16, 16, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Attend once."""
        tokens = self.embed(x).flatten(2).mT
        query, key, value = self.mix(tokens).chunk(3, -1)
        return self.head(((query @ key.mT / 4).softmax(-1) @ value).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "registers": of_timm("vit_small_patch14_reg4_dinov2", depth=2, img_size=112),
    "windows": of_timm("swin_tiny_patch4_window7_224"),
    "pooled keys": of_timm("pvt_v2_b0"),
    "class attention": of_timm("cait_xxs24_224", depth=2),
    "CLIP of transformers": clip,
    "by hand": Custom,
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_those_of_python(name: str, opened: Opened) -> None:
    options: dict[str, Any] = {"img_size": 224, "mean": (0.5,) * 3, "std": (0.5,) * 3} if name == "by hand" else {}
    study = visattn.study(MODELS[name](), PHOTO, methods=["attention"], **options)
    worst = differences(opened(study), study, 5)
    assert worst
    for how, found in worst.items():
        assert found <= LIMITS[how], how


@pytest.mark.parametrize(
    ("size", "patches", "how"), [(224, 50, "rows"), pytest.param(518, 10, "softmax", marks=pytest.mark.full)]
)
def test_patches_of_dinov2_equal_those_of_python(
    size: int, patches: int, how: str, dinov2: nn.Module, opened: Opened, figures: Any
) -> None:
    study = visattn.study(dinov2, PHOTO, methods=["attention"], resize="fit", img_size=size)
    worst = differences(opened(study), study, patches)
    assert set(worst) == {how}
    figures(f"largest error of a weight in the page, {how}", worst[how], f"<= {LIMITS[how]}")
    assert worst[how] <= LIMITS[how]


def test_maps_and_similarities_equal_those_of_python(opened: Opened) -> None:
    study = visattn.study(MODELS["registers"](), PHOTO, methods={"similarity": {"query": "patch:3,4"}, "rollout": {}, "pca": {}})
    page = opened(study)
    view = study[0]
    for name in ("similarity", "rollout", "pca"):
        values = torch.tensor(
            page.evaluate(
                "(name) => { viewer.page.state.values.map = name; return Array.from(viewer.page.shown().values); }", name
            )
        )
        assert torch.allclose(values, view.maps[name].values.flatten(), atol=1e-6)


@pytest.mark.parametrize(
    "operator",
    [
        SoftmaxOperator(
            torch.randn(1, 2, 3, 4, 5),
            torch.randn(1, 2, 3, 4, 5),
            torch.randn(2, 1, 4, 4),
            None,
            *[torch.randperm(12).view(3, 4)] * 2,
        ),
        MatrixOperator(torch.rand(1, 2, 3, 4) * 3 - 1),
        MatrixOperator(torch.rand(1, 2, 3, 4) * 3e5),
        SampledOperator(torch.randint(9, (1, 2, 4, 6)), torch.rand(1, 2, 4, 6), 9),
    ],
    ids=["windows", "negative", "large", "sampled"],
)
def test_the_stated_error_bounds_what_was_encoded(operator: Any) -> None:
    found = encoded(operator)
    assert found.error <= ROWS_LIMIT
    if found.how == "rows" and "codes" in found.arrays:
        weights = torch.stack([operator.block(block)[0] for block in range(3)], 1)
        scale, low = (torch.from_numpy(found.arrays[name])[..., None] for name in ("scale", "low"))
        decoded = torch.from_numpy(found.arrays["codes"]).float() * scale + low
        assert float((decoded - weights).abs().max()) == pytest.approx(found.error, abs=1e-7)


@pytest.mark.parametrize(("factor", "kind"), [(1, "float16"), (300, "float32"), (1e6, "float32")])
def test_vectors_that_half_precision_would_blur_are_kept_in_full(factor: float, kind: str) -> None:
    query = torch.randn(1, 1, 600, 8) * factor
    found = encoded(SoftmaxOperator(query, query))
    assert found.how == "softmax"
    assert str(found.arrays["query"].dtype) == kind
    assert found.error <= VECTORS_LIMIT


def test_what_all_keys_share_costs_no_precision() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, 600, 8)
    alone = encoded(SoftmaxOperator(query, key))
    shared = encoded(SoftmaxOperator(query, key + 100 * torch.randn(1, 2, 1, 8)))
    assert str(shared.arrays["key"].dtype) == "float16"
    assert shared.error <= 2 * alone.error + 1e-5


def test_vectors_that_are_not_finite_are_refused() -> None:
    query = torch.full((1, 1, 600, 8), float("nan"))
    with pytest.raises(OptionError, match="queries or keys are NaN or infinite"):
        encoded(SoftmaxOperator(query, query))


def test_layers_with_too_many_weights_are_refused() -> None:
    query = torch.zeros(1, 1, 50_000, 1)
    with pytest.raises(OptionError, match="a layer has 2,500,000,000 weights, too many for a page"):
        encoded(SoftmaxOperator(query, query, torch.zeros(1, 1)))


NEARLY_EVEN = 1 / 60 + 2e-4 * torch.linspace(-1, 1, 60)


@pytest.mark.parametrize(
    "operator", [MatrixOperator(NEARLY_EVEN.expand(1, 1, 60, 60)), SoftmaxOperator(*torch.randn(2, 1, 1, 600, 8) / 8)]
)
def test_no_weight_of_a_row_is_further_off_than_the_page_says(operator: Any, opened: Opened, study: Study) -> None:
    view, record = study[0], study[0].recording[0]
    layout = replace(record.queries, prefix=tuple(map(str, range(operator.shape[2]))), grid=())
    record = replace(record, operator=operator, queries=layout, keys=layout)
    page = opened(
        Study((replace(view, recording=replace(view.recording, records=[record], features=[]), maps={}, importance=None),))
    )
    for query, row in enumerate(operator.block(0)[0, 0]):
        shown, error = page.evaluate(
            "(q) => { const one = viewer.page.record(); return [[...one.row(0, q)], one.errorOf(0, q)]; }", query
        )
        assert float((torch.tensor(shown) - row).abs().max()) <= error + 1e-8
        assert error <= float(row.max()) / 200
