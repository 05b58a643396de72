"""Collisions on the real CIFAR-10 networks; skipped without the shared data."""

import pytest
import torch
from torch import Tensor

from gatecrash import L2, Encoder, collide
from gatecrash.detectors import MSP
from gatecrash.metrics import auroc
from shared_data import Classifier, cifar10_test, densenet_bc, resnet20

EPS = 10.0


def noise_like(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("network", [resnet20, densenet_bc], ids=["resnet20", "densenet_bc"])
def test_noise_collides_with_cifar_images_and_the_softmax_cannot_tell(network: type[Classifier]) -> None:
    classifier = network()
    encoder = Encoder(classifier.model, mean=classifier.mean, std=classifier.std)
    images, _ = cifar10_test(32)
    noise, detector = noise_like(images), MSP(encoder)
    assert auroc(detector.scores(images, 32), detector.scores(noise, 32)) >= 0.9
    found = collide(encoder, noise, images, L2(EPS), steps=100)
    assert found.mape is not None and float(found.mape.median()) <= 0.02
    assert abs(auroc(detector.scores(images, 32), detector.scores(found.x, 32)) - 0.5) <= 0.03
    assert (noise - images).flatten(1).norm(dim=1).min() >= 1.5 * EPS
    assert found.distance("l2").max() <= EPS + 1e-6
