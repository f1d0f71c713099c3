"""Images by name: files, URLs, shipped photos and generated scenes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests.cli.test_commands import Run, run as run
from visattn import data
from visattn.core.images import image_facts
from visattn.core.images.sources import as_file
from visattn.data import scenes
from visattn.errors import ImageError


class Pictures(BaseHTTPRequestHandler):
    """Serve one photo, a page and an empty file."""

    def do_GET(self) -> None:
        contents = {"/cat.png": data.photo_path("chelsea").read_bytes(), "/page.jpg": b"<html>", "/empty.png": b""}
        content = contents.get(self.path.split("?")[0])
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        """Suppress log messages."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("name", data.PHOTOS)
def test_a_shipped_photo_is_its_file(name: str) -> None:
    photo, file = visattn.load_image(f"photo:{name}"), visattn.load_image(data.photo_path(name))
    assert photo.tobytes() == file.tobytes()
    assert image_facts(photo) == image_facts(file)


@pytest.mark.parametrize("number", [0, 7, 123_456])
def test_a_scene_is_that_of_the_generator(number: int) -> None:
    expected = scenes.Scenes(number + 1, (224, 224), seed=0).scene(number).image
    photo = visattn.load_image(f"scene:{number}")
    assert np.array_equal(np.asarray(photo), expected)
    assert image_facts(photo).name == f"scene:{number}"


def test_an_image_is_read_from_a_url(server: str) -> None:
    photo = visattn.load_image(f"{server}/cat.png?size=large")
    assert photo.tobytes() == visattn.load_image("photo:chelsea").tobytes()
    assert image_facts(photo).sha256 == image_facts(visattn.load_image("photo:chelsea")).sha256


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("photo:dog", r"photo:dog: there is no such photo, only astronaut, coffee, rocket, chelsea"),
        ("photo:cofee", "did you mean photo:coffee"),
        ("scene:-1", "a scene is a whole number of at most nine digits"),
        ("scene:seven", "a scene is a whole number of at most nine digits; pass for example scene:7"),
        ("SERVER/dog.png", "the server answers 404 Not Found; check the address"),
        ("SERVER/page.jpg", "not an image"),
        ("SERVER/empty.png", "empty file"),
        ("http://127.0.0.1:9/dog.png", r"cannot be reached \(.*refused\); download the image and pass its file"),
        ("http://[", r"is no valid address \(Invalid IPv6 URL\); correct it"),
    ],
)
def test_a_bad_source_is_named_with_the_fix(source: str, message: str, server: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        visattn.load_image(source.replace("SERVER", server))
    assert str(caught.value).startswith(source.replace("SERVER", server))


def test_a_file_is_read_whose_name_begins_like_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (5, 4), (9, 9, 9)).save("scene:7.png")
    assert visattn.load_image("./scene:7.png").size == (5, 4)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("photo:chelsea", "chelsea.png"),
        ("scene:7", "scene7.png"),
        ("https://example.org/a/cat%20one.jpg?x=1#y", "cat one.jpg"),
        ("https:/example.org/cat.jpg", "cat.jpg"),
        ("https://example.org", "image"),
        ("folder/dog.jpg", "folder/dog.jpg"),
    ],
)
def test_results_get_the_name_of_their_source(source: str, name: str) -> None:
    assert as_file(source) == Path(name)
    assert as_file(Path(source)) == Path(name)


def test_every_function_that_takes_an_image_takes_its_name() -> None:
    model = visattn.load_model("scenes_vit")
    prepared = visattn.prepare("scene:7", model)
    assert torch.equal(prepared.pixels, visattn.prepare(visattn.load_image("scene:7"), model).pixels)
    assert len(visattn.prepare_batch(["scene:7", "photo:rocket"], model).photos) == 2
    assert visattn.overlay("scene:7", np.eye(224, dtype=np.float32)).size == (224, 224)
    explanation = visattn.explain(model, "scene:7", method="attention")
    assert visattn.contact_sheet("scene:7", explanation.map, explanation.geometry).size[0] > 224


def test_commands_take_names_and_urls(run: Run, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("overlay", "scene:7", "photo:chelsea", f"{server}/cat.png", "--model", "scenes_vit", "-o", "maps")
    assert code == 0
    assert out.split() == [f"maps/{name}.scenes_vit.overlay.png" for name in ("scene7", "2.chelsea.png", "3.cat.png")] or sorted(
        path.name for path in Path("maps").iterdir()
    ) == [f"{name}.scenes_vit.overlay.png" for name in ("cat", "chelsea", "scene7")]
