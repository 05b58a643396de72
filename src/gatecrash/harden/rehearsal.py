"""A few images passed through all that hardening does, so that a mistake costs no training."""

from __future__ import annotations

from dataclasses import replace

import torch

from gatecrash.data import ImageSet
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, generator_of, seeded
from gatecrash.harden.evaluate import evaluated
from gatecrash.harden.plan import MethodPlan
from gatecrash.harden.run import HardenJob, made_step, material_of, recipe_of
from gatecrash.objective import single
from gatecrash.training.prepared import Prepared

FEW = 4


def rehearse(job: HardenJob) -> None:
    """Try the network, one step of every method, and the table, before anything is written.

    Raises:
        ValueError: in one line, whatever does not fit.
    """
    encoder = job.network()
    check_network(encoder, job)
    for method in job.plan.methods:
        rehearse_method(job, method)
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
        step(Prepared(encoder).train(), Batch(x, y, torch.arange(count), beside, 0, recipe.epochs, random))


def first(images: ImageSet, count: int) -> ImageSet:
    """The first few images of a set."""
    return replace(images, x=images.x[:count], y=None if images.y is None else images.y[:count])
