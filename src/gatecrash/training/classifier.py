"""A classifier trained on labelled images with plain cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import LambdaLR

from gatecrash.encoder import Encoder, channels
from gatecrash.fitting import seeded
from gatecrash.images import check_images, check_labels
from gatecrash.networks.registry import at_least_one
from gatecrash.objective import single
from gatecrash.progress import tracked

M = TypeVar("M", bound=nn.Module)

_WARM_UP = 0.2
"""The share of the steps in which the learning rate rises; in the others it falls along a cosine."""


def train_classifier(
    model: M,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    seed: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batch_size: int = 64,
    lr: float = 3e-3,
    shift: int = 2,
    flip: bool = True,
    device: torch.device | str | None = None,
) -> M:
    """`model`, trained from the weights it has; it comes back in eval mode and on the device it was on.

    AdamW on the cross-entropy. On one CPU with one number of threads, the seed and the weights before determine the
    weights after, bit for bit, and no global random state changes. The weights before depend on a seed alone when the
    model is built inside `with seeded(seed):`.

    Args:
        model: images (N, C, H, W) → logits (N, K); its parameters are changed in place.
        images: (N, C, H, W) in [0, 1].
        labels: (N,), whole numbers from 0 to K − 1.
        epochs: how often every image is seen.
        seed: determines order, augmentation and dropout.
        mean: per channel, subtracted from the images; None leaves them.
        std: per channel, divides the images; None leaves them.
        batch_size: at most so many images a step; the batches of an epoch differ by at most one image in size.
        lr: the largest learning rate.
        shift: every image is moved by up to so many pixels in each direction, black coming in.
        flip: every image is mirrored left to right or not, at random.
        device: where to train; None is where the model is.

    Raises:
        ValueError: the images are no images, the labels do not fit them or the model, an option is out of range, or
            the loss is not finite.
    """
    check_images(images)
    check_labels(labels, len(images))
    at_least_one(epochs=epochs, batch_size=batch_size)
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive, got {lr:g}")
    if shift < 0:
        raise ValueError(f"shift must not be negative, got {shift}")
    home, dtype = _home_of(model)
    _check_outputs(Encoder(model, mean=mean, std=std), images[:1].to(home), labels)

    place = home if device is None else torch.device(device)
    count = math.ceil(len(images) / batch_size)
    generator = Generator().manual_seed(seed)
    prepare = partial(_prepared, mean=mean, std=std, shift=shift, flip=flip, generator=generator)
    batches = (
        (prepare(images[rows].to(place)).to(dtype), labels[rows].to(place).long())
        for _ in range(epochs)
        for rows in torch.randperm(len(images), generator=generator).tensor_split(count)
    )
    try:
        with seeded(seed, place), torch.enable_grad():
            _descend(model.to(place).train(), batches, epochs * count, lr)
    finally:
        model.to(home).eval()
    return model


def _descend(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], steps: int, lr: float) -> None:
    """One step of AdamW per batch; no gradient is left behind."""
    optimiser = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)
    schedule = LambdaLR(optimiser, partial(_rate, steps=steps))
    for step, (x, y) in enumerate(tracked(batches, "training", steps)):
        loss = cross_entropy(model(x), y)
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss is {loss.item()} after {step} of {steps} steps; a smaller lr may help")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    optimiser.zero_grad()


def _rate(step: int, steps: int) -> float:
    """The learning rate at a step, as a share of the largest."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step + 1 - warm_up) / (steps + 1 - warm_up))) / 2


def _prepared(
    x: Tensor,
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    shift: int,
    flip: bool,
    generator: Generator,
) -> Tensor:
    """The images moved, mirrored and normalised."""
    x = shifted(x, torch.randint(2 * shift + 1, (len(x), 2), generator=generator) - shift)
    if flip:
        mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
        x = torch.where(mirrored.to(x.device), x.flip(3), x)
    centre, scale = channels(mean, "mean"), channels(std, "std")
    if centre is not None:
        x = x - centre.to(x)
    return x if scale is None else x / scale.to(x)


def shifted(x: Tensor, offsets: Tensor) -> Tensor:
    """Every image moved down and to the right by its own two offsets (N, 2), black coming in."""
    margin = int(offsets.abs().max())
    if margin == 0:
        return x
    images = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    down, right = (margin - offsets).to(x.device).unbind(1)
    rows = down.view(-1, 1, 1) + torch.arange(x.shape[2], device=x.device).view(1, -1, 1)
    columns = right.view(-1, 1, 1) + torch.arange(x.shape[3], device=x.device).view(1, 1, -1)
    return pad(x, [margin] * 4)[images, :, rows, columns].permute(0, 3, 1, 2)


def _home_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the model is and in which precision."""
    parameter = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameter that could be trained")
    return parameter.device, parameter.dtype


def _check_outputs(encoder: Encoder, image: Tensor, labels: Tensor) -> None:
    """Raises a ValueError unless the network gives a logit for every label."""
    with torch.no_grad():
        outputs = single(encoder(image)).shape[1]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= outputs:
        raise ValueError(
            f"labels must be from 0 to {outputs - 1}, as the model has {outputs} outputs; got {low} to {high}"
        )
