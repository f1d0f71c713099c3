"""Steps, places and position codes that tests put together by hand, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.work import Work
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.geometry import Box

CPU = torch.device("cpu")


def two_images(frames: int = 0) -> Planes:
    """Return the planes of a batch of two images, or clips, of 24 x 40 pixels."""
    planes = Planes(2, (24, 40), CPU, frames)
    planes.grid(24, 40, planes.input, max(frames, 1))  # pixels come first
    return planes


def grid(planes: Planes, rows: int, columns: int, box: Box | None = None, frames: int = 1) -> Tensor:
    """Return the position codes of a grid, `(images, rows, columns)`; with an axis of frames for clips."""
    return planes.codes(planes.grid(rows, columns, box or planes.input, frames))


def placed(codes: Tensor, **fields: Any) -> Places:
    return Places("placed", codes, **fields)


def noted(places: Places, **fields: Any) -> Places:
    """Return places with other notes, given by name."""
    return places._replace(**fields)


def learned(*shape: int, name: str = "") -> Places:
    return whole("learned", shape, CPU, name)


def members(planes: Planes, name: str, count: int) -> Tensor:
    """Return the position codes of a set, `(count,)`, before its members meet an image."""
    return planes.members(planes.set_of(name, count))


def at_work(planes: Planes, name: str, shape: Sequence[int], /, *more_shapes: Sequence[int], **given: Any) -> Work:
    """Return the step of an operation whose results have these shapes; arguments that are places stand for tensors there."""
    origins: list[Places] = []
    facts: list[Facts] = []

    def noted(value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, Places) for item in value):
            return [noted(item) for item in value]
        if not isinstance(value, Places):
            return value
        origins.append(value)
        facts.append(Facts(value.shape, torch.empty(value.shape, device="meta").stride(), 0, len(facts), True, True))
        return Node(len(facts) - 1)

    arguments = {key: noted(value) for key, value in given.items()}
    outs = [Facts(torch.Size(size), (), 0, -1, True, True) for size in (shape, *more_shapes)]
    return Work(Step(None, arguments), name, Shadows(planes, facts, origins.__getitem__), outs)
