"""The work of a triage: detectors fitted, every set of images scored once, features purified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatecrash.attacks import bim, fgsm, purify
from gatecrash.audit.job import encoders_of, labelled
from gatecrash.audit.work import Payload, Work
from gatecrash.ball import Linf
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, fit_all
from gatecrash.detectors.scoring import score_batches
from gatecrash.encoder import Head
from gatecrash.features import reader_key
from gatecrash.networks.clip import ClipImages
from gatecrash.objective import single
from gatecrash.progress import progress
from gatecrash.triage.job import TriageJob
from gatecrash.triage.plan import Adversary

INLIERS, HELD_OUT = "inliers", "held_out"

CACHED = 1024
"""Features that a CPU purifies together; a GPU takes all."""

FAR = 1e9
"""Features that move so far fly away: the step is too long for the score. The ball keeps them from overflowing."""


@dataclass(frozen=True)
class Purified:
    """What the classifier says of purified features."""

    repeat: int
    detector: str
    step: float
    pull: float
    predictions: dict[str, Tensor]
    """By set, (N,): the test images', and the validation images' where there are some."""


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    predictions: dict[str, Tensor]
    """By set, (N,): the classes that the classifier gives; adversarial sets by their title."""
    scores: dict[tuple[int, str, str], Tensor]
    """By repeat, detector and set, (N,); of a detector without a seed those of the first repeat alone."""
    purified: list[Purified]


def measure(job: TriageJob, work: Work) -> Findings:
    """Fit, score, attack the classifier and score again, purify; what was saved before is not done again."""
    sets = scored_sets(job)
    pieces = list(adversarial_pieces(job))
    grid = list(purifications(job))
    with progress("triage", job.repeats + len(sets) + len(pieces) + len(grid)) as bar:
        work.bar = bar
        repeats = [fit(job, work, number) for number in range(job.repeats)]
        payloads = {
            name: [work.done(f"clean | {name}", partial(score_set, job, repeats, images))]
            for name, images in sets.items()
        }
        for adversary, rows in pieces:
            key = f"{adversary.title} {adversary.plan.norm} | {rows.start}"
            payload = work.done(key, partial(score_adversarial, job, repeats, adversary, rows))
            payloads.setdefault(adversary.title, []).append(payload)
        features = FeaturesOf(job)
        purified = [
            Purified(number, title, step, pull, work.done(f"purify | {number} | {title} | {step} | {pull}", compute))
            for number, title, step, pull in grid
            for compute in [partial(purified_predictions, job, features, repeats[number][title], step, pull)]
        ]
        work.bar = None
    return Findings(
        predictions={name: joined(parts, "predictions") for name, parts in payloads.items()},
        scores={
            (number, title, name): joined(parts, score_key(number, title))
            for name, parts in payloads.items()
            for title in job.detectors
            for number in job.repeats_of(title)
        },
        purified=purified,
    )


def rehearse(job: TriageJob) -> None:
    """Pass a few images through everything that the job names, before anything is written.

    Raises:
        ValueError: in one line, a network that is no classifier, labels that are missing, images that do not fit, a
            layer that cannot be purified.
    """
    if isinstance(job.encoder.model, ClipImages):
        raise ValueError("a triage needs a classifier, and a CLIP gives embeddings of images, not logits of classes")
    for name, images in ((INLIERS, job.inliers), (HELD_OUT, job.held_out)):
        if images is not None and images.y is None:
            raise ValueError(f"{name} must have labels, and {images.name} has none")
    shape = tuple(job.inliers.x.shape[1:])
    for name, images in job.sets.items():
        if tuple(images.x.shape[1:]) != shape:
            raise ValueError(
                f"{name} has images of shape {tuple(images.x.shape[1:])}, the inliers have {shape}; "
                "model.channels and model.size make them alike"
            )
    few = job.inliers.x[:2].to(job.device)
    with torch.no_grad():
        logits = single(job.encoder(few))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"the network must give logits of shape (N, classes), got {tuple(logits.shape)}")
    if not bool(logits.isfinite().all()):
        raise ValueError("the network's output has NaN or infinity; are its weights finite?")
    for name, images in labelled_sets(job).items():
        if images.y is not None and not 0 <= int(images.y.min()) <= int(images.y.max()) < logits.shape[1]:
            raise ValueError(
                f"{name}: labels must be from 0 to {logits.shape[1] - 1}, the network's classes, got "
                f"{int(images.y.min())} to {int(images.y.max())}"
            )
    for title, detector in job.detectors.items():
        if detector.card.fit == "labelled inliers" and job.fit is not None and job.fit.y is None:
            raise ValueError(f"{title} needs labelled inliers to fit on, and {job.fit.name} has no labels")
        if job.fit is None:
            detector.require_fitted()
    for title in job.purified:
        head_of(job, title, job.detectors[title], few, logits)


def labelled_sets(job: TriageJob) -> dict[str, ImageSet]:
    """The sets whose labels are classes of the network."""
    learnt = any(detector.card.fit == "labelled inliers" for detector in job.detectors.values())
    sets = {INLIERS: job.inliers, HELD_OUT: job.held_out, "fit": job.fit if learnt else None}
    return {name: images for name, images in sets.items() if images is not None}


def scored_sets(job: TriageJob) -> dict[str, ImageSet]:
    """The sets that are scored as they are."""
    held_out = {} if job.held_out is None else {HELD_OUT: job.held_out}
    return {INLIERS: job.inliers, **held_out, **job.outliers}


def adversarial_pieces(job: TriageJob) -> Iterator[tuple[Adversary, range]]:
    """Every attack on every chunk of the test images."""
    for adversary in job.adversaries:
        for first in range(0, len(job.inliers), job.batch_size):
            yield adversary, range(first, min(first + job.batch_size, len(job.inliers)))


def purifications(job: TriageJob) -> Iterator[tuple[int, str, float, float]]:
    """Every repeat, detector, learning rate and pull of the grid; a detector without a seed is not repeated."""
    if job.purify is not None:
        for title in job.purified:
            for number, step, pull in product(job.repeats_of(title), job.purify.step, job.purify.pull):
                yield number, title, step, pull


def fit(job: TriageJob, work: Work, number: int) -> dict[str, Detector]:
    """The detectors that are new in a repeat, fitted in one pass; their features are remembered for the next."""
    detectors = job.repeat(number)
    unfitted = {}
    for title, detector in detectors.items():
        if not detector.to_fit() or job.fit is None:
            continue
        saved = saved_detector(detector, work.path(f"fitted | {number} | {title}"))
        if saved is None:
            unfitted[title] = detector
        else:
            detectors[title] = saved
    if unfitted and job.fit is not None:
        held_out, outliers = (None if part is None else labelled(part) for part in (job.held_out, job.fit_outliers))
        fit_all(
            list(unfitted.values()),
            labelled(job.fit),
            held_out=held_out,
            outliers=outliers,
            cache=work.folder / "features" if job.repeats > 1 else None,
        )
        for title, detector in unfitted.items():
            detector.save(work.path(f"fitted | {number} | {title}"))
    if number == 0:
        job.detectors.update(detectors)
    if work.bar is not None:
        work.bar.advance(note="fitting")
    return detectors


def saved_detector(detector: Detector, path: Path) -> Detector | None:
    """What a detector was once fitted to; None where that was not saved, or is damaged."""
    try:
        return type(detector).load(path, encoders_of(detector)) if path.is_file() else None
    except ValueError:
        return None


def score_key(number: int, title: str) -> str:
    """Where a payload has the scores of a detector in a repeat."""
    return f"scores.{number}.{title}"


def score_set(job: TriageJob, repeats: list[dict[str, Detector]], images: ImageSet, seed: int) -> Payload:
    """Every detector's scores of a set, and the classes that the classifier gives."""
    return all_scores(job, repeats, images.x)


def score_adversarial(
    job: TriageJob, repeats: list[dict[str, Detector]], adversary: Adversary, rows: range, seed: int
) -> Payload:
    """One chunk of test images attacked, and scored by every detector."""
    x = job.inliers.x[rows.start : rows.stop].to(job.device)
    if job.inliers.y is None:
        raise ValueError("the inliers have no labels")
    y = job.inliers.y[rows.start : rows.stop].to(job.device)
    plan = adversary.plan
    if plan.name == "fgsm":
        found = fgsm(job.encoder, x, y, adversary.ball, generator=seed)
    else:
        found = bim(job.encoder, x, y, adversary.ball, steps=plan.steps, step=plan.step, keep="last", generator=seed)
    return all_scores(job, repeats, found.x)


def all_scores(job: TriageJob, repeats: list[dict[str, Detector]], x: Tensor) -> Payload:
    """Predictions and scores of images, from one pass.

    Raises:
        ValueError: a score or a logit is NaN.
    """
    named = {score_key(number, title): d for number, part in enumerate(repeats) for title, d in part.items()}
    parts: dict[str, list[Tensor]] = {}
    for scores, latents in score_batches(list(named.values()), x, job.batch_size, also=[job.encoder]):
        logits = single(latents[0])
        if bool(logits.isnan().any()):
            raise ValueError("the network's output has NaN; are its weights finite?")
        for key, part in zip([*named, "predictions"], [*scores, logits.argmax(dim=1)], strict=True):
            parts.setdefault(key, []).append(part)
    return {key: torch.cat(found) for key, found in parts.items()}


class FeaturesOf:
    """The features that purification starts from, computed once for every point of the grid and every repeat."""

    def __init__(self, job: TriageJob) -> None:
        sets = {INLIERS: job.inliers, HELD_OUT: job.held_out}
        self.sets = {name: images for name, images in sets.items() if images is not None}
        self.batch_size = job.batch_size
        self.known: dict[Any, dict[str, Tensor]] = {}

    def __call__(self, detector: Detector) -> dict[str, Tensor]:
        """The features (N, D) that a detector judges, of the test and the validation images."""
        key = reader_key(detector.reader)
        if key not in self.known:
            self.known[key] = {
                name: single(detector.latents(images.x, self.batch_size)[0]) for name, images in self.sets.items()
            }
        return self.known[key]


def purified_predictions(
    job: TriageJob, features: FeaturesOf, detector: Detector, step: float, pull: float, seed: int
) -> Payload:
    """The classes of test and validation images after their features were moved to where they are likelier.

    Features that fly away, as they do where the step is too long, are of no class: −1.
    """
    if job.purify is None or detector.encoder is None or detector.encoder.head is None:
        raise ValueError(f"{detector.name} cannot purify")
    head, payload = detector.encoder.head, {}
    for name, z in features(detector).items():
        found = purify(
            detector.judge,
            z,
            step=step,
            pull=pull,
            steps=job.purify.steps,
            ball=Linf(FAR, box=None),
            keep="last",
            batch_size=None if job.device.type == "cuda" else CACHED,
        )
        with torch.no_grad():
            classes = logits_of(head, found.x).argmax(dim=1)
        payload[name] = classes.masked_fill((found.x - z).abs().amax(dim=1) > FAR / 2, -1)
    return payload


def head_of(job: TriageJob, title: str, detector: Detector, few: Tensor, logits: Tensor) -> Head:
    """The linear layer that makes logits of the features that a detector judges.

    Raises:
        ValueError: the detector does not judge one vector per image, or the layer is not the last but one.
    """
    advice = "purification needs a detector of the features in front of the last linear layer"
    if detector.encoder is None or detector.reader is not detector.encoder or isinstance(detector.encoder.layer, tuple):
        raise ValueError(f"{title} does not judge one vector of features per image; {advice}")
    head = detector.encoder.head
    with torch.no_grad():
        features = single(detector.encoder(few))
        if head is None or features.ndim != 2 or features.shape[1] != head.weight.shape[1]:
            raise ValueError(f"{title} judges {detector.encoder.layer or 'the output'}; {advice}")
        same = torch.allclose(logits_of(head, features), logits, rtol=1e-3, atol=1e-3)
    if not same:
        what = detector.encoder.layer or "the output"
        raise ValueError(f"{title} judges {what}, which is not what the last linear layer reads; {advice}")
    return head


def logits_of(head: Head, features: Tensor) -> Tensor:
    """What the last linear layer makes of features, (N, classes)."""
    return linear(features, head.weight.to(features), None if head.bias is None else head.bias.to(features))


def joined(parts: list[Payload], name: str) -> Tensor:
    """One entry of consecutive payloads."""
    return torch.cat([part[name] for part in parts])
