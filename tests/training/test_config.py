"""Settings: TOML round trip, validation, and comparison of those that change results."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from visattn.errors import OptionError
from visattn.training import CaptionConfig, Config, checked, read_config
from visattn.training.config import differences, override

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.integers(-(2**31), 2**31) | st.booleans() | TEXTS | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(
    data=TEXTS,
    lr=st.floats(1e-9, 1e9),
    widths=st.lists(st.integers(1, 999), max_size=4),
    options=st.dictionaries(TEXTS, VALUES | st.lists(VALUES, max_size=3), max_size=3),
)
def test_config_survives_a_toml_round_trip(
    tmp_path_factory: pytest.TempPathFactory, data: str, lr: float, widths: list[int], options: dict[str, Any]
) -> None:
    config = Config(data=data, lr=lr, widths=tuple(widths), model_kwargs=options, channels_last=True)
    path = tmp_path_factory.getbasetemp() / "recipe.toml"
    path.write_bytes(config.toml().encode())
    assert Config(**read_config(path)) == config


def test_every_setting_is_in_the_file_and_has_help() -> None:
    values = tomllib.loads(Config().toml())
    assert sorted(values) == sorted(item.name for item in fields(Config))
    assert all(item.metadata["help"].endswith(".") for item in fields(Config))


def test_a_digest_is_json() -> None:
    digest = Config(widths=(1, 2)).digest()
    assert json.loads(json.dumps(digest)) == digest
    assert digest["widths"] == [1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning": 1}, r"^here: unknown key 'learning'.* Known: data, root, "),
        ({"epoch": 3}, r"^here: unknown key 'epoch'; did you mean 'epochs'\?"),
        ({"a\nb": 3}, r"unknown key 'a\\nb'"),
        ({"epochs": "3"}, r"^here: epochs must be of type float, got '3'\.$"),
        ({"epochs": True}, r"epochs must be of type float, got True"),
        ({"batch_size": 3.0}, r"batch_size must be of type int, got 3\.0"),
        ({"batch_size": True}, r"batch_size must be of type int, got True"),
        ({"channels_last": 1}, r"channels_last must be of type bool, got 1"),
        ({"widths": [1, "a"]}, r"widths must be of type tuple"),
        ({"model_kwargs": []}, r"model_kwargs must be of type dict"),
        ({"data": 3}, r"data must be of type str"),
        ({"freeze": "layer1"}, r"freeze must be of type tuple, values of type str, got 'layer1'"),
        ({"crop_scale": [0.5]}, r"crop_scale must be of type tuple, 2 values of type float"),
    ],
)
def test_keys_and_types_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        checked(values, "here")
    assert caught.value.exit_code == 2


def test_integers_are_accepted_as_floats() -> None:
    assert checked({"epochs": 3, "widths": [1, 2]}, "here") == {"epochs": 3.0, "widths": (1, 2)}
    assert type(checked({"epochs": 3}, "here")["epochs"]) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epochs", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
        *(("lr", value) for value in (0.0, -0.1, float("nan"), float("inf"))),
        *((name, value) for name in ("batch_size", "accumulate", "log_every", "save_every") for value in (0, -1)),
        *(
            (name, value)
            for name in ("train_count", "test_count", "img_size", "workers", "maps_every", "seed")
            for value in (-1, 2**40)
        ),
        *(
            (name, value)
            for name in ("label_smoothing", "reprob", "ema", "momentum", "max_unreadable")
            for value in (-0.1, 1.1, float("nan"))
        ),
        *((name, value) for name in ("mixup", "cutmix", "clip_grad", "weight_decay", "min_lr") for value in (-0.1, float("nan"))),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"^{name} must be "):
        Config(**{name: value})


@pytest.mark.parametrize("value", [None, {"a": 1}, [1, None]])
def test_model_options_that_toml_cannot_store_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match=r"model_kwargs must be numbers, strings, booleans or lists of these, got act="):
        Config(model_kwargs={"act": value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("augment", "flop", r"unknown augment 'flop'; did you mean 'flip'\?"),
        ("amp", "int8", r"unknown amp 'int8'"),
        ("nonfinite", "hope", r"unknown nonfinite 'hope'"),
        ("attention", "cbm", r"unknown attention 'cbm'.* Known: none, .*cbam"),
    ],
)
def test_unknown_choices_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Config(**{name: value})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lr = \n", r"recipe\.toml: is not valid TOML: .*line 1"),
        (b"\xff", r"recipe\.toml: is not valid TOML"),
        (b"lr = 0.1\nlr = 0.2", r"is not valid TOML"),
        (b"[a]\nb = 1", r"recipe\.toml: unknown key 'a'"),
        (None, r"recipe\.toml: cannot be read \(no such file or directory\)\. Check the path\."),
    ],
)
def test_invalid_config_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_config(path)


def test_differences_list_only_settings_that_change_results() -> None:
    before = Config(lr=0.1, model_kwargs={"a": 1})
    assert differences(before.digest(), before) == []
    now = replace(
        before,
        lr=0.05,
        model_kwargs={"a": 2},
        workers=4,
        save_every=7,
        max_unreadable=0.5,
        root="x",
        device="cpu",
        nonfinite="skip",
    )
    assert differences(before.digest(), now) == ["model_kwargs {'a': 1} -> {'a': 2}", "lr 0.1 -> 0.05"]


def test_a_setting_missing_in_an_older_config_has_its_default() -> None:
    older = {key: value for key, value in Config().digest().items() if key != "reprob"}
    assert differences(older, Config()) == []  # it starts without effect
    assert differences(older, Config(reprob=0.5)) == ["reprob 0.0 -> 0.5"]


def test_overrides_are_validated() -> None:
    assert override(Config(), lr=1).lr == 1.0
    with pytest.raises(OptionError, match="options: unknown key 'rate'"):
        override(Config(), rate=1)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Config, {"crop_scale": (0.5, 1.0)}, "crop_scale needs augment imagenet, got flip. Change one of them."),
        (Config, {"crop_ratio": (1.0, 1.0), "augment": "crop"}, "crop_ratio needs augment imagenet, got crop."),
        (Config, {"min_lr": 0.01, "schedule": "step"}, "min_lr needs schedule cosine or linear, got step."),
        (Config, {"decay_rate": 0.5}, "decay_rate needs schedule step, got cosine."),
        (CaptionConfig, {"estimator": "gumbel"}, "estimator needs attention hard, got soft."),
        *((CaptionConfig, {name: 0.25}, f"{name} needs attention hard") for name in ("semi_sampling", "reward", "entropy")),
        *((CaptionConfig, {name: 0.25}, f"{name} needs attention hard") for name in ("decay", "temperature")),
        (CaptionConfig, {"cost": "sum", "attention": "uniform"}, "cost needs attention hard, got uniform."),
        (CaptionConfig, {"reward": 0.5, "attention": "hard", "estimator": "gumbel"}, "reward needs estimator reinforce"),
        (CaptionConfig, {"temperature": 0.5, "attention": "hard"}, "temperature needs estimator gumbel"),
        (CaptionConfig, {"reduction": "mean", "regularizer": 0.0}, "reduction needs a regularizer other than 0, got mean."),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused(kind: type[Config | CaptionConfig], values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        kind(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_scale": (0.9, 0.5)}, "crop_scale must be two numbers in order, above 0 and at most 1, got 0.9 and 0.5."),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale must be two numbers in order, above 0 and at most 1, got 0.5 and 1.5."),
        ({"crop_ratio": (0.0, 1.0)}, "crop_ratio must be two numbers in order, above 0 and at most 100, got 0 and 1."),
        ({"jitter": -0.5}, "jitter must be a number from 0 to 10, got -0.5."),
        ({"jitter": 11.0}, "jitter must be a number from 0 to 10, got 11.0."),
    ],
    ids=str,
)
def test_ranges_of_augmentations_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        Config(augment="imagenet", **values)


def test_valid_combinations_of_settings_are_accepted() -> None:
    assert Config(augment="imagenet", auto_augment="rand-m9", reprob=0.5).reprob == 0.5
    assert CaptionConfig(attention="hard", estimator="gumbel", temperature=0.5, entropy=0.1).temperature == 0.5
    assert CaptionConfig(attention="hard", reward=0.5, decay=0.5, cost="sum").cost == "sum"


@pytest.mark.parametrize(
    "values",
    [
        {"data": 3},
        {"lr": "0.1"},
        {"lr": 10**400},
        {"epochs": 10**400},
        {"seed": 10**5000},
        {"seed": True},
        {"widths": (4, 10**400)},
        {"widths": (0,)},
        {"model_kwargs": {3: 1}},
        {"model_kwargs": {"a": 10**5000}},
        {"model_kwargs": {"a": [[[[[[1]]]]]]}},
        {"model_kwargs": {"a": "\udcff"}},
        {"data": "\udcff"},
        {"augment": []},
        {"img_size": 100_000},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_that_toml_cannot_store_raise_a_one_line_error(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))) as caught:
        Config(**values)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_overlong_number_in_a_file_raises_a_one_line_error(tmp_path: Path) -> None:
    for number in ("9" * 5000, "0x" + "f" * 5000):
        for key in ("seed", "lr", "data", "widths"):
            (tmp_path / "recipe.toml").write_text(f"{key} = {number}\n")
            with pytest.raises(OptionError, match=rf"recipe\.toml: |{key}") as caught:
                Config(**read_config(tmp_path / "recipe.toml"))
            assert len(str(caught.value)) < 500


def test_a_recipe_is_printed_without_control_characters() -> None:
    config = Config(data="a\x1b]0;x\x07\x9b\u202e\n", model_kwargs={"k\x1b": "v\x9b"})
    assert all(c.isprintable() or c == "\n" for c in config.toml())
    assert Config(**checked(tomllib.loads(config.toml()), "here")) == config
