"""Maps of the gates of attention modules in CNNs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from visattn._support.language import worded
from visattn._support.modes import in_own_modes
from visattn._support.types import Role
from visattn.core.maps import AttentionMap
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward
from visattn.core.records import FeatureRecord, Recording
from visattn.errors import OptionError

__all__ = ["CLOSED", "GATES", "NO_GATES", "OPEN", "PLACES", "layer_of", "numbered"]

PLACES: tuple[Role, ...] = "spatial_gate", "gate"
GATES: tuple[Role, ...] = *PLACES, "channel_gate", "branch_gate"
NO_GATES = (
    "the network has no gates that were recorded. Method 'gates' and visattn.capture(model, gates=True) look for feature maps (B, C, H, W) "
    "that are multiplied by a sigmoid, or the like, for each channel or position. In a module of your own, call "
    "visattn.nn.publish(self, 'spatial_gate', gate)."
)
CLOSED, OPEN = 0.05, 0.95  # a gate beyond these counts as saturated


@in_own_modes
def gates(recording: Recording, *, layer: int | str = -1) -> AttentionMap:
    """Return the gate of a spatial attention module: the factor that multiplies the features at each location.

    If the gate has channels too, as in coordinate attention, the map is the mean over channels.

    Args:
        recording: Forward pass of a network with such modules. Gates are always recorded.
        layer: Index or dotted name among the modules with spatial gates.

    Returns:
        Map with the axis `batch`, on the module's grid. Values are as the module computed them, usually in `(0, 1)`.

    Raises:
        OptionError: If there is no such gate, or its position on the image is not known.

    Reference:
        The modules' own papers. A low gate does not mean that a location is unimportant, since later layers may scale the features
        up again.
    """
    name, chosen = select(recording, layer, PLACES)
    if chosen.layout is None:
        raise OptionError(f"{name}: the position of its gate on the image could not be traced. Choose another layer.")
    share = mixed(recording, chosen.layer)
    notes = () if share is None else (f"{name} acts with the weight {share:.3g}: y = x + {share:.3g} (A(x) - x)",)
    return to_map(recording, "gates", "gate", chosen.value.float().mean(1), chosen.layout, {"layer": name}, notes=notes)


def numbered(recording: Recording, roles: tuple[Role, ...]) -> dict[str, FeatureRecord]:
    """Return the gates with one of these roles by name: that of the module, numbered from 0 if the module has several."""
    features = [feature for feature in one_forward(recording).features if feature.role in roles]
    counts, gates = Counter(feature.layer for feature in features), dict[str, FeatureRecord]()
    for feature in features:
        seen = sum(gate.layer == feature.layer for gate in gates.values())
        gates[f"{feature.layer} #{seen}" if counts[feature.layer] > 1 else feature.layer] = feature
    return gates


def select(recording: Recording, layer: int | str, roles: tuple[Role, ...]) -> tuple[str, FeatureRecord]:
    """Return one gate with its name, by index or name among those with one of these roles; see `numbered`.

    Raises:
        OptionError: If there is no such gate.
    """
    gates = numbered(recording, roles)
    if not gates:
        raise OptionError(str(refusal(recording)))
    name = layer_of(layer, gates)
    return name, gates[name]


def layer_of(layer: int | str, names: Iterable[str], *, also: str = "", what: str = "such gates") -> str:
    """Return a name among `names`, given by the name itself or by index. A name that is a number is preferred to an index.

    Raises:
        OptionError: If there is no such name or index.
    """
    known = list(dict.fromkeys(names))
    if str(layer) in known:
        return str(layer)
    if isinstance(layer, int) and -len(known) <= layer < len(known):
        return known[layer]
    raise OptionError(f"layer must be {also}one of the modules with {what}, {', '.join(known)}, got {layer}.")


def mixed(recording: Recording, layer: str) -> float | None:
    """Return the learned weight of an attached attention module, or None if it has none. At 0 the module is the identity."""
    shares = {feature.layer: float(feature.value) for feature in recording.features if feature.role == "mix"}
    return next((share for name, share in shares.items() if layer.startswith(f"{name}.")), None)


def refusal(recording: Recording) -> str | None:
    """Return why no gate can be drawn on the image, or None if one can."""
    roles = {feature.role for feature in recording.features}
    if roles & {*PLACES}:
        return None
    if roles & {*GATES}:
        return "its modules gate only channels, which cannot be drawn on the image. Use " + worded(
            "visattn.evaluation.gate_statistics.", "visattn heads --method gates."
        )
    return NO_GATES


METHODS = {
    "gates": Method(function=gates, needs=needs("gates"), accepts=refusal, lacking=NO_GATES),
}
