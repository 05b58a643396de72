from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gatecrash.encoder import Encoder
from gatecrash.networks import NETWORKS, VGG13
from gatecrash.objective import single


def test_the_parameter_count_is_that_of_the_layers() -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in VGG13().parameters())
    pairs = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    convolutions = sum(9 * c * d + d for c, d in [*pairs, (512, 512), (512, 512)])
    # Torchvision's VGG13 has the same convolutions.
    assert convolutions == 9_404_992
    assert count == convolutions + 2 * (512 * 512 + 512) + (512 * 10 + 10) == 9_935_434


def test_taps_have_a_half_to_a_thirty_second_of_the_side() -> None:
    layers = ["features.4", "features.9", "features.14", "features.19", "features", "avgpool", "classifier.5"]
    with torch.device("meta"):
        taps = Encoder(VGG13(), layers, pool=None)(torch.zeros(1, 3, 32, 32))
    assert [tuple(tap.shape[1:]) for tap in taps] == [
        *((64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1), (512, 1, 1), (512,))
    ]


def test_the_names_are_those_of_the_release() -> None:
    with torch.device("meta"):
        names = list(VGG13().state_dict())
    places = [f"features.{i}" for i in (0, 2, 5, 7, 10, 12, 15, 17, 20, 22)] + [f"classifier.{i}" for i in (0, 3, 6)]
    assert names == [f"{place}.{part}" for place in places for part in ("weight", "bias")]


def test_at_32_pixels_the_classifier_module_reads_the_last_map_as_it_is() -> None:
    model, x = VGG13().eval(), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        latent = model.features(x).flatten(1)
        torch.testing.assert_close(single(Encoder(model, "avgpool")(x)), latent)
        torch.testing.assert_close(model(x), model.classifier(latent))


def test_larger_images_are_read_and_smaller_ones_refused() -> None:
    encoder = Encoder(VGG13(), "avgpool")
    assert single(encoder(torch.rand(1, 3, 64, 40))).shape == (1, 512)
    with pytest.raises(ValueError, match=r"VGG13 does not take images of shape \(3, 31, 31\)"):
        encoder(torch.rand(1, 3, 31, 31))


def test_dropout_acts_in_the_classifier_module_in_training_only() -> None:
    model, z = VGG13(dropout=0.25), torch.rand(64, 512)
    nn.init.ones_(model.classifier.get_submodule("3").get_parameter("bias"))
    seen: list[Tensor] = []
    model.classifier[6].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model.train().classifier(z)
    model.eval().classifier(z)
    assert (seen[0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert bool((seen[1] > 0).all())


def test_it_starts_as_the_release_does() -> None:
    model = VGG13()
    assert model.features[22].weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.02)
    assert model.classifier[3].weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_a_dropout_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        NETWORKS["vgg13"](dropout=1)
