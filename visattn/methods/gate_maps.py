"""Gates of attention modules in CNNs as maps."""

from __future__ import annotations

from collections.abc import Iterable

from visattn._support.types import Role
from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.method import Method, needs
from visattn.methods.result import to_map
from visattn.methods.selection import one_forward
from visattn.records import FeatureRecord, Recording

PLACES: tuple[Role, ...] = "spatial_gate", "gate"
GATES: tuple[Role, ...] = *PLACES, "channel_gate", "branch_gate"
NO_GATES = "the network has no gates: no module of visattn.nn, timm, torchvision or the authors' code was met that has some."
CLOSED, OPEN = 0.05, 0.95  # beyond which a gate counts as saturated


def gates(recording: Recording, *, layer: int | str = -1) -> AttentionMap:
    """The gate of a module of spatial attention: what it multiplies the features of each place by.

    Of a gate for places and channels, such as coordinate attention's, the mean over channels.

    Args:
        recording: A forward of a network with such modules; they are recorded without being asked for.
        layer: Position or dotted name among the modules with spatial gates.

    Returns:
        Map with the axis `batch`, on the grid of the module; as the module computed it, for the most part in `(0, 1)`.

    Raises:
        OptionError: If there is no such gate, or where it lies on the image is not known.

    Reference:
        The modules' own papers. A gate scales features; what follows may scale them back, so a low gate alone does not say that a
        place does not matter.
    """
    chosen = select(recording, layer, PLACES)
    if chosen.layout is None:
        raise OptionError(f"{chosen.layer}: where its gate lies on the image could not be followed. Choose another layer.")
    share = mixed(recording, chosen.layer)
    notes = () if share is None else (f"{chosen.layer} acts by a share of {share:.3g}: y = x + {share:.3g} (A(x) - x)",)
    return to_map(recording, "gates", "gate", chosen.value.float().mean(1), chosen.layout, {"layer": chosen.layer}, notes=notes)


def select(recording: Recording, layer: int | str, roles: tuple[Role, ...]) -> FeatureRecord:
    """The gate of one module, by position or name among those with one of these roles.

    Raises:
        OptionError: If there is none.
    """
    found = [feature for feature in one_forward(recording).features if feature.role in roles]
    if not found:
        raise OptionError(str(refusal(recording)))
    name = layer_of(layer, [feature.layer for feature in found])
    return [feature for feature in found if feature.layer == name][-1]


def layer_of(layer: int | str, names: Iterable[str], *, also: str = "", what: str = "such gates") -> str:
    """A name among `names`, by itself or by position; a name that is a number goes before a position.

    Raises:
        OptionError: If there is none.
    """
    known = list(dict.fromkeys(names))
    if str(layer) in known:
        return str(layer)
    if isinstance(layer, int) and -len(known) <= layer < len(known):
        return known[layer]
    raise OptionError(f"layer must be {also}one of the modules with {what}, {', '.join(known)}, got {layer}.")


def mixed(recording: Recording, layer: str) -> float | None:
    """The share by which attached attention acts, where it stands behind a learned number; at 0 its gates do nothing."""
    shares = {feature.layer: float(feature.value) for feature in recording.features if feature.role == "mix"}
    return next((share for name, share in shares.items() if layer.startswith(f"{name}.")), None)


def refusal(recording: Recording) -> str | None:
    """Why no gate can be drawn on the image, or None."""
    roles = {feature.role for feature in recording.features}
    if roles & {*PLACES}:
        return None
    if roles & {*GATES}:
        return (
            "its modules weigh channels only, which have no place on the image. Use evaluation.gate_statistics "
            "(visattn heads --method gates)."
        )
    return NO_GATES


METHODS = {
    "gates": Method(function=gates, needs=needs("gates"), accepts=refusal, lacking=NO_GATES),
}
