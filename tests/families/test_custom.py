"""Models of no library: their tokens are traced, or given by grid and prefix."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn import load_model
from visattn.core import families, methods
from visattn.core.provenance import Provenance
from visattn.errors import LayoutError, ModelError, OptionError, UnsupportedModel, WeightsError


class Attention(nn.Module):
    """Attention by einsum, as in many tutorials."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        query, key, value = (part.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * dim**-0.5
        mixed = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), value)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class Own(nn.Module):
    """Vision transformer: patches by reshape and a linear layer, a class token, two registers, einsum or `nn.MultiheadAttention`."""

    def __init__(self, kind: str = "einsum", patch: int = 8, dim: int = 16, extra: int = 2) -> None:
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(3 * patch * patch, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.register_tokens = nn.Parameter(torch.randn(1, extra, dim))
        self.kind = kind
        make = (lambda: Attention(dim, 2)) if kind == "einsum" else (lambda: nn.MultiheadAttention(dim, 2, batch_first=True))
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows, columns = height // self.patch, width // self.patch
        x = x.reshape(batch, channels, rows, self.patch, columns, self.patch)
        x = self.embed(x.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1))
        x = torch.cat([self.cls_token.expand(batch, -1, -1), self.register_tokens.expand(batch, -1, -1), x], dim=1)
        for layer in self.layers:
            x = x + (layer(x) if self.kind == "einsum" else layer(x, x, x, need_weights=self.kind == "weights")[0])
        logits: Tensor = self.head(x[:, 0])
        return logits


KINDS = ["einsum", "weights", "fused"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_custom_model_are_traced(kind: str) -> None:
    model, x = Own(kind).eval(), torch.randn(2, 3, 24, 40)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(x)
    assert [record.layer for record in recording] == ["layers.0", "layers.1"]
    for record in recording:
        assert record.kind == "self"
        assert record.queries == record.keys
        assert record.keys.prefix == ("cls", "register0", "register1")
        assert (record.keys.grid, tuple(record.keys.box)) == ((3, 5), (0, 0, 24, 40))
        assert record.operator.shape == (2, 2, 18, 18)
    assert methods.rollout(recording).values.shape == (2, 3, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_grid_and_prefix_match_the_traced_ones(kind: str) -> None:
    model, x = Own(kind).eval(), torch.randn(2, 3, 24, 40)
    with torch.no_grad(), visattn.capture(model) as followed:
        model(x)
    with torch.no_grad(), visattn.capture(model, grid=(3, 5), prefix=3) as told:
        model(x)
    for one, other in zip(followed, told, strict=True):
        assert (one.keys.grid, one.keys.prefix, one.keys.box) == (other.keys.grid, other.keys.prefix, other.keys.box)
        assert torch.equal(one.operator.dense(), other.operator.dense())


@pytest.mark.parametrize(
    ("grid", "prefix", "error", "message"),
    [
        ((5, 3), 3, LayoutError, r"patches that are not square. Pass grid=\(3, 5\) if rows"),
        ((3, 6), 3, LayoutError, r"attends to 18 tokens, but prefix and grid give 3 \+ 3 x 6"),
        ((3, 5), 2, LayoutError, r"attends to 18 tokens, but prefix and grid give 2 \+ 3 x 5"),
        ((0, 5), 3, OptionError, r"grid must be \(rows, columns\)"),
        ((3, 5), -1, OptionError, "prefix must be a number of tokens or their names"),
        ((3, 5), ("cls", "cls", "a"), OptionError, "prefix must name each token once"),
        (None, 3, OptionError, "prefix needs grid to give the positions of tokens"),
    ],
)
def test_wrong_grid_or_prefix_is_refused(grid: Any, prefix: Any, error: Any, message: str) -> None:
    model = Own().eval()
    with pytest.raises(error, match=message), visattn.capture(model, grid=grid, prefix=prefix):
        model(torch.randn(1, 3, 24, 40))


def test_cropped_sizes_are_traced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
    attention = Attention(8, 2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = model, attention

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(self.stem(x).transpose(1, 2))
            return out

    with torch.no_grad(), visattn.capture(whole := Whole()) as recording:
        whole(torch.randn(1, 3, 30, 45))
    assert (recording[0].keys.grid, tuple(recording[0].keys.box)) == ((3, 5), (0, 0, 24, 40))


def test_registered_class_uses_its_token_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})

    @families.register(Own)
    def describe(model: Own, provenance: Provenance) -> families.ModelDescription:
        return families.ModelDescription({"layers.1": model.layers[1]}, "mean", provenance)

    class Derived(Own):
        pass

    model = Derived().eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(2, 3, 24, 40))
    assert [feature.layer for feature in recording.features] == ["layers.1"]
    assert recording.features[0].value.shape == (2, 18, 16)
    assert recording.features[0].layout == recording[0].keys
    assert methods.pca(recording).values.shape == (2, 3, 3, 5)
    assert methods.attention(recording).provenance.parameters["query"] == "mean"


def test_model_with_one_token_one_head_and_one_layer_is_drawn() -> None:
    model = tiny.vit(img_size=(16, 16), depth=1, num_heads=1, class_token=False, global_pool="avg")
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(1, (16, 16)))
    assert recording[0].keys.grid == (1, 1)
    assert methods.attention(recording).values.tolist() == [[[[1.0]]]]
    assert methods.rollout(recording).values.tolist() == [[[1.0]]]


class MaskedRow(Own):
    """Attention in which the last token attends to no token."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2))
        mask = torch.zeros(tokens.shape[1], tokens.shape[1])
        mask[-1] = -torch.inf
        return nn.functional.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None], attn_mask=mask)


def test_fully_masked_row_has_zero_weights_and_rollout_keeps_its_token() -> None:
    model = MaskedRow().eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(1, 3, 24, 40))
    dense = recording[0].operator.dense()
    assert recording[0].keys.grid == (3, 5)
    assert bool(dense.isfinite().all())
    assert dense[0, 0, -1].tolist() == [0.0] * 15
    torch.testing.assert_close(dense[0, 0, :-1].sum(-1), torch.ones(14))
    rolled = methods.rollout(recording, query="patch:2,4", fusion="max")
    assert rolled.values.flatten().tolist() == [0.0] * 14 + [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rollout_over_24_layers_in_half_precision_is_done_in_float32(dtype: torch.dtype) -> None:
    model = tiny.vit(depth=24).to(dtype)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels().to(dtype))
    expected = np.eye(7)
    for record in recording:
        weights = tiny.matrices(record)[0].numpy().mean(0)
        expected = (0.5 * weights + 0.5 * np.eye(7)) @ expected
    rolled = methods.rollout(recording)
    assert rolled.values.dtype == torch.float32
    np.testing.assert_allclose(rolled.values.flatten().numpy(), expected[0, 1:], rtol=0, atol=1e-5)


FILE = """
    import timm
    value = 3
    def small():
        return timm.create_model("test_vit", num_classes=5)
    def broken():
        raise ValueError("no such weights")
    def needs(size):
        return small()
    def number():
        return 7
"""


def test_a_model_from_a_file_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(FILE))
    model = load_model(f"{file}:small")
    assert not model.training
    explanation = visattn.explain(model, np.zeros((40, 60, 3), np.uint8))
    assert explanation.provenance.model == "mine.py:small"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("smal", r"has no function 'smal'; did you mean small\?"),
        ("value", "has no function 'value'"),
        ("broken", r"broken\(\) fails: ValueError: no such weights"),
        ("needs", r"needs\(\) fails: TypeError.*it is called without arguments"),
        ("number", r"number\(\) returns a int; return a torch.nn.Module"),
    ],
)
def test_file_without_a_model_raises_a_one_line_error(factory: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(FILE))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load_model(f"{file}:{factory}")
    assert "\n" not in str(caught.value)


def test_a_python_file_takes_weights_from_a_file(tmp_path: Path) -> None:
    file, other, weights = tmp_path / "mine.py", tmp_path / "no_weights.jpg", tmp_path / "weights.pth"
    file.write_text(textwrap.dedent(FILE))
    expected = {name: torch.randn_like(tensor) for name, tensor in load_model(f"{file}:small").state_dict().items()}
    torch.save(expected, weights)
    model = load_model(f"{file}:small", weights=weights)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert families.provenance_of(model).weights == "weights.pth"
    other.write_bytes(b"none at all")
    with pytest.raises(WeightsError, match=r"no_weights\.jpg: cannot be read as a checkpoint"):
        load_model(f"{file}:small", weights=str(other))
    with pytest.raises(
        OptionError,
        match=r"a Python file makes its own weights, got weights none. Leave weights out, or pass a file with weights",
    ):
        load_model(f"{file}:small", weights="none")


ENDING = {
    "sys.exit(0)": "exits the program; put the code that runs it under if __name__ ==",
    "raise GeneratorExit": "fails: GeneratorExit",
    "raise BaseException('over')": "fails: BaseException: over",
}


@pytest.mark.parametrize("ending", list(ENDING))
def test_model_file_that_exits_does_not_end_the_program(ending: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys\ndef make():\n    return None\n{ending}\n")
    (tmp_path / "factory.py").write_text(f"import sys\ndef make():\n    {ending}\n")
    with pytest.raises(UnsupportedModel, match=f"script.py:make: the file {ENDING[ending]}"):
        load_model(f"{tmp_path}/script.py:make")
    with pytest.raises(UnsupportedModel, match=rf"factory.py:make: make\(\) {ENDING[ending]}"):
        load_model(f"{tmp_path}/factory.py:make")


def test_keyboard_interrupt_in_a_model_file_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_model(f"{tmp_path}/slow.py:make")


def test_model_file_may_use_dataclasses_local_imports_and_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper_of_mine.py").write_text("CLASSES = 5\n")
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            from __future__ import annotations
            from dataclasses import dataclass
            import timm
            import helper_of_mine
            @dataclass
            class Options:
                classes: int = helper_of_mine.CLASSES
            def small():
                print("building")
                return timm.create_model("test_vit", num_classes=Options().classes)
        """)
    )
    before = list(sys.path)
    assert load_model(f"{tmp_path}/mine.py:small").num_classes == 5
    assert sys.path == before
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", "building\n")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("self.visual = self", "RecursionError"),
        ("self.part = nn.Sequential(); self.part.add_module('back', self)", "RecursionError"),
        ("self.eval = self.missing", "AttributeError"),
        ("self.train = lambda mode=True: 1 / 0", "ZeroDivisionError"),
    ],
)
def test_model_without_evaluation_mode_raises_a_one_line_error(tmp_path: Path, body: str, cause: str) -> None:
    (tmp_path / "own.py").write_text(
        f"from torch import nn\nclass Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {body}\n"
        "def make():\n    return Own()\n"
    )
    with pytest.raises(UnsupportedModel, match=rf"own\.py:make.* fails: {cause}") as caught:
        load_model(f"{tmp_path / 'own.py'}:make")
    assert "\n" not in str(caught.value)


def test_model_that_contains_itself_raises_a_one_line_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 16, 16), nn.Flatten())
    model.add_module("again", model)
    with pytest.raises(
        ModelError, match=r"^Sequential: model\.eval\(\) fails: RecursionError: .* no module may contain itself\.$"
    ):
        visattn.explain(model, Image.new("RGB", (64, 64)), method="captum.saliency")


def test_a_file_that_fails_or_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UnsupportedModel, match="the file fails: ModuleNotFoundError"):
        load_model(f"{tmp_path}/bad.py:make")
    with pytest.raises(UnsupportedModel, match=r"no such file; pass path/to/file.py:make"):
        load_model(f"{tmp_path}/none.py:make")
