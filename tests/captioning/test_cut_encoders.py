"""The state of an encoder that is cut out of a model has no buffers that the model itself leaves out."""

from __future__ import annotations

import torch
from torch import nn

from visattn.captioning.encoders import _leave_out_of_state


class Holding(nn.Module):
    """A module with a buffer that belongs to its state, and one that is kept out of it or not."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(1), persistent=persistent)


def test_buffers_that_the_whole_model_leaves_out_are_left_out_of_the_cut_one() -> None:
    whole = nn.ModuleDict({"a": Holding(persistent=False), "b": Holding(persistent=True)})
    cut = nn.ModuleDict({"a": Holding(persistent=True), "b": Holding(persistent=True), "of_the_cut": Holding(persistent=True)})
    _leave_out_of_state(whole, cut)
    assert sorted(cut.state_dict()) == ["a.counted", "b.counted", "b.fixed", "of_the_cut.counted", "of_the_cut.fixed"]
