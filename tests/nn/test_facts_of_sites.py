"""Facts of the places at which attention is attached: fixed, and compared by value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from torch import nn

from visattn.nn import Site
from visattn.nn.attaching.checkpoint_layouts import Layout
from visattn.nn.attaching.sites import Maps, Place
from visattn.nn.attaching.trail import Trail

MODULE = nn.Identity()


def test_facts_of_sites_are_fixed_and_compared_by_value() -> None:
    for one, other, name in (
        (Maps(6, "NCHW"), Maps(6, "NCHW"), "channels"),
        (Trail(3, "a"), Trail(3, "a"), "past"),
        (Site("a", 6, (5, 7), "NCHW", MODULE, 3, None), Site("a", 6, (5, 7), "NCHW", MODULE, 3, None), "size"),
        (Place("a", MODULE, "a", MODULE), Place("a", MODULE, "a", MODULE), "key"),
    ):
        assert one == other
        assert hash(one) == hash(other)
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, None)
    trail = Trail(3)
    assert (trail.end, trail.inner, trail.layout, trail.turn, trail.scaled) == (None,) * 5
    assert (trail.resized, trail.grown) == (False, False)
    assert not hasattr(trail, "__dict__")
    layout: Any = Layout("x", nn.Identity, {})
    assert (layout.options, layout.note, layout.lacks) == ({}, "", "")
    assert layout.told(None, {}) is True
    assert layout.change(None, "a", trail) is trail
    with pytest.raises(FrozenInstanceError):
        layout.name = "y"
