"""Values that are read at points which the model computes: inside its own cell they are a token's own, elsewhere they are not.

The oracle lights each patch of the image and asks which keys change; it shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import deform_conv2d

import visattn
from visattn.core.capturing.trace.tape import TAPES, forget
from visattn.core.records import AttentionRecord
from visattn.errors import LayoutError, NoAttentionCaptured, OptionError

ROWS, COLUMNS, PATCH, WIDTH = 6, 8, 4, 8
BRIGHT = 50.0
Offset = tuple[float, float]  # columns and rows


def photo(bright: tuple[int, ...] = (), count: int = 2) -> Tensor:
    """Return photos; some are bright."""
    made = torch.randn(count, 3, ROWS * PATCH, COLUMNS * PATCH, generator=torch.Generator().manual_seed(0))
    made[list(bright)] += BRIGHT
    return made


def centers(rows: int, columns: int) -> Tensor:
    """Return the center of each cell, `(rows, columns, 2)`, from -1 to 1."""
    y, x = (torch.arange(count) * 2.0 / count + 1 / count - 1 for count in (rows, columns))
    return torch.stack([x.expand(rows, -1), y[:, None].expand(-1, columns)], -1)


class Reader(nn.Module):
    """Patches that read their own map at an offset, in cells; then the values attend to each other. Bright images have another offset."""

    def __init__(self, offset: Offset = (0, 0), bright: Offset | None = None, times: int = 1, **sampling: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.ask = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Linear(WIDTH, 1)
        self.offset, self.bright = (nn.Parameter(torch.tensor(one).float()) for one in (offset, bright or offset))
        self.times, self.sampling = times, {"align_corners": False, **sampling}
        self.keys = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Read, and attend."""
        values = self.embed(x)
        for _ in range(self.times):
            values = self.read(values, self.points(values.permute(0, 2, 3, 1)))
        self.keys = values.flatten(2).mT
        return self.attend(self.keys).mean(1)

    def points(self, tokens: Tensor) -> Tensor:
        """Compute a point for each token `(B, rows, columns, C)`."""
        rows, columns = tokens.shape[1:3]
        bright = (tokens.abs().mean(-1, keepdim=True) > BRIGHT / 10).float()
        offset = self.offset + (self.bright - self.offset) * bright + 0 * self.ask(tokens)
        sides = torch.tensor([columns, rows])
        places = centers(rows, columns)
        if self.sampling["align_corners"]:
            places, sides = places * sides / (sides - 1), sides - 1
        points: Tensor = places + offset * 2 / sides
        return points

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Read a map at points."""
        return F.grid_sample(values, points, **self.sampling)

    def attend(self, tokens: Tensor) -> Tensor:
        """Attend among all tokens."""
        return F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0]


class Flipped(Reader):
    """Patches that read the map from left to right."""

    def points(self, tokens: Tensor) -> Tensor:
        """Flip the points."""
        return super().points(tokens) * torch.tensor([-1.0, 1.0])


class FromOther(Reader):
    """Patches that read the map of another image, at their own places."""

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Exchange the images."""
        return super().read(values.flip(0), points)


class FromTable(Reader):
    """Patches that read a learned map at the points that they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, WIDTH, 5, 5))

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Read at points that depend on the content, anywhere."""
        return super().read(self.table.expand(len(values), -1, -1, -1), values[:, :2].permute(0, 2, 3, 1))


class Cleaned(Reader):
    """Patches that read at points, and replace what is not finite."""

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Read finite values."""
        return super().read(values, points).nan_to_num()


class FromPooled(Reader):
    """Patches that read a map of which each cell is four patches."""

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Pool the map."""
        return super().read(F.avg_pool2d(values, 2), points)


class Pooled(Reader):
    """Pools of four patches that read the map of the patches, at an offset in cells of theirs."""

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Pool the tokens that ask."""
        return super().read(values, self.points(F.avg_pool2d(values, 2).permute(0, 2, 3, 1)))


class WithKeysRead(Reader):
    """Written-out attention whose keys alone are read at points."""

    def forward(self, x: Tensor) -> Tensor:
        """Read the keys."""
        values = self.embed(x)
        tokens = values.flatten(2).mT
        self.keys = self.read(values, self.points(values.permute(0, 2, 3, 1))).flatten(2).mT
        mixed: Tensor = (tokens @ self.keys.mT).softmax(-1) @ tokens
        return mixed.mean(1)


class Convolved(Reader):
    """Deformable convolution with one tap, which lies at the cell."""

    def read(self, values: Tensor, points: Tensor) -> Tensor:
        """Convolve at offsets."""
        offsets = (points - centers(ROWS, COLUMNS)).permute(0, 3, 1, 2).flip(1)
        read: Tensor = deform_conv2d(values, offsets, torch.eye(WIDTH)[:, :, None, None])
        return read


class Levels(Reader):
    """Tokens of two grids that weight values read from both maps; then the tokens of the first grid attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        """Read both maps, and attend."""
        maps = [self.embed(x), F.avg_pool2d(self.embed(x), 2)]
        tokens = torch.cat([one.flatten(2).mT for one in maps], 1)
        points = torch.cat([self.points(one.permute(0, 2, 3, 1)).flatten(1, 2) for one in maps], 1)[:, :, None]
        weights = (0 * self.ask(tokens)).expand(-1, -1, 2).softmax(-1)[:, None]
        read = [self.read(one, points) for one in maps]
        mixed = (torch.stack(read, -2).flatten(-2) * weights).sum(-1).mT
        self.keys = mixed[:, : ROWS * COLUMNS]
        return self.attend(self.keys).mean(1)


class Decoder(Levels):
    """Tokens of two grids that read both maps; then learned queries read the first map at points of theirs, and weight what they read."""

    def __init__(self, offset: Offset) -> None:
        super().__init__(offset)
        self.queries, self.place = nn.Parameter(torch.randn(1, 3, WIDTH)), nn.Linear(WIDTH, 4)

    def attend(self, tokens: Tensor) -> Tensor:
        """Read at two points for each query."""
        queries = self.queries.expand(len(tokens), -1, -1)
        points = self.place(queries).tanh().view(len(tokens), -1, 2, 2)
        weights = self.ask(queries).expand(-1, -1, 2).softmax(-1)[:, None]
        mixed: Tensor = (self.read(tokens.mT.reshape(len(tokens), -1, ROWS, COLUMNS), points) * weights).sum(-1).mT
        return mixed


def only(model: nn.Module, pixels: Tensor) -> AttentionRecord:
    """Return the record of the attention among the values that were read."""
    with torch.no_grad(), visattn.capture(model.eval()) as recording:
        model(pixels)
    (record,) = [record for record in recording if record.kind != "sampled"]
    return record


def influence(model: Reader, pixels: Tensor) -> Tensor:
    """Return how much each key changes with each patch of its image, `(B, rows, columns, rows, columns)`."""
    with torch.no_grad():
        model(pixels)
        before, changed = model.keys, []
        for row in range(ROWS):
            for column in range(COLUMNS):
                lit = pixels.clone()
                lit[:, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] += 0.1
                model(lit)
                changed.append((model.keys - before).abs().sum(-1))
    return torch.stack(changed, -1).view(-1, ROWS, COLUMNS, ROWS, COLUMNS)


def away(model: Reader, pixels: Tensor) -> float:
    """Return the largest distance of a key from its center of influence, in cells, for keys that read nothing outside the image."""
    amount = influence(model, pixels)
    inner = amount[:, 1:-1, 1:-1]
    inner = inner / inner.sum((-2, -1), keepdim=True)
    row, column = inner.sum(-1) @ torch.arange(ROWS).float(), inner.sum(-2) @ torch.arange(COLUMNS).float()
    rows, columns = torch.arange(1, ROWS - 1)[:, None], torch.arange(1, COLUMNS - 1)
    return float(torch.stack([(row - rows).abs(), (column - columns).abs()]).amax())


def strongest(model: Reader, pixels: Tensor) -> Tensor:
    """Check for each inner key that no patch has more influence than its own, and that it has some."""
    amount = influence(model, pixels)[:, 1:-1, 1:-1].flatten(3)
    own = (torch.arange(1, ROWS - 1)[:, None] * COLUMNS + torch.arange(1, COLUMNS - 1)).expand(len(pixels), -1, -1)
    mine = amount.gather(3, own[..., None])[..., 0]
    return (mine > 0) & (mine >= amount.amax(3) * (1 - 1e-3))


def distance(record: AttentionRecord) -> float:
    """Return how far the reason says that the points lie."""
    assert (record.kind, record.keys.grid) == ("unplaced", ())
    assert record.reason is not None
    start, _, rest = record.reason.partition(", up to ")
    assert start == "its tokens hold values read at points that the model computes"
    return float(rest.removesuffix(" times").removesuffix(" several").removesuffix(" cells away"))


@pytest.fixture(autouse=True)
def _unknown_models() -> None:
    forget()


@pytest.mark.parametrize("offset", [(0, 0), (0.3, -0.4), (0.5, 0), (-0.5, 0.5)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"align_corners": True}, {"padding_mode": "border"}, {"padding_mode": "reflection"}], ids=str
)
def test_points_in_the_own_cell_keep_its_place(offset: Offset, options: dict[str, Any]) -> None:
    model = Reader(offset, **options)
    record = only(model, photo())
    assert (record.kind, record.keys.grid, record.reason) == ("self", (ROWS, COLUMNS), None)
    assert away(model, photo()) < 0.51
    assert bool(strongest(model, photo()).all())


@pytest.mark.parametrize("offset", [(0.6, 0), (0, -0.75), (1, 0), (1, 1), (0, 2), (-4, 0)], ids=str)
def test_points_beyond_are_refused_with_their_distance(offset: Offset) -> None:
    model = Reader(offset)
    assert distance(only(model, photo())) == pytest.approx(max(map(abs, offset)), abs=0.051)
    assert not bool(strongest(model, photo()).any())  # a place would be wrong


def test_flipped_points_are_refused() -> None:
    assert distance(only(Flipped(), photo())) == COLUMNS - 1


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_other_ways_to_interpolate_are_measured_alike(mode: str) -> None:
    assert only(Reader((0.4, 0), mode=mode), photo()).kind == "self"
    assert distance(only(Reader((2, 0), mode=mode), photo())) == 2


def test_points_that_are_not_finite_are_refused() -> None:
    assert distance(only(Cleaned((float("nan"), 0)), photo())) == float("inf")


def test_points_outside_the_image_are_far() -> None:
    """Measure at the border if it is read there; zeros are no content of the token."""
    far = Reader((0, 0), (COLUMNS, 0))
    assert distance(only(far, photo((0,)))) == COLUMNS
    assert distance(only(Reader((0, 0), (COLUMNS, 0), padding_mode="border"), photo((0,)))) == COLUMNS - 0.5
    assert distance(only(Reader((0, 0), (COLUMNS, 0), padding_mode="reflection"), photo((0,)))) == COLUMNS - 1


def test_one_image_of_the_batch_is_enough() -> None:
    model = Reader((0.2, 0), (3, 0))
    assert only(model, photo()).kind == "self"
    assert distance(only(model, photo((1,)))) == pytest.approx(3, abs=0.051)
    assert only(model, photo()).kind == "self"


@pytest.mark.parametrize("remember", [True, False])
def test_each_forward_pass_is_measured(remember: bool) -> None:
    """Measure again: the points are values, so that the same operations may read elsewhere."""
    model = Reader((0, 0), (4, 0)).eval()
    said = []
    for bright in ((), (0,), (), (), (0, 1), ()):
        with torch.no_grad(), visattn.capture(model, remember=remember) as recording:
            model(photo(bright))
        said.append(recording[0].reason is None)
    assert said == [True, False, True, True, False, True]
    assert len(TAPES.of(model)) == (2 if remember else 0)


def test_the_reason_says_how_far_the_points_lie_in_this_forward_pass() -> None:
    model = Reader((3, 0))
    for offset in (3, 5, 2):
        model.offset.data[0] = offset
        assert distance(only(model, photo())) == offset
    assert len(TAPES.of(model)) == 1
    model.offset.data[0] = 6
    with pytest.raises(LayoutError, match=r"up to 6\.0 cells away, so its tokens"), visattn.intervene(model, scale=0.0):
        model(photo())


def test_forward_passes_in_one_capture_are_told_apart() -> None:
    model = Reader((0, 0), (4, 0)).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        for bright in ((), (0,), (), (1,)):
            model(photo(bright))
    assert [record.kind for record in recording] == ["self", "unplaced", "self", "unplaced"]


def test_points_that_were_not_measured_yet_are_compared() -> None:
    """Compare them whole: an intervention on no layer ends before anything was traced."""
    model = Reader((0, 0), (4, 0)).eval()
    for bright, kind in (((), "self"), ((0,), "unplaced"), ((), "self")):
        forget()
        with pytest.raises(OptionError, match="no attention layer matches"), visattn.intervene(model, layer="other", scale=0.0):
            model(photo())
        (tape,) = TAPES.of(model)
        assert tape.conclusions is None
        assert only(model, photo(bright)).kind == kind


@pytest.mark.parametrize(("offset", "kind"), [((0.2, 0), "self"), ((0.3, 0), "unplaced")], ids=str)
def test_drifts_add_up(offset: Offset, kind: str) -> None:
    """Twice 0.3 cells are more than half a cell."""
    model = Reader(offset, times=2)
    record = only(model, photo())
    assert record.kind == kind
    assert (away(model, photo()) < 0.51) == (kind == "self")
    if kind == "unplaced":
        assert distance(record) == pytest.approx(0.3, abs=0.051)
        assert "several times" in str(record.reason)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(FromOther, "read at points that the model computes"), (Convolved, "deform_conv2d (not a torch function)")],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(model: Callable[[], Reader], reason: str) -> None:
    record = only(model(), photo())
    assert record.kind == "unplaced"
    assert str(record.reason).endswith(reason)


def test_what_a_token_reads_from_a_table_is_its_own() -> None:
    model = FromTable()
    with torch.no_grad(), visattn.capture(model.eval()) as recording:
        model(photo() / 10)
    assert [(record.kind, record.keys.grid) for record in recording] == [("self", (ROWS, COLUMNS))]
    assert recording.unseen == []
    assert away(model, photo() / 10) < 1e-3


@pytest.mark.parametrize(("make", "grid"), [(FromPooled, (ROWS, COLUMNS)), (Pooled, (ROWS // 2, COLUMNS // 2))], ids=str)
def test_cells_are_those_of_the_token_that_asks(make: Callable[[Offset], Reader], grid: tuple[int, int]) -> None:
    """Read maps with larger and with smaller cells."""
    assert only(make((0.4, 0)), photo()).keys.grid == grid
    assert distance(only(make((0.8, 0)), photo())) == pytest.approx(0.8, abs=0.051)


def test_keys_of_written_out_attention_are_measured_too() -> None:
    assert only(WithKeysRead((0.4, 0)), photo()).kind == "self"
    assert distance(only(WithKeysRead((3, 0)), photo())) == 3


def test_tokens_of_several_grids_that_read_in_their_cells_keep_their_places() -> None:
    model = Levels((0.3, 0))
    record = only(model, photo())
    assert (record.kind, record.keys.grid) == ("self", (ROWS, COLUMNS))
    assert away(model, photo()) < 0.67  # pooled values depend on four patches alike
    assert distance(only(Levels((2, 0)), photo())) == 2


def test_weights_of_points_on_maps_that_hold_values_from_elsewhere_are_not_recorded() -> None:
    """Refuse them: the cell where a query reads would not be where its values come from."""
    near, far = Decoder((0.3, 0)).eval(), Decoder((3, 0)).eval()
    with torch.no_grad(), visattn.capture(near) as recording:
        near(photo())
    assert [record.kind for record in recording] == ["sampled"]
    with (
        torch.no_grad(),
        pytest.raises(NoAttentionCaptured, match="reads values at points that it computes"),
        visattn.capture(far),
    ):
        far(photo())
