"""What holds of every network that a plan can name: by JSON options, through an encoder, through a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gatecrash.audit.models import load_model
from gatecrash.audit.plan import ModelPlan
from gatecrash.encoder import Encoder
from gatecrash.networks import NETWORKS, load_weights, save_weights
from gatecrash.objective import single


class Case(NamedTuple):
    """A network that is quick to build, the layer in front of its last linear layer, and that layer's units."""

    name: str
    options: dict[str, Any]
    latent: str
    units: int
    size: int = 32


CASES = [
    Case("densenet_bc", {"depth": 10, "growth": 4, "dropout": 0.2}, "avgpool", 9),
    Case("densenet_bc", {"depth": 10, "growth": 4, "tanh": True}, "avgpool", 9),
    Case("resnet20", {}, "avgpool", 64),
    Case("small_cnn", {"in_channels": 3, "size": 32}, "latent", 32),
    Case("wide_resnet", {"depth": 10, "width": 2, "dropout": 0.3}, "avgpool", 128),
    Case("resnet34_cifar", {}, "avgpool", 512),
    Case("vgg13", {}, "classifier.5", 512),
    Case("gtsrb_stn", {}, "latent", 128),
    Case("resnet18_in", {}, "avgpool", 512, size=64),
]

each = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{json.dumps(case.options)}")


def built(case: Case, classes: int = 7) -> nn.Module:
    torch.manual_seed(0)
    plan = {"name": f"builtin:{case.name}", "weights": "random", "options": case.options | {"num_classes": classes}}
    return load_model(ModelPlan.model_validate(json.loads(json.dumps(plan))), Path())


def images(case: Case, count: int = 2) -> Tensor:
    return torch.rand(count, 3, case.size, case.size, generator=torch.Generator().manual_seed(1))


def test_every_network_is_here() -> None:
    deeper = {"resnet32", "resnet44", "resnet56", "resnet110"}
    assert {case.name for case in CASES} == set(NETWORKS) - deeper


@each
def test_a_plan_builds_it_and_its_last_linear_layer_reads_the_latent(case: Case) -> None:
    encoder, x = Encoder(built(case)), images(case)
    latent, head = single(encoder.at(case.latent)(x)), encoder.head
    assert latent.shape == (2, case.units)
    assert head is not None
    assert head.bias is not None
    assert head.weight.shape == (7, case.units)
    torch.testing.assert_close(single(encoder(x)), latent @ head.weight.T + head.bias)


@each
def test_in_eval_mode_an_image_has_one_latent_alone_or_among_others(case: Case) -> None:
    encoder, x = Encoder(built(case), case.latent), images(case)
    assert torch.equal(encoder(x), encoder(x))
    torch.testing.assert_close(single(encoder(x))[1:], single(encoder(x[1:])), rtol=1e-4, atol=1e-5)


@each
def test_gradients_of_the_logits_reach_the_pixels_of_every_image(case: Case) -> None:
    model, x = built(case), images(case).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert bool(gradient.isfinite().all())
    assert bool(((gradient != 0).flatten(1).float().mean(dim=1) > 0.5).all())


@each
def test_weights_survive_a_file(case: Case, tmp_path: Path) -> None:
    model, x = built(case), images(case, 1)
    save_weights(model, tmp_path / "weights.safetensors")
    again = NETWORKS[case.name](**case.options, num_classes=7)
    nn.init.zeros_(list(again.parameters())[-2])
    load_weights(again, tmp_path / "weights.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


@each
def test_no_count_is_below_one(case: Case) -> None:
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        NETWORKS[case.name](num_classes=0)
    with pytest.raises(ValueError, match="in_channels must be at least 1, got -1"):
        NETWORKS[case.name](in_channels=-1)


@each
def test_grey_images_are_read_by_one_channel(case: Case) -> None:
    model = NETWORKS[case.name](**case.options | {"in_channels": 1}).eval()
    with torch.no_grad():
        assert model(images(case)[:, :1]).isfinite().all()
