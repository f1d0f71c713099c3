"""Programs that overwrite aliased tokens: in each forward pass they are located correctly or refused.

Whether `contiguous` returns the tensor itself or a copy depends on the memory format of the image. The same operations may therefore
overwrite other tokens. Programs only permute tokens, so the content of a key identifies its patch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import GRID, Moving, image, keys_of
from tests.conftest import Figures

Step = Callable[[list[Tensor], int], list[Tensor]]  # takes the tensors and a number that may differ between forward passes


def _swapped(tokens: list[Tensor]) -> list[Tensor]:
    first = tokens[-1][:, :48].clone()
    tokens[-1][:, :48] = tokens[-1][:, 48:].clone()
    tokens[-1][:, 48:] = first
    return tokens


def _through_numpy(tokens: list[Tensor]) -> list[Tensor]:
    array = tokens[-1].numpy()
    array[:] = array[:, ::-1].copy()
    return tokens


def _written(tokens: list[Tensor], target: int, value: Tensor) -> list[Tensor]:
    tokens[target].copy_(value.clone())
    return tokens


STEPS: dict[str, Step] = {
    "contiguous": lambda tokens, _: [*tokens, tokens[-1].contiguous()],
    "contiguous in a second branch": lambda tokens, how: [
        *tokens,
        (tokens[-1].mT.contiguous().mT if how % 2 else tokens[-1]).contiguous(),
    ],
    "dropout": lambda tokens, _: [*tokens, torch.dropout(tokens[-1], 0.5, False)],
    "dropout of any": lambda tokens, how: [*tokens, F.dropout(tokens[how % len(tokens)], 0.1, False)],
    "to": lambda tokens, _: [*tokens, tokens[-1].to(torch.float32)],
    "clone": lambda tokens, _: [*tokens, tokens[-1].clone()],
    "detach": lambda tokens, _: [*tokens, tokens[-1].detach()],
    "data": lambda tokens, _: [*tokens, tokens[-1].data],
    "hardtanh": lambda tokens, _: [*tokens, F.hardtanh(tokens[-1], -1e9, 1e9)],
    "flip": lambda tokens, _: [*tokens, tokens[-1].flip(1)],
    "roll": lambda tokens, how: [*tokens, tokens[-1].roll(how, 1)],
    "roll or flip": lambda tokens, how: [*tokens, tokens[-1].flip(1) if how % 3 == 0 else tokens[-1].roll(2, 1)],
    "roll rows": lambda tokens, how: [*tokens, tokens[-1].reshape(1, *GRID, 16).roll(how % 2, 2).reshape(1, 96, 16)],
    "index": lambda tokens, how: [*tokens, tokens[-1][:, torch.arange(96).roll(how)]],
    "halves": lambda tokens, _: [*tokens, torch.cat([tokens[-1][:, 48:], tokens[-1][:, :48]], 1)],
    "pick": lambda tokens, how: [*tokens, tokens[how % len(tokens)]],
    "turn": lambda tokens, _: tokens[::-1],
    "overwrite the last": lambda tokens, _: _written(tokens, -1, tokens[-1].flip(1)),
    "overwrite the first": lambda tokens, how: _written(tokens, 0, tokens[-1].roll(1 + how, 1)),
    "overwrite the one before": lambda tokens, _: _written(tokens, max(len(tokens) - 2, 0), tokens[-1].flip(1)),
    "swap halves in place": lambda tokens, _: _swapped(tokens),
    "read by numpy": lambda tokens, _: [*tokens[:-1], *([tokens[-1]] if tokens[-1].numpy().size else [])],
    "written by numpy": lambda tokens, _: _through_numpy(tokens),
}
OFTEN = ["contiguous", "contiguous", "overwrite the first", "overwrite the last", "overwrite the one before", "turn"]


class Program(nn.Module):
    """Model that runs a random sequence of steps."""

    def __init__(self, lots: random.Random) -> None:
        super().__init__()
        self.steps = [lots.choice(OFTEN if lots.random() < 0.6 else [*STEPS]) for _ in range(lots.randint(2, 8))]
        self.free = [lots.random() < 0.35 for _ in self.steps]
        self.how = 0
        self.model = Moving(self.run)

    def run(self, _: nn.Module, tokens: Tensor) -> Tensor:
        named = [tokens]
        for number, (step, free) in enumerate(zip(self.steps, self.free, strict=True)):
            named = STEPS[step](named, 7 * self.how + number if free else number)
        return named[-1]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def verdict(program: Program, x: Tensor, inference: bool) -> str:
    with torch.inference_mode() if inference else torch.no_grad(), visattn.capture(program) as recording:
        program(x)
    record = recording[0]
    if record.reason is not None:
        return "refused"
    with torch.no_grad():
        lies = record.keys.grid == GRID and torch.allclose(keys_of(record), program.model.tokens(x), atol=1e-5)
    return "right" if lies else "wrong"


@pytest.mark.full
def test_programs_that_overwrite_tokens(figures: Figures) -> None:
    found, wrong = Counter[str](), []
    for seed in range(200):
        lots = random.Random(seed)
        program, inference = Program(lots), lots.random() < 0.5
        for forward in range(5):
            program.how = lots.randint(0, 2)
            form = lots.choice([torch.contiguous_format, torch.channels_last])
            one = verdict(program, image(lots.randint(0, 2)).to(memory_format=form), inference)
            found[one] += 1
            wrong += [(seed, forward, program.steps)] if one == "wrong" else []
    figures("programs that write over tokens: forwards placed", found["right"], "500 or more")
    figures("programs that write over tokens: forwards refused", found["refused"], "-")
    assert not wrong
    assert found["right"] >= 500


def test_contiguous_that_copies_in_one_forward_pass_and_not_in_the_next() -> None:
    """Check both memory formats: `contiguous` returns a copy, or the tokens themselves, which are then overwritten in flipped order."""

    def turned(_: nn.Module, tokens: Tensor) -> Tensor:
        other = tokens.contiguous()
        other.copy_(other.flip(1).clone())
        return tokens.add(0)

    model = Moving(turned)
    for form in [torch.contiguous_format, torch.channels_last] * 4:
        with torch.inference_mode(), visattn.capture(model) as recording:
            model(image().to(memory_format=form))
        assert recording[0].reason is None
        with torch.no_grad():
            assert torch.allclose(keys_of(recording[0]), model.tokens(image()), atol=1e-5), form
