"""Training of CBAM gates for a frozen CNN: the gates learn to close at locations that the prediction does not need.

`train_gates.py [--steps 1000]` writes `models/efficientnet_lite0_cbam.safetensors` in some minutes on two cores. `--tell`
evaluates its gates. `gated()` builds the network, for `visattn heads photo.jpg --model scripts/train_gates.py:gated --method gates`.

The result illustrates meaningful gates, learned from 11 photos; the classifier becomes far worse.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision import transforms

import visattn
from visattn import data, evaluation
from visattn._support.publish import listening
from visattn._support.types import Role
from visattn.core import methods
from visattn.core.pipeline.passes import look

ASSETS = Path(__file__).parents[1] / "assets"
CHECKPOINT = ASSETS.parent / "models" / "efficientnet_lite0_cbam.safetensors"
NAME = "tf_efficientnet_lite0"
PLACES = ["blocks.2", "blocks.4", "blocks.6"]  # feature maps of 28 x 28, 14 x 14 and 7 x 7 cells
BATCH, RATE, SEED = 8, 1e-2, 0
PRICE = 7.0  # weight of the share of open locations in the loss, next to the divergence of predictions in nats


def main() -> None:
    """Train, write the checkpoint, and evaluate the gates on held-out photos."""
    parser = argparse.ArgumentParser(description="Train CBAM gates on a frozen CNN.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tell", action="store_true", help="only evaluate the gates of the checkpoint")
    options = parser.parse_args()
    if options.tell:
        tell(visattn.load_model(NAME, weights=data.offline_weights(NAME)), gated())
        return
    torch.manual_seed(SEED)
    teacher = visattn.load_model(NAME, weights=data.offline_weights(NAME))
    student, handle = attached(teacher)
    train(teacher, student, handle, options.steps)
    student.eval()
    own = {name: tensor.contiguous() for name, tensor in student.state_dict().items() if ".attention." in name}
    save_file(own, CHECKPOINT)
    print(f"wrote {CHECKPOINT.relative_to(ASSETS.parent)}: {sum(tensor.numel() for tensor in own.values())} numbers")
    tell(teacher, student)


def gated() -> nn.Module:
    """Build the network with the gates of the checkpoint."""
    model, _ = attached(visattn.load_model(NAME, weights=data.offline_weights(NAME)))
    model.load_state_dict(load_file(CHECKPOINT), strict=False)
    return model.eval()


def attached(teacher: nn.Module) -> tuple[nn.Module, visattn.nn.Attachment]:
    """Return a frozen copy of the network with trainable gates that are initially almost open."""
    model = copy.deepcopy(teacher).requires_grad_(False)
    handle = visattn.attach(model, "cbam", PLACES, init="paper")
    for site in handle.sites:
        for name, value in {"fc2.weight": 0, "fc2.bias": 2, "norm.bias": 1}.items():
            nn.init.constant_(site.module.get_parameter(name), value)
    return model, handle


def train(teacher: nn.Module, student: nn.Module, handle: visattn.nn.Attachment, steps: int) -> None:
    """Train the gates to keep the teacher's predictions with as few open locations as possible."""
    files = sorted((ASSETS / "objects").glob("*.[jp][pn]g"))
    photos = [visattn.load_image(file) for file in files]
    normalized = transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    augmented = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(0.25, 1)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3),
            transforms.ToTensor(),
            normalized,
        ]
    )
    optimizer = torch.optim.Adam(handle.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    places: list[Tensor] = []
    for site in handle.sites:
        site.module.train()

    def listener(_module: nn.Module, role: Role, gate: Tensor, _features: Tensor | None) -> None:
        if role == "spatial_gate":
            places.append(gate)

    for step in range(steps):
        x = torch.stack([augmented(photos[int(i)]) for i in torch.randint(len(photos), (BATCH,))])
        places.clear()
        with torch.no_grad():
            wanted = teacher(x).log_softmax(-1)
        with listening(listener):
            found = student(x).log_softmax(-1)
        divergence = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        share = torch.stack([gate.mean() for gate in places])
        loss = divergence + PRICE * share.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            shares = ", ".join(f"{float(one):.2f}" for one in share.detach())
            print(f"step {step}: divergence {float(divergence.detach()):.3f} nats, open {shares}", flush=True)


def tell(teacher: nn.Module, student: nn.Module) -> None:
    """Print for held-out photos the lift of the gates on the object, and the predictions with and without gates."""
    for name in data.PHOTOS:
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), teacher)
        with Image.open(ASSETS / "objects" / "masks" / f"{name}.png") as picture:
            mask = np.asarray(picture) > 0
        recording = look(student, prepared, features="none")
        with torch.no_grad():
            shares = [model(prepared.pixels).softmax(-1)[0] for model in (teacher, student)]
        before, after = (f"{int(share.argmax())} ({float(share.max()):.0%})" for share in shares)
        lifts = []
        for place in range(len(PLACES)):
            gate = methods.gates(recording, layer=place).at(batch=0)
            lifts.append(f"{float(evaluation.lift(gate, mask, prepared.geometries[0])):.2f}")
        prior = float(evaluation.lift(evaluation.center_prior(gate), mask, prepared.geometries[0]))
        print(f"{name}: class {before} before, {after} after; lift {', '.join(lifts)}, center prior {prior:.2f}")


if __name__ == "__main__":
    main()
