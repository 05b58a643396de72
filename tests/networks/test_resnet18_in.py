from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from gatecrash.encoder import Encoder
from gatecrash.networks import resnet18_in
from gatecrash.objective import single


def test_its_parameters_are_those_of_torchvisions_with_batch_norms() -> None:
    with torch.device("meta"):
        model, usual = resnet18_in(num_classes=1000), resnet18()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in usual.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == 11_689_512


def test_every_norm_is_an_instance_norm_without_running_statistics() -> None:
    with torch.device("meta"):
        model = resnet18_in()
    norms = [module for module in model.modules() if isinstance(module, nn.InstanceNorm2d)]
    assert len(norms) == 20
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert not list(model.buffers())


def test_without_affine_norms_only_convolutions_and_the_last_layer_have_parameters() -> None:
    with torch.device("meta"):
        with_scale, without = resnet18_in(), resnet18_in(affine=False)
    # 20 norms: one in front, four per stage, one per projection.
    channels = 64 + 4 * (64 + 128 + 256 + 512) + (128 + 256 + 512)
    difference = sum(p.numel() for p in with_scale.parameters()) - sum(p.numel() for p in without.parameters())
    assert difference == 2 * channels


def test_taps_have_the_shapes_of_the_paper() -> None:
    layers = ["conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    with torch.device("meta"):
        taps = Encoder(resnet18_in(), layers, pool=None)(torch.zeros(1, 3, 224, 224))
    assert [tuple(tap.shape[1:]) for tap in taps] == [
        *((64, 112, 112), (64, 56, 56), (64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7), (512, 1, 1), (2,))
    ]


def test_images_do_not_see_each_other_in_training_either() -> None:
    model, x = resnet18_in().train(), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(logits, torch.cat([model(one[None]) for one in x]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, model.eval()(x), rtol=1e-4, atol=1e-4)


def test_the_contrast_of_an_image_is_normalised_away() -> None:
    model, x = resnet18_in().eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(5 * x), model(x), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(resnet18(num_classes=2).eval()(5 * x), resnet18(num_classes=2).eval()(x), atol=0.1)


def test_the_smallest_side_is_33() -> None:
    encoder = Encoder(resnet18_in(), "avgpool")
    assert single(encoder(torch.rand(1, 3, 33, 33))).shape == (1, 512)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        encoder(torch.rand(1, 3, 32, 32))


def test_a_first_convolution_for_other_channels_starts_like_the_others() -> None:
    first = resnet18_in(in_channels=1).get_submodule("conv1").get_parameter("weight")
    assert first.shape == (64, 1, 7, 7)
    assert first.std().item() == pytest.approx((2 / (49 * 64)) ** 0.5, rel=0.1)
