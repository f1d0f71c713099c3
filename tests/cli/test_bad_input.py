"""Bad input on the command line: one line with cause and fix, the exit code of the error class, and no partial files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

from tests.cli.test_commands import NAMED, TINY, Run, photo, python, run
from tests.samples import sampled

__all__ = ["photo", "run"]


def bad_image(kind: str, folder: Path, photo: Path) -> Path:
    """Write a file that cannot be used as an image."""
    path = folder / f"{kind}.png"
    if kind == "I01-empty":
        path.write_bytes(b"")
    elif kind == "I02-truncated":
        path.write_bytes(photo.read_bytes()[:2000])
    elif kind == "I04-html":
        path.write_text("<html><body>not found</body></html>")
    elif kind == "I18-bomb":
        header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (30000).to_bytes(4) * 2 + b"\x01\0\0\0\0"
        path.write_bytes(header + zlib.crc32(header[12:29]).to_bytes(4) + b"\0\0\0\0IEND\xaeB`\x82")
    elif kind == "I29-directory":
        path.mkdir()
    return path


BAD_IMAGES = {
    "I01-empty": "empty file",
    "I02-truncated": "truncated",
    "I04-html": "not an image (starts with '<html>",
    "I18-bomb": "900000000 pixels exceed the limit of 64 million",
    "I29-directory": "is a directory",
    "missing": "no such file",
}


@pytest.mark.parametrize(("kind", "cause"), BAD_IMAGES.items(), ids=list(BAD_IMAGES))
def test_one_bad_image_exits_with_code_3_and_a_one_line_error(
    run: Run, photo: Path, tmp_path: Path, kind: str, cause: str
) -> None:
    path = bad_image(kind, tmp_path, photo)
    code, out, err = run("overlay", path, *TINY)
    assert (code, out) == (3, "")
    assert err.startswith(f"visattn: error: {path}: ")
    assert cause in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*attention*"))


def test_bad_image_among_good_ones_exits_with_code_1_and_the_others_are_drawn(run: Run, photo: Path, tmp_path: Path) -> None:
    code, out, err = run("overlay", bad_image("I01-empty", tmp_path, photo), photo, *TINY, "-o", "maps")
    assert (code, out) == (1, f"maps/dog.{NAMED}.overlay.png\n")
    assert "empty file" in err


def test_wrong_extension_works(run: Run, photo: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "really_png.jpg"
    renamed.write_bytes(photo.read_bytes())
    assert run("overlay", renamed, *TINY)[:2] == (0, f"really_png.{NAMED}.overlay.png\n")


@pytest.mark.parametrize("orientation", sampled([6, 1, 2, 3, 8, 4, 5, 7], 4))
def test_every_exif_orientation_gives_the_same_overlay(run: Run, photo: Path, tmp_path: Path, orientation: int) -> None:
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # orientation -> Transpose whose inverse a viewer applies
    stored: Image.Image = Image.open(photo)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    assert run("overlay", photo, *TINY, "-o", "a.png")[0] == run("overlay", "turned.png", *TINY, "-o", "b.png")[0] == 0
    assert np.array_equal(np.asarray(Image.open("a.png")), np.asarray(Image.open("b.png")))


@pytest.mark.parametrize("mode", ["P", "I;16", "LA", "RGBA"], ids=["I08-P", "I09-I16", "I12-LA", "I12-RGBA"])
def test_every_mode_of_photo_works(run: Run, tmp_path: Path, mode: str) -> None:
    gray = np.arange(60 * 90, dtype=np.uint16).reshape(60, 90) * 12
    color = Image.fromarray((gray >> 8).astype(np.uint8)).convert("RGBA")
    image = {
        "P": lambda: color.quantize(),
        "I;16": lambda: Image.fromarray(gray),
        "LA": lambda: color.convert("LA"),
        "RGBA": lambda: color,
    }[mode]()
    path = tmp_path / "odd.png"
    if mode == "P":
        image.info["transparency"] = 3
    image.save(path)
    assert run("overlay", path, *TINY)[0] == 0


@pytest.mark.parametrize(
    "name", ["a b.png", "it's #1?%20.png", "line\nbreak.png", "tab\t.png", "‮txt.png", "😀.png", "x" * 240 + ".png"]
)
def test_odd_names_work_and_are_escaped_in_messages(run: Run, photo: Path, tmp_path: Path, name: str) -> None:
    odd = tmp_path / name
    odd.write_bytes(photo.read_bytes())
    code, out, err = run("overlay", odd, *TINY, "-o", "out.png")
    assert (code, out) == (0, "out.png\n")
    assert all(line.startswith("visattn: ") for line in err.splitlines())
    assert "‮" not in err


def test_leading_dash_works_after_a_double_dash(run: Run, photo: Path, tmp_path: Path) -> None:
    (tmp_path / "-x.png").write_bytes(photo.read_bytes())
    assert run("overlay", *TINY, "--", "-x.png")[:2] == (0, f"-x.{NAMED}.overlay.png\n")


@pytest.mark.full
def test_undecodable_name_works_and_the_output_keeps_its_bytes(photo: Path, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"bad\xff.png")).write_bytes(photo.read_bytes())
    command = [sys.executable.encode(), b"-m", b"visattn", b"overlay", b"bad\xff.png", *(option.encode() for option in TINY)]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=6000, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / os.fsdecode(b"bad\xff." + f"{NAMED}.overlay.png".encode())).exists()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--opacty", "1"), "No such option '--opacty'. Did you mean '--opacity'?"),
        (("--opacity", "2"), "opacity must be a number from 0 to 1, got 2.0"),
        (("--opacity", "nan"), "opacity must be a number from 0 to 1, got nan"),
        (("--opacity", "much"), "'much' is not a valid float"),
        (("--method", "rolout"), "unknown method 'rolout'; did you mean 'rollout'?"),
        (("--method", "rollout", "--layer", "3"), "method 'rollout' has no parameter 'layer'"),
        (("--colormap", "infern"), "unknown colormap 'infern'; did you mean 'inferno'?"),
        (("--query", "register:0"), "the model has no token 'register:0'; its prefix tokens: cls"),
        (("--query", "pixel:900,1"), "lies outside the photo of 90 x 60 pixels"),
        (("--layer", "77"), "layer must lie in [-12, 11], got 77"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_writes_nothing(
    run: Run, photo: Path, tmp_path: Path, options: tuple[str, ...], cause: str
) -> None:
    code, out, err = run("overlay", photo, *TINY, *options)
    assert (code, out) == (2, "")
    assert cause in err
    assert err.strip().count("\n") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dog.png"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("heads", "a.png", "--legend"), "No such option '--legend' here; these commands have it: overlay, batch. See --help."),
        (("overlay", "a.png", "--by-layer"), "No such option '--by-layer' here; these commands have it: heads. See --help."),
        (
            ("heads", "a.png", "b.png"),
            "Got unexpected extra argument (b.png). These commands take several images: overlay, view, ",
        ),
        (("train", "classify", "--zzz"), "No such option '--zzz'. See --help."),
        (("list", "a", "b"), "Got unexpected extra argument (b). See --help."),
    ],
)
def test_an_option_or_argument_of_another_command_leads_to_that_command(run: Run, arguments: tuple[str, ...], told: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"visattn: error: {told}")
    assert err.count("\n") == 1


def test_unknown_command_is_refused(run: Run) -> None:
    code, _, err = run("overlya")
    assert code == 2
    assert "overlya" in err


def test_an_existing_output_is_refused_and_untouched(run: Run, photo: Path, tmp_path: Path) -> None:
    (tmp_path / "out.png").write_text("mine")
    code, _, err = run("overlay", photo, *TINY, "-o", "out.png")
    assert code == 2
    assert err == "visattn: error: out.png: exists already; pass --overwrite to replace it or choose another name (-o/--output)\n"
    assert (tmp_path / "out.png").read_text() == "mine"
    assert run("overlay", photo, *TINY, "-o", "out.png", "--overwrite")[0] == 0


def test_the_input_is_never_the_output(run: Run, photo: Path) -> None:
    before = photo.read_bytes()
    code, _, err = run("overlay", photo, *TINY, "-o", photo, "--overwrite")
    assert code == 2
    assert "the output is the input itself" in err
    assert photo.read_bytes() == before


def test_output_folder_is_created(run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, "-o", "new/deeper/out.png")[:2] == (0, "new/deeper/out.png\n")


def test_file_instead_of_the_output_folder_is_refused_before_the_model_loads(run: Run, photo: Path) -> None:
    code, _, err = run("overlay", photo, "--model", "no_such_model", "-o", "dog.png/out.png")
    assert code == 2
    assert "dog.png is a file, not a folder" in err


@pytest.mark.full
def test_a_broken_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m visattn list --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "told"),
    [(">&-", "stdout is closed: printed output is lost"), ("> /dev/full", "cannot be written (no space left on device)")],
)
def test_closed_or_full_stdout_gives_a_one_line_error_and_exit_code_5(where: str, told: str) -> None:
    command = f"{sys.executable} -m visattn list --methods {where}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ZeroDivisionError("nobody thought\nof this"),
            "internal error of visattn (ZeroDivisionError: nobody thought). Please report it with the output of --debug.",
        ),
        (
            ModuleNotFoundError("No module named 'PIL'", name="PIL"),
            "the module 'PIL' is not installed. visattn doctor checks the installation.",
        ),
    ],
)
def test_an_internal_error_is_one_line_with_the_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("visattn.cli.usage.import_module", fail)
    code, out, err = run("list")
    assert (code, out) == (70, "")
    assert err == f"visattn: error: {told}\n"


NUMBERS = ["--5", "²", "٣", "1" * 4400, "1e3", "+-1", "0x1"]


@pytest.mark.parametrize("number", sampled(NUMBERS, 3), ids=lambda number: ascii(number[:5]))
@pytest.mark.parametrize("option", ["--layer={}", "--query=patch:{},1", "--query=patch:1,{}", "--target={}"])
def test_invalid_number_gives_a_one_line_error(option: str, number: str, run: Run, photo: Path) -> None:
    method = "relevance" if option.startswith("--target") else "attention"
    code, out, err = run("overlay", photo, *TINY, "--method", method, option.format(number))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("visattn: error: ")


def test_an_unknown_model_gets_the_nearest_names(run: Run, photo: Path) -> None:
    code, _, err = run("overlay", photo, "--model", "vit_bas_patch16_224")
    assert code == 4
    assert "unknown model 'vit_bas_patch16_224'. Close matches: vit_base_patch16_224" in err


@pytest.mark.full
def test_missing_hub_and_cache_give_cause_and_fix_at_once(
    photo: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    started = time.perf_counter()
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    model = ("--model", "vit_tiny_patch16_224")  # no package has its weights
    done = python("-m", "visattn", "overlay", str(photo), *model, "-o", str(tmp_path / "out.png"), environment=nowhere)
    record_property("figure", ("overlay without hub and cache ends, seconds", time.perf_counter() - started, 10))
    assert done.returncode == 4
    assert "the hub cannot be reached" in done.stderr
    assert "--weights none" in done.stderr
    assert done.stderr.strip().count("\n") == 0


CHECKPOINTS = {
    "M08-empty": (b"", "empty file"),
    "M08-html": (b"<!DOCTYPE html><html>", "not a checkpoint, starts with '<!DOCTYPE html>'"),
    "M08-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a git-lfs pointer"),
    "M08-noise": (b"\x00\x01\x02\x03" * 100, "cannot be read as"),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(("content", "cause"), CHECKPOINTS.values(), ids=list(CHECKPOINTS))
def test_a_damaged_checkpoint_is_named(run: Run, photo: Path, tmp_path: Path, content: bytes, cause: str, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(content)
    code, _, err = run("overlay", photo, "--model", "vit_tiny_patch16_224", "--weights", file)
    assert code == 4
    assert f"{file}: " in err
    assert cause in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_checkpoint_is_named(run: Run, photo: Path, tmp_path: Path, suffix: str, share: float) -> None:
    tensors = {"weight": torch.zeros(64, 64)}
    file = tmp_path / f"weights{suffix}"
    safetensors.torch.save_file(tensors, file) if suffix == ".safetensors" else torch.save(tensors, file)
    content = file.read_bytes()
    file.write_bytes(content[: max(1, int(len(content) * share))])
    code, _, err = run("overlay", photo, "--model", "vit_tiny_patch16_224", "--weights", file)
    assert code == 4
    assert ("truncated: an archive without its end" if suffix == ".pth" else "cannot be read as safetensors") in err


def test_a_pickle_that_runs_code_is_refused_and_not_run(run: Run, photo: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    torch.save({"weight": Payload()}, tmp_path / "weights.pth")
    code, _, err = run("overlay", photo, "--model", "vit_tiny_patch16_224", "--weights", tmp_path / "weights.pth")
    assert code == 4
    assert "refused, because loading it would run code" in err
    assert not (tmp_path / "canary").exists()


def tiny_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: value.clone() for name, value in timm.create_model("vit_tiny_patch16_224").state_dict().items()}


def test_a_weight_that_is_nan_is_named(run: Run, photo: Path, tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["blocks.3.attn.qkv.weight"][5, 7] = torch.nan
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    code, _, err = run("overlay", photo, "--model", "vit_tiny_patch16_224", "--weights", tmp_path / "w.safetensors")
    assert code == 4
    assert "blocks.3.attn.qkv.weight has 1 NaN or infinite values" in err


def wrong_weights(kind: str) -> dict[str, torch.Tensor]:
    weights = tiny_weights()
    if kind == "M03":
        weights["blocks.4.norm1.weight"] = torch.zeros(100)
    elif kind == "M04":
        weights["stray"] = weights.pop("blocks.0.norm1.weight")
    elif kind == "M17":
        weights["patch_embed.proj.weight"] = torch.zeros(192, 4, 16, 16)
    return weights


MISFITS = {
    "M03": "w.safetensors: does not fit the model: blocks.4.norm1.weight: checkpoint 100, model 192; choose",
    "M04": "w.safetensors: does not fit the model: 1 missing: blocks.0.norm1.weight; 1 unexpected: stray; choose",
    "M17": "the model takes 4 channels, got an image of mode RGB. Choose another model.",
}


@pytest.mark.parametrize(("kind", "cause"), MISFITS.items(), ids=list(MISFITS))
def test_mismatched_checkpoint_gives_a_one_line_error(run: Run, photo: Path, tmp_path: Path, kind: str, cause: str) -> None:
    safetensors.torch.save_file(wrong_weights(kind), tmp_path / "w.safetensors")
    code, out, err = run("overlay", photo, "--model", "vit_tiny_patch16_224", "--weights", "w.safetensors")
    assert (code, out) == (4, "")
    assert err.startswith(f"visattn: error: {cause}")
    assert err.count("\n") == 1


def test_changes_to_a_checkpoint_are_reported(run: Run, photo: Path, tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].sum(1, keepdim=True)
    halves = {f"module.{key}": value.half() for key, value in weights.items()}
    torch.save({"epoch": 3, "state_dict": halves, "state_dict_ema": halves}, tmp_path / "w.pth")
    code, _, err = run("overlay", photo, *TINY, "--weights", tmp_path / "w.pth")
    assert code == 0
    for said in (
        "the weights were read from 'state_dict_ema' of the checkpoint; 'state_dict' not used",
        "the prefix 'module.' of the checkpoint's names was removed",
        "weights stored as float16 were cast to float32",
        "it received the photo's luminance",
    ):
        assert re.search(f"^visattn: (  |warning: dog.png: ).*{re.escape(said)}", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("device", "exit_code", "cause"),
    [
        pytest.param(
            "cuda",
            4,
            "device 'cuda' does not work on this machine. Choose one of: cpu.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("gpu", 2, "unknown device 'gpu'. Choose cpu, or cuda or cuda:N for a GPU."),
    ],
)
def test_missing_device_gives_a_one_line_error(
    run: Run, photo: Path, tmp_path: Path, device: str, exit_code: int, cause: str
) -> None:
    code, out, err = run("overlay", photo, *TINY, "--device", device)
    assert (code, out, err) == (exit_code, "", f"visattn: error: {cause}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["dog.png"]


def test_checkpoint_file_gives_the_same_images_as_its_weights(run: Run, photo: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file(tiny_weights(), tmp_path / "w.safetensors")
    assert run("overlay", photo, *TINY, "--weights", tmp_path / "w.safetensors", "-o", "a.png")[0] == 0
    assert run("overlay", photo, *TINY, "-o", "b.png")[0] == 0  # seed 0 gives the same weights
    assert Image.open("a.png").tobytes() == Image.open("b.png").tobytes()


def test_rollout_of_a_model_without_attention_is_refused(run: Run, photo: Path) -> None:
    code, _, err = run("overlay", photo, "--model", "resnet18", "--weights", "none", "--method", "rollout")
    assert code == 4
    assert "no attention captured: no layer of ResNet multiplied a softmax with values" in err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "attend over different tokens"),
        ("pvt_v2_b0", "its keys are other tokens"),
        ("cait_xxs24_224", "pools tokens that these layers do not have"),
        ("xcit_nano_12_p16_224", "there is no self-attention to multiply"),
        ("lambda_resnet26t", "no weight belongs to a pair of tokens"),
    ],
)
def test_rollout_of_layers_that_do_not_compose_is_refused(run: Run, photo: Path, name: str, reason: str) -> None:
    code, _, err = run("overlay", photo, "--model", name, "--weights", "none", "--method", "rollout")
    assert code == 2
    assert reason in err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("edgenext_xx_small", "channels attend to channels in this model"),
        ("lambda_resnet26t", "its softmax runs over the keys alone"),
        ("mobilevitv2_050", "learned queries attend within windows"),
    ],
)
def test_attention_without_spatial_positions_is_refused(run: Run, photo: Path, name: str, reason: str) -> None:
    code, _, err = run("overlay", photo, "--model", name, "--weights", "none", "--method", "attention")
    assert code == 2
    assert reason in err


WITHOUT_A_MATRIX = {
    "efficientvit_b0": "context_module.main multiplies tokens by sums of products of tokens (linear attention), which cannot be recorded",
    "swiftformer_xs": "no layer of SwiftFormer multiplied a softmax with values",
}


@pytest.mark.parametrize(("name", "reason"), WITHOUT_A_MATRIX.items())
def test_attention_without_a_matrix_is_refused(run: Run, photo: Path, name: str, reason: str) -> None:
    code, _, err = run("overlay", photo, "--model", name, "--weights", "none", "--method", "attention")
    assert code == 4
    assert reason in err


def test_a_size_between_patches_is_rounded_to_whole_patches(run: Run, photo: Path) -> None:
    _, out, _ = run(
        "overlay",
        photo,
        "--model",
        "vit_tiny_patch16_224",
        "--weights",
        "none",
        "--img-size",
        "70",
        "--resize",
        "model",
        "--json",
    )
    assert json.loads(out)[0]["provenance"]["geometry"]["input"] == [64, 64]


def test_map_with_nan_is_refused_with_the_number_of_values(run: Run, photo: Path, tmp_path: Path) -> None:
    values = np.zeros((60, 90), np.float32)
    values[3, 4:7] = np.nan
    np.save(tmp_path / "m.npy", values)
    code, out, err = run("overlay", photo, "--map", "m.npy")
    assert (code, out) == (4, "")
    assert "3 of 5400 map values are NaN or infinite" in err
    assert not (tmp_path / "dog.map.png").exists()


@pytest.mark.filterwarnings("always")
def test_constant_map_gives_the_photo_and_a_warning(photo: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.full((60, 90), 0.25, np.float32))
    done = python("-m", "visattn", "overlay", str(photo), "--map", str(tmp_path / "m.npy"), "-o", str(tmp_path / "out.png"))
    assert done.returncode == 0
    assert "visattn: warning: the map is constant (0.25); the photo is unchanged." in done.stderr
    assert Image.open(tmp_path / "out.png").tobytes() == Image.open(photo).tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "float64", "int64", "bool"])
def test_a_map_of_any_numeric_dtype_is_drawn(run: Run, photo: Path, tmp_path: Path, dtype: str) -> None:
    values = np.zeros((60, 90), dtype)
    values[10:20, 10:20] = 1
    np.save(tmp_path / "m.npy", values)
    code, out, _ = run("overlay", photo, "--map", "m.npy", "--opacity", "1")
    picture = np.asarray(Image.open(out.strip()))
    assert code == 0
    assert picture[15, 15].tolist() == [252, 255, 164]  # the last and the first color of inferno
    assert picture[40, 40].tolist() == [0, 0, 4]


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (("--method", "rollout"), "--method"),
        (("--model", "vit_tiny_patch16_224"), "--model"),
        (("--target", "3"), "--target"),
        (("--layer", "-1"), "--layer"),
        (("--caption",), "--caption"),
        (("--seed", "0"), "--seed"),
    ],
)
def test_options_without_effect_on_a_saved_map_are_refused(run: Run, photo: Path, given: tuple[str, ...], flag: str) -> None:
    np.save("m.npy", np.arange(6.0).reshape(2, 3))
    code, out, err = run("overlay", photo, "--map", "m.npy", *given)
    assert (code, out, err) == (2, "", f"visattn: error: {flag} has no effect with --map. Leave one of them out.\n")


@pytest.mark.parametrize("given", [("--mass", "0.6"), ("--interpolation", "nearest")], ids="=".join)
def test_options_without_effect_on_a_plain_array_are_refused(run: Run, photo: Path, given: tuple[str, ...]) -> None:
    with Image.open(photo) as picture:
        np.save("m.npy", np.random.default_rng(0).random(picture.size[::-1]))
    code, out, err = run("overlay", photo, "--map", "m.npy", *given)
    assert (code, out, err) == (
        2,
        "",
        f"visattn: error: {given[0]} has no effect with an array of --map. Leave one of them out.\n",
    )


@pytest.mark.parametrize("kind", ["model", "labels", "labels of a saved map", "map"])
def test_input_file_is_never_replaced(run: Run, photo: Path, tmp_path: Path, kind: str) -> None:
    """Check that `--overwrite` never replaces an input file."""
    path = tmp_path / {"model": "own.py", "labels": "names.png", "labels of a saved map": "names.csv", "map": "m.png"}[kind]
    path.write_text("def make(): ...\n")
    before = path.read_bytes()
    given = {
        "model": ("heads", "--model", f"{path}:make", "--stats", "-o", path),
        "labels": ("overlay", "--labels", path, "-o", path),
        "labels of a saved map": ("overlay", "--labels", path, "--save-map", path),
        "map": ("overlay", "--map", path, "-o", path),
    }[kind]
    code, out, err = run(given[0], photo, "--overwrite", *given[1:])
    assert (code, out) == (2, "")
    assert f"{path}: the output is the input itself; choose another" in err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "a" * 300),
        ("overlay", "{photo}", "--model", "a" * 300),
        ("overlay", "{photo}", "--model", f"{'a' * 300}.py:make"),
    ],
    ids=["folder", "model", "model file"],
)
def test_too_long_file_name_gives_a_one_line_error(run: Run, photo: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*(str(photo) if argument == "{photo}" else argument for argument in arguments))
    assert (code in (2, 3, 4), out, err.count("\n")) == (True, "", 1)
    assert err.startswith("visattn: error: ")


def test_pattern_without_a_match_gives_a_one_line_error(run: Run) -> None:
    assert run("list", "no_such_net*") == (
        2,
        "",
        "visattn: error: no model with attention over the image matches 'no_such_net*'. CNNs are not listed: any of timm or torchvision "
        "works with class activation maps.\n",
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/tmp/x"), "/tmp/x: no space left on device; free disk space, here or in TMPDIR"),
        (OSError(5, "Input/output error"), "a temporary file: input/output error; free disk space, here or in TMPDIR"),
    ],
    ids=["full", "broken"],
)
def test_full_disk_during_work_is_not_reported_as_a_stdout_error(
    run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, line: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("visattn.core.loading.load_model", failing)
    assert run("overlay", photo) == (5, "", f"visattn: error: {line}\n")
