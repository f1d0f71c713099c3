"""Batches: the stream against a simple list, unreadable images, and random generators that are restored."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from visattn.core.loading.blueprints import Blueprint
from visattn.errors import DataError, ImageError, ResourceError
from visattn.training.batches import Batch, InOrder, Samples, Stream, Ticket, loader, moments, patient, training_transform
from visattn.training.config import Config
from visattn.training.run.randomness import random_state, restoring, seed_all, seed_cpu, seed_of, set_random_state

CPU = torch.device("cpu")


class FakeImages:
    """Dataset of gray images, each of one gray level; some are unreadable."""

    classes, channels, size = ("a", "b"), 1, (4, 4)

    def __init__(self, levels: list[int], bad: tuple[int, ...] = ()) -> None:
        self.levels, self.bad = levels, bad

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index in self.bad:
            raise ImageError(f"{index}.png: is no picture")
        return Image.new("L", (4, 4), self.levels[index]), index % 2

    def name(self, index: int) -> str:
        return f"{index}.png"

    def fingerprint(self) -> str:
        return "0"


def noisy(picture: Image.Image) -> Tensor:
    """Convert an image to pixels, with noise from all three random generators."""
    noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
    pixels: Tensor = pil_to_tensor(picture).float()
    return pixels + noise


def samples(count: int = 6, bad: tuple[int, ...] = (), *, replace: bool = True) -> Samples:
    return Samples(FakeImages(list(range(10, 10 + count)), bad), noisy, mode="L", seed=3, replace=replace)


# order


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Draw numbers of images, batch size, processes, micro-batches and steps."""
    world, parts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = world * parts * draw(st.integers(1, 4))
    return draw(st.integers(batch, 60)), batch, world, parts, draw(st.integers(1, 12))


def tickets(count: int, batch: int, seen: int, steps: int, world: int = 1, parts: int = 1) -> list[list[Ticket]]:
    """Collect the tickets of all processes for each step."""
    taken: list[list[Ticket]] = [[] for _ in range(steps)]
    for rank in range(world):
        stream = Stream(count, batch, seen, steps, seed=5, rank=rank, world=world, parts=parts)
        pieces = list(stream)
        assert len(pieces) == len(stream) == steps * parts
        assert {len(piece) for piece in pieces} <= {batch // world // parts}
        for number, piece in enumerate(pieces):
            taken[number // parts] += piece
    return taken


@settings(max_examples=60, deadline=None)
@given(runs())
def test_each_image_is_drawn_once_per_epoch(run: tuple[int, int, int, int, int]) -> None:
    count, batch, world, parts, steps = run
    line = [ticket for step in tickets(count, batch, 0, steps, world, parts) for ticket in step]
    of_epoch: dict[int, list[int]] = {}
    for place, ticket in enumerate(sorted(line, key=lambda ticket: ticket.epoch)):
        assert ticket.epoch == place // count
        of_epoch.setdefault(ticket.epoch, []).append(ticket.number)
    for epoch, numbers in of_epoch.items():
        whole = (epoch + 1) * count <= len(line)
        assert sorted(numbers) == list(range(count)) if whole else max(Counter(numbers).values()) == 1


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(0, 12), st.integers(1, 4), st.integers(1, 3))
def test_process_and_accumulation_counts_may_change_at_any_step(
    run: tuple[int, int, int, int, int], until: int, world: int, parts: int
) -> None:
    count, batch, before, parts_before, steps = run
    until = min(until, steps)
    if batch % (world * parts):
        world = parts = 1
    expected = tickets(count, batch, 0, steps)
    found = tickets(count, batch, 0, until, before, parts_before) + tickets(
        count, batch, until * batch, steps - until, world, parts
    )
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    assert tickets(count, batch, 0, steps, before, 1) == expected


def test_each_epoch_and_seed_has_its_own_order() -> None:
    orders = [
        tuple(Stream(50, 50, epoch * 50, 1, seed=seed).ticket(epoch * 50 + i).number for i in range(50))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(range(50)) not in orders


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4))
def test_evaluation_uses_each_image_once_for_any_process_count(count: int, batch: int, world: int) -> None:
    numbers = []
    for rank in range(world):
        order = InOrder(count, batch, rank, world)
        pieces = list(order)
        assert len(pieces) == len(order)
        assert all(0 < len(piece) <= batch for piece in pieces)
        numbers += [ticket.number for piece in pieces for ticket in piece]
    assert sorted(numbers) == list(range(count))


# images


def test_augmentation_does_not_depend_on_reader_or_time() -> None:
    alone = samples()[Ticket(2, 4)]
    others = samples()
    others[Ticket(0, 1)]
    seed_all(77)
    again = others[Ticket(2, 4)]
    assert torch.equal(alone.pixels, again.pixels)
    assert (alone.target, alone.number) == (0, 4)
    assert not torch.equal(alone.pixels, others[Ticket(3, 4)].pixels)
    assert not torch.equal(alone.pixels - 14, others[Ticket(2, 5)].pixels - 15)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_worker_count_and_random_states_are_kept(workers: int) -> None:
    before = random_state(CPU)
    batches = list(loader(samples(), Stream(6, 4, 0, 3, seed=5), workers, CPU))
    after = random_state(CPU)
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected = tickets(6, 4, 0, 3)
    assert [batch.numbers for batch in batches] == [[ticket.number for ticket in step] for step in expected]
    for batch, step in zip(batches, expected, strict=True):
        assert torch.equal(batch.pixels, torch.stack([samples()[ticket].pixels for ticket in step]))
        assert batch.targets[0].tolist() == [ticket.number % 2 for ticket in step]


def test_unreadable_training_image_is_replaced_by_the_next() -> None:
    sample = samples(6, bad=(5, 0))[Ticket(1, 5)]
    assert (sample.number, sample.target) == (1, 1)
    assert sample.bad == ("5.png: is no picture", "0.png: is no picture")
    assert torch.equal(sample.pixels, samples()[Ticket(1, 1)].pixels)


def test_unreadable_test_images_are_skipped_and_named() -> None:
    bad = samples(6, bad=(1, 2, 3), replace=False)
    first, second = list(loader(bad, InOrder(6, 3, 0, 1), 0, CPU))
    assert (first.numbers, first.targets[0].tolist(), first.bad) == ([0], [0], ("1.png: is no picture", "2.png: is no picture"))
    assert (second.numbers, second.targets[0].tolist(), second.bad) == ([4, 5], [0, 1], ("3.png: is no picture",))
    assert second.pixels.shape == (2, 1, 4, 4)
    (empty,) = list(loader(bad, InOrder(4, 9, 1, 2), 0, CPU))
    assert isinstance(empty, Batch)
    assert (len(empty.targets[0]), empty.numbers, len(empty.bad)) == (0, [], 2)


def test_no_readable_image_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^no image can be read: 2\.png: is no picture$"):
        samples(3, bad=(0, 1, 2))[Ticket(0, 2)]
    with pytest.raises(DataError, match=r"^no image can be read: 0\.png: is no picture$"):
        moments(FakeImages([1, 2], (0, 1)), "L")


@pytest.mark.parametrize(
    "text", ["DataLoader worker (pid 3) is killed by signal: Killed. ", "DataLoader timed out after 60 seconds"]
)
def test_dead_or_hanging_worker_raises_a_visattn_error(text: str) -> None:
    with (
        pytest.raises(ResourceError, match=r"a data loader worker died or hangs \(DataLoader .*lower workers"),
        patient(),
    ):
        raise RuntimeError(text)


@pytest.mark.parametrize("text", ["Caught RuntimeError in DataLoader worker process 0.\nOriginal", "my worker timed out"])
def test_other_runtime_errors_are_not_reported_as_dead_workers(text: str) -> None:
    with pytest.raises(RuntimeError, match=text[:9]) as caught, patient():
        raise RuntimeError(text)
    assert not isinstance(caught.value, OSError)


def test_moments_match_all_pixels() -> None:
    levels = [0, 51, 255, 102]
    pixels = np.array([level / 255 for level in levels for _ in range(16)])
    mean, deviation = moments(FakeImages(levels), "L")
    assert mean == pytest.approx([pixels.mean()], abs=1e-4)
    assert deviation == pytest.approx([pixels.std()], abs=1e-4)
    readable = pixels[[*range(32), *range(48, 64)]]
    assert moments(FakeImages(levels, (2,)), "L")[0] == pytest.approx([readable.mean()], abs=1e-4)


@pytest.mark.parametrize("augment", ["none", "flip", "turn", "crop", "imagenet"])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_augmentations_give_pixels_of_the_right_shape(augment: str, channels: int, mode: str) -> None:
    blueprint = Blueprint("m", ("a", "b"), channels, (8, 8), (0.5,) * channels, (0.25,) * channels)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (11, 9, 3), dtype=np.uint8)).convert(mode)
    transform = training_transform(Config(augment=augment, reprob=0.5 if augment == "imagenet" else 0.0), blueprint)
    drawn = []
    for seed in range(12):
        with restoring():
            seed_cpu(seed)
            drawn.append(transform(picture))
    assert {tuple(pixels.shape) for pixels in drawn} == {(channels, 8, 8)}
    assert all(pixels.isfinite().all() for pixels in drawn)
    kinds = len({pixels.numpy().tobytes() for pixels in drawn})
    assert kinds == 1 if augment == "none" else kinds > 1


def test_turn_augmentation_gives_the_eight_symmetries_of_a_square() -> None:
    blueprint = Blueprint("m", ("a", "b"), 1, (8, 8), (0.0,), (1.0,))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    transform, seen = training_transform(Config(augment="turn"), blueprint), set()
    for seed in range(120):
        with restoring():
            seed_cpu(seed)
            seen.add((transform(Image.fromarray(pixels))[0] * 255).round().to(torch.uint8).numpy().tobytes())
    turned = [np.rot90(pixels, quarters) for quarters in range(4)]
    assert seen == {np.ascontiguousarray(one).tobytes() for each in turned for one in (each, each[:, ::-1])}


# randomness


def _draw() -> list[float]:
    return [
        float(torch.rand(())),
        float(torch.randn(())),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
        random.random(),
        random.gauss(0, 1),
    ]


def test_restoring_restores_all_three_random_states() -> None:
    seed_all(4)
    _draw()
    with restoring():
        seed_cpu(9)
    expected = _draw()
    seed_all(4)
    _draw()
    with restoring():
        seed_cpu(9)
        inside = _draw()
    assert _draw() == expected
    with restoring():
        seed_cpu(9)
        assert _draw() == inside
    with restoring():
        seed_cpu(10)
        assert _draw() != inside


def test_images_of_a_dataset_that_draws_do_not_depend_on_their_batch() -> None:
    class Drawing(FakeImages):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.fromarray(np.full((8, 8), np.random.randint(256), np.uint8)), 0  # noqa: NPY002

    samples = Samples(Drawing([0] * 6), lambda picture: torch.tensor(np.asarray(picture)), mode="L", seed=3, replace=True)
    tickets = [Ticket(1, number) for number in range(6)]
    together = [sample.pixels for sample in samples.__getitems__(tickets)]
    alone = [samples[ticket].pixels for ticket in reversed(tickets)][::-1]
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert len({int(pixels[0, 0]) for pixels in together}) > 1


def test_random_states_survive_a_file_round_trip(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    seed_all(4)
    _draw()
    save_file(random_state(CPU), tmp_path / "random.safetensors")
    expected = [_draw() for _ in range(3)]
    seed_all(5)
    set_random_state(load_file(tmp_path / "random.safetensors"), CPU)
    assert [_draw() for _ in range(3)] == expected


def test_neighboring_seeds_are_uncorrelated() -> None:
    seeds = {seed_of(run, epoch, number) for run in range(5) for epoch in range(5) for number in range(40)}
    assert len(seeds) == 1000
    assert seed_of(1, 2) != seed_of(2, 1)
    bits = sum(bin(seed_of(0, number) ^ seed_of(0, number + 1)).count("1") for number in range(200)) / 200
    assert 28 < bits < 36
