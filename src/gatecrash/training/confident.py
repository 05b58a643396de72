"""The confident classifier: trained beside a GAN whose images it must not be sure of (Lee et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy

from gatecrash.encoder import Encoder, evaluating
from gatecrash.fitting import Batch, Outcome, seeded, several
from gatecrash.fitting.checkpoint import optimiser_tensors, restore_optimiser
from gatecrash.networks import load_weights, save_weights
from gatecrash.networks.registry import at_least_one
from gatecrash.objective import single
from gatecrash.training.losses import divergence_from_uniform

NOISE = 100
"""Dimensions of the noise that an image is made from."""

FILE = "generator.safetensors"
"""Where a model bundle has the generator that was trained beside its network."""

LAST = "9.weight"
"""The generator's last convolution, whose shape tells width and channels."""


class Generator(nn.Sequential):
    """Noise (B, NOISE, 1, 1) → images (B, C, 32, 32) in [0, 1], as in the authors' release."""

    def __init__(self, channels: int = 3, width: int = 128) -> None:
        super().__init__(
            *up(NOISE, 4 * width, 4, 1, 0),
            *up(4 * width, 2 * width),
            *up(2 * width, width),
            nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False),
            nn.Sigmoid(),
        )
        self.apply(begin)


class Discriminator(nn.Sequential):
    """Images (B, C, 32, 32) → one logit each, (B, 1, 1, 1): above 0 where they look real."""

    def __init__(self, channels: int = 3, width: int = 128) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            *down(width, 2 * width),
            *down(2 * width, 4 * width),
            nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False),
        )
        self.apply(begin)


def up(inputs: int, outputs: int, kernel: int = 4, stride: int = 2, padding: int = 1) -> list[nn.Module]:
    """A transposed convolution with batch norm and ReLU."""
    return [
        nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def down(inputs: int, outputs: int) -> list[nn.Module]:
    """A strided convolution with batch norm and leaky ReLU."""
    return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]


def begin(module: nn.Module) -> None:
    """The weights a DCGAN begins with: normal, of deviation 0.02, around 0, or 1 for a batch norm."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


class ConfidentClassifier:
    """Cross-entropy on inliers, and β·KL(uniform ‖ softmax) on images that a GAN makes while the classifier learns.

    In every step the discriminator learns to tell real from made images; the generator to fool it and, by β·KL, to make
    images that the classifier is not sure of; then the classifier. The generator sees the classifier in eval mode.

    Args:
        encoder: the network being trained, with its normalisation: what the generator sees.
        channels: of the images, which are 32×32.
        weight: β; the paper has 1, and 0.1 for CIFAR-10.
        lr: of the GAN's Adam, whose first momentum is 0.5.
        width: of the GAN's narrowest layer; the release has 128.
        seed: determines the GAN's first weights; without one they come from torch's global generator. Several
            processes need one, the same for all.
    """

    def __init__(
        self,
        encoder: Encoder,
        channels: int = 3,
        *,
        weight: float = 1.0,
        lr: float = 2e-4,
        width: int = 128,
        seed: int | None = None,
    ) -> None:
        if not weight >= 0:
            raise ValueError(f"weight must not be negative, got {weight:g}")
        self.encoder, self.weight = encoder, weight
        self.settings: dict[str, object] = {"weight": weight, "lr": lr, "width": width}
        with nullcontext() if seed is None else seeded(seed):
            self.generator = Generator(channels, width)
            self.discriminator = Discriminator(channels, width)
        self.adams = {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.999)),
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(0.5, 0.999)),
        }

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Both parts of the GAN learn, where the network is."""
        self.generator.to(self.encoder.device).train()
        self.discriminator.to(self.encoder.device).train()

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """One step of discriminator and generator, and the classifier's loss."""
        if tuple(batch.x.shape[2:]) != (32, 32):
            raise ValueError(f"the GAN makes images of 32×32, the training images have {tuple(batch.x.shape[2:])}")
        made = self.generator(noise_like(batch)).to(batch.x)
        real, fake = self.discriminator(batch.x), self.discriminator(made.detach())
        telling = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        descend(self.adams["discriminator"], telling, list(self.discriminator.parameters()))
        judged = self.discriminator(made)
        unsure = divergence_from_uniform(single(self.encoder(made))).mean()
        fooling = bce(judged, torch.ones_like(judged)) + self.weight * unsure
        descend(self.adams["generator"], fooling, list(self.generator.parameters()))
        with torch.no_grad():
            new = self.generator(noise_like(batch)).to(batch.x)
        logits = single(model(torch.cat([batch.x, new])))
        inside, outside = logits[: len(batch.x)], logits[len(batch.x) :]
        loss = cross_entropy(inside, batch.y) + self.weight * divergence_from_uniform(outside).mean()
        facts = {
            "accuracy": (inside.argmax(dim=1) == batch.y).float().mean(),
            "discriminator loss": telling.detach(),
            "generator loss": fooling.detach(),
        }
        return Outcome(loss, facts)

    def state(self) -> dict[str, Tensor]:
        """The GAN and what its optimisers remember."""
        tensors: dict[str, Tensor] = {}
        for name, part in (("generator", self.generator), ("discriminator", self.discriminator)):
            tensors |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
            tensors |= {f"{name} adam.{key}": t for key, t in optimiser_tensors(self.adams[name]).items()}
        return tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        for name, part in (("generator", self.generator), ("discriminator", self.discriminator)):
            part.to(self.encoder.device).load_state_dict(under(state, f"{name}."))
            restore_optimiser(self.adams[name], under(state, f"{name} adam."))


def gan_samples(
    made_by: ConfidentClassifier | Generator, count: int, *, seed: int = 0, batch_size: int = 256
) -> Tensor:
    """Images (count, C, 32, 32) in [0, 1] that a trained generator makes, where it is; the seed determines them.

    Its batch norms go by what they learnt, so that an image does not depend on those beside it.
    """
    at_least_one(count=count, batch_size=batch_size)
    generator = made_by.generator if isinstance(made_by, ConfidentClassifier) else made_by
    weight = next(generator.parameters())
    noise = torch.randn(count, NOISE, 1, 1, generator=torch.Generator().manual_seed(seed)).to(weight)
    with torch.no_grad(), evaluating(generator):
        return torch.cat([generator(part) for part in noise.split(batch_size)])


def save_generator(generator: Generator, folder: str | Path) -> None:
    """Write a generator's weights beside a network's."""
    save_weights(generator, Path(folder) / FILE)


def load_generator(folder: str | Path) -> Generator:
    """The generator in a model bundle of the method `confident`, in eval mode.

    Raises:
        ValueError: the file is missing, damaged, or no generator's.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}; a bundle of the method `confident` does")
    try:
        with safe_open(path, framework="pt") as file:
            width, channels = file.get_slice(LAST).get_shape()[:2]
    except SafetensorError as error:
        raise ValueError(f"{path} holds no generator, or is damaged: {error}") from error
    with torch.device("meta"):
        empty = Generator(channels, width)
    return load_weights(empty.to_empty(device="cpu"), path).eval()


def noise_like(batch: Batch) -> Tensor:
    """Noise for as many images as a batch has."""
    return torch.randn(len(batch.x), NOISE, 1, 1, generator=batch.generator).to(batch.x)


def descend(optimiser: torch.optim.Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """One step on some parameters alone; where there are several processes, on the mean of their gradients."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        if several():
            torch.distributed.all_reduce(gradient)
            gradient = gradient / torch.distributed.get_world_size()
        parameter.grad = gradient
    optimiser.step()
    optimiser.zero_grad()


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
