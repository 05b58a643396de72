"""Fitting: one pass over the data for however many detectors, each latent kept once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gatecrash.features import (
    Cache,
    Column,
    Fingerprint,
    Reader,
    all_or_none,
    encoded,
    leaf_keys,
    like,
    reader_key,
    shared_pass,
)
from gatecrash.images import Images, check_batch_size
from gatecrash.protocols import Latent, leaves

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
        ValueError: data that a detector needs is missing, the network's output is NaN (it names the first batch), or
            an argument is no such thing.
    """
    check_detectors(detectors)
    check_batch_size(batch_size)
    remembered = None if cache is None else Cache(cache, inliers)
    learning = list({id(part): part for detector in detectors for part in detector.to_fit()}.values())
    # What can be read only once is kept, since every detector and every option under trial reads it.
    held_out, outliers = (list(data) if isinstance(data, Iterator) else data for data in (held_out, outliers))
    for detector in learning:
        detector.check_data(held_out, outliers)
    if remembered is not None:
        remembered.make()
    for detector in learning:
        detector.forget()
    for detector in [*learning, *(whole for whole in detectors if whole.to_fit())]:
        detector.threshold = None
    # Buffers made in inference mode could not be part of a gradient later.
    with torch.inference_mode(False), torch.no_grad():
        for device in dict.fromkeys(detector.device for detector in learning):
            group = [detector for detector in learning if detector.device == device]
            learn(group, inliers, device, remembered, batch_size)
    with torch.inference_mode(False):
        for detector in learning:
            detector.settle(held_out, outliers)


class Reading:
    """One way of reading the inliers, and the detectors that learn from what is read."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.keeping: list[Detector] = []
        self.learners: list[Learner] = []

    def add(self, detector: Detector) -> None:
        """One more detector that learns from this."""
        learner = detector.learner()
        if learner is None:
            self.keeping.append(detector)
        else:
            self.learners.append(learner)

    def finish(self, z: Latent | None, y: Tensor | None) -> None:
        """Let the detectors learn from all batches, or from all latents and labels together."""
        for learner in self.learners:
            learner.finish()
        if z is not None:
            for detector in self.keeping:
                detector.fit_latents(z, y)


class Shelf:
    """The latents of a pass: a tensor that several readings have in common is kept once."""

    def __init__(self) -> None:
        self.columns: dict[Any, Column] = {}
        self.forms: dict[Reading, Latent] = {}

    def take(self, latents: dict[Reading, Latent]) -> None:
        """One more batch of every reading."""
        new: dict[Any, Tensor] = {}
        for reading, z in latents.items():
            self.forms.setdefault(reading, z)
            new |= dict(zip(leaf_keys(reading.reader, z), leaves(z), strict=True))
        for key, leaf in new.items():
            self.columns.setdefault(key, Column()).take(leaf)

    def whole(self, reading: Reading) -> Latent | None:
        """All latents of a reading; None where none were taken."""
        if reading not in self.forms:
            return None
        form = self.forms[reading]
        return like(form, iter([self.columns[key].whole() for key in leaf_keys(reading.reader, form)]))


def learn(
    detectors: Sequence[Detector], inliers: Images, device: torch.device, cache: Cache | None, batch_size: int
) -> None:
    """One pass over the inliers for detectors of one device."""
    readings: dict[Any, Reading] = {}
    for detector in detectors:
        reader = detector.fit_reader
        readings.setdefault(reader_key(reader), Reading(reader)).add(detector)
    unread = [reading for reading in readings.values() if not recalled(reading, cache, device)]
    if not unread:
        return
    labels: list[Tensor | None] = []
    shelf = Shelf()
    seen = Fingerprint()
    run = shared_pass([reading.reader for reading in unread])
    source = inliers if cache is None else seen.watch(inliers, batch_size)
    for latents, y in encoded(run, source, device, batch_size):
        require_labels(detectors, y)
        labels.append(None if y is None else y.clone())
        read = dict(zip(unread, latents, strict=True))
        for reading, z in read.items():
            for learner in reading.learners:
                learner.take(z, y)
        shelf.take({reading: z for reading, z in read.items() if reading.keeping})
    if not labels:
        raise ValueError("there are no images to learn from")
    y = all_or_none(labels)
    for reading in unread:
        whole = shelf.whole(reading)
        if cache is not None and whole is not None:
            cache.write(reading.reader, whole, seen)
        reading.finish(whole, y)


def recalled(reading: Reading, cache: Cache | None, device: torch.device) -> bool:
    """Let the detectors learn from the cache, with the labels of the pass that found it; False where it is empty."""
    if cache is None or reading.learners:
        return False
    z = cache.read(reading.reader, device)
    if z is None:
        return False
    y = cache.known.labels
    require_labels(reading.keeping, y)
    reading.finish(z, None if y is None else y.to(device))
    return True


def check_detectors(detectors: object) -> None:
    """Raises a ValueError unless these are several detectors."""
    from gatecrash.detectors.base import Detector

    if isinstance(detectors, Detector):
        raise ValueError(f"detectors must be a list of them, got one {type(detectors).__name__}; put it in brackets")
    if not isinstance(detectors, Sequence) or isinstance(detectors, str):
        raise ValueError(f"detectors must be a list of them, got {type(detectors).__name__}")
    for detector in detectors:
        if not isinstance(detector, Detector):
            raise ValueError(f"detectors must be a list of them, and one of it is a {type(detector).__name__}")


def require_labels(detectors: Sequence[Detector], y: Tensor | None) -> None:
    """Raises a ValueError when a detector needs labels and there are none."""
    for detector in detectors:
        if y is None and detector.card.fit == "labelled inliers":
            raise ValueError(
                f"{type(detector).__name__}.fit needs labels: give (images, labels), or a loader of such pairs"
            )
