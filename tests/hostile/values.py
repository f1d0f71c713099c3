"""Values that a reader may not expect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\0",
    "\n",
    "\x1b]0;x\a",
    "\u202e",
    "\udcff",
    "..",
    "../../x",
    "/",
    "-",
    "--",
    "NaN",
    "²",
    "1e999",
    "a" * 5000,
    "%s{}",
    "'; --",
)
NUMBERS = (0, -1, 1, 2, 3.5, 1e-300, -1e300, 2**31, 2**63, -(2**63), 10**30, 10**400, float("nan"), float("inf"), -float("inf"))


def value(rng: random.Random, depth: int = 2) -> Any:
    """Return a random JSON value of any type."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice(TEXTS[:16])
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice([True, False, None])
    if kind == 4:
        return rng.choice([[], {}, [[]], [{}], [None]])
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 6:
        return {str(rng.choice(TEXTS[:10])): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    nested: Any = 0
    for _ in range(rng.choice([10, 100, 300])):
        nested = [nested] if rng.random() < 0.5 else {"x": nested}
    return nested


def edit(rng: random.Random, data: Any, times: int) -> Any:
    """Return JSON data with some values, at any depth, replaced, removed or duplicated."""
    for _ in range(times):
        places = list(_places(data))
        if not places:
            return data
        holder, key = rng.choice(places)
        what = rng.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.append(holder[key])
        elif what == 2 and isinstance(holder, dict):
            holder[rng.choice(TEXTS[:6]) + str(key)] = holder[key]
        elif what == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = rng.choice(NUMBERS)
        else:
            holder[key] = value(rng)
    return data


def _places(data: Any, depth: int = 6) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(data.items()) if isinstance(data, dict) else list(enumerate(data)):
        yield data, key
        if isinstance(inner, (dict, list)) and depth:
            yield from _places(inner, depth - 1)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with some of them changed, cut off, removed or inserted."""
    data = bytearray(content)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(data) or 1)
        what = rng.randrange(4)
        if what == 0 and data:
            data[place] = rng.randrange(256)
        elif what == 1:
            del data[place : place + rng.randrange(1, 40)]
        elif what == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 40))
        elif what == 3 and rng.random() < 0.4:
            del data[place:]
    return bytes(data)
