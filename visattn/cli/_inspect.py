"""`visattn inspect`: a model's layers, and which methods apply to it."""

from __future__ import annotations

from typing import Any

import click

from visattn._tables import to_json, to_text
from visattn.cli._options import talk_options


@click.command("inspect")
@click.argument("model")
@click.option("--img-size", type=click.IntRange(1), help="Side in pixels that the model works at.")
@talk_options
def inspect_command(model: str, img_size: int | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """Show what MODEL (a timm name) is made of. No weights are needed: one forward pass with random ones tells."""
    import torch

    from visattn.families import capture, input_spec, load_model
    from visattn.methods import METHODS

    net = load_model(model, weights="none", img_size=img_size)
    spec = input_spec(net, img_size)
    with torch.inference_mode(), capture(net) as recording:
        net(torch.zeros(1, spec.channels, *spec.size))
    layers = [
        {
            "layer": record.layer,
            "kind": record.kind,
            "heads": record.operator.shape[1],
            "queries": record.operator.shape[2],
            "keys": record.operator.shape[3],
            "grid": " x ".join(map(str, record.keys.grid)),
            "prefix": _short(record.keys.prefix),
        }
        for record in recording
    ]
    methods = [{"method": name, "applies": method.accepts(recording) or "yes"} for name, method in METHODS.items()]
    facts: dict[str, Any] = {
        "model": model,
        "input": list(spec.size),
        "any_size": spec.dynamic,
        "patch": list(spec.stride),
        "classifier": spec.classifier,
        "readout": recording.readout,
    }
    if as_json:
        click.echo(to_json({**facts, "layers": layers, "methods": methods}))
        return
    size = " x ".join(map(str, spec.size)) + (" (takes any multiple of the patch)" if spec.dynamic else " only")
    head = "classifier" if spec.classifier else "no classification head"
    click.echo(f"{model}: input {size}, patch {' x '.join(map(str, spec.stride))}, {head}, reads out {recording.readout}\n")
    click.echo(to_text(layers))
    click.echo(to_text(methods).rstrip())


def _short(prefix: tuple[str, ...]) -> str:
    registers = sum(name.startswith("register") for name in prefix)
    named = [name for name in prefix if not name.startswith("register")]
    return ", ".join([*named, *([f"{registers} registers"] if registers else [])]) or "none"
