"""The main job: every detector scored, attacked and scored again, piece by piece, into a bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gatecrash.attacks import admit, attack_softmax, collide, evict, worst_case
from gatecrash.attacks.classifier import stepper_for
from gatecrash.attacks.latent import latents
from gatecrash.attacks.softmax import PIXEL
from gatecrash.audit.job import Job, Showcase, encoders_of, labelled
from gatecrash.audit.plan import AttackPlan
from gatecrash.audit.work import Payload, Work
from gatecrash.ball import distance
from gatecrash.bundle import Pictures
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector, fit_all
from gatecrash.detectors.base import NotANumberError
from gatecrash.encoder import Encoder
from gatecrash.found import Found
from gatecrash.progress import progress
from gatecrash.protocols import Encoder as EncoderLike
from gatecrash.protocols import as_vectors

SHOWN = 3
"""Collisions per attack and set of outliers that the report shows."""


Clean = dict[tuple[str, str], Tensor]
"""Scores of images as they are, by detector and set; "inliers" is a set's name too."""


@dataclass(frozen=True)
class Piece:
    """One attack on one chunk of one set, by all detectors at once or by one of them."""

    attack: AttackPlan
    side: str
    set_name: str
    rows: range
    detector: str | None

    @property
    def key(self) -> str:
        """What the piece is called among the saved ones."""
        who = "all detectors" if self.detector is None else self.detector
        return f"{attack_key(self.attack)} | {who} | {self.side} | {self.set_name} | {self.rows.start}"


def attack_key(attack: AttackPlan) -> str:
    """What tells one attack of a plan from another."""
    return f"{attack.title} {attack.ball.norm} {attack.ball.eps}"


@dataclass(frozen=True)
class Outcome:
    """The scores and distances of one attack on one set, for one eps, in the order of the images."""

    scores: Tensor
    l2: Tensor
    linf: Tensor
    steps: Tensor
    evaluations: Tensor
    mape: Tensor | None
    target_index: Tensor | None
    target_distance: Tensor | None


@dataclass(frozen=True)
class Measured:
    """All that was measured: clean scores, outcomes of attacks, pictures."""

    clean: Clean
    attacked: dict[tuple[str, str, str, int], Outcome]
    """By detector, attack key, set and rung."""
    pictures: list[Pictures]


INLIERS = "inliers"

OTHERS = 200
"""Images of the other side among which `worst_case` looks for latents to collide with."""


def measure(job: Job, work: Work) -> Measured:
    """Fit, score, attack and score again; what was saved before is not done again."""
    sets = {INLIERS: job.inliers, **job.outliers}
    pieces = list(pieces_of(job))
    total = len(job.detectors) * (1 + len(sets)) + len(pieces) + len(job.showcases)
    with progress("auditing", total) as bar:
        work.bar = bar
        fit(job, work)
        clean = {
            (title, name): work.done(f"clean | {title} | {name}", partial(clean_scores, job, title, images))["scores"]
            for title in job.detectors
            for name, images in sets.items()
        }
        payloads = [(piece, work.done(piece.key, partial(run_piece, job, piece, clean))) for piece in pieces]
        pictures = [pictures_of(job, piece, payload) for piece, payload in payloads if "shown.found" in payload]
        for showcase in job.showcases:
            payload = work.done(f"picture | {showcase.plan.title}", partial(run_showcase, job, showcase))
            pictures.insert(0, showcase_pictures(showcase, payload))
        work.bar = None
    return Measured(clean, outcomes_of(job, payloads), pictures)


def rehearse(job: Job) -> None:
    """Pass a few images through everything that the job names, before anything is written.

    Raises:
        ValueError: in one line, a layer that does not exist, images that do not fit, labels that are missing, NaN.
    """
    encoders = [] if job.encoder is None else [job.encoder]
    encoders += [encoder_for(job, a.target) for a in job.attacks if a.name == "collide" and a.reads_network]
    encoders += [encoder_for(job, showcase.plan.of) for showcase in job.showcases]
    shape = tuple(job.inliers.x.shape[1:])
    for name, images in job.sets.items():
        if tuple(images.x.shape[1:]) != shape:
            raise ValueError(
                f"{name} has images of shape {tuple(images.x.shape[1:])}, the inliers have {shape}; "
                "model.channels and model.size make them alike"
            )
        for encoder in encoders:
            latents(encoder, images.x[:2].to(job.device), None)
    for title, detector in job.detectors.items():
        if detector.card.fit == "labelled inliers" and job.fit is not None and job.fit.y is None:
            raise ValueError(f"{title} needs labelled inliers to fit on, and {job.fit.name} has no labels")


def clean_scores(job: Job, title: str, images: ImageSet, seed: int) -> Payload:
    """The scores of one detector on one set as it is."""
    return {"scores": job.detectors[title].scores(images.x, job.batch_size)}


def fit(job: Job, work: Work) -> None:
    """Fit the detectors that need it in one pass, or read their fitted state where that was saved."""
    unfitted = {}
    for title, detector in job.detectors.items():
        path = work.path(f"fitted | {title}")
        if detector.card.fit == "nothing" and detector.fitted:
            continue
        if path.is_file():
            job.detectors[title] = type(detector).load(path, encoders_of(detector))
        else:
            unfitted[title] = detector
    if unfitted and job.fit is not None:
        held_out, outliers = (None if part is None else labelled(part) for part in (job.held_out, job.fit_outliers))
        fit_all(list(unfitted.values()), labelled(job.fit), held_out=held_out, outliers=outliers)
        for title, detector in unfitted.items():
            detector.save(work.path(f"fitted | {title}"))
    if work.bar is not None:
        work.bar.advance(len(job.detectors), note="fitting")


def pieces_of(job: Job) -> Iterator[Piece]:
    """Every piece of attack work, in the order in which it is done."""
    for attack in job.attacks:
        for who in [None] if attack.reads_network else list(job.detectors):
            for side in attack.sides:
                names = (
                    [INLIERS]
                    if side == "in"
                    else [n for n in job.outliers if attack.start is None or n in attack.start]
                )
                for name in names:
                    count = len(job.inliers if side == "in" else job.outliers[name])
                    for first in range(0, count, job.batch_size):
                        yield Piece(attack, side, name, range(first, min(first + job.batch_size, count)), who)


def run_piece(job: Job, piece: Piece, clean: Clean, seed: int) -> Payload:
    """One chunk attacked, and what was found scored again in float32 by every detector it is meant for."""
    images = job.inliers if piece.side == "in" else job.outliers[piece.set_name]
    start = images.x[piece.rows.start : piece.rows.stop].to(job.device)
    rows = torch.tensor(piece.rows) % len(job.inliers)
    payload: Payload = {}
    if piece.attack.name == "collide":
        target = job.inliers.x[rows].to(job.device)
        found = run_collision(job, piece, start, target, seed)
        payload["target_index"] = rows
        payload["target_distance"] = distance(start, target, piece.attack.ball.norm)
        if piece.rows.start == 0 and piece.detector is None:
            payload |= shown(encoder_for(job, piece.attack.target), found, target)
    else:
        found = run_score_attack(job, piece, start, clean, seed)
    judges = job.detectors if piece.detector is None else {piece.detector: job.detectors[piece.detector]}
    for number, rung in enumerate(found.rungs):
        payload[f"{number}.l2"], payload[f"{number}.linf"] = rung.distance("l2"), rung.distance("linf")
        payload[f"{number}.steps"], payload[f"{number}.evaluations"] = rung.steps, rung.evaluations
        if rung.mape is not None:
            payload[f"{number}.mape"] = rung.mape
        for title, detector in judges.items():
            payload[f"{number}.scores.{title}"] = scores_after(piece, title, detector, rung.x, job.batch_size)
    return payload


def scores_after(piece: Piece, title: str, detector: Detector, x: Tensor, batch_size: int) -> Tensor:
    """The scores of attacked images.

    Raises:
        ValueError: one is NaN, which none was before the attack; it names detector, attack and set.
    """
    try:
        return detector.scores(x, batch_size)
    except NotANumberError:
        what = f"{piece.attack.title} on {piece.set_name}"
        raise ValueError(f"the score of {title} becomes NaN under {what}, and before it is a number") from None


def run_collision(job: Job, piece: Piece, start: Tensor, target: Tensor, seed: int) -> Found:
    """The collision that a piece asks for."""
    attack = piece.attack
    encoder: EncoderLike = (
        encoder_for(job, attack.target) if piece.detector is None else job.detectors[piece.detector].encode
    )
    return collide(
        encoder,
        start,
        target,
        attack.ball.ball(),
        steps=attack.steps,
        step=attack.step,
        schedule=attack.schedule or "cosine",
        restarts=attack.restarts,
        generator=seed,
        eight_bit=attack.eight_bit,
    )


def run_score_attack(job: Job, piece: Piece, start: Tensor, clean: Clean, seed: int) -> Found:
    """The attack on a score or on the softmax that a piece asks for."""
    attack, ball = piece.attack, piece.attack.ball.ball()
    if piece.detector is None:
        return attack_softmax(
            job.output,
            start,
            ball,
            side="in" if piece.side == "in" else "out",
            steps=attack.steps,
            step=attack.step or PIXEL,
            restarts=attack.restarts,
            generator=seed,
            eight_bit=attack.eight_bit,
        )
    if attack.name == "worst_case":
        return worst_case(
            job.detectors[piece.detector],
            start,
            ball,
            "in" if piece.side == "in" else "out",
            attack.budget or "standard",
            others=other_side(job, piece).to(job.device),
            stop=crossing(job, piece, clean) if attack.until == "crossed" else None,
            generator=seed,
            eight_bit=attack.eight_bit,
        )
    push = evict if piece.side == "in" else admit
    stepper = None if attack.step is None else stepper_for(ball, attack.step)
    return push(
        job.detectors[piece.detector],
        start,
        ball,
        steps=attack.steps,
        stepper=stepper,
        restarts=attack.restarts,
        generator=seed,
        eight_bit=attack.eight_bit,
    )


def crossing(job: Job, piece: Piece, clean: Clean) -> float:
    """The score beyond which an image has passed every clean one of the other side."""
    if piece.detector is None:
        raise ValueError(f"{piece.attack.title} attacks no detector's score")
    if piece.side == "out":
        return float(clean[piece.detector, INLIERS].min())
    return max(float(clean[piece.detector, name].max()) for name in job.outliers)


def other_side(job: Job, piece: Piece) -> Tensor:
    """Up to `OTHERS` images of the side that the attacked ones are to be taken for."""
    if piece.side == "out":
        return job.inliers.x[:OTHERS]
    each = -(-OTHERS // len(job.outliers))
    return torch.cat([images.x[:each] for images in job.outliers.values()])


def encoder_for(job: Job, target: str | list[str]) -> Encoder:
    """What a collision matches: the logits, the model's layer, or layers by name."""
    if target == "logits":
        return job.output
    if target == "features":
        if job.features is None:
            raise ValueError("of: features needs model.layer, the layer that holds them; or say of: logits")
        return job.features
    return job.output.at(target)


def shown(encoder: Encoder, found: Found, target: Tensor) -> Payload:
    """The first few collisions with their latents."""
    few = slice(0, SHOWN)
    images = {"target": target[few], "start": found.start[few], "found": found.x[few]}
    with torch.no_grad():
        latents = {f"z_{name}": as_vectors(encoder(x)) for name, x in images.items()}
    mape = {} if found.mape is None else {"mape": found.mape[few]}
    return {f"shown.{name}": tensor for name, tensor in {**images, **latents, **mape}.items()}


def run_showcase(job: Job, showcase: Showcase, seed: int) -> Payload:
    """One image collided with a few inliers."""
    encoder = encoder_for(job, showcase.plan.of)
    target = showcase.targets.x.to(job.device)
    ball, steps = showcase.plan.ball.ball(), showcase.plan.steps
    found = collide(encoder, showcase.start.x[:1].to(job.device), target, ball, steps=steps, generator=seed)
    payload = shown(encoder, found, target)
    return {name.removeprefix("shown."): tensor for name, tensor in payload.items()}


def pictures_of(job: Job, piece: Piece, payload: Payload) -> Pictures:
    """The collisions of one piece as the report shows them."""
    parts = {name.removeprefix("shown."): tensor for name, tensor in payload.items() if name.startswith("shown.")}
    ball = piece.attack.ball.ball()
    title = f"{piece.set_name} → {job.inliers.name}, {piece.attack.title}"
    return pictures_from(title, piece.attack.title, ball.norm, ball.eps, parts, class_names(job.inliers))


def showcase_pictures(showcase: Showcase, payload: Payload) -> Pictures:
    """The collisions of a showcase as the report shows them."""
    ball = showcase.plan.ball.ball()
    return pictures_from(showcase.plan.title, "collide", ball.norm, ball.eps, payload, class_names(showcase.targets))


def pictures_from(title: str, attack: str, norm: str, eps: float, parts: Payload, names: list[str]) -> Pictures:
    """A group of pictures from its tensors."""
    return Pictures(
        title=title,
        attack=attack,
        norm=norm,
        eps=eps,
        **{name: tensor for name, tensor in parts.items() if name != "mape"},
        mape=parts["mape"].tolist() if "mape" in parts else [],
        distance=distance(parts["found"], parts["start"], norm).tolist(),
        target_distance=distance(parts["target"], parts["start"], norm).tolist(),
        names=names[: len(parts["target"])],
    )


def class_names(images: ImageSet) -> list[str]:
    """The name of every image's class, where classes have names."""
    if images.y is None or images.classes is None:
        return []
    return [images.classes[label] for label in images.y.tolist()]


def outcomes_of(job: Job, payloads: list[tuple[Piece, Payload]]) -> dict[tuple[str, str, str, int], Outcome]:
    """The saved chunks of every attack put together again."""
    groups: dict[tuple[str, str, str, int], list[dict[str, Tensor]]] = {}
    for piece, payload in payloads:
        for number in range(len(piece.attack.ball.ball().ladder)):
            prefix = f"{number}."
            facts = {name.removeprefix(prefix): t for name, t in payload.items() if name.startswith(prefix)}
            facts |= {name: payload[name] for name in ("target_index", "target_distance") if name in payload}
            for title in job.detectors if piece.detector is None else [piece.detector]:
                key = (title, attack_key(piece.attack), piece.set_name, number)
                groups.setdefault(key, []).append(facts | {"scores": facts[f"scores.{title}"]})
    return {key: joined(chunks) for key, chunks in groups.items()}


def joined(chunks: list[dict[str, Tensor]]) -> Outcome:
    """Consecutive chunks as one outcome."""

    def whole(name: str) -> Tensor:
        return torch.cat([chunk[name] for chunk in chunks])

    def optional(name: str) -> Tensor | None:
        return whole(name) if name in chunks[0] else None

    return Outcome(
        scores=whole("scores"),
        l2=whole("l2"),
        linf=whole("linf"),
        steps=whole("steps"),
        evaluations=whole("evaluations"),
        mape=optional("mape"),
        target_index=optional("target_index"),
        target_distance=optional("target_distance"),
    )
