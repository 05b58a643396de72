"""Fitting: one pass over the data for however many detectors, each latent kept once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gatecrash.features import Cache, Keeper, Reader, all_or_none, encoded, labels_of, reader_key, shared_pass
from gatecrash.images import Images
from gatecrash.protocols import Latent

if TYPE_CHECKING:
    from gatecrash.detectors.base import Detector


class Learner(Protocol):
    """How a detector learns batch by batch, where the latents of all inliers would be too many to keep."""

    def take(self, z: Latent, y: Tensor | None, /) -> None:
        """Learn from one batch."""
        ...

    def finish(self) -> None:
        """Leave what was learnt in the detector's buffers."""
        ...


def fit_all(
    detectors: Sequence[Detector],
    inliers: Images,
    *,
    held_out: Images | None = None,
    outliers: Images | None = None,
    cache: str | Path | None = None,
    batch_size: int = 256,
) -> None:
    """Fit several detectors in one pass over the inliers: every network runs once, every feature is kept once.

    Args:
        detectors: any; those that need no fitting are left alone.
        inliers: a DataLoader, an iterable of batches or tensors; with labels where a card asks for them.
        held_out: further inliers, for detectors with an option that needs them.
        outliers: known outliers, likewise.
        cache: a folder that remembers features by the hash of the weights, the data and the taps.
        batch_size: images that are encoded together, where `inliers` is not batched already.

    Raises:
        ValueError: data that a detector needs is missing, or the network's output is NaN; it names the first batch.
    """
    learning = list({id(part): part for detector in detectors for part in detector.to_fit()}.values())
    for detector in learning:
        detector.check_data(held_out, outliers)
    for detector in [*learning, *(whole for whole in detectors if whole.to_fit())]:
        detector.forget()
        detector.threshold = None
    # Buffers made in inference mode could not be part of a gradient later.
    with torch.inference_mode(False), torch.no_grad():
        for device in dict.fromkeys(detector.device for detector in learning):
            group = [detector for detector in learning if detector.device == device]
            learn(group, inliers, device, None if cache is None else Cache(cache, inliers), batch_size)
    with torch.inference_mode(False):
        for detector in learning:
            detector.settle(held_out, outliers)


class Reading:
    """One way of reading the inliers, and the detectors that learn from what is read."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.keeping: list[Detector] = []
        self.learners: list[Learner] = []
        self.keeper = Keeper()
        self.known: Latent | None = None

    def add(self, detector: Detector) -> None:
        """One more detector that learns from this."""
        learner = detector.learner()
        if learner is None:
            self.keeping.append(detector)
        else:
            self.learners.append(learner)

    def recall(self, cache: Cache, device: torch.device) -> None:
        """Take the latents from the cache where they are all that is wanted."""
        if not self.learners:
            self.known = cache.read(self.reader, device)

    def take(self, z: Latent, y: Tensor | None) -> None:
        """One more batch."""
        for learner in self.learners:
            learner.take(z, y)
        if self.keeping:
            self.keeper.take(z)

    def finish(self, y: Tensor | None, cache: Cache | None) -> None:
        """Let the detectors learn what needs all latents together."""
        for learner in self.learners:
            learner.finish()
        if self.keeping and self.known is None:
            self.known = self.keeper.whole()
            if cache is not None:
                cache.write(self.reader, self.known)
        if self.known is not None:
            for detector in self.keeping:
                detector.fit_latents(self.known, y)
        self.known = None


def learn(
    detectors: Sequence[Detector], inliers: Images, device: torch.device, cache: Cache | None, batch_size: int
) -> None:
    """One pass over the inliers for detectors of one device."""
    readings: dict[Any, Reading] = {}
    for detector in detectors:
        reader = detector.fit_reader
        readings.setdefault(reader_key(reader), Reading(reader)).add(detector)
    if cache is not None:
        for reading in readings.values():
            reading.recall(cache, device)
    unread = [reading for reading in readings.values() if reading.known is None]
    if unread:
        labels: list[Tensor | None] = []
        run = shared_pass([reading.reader for reading in unread])
        for latents, y in encoded(run, inliers, device, batch_size):
            labels.append(y)
            for reading, z in zip(unread, latents, strict=True):
                reading.take(z, y)
        if not labels:
            raise ValueError("there are no images to learn from")
        known_labels = all_or_none(labels)
    else:
        known_labels = labels_of(inliers, device)
    for detector in detectors:
        if known_labels is None and detector.card.fit == "labelled inliers":
            raise ValueError(
                f"{type(detector).__name__}.fit needs labels: give (images, labels), or a loader of such pairs"
            )
    for reading in readings.values():
        reading.finish(known_labels, cache)
