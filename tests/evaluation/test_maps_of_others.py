"""Maps as other libraries give them go into the metrics as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam.methods import GradCAM as OfTorchCam
from torchvision.models import resnet18

from visattn.evaluation import auroc, deletion, saco

SIDE, LABEL = 64, 2


def model() -> nn.Module:
    torch.manual_seed(0)
    found: nn.Module = resnet18(num_classes=5).eval()
    return found


def picture() -> Tensor:
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def of_grad_cam(of: Any, x: Tensor) -> tuple[Any, Any]:
    found = GradCAM(of, [of.layer2])(x, [ClassifierOutputTarget(LABEL)])
    assert found.shape == (1, SIDE, SIDE)
    return found, found[0]


def of_torch_cam(of: Any, x: Tensor) -> tuple[Any, Any]:
    with OfTorchCam(of, "layer2") as extractor:
        (found,) = extractor(LABEL, of(x))
    assert found.shape == (1, SIDE // 8, SIDE // 8)
    return found, found[0].numpy()


def of_captum(of: Any, x: Tensor) -> tuple[Any, Any]:
    found = IntegratedGradients(of).attribute(x, target=LABEL, n_steps=4)
    assert found.shape == (1, 3, SIDE, SIDE)
    return found, found.detach()[0].sum(0).numpy()


MAKERS: dict[str, Callable[[Any, Tensor], tuple[Any, Any]]] = {
    "grad-cam": of_grad_cam,
    "torch-cam": of_torch_cam,
    "captum": of_captum,
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_arrays_need_no_conversion(name: str) -> None:
    of, x = model(), picture()
    given, plain = MAKERS[name](of, x)
    mask = np.zeros((SIDE, SIDE), bool)
    mask[10:40, 5:30] = True

    def score(inputs: Tensor) -> Tensor:
        scores: Tensor = of(inputs).softmax(-1)[:, LABEL]
        return scores

    one, two = (deletion(score, x, shown, steps=8, by="cells").scores for shown in (given, plain))
    assert (one == two).all()
    assert saco(score, x, given, groups=4) == saco(score, x, plain, groups=4)
    assert auroc(given, mask) == auroc(plain, mask)
