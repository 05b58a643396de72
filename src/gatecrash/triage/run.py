"""The work of a triage: detectors fitted, every set of images scored once, features purified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatecrash.attacks import bim, fgsm, purify
from gatecrash.audit.job import encoders_of, labelled
from gatecrash.audit.work import Payload, Work
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, fit_all, scores_all
from gatecrash.encoder import Head
from gatecrash.objective import single
from gatecrash.progress import progress
from gatecrash.triage.job import Adversary, TriageJob

INLIERS, HELD_OUT = "inliers", "held_out"


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
    """By repeat, detector and set, (N,)."""
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
        purified = [
            Purified(
                number, title, step, pull, work.done(key, partial(purified_predictions, job, detector, step, pull))
            )
            for number, title, step, pull in grid
            for detector in [repeats[number][title]]
            for key in [f"purify | {number} | {title} | {step} | {pull}"]
        ]
        work.bar = None
    return Findings(
        predictions={name: joined(parts, "predictions") for name, parts in payloads.items()},
        scores={
            (number, title, name): joined(parts, score_key(repeats, number, title))
            for name, parts in payloads.items()
            for number in range(job.repeats)
            for title in job.detectors
        },
        purified=purified,
    )


def rehearse(job: TriageJob) -> None:
    """Pass a few images through everything that the job names, before anything is written.

    Raises:
        ValueError: in one line, labels that are missing, images that do not fit, a layer that cannot be purified.
    """
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
    if job.inliers.y is not None and int(job.inliers.y.max()) >= logits.shape[1]:
        raise ValueError(f"a label is {int(job.inliers.y.max())}, but the network has {logits.shape[1]} classes")
    for title, detector in job.detectors.items():
        if detector.card.fit == "labelled inliers" and job.fit is not None and job.fit.y is None:
            raise ValueError(f"{title} needs labelled inliers to fit on, and {job.fit.name} has no labels")
        if job.fit is None:
            detector.require_fitted()
    for title in job.purified:
        head_of(job, title, job.detectors[title], few, logits)


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
        for number, title in product(range(job.repeats), job.purified):
            if number == 0 or job.repeat(number)[title] is not job.detectors[title]:
                for step, pull in product(job.purify.step, job.purify.pull):
                    yield number, title, step, pull


def fit(job: TriageJob, work: Work, number: int) -> dict[str, Detector]:
    """The detectors of one repeat, fitted in one pass; their features are remembered for the next."""
    detectors = job.repeat(number)
    unfitted = {}
    for title, detector in detectors.items():
        shared = number > 0 and detector is job.detectors[title]
        if shared or not detector.to_fit() or job.fit is None:
            continue
        path = work.path(f"fitted | {number} | {title}")
        if path.is_file():
            detectors[title] = type(detector).load(path, encoders_of(detector))
        else:
            unfitted[title] = detector
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


def score_key(repeats: list[dict[str, Detector]], number: int, title: str) -> str:
    """Where a payload has the scores of a detector in a repeat: those of the first, where they share it."""
    same = repeats[number][title] is repeats[0][title]
    return f"scores.{0 if same else number}.{title}"


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
    """Predictions and scores of images, from one pass."""
    named = {score_key(repeats, n, title): d for n, part in enumerate(repeats) for title, d in part.items()}
    payload = dict(zip(named, scores_all(list(named.values()), x, job.batch_size), strict=True))
    with torch.no_grad():
        parts = [single(job.encoder(part.to(job.device))).argmax(dim=1) for part in x.split(job.batch_size)]
    return payload | {"predictions": torch.cat(parts)}


def purified_predictions(job: TriageJob, detector: Detector, step: float, pull: float, seed: int) -> Payload:
    """The classes of test and validation images after their features were moved to where they are likelier."""
    if job.purify is None or detector.encoder is None or detector.encoder.head is None:
        raise ValueError(f"{detector.name} cannot purify")
    head, payload = detector.encoder.head, {}
    for name, images in scored_sets(job).items():
        if name in (INLIERS, HELD_OUT):
            features = single(detector.latents(images.x, job.batch_size)[0])
            found = purify(
                detector.judge, features, step=step, pull=pull, steps=job.purify.steps, keep="last", batch_size=1024
            )
            with torch.no_grad():
                payload[name] = logits_of(head, found.x).argmax(dim=1)
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
        raise ValueError(f"{detector.encoder.layer} is not what the last linear layer reads; {advice}")
    return head


def logits_of(head: Head, features: Tensor) -> Tensor:
    """What the last linear layer makes of features, (N, classes)."""
    return linear(features, head.weight.to(features), None if head.bias is None else head.bias.to(features))


def joined(parts: list[Payload], name: str) -> Tensor:
    """One entry of consecutive payloads."""
    return torch.cat([part[name] for part in parts])
