"""Studies: they hold what `explain` and `capture` give, answer questions without the model, and survive their file unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import visattn
from tests.pipeline.test_prompts import saved
from visattn.core.operators import MatrixOperator, Operator, SampledOperator, SoftmaxOperator, SumOperator
from visattn.core.records import Recording
from visattn.errors import OptionError, OutputError
from visattn.studies import Study, View, load_study
from visattn.studies.operands import operands_of, operator_of

PHOTO = "photo:chelsea"
TIMM: dict[str, dict[str, Any]] = {
    "vit_small_patch14_reg4_dinov2": {"depth": 2, "img_size": 112},
    "swin_tiny_patch4_window7_224": {},
    "pvt_v2_b0": {},
    "cait_xxs24_224": {"depth": 2},
    "levit_128s": {},
    "hiera_tiny_224": {},
    "seresnet50": {},
}


def of_timm(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = timm.create_model(name, **TIMM[name]).eval()
    return made


def of_transformers(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: Any
    if name == "Clip":
        made = transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        )
    else:
        made = transformers.RTDetrForObjectDetection(transformers.RTDetrConfig(num_queries=10, decoder_layers=2))
    model: nn.Module = made.eval()
    return model


SLOW = ("hiera_tiny_224", "seresnet50", "levit_128s", "pvt_v2_b0")
MODELS: dict[str, Callable[[str], nn.Module]] = {**dict.fromkeys(TIMM, of_timm), "Clip": of_transformers}


def same_recording(one: Recording, other: Recording) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for name in ("layer", "call", "kind", "queries", "keys", "follows", "reason"):
            assert getattr(a, name) == getattr(b, name), (a.layer, name)
        assert type(a.operator) is type(b.operator)
        assert a.operator.shape == b.operator.shape
        if getattr(a.operator, "lse", None) is None:
            assert torch.equal(a.operator.dense(), b.operator.dense())
        else:  # the kernel's own log-sum-exp is not in the file
            torch.testing.assert_close(a.operator.dense(), b.operator.dense(), atol=1e-6, rtol=0)
    assert [(x.layer, x.role, x.layout) for x in one.features] == [(x.layer, x.role, x.layout) for x in other.features]
    assert all(torch.equal(a.value, b.value) for a, b in zip(one.features, other.features, strict=True))
    assert [(x.layer, x.reason) for x in one.unseen] == [(x.layer, x.reason) for x in other.unseen]
    for name in ("input_size", "reads", "captured"):
        assert getattr(one, name) == getattr(other, name)
    assert one.provenance.to_dict() == other.provenance.to_dict() | {"geometry": one.provenance.to_dict()["geometry"]}


def same_view(one: View, other: View) -> None:
    same_recording(one.recording, other.recording)
    assert one.photo.tobytes() == other.photo.tobytes()
    assert one.geometry == other.geometry
    assert one.classes == other.classes
    assert dict(one.texts) == dict(other.texts)
    assert (one.importance, one.name) == (other.importance, other.name)
    assert list(one.maps) == list(other.maps)
    for name, shown in one.maps.items():
        kept = other.maps[name]
        assert torch.equal(shown.values, kept.values)
        for fact in ("axes", "layout", "meaning", "signed", "facts"):
            assert getattr(shown, fact) == getattr(kept, fact), (name, fact)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in MODELS])
def test_a_saved_study_equals_the_one_that_was_made(name: str, tmp_path: Path) -> None:
    made = visattn.study(MODELS[name](name), PHOTO)
    again = load_study(made.save(tmp_path / "chelsea.attn"))
    assert len(again) == 1
    same_view(made[0], again[0])
    assert made[0].maps or name == "Clip", "no usual method applied"


def test_a_study_of_sampled_points_survives_its_file(tmp_path: Path) -> None:
    made = visattn.study(of_transformers("RTDetr"), PHOTO, methods=["attention"], img_size=128)
    assert any(isinstance(record.operator, SampledOperator) for record in made[0].recording)
    same_view(made[0], load_study(made.save(tmp_path / "boxes.attn"))[0])


def test_values_and_residuals_survive_the_file(dinov2: nn.Module, tmp_path: Path) -> None:
    prepared = visattn.prepare(visattn.load_image(PHOTO), dinov2, img_size=56)
    with torch.no_grad(), visattn.capture(dinov2, values=True) as recording:
        dinov2(prepared.pixels)
    again = load_study(Study((View(prepared.photo, prepared.geometry, recording),)).save(tmp_path / "values.attn"))[0].recording
    for a, b in zip(recording, again, strict=True):
        for name in ("value", "output_weight", "residual"):
            assert torch.equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("asked", [["rollout", "relevance", "gradcam"], ["attention", "legrad", "saliency", "similarity", "pca"]])
def test_maps_of_a_study_equal_those_of_explain(asked: list[str]) -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=3).eval()
    more: dict[str, Any] = {"similarity": {"query": "pixel:200,100"}}
    made = visattn.study(model, PHOTO, methods={name: more.get(name, {}) for name in asked})
    for name in asked:
        alone = visattn.explain(model, PHOTO, method=name, **more.get(name, {}))
        assert torch.equal(made[0].maps[name].values, alone.map.values), name
        assert made[0].maps[name].provenance == alone.provenance
        assert made[0].explanation(name).overlay().tobytes() == alone.overlay().tobytes()


def test_a_saved_study_answers_without_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=3).eval()
    view = load_study(visattn.study(model, PHOTO, methods=[]).save(tmp_path / "cat.attn"))[0]
    questions: list[tuple[str, dict[str, Any]]] = [
        ("attention", {"layer": 1, "head": 2, "query": "pixel:200,100"}),
        ("attention", {"query": "patch:3,4", "layer": "all"}),
        ("rollout", {}),
        ("similarity", {"query": "patch:3,4"}),
        ("pca", {}),
    ]
    for method, given in questions:
        shown, alone = view.explain(method, **given), visattn.explain(model, PHOTO, method=method, **given)
        assert torch.equal(shown.map.values, alone.map.values), method
        assert shown.provenance == alone.provenance
    for method in ("relevance", "saliency", "norm_attention"):
        with pytest.raises(OptionError, match=rf"method '(captum\.)?{method}' needs the model"):
            view.explain(method)


def test_classes_are_those_of_a_softmax_by_hand() -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=1).eval()
    view = visattn.study(model, PHOTO, methods=[], labels="imagenet")[0]
    with torch.no_grad():
        logits: list[float] = model(visattn.prepare(visattn.load_image(PHOTO), model).pixels)[0].double().tolist()
    shares = {i: 1 / sum(2.718281828459045 ** (other - one) for other in logits) for i, one in enumerate(logits)}
    best = sorted(shares, key=lambda i: -shares[i])[:5]
    assert [one.index for one in view.classes] == best
    assert [one.probability for one in view.classes] == pytest.approx([shares[i] for i in best], rel=1e-5)
    assert all(one.name for one in view.classes)


def test_studies_of_two_models_join_into_one(tmp_path: Path) -> None:
    one, other = (visattn.study(of_timm(name), ["photo:coffee", PHOTO], methods=["attention"]) for name in list(TIMM)[:2])
    both = load_study((one + other).save(tmp_path / "both.attn"))
    assert len(both) == 4
    assert [view.provenance.image for view in both] == ["coffee.png", "chelsea.png"] * 2
    assert both[0].provenance.model != both[2].provenance.model
    same_view(other[1], both[3])


def test_texts_of_words_survive_the_file(dinov2: nn.Module, tmp_path: Path) -> None:
    made = visattn.study(dinov2, PHOTO, methods=[], img_size=56)[0]
    told = {"word0": "a", "word1": "<script>alert(1)</script>", "word2": "\u202egnp\x00" + "x" * 10_000}
    view = View(made.photo, made.geometry, made.recording, texts=told)
    assert dict(load_study(Study((view,)).save(tmp_path / "words.attn"))[0].texts) == told


OPERATORS: dict[str, Callable[[], Operator]] = {
    "windows": lambda: SoftmaxOperator(
        torch.randn(1, 2, 3, 4, 5),
        torch.randn(1, 2, 3, 4, 5),
        torch.randn(2, 1, 4, 4),
        None,
        *[torch.randperm(12).view(3, 4)] * 2,
    ),
    "padding": lambda: SoftmaxOperator(
        torch.randn(1, 2, 2, 3, 5),
        torch.randn(1, 2, 2, 3, 5),
        torch.randn(1, 2, 2, 3, 3),
        0.3,
        *[torch.tensor([[0, 2, 4], [1, 3, -1]])] * 2,
    ),
    "masked": lambda: SoftmaxOperator(
        torch.randn(1, 2, 4, 5), torch.randn(1, 2, 6, 5), torch.zeros(4, 6).masked_fill(torch.ones(4, 6).triu(1) > 0, -torch.inf)
    ),
    "half precision": lambda: SoftmaxOperator(torch.randn(1, 2, 4, 5).bfloat16(), torch.randn(1, 2, 4, 5).bfloat16()),
    "weights of windows": lambda: MatrixOperator(torch.rand(1, 2, 3, 4, 4), *[torch.randperm(12).view(3, 4)] * 2),
    "sum": lambda: SumOperator([(1.0, MatrixOperator(torch.rand(1, 2, 3, 4))), (-0.3, MatrixOperator(torch.rand(1, 2, 3, 4)))]),
    "sampled": lambda: SampledOperator(torch.randint(9, (1, 2, 4, 6)), torch.rand(1, 2, 4, 6), 9),
    "sampled windows": lambda: SampledOperator(
        torch.randint(4, (1, 2, 3, 4, 6)), torch.rand(1, 2, 3, 4, 6), 4, *[torch.randperm(12).view(3, 4)] * 2
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_survive_as_tensors(name: str) -> None:
    operator = OPERATORS[name]()
    facts, tensors = operands_of(operator)
    again = operator_of(facts, lambda wanted: tensors.get(wanted))
    assert again.shape == operator.shape
    assert torch.equal(again.dense(), operator.dense())


def test_a_cells_number_of_another_key_is_refused() -> None:
    facts, tensors = operands_of(OPERATORS["sampled"]())
    tensors["cells"] = tensors["cells"] + 1
    if int(tensors["cells"].max()) == 9:
        with pytest.raises(ValueError, match="cells must be indices from 0 to 8"):
            operator_of(facts, lambda wanted: tensors.get(wanted))


BAD: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda model: visattn.study(model, []), "no images were given"),
    (lambda model: visattn.study(model), "no images were given"),
    (lambda model: visattn.study(model, [PHOTO, PHOTO], inputs={"a": 1}), "inputs are those of one image, and 2 were given"),
    (lambda model: visattn.study(model, PHOTO, name=3), "name must be a string"),  # type: ignore[arg-type]
    (lambda model: visattn.study(model, PHOTO, methods="rollout"), r"methods must be a list of names.*methods=\['rollout'\]"),
    (lambda model: visattn.study(model, PHOTO, methods=["rolout"]), "rollout"),
    (lambda model: visattn.study(model, PHOTO, methods=["rollout"], head=3), "study has no option head"),
    (lambda model: visattn.study(model, PHOTO, methods={"a": {"method": "rollout", "of": 3}}), "has no parameter 'of'"),
    (lambda model: visattn.study(model, PHOTO, methods=[]).save("study.pt"), "Choose a name that ends in .attn"),
    (lambda model: visattn.study(model, PHOTO, methods=[])[0].explanation("rollout"), "map"),
    (lambda _: Study(()), "at least one view"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_bad_arguments_are_refused_in_one_line(call: Callable[[nn.Module], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        call(timm.create_model("test_vit").eval())
    assert "\n" not in str(caught.value)


def test_a_recording_of_two_images_is_no_view(dinov2: nn.Module, tmp_path: Path) -> None:
    made = visattn.study(dinov2, PHOTO, methods=[], img_size=56)[0]
    pixels: Tensor = visattn.prepare(made.photo, dinov2, img_size=56).pixels
    with torch.no_grad(), visattn.capture(dinov2) as recording:
        dinov2(pixels.expand(2, -1, -1, -1))
    with pytest.raises(OptionError, match="one forward pass over one image"):
        Study((View(made.photo, made.geometry, recording),)).save(tmp_path / "two.attn")
    assert not (tmp_path / "two.attn").exists()


def test_a_file_that_exists_is_kept_if_asked(dinov2: nn.Module, tmp_path: Path) -> None:
    made = visattn.study(dinov2, PHOTO, methods=[], img_size=56)
    path = made.save(tmp_path / "deep" / "a.attn")
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        made.save(path, overwrite=False)
    assert path.read_bytes() == before


def test_reprs_are_short(dinov2: nn.Module) -> None:
    made = visattn.study(dinov2, PHOTO, methods=["attention"], img_size=56)
    assert len(repr(made)) <= 400
    assert len(repr(made[0])) <= 400


def test_a_map_with_holes_survives_the_file(dinov2: nn.Module, tmp_path: Path) -> None:
    made = visattn.study(dinov2, PHOTO, methods=["attention"], img_size=56)[0]
    shown = made.maps["attention"]
    with_holes = replace(shown, layout=replace(shown.layout, holes=(2, 5)))
    view = View(made.photo, made.geometry, made.recording, {"attention": with_holes})
    again = load_study(Study((view,)).save(tmp_path / "holes.attn"))[0].maps["attention"]
    assert torch.equal(again.values.isnan(), with_holes.values.isnan())
    assert torch.equal(again.values.nan_to_num(), with_holes.values.nan_to_num())


def test_a_query_that_is_a_tensor_is_saved(dinov2: nn.Module, tmp_path: Path) -> None:
    made = visattn.study(dinov2, PHOTO, methods=[], img_size=56)[0]
    query = torch.zeros(len(made.recording[-1].queries))
    query[3] = 1
    view = View(made.photo, made.geometry, made.recording, {"one": made.explain("attention", query=query).map})
    assert load_study(Study((view,)).save(tmp_path / "query.attn"))[0].maps["one"].values.shape == view.maps["one"].values.shape


def test_importance_is_the_gradient_of_a_gate_on_each_head() -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2).eval()
    found = visattn.study(model, PHOTO, methods=["relevance"], target=7, name="mine", labels="imagenet")[0].importance
    assert found is not None
    assert found.target == "logit of cock (class 7)"
    pixels = visattn.prepare(visattn.load_image(PHOTO), model).pixels
    for layer, block in enumerate(model.blocks):
        gates = torch.ones(3, requires_grad=True)
        hook = block.attn.proj.register_forward_pre_hook(lambda _, given, g=gates: (given[0] * g.repeat_interleave(64),))
        (own,) = torch.autograd.grad(model(pixels)[0, 7], gates)
        hook.remove()
        assert found.heads[layer] == pytest.approx(own.abs().tolist(), rel=1e-4, abs=1e-6)
    assert visattn.study(model, PHOTO, methods=["rollout"])[0].importance is None


def test_words_are_spelled_by_the_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    model = saved(tmp_path / "clip")
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "clip")(["a dog"], return_tensors="pt")
    made = visattn.study(model, PHOTO, methods=[], inputs=dict(given))
    assert dict(made[0].texts) == {"word0": "<s>", "word1": "a", "word2": "dog", "word3": "</s>"}
    same_view(made[0], load_study(made.save(tmp_path / "dog.attn"))[0])
    shutil.rmtree(tmp_path / "clip")
    model.config._name_or_path = ""
    assert visattn.study(model, PHOTO, methods=[], inputs=dict(given))[0].texts == {}


def test_options_of_the_target_hold_for_each_map() -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2).eval()
    made = visattn.study(model, PHOTO, methods={"three": {"method": "relevance", "target": 3}}, target_space="prob")
    alone = visattn.explain(model, PHOTO, method="relevance", target=3, target_space="prob")
    assert made[0].maps["three"].provenance.scores == alone.provenance.scores
    assert torch.equal(made[0].maps["three"].values, alone.map.values)
