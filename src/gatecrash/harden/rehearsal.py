"""A few images passed through all that hardening does, so that a mistake costs no training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from gatecrash.data import ImageSet
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, generator_of, seeded, several
from gatecrash.harden.evaluate import evaluated
from gatecrash.harden.plan import MethodPlan
from gatecrash.harden.run import HardenJob, made_step, material_of, recipe_of
from gatecrash.objective import single
from gatecrash.training.prepared import WITHOUT_AUXILIARY, Prepared

FEW = 4


def rehearse(job: HardenJob) -> None:
    """Try the network, one step of every method, and the table, before anything is written.

    Raises:
        ValueError: in one line, whatever does not fit.
    """
    encoder = job.network()
    try:
        check_network(encoder, job)
        for method in job.plan.methods:
            rehearse_method(job, method)
        rehearse_table(job, encoder)
    except RuntimeError as error:  # whatever the network's own layers object to
        model = encoder.model
        advice = f"; {WITHOUT_AUXILIARY}" if getattr(model, "aux_logits", False) else ""
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(model).__name__} fails on the training images: {reason}{advice}") from error


def rehearse_table(job: HardenJob, encoder: Encoder) -> None:
    """The table at the end, of a few images."""
    features = None if job.about.layer is None else encoder.at(job.about.layer)
    outliers = {name: first(images, FEW) for name, images in job.test_outliers.items()}
    evaluated(
        "",
        encoder,
        features,
        job.plan.evaluation,
        job.train,
        first(job.test, FEW),
        outliers,
        job.plan.seed,
        exposed=job.outliers,
        folder=job.folder,
    )


def check_network(encoder: Encoder, job: HardenJob) -> None:
    """Raises a ValueError when the network's output is no logits, or fewer than there are labels."""
    with torch.no_grad():
        logits = single(encoder(job.train.x[:2].to(job.device)))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"the network must give logits of shape (N, classes), got {tuple(logits.shape)}")
    if not bool(logits.isfinite().all()):
        raise ValueError("the network's output has NaN or infinity; are its weights finite?")
    for name, images in (("data.train", job.train), ("data.test", job.test)):
        if images.y is not None and not 0 <= int(images.y.min()) <= int(images.y.max()) < logits.shape[1]:
            raise ValueError(
                f"{name}: labels must be from 0 to {logits.shape[1] - 1}, the network's classes, got "
                f"{int(images.y.min())} to {int(images.y.max())}"
            )


def rehearse_method(job: HardenJob, method: MethodPlan) -> None:
    """One step of a method on a fresh network, on as few images as its smallest batch has, or fewer."""
    encoder, material, recipe = job.network(), material_of(job, method), recipe_of(job)
    batches = -(-len(material.x) // recipe.batch_size)
    count = min(FEW, len(material.x) // batches)
    random = generator_of(recipe.seed, "rehearsal")
    x, y = material.x[:count].to(job.device), material.y[:count].to(job.device)
    beside = None if material.outliers is None else material.outliers[:count].to(job.device)
    if material.augment is not None:
        x = material.augment(x, random)
    step = made_step(job, method, encoder)
    step.begin_epoch(0, recipe.epochs)
    with seeded(recipe.seed, job.device):
        model = Prepared(encoder).train()
        outcome = step(model, Batch(x, y, torch.arange(count), beside, 0, recipe.epochs, random))
    if several():
        refuse_unused(encoder.model, outcome.loss, method.title)


def refuse_unused(model: nn.Module, loss: Tensor, title: str) -> None:
    """Raises a ValueError when a parameter has no part in the loss: several processes wait for every gradient."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
    unused = [name for name, gradient in zip(learning, gradients, strict=True) if gradient is None]
    if unused:
        others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ValueError(
            f"{title} trains no {unused[0]}{others}, which the output does not depend on, and several processes need a "
            "gradient of every parameter: set its requires_grad to False, or train in one process"
        )


def first(images: ImageSet, count: int) -> ImageSet:
    """The first few images of a set."""
    return replace(images, x=images.x[:count], y=None if images.y is None else images.y[:count])
